// The parts that decide in C++, as in `moesim.policies.parts`: those of LRU, DALI and HybriMoE.
#pragma once

#include <map>

#include "algorithms/hybrimoe.hpp"
#include "state.hpp"

namespace moesim {

using algorithms::Plan;
using Units = std::vector<std::pair<int, int>>;  // layer and expert

/// Facts that every part gets before a run.
struct Setup {
    State &state;
    DeviceState *gpu, *cpu;  // cpu: none if nothing is computed on the host
    PoolState *cache;
    bool per_layer;
    std::vector<i64> load_ns;  // of an expert of each layer
    std::vector<std::vector<int>> residents;  // of each layer
};

/// Cached experts of a layer to be replaced, decided at the end of the layer.
struct Swap {
    std::vector<int> victims, newcomers;
    i64 urgency = UPDATE;
    bool relabel = false;  // keep a newcomer that happens to be on the GPU instead of copying it again
};

/// A layer to predict.
struct Question {
    int layer;
    nb::handle source;  // its name
    bool side;  // computed on the side lane
};

/// What a source has answered for a micro-batch: ids, (n_rows, k).
struct Predicted {
    int step, layer, mb;
    const Table *ids;
    i64 first_row, n_rows, of_layer;  // of_layer: its place in the table; -1 if the table is of one layer only

    void add_rows(std::vector<i64> &counts, i64 top_k) const;
};

/// List the experts of a layer that are in a pool, ascending.
void residents(const State &state, const PoolState *pool, int layer, std::vector<int> &found);

/// What a part knows of the run.
struct Part {
    State *state = nullptr;
    DeviceState *gpu = nullptr;
    i64 unit(i64 layer, i64 expert) const { return layer * state->n_experts + expert; }
    bool resident(i64 unit) const { return gpu->memory.resident(unit); }

protected:
    void know(const Setup &setup) { state = &setup.state, gpu = setup.gpu; }
};

// ------------------------------------------------------------------------------------------------------------- assignment

/// Time of an expert on a device by its rows.
struct CostTable {
    State *state = nullptr;
    DeviceState *device = nullptr;
    i64 operator()(i64 rows) const { return expert_ns(*state, device, 0, int(rows)); }
};
using Timings = algorithms::Timings<CostTable>;
std::vector<Timings> layer_timings(const Setup &setup);

/// Which device executes each active expert.
struct Assignment : Part {
    bool shared_in_plan = false;  // the GPU's total begins with the layer's shared experts

    virtual ~Assignment() = default;
    virtual void start(const Setup &setup);
    /// Plan; `waiting` is the time in ns until each expert's weights could be on the GPU.
    virtual Plan assign(const Routing &routing, const std::vector<i64> &waiting) = 0;

protected:
    CostTable gpu_ns, cpu_ns;
    i64 shared_ns(const Routing &routing);
};

/// DALI's Algorithm 1.
struct Greedy : Assignment {
    Plan assign(const Routing &routing, const std::vector<i64> &waiting) override;
};

/// HybriMoE's paper: a plan from three simulated timelines, of GPU, CPU and link.
struct Queues : Assignment {
    algorithms::Reading reading;

    void start(const Setup &setup) override;
    Plan assign(const Routing &routing, const std::vector<i64> &waiting) override;

private:
    std::vector<Timings> timings;  // of each layer
};

// --------------------------------------------------------------------------------------------------------------- prefetch

/// Which experts of a later layer to fetch before they are asked for.
struct Prefetch : Part {
    bool transient = false;  // what it fetches goes to a pool of its own, emptied at the end of the layer; else to the cache
    bool side = false;  // predictions are computed on the side lane
    virtual ~Prefetch() = default;
    virtual void start(const Setup &setup) { know(setup); }
    virtual void ask(const Routing &, std::vector<Question> &) = 0;  // list the predictions to pay for
    virtual void ahead(const Routing &, const Plan &) {}  // take note of a plan
    virtual void choose(const Predicted &, Units &) = 0;  // list what to fetch now that a prediction is in, best first
};

/// Fetch the experts that a predictor gives the most rows in a following layer.
struct TopPredicted : Prefetch {
    i64 size = 1, lookahead = 1;
    bool over_all = true;  // the option `over`
    nb::object source;
    bool ask_nearer = false;  // the option `nearer`

    void ask(const Routing &routing, std::vector<Question> &questions) override;
    void choose(const Predicted &prediction, Units &units) override;

private:
    struct Seen {
        std::vector<i64> counts;
        std::vector<int> chosen;
    };
    int step = -1;
    std::map<int, Seen> seen;  // of that step, by layer
};

/// HybriMoE's prefetch: what would shorten the plans of the next layers most, while the link is idle.
struct ImpactDriven : Prefetch {
    std::vector<nb::object> sources;  // of predictions of the next layer, of the one behind it, and so on
    algorithms::Budget budget = algorithms::Budget::ENDS;
    i64 candidates = 8;
    algorithms::Reading reading;

    void start(const Setup &setup) override;
    void ask(const Routing &routing, std::vector<Question> &questions) override;
    void ahead(const Routing &routing, const Plan &plan) override;
    void choose(const Predicted &prediction, Units &units) override;

private:
    std::vector<Timings> timings;  // of each layer
    int step = -1, layer = -1;  // routed last
    i64 end_ns = 0, link_ns = 0;  // planned ends of it and of its transfers
    std::vector<std::vector<i64>> rows;  // of each layer, those that each expert will have; empty: not predicted
    std::vector<i64> under_way;  // units

    i64 remaining(i64 unit) const { return gpu->pending[unit] ? remaining_ns(*state, gpu->pending[unit]) : 0; }
    std::pair<i64, i64> queue() const;
    algorithms::Ahead ahead_of(int of_layer) const;
};

// ------------------------------------------------------------------------------------------------------------ replacement

/// What leaves the cache when something else wants its place. Units are numbered as the engine does.
struct Replacement : Part {
    bool admits = true;  // a demand load enters the cache; else it is staged, and dropped after its layer
    virtual ~Replacement() = default;
    virtual void start(const Setup &setup) = 0;
    virtual void used(const Routing &routing) = 0;
    virtual void inserted(int, const std::vector<int> &) {}
    virtual i64 victim(int layer) = 0;  // for what is to be loaded of a layer; -1: none
    virtual bool layer_end(int, Swap &) { return false; }  // whether there is a swap
};

/// Units of several pools, each pool's in order of use, as dicts of Python keep them.
struct Ordered {
    struct Place {
        int next, previous;
    };
    std::vector<Place> places;  // of units, then of the ends of the pools; next -1: not there
    i64 n_units = 0;

    void clear(i64 units, int pools);
    bool has(i64 unit) const { return places[unit].next >= 0; }
    i64 end(int pool) const { return n_units + pool; }
    i64 after(i64 unit) const { return places[unit].next; }
    void append(int pool, i64 unit);
    void erase(i64 unit);
};

/// The one whose last use is longest ago; being fetched ahead counts as a use.
struct LRU : Replacement {
    bool unrouted_first = true;  // the option `victims`
    bool by_rank = true;  // the option `use_order`

    void start(const Setup &setup) override;
    void used(const Routing &routing) override;
    void inserted(int layer, const std::vector<int> &experts) override;
    i64 victim(int layer) override;

protected:
    /// Take out the best of the members of a pool that are there, protected ones last: without `better` the first; -1: none.
    i64 take_best(int layer, const std::function<bool(i64, i64)> &better = nullptr);

private:
    bool per_layer = true;
    Ordered members;
    int present_step = -1, present_layer = -1;
    std::vector<bool> routed;  // experts of the present layer visit, in all its micro-batches so far
    std::vector<int> ranked;  // what a single row that was routed last uses, by rank

    int pool(int layer) const { return per_layer ? layer : 0; }
    void mark(int layer, const std::vector<int> &experts);
};

/// HybriMoE's minus recent score: the resident with the smallest score; among equals the least recently used.
struct MRS : LRU {
    double alpha = 0;
    i64 p = 0;  // scores of a row that count; 0: twice the model's top_k
    bool first = false, by_id = false;  // the options `tokens` and `credit`

    void start(const Setup &setup) override;
    void used(const Routing &routing) override;
    i64 victim(int layer) override;

private:
    std::vector<double> scores;  // of each unit
};

/// DALI's Algorithm 2: every window, the residents with the fewest rows make room for those with the most.
struct WorkloadAware : Replacement {
    i64 w_size = 4, u_size = 1;
    bool printed = false, only_if_better = false, blocking = false, relabel = false;  // printed: the option `firing`

    WorkloadAware() { admits = false; }
    void start(const Setup &setup) override;
    void used(const Routing &routing) override;
    i64 victim(int layer) override;
    bool layer_end(int layer, Swap &swap) override;

private:
    const PoolState *cache = nullptr;
    std::vector<std::vector<i64>> scores;  // of each layer
    std::vector<i64> visits;
    std::vector<std::vector<bool>> members;
};

using PartOptions = nb::dict;  // an option of a part as Python has it, by name
std::unique_ptr<Assignment> make_assignment(const PartOptions &options);
std::unique_ptr<Prefetch> make_prefetch(const PartOptions &options);
std::unique_ptr<Replacement> make_replacement(const PartOptions &options);

inline std::string text_of(const PartOptions &options, const char *name) { return text(nb::handle(options[name])); }
inline bool is(const PartOptions &options, const char *name, const char *value) { return text_of(options, name) == value; }
inline i64 number(const PartOptions &options, const char *name) { return as_int(nb::handle(options[name])); }
inline bool flag(const PartOptions &options, const char *name) { return truth(nb::handle(options[name]).ptr()); }
algorithms::Reading reading_of(const PartOptions &options);

}  // namespace moesim
