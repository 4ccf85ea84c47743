// The pool of experts that are fetched ahead and never enter a cache: used in their layer or by nobody.
#pragma once

#include "parts.hpp"

namespace moesim {

/// What was fetched ahead to a device, by layer, until that layer ends.
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

void residents(const State &state, const PoolState *pool, int layer, std::vector<int> &found);

}  // namespace moesim
