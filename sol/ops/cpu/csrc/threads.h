// A team of threads, of one model or of several that step in turn, and the way a step is walked by all of them at once.
//
// A step is a sequence of phases, a phase a number of chunks. Every thread walks the same phases; inside one it claims
// chunks, first from its own range, then from the others'. A phase is over when all its chunks are done, not when all
// threads have come by: a thread that the system has taken off its core and that holds no chunk delays nobody. It finds
// the phases it missed used up and catches up with the others.
//
// Threads spin for a short time where they wait, so that a phase costs well under a microsecond, and sleep after that,
// so that a busy machine gets its cores back.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace sol {

// A 32-bit word that can be waited on. Waiters spin on it themselves; this is for when they give up.
class SleepWord {
   public:
    std::atomic<uint32_t> value{0};

    void sleep_while(uint32_t seen);  // may return early
    void wake_all();                  // after a change of value; cheap if nobody sleeps

   private:
    std::atomic<int32_t> sleepers_{0};
#if !defined(__linux__)
    std::mutex mutex_;
    std::condition_variable condition_;
#endif
};

class ThreadPool {
   public:
    // `cores`: null, or the core of each thread; the first is the caller's.
    ThreadPool(int num_threads, const int32_t* cores);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // Starts the threads; an empty string, or why it did not work.
    std::string start();

    // One step on all threads, the caller among them. Returns when no thread is inside the step any more. `walk` is what
    // each thread does: a function of the thread's Walker that goes through the same phases on all of them, whatever
    // `context` says.
    using Walk = void (*)(void* context, class Walker& walker);
    void run(Walk walk, void* context);

    int num_threads() const { return num_threads_; }

    // Seconds that the caller's thread has waited for others since the last call.
    double take_wait_seconds();

   private:
    friend class Walker;

    // Chunks claimed in a thread's own range: phase << CHUNK_BITS | next chunk. A count of an older phase
    // stands for zero, so nothing has to be reset between phases.
    struct alignas(64) Claims {
        std::atomic<uint64_t> value{0};
    };
    struct alignas(64) Gate {
        std::atomic<uint64_t> value{0};  // step << 16 | OPEN | workers inside
    };
    static constexpr uint64_t OPEN = 1u << 15;
    static constexpr int CHUNK_BITS = 22;  // the rest counts phases: years of them

    void work(int thread);
    bool enter(uint64_t& last_step);

    const int num_threads_;
    const int process_;  // a forked child has none of its parent's threads
    std::vector<int32_t> cores_;
    std::vector<std::thread> workers_;
    std::unique_ptr<Claims[]> claims_;
    Gate gate_;
    alignas(64) SleepWord done_;   // chunks done since the pool was made, modulo 2^32
    alignas(64) SleepWord steps_;  // steps begun: what idle workers sleep on
    std::atomic<bool> stopping_{false};
    uint64_t first_phase_ = 1;  // of the step in progress
    uint32_t first_target_ = 0;
    double wait_seconds_ = 0;
    Walk walk_ = nullptr;  // of the step in progress: written before its gate opens, read by those who come in
    void* context_ = nullptr;
};

// One thread's way through a step.
class Walker {
   public:
    int thread() const { return thread_; }
    int num_threads() const { return pool_.num_threads_; }

    // Calls body(chunk) for the chunks that this thread claims of [0, num_chunks), and returns when all are done by
    // whoever did them. num_chunks must be the same on all threads, at most MAX_CHUNKS. What one phase wrote, the next
    // can read.
    static constexpr int64_t MAX_CHUNKS = (int64_t{1} << ThreadPool::CHUNK_BITS) - 1;

    template <class Body>
    void phase(int64_t num_chunks, Body&& body) {
        phase_++;
        target_ += (uint32_t)num_chunks;
        uint32_t mine = 0;
        const int n = pool_.num_threads_;
        for (int i = 0; i < n; i++) {
            const int owner = thread_ + i < n ? thread_ + i : thread_ + i - n;
            const int64_t begin = num_chunks * owner / n, count = num_chunks * (owner + 1) / n - begin;
            for (int64_t chunk; (chunk = claim(owner, count)) >= 0; mine++) body(begin + chunk);
        }
        finish(mine);
    }

   private:
    friend class ThreadPool;
    Walker(ThreadPool& pool, int thread)
        : pool_(pool), thread_(thread), phase_(pool.first_phase_ - 1), target_(pool.first_target_) {}

    int64_t claim(int owner, int64_t count) {
        std::atomic<uint64_t>& claims = pool_.claims_[owner].value;
        constexpr int bits = ThreadPool::CHUNK_BITS;
        uint64_t seen = claims.load(std::memory_order_relaxed);
        for (;;) {
            if (seen >> bits > phase_) return -1;  // the others are past this phase
            const uint64_t next = seen >> bits == phase_ ? seen & MAX_CHUNKS : 0;
            if ((int64_t)next >= count) return -1;
            // Relaxed: what earlier phases wrote became visible in finish(), through which every thread has come.
            if (claims.compare_exchange_weak(seen, phase_ << bits | (next + 1), std::memory_order_relaxed)) {
                return (int64_t)next;
            }
        }
    }
    void finish(uint32_t mine);

    ThreadPool& pool_;
    const int thread_;
    uint64_t phase_;
    uint32_t target_;
};

}  // namespace sol
