// HybriMoE's plan of a layer, as `moesim.policies.algorithms.queues` says it: three timelines, simulated.
#pragma once

#include "assignment.hpp"

#include <array>
#include <limits>
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

}  // namespace moesim::algorithms
