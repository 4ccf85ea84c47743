#include "composed.hpp"
#include "streams.hpp"

namespace moesim {

State::State() = default;
State::~State() = default;

/// Take over what Python knows of a micro-batch.
void Routing::read(PyObject *rows_of, PyObject *listed, nb::handle ids, int n) {
    for (int expert : active) rows[expert] = 0;
    active.clear();
    experts = ids;
    n_rows = n;
    Items found(listed);
    for (Py_ssize_t i = 0; i < found.size(); ++i) {
        active.push_back(int(as_int(found[i])));
        rows[active.back()] = as_int(PyTuple_GET_ITEM(rows_of, active.back()));
    }
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
    Task *task = state.tasks.make(state.task_numbers++, kind, state.step_index, layer, mb, rows, work, state.now, state.now);
    task->then = std::move(then);
    return task;
}

/// Make the visit of a layer in the present step.
Visit *new_visit(State &state, int layer) {
    return &state.visits.emplace_back(state.step_index, layer, i64(layer) * state.n_experts, state.top_k, state.n_mbs(),
                                      state.n_experts, state.words);
}

/// Call a Python function with new references, which are released.
nb::object ask(State &, nb::handle callable, std::initializer_list<PyObject *> arguments) {
    PyObject *found = PyObject_Vectorcall(callable.ptr(), arguments.begin(), arguments.size(), nullptr);
    for (PyObject *one : arguments) Py_DECREF(one);
    return own(found);
}

}  // namespace moesim
