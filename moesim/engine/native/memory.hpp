// Who is where: copies and pools of one device (rule 6).
#pragma once

#include "records.hpp"

#include <memory>

namespace moesim {

/// Numbers of everything that can be copied. At full width a unit is layer * n_experts + expert; other widths follow in blocks.
struct Weights {
    int n_layers = 0, n_experts = 0;
    i64 block = 0;  // units of one width
    std::vector<nb::object> widths;  // bits as Python has them
    std::vector<i64> n_bytes;  // of each shelf, which is a layer at a width

    i64 size() const { return block * i64(widths.size()); }
    int width(i64 unit) const { return int(unit / block); }
    i64 bytes_of(i64 unit) const { return n_bytes[unit / n_experts]; }
};

/// A pool's bytes, there and in use: one number each, or, if the pool is per layer, one for each layer.
struct PoolState {
    nb::object name;
    int number;  // over all devices
    std::vector<i64> capacity, used, leaving;  // leaving: of what is used, victims that are still in use
    bool per_layer;
    i64 landing = 0, landed = 0;  // bytes next to the pool, and how many are taken
    i64 total = 0, peak = 0;
    std::vector<u64> members;  // resident units as bits: each shelf begins at a new word
    std::vector<int> held;  // members of each shelf

    int at(i64 layer) const { return per_layer ? int(layer) : 0; }
    i64 free(i64 layer) const { return capacity[at(layer)] - used[at(layer)]; }
    /// Whether another victim must be named for a copy.
    bool lacks(i64 layer, i64 n_bytes) const { return n_bytes > free(layer) + leaving[at(layer)]; }
    /// Whether a copy whose victims are named has room, in the pool or next to it.
    bool lands(i64 layer, i64 n_bytes) const {
        i64 room = free(layer);
        return n_bytes <= room || n_bytes - std::max<i64>(0, room) <= landing - landed;
    }
    void take(i64 layer, i64 n_bytes) {
        i64 room = free(layer);
        used[at(layer)] += n_bytes;
        if (room < n_bytes || room < 0) landed += std::max<i64>(0, n_bytes - room) - std::max<i64>(0, -room);
        total += n_bytes;
        if (total > peak) peak = total;
    }
};

enum class Leaves : std::uint8_t { no, dropped, evicted };

/// One resident copy of an expert.
struct CopyState {
    int in_use = 0;  // queued or running Runs and copies that read it here
    bool used = false;
    Leaves leaves = Leaves::no;  // what was dropped, or named as a victim, while in use goes when idle
};

/// Where a copy is and whence it came; apart from its state, which is looked at far more often.
struct Origin {
    PoolState *pool = nullptr;  // none on a backing device
    i64 fetch = -1;  // the fetch that brought it; -1: placed at the start
};

/// Copies and bytes of one device.
struct DeviceMemory {
    int device = 0;
    const Weights *weights = nullptr;
    Records *records = nullptr;
    bool backing = false;
    i64 capacity = 0, used = 0, kv = 0, spare = 0, peak = 0;
    std::vector<std::uint8_t> there;  // of each unit: 1 if a usable copy is here
    std::vector<CopyState> copies;  // of each unit
    std::vector<Origin> origins;
    std::vector<std::unique_ptr<PoolState>> pools;

    CopyState *get(i64 unit) {
        return unit >= 0 && unit < i64(there.size()) && there[unit] ? &copies[unit] : nullptr;
    }
    bool resident(i64 unit) const { return there[unit]; }
    PoolState *pool(nb::handle name);
    int words() const { return (weights->n_experts + 63) / 64; }

    void add(i64 n_bytes, i64 now);
    void hold(i64 n_bytes, i64 now);
    void reserve(PoolState *pool, i64 layer, i64 n_bytes, i64 now);
    CopyState *arrive(i64 unit, PoolState *pool, i64 fetch);
    void remove(i64 unit, bool dropped, i64 now);
    void drop(i64 unit, i64 now);
    void evict(i64 unit, i64 now);
    void keep(i64 unit);
    void release(i64 unit, i64 now);
    void relabel(i64 unit, PoolState *pool, i64 layer);

private:
    void leave(i64 unit, int sign);
    void put(PoolState *pool, i64 unit);
    void take_out(PoolState *pool, i64 unit);
};

}  // namespace moesim
