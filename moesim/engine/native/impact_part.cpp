#include "impact_part.hpp"

namespace moesim {

/// Forget an earlier run.
void ImpactDriven::start(const Setup &setup) {
    state = &setup.state;
    gpu = setup.gpu;
    timings = layer_timings(setup);
    rows.assign(state->n_layers, {});
}

/// Ask about the layers ahead, the next one last, once per layer visit.
void ImpactDriven::ask(const Routing &routing, std::vector<Question> &questions) {
    if (routing.step != step) {
        step = routing.step;
        for (auto &of_layer : rows) of_layer.clear();
    }
    layer = routing.layer;
    if (routing.mb) return;
    end_ns = link_ns = 0;
    for (int n = std::min(int(sources.size()), state->n_layers - 1 - layer); n > 0; --n)
        questions.push_back({layer + n, sources[n - 1], side});
}

/// Note when this layer and its transfers will have ended, and choose nothing before the prediction.
void ImpactDriven::ahead(const Routing &routing, const Plan &plan, Units &) {
    const Timings &costs = timings[layer];
    std::erase_if(under_way, [&](i64 one) {
        return !gpu->pending[one] || std::any_of(plan.gpu.begin(), plan.gpu.end(), [&](int e) { return unit(layer, e) == one; });
    });
    i64 link = queue().first;
    std::vector<i64> arrival(state->n_experts, -1);
    for (int expert : plan.gpu) {
        i64 one = unit(layer, expert), wait = remaining(one);
        if (!gpu->memory.resident(one) && !(0 < wait && wait < costs.transfer)) continue;
        arrival[expert] = wait;
        link = std::max(link, wait);
    }
    algorithms::Ends ends = algorithms::replay(plan, routing.rows, costs, std::move(arrival), link);
    end_ns = std::max(end_ns, state->now + std::max(ends.gpu, ends.cpu));
    link_ns = std::max(link_ns, state->now + ends.link);
}

/// Find what is left of the prefetch in flight, and the time of those that are queued.
std::pair<i64, i64> ImpactDriven::queue() const {
    i64 flying = 0, queued = 0;
    for (i64 one : under_way) {
        i64 left = remaining(one);
        if (left < timings[one / state->n_experts].transfer) flying = std::max(flying, left);
        else queued += left;
    }
    return {flying, queued};
}

/// Count predicted rows; choose once the next layer's are in.
void ImpactDriven::choose(const Predicted &prediction, Units &units) {
    using algorithms::Budget;
    int next = prediction.layer;
    if (!prediction.mb || rows[next].empty()) rows[next].assign(state->n_experts, 0);
    prediction.add_rows(rows[next], state->top_k);
    if (next != layer + 1) return;
    std::erase_if(under_way, [&](i64 one) { return !gpu->pending[one]; });
    auto [flying, queued] = queue();
    i64 idle = end_ns - state->now - std::max(link_ns - state->now, flying) - queued, transfer = timings[next].transfer;
    if (budget != Budget::NONE && idle < (budget == Budget::ENDS ? transfer : 1)) return;
    std::vector<algorithms::Ahead> known;
    for (int one = next; one < std::min(next + int(sources.size()), state->n_layers); ++one)
        if (!rows[one].empty()) known.push_back(ahead_of(one));
    auto makespan_of = [&](i64 of_layer) {
        return [this, &costs = timings[of_layer]](const std::vector<i64> &cached, const std::vector<i64> &missing) {
            return algorithms::queue_makespan(std::span<const i64>(cached), std::span<const i64>(missing), costs, reading);
        };
    };
    for (auto [of_layer, expert] : algorithms::impact_driven(std::move(known), makespan_of, transfer, idle, budget, candidates)) {
        units.emplace_back(of_layer, expert);
        under_way.push_back(unit(int(of_layer), int(expert)));
    }
}

/// Split the predicted rows of the experts of a layer by whether an expert is on a GPU or on its way.
algorithms::Ahead ImpactDriven::ahead_of(int of_layer) const {
    algorithms::Ahead found{of_layer, {}, {}};
    for (int expert = 0; expert < state->n_experts; ++expert) {
        i64 n = rows[of_layer][expert], one = unit(of_layer, expert);
        if (!n) continue;
        if (gpu->memory.resident(one) || gpu->pending[one]) found.cached.push_back(n);
        else found.missing.emplace_back(n, -expert);
    }
    return found;
}

}  // namespace moesim
