// Telling the policy what the router and the predictors said, and charging for its decisions.
#include "composed.hpp"
#include "streams.hpp"

namespace moesim {

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
    i64 work = part_ns(state, "shared_ns", device, rows);
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
    nb::handle routing = micro.routing(layer);  // experts, weights, scores, rows, active
    PyObject *experts = PyTuple_GET_ITEM(routing.ptr(), 0), *weights = PyTuple_GET_ITEM(routing.ptr(), 1);
    PyObject *scores = PyTuple_GET_ITEM(routing.ptr(), 2), *rows = PyTuple_GET_ITEM(routing.ptr(), 3);
    PyObject *active = PyTuple_GET_ITEM(routing.ptr(), 4);
    nb::object event = named(state.py.event[ROUTED], num(visit->step), num(layer), num(mb), ref(experts), ref(weights),
                             ref(scores), ref(rows), ref(active), num(micro.first_row));
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

/// Ask a predictor about a layer for the rows of a micro-batch, and tell the composition what it says.
static void tell_prediction(State &state, Source &source, int layer, int mb) {
    Composed &composed = *state.composed;
    if (knows_step(state, source)) {
        if (!source.table || layer < source.first_layer) return;
        if (composed.is_late(state.step_index, layer)) return;
        PredictedIds ids{source.table.get(), state.micro[mb].first_row, state.micro[mb].n_rows, layer};
        apply(state, composed.predicted({state.step_index, layer, mb, ids}));
        return;
    }
    nb::object answer = ask(state, source.predict, {ref(state.step), num(mb), num(layer)});
    if (answer.is_none() || composed.is_late(state.step_index, layer)) return;
    Table table(nb::borrow(own(PySequence_GetItem(answer.ptr(), 0))));
    apply(state, composed.predicted({state.step_index, layer, mb, {&table, 0, table.buffer.shape[0], -1}}));
}

/// A prediction has been paid for; one that comes after its step is of no use and is not told.
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
        tell(state, PREDICTED, named(state.py.event[PREDICTED], num(prediction.step), num(prediction.layer), num(mb), ref(ids),
                                     ref(scores), ref(source.name)));
    }
}

}  // namespace moesim
