// Taking a run over from Python's setup: first the machine, then what was placed on it.
#include "state.hpp"
#include "streams.hpp"

namespace moesim {

static DeviceState *of_twin(State &state, nb::handle twin) { return find_device(state, attr(twin, "name").ptr()); }

static nb::object items_of(State &state, nb::handle owner, const char *name) {
    return own(PySequence_List(ask(state, attr(attr(owner, name), "items"), {}).ptr()));
}

static Lane lane_of(State &state, DeviceState *device, bool side) {
    Lane lane;
    lane.device = device;
    lane.side = side;
    std::string name = text(device->name);
    lane.expert_activity = state.contention.number(name + (side ? ".side" : ".experts"));
    lane.dense_activity = state.contention.number(name + (side ? ".side" : ".dense"));
    lane.plain = state.contention.partners[lane.expert_activity].empty() && state.contention.partners[lane.dense_activity].empty();
    return lane;
}

static void read_model(State &state) {
    nb::object &model = state.model;
    state.n_layers = int(int_attr(model, "n_layers"));
    state.n_experts = int(int_attr(model, "n_experts"));
    state.top_k = int(int_attr(model, "top_k"));
    state.routing.rows.assign(state.n_experts, 0);
    for (int layer = 0; layer < state.n_layers; ++layer)
        state.visits.emplace_back(layer, i64(layer) * state.n_experts, state.top_k, state.n_experts);
    state.hidden = int(int_attr(model, "hidden"));
    state.n_shared = int(int_attr(model, "n_shared"));
    state.n_leading = int(int_attr(model, "n_dense_layers"));
    Items alike(attr(model, "alike").ptr());
    for (Py_ssize_t i = 0; i < alike.size(); ++i) state.alike.push_back(int(as_int(alike[i])));
    for (int layer = 0; layer < state.n_layers; ++layer) {
        nb::object widths = ask(state, attr(model, "core_widths"), {num(layer)});
        state.core_widths.emplace_back(as_int(PyTuple_GET_ITEM(widths.ptr(), 0)), as_int(PyTuple_GET_ITEM(widths.ptr(), 1)));
    }
    state.weights.n_layers = state.n_layers;
    state.weights.n_experts = state.n_experts;
    state.weights.block = i64(state.n_layers) * state.n_experts;
    Items widths(attr(model, "widths").ptr());
    for (Py_ssize_t i = 0; i < widths.size(); ++i) {
        state.weights.widths.push_back(nb::borrow(widths[i]));
        for (int layer = 0; layer < state.n_layers; ++layer)
            state.weights.n_bytes.push_back(as_int(ask(state, attr(model, "expert_bytes"), {num(layer), ref(widths[i])})));
    }
}

static void read_contention(State &state) {
    nb::object contention = attr(state.costs, "contention");
    Items pairs(contention.ptr());
    auto put = [&](int activity, int other, i64 rate) {
        for (auto &known : state.contention.partners[activity])
            if (known.other == other) {
                known.rate = rate;
                return;
            }
        state.contention.partners[activity].push_back({other, rate});
    };
    for (Py_ssize_t i = 0; i < pairs.size(); ++i) {
        int a = state.contention.number(text(attr(pairs[i], "a"))), b = state.contention.number(text(attr(pairs[i], "b")));
        put(a, b, int_attr(pairs[i], "a_rate_ppm"));
        put(b, a, int_attr(pairs[i], "b_rate_ppm"));
    }
}

/// Read whether a device has all experts, which a placement may change.
static void read_backing(State &state, DeviceState &device) {
    device.backing = device.memory.backing = truth(attr(device.twin, "backing").ptr());
    device.memory.there.assign(state.weights.size(), device.backing);
}

static void read_devices(State &state) {
    nb::object listed = items_of(state, state.twin, "devices");
    Items devices(listed.ptr());
    for (Py_ssize_t i = 0; i < devices.size(); ++i) state.devices.emplace_back();
    for (Py_ssize_t i = 0; i < devices.size(); ++i) {
        nb::object twin = nb::borrow(PyTuple_GET_ITEM(devices[i], 1));
        DeviceState &device = state.devices[i];
        device.index = int(i);
        device.twin = twin;
        device.name = attr(twin, "name");
        device.is_gpu = truth(attr(twin, "is_gpu").ptr());
        device.computes = truth(attr(twin, "computes").ptr());
        device.layer_host = as_int(ask(state, attr(state.costs, "layer_host_ns"), {ref(device.name)}));
        device.first_extra = as_int(ask(state, attr(state.costs, "first_extra_ns"), {ref(device.name)}));
        nb::object more = ask(state, attr(state.costs, "more_rows_table"), {ref(device.name)});
        for (nb::handle ns : more) device.more_rows.push_back(as_int(ns.ptr()));
        for (const nb::object &bits : state.weights.widths) {
            device.ask_expert_ns.push_back(attr(ask(state, attr(state.costs, "at_bits"), {ref(bits)}), "expert_ns"));
            device.expert_ns.emplace_back();
        }
        device.pending.assign(state.weights.size(), nullptr);
        device.main = lane_of(state, &device, false);
        device.side = lane_of(state, &device, true);
        DeviceMemory &memory = device.memory;
        memory.device = int(i);
        memory.weights = &state.weights;
        memory.records = &state.records;
        read_backing(state, device);
        memory.copies.resize(state.weights.size());
        memory.origins.resize(state.weights.size());
        if (device.is_gpu) state.gpus.push_back(&device);
    }
    state.sources.resize(state.devices.size());
    state.paths.resize(state.devices.size() * state.devices.size());
}

static void read_links(State &state) {
    nb::object values = ask(state, attr(attr(state.twin, "links"), "values"), {});
    nb::object listed = own(PySequence_List(values.ptr()));
    Items links(listed.ptr());
    std::vector<nb::object> media;
    for (Py_ssize_t i = 0; i < links.size(); ++i) {
        nb::handle twin = links[i];
        LinkState &link = state.links.emplace_back();
        link.is_link = true;
        link.index = int(i);
        link.name = attr(twin, "name");
        link.link = attr(twin, "link");
        link.to = of_twin(state, attr(twin, "to"));
        link.shared = truth(attr(link.link, "share_link").ptr());
        link.activity_number = state.contention.number(text(link.name));
        link.plain = state.contention.partners[link.activity_number].empty();
        state.contention.of_link[link.activity_number] = true;
        nb::object medium = attr(twin, "medium");
        size_t at = 0;
        while (at < media.size() && media[at].ptr() != medium.ptr()) ++at;
        if (at == media.size()) {
            media.push_back(medium);
            state.media.emplace_back();
        }
        link.medium = &state.media[at];
        link.medium->links.push_back(&link);
        state.alone.push_back({&link});
    }
}

/// Read the machine, on which nothing is placed yet.
void connect(State &state, nb::object twin, nb::object view) {
    state.py.load();
    state.twin = twin;
    state.view = view;
    state.model = attr(twin, "model");
    state.costs = attr(twin, "costs");
    state.policy = attr(twin, "policy");
    state.predictors = attr(twin, "predictors");
    state.progress = attr(twin, "progress");
    state.sink = attr(twin, "sink");
    state.piece = size_t(int_attr(twin, "piece"));
    state.steps = attr(twin, "steps");
    state.step = nb::none();
    state.policy_name = text(attr(twin, "policy_name"));
    state.decision_ns = int_attr(attr(twin, "options"), "decision_ns");
    nb::object listens = attr(twin, "listens"), chunk = attr(state.costs, "chunk_bytes");
    for (int kind = 0; kind < N_EVENTS; ++kind) {
        int there = PySequence_Contains(listens.ptr(), reinterpret_cast<PyObject *>(state.py.event[kind]));
        if (there < 0) throw nb::python_error();
        state.listens[kind] = there;
    }
    state.chunk_bytes = chunk.is_none() ? 0 : as_int(chunk);
    read_model(state);
    read_contention(state);
    read_devices(state);
    read_links(state);
    nb::object thread = attr(twin, "thread");
    if (!thread.is_none()) {
        state.thread = std::make_unique<HostThread>();
        state.thread->submit_ns = int_attr(thread, "submit_ns");
        state.thread->shared = truth(attr(thread, "shared").ptr());
    }
}

static void place_memory(State &state, DeviceState &device) {
    nb::object twin = attr(device.twin, "memory");
    DeviceMemory &memory = device.memory;
    read_backing(state, device);
    memory.capacity = int_attr(twin, "capacity");
    memory.spare = int_attr(twin, "spare");
    memory.used = int_attr(twin, "used");
    memory.peak = int_attr(twin, "peak");
    nb::object pools = own(PySequence_List(ask(state, attr(attr(twin, "pools"), "values"), {}).ptr()));
    Items listed(pools.ptr());
    for (Py_ssize_t i = 0; i < listed.size(); ++i) {
        auto pool = std::make_unique<PoolState>();
        pool->name = attr(listed[i], "name");
        pool->number = int(state.pool_names.size());
        state.pool_names.push_back(pool->name);
        pool->per_layer = truth(attr(listed[i], "per_layer").ptr());
        Items capacity(attr(listed[i], "capacity").ptr());
        for (Py_ssize_t c = 0; c < capacity.size(); ++c) pool->capacity.push_back(as_int(capacity[c]));
        pool->used.assign(pool->capacity.size(), 0);
        pool->leaving.assign(pool->capacity.size(), 0);
        pool->landing = int_attr(listed[i], "landing");
        size_t shelves = state.weights.n_bytes.size();
        pool->members.assign(shelves * memory.words(), 0);
        pool->held.assign(shelves, 0);
        memory.pools.push_back(std::move(pool));
    }
}

/// Put copies where they are at the start: device, pool, layer, bits and experts of each layer and width.
static void put(State &state, nb::handle copies) {
    Items listed(copies.ptr());
    for (Py_ssize_t i = 0; i < listed.size(); ++i) {
        DeviceMemory &memory = of_twin(state, PyTuple_GET_ITEM(listed[i], 0))->memory;
        PoolState *pool = memory.pool(attr(PyTuple_GET_ITEM(listed[i], 1), "name"));
        i64 layer = as_int(PyTuple_GET_ITEM(listed[i], 2));
        i64 first = unit_of(state, layer, 0, "place", PyTuple_GET_ITEM(listed[i], 3));
        Items experts(PyTuple_GET_ITEM(listed[i], 4));
        for (Py_ssize_t e = 0; e < experts.size(); ++e) {
            i64 unit = first + as_int(experts[e]);
            memory.reserve(pool, layer, state.weights.bytes_of(unit), 0);
            memory.arrive(unit, pool, -1);
        }
    }
}

static std::unique_ptr<Streams> read_streams(State &state, nb::handle twin) {
    if (twin.is_none()) return nullptr;
    auto found = std::make_unique<Streams>();
    Streams &streams = *found;
    streams.twin = nb::borrow(twin);
    streams.depth = int(int_attr(twin, "depth"));
    nb::object source = own(PySequence_List(ask(state, attr(attr(twin, "source"), "items"), {}).ptr()));
    Items sources(source.ptr()), order(attr(twin, "order").ptr());
    for (Py_ssize_t i = 0; i < sources.size(); ++i) {
        PyObject *key = PyTuple_GET_ITEM(sources[i], 0);
        DeviceState *from = device_of(state, PyTuple_GET_ITEM(sources[i], 1), "Placement.streamed");
        streams.source[{text(PyTuple_GET_ITEM(key, 0)), int(as_int(PyTuple_GET_ITEM(key, 1)))}] = from;
    }
    for (Py_ssize_t i = 0; i < order.size(); ++i) {
        StreamUse use{device_of(state, PyTuple_GET_ITEM(order[i], 0), "stream"), int(as_int(PyTuple_GET_ITEM(order[i], 1))), {}};
        Items parts(PyTuple_GET_ITEM(order[i], 2));
        for (Py_ssize_t p = 0; p < parts.size(); ++p) use.parts.push_back(text(parts[p]));
        streams.order.push_back(std::move(use));
    }
    return found;
}

static std::unique_ptr<Layout> read_layout(State &state, nb::handle twin) {
    auto at = [&](const char *name) {
        std::vector<DeviceState *> found;
        Items listed(attr(twin, name).ptr());
        for (Py_ssize_t i = 0; i < listed.size(); ++i) found.push_back(of_twin(state, listed[i]));
        return found;
    };
    auto layout = std::make_unique<Layout>();
    layout->attention_at = at("attention_at");
    layout->dense_at = at("dense_at");
    layout->shared_at = at("shared_at");
    nb::object parts = items_of(state, twin, "step_parts"), apart = items_of(state, twin, "core_at");
    Items step_parts(parts.ptr()), core_at(apart.ptr());
    for (Py_ssize_t i = 0; i < step_parts.size(); ++i)
        layout->step_parts[text(PyTuple_GET_ITEM(step_parts[i], 0))] = of_twin(state, PyTuple_GET_ITEM(step_parts[i], 1));
    layout->core_at.assign(state.n_layers, nullptr);
    for (Py_ssize_t i = 0; i < core_at.size(); ++i)
        layout->core_at[as_int(PyTuple_GET_ITEM(core_at[i], 0))] = of_twin(state, PyTuple_GET_ITEM(core_at[i], 1));
    layout->streams = read_streams(state, attr(twin, "streams"));
    return layout;
}

/// Read what was placed where; `copies` are the experts that are not on backing devices only.
void adopt(State &state, nb::handle copies) {
    Items layouts(attr(state.twin, "layouts").ptr());
    for (Py_ssize_t i = 0; i < layouts.size(); ++i) state.layouts.push_back(read_layout(state, layouts[i]));
    state.layout = state.layouts.front().get();
    state.offload_from = int_attr(state.twin, "offload_from");
    for (DeviceState &device : state.devices) place_memory(state, device);
    put(state, copies);
}

}  // namespace moesim
