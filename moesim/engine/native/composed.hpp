// A policy made of parts, as in `moesim.policies.composed`, where each part is there in C++.
#pragma once

#include "transient.hpp"

namespace moesim {

/// Actions that a composition returns for one event.
struct Answer {
    struct Action {
        ActionKind kind;
        int layer, first, n;  // its experts lie in `experts` from `first` on
        DeviceState *device;
        i64 urgency = DEMAND;
        PoolState *pool = nullptr;
        nb::handle source = {};
        bool side = false;
    };
    std::vector<Action> actions;
    std::vector<int> experts;

    void clear() {
        actions.clear();
        experts.clear();
    }
    void add(ActionKind kind, int layer, const std::vector<int> &of, DeviceState *device, i64 urgency = DEMAND,
             PoolState *pool = nullptr) {
        actions.push_back({kind, layer, int(experts.size()), int(of.size()), device, urgency, pool});
        experts.insert(experts.end(), of.begin(), of.end());
    }
    void add(const Answer &other, const Action &one) {
        actions.push_back(one);
        actions.back().first = int(experts.size());
        experts.insert(experts.end(), other.experts.begin() + one.first, other.experts.begin() + one.first + one.n);
    }
    void predict(const Question &of, DeviceState *device) {
        actions.push_back({PREDICT, of.layer, 0, 0, device, DEMAND, nullptr, of.source, of.side});
    }
};

enum class LoadOrder { id, rows, plan };

/// Any combination of assignment, prefetch and replacement parts, after Python has placed the experts.
struct Composed {
    State &state;
    DeviceState *gpu, *cpu;  // cpu: none if nothing is computed on the host
    PoolState *cache, *staging;  // staging: none if demand loads enter the cache
    LoadOrder load_order;
    bool cache_only, exact;
    std::vector<i64> load_ns;  // of an expert of each layer
    std::unique_ptr<Assignment> assignment;  // none: everything on the GPU
    std::unique_ptr<Prefetch> prefetch;  // none: nothing is
    std::unique_ptr<Replacement> replacement;

    Composed(State &state, nb::dict described);
    virtual ~Composed() = default;
    void start(const Setup &setup);
    void step_begin(bool prefill) {
        if (assignment) assignment->step_begin(prefill);
    }
    virtual const Answer &routed(const Routing &routing);
    virtual const Answer &predicted(const Predicted &prediction);
    bool is_late(int step, int layer) const { return now.first == step && now.second >= layer; }
    virtual const Answer &layer_end(int step, int layer);
    virtual const Answer &fetched(int layer, int expert);
    virtual i64 evict(const Transfer *fetch);
    virtual void over() {}  // the run has come to its end

protected:
    i64 unit(int layer, int expert) const { return i64(layer) * state.n_experts + expert; }
    bool resident(int layer, int expert) const { return gpu->memory.resident(unit(layer, expert)); }

private:
    Answer answer;
    std::pair<int, int> now{-1, -1};  // step and layer routed last
    Plan plan;
    Swap swap;
    std::vector<i64> waiting;
    std::vector<int> misses, planned, held, early, rest, ahead, newcomers, coming;
    std::vector<Question> questions;
    Units units;
    Transient transient;

    bool pending(int layer, int expert) const { return gpu->pending[unit(layer, expert)]; }
    bool cached(int layer, int expert) const { return gpu->memory.origins[unit(layer, expert)].pool == cache; }
    void wait(const Routing &routing);
    void in_order(const Routing &routing);
    void load(int layer);
    void fetch_ahead(int step);
    void relabel(int layer);
};

std::unique_ptr<Composed> compose(State &state, nb::handle described);

}  // namespace moesim
