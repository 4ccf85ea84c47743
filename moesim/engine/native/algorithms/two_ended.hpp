// HybriMoE's split of a layer as its released code does it, as `moesim.policies.algorithms.two_ended` says it.
#pragma once

#include "queues.hpp"

namespace moesim::algorithms {

/// Let the GPU take from the head of a list and the CPU from its tail; the one that would end first goes on, ties to the GPU. The
/// list is the cached experts, then the others, each by rows, most first, then as in `order`. `is_cached(e)`: expert e is there.
template <class Ns, class Time, class IsCached>
PlanOf<Time> two_ended_plan(std::vector<int> order, IsCached is_cached, std::span<const i64> loads, const Timings<Ns, Time> &costs) {
    auto others = std::stable_partition(order.begin(), order.end(), is_cached);
    auto busier = [&](int a, int b) { return loads[a] > loads[b]; };
    std::stable_sort(order.begin(), others, busier);
    std::stable_sort(others, order.end(), busier);
    PlanOf<Time> plan;
    Time link_end = 0, gpu_extra = costs.gpu_first, cpu_extra = costs.cpu_first;
    auto head = order.begin(), tail = order.end();
    while (head < tail) {
        bool loaded = head >= others;
        Time start = loaded ? std::max(plan.gpu_total, link_end + costs.transfer) : plan.gpu_total;
        Time at_gpu = start + costs.gpu(loads[*head]) + gpu_extra;
        Time at_cpu = plan.cpu_total + costs.cpu(loads[tail[-1]]) + cpu_extra;
        if (at_gpu <= at_cpu) {
            if (loaded) {
                link_end += costs.transfer;
                plan.loads.push_back(*head);
            }
            plan.gpu_total = at_gpu, gpu_extra = 0;
            plan.gpu.push_back(*head++);
        } else {
            plan.cpu_total = at_cpu, cpu_extra = 0;
            plan.cpu.push_back(*--tail);
        }
    }
    return plan;
}

}  // namespace moesim::algorithms
