// A policy made of parts, as in `moesim.policies.composed`, where each part is there in C++.
#pragma once

#include "parts.hpp"

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
    void predict(const Question &of, DeviceState *device) {
        actions.push_back({PREDICT, of.layer, 0, 0, device, DEMAND, nullptr, of.source, of.side});
    }
};

/// The pool of experts that are fetched ahead and never enter a cache: used in their layer or by nobody.
struct Transient {
    State &state;
    DeviceState *device;
    PoolState *pool;  // none if nothing is transient
    std::vector<std::pair<int, std::vector<int>>> ahead = {};  // layers in the order in which they were first asked for
    std::vector<std::vector<int>> late = {};  // of each layer: on its way when its layer ended; a slow link may bring it yet

    void fetch(int layer, const std::vector<int> &experts);
    void demand(int layer, const std::vector<int> &misses, std::vector<int> &early, std::vector<int> &rest);
    void layer_end(int layer, std::vector<int> &held);
    void forget(int layer, const std::vector<int> &experts);
    i64 spent(const Transfer *fetch, int routed);

private:
    i64 unit(int layer, int expert) const { return i64(layer) * state.n_experts + expert; }
    bool pending(int layer, int expert) const { return device->pending[unit(layer, expert)]; }
};

enum class LoadOrder { id, rows, plan };

/// Any combination of assignment, prefetch and replacement parts, after Python has placed the experts.
struct Composed {
    Composed(State &state, nb::dict described);
    bool is_exact() const { return exact; }
    bool is_late(int step, int layer) const { return now.first == step && now.second >= layer; }
    const Answer &routed(const Routing &routing);
    const Answer &predicted(const Predicted &prediction);
    const Answer &layer_end(int layer);
    i64 evict(const Transfer *fetch);

private:
    State &state;
    DeviceState *gpu, *cpu;  // cpu: none if nothing is computed on the host
    PoolState *cache, *staging;  // staging: none if demand loads enter the cache
    LoadOrder load_order;
    bool cache_only, exact;
    std::vector<i64> load_ns;  // of an expert of each layer
    std::unique_ptr<Assignment> assignment;  // none: everything on the GPU
    std::unique_ptr<Prefetch> prefetch;  // none: nothing is
    std::unique_ptr<Replacement> replacement;
    Transient transient;
    Answer answer;
    std::pair<int, int> now{-1, -1};  // step and layer routed last
    Plan plan;
    Swap swap;
    std::vector<i64> waiting;
    std::vector<int> misses, planned, held, early, rest, ahead;
    std::vector<Question> questions;
    Units units;

    i64 unit(int layer, int expert) const { return i64(layer) * state.n_experts + expert; }
    bool resident(int layer, int expert) const { return gpu->memory.resident(unit(layer, expert)); }
    bool pending(int layer, int expert) const { return gpu->pending[unit(layer, expert)]; }
    bool cached(int layer, int expert) const { return gpu->memory.origins[unit(layer, expert)].pool == cache; }
    void wait(const Routing &routing);
    void in_order(const Routing &routing);
    void load(int layer);
    void fetch_ahead(int step);
};

}  // namespace moesim
