// What names of an action must be, and how an error says where it happened.
#include "state.hpp"
#include "streams.hpp"

namespace moesim {

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
