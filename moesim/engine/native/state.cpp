#include "composed.hpp"
#include "streams.hpp"

namespace moesim {

State::State() = default;
State::~State() = default;

static const Table *recorded(const MicroBatch &micro, std::unique_ptr<Table> &table, const char *name) {
    if (!table) {
        nb::object array = attr(micro.layers, name);
        if (array.is_none()) return nullptr;
        table = std::make_unique<Table>(array.ptr());
    }
    return table.get();
}

const Table *MicroBatch::weights() const { return recorded(*this, kept_weights, "weights"); }
const Table *MicroBatch::scores() const { return recorded(*this, kept_scores, "scores"); }

/// Count the rows of each expert of the layer.
void Routing::read(const MicroBatch &from) {
    for (int expert : active) rows[expert] = 0;
    active.clear();
    const Table &of = *from.ids;
    micro = &from;
    n_rows = int(of.buffer.shape[0]);
    top_k = int(of.buffer.shape[2]);
    ids.clear();
    of.read(layer, ids);
    for (int expert : ids)
        if (!rows[expert]++) active.push_back(expert);
    std::sort(active.begin(), active.end());
}

/// Whether the gate input of a layer exists in this step, for all rows.
bool gate_input_exists(State &state, int layer) {
    Visit *visit = state.visit;
    if (!visit) return layer <= state.reached;  // before the first layer, between two, or after the last
    return layer < visit->layer || (layer == visit->layer && !visit->mbs_left);
}

/// Do something once the gate input of a layer exists.
void when_gate_input(State &state, int layer, Call call) {
    if (layer < state.n_layers) state.gate_input_waiters[layer].push_back(std::move(call));  // else it never does
}

/// Make a task of the present step that is no expert's.
Task *new_task(State &state, Kind kind, int layer, int mb, int rows, i64 work, Call then) {
    Task *task = state.tasks.make(state.task_numbers++, kind, state.step_index, layer, mb, rows, work, state.now);
    task->then = std::move(then);
    return task;
}

/// Begin the visit of a layer in the present step.
Visit *new_visit(State &state, int layer) {
    Visit *visit = &state.visits[layer];
    visit->begin_anew(state.step_index, state.n_mbs(), state.words);
    return visit;
}

/// Call a Python function with new references, which are released.
nb::object ask(State &, nb::handle callable, std::initializer_list<PyObject *> arguments) {
    PyObject *found = PyObject_Vectorcall(callable.ptr(), arguments.begin(), arguments.size(), nullptr);
    for (PyObject *one : arguments) Py_DECREF(one);
    return own(found);
}

/// Find what answers for a source of predictions; null: nothing.
Source *source_of(State &state, nb::handle name) {
    if (PyObject *known = PyDict_GetItemWithError(state.predicting_by_name.ptr(), name.ptr())) return &state.predicting[as_int(known)];
    if (PyErr_Occurred()) throw nb::python_error();
    nb::object found = ask(state, attr(state.predictors, "get"), {ref(name)});
    if (found.is_none()) return nullptr;
    state.predicting_by_name[name] = state.predicting.size();
    state.predicting.push_back({nb::borrow(name), found, attr(found, "predict"), std::vector<int>(state.n_layers, -2)});
    return &state.predicting.back();
}

}  // namespace moesim
