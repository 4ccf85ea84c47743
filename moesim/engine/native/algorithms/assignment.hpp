// Which device executes which expert, as `moesim.policies.algorithms.assignment` says it, over 64-bit integers.
// A caller keeps numbers so small that no sum leaves 64 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <utility>
#include <vector>

namespace moesim::algorithms {

using i64 = std::int64_t;

/// Who executes what, and in which order the transfers go where a rule plans them.
template <class Time> struct PlanOf {
    std::vector<int> gpu, cpu;
    Time gpu_total = 0, cpu_total = 0;
    std::vector<int> loads;
};
using Plan = PlanOf<i64>;

/// What each expert of a layer costs on either device.
struct LayerCosts {
    std::vector<i64> gpu, cpu;

    /// The experts that cost anything, ascending.
    std::vector<int> active() const {
        std::vector<int> found;
        for (int e = 0; e < int(gpu.size()); ++e)
            if (gpu[e] || cpu[e]) found.push_back(e);
        return found;
    }
};

/// What a device takes beyond the costs: the GPU before its first expert, and either for its first expert.
struct Extras {
    i64 gpu_start = 0, gpu_first = 0, cpu_first = 0;
};

/// DALI's costs: on the GPU the longer of waiting and computing. `gpu_ns` and `cpu_ns` give the time of a number of rows.
template <class GpuNs, class CpuNs>
LayerCosts layer_costs(std::span<const i64> loads, std::span<const i64> waiting, GpuNs gpu_ns, CpuNs cpu_ns) {
    LayerCosts costs{std::vector<i64>(loads.size()), std::vector<i64>(loads.size())};
    for (size_t e = 0; e < loads.size(); ++e)
        if (loads[e]) costs.gpu[e] = std::max(waiting[e], gpu_ns(loads[e]));
    for (size_t e = 0; e < loads.size(); ++e)
        if (loads[e]) costs.cpu[e] = cpu_ns(loads[e]);
    return costs;
}

/// Fiddler's costs: on the GPU waiting and then computing, nothing where there is no wait.
template <class GpuNs, class CpuNs>
LayerCosts loading_costs(std::span<const i64> loads, std::span<const i64> waiting, GpuNs gpu_ns, CpuNs cpu_ns) {
    LayerCosts costs{std::vector<i64>(loads.size()), std::vector<i64>(loads.size())};
    for (size_t e = 0; e < loads.size(); ++e)
        if (loads[e] && waiting[e]) costs.gpu[e] = waiting[e] + gpu_ns(loads[e]);
    for (size_t e = 0; e < loads.size(); ++e)
        if (loads[e]) costs.cpu[e] = cpu_ns(loads[e]);
    return costs;
}

/// The active experts by the difference of their two costs, largest first (ties: lower id).
inline std::vector<int> greedy_order(const LayerCosts &costs) {
    std::vector<std::pair<i64, int>> order;
    for (int e : costs.active()) order.emplace_back(-std::abs(costs.gpu[e] - costs.cpu[e]), e);
    std::sort(order.begin(), order.end());
    std::vector<int> ids;
    for (auto [_, e] : order) ids.push_back(e);
    return ids;
}

/// DALI's Algorithm 1: in the greedy order, each expert where it would end sooner.
inline Plan greedy_assignment(const LayerCosts &costs, const Extras &extra) {
    Plan plan;
    plan.gpu_total = extra.gpu_start;
    for (int e : greedy_order(costs)) {
        i64 on_gpu = plan.gpu_total + costs.gpu[e] + (plan.gpu.empty() ? extra.gpu_first : 0);
        i64 on_cpu = plan.cpu_total + costs.cpu[e] + (plan.cpu.empty() ? extra.cpu_first : 0);
        if (on_gpu <= on_cpu) {
            plan.gpu.push_back(e);
            plan.gpu_total = on_gpu;
        } else {
            plan.cpu.push_back(e);
            plan.cpu_total = on_cpu;
        }
    }
    return plan;
}

/// Fiddler's rule: each expert on the cheaper device, ties to the GPU.
inline Plan threshold_assignment(const LayerCosts &costs) {
    Plan plan;
    for (int e : costs.active()) {
        bool on_gpu = costs.gpu[e] <= costs.cpu[e];
        (on_gpu ? plan.gpu : plan.cpu).push_back(e);
        (on_gpu ? plan.gpu_total : plan.cpu_total) += on_gpu ? costs.gpu[e] : costs.cpu[e];
    }
    return plan;
}

}  // namespace moesim::algorithms
