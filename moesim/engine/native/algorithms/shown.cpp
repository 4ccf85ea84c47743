// Functions that look at a view, as Python sees them: with the names and arguments of their references.
#include "../state.hpp"
#include "python.hpp"

namespace moesim::algorithms {

namespace {

/// What a native view shows of one device.
struct Shown {
    State *state;
    DeviceState *device;

    Shown(PyObject *view, PyObject *name) : state(state_of(view)) {
        if (!state) throw Beyond{};
        device = find_device(*state, name);
        if (!device) throw Beyond{};
    }
    i64 unit(i64 layer, i64 expert) const {
        if (layer >= state->n_layers || expert >= state->n_experts) throw Beyond{};
        return layer * state->n_experts + expert;
    }
    bool resident(PyObject *layer_and_expert) const {
        if (!PyTuple_CheckExact(layer_and_expert) || PyTuple_GET_SIZE(layer_and_expert) != 2) throw Beyond{};
        i64 layer = small(PyTuple_GET_ITEM(layer_and_expert, 0)), expert = small(PyTuple_GET_ITEM(layer_and_expert, 1));
        return device->memory.get(unit(layer, expert));
    }
};

constexpr Twin RESIDENT = {"moesim.policies.visit", "first_resident", 4, [](Arguments of) -> nb::object {
    if (!PyDict_CheckExact(of[0]) && !PyList_CheckExact(of[0])) return {};
    Shown shown(of[3], of[2]);
    std::vector<PyObject *> spared;
    bool spares = truth(of[1]);
    PyObject *found = nullptr;
    auto is_found = [&](PyObject *unit) {
        if (spares) {
            int is_spared = PySequence_Contains(of[1], unit);
            if (is_spared < 0) throw nb::python_error();
            if (is_spared) {
                spared.push_back(unit);
                return false;
            }
        }
        if (!shown.resident(unit)) return false;
        found = unit;
        return true;
    };
    if (PyDict_CheckExact(of[0])) {
        PyObject *unit;
        for (Py_ssize_t at = 0; PyDict_Next(of[0], &at, &unit, nullptr) && !is_found(unit);) {
        }
    } else {
        for (Py_ssize_t at = 0; at < PyList_GET_SIZE(of[0]) && !is_found(PyList_GET_ITEM(of[0], at)); ++at) {
        }
    }
    for (size_t at = 0; at < spared.size() && !found; ++at)
        if (shown.resident(spared[at])) found = spared[at];
    return found ? nb::borrow(found) : nb::none();
}};

constexpr Twin ABSENT = {"moesim.policies.cross_layer", "absent", 4, [](Arguments of) {
    if (!PyDict_CheckExact(of[0])) throw Beyond{};
    i64 layer = small(of[1]);
    Shown shown(of[3], of[2]);
    std::vector<std::pair<i64, i64>> found;  // rows, negative, and expert
    PyObject *expert, *rows;
    for (Py_ssize_t at = 0; PyDict_Next(of[0], &at, &expert, &rows);) {
        i64 unit = shown.unit(layer, small(expert));
        if (!shown.device->memory.resident(unit) && !shown.device->pending[unit]) found.emplace_back(-small(rows), small(expert));
    }
    std::sort(found.begin(), found.end());
    std::vector<i64> ids;
    for (auto [_, expert] : found) ids.push_back(expert);
    return list_of(ids);
}};

constexpr Twin WHERE = {"moesim.policies.cross_layer", "where", 4, [](Arguments of) {
    i64 layer = small(of[0]);
    Shown shown(of[3], of[2]);
    nb::object here = own(PyList_New(0)), coming = own(PyList_New(0)), neither = own(PyList_New(0));
    for (PyObject *expert : items(of[1])) {
        i64 unit = shown.unit(layer, small(expert));
        nb::object &to = shown.device->memory.resident(unit) ? here : shown.device->pending[unit] ? coming : neither;
        if (PyList_Append(to.ptr(), expert)) throw nb::python_error();
    }
    return nb::object(nb::make_tuple(here, coming, neither));
}};

constexpr Twin AHEAD = {"moesim.policies.impact_part", "ahead_of", 4, [](Arguments of) {
    static PyTypeObject *type = imported_type("moesim.policies.algorithms.impact", "Ahead");
    i64 layer = small(of[0]);
    if (!PyDict_CheckExact(of[1])) throw Beyond{};
    Shown shown(of[3], of[2]);
    nb::object cached = own(PyList_New(0)), missing = own(PyList_New(0));
    PyObject *expert, *rows;
    for (Py_ssize_t at = 0; PyDict_Next(of[1], &at, &expert, &rows);) {
        i64 unit = shown.unit(layer, small(expert));
        bool coming = shown.device->memory.resident(unit) || shown.device->pending[unit];
        nb::object one = coming ? nb::borrow(rows) : own(PyTuple_Pack(2, expert, rows));
        if (PyList_Append((coming ? cached : missing).ptr(), one.ptr())) throw nb::python_error();
    }
    return named(type, num(layer), cached.release().ptr(), missing.release().ptr());
}};

}  // namespace

void bind_shown(nb::module_ &module) {
    add<RESIDENT>(module);
    add<ABSENT>(module);
    add<WHERE>(module);
    add<AHEAD>(module);
}

}  // namespace moesim::algorithms
