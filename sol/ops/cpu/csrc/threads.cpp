#include "threads.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <system_error>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace sol {

namespace {

using Clock = std::chrono::steady_clock;

// How long a thread spins inside a step before it sleeps. Longer than any wait between threads that all run; short
// against a time slice, which is what a thread that does not run costs.
constexpr auto PHASE_SPIN = std::chrono::microseconds(50);
// How long a worker waits for the next step before it sleeps: more than what an engine does between two steps, so that
// a running stream never pays for waking up.
constexpr auto IDLE_SPIN = std::chrono::microseconds(2000);

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

#if defined(__linux__)
void set_affinity(const cpu_set_t& cores) { pthread_setaffinity_np(pthread_self(), sizeof cores, &cores); }
#endif

void pin_to(int32_t core) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    set_affinity(set);
#else
    (void)core;
#endif
}

}  // namespace

#if defined(__linux__)

void SleepWord::sleep_while(uint32_t seen) {
    sleepers_.fetch_add(1);
    if (value.load() == seen) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1);
}

void SleepWord::wake_all() {
    if (sleepers_.load() > 0) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
}

#else

void SleepWord::sleep_while(uint32_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    if (value.load() == seen) condition_.wait(lock);
    sleepers_.fetch_sub(1);
}

void SleepWord::wake_all() {
    if (sleepers_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);  // a sleeper is before its check of the value, or waits
        condition_.notify_all();
    }
}

#endif

ThreadPool::ThreadPool(int num_threads, const int32_t* cores)
    : num_threads_(num_threads), process_((int)getpid()), claims_(new Claims[(size_t)num_threads]) {
    if (cores != nullptr) cores_.assign(cores, cores + num_threads);
}

std::string ThreadPool::start() {
#if defined(__linux__)
    cpu_set_t allowed;
    if (!cores_.empty() && pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) == 0) {
        for (const int32_t core : cores_) {
            if (core < 0 || core >= CPU_SETSIZE || !CPU_ISSET(core, &allowed)) {
                return "cores: this process may not use core " + std::to_string(core);
            }
        }
    }
#endif
    // Signals are for the threads that the host program knows of.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::string problem;
    try {
        for (int thread = 1; thread < num_threads_; thread++) workers_.emplace_back(&ThreadPool::work, this, thread);
    } catch (const std::system_error& error) {
        problem = "num_threads: thread " + std::to_string(workers_.size() + 1) + " of " +
                  std::to_string(num_threads_) + " could not be started: " + error.what();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return problem;
}

ThreadPool::~ThreadPool() {
    if ((int)getpid() != process_) {  // a forked child: its threads exist in the parent only
        new std::vector<std::thread>(std::move(workers_));
        return;
    }
    stopping_.store(true);
    steps_.value.fetch_add(1);
    steps_.wake_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(Walk walk, void* context) {
#if defined(__linux__)
    cpu_set_t before;
    const bool pinned = !cores_.empty() && pthread_getaffinity_np(pthread_self(), sizeof before, &before) == 0;
    if (pinned) pin_to(cores_[0]);
#endif
    walk_ = walk;
    context_ = context;
    const uint64_t step = (gate_.value.load(std::memory_order_relaxed) >> 16) + 1;
    gate_.value.store(step << 16 | OPEN);
    if (num_threads_ > 1) {
        steps_.value.fetch_add(1);
        steps_.wake_all();
    }
    Walker walker(*this, 0);
    walk_(context_, walker);
    // A worker that is inside may still look at the step's description; those that have not come in stay out.
    gate_.value.fetch_and(~OPEN);
    for (int spins = 0; (gate_.value.load(std::memory_order_acquire) & (OPEN - 1)) != 0; spins++) {
        if (spins < 1000) {
            pause_cpu();
        } else {
            sched_yield();
        }
    }
    first_phase_ = walker.phase_ + 1;
    first_target_ = walker.target_;
#if defined(__linux__)
    if (pinned) set_affinity(before);
#endif
}

void ThreadPool::work(int thread) {
    const std::string name = "sol-cpu-" + std::to_string(thread);
#if defined(__linux__)
    pthread_setname_np(pthread_self(), name.c_str());
#endif
    if (!cores_.empty()) pin_to(cores_[(size_t)thread]);
    uint64_t last_step = 0;
    while (enter(last_step)) {
        Walker walker(*this, thread);
        walk_(context_, walker);
        gate_.value.fetch_sub(1, std::memory_order_release);
    }
}

bool ThreadPool::enter(uint64_t& last_step) {
    auto give_up = Clock::now() + IDLE_SPIN;
    for (int spins = 1;; spins++) {
        const uint32_t begun = steps_.value.load();
        uint64_t gate = gate_.value.load(std::memory_order_relaxed);
        while ((gate & OPEN) != 0 && gate >> 16 != last_step) {
            if (gate_.value.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire,
                                                  std::memory_order_relaxed)) {
                last_step = gate >> 16;
                return true;
            }
        }
        if (stopping_.load(std::memory_order_relaxed)) return false;
        pause_cpu();
        if (spins % 64 != 0) continue;
        sched_yield();  // whoever else wants this core meanwhile, the caller's next step included
        if (Clock::now() > give_up) {
            steps_.sleep_while(begun);
            give_up = Clock::now() + IDLE_SPIN;
        }
    }
}

double ThreadPool::take_wait_seconds() {
    const double seconds = wait_seconds_;
    wait_seconds_ = 0;
    return seconds;
}

void Walker::finish(uint32_t mine) {
    SleepWord& done = pool_.done_;
    const auto reached = [this](uint32_t count) { return (int32_t)(count - target_) >= 0; };
    if (mine != 0 && reached(done.value.fetch_add(mine) + mine)) {
        done.wake_all();
        return;
    }
    if (reached(done.value.load(std::memory_order_acquire))) return;
    const auto begin = Clock::now();
    auto now = begin;
    for (int spins = 1;; spins++) {
        const uint32_t count = done.value.load(std::memory_order_acquire);
        if (reached(count)) break;
        pause_cpu();
        if (spins % 32 != 0) continue;
        now = Clock::now();
        if (now - begin > PHASE_SPIN) done.sleep_while(count);
    }
    if (thread_ == 0) pool_.wait_seconds_ += std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace sol
