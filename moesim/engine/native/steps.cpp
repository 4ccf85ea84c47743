// Steps and layer visits: what follows what in a forward pass (rule 3).
#include "composed.hpp"
#include "streams.hpp"

namespace moesim {

constexpr i64 RUN_NS = i64(365) * 24 * 3600 * 1'000'000'000;  // moesim.core.limits.RUN_NS

static void end_step(State &state);

// ------------------------------------------------------------------------------------------------------------------ steps

/// Hold the KV of the active requests at their final lengths.
static void reserve_kv(State &state, i64 tokens, i64 requests) {
    if (state.kv_held == std::pair(tokens, requests)) return;
    state.kv_held = {tokens, requests};
    nb::object found = own(PySequence_List(ask(state, attr(ask(state, attr(state.twin, "kv_at"), {num(tokens), num(requests)}), "items"), {}).ptr()));
    Items caches(found.ptr());
    for (Py_ssize_t i = 0; i < caches.size(); ++i) {
        DeviceState *device = find_device(state, PyTuple_GET_ITEM(caches[i], 0));
        i64 change = as_int(PyTuple_GET_ITEM(caches[i], 1)) - device->memory.kv;
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
i64 part_ns(State &state, const char *cost, DeviceState *device, i64 rows, int layer) {
    auto [known, is_new] = state.part_ns.try_emplace({cost, device->index, rows, layer < 0 ? -1 : state.alike[layer]}, -1);
    if (known->second >= 0) return known->second;
    nb::object answers = attr(state.costs, cost);
    return known->second = as_int(layer < 0 ? ask(state, answers, {ref(device->name), num(rows)})
                                            : ask(state, answers, {ref(device->name), num(rows), num(layer)}));
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
    state.decoding = text(state.phase) == "decode", state.mixed = text(state.phase) == "mixed";
    nb::object found = attr(step, "micro");
    Items micro(found.ptr());
    state.micro.clear();
    for (Py_ssize_t i = 0; i < micro.size(); ++i) {
        PyObject *one = micro[i];  // first_row, n_rows, work2, n_sequences, layers, experts
        state.micro.push_back({as_int(PyTuple_GET_ITEM(one, 0)), as_int(PyTuple_GET_ITEM(one, 1)),
                               as_int(PyTuple_GET_ITEM(one, 2)), nb::borrow(PyTuple_GET_ITEM(one, 4)),
                               nb::borrow(PyTuple_GET_ITEM(one, 5)), std::make_unique<Table>(PyTuple_GET_ITEM(one, 5)),
                               nullptr, nullptr, {}});
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
    nb::object step = ask(state, attr(state.steps, "after"), {num(state.now)});
    if (step.is_none()) {
        state.over = true;
        return;
    }
    if (PyLong_Check(step.ptr())) {  // no request is there before
        state.clock.after(state, as_int(step) - state.now, [&state] { state.goes_on = [&state] { next_step(state); }; });
        return;
    }
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
    if (state.layout->streams) state.layout->streams->begin_step(state);
    state.reached = -1;
    if (!state.composed)
        report(state, STEP_BEGIN, named(state.py.event[STEP_BEGIN], num(state.step_index), ref(state.phase),
                                      ref(attr(step, "requests")), ref(attr(step, "last_chunk"))));
    reserve_kv(state, int_attr(step, "kv_tokens"), int_attr(step, "n_active"));  // in what a policy gave up, perhaps
    state.hidden_at = state.layout->step_parts.at("embedding");
    i64 rows = state.step_rows, embedding = rows ? part_ns(state, "embedding_ns", state.layout->step_parts.at("embedding"), rows) : 0;
    Call embed = [&state, rows, embedding] {
        step_part(state, Kind::embedding, "embedding", rows, embedding, [&state, rows] {
            i64 leading = rows ? leading_ns(state, state.layout->step_parts.at("leading")) : 0;
            step_part(state, Kind::leading, "leading", rows, leading, [&state] { begin_layer(state, 0); });
        });
    };
    DeviceState *drafter = state.layout->step_parts.at("head");
    i64 drafts = as_int(ask(state, attr(step, "draft_ns"), {ref(state.costs), ref(drafter->name)}));
    if (!drafts) {
        embed();
        return;
    }
    DeviceState *hidden = state.hidden_at;
    state.hidden_at = drafter;
    cross(state, hidden, drafter, -1, int(rows), "hidden", [&state, drafter, rows, drafts, embed] {
        submit(state, &drafter->main, new_task(state, Kind::draft, -1, 0, int(rows), drafts, embed));
    });
}

static void end_step(State &state) {
    if (state.now > RUN_NS)  // stop long before nanoseconds have more than 64 bits
        ask(state, attr(state.py.texts, "too_long"), {ref(state.twin), num(state.now), num(state.step_index)});
    auto of = [&](const char *name) { return int_attr(state.step, name); };
    state.records.steps.push_back({state.step_began, state.now, state.step_index, of("batch"), state.step_rows,
                                   of("n_sequences"), state.gate_mass, std::uint8_t(state.decoding ? 1 : state.mixed ? 2 : 0)});
    state.last_end = state.now;
    report(state, STEP_END, named(state.py.event[STEP_END], num(state.step_index)));
    if (!state.progress.is_none()) ask(state, state.progress, {num(state.step_index)});
    next_step(state);
}

// ----------------------------------------------------------------------------------------------------------------- layers


static i64 mixing_ns(State &state, const char *cost, DeviceState *device, const MicroBatch &micro, i64 work2, int layer) {
    i64 requests = n_requests(state, micro.first_row, micro.n_rows);
    return as_int(ask(state, attr(state.costs, cost),
                      {ref(device->name), num(micro.n_rows), num(work2), num(requests), num(layer)}));
}

static i64 attention_ns(State &state, DeviceState *device, const MicroBatch &micro, int layer) {
    return mixing_ns(state, "attention_ns", device, micro, micro.work2, layer);
}

static i64 projections_ns(State &state, DeviceState *device, const MicroBatch &micro, int layer) {
    return mixing_ns(state, "attention_ns", device, micro, 0, layer);
}

static i64 core_ns(State &state, DeviceState *device, const MicroBatch &micro, int layer) {
    return mixing_ns(state, "core_ns", device, micro, micro.work2, layer);
}

static i64 rest_ns(State &state, DeviceState *device, const MicroBatch &micro, int layer) {
    return part_ns(state, "dense_ns", device, micro.n_rows, layer);
}

/// The device that reads a layer's KV cache in the present step, if it is another than attention's.
static DeviceState *core_of(State &state, int layer) { return state.decoding ? state.layout->core_at[layer] : nullptr; }

/// The host's operations after a layer's dense part; none: the layer is routed as it ends.
static Call then_host(State &state, DeviceState *dense, int layer, int mb, int rows) {
    if (!dense->layer_host || !rows) return nullptr;
    return [&state, dense, layer, mb, rows] {
        submit(state, &dense->main, new_task(state, Kind::host, layer, mb, rows, dense->layer_host));
    };
}

/// Submit attention whose cache is read elsewhere: projections where attention is, the rest where the cache is.
static void submit_apart(State &state, int layer, int mb, DeviceState *hidden, DeviceState *attention, DeviceState *core,
                         DeviceState *dense, Call then) {
    int rows = int(state.micro[mb].n_rows);
    int there = int(ceil_div(rows * state.core_widths[layer].first, state.hidden));  // in rows as wide as hidden states
    int back = int(ceil_div(rows * state.core_widths[layer].second, state.hidden));
    Call to_dense = [&state, core, dense, layer, back, then] { cross(state, core, dense, layer, back, "hidden", then); };
    Call attend = [&state, core, layer, mb, rows, to_dense] {
        i64 work = core_ns(state, core, state.micro[mb], layer);
        submit(state, &core->main, new_task(state, Kind::attention, layer, mb, rows, work, to_dense));
    };
    Call to_core = [&state, attention, core, layer, there, attend] {
        cross(state, attention, core, layer, there, "hidden", attend);
    };
    cross(state, hidden, attention, layer, rows, "hidden", [&state, attention, layer, mb, rows, to_core] {
        i64 work = projections_ns(state, attention, state.micro[mb], layer);
        submit_part(state, attention, new_task(state, Kind::attention, layer, mb, rows, work, to_core), {"attention"});
    });
}

/// Submit attention and the rest. On one device they are one task; else each waits for the one before to cross.
static void submit_dense(State &state, int layer, int mb, DeviceState *hidden, DeviceState *attention, DeviceState *dense) {
    int rows = int(state.micro[mb].n_rows);
    auto run_rest = [&state, dense, layer, mb, rows] {
        i64 work = rest_ns(state, dense, state.micro[mb], layer);
        Call then = then_host(state, dense, layer, mb, rows);
        submit_part(state, dense, new_task(state, Kind::dense, layer, mb, rows, work, then), {"dense"});
    };
    if (DeviceState *core = core_of(state, layer)) {
        submit_apart(state, layer, mb, hidden, attention, core, dense, run_rest);
        return;
    }
    if (attention == dense) {
        cross(state, hidden, attention, layer, rows, "hidden", [&state, dense, layer, mb, rows] {
            std::tuple key(dense->index, mb, state.alike[layer]);
            auto known = state.dense_memo.find(key);
            if (known == state.dense_memo.end()) {
                i64 work = rest_ns(state, dense, state.micro[mb], layer);
                work += attention_ns(state, dense, state.micro[mb], layer);
                known = state.dense_memo.emplace(key, work).first;
            }
            Call then = then_host(state, dense, layer, mb, rows);
            submit_part(state, dense, new_task(state, Kind::dense, layer, mb, rows, known->second, then), {"attention", "dense", "kv"});
        });
        return;
    }
    cross(state, hidden, attention, layer, rows, "hidden", [&state, attention, dense, layer, mb, rows, run_rest] {
        Call to_dense = [&state, attention, dense, layer, rows, run_rest] {
            cross(state, attention, dense, layer, rows, "hidden", run_rest);
        };
        i64 work = attention_ns(state, attention, state.micro[mb], layer);
        submit_part(state, attention, new_task(state, Kind::attention, layer, mb, rows, work, to_dense), {"attention", "kv"});
    });
}

/// Begin a visit of a layer: report it, then submit its dense part for every micro-batch.
void begin_layer(State &state, int layer) {
    Visit *visit = state.future[layer];
    state.future[layer] = nullptr;
    if (!visit) visit = new_visit(state, layer);
    visit->begin = state.now;
    state.visit = visit;
    state.reached = layer;
    if (state.layout->streams) state.layout->streams->begin_layer(state, layer);
    if (state.listens[LAYER_BEGIN])
        report(state, LAYER_BEGIN, named(state.py.event[LAYER_BEGIN], num(visit->step), num(layer)));
    DeviceState *attention = state.layout->attention_at[layer], *dense = state.layout->dense_at[layer], *hidden = state.hidden_at;
    state.hidden_at = dense;
    for (int mb = 0; mb < state.n_mbs(); ++mb) submit_dense(state, layer, mb, hidden, attention, dense);
}

/// Time of a layer's dense part for all micro-batches of the present step, one after the other.
i64 dense_ns(State &state, int layer) {
    DeviceState *attention = state.layout->attention_at[layer], *dense = state.layout->dense_at[layer], *core = core_of(state, layer);
    i64 total = 0;
    for (const MicroBatch &micro : state.micro) {
        total += core ? projections_ns(state, attention, micro, layer) + core_ns(state, core, micro, layer)
                      : attention_ns(state, attention, micro, layer);
        total += rest_ns(state, dense, micro, layer);
    }
    return total;
}

static bool is_exact(State &state) {
    return state.composed ? state.composed->is_exact() : truth(attr(state.policy, "exact").ptr());
}

/// List a field of the layer's routing (0: ids, 1: weights), of each micro-batch.
static nb::list routing_of(State &state, const Visit *visit, int field) {
    nb::list found;
    for (MicroBatch &micro : state.micro) found.append(micro.shown(field, visit->layer));
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
            apply(state, state.composed->layer_end(visit->layer));
        } else {
            report(state, LAYER_END, named(state.py.event[LAYER_END], num(visit->step), num(visit->layer)));
        }
    }
    if (visit->layer + 1 < state.n_layers) {
        begin_layer(state, visit->layer + 1);
    } else {
        i64 rows = int_attr(state.step, "n_head_rows");
        i64 work = rows ? part_ns(state, "head_ns", state.layout->step_parts.at("head"), rows) : 0;
        step_part(state, Kind::head, "head", rows, work, [&state] { end_step(state); });
    }
}

// ------------------------------------------------------------------------------------------------ Routed and Predicted

/// Record which of the active experts are on a GPU, or on their way to one.
static void look_up(State &state, Visit *visit, int mb) {
    Records &records = state.records;
    const Routing &routing = state.routing;
    records.lookups.push_back({state.now, visit->step, visit->layer, mb, i64(records.looked_rows.size())});
    int n_widths = int(state.weights.widths.size());
    for (int expert : routing.active) {
        bool hit = false, flying = false;
        for (int width = 0; width < n_widths; ++width) {
            i64 unit = visit->base + width * state.weights.block + expert;
            for (DeviceState *gpu : state.gpus) {
                hit = hit || gpu->memory.resident(unit);
                flying = flying || gpu->pending[unit];
            }
        }
        records.looked_experts.push_back(expert);
        records.looked_rows.push_back(int(routing.rows[expert]));
        records.looked_hits.push_back(hit);
        records.looked_in_flight.push_back(flying);
    }
}

/// Delay the effect of a decision; what the layer needs, there or on its way, stays in use meanwhile. Until then
/// the policy hears nothing else: an answer to what happens meanwhile would take effect before the decision on which it builds.
/// When the decision takes effect it finds these copies as idle as they are without it; what was dropped before, and was still
/// in use, stays until the decision may have run it.
static void charge(State &state, Visit *visit, Call effect) {
    int mb = state.mb;
    state.records.decisions.push_back({state.now, state.now + state.decision_ns, visit->step, visit->layer});
    visit->hold();
    state.deciding = true;
    struct Held {
        DeviceState *device;
        i64 unit, fetch;
    };
    std::vector<Held> held;
    for (DeviceState &device : state.devices)
        for (size_t width = 0; width < state.weights.widths.size(); ++width)
            for (int expert : state.routing.active) {
                i64 unit = visit->base + i64(width) * state.weights.block + expert;
                if (CopyState *copy = device.memory.get(unit)) {
                    ++copy->in_use;
                    held.push_back({&device, unit, device.memory.origins[unit].fetch});
                } else if (Transfer *coming = device.pending[unit]) {
                    ++coming->in_use;
                    held.push_back({&device, unit, coming->fetch});
                }
            }
    state.clock.after(state, state.decision_ns, [&state, visit, mb, effect, held] {
        state.mb = mb;
        std::vector<const Held *> dropped;
        for (const Held &one : held) {
            CopyState *copy = one.device->memory.get(one.unit);
            Transfer *coming = one.device->pending[one.unit];
            if (copy && one.device->memory.origins[one.unit].fetch == one.fetch) {
                if (copy->leaves != Leaves::no) {
                    dropped.push_back(&one);
                } else {
                    --copy->in_use;
                }
            } else if (coming && coming->fetch == one.fetch) {  // else it was given up
                --coming->in_use;
            }
        }
        effect();
        visit->let_go();
        for (const Held *one : dropped) one->device->memory.release(one->unit, state.now);
        state.deciding = false;
        std::vector<Call> unheard = std::move(state.unheard);
        state.unheard.clear();
        for (Call &call : unheard) call();
        if (!state.undecided.empty()) {
            state.routed.push_back(state.undecided.front());
            state.undecided.erase(state.undecided.begin());
        }
    });
}

/// Submit shared experts for every row, before the routed ones of the same device.
static void submit_shared(State &state, Visit *visit, int mb) {
    int layer = visit->layer, rows = int(state.micro[mb].n_rows);
    DeviceState *device = state.layout->shared_at[layer], *home = state.layout->dense_at[layer];
    visit->hold();
    i64 work = part_ns(state, "shared_ns", device, rows, layer);
    Task *task = new_task(state, Kind::shared, layer, mb, rows, work, [&state, device, home, layer, rows, visit] {
        cross(state, device, home, layer, rows, "out", [visit] { visit->let_go(); });
    });
    task->waits = 1;
    if (state.layout->streams) state.layout->streams->read(state, task, {"shared"});
    submit(state, &device->main, task);
    cross(state, home, device, layer, rows, "in", [&state, task] { wake(state, task); });
}

/// A micro-batch of the present layer has been routed: submit its shared experts and ask the policy.
void routed(State &state, int mb) {
    if (state.deciding) {
        state.undecided.push_back(mb);
        return;
    }
    Visit *visit = state.visit;
    MicroBatch &micro = state.micro[mb];
    int layer = visit->layer;
    state.routing.step = visit->step, state.routing.layer = layer, state.routing.mb = mb;
    state.routing.read(micro);
    visit->route(state.routing.ids, state.routing.active, int(micro.n_rows));
    look_up(state, visit, mb);
    state.mb = mb;
    if (!visit->mbs_left) {
        visit->serve_early();
        if (!state.gate_input_waiters[layer].empty()) {
            std::vector<Call> waiters = std::move(state.gate_input_waiters[layer]);
            state.gate_input_waiters[layer].clear();
            for (Call &call : waiters) call();
        }
    }
    if (state.n_shared > 0) submit_shared(state, visit, mb);
    if (!state.listens[ROUTED]) return;
    if (state.composed) {
        const Answer &answer = state.composed->routed(state.routing);
        if (state.decision_ns) {
            charge(state, visit, [&state, answer] { apply(state, answer); });
        } else {
            apply(state, answer);
        }
        return;
    }
    nb::object event = named(state.py.event[ROUTED], num(visit->step), num(layer), num(mb), ref(micro.shown(0, layer)),
                             ref(micro.shown(1, layer)), ref(micro.shown(2, layer)), tuple_of(state.routing.rows),
                             tuple_of(state.routing.active), num(micro.first_row));
    PyObject *arguments[] = {state.policy.ptr(), event.ptr(), state.view.ptr()};
    nb::object actions = own(PyObject_VectorcallMethod(state.py.decide.ptr(), arguments, 3, nullptr));
    if (state.decision_ns) {
        nb::object listed = truth(actions.ptr()) ? collected(state, actions) : own(PyList_New(0));
        charge(state, visit, [&state, listed] { apply(state, listed); });
    } else if (truth(actions.ptr())) {
        apply(state, actions);
    }
}

/// Ask a predictor that knows all layers of a step at once for the ids of the present one; say whether it is such a predictor.
bool knows_step(State &state, Source &source) {
    if (source.step.ptr() != state.step.ptr()) {
        source.step = state.step;
        source.table.reset();
        source.at_once = PyObject_HasAttrString(source.predictor.ptr(), "all_layers");
        if (source.at_once) {
            nb::object ids = ask(state, attr(source.predictor, "all_layers"), {ref(state.step)});
            if (!ids.is_none()) source.table = std::make_unique<Table>(ids);
            source.first_layer = int(int_attr(source.predictor, "first_layer"));
        }
    }
    return source.at_once;
}

/// Ask a predictor about a layer for the rows of a micro-batch, and report its answer to the composition.
static void tell_prediction(State &state, Source &source, int layer, int mb) {
    Composed &composed = *state.composed;
    if (knows_step(state, source)) {
        if (!source.table || layer < source.first_layer) return;
        if (composed.is_late(state.step_index, layer)) return;
        const MicroBatch &micro = state.micro[mb];
        apply(state, composed.predicted({state.step_index, layer, mb, source.table.get(), micro.first_row, micro.n_rows, layer}));
        return;
    }
    nb::object answer = ask(state, source.predict, {ref(state.step), num(mb), num(layer)});
    if (answer.is_none() || composed.is_late(state.step_index, layer)) return;
    Table table(nb::borrow(own(PySequence_GetItem(answer.ptr(), 0))));
    apply(state, composed.predicted({state.step_index, layer, mb, &table, 0, table.buffer.shape[0], -1}));
}

/// A prediction has been paid for; one that comes after its step is of no use and is not reported.
void predicted(State &state, const State::Prediction &prediction) {
    if (prediction.step != state.step_index || !state.listens[PREDICTED]) return;
    if (state.deciding) {
        state.unheard.push_back([&state, prediction] { predicted(state, prediction); });
        return;
    }
    Source &source = *prediction.source;
    for (int mb = 0; mb < state.n_mbs(); ++mb) {
        if (state.composed) {
            tell_prediction(state, source, prediction.layer, mb);
            continue;
        }
        nb::object answer = ask(state, source.predict, {ref(state.step), num(mb), num(prediction.layer)});
        if (answer.is_none()) continue;
        nb::object ids = own(PySequence_GetItem(answer.ptr(), 0)), scores = own(PySequence_GetItem(answer.ptr(), 1));
        report(state, PREDICTED, named(state.py.event[PREDICTED], num(prediction.step), num(prediction.layer), num(mb), ref(ids),
                                     ref(scores), ref(source.name)));
    }
}

}  // namespace moesim
