// Functions that PreScope calls in Python at each layer, as Python sees them: with the names and arguments of their references.
#include "../state.hpp"
#include "presched.hpp"

namespace moesim::algorithms {

namespace {

/// Thrown where something is no small number from 0, or no list or tuple: then the Python reference answers.
struct Beyond {};

/// Numbers up to this and lists up to that have sums that fit into 64 bits.
constexpr i64 LARGEST = i64(1) << 50;
constexpr Py_ssize_t LONGEST = 1 << 10;

i64 small(nb::handle of) {
    if (!PyLong_CheckExact(of.ptr())) throw Beyond{};
    i64 found = as_int(of);
    if (found < 0 || found > LARGEST) throw Beyond{};
    return found;
}

std::span<PyObject *> items(nb::handle of) {
    PyObject *p = of.ptr();
    if ((!PyList_CheckExact(p) && !PyTuple_CheckExact(p)) || PySequence_Fast_GET_SIZE(p) > LONGEST) throw Beyond{};
    return {PySequence_Fast_ITEMS(p), size_t(PySequence_Fast_GET_SIZE(p))};
}

std::vector<i64> numbers(nb::handle of) {
    std::vector<i64> found;
    for (PyObject *one : items(of)) found.push_back(small(one));
    return found;
}

/// Numbers of rows by expert, in the order of a dict.
std::vector<std::pair<i64, i64>> counted(nb::handle of) {
    if (!PyDict_CheckExact(of.ptr())) throw Beyond{};
    std::vector<std::pair<i64, i64>> found;
    PyObject *expert, *rows;
    for (Py_ssize_t at = 0; PyDict_Next(of.ptr(), &at, &expert, &rows);) found.emplace_back(small(expert), small(rows));
    return found;
}

template <class Ids> nb::object list_of(const Ids &ids) {
    nb::object made = own(PyList_New(Py_ssize_t(ids.size())));
    Py_ssize_t at = 0;
    for (auto id : ids) PyList_SET_ITEM(made.ptr(), at++, num(id));
    return made;
}

PyTypeObject *type_of_presched(const char *name) {
    return reinterpret_cast<PyTypeObject *>(attr(nb::module_::import_("moesim.policies.algorithms.presched"), name).release().ptr());
}

/// What a table of costs gives for a number of rows, in square brackets.
struct Costs {
    nb::handle table;
    mutable std::vector<i64> known = {};  // what it has given; -1: not asked

    i64 operator()(i64 rows) const {
        if (rows >= LONGEST) return asked(rows);
        if (rows >= i64(known.size())) known.resize(rows + 1, -1);
        if (known[rows] < 0) known[rows] = asked(rows);
        return known[rows];
    }
    i64 asked(i64 rows) const { return small(own(PyObject_GetItem(table.ptr(), nb::steal(num(rows)).ptr()))); }
};

Timing<Costs> timing_of(PyObject *of) {
    static PyTypeObject *type = type_of_presched("Timing");
    if (Py_TYPE(of) != type) throw Beyond{};
    auto field = [of](Py_ssize_t at) { return PyTuple_GET_ITEM(of, at); };
    return {Costs{field(0)}, small(field(1)), small(field(2)), small(field(3)), small(field(4)), small(field(5))};
}

NoneBetter none_better_of(nb::handle of) {
    if (PyUnicode_CheckExact(of.ptr())) {
        if (text(of) == "eq2") return NoneBetter::EQ2;
        if (text(of) == "printed") return NoneBetter::PRINTED;
        if (text(of) == "sentinel") return NoneBetter::SENTINEL;
    }
    throw Beyond{};
}

using Arguments = PyObject *const *;

nb::object certain(Arguments of) {
    return own(num(certain_for_cpu(std::span<const i64>(numbers(of[0])), timing_of(of[1]), none_better_of(of[2]))));
}

nb::object cross_layer(Arguments of) {
    static PyTypeObject *type = type_of_presched("CrossLayerPlan");
    std::vector<i64> current = numbers(of[0]), upcoming = numbers(of[1]);
    Timing<Costs> timing = timing_of(of[2]);
    if (!timing.load_next) throw Beyond{};
    auto hit_rate = [&](i64 rank) {
        nb::object found = nb::handle(of[3])(rank);
        if (!PyFloat_CheckExact(found.ptr())) throw Beyond{};
        return PyFloat_AS_DOUBLE(found.ptr());
    };
    CrossLayerPlan plan = cross_layer_plan(std::span<const i64>(current), std::span<const i64>(upcoming), timing, hit_rate,
                                           none_better_of(of[4]));
    if (std::abs(plan.gap + timing.dense) > LARGEST) throw Beyond{};  // the quotient of two doubles is Python's only up to 2^53
    return named(type, num(plan.first), num(plan.gap), nb::make_tuple(plan.queued, plan.queued_next).release().ptr(),
                 PyFloat_FromDouble(plan.share), num(plan.n_prefetch));
}

/// Rows of the best experts of each row of a NumPy array of ids, on top of what is counted.
nb::object add_rows(Arguments of) {
    std::vector<std::pair<i64, i64>> before = counted(of[0]);
    i64 top_k = small(of[2]);
    if (!PyObject_CheckBuffer(of[1])) throw Beyond{};
    moesim::Table ids(of[1]);
    if (ids.buffer.ndim != 2 || !ids.buffer.format || !std::strchr("BHhil", ids.buffer.format[0])) throw Beyond{};
    std::vector<i64> added(LONGEST), order;  // in which they are first counted, as Python's dicts keep it
    for (i64 row = 0; row < ids.buffer.shape[0]; ++row)
        for (i64 at = 0; at < std::min<i64>(ids.buffer.shape[1], top_k); ++at) {
            i64 id = ids(row, at);
            if (id < 0 || id >= LONGEST) throw Beyond{};
            if (!added[id]++) order.push_back(id);
        }
    for (auto [id, rows] : before)
        if (id < LONGEST) added[id] += rows;
    for (i64 id : order)
        if (PyDict_SetItem(of[0], nb::steal(num(id)).ptr(), nb::steal(num(added[id])).ptr())) throw nb::python_error();
    return nb::borrow(of[0]);
}

/// What a native view shows of one device.
struct Shown {
    State *state;
    DeviceState *device;

    Shown(nb::handle view, nb::handle name) : state(state_of(view)) {
        device = state ? find_device(*state, name.ptr()) : nullptr;
        if (!device) throw Beyond{};
    }
    i64 unit(i64 layer, i64 expert) const {
        if (layer >= state->n_layers || expert >= state->n_experts) throw Beyond{};
        return layer * state->n_experts + expert;
    }
};

nb::object absent(Arguments of) {
    i64 layer = small(of[1]);
    Shown shown(of[3], of[2]);
    std::vector<std::pair<i64, i64>> found;  // rows, negative, and expert
    for (auto [expert, rows] : counted(of[0])) {
        i64 unit = shown.unit(layer, expert);
        if (!shown.device->memory.resident(unit) && !shown.device->pending[unit]) found.emplace_back(-rows, expert);
    }
    std::sort(found.begin(), found.end());
    std::vector<i64> ids;
    for (auto [_, expert] : found) ids.push_back(expert);
    return list_of(ids);
}

nb::object where(Arguments of) {
    i64 layer = small(of[0]);
    Shown shown(of[3], of[2]);
    std::vector<i64> here, coming, neither;
    for (i64 expert : numbers(of[1])) {
        i64 unit = shown.unit(layer, expert);
        (shown.device->memory.resident(unit) ? here : shown.device->pending[unit] ? coming : neither).push_back(expert);
    }
    return nb::make_tuple(list_of(here), list_of(coming), list_of(neither));
}

/// A function of a Python module, and what answers for it.
struct Twin {
    const char *module, *name;
    Py_ssize_t n;  // arguments, those with defaults included
    nb::object (*native)(Arguments);
};
constexpr Twin CERTAIN = {"algorithms.presched", "certain_for_cpu", 3, certain};
constexpr Twin CROSS_LAYER = {"algorithms.presched", "cross_layer_plan", 5, cross_layer};
constexpr Twin COUNT = {"parts.prefetch", "add_rows", 3, add_rows};
constexpr Twin ABSENT = {"parts.prefetch", "absent", 4, absent};
constexpr Twin WHERE = {"parts.prefetch", "where", 4, where};

/// Answer natively; what is `Beyond` that, and a call with other arguments, goes to the reference.
template <const Twin &twin> PyObject *call(PyObject *, PyObject *const *first, Py_ssize_t n) {
    try {
        try {
            if (n == twin.n) return twin.native(first).release().ptr();
        } catch (const Beyond &) {
        }
        nb::module_ module = nb::module_::import_((std::string("moesim.policies.") + twin.module).c_str());
        return PyObject_Vectorcall(attr(module, twin.name).ptr(), first, size_t(n), nullptr);
    } catch (nb::python_error &error) {
        error.restore();
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    }
    return nullptr;
}

template <const Twin &twin> void add(nb::module_ &module) {
    static PyMethodDef method = {twin.name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call<twin>)), METH_FASTCALL,
                                 "The native twin of the function of this name."};
    module.attr(twin.name) = own(PyCFunction_NewEx(&method, nullptr, nullptr));
}

}  // namespace

void bind(nb::module_ &module) {
    add<CERTAIN>(module);
    add<CROSS_LAYER>(module);
    add<COUNT>(module);
    add<ABSENT>(module);
    add<WHERE>(module);
}

}  // namespace moesim::algorithms
