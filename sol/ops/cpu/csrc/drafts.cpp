// The part of the C ABI that decides about drafts and learns from them: sol/speculation/plan/arithmetic.py in C++.
// Every sum is in Python's order, so that both give the same numbers and decide alike.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "error.h"
#include "sol_cpu.h"

namespace sol {
namespace {

constexpr double SURVIVAL_CELLS = SOL_SURVIVAL_BINS - 1e-9;
constexpr int64_t CHOOSE_FIELDS = 4, LEARN_FIELDS = 7;

int32_t check(const SolDrafts& drafts, const int64_t* item, int64_t number) {
    if (item[0] < 0 || item[0] >= drafts.num_slots) {
        return fail(SOL_E_ARGUMENT, "items[%lld] has slot %lld; there are %lld", (long long)number, (long long)item[0],
                    (long long)drafts.num_slots);
    }
    if (item[1] < 0 || item[1] >= drafts.num_drafters) {
        return fail(SOL_E_ARGUMENT, "items[%lld] has drafter %lld; there are %lld", (long long)number,
                    (long long)item[1], (long long)drafts.num_drafters);
    }
    const int64_t count = item[2] < 0 ? drafts.counts[item[0]] : item[2];
    if (count < 0 || count > drafts.width) {
        return fail(SOL_E_ARGUMENT, "items[%lld] has %lld drafts; a slot has room for %lld", (long long)number,
                    (long long)count, (long long)drafts.width);
    }
    return SOL_OK;
}

// -1 where a score is not one.
int64_t level_of(double score) {
    if (score < 0) return SOL_SCORE_LEVELS - 1;
    const double level = score * (SOL_SCORE_LEVELS - 2);
    return level <= SOL_SCORE_LEVELS - 2 ? (int64_t)level : -1;
}

double* habit_of(const SolDrafts& drafts, const int64_t* item) {
    return drafts.habits + 2 * (item[0] * drafts.num_drafters + item[1]);
}

int32_t judge(const SolDrafts& drafts, const double* regime, const int64_t* item, double least) {
    const int64_t slot = item[0], start = slot * drafts.width;
    const double* state = drafts.acceptance[item[1]];
    const double* kept = regime + (item[1] * 3 + 2) * SOL_SURVIVAL_BINS;
    const int64_t count = std::min(item[2], 1 + (int64_t)state[SOL_NUM_RIGHT]);
    const double habit = habit_of(drafts, item)[0];
    double survival = 1.0, lowest = 1.0;
    int64_t place = 0;
    for (; place < count; place++) {
        const int64_t level = level_of(drafts.scores[start + place]);
        if (level < 0) return fail(SOL_E_ARGUMENT, "scores has %g; it is a probability", drafts.scores[start + place]);
        const double here = state[SOL_BY_POSITION + std::min<int64_t>(place, SOL_POSITIONS - 1)];
        const double log_odds = drafts.log_odds[level] + state[SOL_BY_SCORE + drafts.bins[level]] + here + habit;
        survival /= 1.0 + std::exp(-log_odds);
        const double worth = survival * kept[(int64_t)(survival * SURVIVAL_CELLS)];
        if (worth < lowest) {
            lowest = worth;
            if (lowest < least) break;
        }
        drafts.predicted[start + place] = survival;
        drafts.expected[start + place] = lowest;
    }
    drafts.counts[slot] = place;
    return SOL_OK;
}

struct Survival {
    double value;
    int64_t item;
};

// Seconds of a step with `more` tokens than its `rows`, without the factor that is common to all.
double seconds(const SolStepCosts& costs, const double* step, int64_t more) {
    int64_t index = (int64_t)step[0] + more;
    double tokens;
    if (index < costs.num_tokens) {
        tokens = costs.per_token[index];
    } else {
        tokens = costs.per_token[costs.num_tokens - 1] * (double)index / (double)(costs.num_tokens - 1);
        index = costs.num_tokens - 1;
    }
    const int64_t knot = costs.knots[index];
    double factor = costs.factors[knot];
    factor += costs.shares[index] * (costs.factors[knot + 1] - factor);
    return (tokens + step[1] + (double)more * step[2]) * factor * step[3];
}

int32_t choose(const SolDrafts& drafts, const SolStepCosts& costs, const double* regime, const int64_t* items,
               int64_t num_items, const double* step, const double* limits, int64_t max_tokens, int64_t max_lengths,
               int64_t* chosen, double* seen) {
    std::vector<Survival> survivals;
    survivals.reserve((size_t)(num_items * drafts.width));
    for (int64_t number = 0; number < num_items; number++) {
        const int64_t* item = items + number * CHOOSE_FIELDS;
        if (const int32_t code = check(drafts, item, number)) return code;
        if (item[2] >= 0) {
            if (const int32_t code = judge(drafts, regime, item, limits[0])) return code;
        }
        const double* expected = drafts.expected + item[0] * drafts.width;
        const int64_t count = std::min(drafts.counts[item[0]], item[3]);
        for (int64_t place = 0; place < count; place++) survivals.push_back({expected[place], number});
    }
    std::fill(chosen, chosen + num_items, 0);
    seen[0] = 0.0;
    seen[1] = (double)survivals.size();
    const int64_t count = std::min((int64_t)survivals.size(), max_tokens);
    if (count < 1) return SOL_OK;
    // Stable: of equal drafts the first come first, so a request's come out from its first one on.
    std::stable_sort(survivals.begin(), survivals.end(),
                     [](const Survival& one, const Survival& other) { return one.value > other.value; });
    const int64_t stride = (count + max_lengths - 1) / max_lengths;
    const double rows = std::max(step[0], 1.0), paid = step[4];
    double emitted = rows, longest = std::max(seconds(costs, step, 0), 0.0);
    double enough = (1.0 + limits[1]) * rows / (longest + paid);
    const double all = paid + step[5];
    std::vector<double> goodputs{emitted / (longest + all)};
    double best = goodputs[0];
    for (int64_t length = 1; length <= count; length++) {
        emitted += survivals[(size_t)length - 1].value;
        if (length % stride) continue;
        longest = std::max(longest, seconds(costs, step, length));
        goodputs.push_back(emitted / (longest + all));
        best = std::max(best, goodputs.back());
    }
    if (best < enough) return SOL_OK;
    enough = std::max(enough, limits[2] * best);
    int64_t length = 0;
    while (goodputs[(size_t)length] < enough) length++;
    length *= stride;
    for (int64_t i = 0; i < length; i++) chosen[survivals[(size_t)i].item]++;
    if (length) seen[0] = survivals[(size_t)length - 1].value;
    return SOL_OK;
}

// `Acceptance.observe`
int32_t observe(const SolDrafts& drafts, double* state, const double* scores, int64_t right, int64_t known,
                double* habit) {
    state[SOL_NUM_RIGHT] += (double)right;
    for (int64_t place = 0; place < known; place++) {
        const int64_t level = level_of(scores[place]);
        if (level < 0) return fail(SOL_E_ARGUMENT, "scores has %g; it is a probability", scores[place]);
        const int64_t cell = drafts.bins[level], position = std::min<int64_t>(place, SOL_POSITIONS - 1);
        double* by_score = state + SOL_BY_SCORE + cell;
        double* by_position = state + SOL_BY_POSITION + position;
        const double log_odds = drafts.log_odds[level] + *by_score + *by_position + habit[0];
        const double expected = 1.0 / (1.0 + std::exp(-log_odds));
        const double came = place < right ? 1.0 : 0.0, surprise = came - expected;
        const double information = std::max(expected * (1.0 - expected), drafts.least_information);
        double total = state[SOL_SCORE_PRECISION + cell] + information;
        state[SOL_SCORE_PRECISION + cell] = std::min(total, drafts.most_bin_precision);
        *by_score += surprise / total;
        total = state[SOL_POSITION_PRECISION + position] + information;
        state[SOL_POSITION_PRECISION + position] = std::min(total, drafts.most_position_precision);
        *by_position += surprise / total;
        total = habit[1] + information;
        habit[1] = std::min(total, drafts.most_request_precision);
        habit[0] += surprise / total;
        if (state[SOL_HAS_CURVE] != 0.0) {
            double* weight = state + SOL_CURVE_WEIGHT + position;
            double* curve = state + SOL_CURVE + position;
            *weight = std::min(*weight + 1.0, drafts.curve_observations);
            *curve += (came - *curve) / *weight;
        }
    }
    return SOL_OK;
}

// `Regime._keep`
void keep(const SolDrafts& drafts, double* regime, int64_t cell) {
    double *predicted = regime + cell, *accepted = predicted + SOL_SURVIVAL_BINS, *kept = accepted + SOL_SURVIVAL_BINS;
    if (*predicted > drafts.most_drafts) {
        *predicted *= 0.5;
        *accepted *= 0.5;
    }
    *kept = std::min((*accepted + drafts.prior_drafts) / (*predicted + drafts.prior_drafts), 1.0);
}

// `Regime.observe_drafts`
void observe_chosen(const SolDrafts& drafts, double* regime, const double* predicted, int64_t count, int64_t right) {
    int64_t before = -1;
    for (int64_t place = 0; place < count; place++) {
        const auto cell = (int64_t)(predicted[place] * SURVIVAL_CELLS);
        regime[cell] += predicted[place];
        if (place < right) regime[SOL_SURVIVAL_BINS + cell] += 1.0;
        if (cell != before && before >= 0) keep(drafts, regime, before);
        before = cell;
    }
    if (before >= 0) keep(drafts, regime, before);
}

// `Regime.observe_unverified`
void observe_first(const SolDrafts& drafts, double* regime, double predicted, bool right) {
    const auto cell = (int64_t)(predicted * SURVIVAL_CELLS);
    regime[cell] += drafts.unverified * predicted;
    regime[SOL_SURVIVAL_BINS + cell] += right ? drafts.unverified : 0.0;
    keep(drafts, regime, cell);
}

int32_t learn(const SolDrafts& drafts, double* regime, const int64_t* items, int64_t num_items, double least,
              double price, double* gains) {
    for (int64_t number = 0; number < num_items; number++) {
        const int64_t* item = items + number * LEARN_FIELDS;
        if (const int32_t code = check(drafts, item, number)) return code;
        if (item[2] >= 0) {
            if (const int32_t code = judge(drafts, regime, item, least)) return code;
        }
        const int64_t start = item[0] * drafts.width, count = drafts.counts[item[0]];
        double gain = 0.0;
        for (int64_t place = 0; place < count && drafts.expected[start + place] > price; place++) {
            gain += drafts.expected[start + place] - price;
        }
        gains[number] = gain;
        if (!item[6]) continue;
        const int64_t right = item[3], known = item[4], verified = item[5];
        if (right < 0 || known < 0 || known > drafts.width || verified < 0) {
            return fail(SOL_E_ARGUMENT, "items[%lld] has %lld of %lld drafts right, %lld verified; a slot has %lld",
                        (long long)number, (long long)right, (long long)known, (long long)verified,
                        (long long)drafts.width);
        }
        double* state = drafts.acceptance[item[1]];
        double* habit = habit_of(drafts, item);
        if (const int32_t code = observe(drafts, state, drafts.scores + start, right, known, habit)) return code;
        double* cells = regime + item[1] * 3 * SOL_SURVIVAL_BINS;
        if (verified) {
            observe_chosen(drafts, cells, drafts.predicted + start, std::min(verified, count), right);
        } else if (known && count) {
            observe_first(drafts, cells, drafts.predicted[start], right > 0);
        }
    }
    return SOL_OK;
}

}  // namespace
}  // namespace sol

int32_t sol_choose_drafts(const SolDrafts* drafts, const SolStepCosts* costs, const double* regime,
                          const int64_t* items, int64_t num_items, const double step[6], const double limits[3],
                          int64_t max_tokens, int64_t max_lengths, int64_t* chosen, double seen[2]) {
    if (max_lengths < 1 || num_items < 0 || step[0] < 0) {
        return sol::fail(SOL_E_ARGUMENT, "num_items is %lld, max_lengths %lld, rows %g", (long long)num_items,
                         (long long)max_lengths, step[0]);
    }
    try {
        return sol::choose(*drafts, *costs, regime, items, num_items, step, limits, max_tokens, max_lengths, chosen,
                           seen);
    } catch (const std::bad_alloc&) {
        return sol::fail(SOL_E_MEMORY, "no memory for the drafts of %lld requests", (long long)num_items);
    }
}

int32_t sol_learn_drafts(const SolDrafts* drafts, double* regime, const int64_t* items, int64_t num_items,
                         double least, double price, double* gains) {
    return sol::learn(*drafts, regime, items, num_items, least, price, gains);
}
