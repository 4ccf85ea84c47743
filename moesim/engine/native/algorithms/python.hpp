// How the algorithms read what Python gives them, and leave to their references what they cannot take.
#pragma once

#include "../common.hpp"
#include "assignment.hpp"

namespace moesim::algorithms {

/// Thrown where something is no small number from 0, or no list or tuple: then the Python reference answers.
struct Beyond {};

/// Numbers up to this and lists up to that have sums that fit into 64 bits.
constexpr i64 LARGEST = i64(1) << 50;
constexpr Py_ssize_t LONGEST = 1 << 10;

inline i64 small(PyObject *p) {
    if (!PyLong_CheckExact(p)) throw Beyond{};
    int beyond;
    i64 found = PyLong_AsLongLongAndOverflow(p, &beyond);
    if (beyond || found < 0 || found > LARGEST) throw Beyond{};
    return found;
}
inline i64 small(nb::handle h) { return small(h.ptr()); }

/// The items of a list or tuple.
inline std::span<PyObject *> items(nb::handle of) {
    PyObject *p = of.ptr();
    if (!PyList_CheckExact(p) && !PyTuple_CheckExact(p)) throw Beyond{};
    Py_ssize_t n = PySequence_Fast_GET_SIZE(p);
    if (n > LONGEST) throw Beyond{};
    return {PySequence_Fast_ITEMS(p), size_t(n)};
}
inline std::vector<i64> numbers(nb::handle of) {
    std::vector<i64> found;
    found.reserve(items(of).size());
    for (PyObject *one : items(of)) found.push_back(small(one));
    return found;
}
/// Numbers of experts, of which there are `n`.
inline std::vector<int> experts(nb::handle of, size_t n) {
    std::vector<int> found;
    for (PyObject *one : items(of)) {
        i64 expert = small(one);
        if (expert >= i64(n)) throw Beyond{};
        found.push_back(int(expert));
    }
    return found;
}
/// What a table of costs gives for a number of rows, in square brackets.
struct Table {
    PyObject *table;
    mutable std::vector<i64> known;  // what it has given; -1: not asked

    explicit Table(nb::handle of) : table(of.ptr()) {}
    i64 operator()(i64 rows) const {
        if (rows >= LONGEST) return asked(rows);
        if (rows >= i64(known.size())) known.resize(rows + 1, -1);
        if (known[rows] < 0) known[rows] = asked(rows);
        return known[rows];
    }

private:
    i64 asked(i64 rows) const {
        nb::object key = nb::steal(num(rows));
        if (PyDict_Check(table)) {
            if (PyObject *found = PyDict_GetItemWithError(table, key.ptr())) return small(found);
            if (PyErr_Occurred()) throw nb::python_error();
        }
        return small(own(PyObject_GetItem(table, key.ptr())));
    }
};

template <class Ids> nb::object tuple_of(const Ids &ids) {
    PyObject *made = PyTuple_New(Py_ssize_t(ids.size()));
    if (!made) throw nb::python_error();
    Py_ssize_t at = 0;
    for (auto id : ids) PyTuple_SET_ITEM(made, at++, num(id));
    return nb::steal(made);
}
template <class Ids> nb::object list_of(const Ids &ids) {
    PyObject *made = PyList_New(Py_ssize_t(ids.size()));
    if (!made) throw nb::python_error();
    Py_ssize_t at = 0;
    for (auto id : ids) PyList_SET_ITEM(made, at++, num(id));
    return nb::steal(made);
}

/// A name of a Python module, kept for good.
inline PyObject *imported(const char *module, const char *name) { return attr(nb::module_::import_(module), name).release().ptr(); }

inline PyTypeObject *imported_type(const char *module, const char *name) {
    return reinterpret_cast<PyTypeObject *>(imported(module, name));
}

/// The fields of a named tuple of a type.
inline PyObject **fields(PyObject *of, PyTypeObject *type) {
    if (Py_TYPE(of) != type) throw Beyond{};
    return reinterpret_cast<PyTupleObject *>(of)->ob_item;
}

inline PyTypeObject *plan_type() {
    static PyTypeObject *type = imported_type("moesim.policies.algorithms.assignment", "Plan");
    return type;
}
inline nb::object plan_of(const Plan &plan) {
    return named(plan_type(), tuple_of(plan.gpu).release().ptr(), tuple_of(plan.cpu).release().ptr(), num(plan.gpu_total),
                 num(plan.cpu_total), tuple_of(plan.loads).release().ptr());
}

/// The arguments of a call, all by position.
struct Arguments {
    PyObject *const *first;
    Py_ssize_t n;

    PyObject *operator[](Py_ssize_t at) const { return first[at]; }
};

/// A function of a Python module, and what answers for it.
struct Twin {
    const char *module, *name;
    Py_ssize_t n;  // arguments, those with defaults included
    nb::object (*native)(Arguments);  // an invalid object is as `Beyond`, and cheaper
};

/// Answer natively; what is `Beyond` that, and a call with other arguments, goes to the reference.
template <const Twin &twin> PyObject *call(PyObject *, PyObject *const *first, Py_ssize_t n) {
    try {
        try {
            if (n == twin.n)
                if (nb::object found = twin.native({first, n}); found.is_valid()) return found.release().ptr();
        } catch (const Beyond &) {
        }
        static PyObject *reference = imported(twin.module, twin.name);
        return PyObject_Vectorcall(reference, first, size_t(n), nullptr);
    } catch (nb::python_error &error) {
        error.restore();
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    }
    return nullptr;
}

/// Add a twin to a module, as a built-in function.
template <const Twin &twin> void add(nb::module_ &module) {
    static PyMethodDef method = {twin.name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call<twin>)), METH_FASTCALL,
                                 "The native twin of the function of this name."};
    module.attr(twin.name) = own(PyCFunction_NewEx(&method, nullptr, nullptr));
}

}  // namespace moesim::algorithms
