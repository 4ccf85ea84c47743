// HybriMoE's choice of what to prefetch, as `moesim.policies.algorithms.impact` says it.
#pragma once

#include "queues.hpp"

namespace moesim::algorithms {

/// What is predicted of a later layer: rows of the experts that are cached, and of the others with their ids.
struct Ahead {
    i64 layer;
    std::vector<i64> cached;
    std::vector<std::pair<i64, i64>> missing;  // rows, and the expert's number, negative
};

/// The planned end of a layer, from the rows of its cached experts and of the others, both ascending.
template <class Ns>
i64 queue_makespan(const std::vector<i64> &cached, const std::vector<i64> &missing, const Timings<Ns> &costs, const Reading &reading) {
    Split split;
    int n = 0;
    for (i64 rows : cached) split.cached.push_back({rows, n++});
    for (i64 rows : missing) split.missing.push_back({rows, n++});
    split.arrival.resize(n);
    Plan plan = queue_plan(std::move(split), costs, 0, 0, reading);
    return std::max(plan.gpu_total, plan.cpu_total);
}

/// A later layer while experts are chosen for it. `Makespan` is asked as `queue_makespan`.
template <class Makespan> struct LaterLayer {
    Ahead ahead;
    Makespan makespan;
    i64 candidates, end = 0, gain = 0, next_end = 0;
    size_t place = 0;

    LaterLayer(Ahead what, Makespan asked, i64 n_candidates) : ahead(std::move(what)), makespan(asked), candidates(n_candidates) {
        std::sort(ahead.cached.begin(), ahead.cached.end());
        std::sort(ahead.missing.begin(), ahead.missing.end());
        end = makespan(ahead.cached, rows_without(ahead.missing.size()));
        measure();
    }
    std::vector<i64> rows_without(size_t left_out) const {
        std::vector<i64> rows;
        for (size_t at = 0; at < ahead.missing.size(); ++at)
            if (at != left_out) rows.push_back(ahead.missing[at].first);
        return rows;
    }
    /// Find the expert that would shorten the plan most: among equals more rows, then the lower id.
    void measure() {
        gain = 0;
        i64 left = candidates, before = 0;
        for (size_t at = ahead.missing.size(); at-- > 0;) {
            i64 rows = ahead.missing[at].first;
            if (rows == before) continue;
            if (!left--) break;
            before = rows;
            std::vector<i64> cached = ahead.cached;
            cached.insert(std::upper_bound(cached.begin(), cached.end(), rows), rows);
            i64 with_it = makespan(cached, rows_without(at));
            if (end - with_it > gain) gain = end - with_it, place = at, next_end = with_it;
        }
    }
    /// Count that expert as cached from now on, and return it.
    i64 take() {
        auto [rows, expert] = ahead.missing[place];
        ahead.missing.erase(ahead.missing.begin() + place);
        ahead.cached.insert(std::upper_bound(ahead.cached.begin(), ahead.cached.end(), rows), rows);
        end = next_end;
        measure();
        return -expert;
    }
};

enum class Budget { ENDS, BEGINS, NONE };

/// Choose (layer, expert) to prefetch, by how much sooner the plan of their layer would end. `makespan_of(layer)` plans a layer.
template <class MakespanOf>
std::vector<std::pair<i64, i64>> impact_driven(std::vector<Ahead> ahead, MakespanOf makespan_of, i64 transfer, i64 idle, Budget budget,
                                               i64 candidates) {
    auto fits = [&] { return budget == Budget::NONE || (budget == Budget::ENDS ? idle >= transfer : idle > 0); };
    std::vector<std::pair<i64, i64>> chosen;
    if (!fits()) return chosen;
    std::vector<LaterLayer<decltype(makespan_of(i64()))>> layers;
    for (Ahead &one : ahead)
        if (!one.missing.empty()) {
            auto makespan = makespan_of(one.layer);
            layers.emplace_back(std::move(one), makespan, candidates);
        }
    while (!layers.empty() && fits()) {
        auto best = std::max_element(layers.begin(), layers.end(), [](auto &a, auto &b) { return a.gain < b.gain; });
        if (best->gain <= 0) break;
        i64 layer = best->ahead.layer;
        chosen.emplace_back(layer, best->take());
        idle -= transfer;
    }
    return chosen;
}

}  // namespace moesim::algorithms
