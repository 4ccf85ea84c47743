// Replacement parts: what leaves the cache when something else wants its place.
#pragma once

#include "parts.hpp"

namespace moesim {

/// The experts that the present layer visit is routed to, in all its micro-batches so far.
struct PresentVisit {
    int step = -1, layer = -1;
    i64 base = 0;  // unit of the layer's expert 0
    std::vector<u64> routed;  // of the layer, as bits
    void add(const State &state, const Routing &routing);
    bool has(i64 unit) const {
        i64 expert = unit - base;
        return layer >= 0 && expert >= 0 && expert < n_experts && routed[expert >> 6] >> (expert & 63) & 1;
    }

private:
    int n_experts = 0;
};

/// Units of several pools, each pool's in order of insertion, as dicts of Python keep them.
struct Ordered {
    struct Place {
        int next, previous;
    };
    std::vector<Place> places;  // of units, then of the ends of the pools; next -1: not there
    i64 n_units = 0;
    void clear(i64 units, int pools);
    bool has(i64 unit) const { return places[unit].next >= 0; }
    struct Iterator {
        const Ordered *of;
        i64 unit;
        i64 operator*() const { return unit; }
        void operator++() { unit = of->places[unit].next; }
        bool operator!=(const Iterator &other) const { return unit != other.unit; }
    };
    struct Pool {
        Iterator first, last;
        Iterator begin() const { return first; }
        Iterator end() const { return last; }
    };
    Pool of(int pool) const { return {{this, places[end(pool)].next}, {this, end(pool)}}; }
    void append(int pool, i64 unit);
    void erase(i64 unit);

private:
    i64 end(int pool) const { return n_units + pool; }
};

/// Demand loads enter the cache; keeps the cached experts of each pool in order of insertion.
struct Admitting : Replacement {
    bool unrouted_first = true;  // the option `victims`

    void start(const Setup &setup) override;
    void used(const Routing &routing) override { visit.add(*state, routing); }
    void inserted(int layer, const std::vector<int> &experts) override;

protected:
    State *state = nullptr;
    DeviceState *gpu = nullptr;
    bool per_layer = true;
    PresentVisit visit;
    Ordered members;

    int pool(int layer) const { return per_layer ? layer : 0; }
    i64 unit(int layer, int expert) const { return i64(layer) * state->n_experts + expert; }
    bool resident(i64 unit) const { return gpu->memory.resident(unit); }

    /// Find the first of some members that is there and not protected, or the first that is there; -1: none.
    template <class Iterator> i64 first_resident(Iterator begin, Iterator end) const {
        i64 routed = -1;
        for (Iterator i = begin; i != end; ++i) {
            i64 at = unit_at(*i);
            if (unrouted_first && visit.has(at)) {
                if (routed < 0 && resident(at)) routed = at;
            } else if (resident(at)) {
                return at;
            }
        }
        return routed;
    }

private:
    static i64 unit_at(i64 unit) { return unit; }
    template <class Rank> static i64 unit_at(const std::pair<Rank, i64> &ranked) { return ranked.second; }
};

/// The one that has been in the cache longest.
struct FIFO : Admitting {
    void inserted(int layer, const std::vector<int> &experts) override;
    i64 victim(int layer) override;
};

/// The one whose last use is longest ago; being fetched ahead counts as a use.
struct LRU : FIFO {
    bool by_rank = true;  // the option `use_order`

    void start(const Setup &setup) override;
    void used(const Routing &routing) override;
    void inserted(int layer, const std::vector<int> &experts) override;

private:
    int present_layer = -1;
    std::vector<int> present;  // what a single row that was routed last uses, by rank
    void mark(int layer, const std::vector<int> &experts);
};

/// Any resident, with equal chance, from a counter and a seed.
struct RandomVictim : Admitting {
    u64 seed = 0;

    void start(const Setup &setup) override;
    i64 victim(int layer) override;

private:
    u64 asked = 0;
    std::vector<i64> there;
};

/// Nothing is ever evicted; demand loads go through the staging pool.
struct Static : Replacement {
    Static() { admits = false; }
    void start(const Setup &) override {}
    void used(const Routing &) override {}
    void inserted(int, const std::vector<int> &) override {}
    i64 victim(int) override { return -1; }
};

/// DALI's Algorithm 2: every window, the residents with the fewest rows make room for those with the most.
struct WorkloadAware : Static {
    i64 w_size = 4, u_size = 1;
    bool printed = false, only_if_better = false, blocking = false, relabel = false;  // printed: the option `firing`

    void start(const Setup &setup) override;
    void used(const Routing &routing) override;
    i64 victim(int layer) override;
    bool layer_end(int layer, Swap &swap) override;

private:
    const State *state = nullptr;
    const DeviceState *gpu = nullptr;
    const PoolState *cache = nullptr;
    std::vector<std::vector<i64>> scores;  // of each layer
    std::vector<i64> visits;
    std::vector<std::vector<bool>> members;
};

void ranked(const Routing &routing, std::vector<int> &found);

}  // namespace moesim
