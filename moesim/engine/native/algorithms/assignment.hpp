// Which device executes which expert, as `moesim.policies.parts.assignment` says it, over 64-bit integers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

namespace moesim::algorithms {

using i64 = std::int64_t;

/// Who executes what, and in which order the transfers go where a rule plans them.
struct Plan {
    std::vector<int> gpu, cpu;
    i64 gpu_total = 0, cpu_total = 0;
    std::vector<int> loads;
};

/// What each expert of a layer costs on either device.
struct LayerCosts {
    std::vector<i64> gpu, cpu;
};

/// DALI's costs: on the GPU the longer of waiting and computing. `gpu_ns` and `cpu_ns` give the time of a number of rows.
template <class Ns>
LayerCosts layer_costs(const std::vector<i64> &rows, const std::vector<i64> &waiting, const Ns &gpu_ns, const Ns &cpu_ns) {
    LayerCosts costs{std::vector<i64>(rows.size()), std::vector<i64>(rows.size())};
    for (size_t e = 0; e < rows.size(); ++e)
        if (rows[e]) costs.gpu[e] = std::max(waiting[e], gpu_ns(rows[e])), costs.cpu[e] = cpu_ns(rows[e]);
    return costs;
}

/// What a device takes beyond the costs: the GPU before its first expert, and either for its first expert.
struct Extras {
    i64 gpu_start, gpu_first, cpu_first;
};

/// DALI's Algorithm 1: by the difference of the two costs, largest first, each expert where it would end sooner.
inline Plan greedy_assignment(const LayerCosts &costs, const Extras &extra) {
    std::vector<std::pair<i64, int>> order;
    for (int e = 0; e < int(costs.gpu.size()); ++e)
        if (costs.gpu[e] || costs.cpu[e]) order.emplace_back(-std::abs(costs.gpu[e] - costs.cpu[e]), e);
    std::sort(order.begin(), order.end());
    Plan plan;
    plan.gpu_total = extra.gpu_start;
    for (auto [_, e] : order) {
        i64 on_gpu = plan.gpu_total + costs.gpu[e] + (plan.gpu.empty() ? extra.gpu_first : 0);
        i64 on_cpu = plan.cpu_total + costs.cpu[e] + (plan.cpu.empty() ? extra.cpu_first : 0);
        bool is_gpu = on_gpu <= on_cpu;
        (is_gpu ? plan.gpu : plan.cpu).push_back(e);
        (is_gpu ? plan.gpu_total : plan.cpu_total) = is_gpu ? on_gpu : on_cpu;
    }
    return plan;
}

}  // namespace moesim::algorithms
