// Steps and layer visits: what follows what in a forward pass (rule 3).
#include "composed.hpp"
#include "streams.hpp"

namespace moesim {

constexpr i64 RUN_NS = i64(365) * 24 * 3600 * 1'000'000'000;  // moesim.core.limits.RUN_NS

static void end_step(State &state);

// ------------------------------------------------------------------------------------------------------------------ steps

/// Hold the KV of the active requests at their final lengths.
static void reserve_kv(State &state, i64 tokens) {
    for (auto &[device, layers] : state.kv_layers) {
        i64 change = tokens * state.kv_bytes * layers - device->memory.kv;
        if (change) {
            device->memory.kv += change;
            device->memory.add(change, state.now);
        }
    }
}

/// Submit a task of the dense part; what of its parts is streamed is copied first.
static void submit_part(State &state, DeviceState *device, Task *task, std::initializer_list<const char *> parts) {
    if (state.layout->streams) state.layout->streams->read(state, task, parts);
    submit(state, &device->main, task);
}

/// Time of a part that depends on rows alone, asked of the costs once.
i64 part_ns(State &state, const char *cost, DeviceState *device, i64 rows) {
    auto [known, is_new] = state.part_ns.try_emplace({cost, device->index, rows}, -1);
    if (known->second < 0) known->second = as_int(ask(state, attr(state.costs, cost), {ref(device->name), num(rows)}));
    return known->second;
}

/// Run embedding, leading layers or head where they live; a part that costs nothing is passed over.
static void step_part(State &state, Kind kind, const char *part, i64 rows, i64 work, Call then) {
    DeviceState *device = state.layout->step_parts.at(part);
    if (!work && !(state.layout->streams && state.layout->streams->holds(part, -1))) {
        then();
        return;
    }
    DeviceState *hidden = state.hidden_at;
    state.hidden_at = device;
    cross(state, hidden, device, -1, int(rows), "hidden", [&state, device, kind, rows, work, then, part] {
        submit_part(state, device, new_task(state, kind, -1, 0, int(rows), work, then), {part});
    });
}

/// Read a step of the workload: its sizes, and its micro-batches with their routing.
static void read_step(State &state, nb::object step) {
    state.step = step;
    state.step_index = int(int_attr(step, "index"));
    state.step_rows = int(int_attr(step, "n_tokens"));
    state.words = std::max(1, (state.step_rows + 63) / 64);
    state.phase = attr(step, "phase");
    state.decoding = text(state.phase) == "decode";
    nb::object found = attr(step, "micro");
    Items micro(found.ptr());
    state.micro.clear();
    for (Py_ssize_t i = 0; i < micro.size(); ++i) {
        PyObject *one = micro[i];  // first_row, n_rows, work2, n_sequences, layers, experts
        state.micro.push_back({as_int(PyTuple_GET_ITEM(one, 0)), as_int(PyTuple_GET_ITEM(one, 1)),
                               as_int(PyTuple_GET_ITEM(one, 2)), nb::borrow(PyTuple_GET_ITEM(one, 4)),
                               std::make_unique<Table>(PyTuple_GET_ITEM(one, 5)), nullptr, nullptr, {}});
    }
}

/// Count the requests among rows of the step.
static i64 n_requests(State &state, i64 first_row, i64 n_rows) {
    if (n_rows == 1) return 1;
    return as_int(ask(state, attr(state.py.texts, "n_requests"), {ref(attr(state.step, "requests")), num(first_row), num(n_rows)}));
}

static i64 leading_ns(State &state, DeviceState *device) {
    i64 rows = state.step_rows;
    if (!state.n_leading) return 0;
    return as_int(ask(state, attr(state.costs, "leading_ns"),
                      {ref(device->name), num(rows), num(int_attr(state.step, "work2")), num(n_requests(state, 0, rows))}));
}

/// Begin the next step; after the last the run is over, and what is still in flight has no end in the records.
void next_step(State &state) {
    PyObject *next = PyIter_Next(state.steps.ptr());
    if (!next) {
        if (PyErr_Occurred()) throw nb::python_error();
        state.over = true;
        return;
    }
    nb::object step = nb::steal(next);
    read_step(state, step);
    state.n_groups = 0;
    state.future.assign(state.n_layers, nullptr);
    state.gate_input_waiters.resize(state.n_layers);
    for (auto &waiters : state.gate_input_waiters) waiters.clear();
    state.dense_memo.clear();
    state.step_began = state.now;
    state.gate_mass = 0;
    i64 largest = 0;
    for (const MicroBatch &micro : state.micro) largest = std::max(largest, micro.n_rows);
    state.layout = (largest >= state.offload_from ? state.layouts.back() : state.layouts.front()).get();
    reserve_kv(state, int_attr(step, "kv_tokens"));
    if (state.layout->streams) state.layout->streams->begin_step(state);
    state.reached = -1;
    nb::object requests = attr(step, "requests");
    if (state.composed) {
        state.composed->step_begin(text(state.phase) == "prefill");
    } else {
        tell(state, STEP_BEGIN, named(state.py.event[STEP_BEGIN], num(state.step_index), ref(state.phase), ref(requests),
                                      ref(attr(step, "last_chunk"))));
    }
    state.hidden_at = state.layout->step_parts.at("embedding");
    i64 rows = state.step_rows, embedding = rows ? part_ns(state, "embedding_ns", state.layout->step_parts.at("embedding"), rows) : 0;
    step_part(state, Kind::embedding, "embedding", rows, embedding, [&state, rows] {
        i64 leading = rows ? leading_ns(state, state.layout->step_parts.at("leading")) : 0;
        step_part(state, Kind::leading, "leading", rows, leading, [&state] { begin_layer(state, 0); });
    });
}

static void end_step(State &state) {
    if (state.now > RUN_NS)  // stop long before nanoseconds have more than 64 bits
        ask(state, attr(state.py.texts, "too_long"), {ref(state.twin), num(state.now), num(state.step_index)});
    auto of = [&](const char *name) { return int_attr(state.step, name); };
    state.records.steps.push_back({state.step_began, state.now, state.step_index, of("batch"), state.step_rows,
                                   of("n_sequences"), state.gate_mass, state.decoding});
    state.last_end = state.now;
    tell(state, STEP_END, named(state.py.event[STEP_END], num(state.step_index)));
    if (!state.progress.is_none()) ask(state, state.progress, {num(state.step_index)});
    next_step(state);
}

// ----------------------------------------------------------------------------------------------------------------- layers


static i64 attention_ns(State &state, DeviceState *device, const MicroBatch &micro) {
    return as_int(ask(state, attr(state.costs, "attention_ns"),
                      {ref(device->name), num(micro.n_rows), num(micro.work2), num(n_requests(state, micro.first_row, micro.n_rows))}));
}

static i64 projections_ns(State &state, DeviceState *device, const MicroBatch &micro) {
    return as_int(ask(state, attr(state.costs, "attention_ns"), {ref(device->name), num(micro.n_rows), num(0)}));
}

static i64 core_ns(State &state, DeviceState *device, const MicroBatch &micro) {
    return as_int(ask(state, attr(state.costs, "core_ns"), {ref(device->name), num(micro.n_rows), num(micro.work2),
                                                            num(n_requests(state, micro.first_row, micro.n_rows))}));
}

static i64 rest_ns(State &state, DeviceState *device, const MicroBatch &micro) {
    return part_ns(state, "dense_ns", device, micro.n_rows);
}

/// The device that reads a layer's KV cache in the present step, if it is another than attention's.
static DeviceState *core_of(State &state, int layer) { return state.decoding ? state.layout->core_at[layer] : nullptr; }

/// Submit attention whose cache is read elsewhere: projections where attention is, the rest where the cache is.
static void submit_apart(State &state, int layer, int mb, DeviceState *hidden, DeviceState *attention, DeviceState *core,
                         DeviceState *dense, Call then) {
    int rows = int(state.micro[mb].n_rows);
    int there = int(ceil_div(rows * state.core_widths[0], state.hidden));  // in rows as wide as hidden states
    int back = int(ceil_div(rows * state.core_widths[1], state.hidden));
    Call to_dense = [&state, core, dense, layer, back, then] { cross(state, core, dense, layer, back, "hidden", then); };
    Call attend = [&state, core, layer, mb, rows, to_dense] {
        i64 work = core_ns(state, core, state.micro[mb]);
        submit(state, &core->main, new_task(state, Kind::attention, layer, mb, rows, work, to_dense));
    };
    Call to_core = [&state, attention, core, layer, there, attend] {
        cross(state, attention, core, layer, there, "hidden", attend);
    };
    cross(state, hidden, attention, layer, rows, "hidden", [&state, attention, layer, mb, rows, to_core] {
        i64 work = projections_ns(state, attention, state.micro[mb]);
        submit_part(state, attention, new_task(state, Kind::attention, layer, mb, rows, work, to_core), {"attention"});
    });
}

/// Submit attention and the rest. On one device they are one task; else each waits for the one before to cross.
static void submit_dense(State &state, int layer, int mb, DeviceState *hidden, DeviceState *attention, DeviceState *dense) {
    int rows = int(state.micro[mb].n_rows);
    auto run_rest = [&state, dense, layer, mb, rows] {
        i64 work = rest_ns(state, dense, state.micro[mb]);
        submit_part(state, dense, new_task(state, Kind::dense, layer, mb, rows, work), {"dense"});
    };
    if (DeviceState *core = core_of(state, layer)) {
        submit_apart(state, layer, mb, hidden, attention, core, dense, run_rest);
        return;
    }
    if (attention == dense) {
        cross(state, hidden, attention, layer, rows, "hidden", [&state, dense, layer, mb, rows] {
            auto known = state.dense_memo.find({dense->index, mb});
            if (known == state.dense_memo.end()) {
                i64 work = rest_ns(state, dense, state.micro[mb]);
                work += attention_ns(state, dense, state.micro[mb]);
                known = state.dense_memo.emplace(std::pair(dense->index, mb), work).first;
            }
            submit_part(state, dense, new_task(state, Kind::dense, layer, mb, rows, known->second), {"attention", "dense", "kv"});
        });
        return;
    }
    cross(state, hidden, attention, layer, rows, "hidden", [&state, attention, dense, layer, mb, rows, run_rest] {
        Call to_dense = [&state, attention, dense, layer, rows, run_rest] {
            cross(state, attention, dense, layer, rows, "hidden", run_rest);
        };
        i64 work = attention_ns(state, attention, state.micro[mb]);
        submit_part(state, attention, new_task(state, Kind::attention, layer, mb, rows, work, to_dense), {"attention", "kv"});
    });
}

/// Begin a visit of a layer: tell the policy, then submit its dense part for every micro-batch.
void begin_layer(State &state, int layer) {
    Visit *visit = state.future[layer];
    state.future[layer] = nullptr;
    if (!visit) visit = new_visit(state, layer);
    visit->begin = state.now;
    state.visit = visit;
    state.reached = layer;
    if (state.layout->streams) state.layout->streams->begin_layer(state, layer);
    if (state.listens[LAYER_BEGIN])
        tell(state, LAYER_BEGIN, named(state.py.event[LAYER_BEGIN], num(visit->step), num(layer)));
    DeviceState *attention = state.layout->attention_at[layer], *dense = state.layout->dense_at[layer], *hidden = state.hidden_at;
    state.hidden_at = dense;
    for (int mb = 0; mb < state.n_mbs(); ++mb) submit_dense(state, layer, mb, hidden, attention, dense);
}

/// Time of a layer's dense part for all micro-batches of the present step, one after the other.
i64 dense_ns(State &state, int layer) {
    DeviceState *attention = state.layout->attention_at[layer], *dense = state.layout->dense_at[layer], *core = core_of(state, layer);
    i64 total = 0;
    for (const MicroBatch &micro : state.micro) {
        total += core ? projections_ns(state, attention, micro) + core_ns(state, core, micro)
                      : attention_ns(state, attention, micro);
        total += rest_ns(state, dense, micro);
    }
    return total;
}

static bool is_exact(State &state) {
    return state.composed ? state.composed->exact : truth(attr(state.policy, "exact").ptr());
}

/// List a field of the layer's routing (0: ids, 1: weights), of each micro-batch.
static nb::list routing_of(State &state, const Visit *visit, int field) {
    nb::list found;
    for (MicroBatch &micro : state.micro) found.append(nb::handle(PyTuple_GET_ITEM(micro.routing(visit->layer).ptr(), field)));
    return found;
}

static void check_served(State &state, Visit *visit) {
    int expert, row;
    std::vector<const Table *> ids;
    for (const MicroBatch &micro : state.micro) ids.push_back(micro.ids.get());
    if (!visit->serve_substitutes(ids, expert, row))
        fail(state, "Run(E" + std::to_string(expert) + ") for row " + std::to_string(row) +
                        ": every slot of that row is served already",
             "leave the row out, or Run fewer experts for it");
    if (visit->inexact.empty()) return;
    nb::list found;
    for (const Inexact &one : visit->inexact) {
        nb::list rows;
        for (int r : rows_of(one.rows)) rows.append(r);
        found.append(nb::make_tuple(one.kind, one.expert, rows));
    }
    nb::object inexact = ask(state, attr(state.py.texts, "inexact_records"),
                             {num(visit->step), num(visit->layer), routing_of(state, visit, 0).release().ptr(),
                              routing_of(state, visit, 1).release().ptr(), found.release().ptr()});
    if (truth(inexact.ptr()) && is_exact(state)) {
        std::string kinds = text(ask(state, attr(state.py.texts, "kinds"), {ref(inexact)}));
        fail(state, "an exact policy served slots otherwise than fresh: " + kinds,
             "run what is routed on fresh inputs, or set exact = False");
    }
    Items items(inexact.ptr());
    for (Py_ssize_t i = 0; i < items.size(); ++i) state.records.inexact.push_back(nb::borrow(items[i]));
}

/// Close a visit whose work is all done, and go on to the next layer or the LM head.
void end_layer(State &state, Visit *visit) {
    if (!visit->substitutes.empty() || !visit->inexact.empty()) check_served(state, visit);
    if (!is_exact(state)) {
        nb::object mass = ask(state, attr(state.py.texts, "gate_mass"), {routing_of(state, visit, 1).release().ptr()});
        state.gate_mass += nb::cast<double>(mass);
    }
    state.records.layers.push_back({visit->begin, state.now, visit->step, visit->layer});
    state.visit = nullptr;
    if (state.listens[LAYER_END]) {
        if (state.composed) {
            apply(state, state.composed->layer_end(visit->step, visit->layer));
        } else {
            tell(state, LAYER_END, named(state.py.event[LAYER_END], num(visit->step), num(visit->layer)));
        }
    }
    if (visit->layer + 1 < state.n_layers) {
        begin_layer(state, visit->layer + 1);
    } else {
        i64 rows = int_attr(state.step, "n_sequences");
        i64 work = rows ? part_ns(state, "head_ns", state.layout->step_parts.at("head"), rows) : 0;
        step_part(state, Kind::head, "head", rows, work, [&state] { end_step(state); });
    }
}

}  // namespace moesim
