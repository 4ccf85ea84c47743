#include "assigning.hpp"

#include "algorithms/search.hpp"

namespace moesim {

Plan AllCpu::assign(const Routing &routing, const std::vector<i64> &) {
    Plan plan;
    plan.cpu = routing.active;
    return plan;
}

/// Split by residency.
Plan Resident::assign(const Routing &routing, const std::vector<i64> &waiting) {
    Plan plan;
    for (int e : routing.active) (waiting[e] ? plan.cpu : plan.gpu).push_back(e);
    return plan;
}

/// Split by residency in decode.
Plan ResidentInDecode::assign(const Routing &routing, const std::vector<i64> &waiting) {
    if (!prefill) return Resident::assign(routing, waiting);
    Plan plan;
    plan.gpu = routing.active;
    return plan;
}

/// Compare the constants for each expert that is not on the GPU; ties go to the GPU.
Plan FixedThreshold::assign(const Routing &routing, const std::vector<i64> &waiting) {
    Plan plan;
    for (int e : routing.active) {
        double gpu_cost = waiting[e] ? load_ms : 0, cpu_cost = cpu_ms * double(routing.rows[e]);
        (gpu_cost <= cpu_cost ? plan.gpu : plan.cpu).push_back(e);
    }
    return plan;
}

/// Prepare the costs.
void Costed::start(const Setup &setup) {
    state = &setup.state;
    gpu_ns = {state, setup.gpu};
    cpu_ns = {state, setup.cpu};
    gpu_first = setup.gpu->first_extra;
    cpu_first = setup.cpu->first_extra;
}

/// Time of the layer's shared experts, if the plan counts it.
i64 Costed::shared_ns(const Routing &routing) {
    if (!shared_in_plan) return 0;
    i64 rows = 0;
    for (int e : routing.active) rows += routing.rows[e];
    rows /= state->top_k;
    auto found = shared.find(rows);
    if (found == shared.end()) {
        i64 ns = as_int(ask(*state, attr(state->costs, "shared_ns"), {ref(gpu_ns.device->name), num(rows)}));
        found = shared.emplace(rows, ns).first;
    }
    return found->second;
}

/// Apply the rule to the costs of this layer.
Plan Greedy::assign(const Routing &routing, const std::vector<i64> &waiting) {
    i64 before = shared_ns(routing);
    return algorithms::greedy_assignment(algorithms::layer_costs(routing.rows, waiting, gpu_ns, cpu_ns),
                                         {before, gpu_first, cpu_first});
}

/// Search with the costs of this layer.
Plan Beam::assign(const Routing &routing, const std::vector<i64> &waiting) {
    return algorithms::beam_assignment(algorithms::layer_costs(routing.rows, waiting, gpu_ns, cpu_ns), width,
                                       {0, gpu_first, cpu_first});
}

/// Compare the two costs of each expert; residents always run where they are.
Plan Threshold::assign(const Routing &routing, const std::vector<i64> &waiting) {
    return algorithms::threshold_assignment(algorithms::loading_costs(routing.rows, waiting, gpu_ns, cpu_ns));
}

/// Give what the operations of each layer cost.
std::vector<Timings> layer_timings(const Setup &setup) {
    CostTable gpu{&setup.state, setup.gpu}, cpu{&setup.state, setup.cpu};
    i64 cpu_first = setup.cpu ? setup.cpu->first_extra : 0;
    std::vector<Timings> found;
    for (i64 transfer : setup.load_ns) found.push_back({transfer, gpu, cpu, setup.cpu != nullptr, setup.gpu->first_extra, cpu_first});
    return found;
}

void Queues::start(const Setup &setup) {
    Costed::start(setup);
    timings = layer_timings(setup);
}

/// Plan; what is on its way arrives when the link says, and the link is busy until then.
Plan Queues::assign(const Routing &routing, const std::vector<i64> &waiting) {
    const Timings &costs = timings[routing.layer];
    i64 before = shared_ns(routing), link_free = 0;
    algorithms::Split split = algorithms::split_layer(routing.rows, waiting, costs.transfer);
    for (i64 time : split.arrival) link_free = std::max(link_free, time);
    return algorithms::queue_plan(std::move(split), costs, link_free, before, reading);
}

void TwoEnded::start(const Setup &setup) {
    state = &setup.state;
    gpu = setup.gpu;
    timings = layer_timings(setup);
}

/// Plan a single row, among whose experts the gate's ranks decide; of several, too, or the GPU runs everything, what is there first.
Plan TwoEnded::assign(const Routing &routing, const std::vector<i64> &waiting) {
    bool single = state->step_rows == 1;
    const Timings &costs = timings[routing.layer];
    std::vector<int> order = routing.active;
    if (single) order.assign(routing.ids.begin(), routing.ids.begin() + routing.top_k);
    auto is_cached = [&](int e) {
        return waiting[e] < costs.transfer || (counts_issued && gpu->pending[i64(routing.layer) * state->n_experts + e]);
    };
    Plan plan;
    if (!single && !split_all) {
        std::stable_partition(order.begin(), order.end(), is_cached);
        plan.gpu = std::move(order);
    } else if (constants) {
        auto found = algorithms::two_ended_plan(std::move(order), is_cached, routing.rows, *constants);
        plan.gpu = std::move(found.gpu), plan.cpu = std::move(found.cpu), plan.loads = std::move(found.loads);
    } else {
        plan = algorithms::two_ended_plan(std::move(order), is_cached, routing.rows, costs);
    }
    return plan;
}

}  // namespace moesim
