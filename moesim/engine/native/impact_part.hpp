// HybriMoE's prefetch: what gains most in the plans of the layers ahead.
#pragma once

#include "algorithms/impact.hpp"
#include "assigning.hpp"

namespace moesim {

/// What would shorten the plans of the next layers most, while the link is idle.
struct ImpactDriven : Prefetch {
    std::vector<nb::object> sources;  // of predictions of the next layer, of the one behind it, and so on
    bool side = false;  // the option `lane`
    algorithms::Budget budget = algorithms::Budget::ENDS;
    i64 candidates = 8;
    algorithms::Reading reading;

    void start(const Setup &setup) override;
    void ask(const Routing &routing, std::vector<Question> &questions) override;
    void ahead(const Routing &routing, const Plan &plan, Units &units) override;
    void choose(const Predicted &prediction, Units &units) override;

private:
    State *state = nullptr;
    DeviceState *gpu = nullptr;
    std::vector<Timings> timings;  // of each layer
    int step = -1, layer = -1;  // routed last
    i64 end_ns = 0, link_ns = 0;  // planned ends of it and of its transfers
    std::vector<std::vector<i64>> rows;  // of each layer, those that each expert will have; empty: not predicted
    std::vector<i64> under_way;  // units

    i64 unit(int of_layer, int expert) const { return i64(of_layer) * state->n_experts + expert; }
    i64 remaining(i64 unit) const { return gpu->pending[unit] ? remaining_ns(*state, gpu->pending[unit]) : 0; }
    std::pair<i64, i64> queue() const;
    algorithms::Ahead ahead_of(int of_layer) const;
};

}  // namespace moesim
