// All that a run knows; what an action names must be there, and how an error says where it happened.
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

nb::handle MicroBatch::shown(int field, int layer) {
    nb::object &values = by_layer[field];
    if (!values.is_valid()) {
        values = field == 0 ? experts : attr(layers, field == 1 ? "weights" : "scores");
        if (!values.is_none()) values = own(PySequence_List(values.attr("swapaxes")(0, 1).ptr()));
    }
    return values.is_none() ? nb::handle(values) : nb::handle(PyList_GET_ITEM(values.ptr(), layer));
}

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

// ------------------------------------------------------------------------------------ what an action names must be there

/// Raise the error of a policy at this moment.
void fail(State &state, const std::string &what, const std::string &remedy) {
    int layer = state.visit ? state.visit->layer : state.reached;
    ask(state, state.py.fail,
        {num(state.now), num(state.step_index), num(layer), nb::cast(what).release().ptr(), nb::cast(remedy).release().ptr(),
         nb::cast(state.policy_name).release().ptr()});
    throw std::logic_error("moesim.engine.native.texts.fail returned");
}

std::string unit_text(i64 layer, i64 expert) { return "L" + std::to_string(layer) + "/E" + std::to_string(expert); }

/// Write a value in one short line.
std::string short_repr(State &state, nb::handle value) {
    return text(ask(state, attr(state.py.texts, "short_repr"), {ref(value)}));
}

/// Say that a name is unknown, with the closest known one.
std::string unknown_name(State &state, const char *kind, nb::handle name, nb::handle known) {
    return text(ask(state, attr(state.py.texts, "unknown_name"), {nb::cast(kind).release().ptr(), ref(name), ref(known)}));
}

/// Find a device by name; none: nullptr.
DeviceState *find_device(State &state, PyObject *name) {
    for (DeviceState &device : state.devices)
        if (device.name.ptr() == name) return &device;
    check_key(name);
    for (DeviceState &device : state.devices) {
        int same = PyObject_RichCompareBool(device.name.ptr(), name, Py_EQ);
        if (same < 0) throw nb::python_error();
        if (same) return &device;
    }
    return nullptr;
}

/// Find a device by name.
DeviceState *device_of(State &state, PyObject *name, const std::string &what) {
    if (DeviceState *found = find_device(state, name)) return found;
    nb::list known;
    for (DeviceState &device : state.devices) known.append(device.name);
    fail(state, what + ": " + unknown_name(state, "device", name, known), "name a device of the profile");
}

/// Number an expert over all layers and widths.
i64 unit_of(State &state, i64 layer, i64 expert, const std::string &what, PyObject *bits) {
    if (layer < 0 || layer >= state.n_layers || expert < 0 || expert >= state.n_experts)
        fail(state, what + "(" + unit_text(layer, expert) + "): no such unit",
             "layers are 0.." + std::to_string(state.n_layers - 1) + ", experts 0.." + std::to_string(state.n_experts - 1));
    i64 first = first_of(state, bits, [&] { return what + "(" + unit_text(layer, expert) + ")"; });
    return first + layer * state.n_experts + expert;
}

/// Number the first unit of a width.
i64 first_of(State &state, PyObject *bits, const std::function<std::string()> &what) {
    if (bits == Py_None) return 0;
    auto &widths = state.weights.widths;
    for (size_t i = 0; i < widths.size(); ++i) {
        int same = PyObject_RichCompareBool(widths[i].ptr(), bits, Py_EQ);
        if (same < 0) throw nb::python_error();
        if (same) return state.weights.block * i64(i);
    }
    nb::list known;
    for (nb::object &one : widths) known.append(one);
    nb::object found = ask(state, attr(state.py.texts, "unknown_width"), {ref(bits), ref(known)});
    fail(state, what() + ": " + text(PyTuple_GET_ITEM(found.ptr(), 0)), text(PyTuple_GET_ITEM(found.ptr(), 1)));
}

/// Find a pool of a device by name.
PoolState *pool_of(State &state, DeviceState *device, PyObject *name, const std::string &what) {
    if (PoolState *found = device->memory.pool(name)) return found;
    nb::list known;
    for (auto &pool : device->memory.pools) known.append(pool->name);
    fail(state, what + ": " + unknown_name(state, "pool", name, known),
         "declare Pool('" + text(device->name) + "', '" + text(name) + "', ...) in place()");
}

}  // namespace moesim
