// HybriMoE's decisions, as `moesim.policies.algorithms.hybrimoe` has them: the plan of a layer (three timelines, simulated), what is
// worth a prefetch, and recent scores, to the last bit of NumPy's answers.
#pragma once

#include "assignment.hpp"

#include <array>
#include <functional>
#include <limits>
#include <numeric>
#include <span>

namespace moesim::algorithms {

enum Timeline { GPU, CPU, LINK };

/// What the operations of a layer cost. `gpu` and `cpu` give the time of a number of rows.
template <class Ns> struct Timings {
    i64 transfer;
    Ns gpu, cpu;
    bool has_cpu;
    i64 gpu_first, cpu_first;
};

/// How the paper's words are read.
struct Reading {
    bool by_completion = true;
    std::array<Timeline, 3> order = {GPU, CPU, LINK};
    bool count_compute = false, overtake = true;
};

struct Ends {
    i64 gpu = 0, cpu = 0, link = 0;
};

/// An expert in a queue. The GPU's has those with the most rows first, the CPU's those with the fewest; equal rows: lower id first.
struct Queued {
    i64 rows;
    int expert;
    bool operator<(const Queued &other) const { return rows != other.rows ? rows > other.rows : expert < other.expert; }
};

/// Experts of a layer by where they are: on the GPU or on their way, or neither. `arrival[e]`: when it is there, 0 if it is.
struct Split {
    std::vector<Queued> cached, missing;
    std::vector<i64> arrival;
};

/// Split the active experts; what is to be waited for as long as for a transfer has not begun.
inline Split split_layer(std::span<const i64> loads, std::span<const i64> waiting, i64 transfer) {
    Split split;
    split.arrival.resize(loads.size());
    for (int e = 0; e < int(loads.size()); ++e) {
        if (!loads[e]) continue;
        bool missing = waiting[e] >= transfer;
        (missing ? split.missing : split.cached).push_back({loads[e], e});
        if (!missing) split.arrival[e] = waiting[e];
    }
    return split;
}

/// The place of the first expert of a queue that has arrived; if none has, of the one that arrives first.
inline size_t first_there(const std::vector<Queued> &queue, const std::vector<i64> &arrival, i64 now) {
    i64 soonest = std::numeric_limits<i64>::max();
    size_t found = 0;
    for (size_t place = 0; place < queue.size(); ++place) {
        i64 time = arrival[queue[place].expert];
        if (time <= now) return place;
        if (time < soonest) soonest = time, found = place;
    }
    return found;
}

/// Simulate GPU, CPU and link; what acts next is the timeline whose operation completes first, or which is free first.
template <class Ns>
Plan queue_plan(Split split, const Timings<Ns> &costs, i64 link_free, i64 gpu_free, const Reading &reading) {
    constexpr i64 NEVER = std::numeric_limits<i64>::max();
    std::vector<Queued> &gpu_queue = split.cached, &cpu_queue = split.missing;
    std::sort(gpu_queue.begin(), gpu_queue.end());
    std::sort(cpu_queue.begin(), cpu_queue.end(),
              [](const Queued &a, const Queued &b) { return a.rows != b.rows ? a.rows < b.rows : a.expert < b.expert; });
    size_t low = 0, high = cpu_queue.size();
    i64 ends[3] = {gpu_free, 0, link_free}, gpu_extra = costs.gpu_first, cpu_extra = costs.cpu_first;
    Plan plan;
    while (!gpu_queue.empty() || low < high) {
        size_t place = 0;
        i64 at[3] = {NEVER, NEVER, NEVER};
        if (!gpu_queue.empty()) {
            i64 start = ends[GPU];
            if (split.arrival[gpu_queue[0].expert] > start) {
                if (reading.overtake) place = first_there(gpu_queue, split.arrival, start);
                start = std::max(start, split.arrival[gpu_queue[place].expert]);
            }
            at[GPU] = start + costs.gpu(gpu_queue[place].rows) + gpu_extra;
        }
        if (low < high) {
            at[LINK] = ends[LINK] + costs.transfer;
            if (reading.count_compute) at[LINK] += costs.gpu(cpu_queue[high - 1].rows);
        }
        if (costs.has_cpu) at[CPU] = ends[CPU] + costs.cpu((low < high ? cpu_queue[low] : gpu_queue.back()).rows) + cpu_extra;
        auto key = [&](Timeline one) { return reading.by_completion || at[one] == NEVER ? at[one] : ends[one]; };
        Timeline chosen = reading.order[0];
        for (Timeline one : reading.order)
            if (key(one) < key(chosen)) chosen = one;
        if (chosen == GPU) {
            plan.gpu.push_back(gpu_queue[place].expert);
            gpu_queue.erase(gpu_queue.begin() + place);
            ends[GPU] = at[GPU], gpu_extra = 0;
        } else if (chosen == CPU) {
            if (low < high) {
                plan.cpu.push_back(cpu_queue[low++].expert);
            } else {
                plan.cpu.push_back(gpu_queue.back().expert);
                gpu_queue.pop_back();
            }
            ends[CPU] = at[CPU], cpu_extra = 0;
        } else {
            Queued moved = cpu_queue[--high];
            ends[LINK] = split.arrival[moved.expert] = ends[LINK] + costs.transfer;
            plan.loads.push_back(moved.expert);
            gpu_queue.insert(std::upper_bound(gpu_queue.begin(), gpu_queue.end(), moved), moved);
        }
    }
    plan.gpu_total = ends[GPU], plan.cpu_total = ends[CPU];
    return plan;
}

/// Carry a plan out: transfers one after the other, each device its experts in order. `arrival[e]` < 0: e needs a transfer.
template <class Ns>
Ends replay(const Plan &plan, std::span<const i64> loads, const Timings<Ns> &costs, std::vector<i64> arrival, i64 link_free) {
    Ends ends{0, 0, link_free};
    for (auto *order : {&plan.loads, &plan.gpu})
        for (int e : *order)
            if (arrival[e] < 0) ends.link = arrival[e] = ends.link + costs.transfer;
    i64 extra = costs.gpu_first;
    for (int e : plan.gpu) {
        ends.gpu = std::max(ends.gpu, arrival[e]) + costs.gpu(loads[e]) + extra;
        extra = 0;
    }
    if (costs.has_cpu && !plan.cpu.empty()) {
        ends.cpu = costs.cpu_first;
        for (int e : plan.cpu) ends.cpu += costs.cpu(loads[e]);
    }
    return ends;
}

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

/// Keep the `p` largest scores of a row, and all equal to the smallest of these; the others become 0.
inline void keep_top(std::span<float> row, size_t p, std::vector<float> &room) {
    if (p >= row.size()) return;
    room.assign(row.begin(), row.end());
    std::nth_element(room.begin(), room.begin() + (p - 1), room.end(), std::greater<float>());
    for (float &one : row)
        if (!(one >= room[p - 1])) one = 0;
}

/// Give the `p` largest scores of a row to the same experts by id: the largest to the lowest of them, and so on.
inline void credit_by_id(std::span<float> row, size_t p) {
    std::vector<int> best(row.size());
    std::iota(best.begin(), best.end(), 0);
    std::stable_sort(best.begin(), best.end(), [&](int a, int b) { return row[a] > row[b]; });
    best.resize(std::min(p, best.size()));
    std::vector<float> values;
    for (int e : best) values.push_back(row[e]);
    std::sort(best.begin(), best.end());
    std::fill(row.begin(), row.end(), 0.0f);
    for (size_t i = 0; i < best.size(); ++i) row[best[i]] = values[i];
}

/// Move scores on by a visit: alpha times the mean of its rows and 1 - alpha times what was. `rows` has row after row.
inline void recent_scores(std::span<double> scores, std::span<float> rows, size_t p, double alpha, bool by_id) {
    size_t n = scores.size(), n_rows = rows.size() / n;
    std::vector<float> room;
    std::vector<double> sum(n);
    for (size_t at = 0; at < n_rows; ++at) {
        std::span<float> row = rows.subspan(at * n, n);
        if (by_id) credit_by_id(row, p);
        else keep_top(row, p, room);
        for (size_t e = 0; e < n; ++e) sum[e] += double(row[e]);
    }
    for (size_t e = 0; e < n; ++e) {
        // NumPy multiplies the one row in 32 bits, and the mean of several in 64.
        double now = n_rows == 1 ? double(float(alpha) * rows[e]) : alpha * (sum[e] / double(n_rows));
        scores[e] = now + (1 - alpha) * scores[e];
    }
}

/// The same where weights of chosen experts stand in for scores; all others have 0. `ids` and `weights` have rows of `k`.
inline void recent_weights(std::span<double> scores, std::span<const int> ids, std::span<const float> weights, size_t k, size_t p,
                           double alpha, bool by_id) {
    size_t n_rows = ids.size() / k;
    std::vector<std::pair<int, float>> row(k);  // by id
    std::vector<float> kept(k), room;
    std::vector<double> sum(scores.size());
    for (size_t first = 0; first < ids.size(); first += k) {
        for (size_t at = 0; at < k; ++at) row[at] = {ids[first + at], weights[first + at]};
        std::sort(row.begin(), row.end());
        for (size_t at = 0; at < k; ++at) kept[at] = row[at].second;
        if (by_id) credit_by_id(kept, p);
        else keep_top(kept, p, room);
        for (size_t at = 0; at < k; ++at) sum[row[at].first] += double(kept[at]);
    }
    for (size_t e = 0; e < scores.size(); ++e) scores[e] = alpha * (sum[e] / double(n_rows)) + (1 - alpha) * scores[e];
}

}  // namespace moesim::algorithms
