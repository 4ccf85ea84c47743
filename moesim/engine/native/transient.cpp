#include "transient.hpp"

namespace moesim {

static auto of_layer(int layer) {
    return [layer](const auto &one) { return one.first == layer; };
}

/// Take note of experts of a later layer that are fetched.
void Transient::fetch(int layer, const std::vector<int> &experts) {
    auto found = std::find_if(ahead.begin(), ahead.end(), of_layer(layer));
    if (found == ahead.end()) found = ahead.insert(ahead.end(), {layer, {}});
    found->second.insert(found->second.end(), experts.begin(), experts.end());
}

/// Find what is on its way, which is to become more urgent in the pool it was meant for, and what is still to be loaded.
void Transient::demand(int layer, const std::vector<int> &misses, std::vector<int> &early, std::vector<int> &rest) {
    if (size_t(layer) < late.size() && !late[layer].empty()) {
        std::vector<int> again, others;
        for (int expert : late[layer])
            if (pending(layer, expert))
                (std::find(misses.begin(), misses.end(), expert) != misses.end() ? again : others).push_back(expert);
        late[layer] = others;
        if (!again.empty()) fetch(layer, again);
    }
    auto found = std::find_if(ahead.begin(), ahead.end(), of_layer(layer));
    for (int expert : misses) {
        bool asked = found != ahead.end() && std::find(found->second.begin(), found->second.end(), expert) != found->second.end();
        (asked && pending(layer, expert) ? early : rest).push_back(expert);
    }
}

/// List what is to be dropped of a layer that ends: what is there, and what is on its way to this pool, for nobody.
void Transient::layer_end(int layer, std::vector<int> &held) {
    auto found = std::find_if(ahead.begin(), ahead.end(), of_layer(layer));
    if (found == ahead.end()) return;
    residents(state, pool, layer, held);
    late.resize(state.n_layers);
    for (int expert : found->second)
        if (pending(layer, expert)) {
            held.push_back(expert);
            auto &known = late[layer];
            if (std::find(known.begin(), known.end(), expert) == known.end()) known.push_back(expert);
        }
    ahead.erase(found);
}

/// Leave experts on their way to another pool.
void Transient::forget(int layer, const std::vector<int> &experts) {
    if (size_t(layer) >= late.size()) return;
    std::erase_if(late[layer], [&](int e) { return std::find(experts.begin(), experts.end(), e) != experts.end(); });
}

/// Find a prefetched expert whose layer is routed and that nothing uses; for a demand load, any idle one; -1: none.
i64 Transient::spent(const Transfer *fetch, int routed) {
    for (auto &[layer, experts] : ahead) {
        if (layer > routed && fetch->urgency != DEMAND) continue;
        for (size_t i = 0; i < experts.size(); ++i) {
            i64 found = unit(layer, experts[i]);
            if (!device->memory.resident(found) || device->memory.copies[found].in_use > 0) continue;
            experts.erase(experts.begin() + i);
            return found;
        }
    }
    return -1;
}

/// List the experts of a layer that are in a pool, ascending.
void residents(const State &state, const PoolState *pool, int layer, std::vector<int> &found) {
    if (!pool->held[layer]) return;
    int words = (state.n_experts + 63) / 64;
    const u64 *bits = pool->members.data() + i64(layer) * words;
    for (int i = 0; i < words; ++i)
        for (u64 left = bits[i]; left; left &= left - 1) found.push_back(64 * i + std::countr_zero(left));
}

}  // namespace moesim
