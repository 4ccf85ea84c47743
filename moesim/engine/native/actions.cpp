// Telling the policy, and carrying out what it returns: validation first, then effect, in the order returned.
#include "composed.hpp"
#include "streams.hpp"

namespace moesim {

/// Tell the policy an event that it listens to, and apply its answer; while it decides, the event waits.
void tell(State &state, EventKind kind, const nb::object &event) {
    if (!state.listens[kind]) return;
    if (state.deciding) {
        state.unheard.push_back([&state, kind, event] { tell(state, kind, event); });
        return;
    }
    PyObject *arguments[] = {state.policy.ptr(), event.ptr(), state.view.ptr()};
    nb::object actions = own(PyObject_VectorcallMethod(state.py.decide.ptr(), arguments, 3, nullptr));
    if (truth(actions.ptr())) apply(state, actions);
}

static bool is_empty(PyObject *items) {
    Py_ssize_t n = PyObject_Size(items);
    if (n < 0) throw nb::python_error();
    return n == 0;
}

/// Leave open slots of the present layer out.
static void skip(State &state, PyObject *action) {
    i64 layer = as_int(PyTuple_GET_ITEM(action, 0));
    PyObject *rows = PyTuple_GET_ITEM(action, 2);
    Visit *visit = state.visit;
    if (!visit || layer != visit->layer || visit->mbs_left)
        fail(state, "Skip(L" + std::to_string(layer) + ")", "skip slots of the present layer, once it is routed");
    Items experts(PyTuple_GET_ITEM(action, 1));
    for (Py_ssize_t i = 0; i < experts.size(); ++i) {
        i64 expert = as_int(experts[i]);
        unit_of(state, layer, expert, "Skip");
        const u64 *open = visit->of(int(expert));
        Rows chosen(state.words, 0);
        bool sound = true;
        Py_ssize_t named = 0;
        if (rows == Py_None) {
            chosen.assign(open, open + state.words);
            named = count(chosen);
        } else {
            Items items(rows);
            named = items.size();
            for (Py_ssize_t r = 0; r < named; ++r) {
                i64 row = as_int(items[r]);
                if (row >= i64(64) * state.words) sound = false;
                if (sound && row >= 0) set(chosen, row);
            }
        }
        for (int word = 0; word < state.words; ++word) sound = sound && !(chosen[word] & ~open[word]);
        if (!sound || !any(chosen) || count(chosen) != named) {
            nb::object of = rows == Py_None ? own(PyList_New(0)) : nb::borrow(rows);
            nb::object few = ask(state, attr(state.py.texts, "first_rows"), {ref(of)});
            fail(state, "Skip(" + unit_text(layer, expert) + "): rows " + text(few) + " are not routed to it, or are served",
                 "skip only open slots");
        }
        visit->serve({int(expert), chosen, SKIPPED, false});
    }
}

/// Submit a prediction, which waits for the state that it needs.
static void predict(State &state, Source &source, int layer, DeviceState *device, bool side) {
    if (side && device->side.plain)
        fail(state, "Predict(L" + std::to_string(layer) + ", " + text(device->name) + "): the profile has no rate for the side lane",
             "measure a contention pair with '" + text(device->name) + ".side', or use lane='main'");
    auto work = source.work.find({device->index, state.step_rows});
    if (work == source.work.end()) {
        nb::object ns = ask(state, attr(state.costs, "predict_ns"), {ref(device->name), num(state.step_rows), ref(source.name)});
        work = source.work.emplace(std::pair(device->index, state.step_rows), as_int(ns)).first;
    }
    int &needed = source.needed[layer];
    if (needed == -2) {
        nb::object of_layer = ask(state, attr(source.predictor, "needs_layer"), {num(layer)});
        needed = of_layer.is_none() ? -1 : int(as_int(of_layer));
    }
    Task *task = new_task(state, Kind::predict, layer, -1, state.step_rows, work->second);
    if (!side) task->key += AHEAD;
    State::Prediction prediction{state.step_index, layer, &source};
    task->then = [&state, prediction] { state.predicted.push_back(prediction); };
    if (needed >= 0 && !gate_input_exists(state, needed)) {
        task->waits = 1;
        when_gate_input(state, needed, [&state, task] { wake(state, task); });
    }
    submit(state, side ? &device->side : &device->main, task);
}

/// Find what answers for a source of predictions.
static Source &predictor_of(State &state, nb::handle name) {
    if (Source *found = source_of(state, name)) return *found;
    fail(state, "Predict: " + unknown_name(state, "source", name, state.predictors), "list it in Policy.needs");
}

/// Check and submit a prediction.
static void predict(State &state, PyObject *action) {
    i64 step = as_int(PyTuple_GET_ITEM(action, 0)), layer = as_int(PyTuple_GET_ITEM(action, 1));
    std::string lane = text(PyTuple_GET_ITEM(action, 4));
    DeviceState *device = device_of(state, PyTuple_GET_ITEM(action, 3), "Predict");
    auto of_layer = [&] { return "L" + std::to_string(layer); };
    if (step != state.step_index)
        fail(state, "Predict(step " + std::to_string(step) + ", " + of_layer() + "): this is step " + std::to_string(state.step_index),
             "predict within the present step");
    unit_of(state, layer, 0, "Predict");
    Source &source = predictor_of(state, PyTuple_GET_ITEM(action, 2));
    if (lane != "side" && lane != "main") fail(state, "Predict(" + of_layer() + "): lane '" + lane + "'", "lanes are 'main' and 'side'");
    predict(state, source, int(layer), device, lane == "side");
}

/// Apply one action; an action that names no expert, or no row, is ignored.
static void apply_one(State &state, PyObject *action, Groups &groups) {
    int kind = 0;
    while (kind < N_ACTIONS && Py_TYPE(action) != state.py.action[kind]) ++kind;
    if (kind <= SKIP && is_empty(PyTuple_GET_ITEM(action, 1))) return;
    if (kind == RUN || kind == SKIP) {
        PyObject *rows = PyTuple_GET_ITEM(action, kind == RUN ? 3 : 2);
        if (rows != Py_None && is_empty(rows)) return;
    }
    switch (kind) {
    case RUN: return run_experts(state, action, groups);
    case FETCH: return fetch(state, action);
    case DROP: return drop(state, action);
    case MOVE: return move(state, action);
    case SEND: return send(state, action);
    case SKIP: return skip(state, action);
    case PREDICT: return predict(state, action);
    default: fail(state, "decide returned " + repr_of(action), "return Fetch, Drop, Move, Run, Skip, Predict or Send");
    }
}

/// Collect an answer before any of it takes effect: a generator must not see its own consequences.
nb::object collected(State &state, nb::handle actions) {
    for (PyTypeObject *type : state.py.action)  // a tuple itself: its fields are no actions
        if (PyObject_TypeCheck(actions.ptr(), type)) fail(state, "decide returned a bare " + repr_of(actions), "return a list of actions");
    if (!truth(ask(state, attr(state.py.texts, "is_iterable"), {ref(actions)}).ptr()))
        fail(state, "decide returned " + short_repr(state, actions), "return a list of actions");
    return own(PySequence_List(actions.ptr()));
}

/// Apply the actions returned for one event; Runs among them that share a device and layer form a group.
void apply(State &state, nb::handle returned) {
    nb::object actions = nb::borrow(returned);
    if (!PyList_CheckExact(actions.ptr()) && !PyTuple_CheckExact(actions.ptr())) actions = collected(state, actions);
    Groups groups;
    Items items(actions.ptr());
    for (Py_ssize_t i = 0; i < items.size(); ++i) {
        try {
            apply_one(state, items[i], groups);
        } catch (nb::python_error &error) {
            if (!error.matches(PyExc_TypeError)) throw;
            fail(state, "decide returned " + short_repr(state, items[i]), text(attr(state.py.texts, "WRONG_TYPE")));
        }
    }
    for (auto &[key, group] : groups) launch(state, group);
    if (state.thread) submit_next(state, *state.thread);
}

/// Apply the actions of an answer that is given in C++; as above, action by action.
void apply(State &state, const Answer &answer) {
    Groups groups;
    for (const Answer::Action &action : answer.actions) {
        const int *experts = answer.experts.data() + action.first;
        int layer = action.layer;
        i64 base = i64(layer) * state.n_experts;
        switch (action.kind) {
        case RUN: run_experts(state, action.device, experts, action.n, groups); break;
        case FETCH:
            for (int i = 0; i < action.n; ++i)
                fetch_expert(state, layer, experts[i], base + experts[i], action.device, action.pool, action.urgency, Py_None);
            break;
        case DROP:
            for (int i = 0; i < action.n; ++i) drop_expert(state, layer, experts[i], base + experts[i], action.device);
            break;
        case PREDICT: predict(state, predictor_of(state, action.source), layer, action.device, action.side); break;
        case MOVE:
            for (int i = 0; i < action.n; ++i)
                move_expert(state, layer, experts[i], base + experts[i], action.device, action.pool);
            break;
        default: throw std::logic_error("no part returns this action");
        }
    }
    for (auto &[key, group] : groups) launch(state, group);
    if (state.thread) submit_next(state, *state.thread);
}

}  // namespace moesim
