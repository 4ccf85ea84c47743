#include "memory.hpp"

namespace moesim {

/// Find a pool by name; none: nullptr.
PoolState *DeviceMemory::pool(nb::handle name) {
    for (auto &one : pools)
        if (one->name.ptr() == name.ptr()) return one.get();
    check_key(name);
    for (auto &one : pools) {
        int same = PyObject_RichCompareBool(one->name.ptr(), name.ptr(), Py_EQ);
        if (same < 0) throw nb::python_error();
        if (same) return one.get();
    }
    return nullptr;
}

/// Count bytes in (or, negative, out) and record the new level.
void DeviceMemory::add(i64 n_bytes, i64 now) {
    used += n_bytes;
    if (used > peak) peak = used;
    records->memory.push_back({now, used, device});
}

/// Count a copy in transit in (or, negative, out). It takes nothing that a pool or the KV cache may still fill.
void DeviceMemory::hold(i64 n_bytes, i64 now) {
    spare -= n_bytes;
    add(n_bytes, now);
}

/// Take a pool's memory for an expert that is to come.
void DeviceMemory::reserve(PoolState *pool, i64 layer, i64 n_bytes, i64 now) {
    pool->take(layer, n_bytes);
    add(n_bytes, now);
}

CopyState *DeviceMemory::arrive(i64 unit, PoolState *pool, i64 fetch) {
    copies[unit] = {};
    origins[unit] = {pool, fetch};
    there[unit] = true;
    put(pool, unit);
    return &copies[unit];
}

/// Forget an idle copy and free its memory.
void DeviceMemory::remove(i64 unit, bool dropped, i64 now) {
    auto [pool, fetch] = origins[unit];
    there[unit] = false;
    i64 shelf = unit / weights->n_experts, layer = shelf % weights->n_layers, n_bytes = weights->n_bytes[shelf];
    take_out(pool, unit);
    pool->take(layer, -n_bytes);
    add(-n_bytes, now);
    records->evictions.push_back({now, fetch, int(layer), int(unit % weights->n_experts), pool->number, std::int16_t(device),
                                  std::int16_t(weights->width(unit)), dropped, copies[unit].used});
}

/// Remove a copy now if it is idle, else as soon as it is.
void DeviceMemory::drop(i64 unit, i64 now) {
    CopyState &copy = copies[unit];
    if (!copy.in_use) remove(unit, true, now);
    else if (copy.leaves == Leaves::no) copy.leaves = Leaves::dropped;
}

/// Remove a victim now if it is idle, else as soon as it is.
void DeviceMemory::evict(i64 unit, i64 now) {
    if (!copies[unit].in_use) {
        remove(unit, false, now);
    } else {
        copies[unit].leaves = Leaves::evicted;
        leave(unit, 1);
    }
}

/// Keep a copy that was dropped; a victim leaves in any case, since something else comes in its place.
void DeviceMemory::keep(i64 unit) {
    if (copies[unit].leaves == Leaves::dropped) copies[unit].leaves = Leaves::no;
}

void DeviceMemory::leave(i64 unit, int sign) {
    PoolState *pool = origins[unit].pool;
    i64 shelf = unit / weights->n_experts;
    pool->leaving[pool->at(shelf % weights->n_layers)] += sign * weights->n_bytes[shelf];
}

/// One user of a copy has done with it; a copy that is to leave goes with the last.
void DeviceMemory::release(i64 unit, i64 now) {
    CopyState &copy = copies[unit];
    --copy.in_use;
    if (copy.leaves == Leaves::no || copy.in_use) return;
    if (copy.leaves == Leaves::evicted) leave(unit, -1);
    remove(unit, copy.leaves == Leaves::dropped, now);
}

/// Move a resident copy to another pool; the device's bytes do not change.
void DeviceMemory::relabel(i64 unit, PoolState *pool, i64 layer) {
    PoolState *&from = origins[unit].pool;
    i64 n_bytes = weights->bytes_of(unit);
    bool leaves = copies[unit].leaves == Leaves::evicted;
    if (leaves) leave(unit, -1);
    from->take(layer, -n_bytes);
    take_out(from, unit);
    pool->take(layer, n_bytes);
    put(pool, unit);
    from = pool;
    if (leaves) leave(unit, 1);
}

void DeviceMemory::put(PoolState *pool, i64 unit) {
    i64 shelf = unit / weights->n_experts, expert = unit % weights->n_experts;
    pool->members[shelf * words() + (expert >> 6)] |= u64(1) << (expert & 63);
    ++pool->held[shelf];
}

void DeviceMemory::take_out(PoolState *pool, i64 unit) {
    i64 shelf = unit / weights->n_experts, expert = unit % weights->n_experts;
    pool->members[shelf * words() + (expert >> 6)] &= ~(u64(1) << (expert & 63));
    --pool->held[shelf];
}

}  // namespace moesim
