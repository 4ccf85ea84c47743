// Assignment parts, as in `moesim.policies.parts.assignment`: which device executes each active expert.
#include "parts.hpp"

namespace moesim {

/// Prepare the costs.
void Assignment::start(const Setup &setup) {
    know(setup);
    gpu_ns = {state, setup.gpu};
    cpu_ns = {state, setup.cpu};
}

/// Time of the layer's shared experts, if the plan counts it.
i64 Assignment::shared_ns(const Routing &routing) {
    if (!shared_in_plan) return 0;
    i64 rows = 0;
    for (int e : routing.active) rows += routing.rows[e];
    return part_ns(*state, "shared_ns", gpu, rows / state->top_k);
}

/// Apply the rule to the costs of this layer.
Plan Greedy::assign(const Routing &routing, const std::vector<i64> &waiting) {
    return algorithms::greedy_assignment(algorithms::layer_costs(routing.rows, waiting, gpu_ns, cpu_ns),
                                         {shared_ns(routing), gpu->first_extra, cpu_ns.device->first_extra});
}

/// Return what the operations of each layer cost.
std::vector<Timings> layer_timings(const Setup &setup) {
    CostTable gpu{&setup.state, setup.gpu}, cpu{&setup.state, setup.cpu};
    i64 cpu_first = setup.cpu ? setup.cpu->first_extra : 0;
    std::vector<Timings> found;
    for (i64 transfer : setup.load_ns)
        found.push_back({transfer, gpu, cpu, setup.cpu != nullptr, setup.gpu->first_extra, cpu_first});
    return found;
}

void Queues::start(const Setup &setup) {
    Assignment::start(setup);
    timings = layer_timings(setup);
}

/// Plan; what is on its way arrives when the link says, and the link is busy until then.
Plan Queues::assign(const Routing &routing, const std::vector<i64> &waiting) {
    const Timings &costs = timings[routing.layer];
    algorithms::Split split = algorithms::split_layer(routing.rows, waiting, costs.transfer);
    i64 link_free = 0;
    for (i64 time : split.arrival) link_free = std::max(link_free, time);
    return algorithms::queue_plan(std::move(split), costs, link_free, shared_ns(routing), reading);
}

/// Read how the paper's words are read.
algorithms::Reading reading_of(const PartOptions &options) {
    using namespace algorithms;
    Reading reading;
    reading.by_completion = is(options, "timeline", "completion");
    if (is(options, "ties", "cpu")) reading.order = {CPU, GPU, LINK};
    if (is(options, "ties", "link")) reading.order = {LINK, GPU, CPU};
    reading.count_compute = flag(options, "count_compute");
    reading.overtake = flag(options, "overtake");
    return reading;
}

/// Make a part by its name; none: everything on the GPU.
std::unique_ptr<Assignment> make_assignment(const PartOptions &options) {
    std::unique_ptr<Assignment> part;
    if (is(options, "name", "all-gpu")) return part;
    if (is(options, "name", "greedy")) {
        part = std::make_unique<Greedy>();
    } else if (is(options, "name", "queues")) {
        auto queues = std::make_unique<Queues>();
        queues->reading = reading_of(options);
        part = std::move(queues);
    } else {
        throw std::logic_error("no assignment part: " + text_of(options, "name"));
    }
    part->shared_in_plan = flag(options, "shared_in_plan");
    return part;
}

}  // namespace moesim
