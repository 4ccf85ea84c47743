// Assignment by search, as `moesim.policies.algorithms.search` says it.
#pragma once

#include "assignment.hpp"

namespace moesim::algorithms {

/// Beam search in the greedy order: of the partial plans, the `width` with the smallest makespan are kept; `width` is 1 or more.
inline Plan beam_assignment(const LayerCosts &costs, i64 width, const Extras &extra) {
    struct Partial {
        i64 gpu_total = 0, cpu_total = 0;
        bool has_gpu = false, has_cpu = false, on_gpu = false;  // the last: where the latest expert is
        int parent = -1;  // its place among all that were kept
        i64 makespan() const { return std::max(gpu_total, cpu_total); }
    };
    std::vector<int> order = greedy_order(costs);
    std::vector<Partial> kept(1), grown;
    size_t first = 0;  // of those that were kept last
    for (int e : order) {
        grown.clear();
        for (size_t at = first; at < kept.size(); ++at) {
            Partial on_gpu = kept[at], on_cpu = kept[at];
            on_gpu.gpu_total += costs.gpu[e] + (on_gpu.has_gpu ? 0 : extra.gpu_first);
            on_cpu.cpu_total += costs.cpu[e] + (on_cpu.has_cpu ? 0 : extra.cpu_first);
            on_gpu.has_gpu = on_cpu.has_cpu = true;
            on_gpu.on_gpu = true, on_cpu.on_gpu = false;
            on_gpu.parent = on_cpu.parent = int(at);
            grown.push_back(on_gpu);
            grown.push_back(on_cpu);
        }
        std::stable_sort(grown.begin(), grown.end(), [](const Partial &a, const Partial &b) { return a.makespan() < b.makespan(); });
        first = kept.size();
        kept.insert(kept.end(), grown.begin(), grown.begin() + std::min<i64>(width, i64(grown.size())));
    }
    Plan plan;
    plan.gpu_total = kept[first].gpu_total, plan.cpu_total = kept[first].cpu_total;
    std::vector<bool> on_gpu(order.size());
    for (size_t at = order.size(), one = first; at-- > 0; one = kept[one].parent) on_gpu[at] = kept[one].on_gpu;
    for (size_t at = 0; at < order.size(); ++at) (on_gpu[at] ? plan.gpu : plan.cpu).push_back(order[at]);
    return plan;
}

}  // namespace moesim::algorithms
