// What a composition is made of, as in `moesim.policies.parts`: what each part is told and what it answers.
#pragma once

#include "algorithms/assignment.hpp"
#include "state.hpp"
#include "table.hpp"

namespace moesim {

/// What every part is told before a run.
struct Setup {
    State &state;
    DeviceState *gpu, *cpu;  // cpu: none if nothing is computed on the host
    PoolState *cache;
    bool per_layer;
    std::vector<i64> load_ns;  // of an expert of each layer
    std::vector<std::vector<int>> residents;  // of each layer
};

using algorithms::Plan;

/// Cached experts of a layer to be replaced, decided at the end of the layer.
struct Swap {
    std::vector<int> victims, newcomers;
    i64 urgency = UPDATE;
    bool relabel = false;  // keep a newcomer that happens to be on the GPU instead of copying it again
};

/// Predicted ids of a layer, (n_rows, k).
struct PredictedIds {
    const Table *ids;
    i64 first_row, n_rows, layer;  // layer: -1 if the table is of one layer only
    int operator()(i64 row, i64 at) const { return int(layer < 0 ? (*ids)(row, at) : (*ids)(first_row + row, layer, at)); }
    i64 width() const { return ids->buffer.shape[layer < 0 ? 1 : 2]; }
};

/// Which device executes each active expert.
struct Assignment {
    virtual ~Assignment() = default;
    virtual void start(const Setup &) {}
    virtual void step_begin(bool) {}  // whether it is one of prefill
    /// Plan; `waiting` is the time in ns until each expert's weights could be on the GPU.
    virtual Plan assign(const Routing &routing, const std::vector<i64> &waiting) = 0;
};

/// A layer to predict.
struct Question {
    int layer;
    nb::handle source;  // its name
    bool side;  // computed on the side lane
};

/// What a source has answered for a micro-batch.
struct Predicted {
    int step, layer, mb;
    PredictedIds ids;

    void add_rows(std::vector<i64> &counts, i64 top_k) const;
};

using Units = std::vector<std::pair<int, int>>;  // layer and expert

/// Which experts of a later layer to fetch before they are asked for.
struct Prefetch {
    bool transient = false;  // what it fetches goes to a pool of its own, emptied at the end of the layer; else to the cache
    virtual ~Prefetch() = default;
    virtual void start(const Setup &setup) = 0;
    virtual void ask(const Routing &, std::vector<Question> &) {}  // list the predictions to pay for
    virtual void ahead(const Routing &, const Plan &, Units &) {}  // list what to fetch without a prediction, best first
    virtual void choose(const Predicted &, Units &) {}  // list what to fetch now that a prediction is in, best first
};

/// What leaves the cache when something else wants its place. Units are numbered as the engine does.
struct Replacement {
    bool admits = true;  // a demand load enters the cache; else it is staged, and dropped after its layer
    virtual ~Replacement() = default;
    virtual void start(const Setup &setup) = 0;
    virtual void used(const Routing &routing) = 0;
    virtual void inserted(int layer, const std::vector<int> &experts) = 0;
    virtual i64 victim(int layer) = 0;  // for what is to be loaded of a layer; -1: none
    virtual bool layer_end(int, Swap &) { return false; }  // whether there is a swap
};

using PartOptions = nb::dict;  // an option of a part as Python has it, by name
std::unique_ptr<Assignment> make_assignment(const PartOptions &options);
std::unique_ptr<Prefetch> make_prefetch(const PartOptions &options);
std::unique_ptr<Replacement> make_replacement(const PartOptions &options);

}  // namespace moesim
