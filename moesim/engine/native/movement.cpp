// The actions that move things: Fetch, Drop, Move, Send.
#include "state.hpp"
#include "streams.hpp"

namespace moesim {

static void new_transfer(State &state, i64 layer, i64 expert, i64 unit, DeviceState *device, PoolState *pool, i64 urgency,
                         PyObject *source) {
    i64 n_bytes = state.weights.bytes_of(unit);
    auto what = [&] { return "Fetch(" + unit_text(layer, expert) + ", " + text(device->name) + ")"; };
    if (pool && n_bytes > pool->capacity[pool->at(layer)])
        fail(state, what() + ": pool '" + text(pool->name) + "' holds " + std::to_string(pool->capacity[pool->at(layer)]) +
                        " bytes, the expert has " + std::to_string(n_bytes),
             "make the pool at least one expert large");
    DeviceState *src = nullptr;
    CopyState *copy = nullptr;
    auto try_one = [&](DeviceState *one) {
        copy = one == device ? nullptr : one->memory.get(unit);
        src = copy ? one : nullptr;
        return src != nullptr;
    };
    if (source == Py_None) {
        const auto &listed = sources(state, device);
        std::any_of(listed.begin(), listed.end(), try_one);
    } else if (DeviceState *named = find_device(state, source)) {
        try_one(named);
    }
    if (!src) {
        std::string known = truth(source) ? "no copy on " + text(source) : "no copy anywhere that can be reached";
        fail(state, what() + ": " + known, "leave source out, or fetch it to there first");
    }
    ++copy->in_use;
    const std::vector<LinkState *> &path = path_between(state, src, device);
    Transfer *transfer =
        state.transfers.make(state.fetch_numbers++, unit, int(layer), int(expert), n_bytes, &path, urgency, state.now);
    transfer->src = src;
    transfer->dst = device;
    transfer->pool = pool;
    transfer->width = state.weights.width(unit);
    device->pending[unit] = transfer;
    enqueue(state, path[0], transfer);
}

/// Queue a copy of an expert, or hasten it if it is queued.
void fetch_expert(State &state, i64 layer, i64 expert, i64 unit, DeviceState *device, PoolState *pool, i64 urgency, PyObject *source) {
    if (Transfer *transfer = device->pending[unit]) {
        transfer->drop_on_arrival = false;
        hasten(state, transfer, urgency);
        return;
    }
    CopyState *copy = device->memory.get(unit);
    if (copy && !device->backing) {
        device->memory.keep(unit);
    } else {
        new_transfer(state, layer, expert, unit, device, pool, urgency, source);
    }
}

/// Forget a copy once it is idle, or cancel what is queued.
void drop_expert(State &state, i64 layer, i64 expert, i64 unit, DeviceState *device) {
    if (device->memory.get(unit)) {
        device->memory.drop(unit, state.now);
        return;
    }
    Transfer *transfer = device->pending[unit];
    if (!transfer)
        fail(state, "Drop(" + unit_text(layer, expert) + ", " + text(device->name) + "): neither resident nor being fetched",
             "drop only what is there");
    if (transfer->started || transfer->waiting) {
        transfer->drop_on_arrival = true;
    } else {
        dequeue(transfer);
        device->pending[unit] = nullptr;
        transfer->src->memory.release(unit, state.now);
        state.transfers.give_back(transfer);
    }
}

/// Let a copy on its way arrive in another pool, which counts its bytes from now on if it is in flight, full or not.
static void divert(Transfer *transfer, PoolState *pool) {
    transfer->drop_on_arrival = false;
    if (transfer->hop + 1 == transfer->path->size() && !transfer->first_chunk && transfer->pool) {
        transfer->pool->take(transfer->layer, -transfer->n_bytes);
        pool->take(transfer->layer, transfer->n_bytes);
    }
    transfer->pool = pool;
}

/// Relabel a copy that is there or on its way.
void move_expert(State &state, i64 layer, i64 expert, i64 unit, DeviceState *device, PoolState *pool) {
    if (Transfer *transfer = device->pending[unit]) {
        divert(transfer, pool);
        return;
    }
    CopyState *copy = device->memory.get(unit);
    auto what = [&] { return "Move(" + unit_text(layer, expert) + ", " + text(device->name) + ")"; };
    if (!copy) fail(state, what() + ": neither resident nor being fetched", "move only what is there or on its way");
    if (device->memory.origins[unit].pool != pool && pool->free(layer) < state.weights.bytes_of(unit))
        fail(state, what() + ": pool '" + text(pool->name) + "' is full", "Drop or Move something out of it first");
    device->memory.relabel(unit, pool, layer);
}

/// Queue copies of experts, or hasten those that are queued.
void fetch(State &state, PyObject *action) {
    i64 layer = as_int(PyTuple_GET_ITEM(action, 0)), urgency = as_int(PyTuple_GET_ITEM(action, 3));
    PyObject *name = PyTuple_GET_ITEM(action, 2), *pool_name = PyTuple_GET_ITEM(action, 4);
    DeviceState *device = device_of(state, name, "Fetch");
    auto what = [&] { return "Fetch(L" + std::to_string(layer) + ", " + text(name) + ")"; };
    PoolState *pool = device->backing ? nullptr : device->memory.pool(pool_name);
    if (!pool && !device->backing) pool_of(state, device, pool_name, what());
    if (urgency < 0) fail(state, what() + ": urgency " + std::to_string(urgency), "classes start at 0 (demand)");
    Items experts(PyTuple_GET_ITEM(action, 1));
    for (Py_ssize_t i = 0; i < experts.size(); ++i) {
        i64 expert = as_int(experts[i]), unit = unit_of(state, layer, expert, "Fetch", PyTuple_GET_ITEM(action, 6));
        fetch_expert(state, layer, expert, unit, device, pool, urgency, PyTuple_GET_ITEM(action, 5));
    }
}

/// Forget copies once idle; cancel what is queued.
void drop(State &state, PyObject *action) {
    i64 layer = as_int(PyTuple_GET_ITEM(action, 0));
    PyObject *name = PyTuple_GET_ITEM(action, 2);
    DeviceState *device = device_of(state, name, "Drop");
    if (device->backing)
        fail(state, "Drop(L" + std::to_string(layer) + ", " + text(name) + "): copies on a backing device stay",
             "drop copies on other devices only");
    Items experts(PyTuple_GET_ITEM(action, 1));
    for (Py_ssize_t i = 0; i < experts.size(); ++i) {
        i64 expert = as_int(experts[i]), unit = unit_of(state, layer, expert, "Drop", PyTuple_GET_ITEM(action, 3));
        drop_expert(state, layer, expert, unit, device);
    }
}

/// Relabel copies that are there or on their way.
void move(State &state, PyObject *action) {
    i64 layer = as_int(PyTuple_GET_ITEM(action, 0));
    PyObject *name = PyTuple_GET_ITEM(action, 2), *pool_name = PyTuple_GET_ITEM(action, 3);
    DeviceState *device = device_of(state, name, "Move");
    PoolState *pool = pool_of(state, device, pool_name, "Move(L" + std::to_string(layer) + ", " + text(name) + ")");
    Items experts(PyTuple_GET_ITEM(action, 1));
    for (Py_ssize_t i = 0; i < experts.size(); ++i) {
        i64 expert = as_int(experts[i]), unit = unit_of(state, layer, expert, "Move", PyTuple_GET_ITEM(action, 4));
        move_expert(state, layer, expert, unit, device, pool);
    }
}

/// Queue a message.
void send(State &state, PyObject *action) {
    PyObject *src = PyTuple_GET_ITEM(action, 1), *dst = PyTuple_GET_ITEM(action, 2);
    i64 n_bytes = as_int(PyTuple_GET_ITEM(action, 0));
    int same = PyObject_RichCompareBool(src, dst, Py_EQ);
    if (same < 0) throw nb::python_error();
    if (same || n_bytes < 1)
        fail(state, "Send(" + std::to_string(n_bytes) + ", " + text(src) + ", " + text(dst) + ")",
             "send at least one byte between two devices");
    DeviceState *from = device_of(state, src, "Send"), *to = device_of(state, dst, "Send");
    nb::object tag = nb::borrow(PyTuple_GET_ITEM(action, 3));
    send_message(state, path_between(state, from, to), n_bytes, DEMAND, [&state, tag] { state.sent.push_back(tag); }, true,
                 Cause::message, -1);
}

}  // namespace moesim
