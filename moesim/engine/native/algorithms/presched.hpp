// PreScope's plan of a layer and of the prefetches of the next, as `moesim.policies.algorithms.presched` says it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace moesim::algorithms {

using i64 = std::int64_t;

enum class NoneBetter { PRINTED, SENTINEL, EQ2 };

/// What the plan knows about the machine. `cpu` gives the time of one expert with a number of tokens.
template <class Ns> struct Timing {
    Ns cpu;
    i64 load, load_next, gpu, dense, in_flight;

    i64 sum(std::span<const i64> tokens) const {
        i64 found = 0;
        for (i64 w : tokens) found += cpu(w);
        return found;
    }
};

struct CrossLayerPlan {
    i64 first, gap, queued, queued_next;
    double share;
    i64 n_prefetch;
};

/// Count the experts of this layer and of the next that are worth a transfer: always the busiest (equation 4).
template <class Ns>
std::pair<i64, i64> gpu_queue(std::span<const i64> current, std::span<const i64> upcoming, const Timing<Ns> &timing) {
    std::vector<std::pair<i64, bool>> merged;
    for (i64 w : current) merged.emplace_back(w, false);
    for (i64 w : upcoming) merged.emplace_back(w, true);
    std::sort(merged.begin(), merged.end());
    i64 left = i64(current.size()) * timing.load + i64(upcoming.size()) * timing.load_next, computed = timing.dense;
    std::pair<i64, i64> found{0, 0};
    for (auto [tokens, is_next] : merged) {
        computed += timing.cpu(tokens);
        if (timing.in_flight + left + timing.gpu < computed) ++(is_next ? found.second : found.first);
        left -= is_next ? timing.load_next : timing.load;
    }
    return found;
}

/// Find where the loads of this layer begin (equation 5).
template <class Ns> i64 first_load(std::span<const i64> current, i64 n_queued, const Timing<Ns> &timing, NoneBetter none_better) {
    i64 n = current.size(), computed = timing.sum(current.first(n - n_queued));
    for (i64 i = n - n_queued; i < n; ++i) {
        i64 loading = timing.in_flight + (n - i) * timing.load + timing.gpu;
        if (loading < computed) {
            bool all_better = i == 1 && n_queued == n && loading + timing.load < computed;
            return none_better == NoneBetter::EQ2 && all_better ? 0 : i;
        }
        computed += timing.cpu(current[i]);
    }
    if (none_better == NoneBetter::SENTINEL || !n) return n;
    if (none_better == NoneBetter::PRINTED) return n - 1;
    i64 every = timing.sum(current);
    i64 with_one = std::max(timing.in_flight + timing.load + timing.gpu, every - timing.cpu(current[n - 1]));
    return with_one < every ? n - 1 : n;
}

/// Count the experts that the CPU computes whatever is predicted.
template <class Ns> i64 certain_for_cpu(std::span<const i64> current, Timing<Ns> timing, NoneBetter none_better) {
    timing.in_flight = 0;
    i64 n = current.size();
    NoneBetter rule = none_better == NoneBetter::EQ2 ? none_better : NoneBetter::SENTINEL;
    return std::max<i64>(0, std::min(first_load(current, n, timing, rule), n - 1));
}

/// Round the transfers that fit to whole experts (equation 7). `hit_rate` gives the probability that a rank is wanted.
template <class HitRate> i64 prefetch_count(double share, i64 n_upcoming, HitRate hit_rate) {
    double rounded = std::floor(share + 0.5);
    if (rounded <= 0 || !n_upcoming) return 0;
    if (rounded > double(n_upcoming)) return n_upcoming;
    double hit = hit_rate(i64(rounded) - 1);
    return i64(rounded) - (hit * (share - rounded + 1) > (1 - hit) * (rounded - share) ? 0 : 1);
}

/// Plan a layer (Algorithm 1). `load_next` is not 0.
template <class Ns, class HitRate>
CrossLayerPlan cross_layer_plan(std::span<const i64> current, std::span<const i64> upcoming, const Timing<Ns> &timing,
                                HitRate hit_rate, NoneBetter none_better) {
    CrossLayerPlan plan;
    std::tie(plan.queued, plan.queued_next) = gpu_queue(current, upcoming, timing);
    plan.first = first_load(current, plan.queued, timing, none_better);
    i64 computed = timing.sum(current.first(plan.first));
    plan.gap = computed - timing.in_flight - (i64(current.size()) - plan.first) * timing.load;
    plan.share = double(plan.gap + timing.dense) / double(timing.load_next);
    plan.n_prefetch = plan.queued_next ? prefetch_count(plan.share, i64(upcoming.size()), hit_rate) : 0;
    return plan;
}

}  // namespace moesim::algorithms
