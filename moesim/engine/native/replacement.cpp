#include "replacement.hpp"

#include "algorithms/caching.hpp"
#include "drawing.hpp"
#include "transient.hpp"

namespace moesim {

// ------------------------------------------------------------------------------------------------- what the parts share

/// Take note of a routed micro-batch; the first of another layer visit begins anew.
void PresentVisit::add(const State &state, const Routing &routing) {
    if (step != routing.step || layer != routing.layer) {
        step = routing.step, layer = routing.layer;
        n_experts = state.n_experts;
        base = i64(layer) * n_experts;
        routed.assign((n_experts + 63) / 64, 0);
    }
    for (int expert : routing.active) routed[expert >> 6] |= u64(1) << (expert & 63);
}

void Ordered::clear(i64 units, int pools) {
    n_units = units;
    places.assign(units + pools, {-1, -1});
    for (int pool = 0; pool < pools; ++pool) places[end(pool)] = {int(end(pool)), int(end(pool))};
}

void Ordered::append(int pool, i64 unit) {
    Place &last = places[end(pool)];
    places[unit] = {int(end(pool)), last.previous};
    places[last.previous].next = int(unit);
    last.previous = int(unit);
}

void Ordered::erase(i64 unit) {
    auto [next, previous] = places[unit];
    places[previous].next = next;
    places[next].previous = previous;
    places[unit].next = -1;
}

/// Find the ids of a single row by rank.
void ranked(const Routing &routing, std::vector<int> &found) {
    found.assign(routing.ids.begin(), routing.ids.begin() + routing.top_k);
}

void Admitting::start(const Setup &setup) {
    state = &setup.state;
    gpu = setup.gpu;
    per_layer = setup.per_layer;
    members.clear(i64(state->n_layers) * state->n_experts, state->n_layers);
    for (int layer = 0; layer < state->n_layers; ++layer) inserted(layer, setup.residents[layer]);
}

void Admitting::inserted(int layer, const std::vector<int> &experts) {
    for (int expert : experts) {
        i64 one = unit(layer, expert);
        if (members.has(one)) members.erase(one);
        members.append(pool(layer), one);
    }
}

// ------------------------------------------------------------------------------------------------------------ the parts

/// Put what is fetched at the end; a prefetch on its way that is asked for keeps its place.
void FIFO::inserted(int layer, const std::vector<int> &experts) {
    for (int expert : experts)
        if (i64 one = unit(layer, expert); !members.has(one)) members.append(pool(layer), one);
}

/// Name the first in order of insertion, and forget it.
i64 FIFO::victim(int layer) {
    Ordered::Pool ordered = members.of(pool(layer));
    i64 found = first_resident(ordered.begin(), ordered.end());
    if (found >= 0) members.erase(found);
    return found;
}

void LRU::start(const Setup &setup) {
    present.clear();
    FIFO::start(setup);
}

/// Move the cached ones among the active to the recent end.
void LRU::used(const Routing &routing) {
    FIFO::used(routing);
    if (by_rank && routing.n_rows == 1) {
        ranked(routing, present);
        present_layer = routing.layer;
        mark(routing.layer, present);
    } else {
        present.clear();
        mark(routing.layer, routing.active);
    }
}

/// Put what is fetched at the recent end; what is loaded on demand takes its place in the order of the visit.
void LRU::inserted(int layer, const std::vector<int> &experts) {
    Admitting::inserted(layer, experts);
    if (!present.empty() && present_layer == layer) mark(layer, present);
}

void LRU::mark(int layer, const std::vector<int> &experts) {
    for (int expert : experts) {
        i64 one = unit(layer, expert);
        if (!members.has(one)) continue;
        members.erase(one);
        members.append(pool(layer), one);
    }
}

void RandomVictim::start(const Setup &setup) {
    Admitting::start(setup);
    asked = 0;
}

/// Draw among the residents, and forget the one drawn.
i64 RandomVictim::victim(int layer) {
    for (bool routed : {false, true}) {
        there.clear();
        for (i64 one : members.of(pool(layer)))
            if ((unrouted_first && visit.has(one)) == routed && resident(one)) there.push_back(one);
        if (there.empty()) continue;
        ++asked;
        i64 found = there[scramble((seed << 32) + asked) % there.size()];
        members.erase(found);
        return found;
    }
    return -1;
}

/// Begin with empty windows.
void WorkloadAware::start(const Setup &setup) {
    state = &setup.state;
    gpu = setup.gpu;
    cache = setup.cache;
    scores.assign(state->n_layers, std::vector<i64>(state->n_experts, 0));
    visits.assign(state->n_layers, 0);
    members.assign(state->n_layers, std::vector<bool>(state->n_experts, false));
    for (int layer = 0; layer < state->n_layers; ++layer)
        for (int expert : setup.residents[layer]) members[layer][expert] = true;
}

/// Add the rows of this layer to its window.
void WorkloadAware::used(const Routing &routing) {
    for (int expert : routing.active) scores[routing.layer][expert] += routing.rows[expert];
}

/// Replace the u_size lowest residents by the u_size highest others when a window is over.
bool WorkloadAware::layer_end(int layer, Swap &swap) {
    i64 visit = visits[layer]++;
    if ((printed ? visit : visit + 1) % w_size) return false;
    algorithms::Swaps found = algorithms::workload_aware_swap(scores[layer], members[layer], u_size, only_if_better);
    std::fill(scores[layer].begin(), scores[layer].end(), 0);
    swap.victims = found.victims;
    swap.newcomers = found.newcomers;
    for (int expert : swap.victims) members[layer][expert] = false;
    for (int expert : swap.newcomers) members[layer][expert] = true;
    swap.urgency = blocking ? DEMAND : UPDATE;
    swap.relabel = relabel;
    return !swap.victims.empty();
}

/// Name a copy that was replaced while it was on its way, and then asked for once more.
i64 WorkloadAware::victim(int layer) {
    std::vector<int> cached;
    residents(*state, cache, layer, cached);
    for (int expert : cached) {
        i64 unit = i64(layer) * state->n_experts + expert;
        if (!members[layer][expert] && gpu->memory.copies[unit].in_use <= 0) return unit;
    }
    return -1;
}

}  // namespace moesim
