// What a composition is made of, as in `moesim.policies.parts`: what each part is told and what it answers.
#pragma once

#include "state.hpp"

namespace moesim {

/// What every part is told before a run.
struct Setup {
    State &state;
    DeviceState *gpu, *cpu;  // cpu: none if nothing is computed on the host
    PoolState *cache;
    bool per_layer;
    std::vector<std::vector<int>> residents;  // of each layer
};

/// Who executes what: ids in execution order.
struct Plan {
    std::vector<int> gpu, cpu;
};

/// Cached experts of a layer to be replaced, decided at the end of the layer.
struct Swap {
    std::vector<int> victims, newcomers;
    i64 urgency = UPDATE;
    bool relabel = false;  // keep a newcomer that happens to be on the GPU instead of copying it again
};

/// Which device executes each active expert.
struct Assignment {
    virtual ~Assignment() = default;
    virtual void start(const Setup &) {}
    virtual void step_begin(bool) {}  // whether it is one of prefill
    /// Plan; `waiting` is the time in ns until each expert's weights could be on the GPU.
    virtual void assign(int layer, const Routing &routing, const std::vector<i64> &waiting, Plan &plan) = 0;
};

/// What leaves the cache when something else wants its place. Units are numbered as the engine does.
struct Replacement {
    bool admits = true;  // a demand load enters the cache; else it is staged, and dropped after its layer
    virtual ~Replacement() = default;
    virtual void start(const Setup &setup) = 0;
    virtual void used(int step, int layer, const Routing &routing) = 0;
    virtual void inserted(int layer, const std::vector<int> &experts) = 0;
    virtual i64 victim(const Transfer *fetch) = 0;  // -1: none
    virtual bool layer_end(int, Swap &) { return false; }  // whether there is a swap
};

using PartOptions = nb::dict;  // an option of a part as Python has it, by name
std::unique_ptr<Assignment> make_assignment(const PartOptions &options);
std::unique_ptr<Replacement> make_replacement(const PartOptions &options);

}  // namespace moesim
