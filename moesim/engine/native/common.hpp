// What all files of the native engine use: integers, calls to make later, and Python objects.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace nb = nanobind;

namespace moesim {

using i64 = std::int64_t;
using u64 = std::uint64_t;
using i128 = __int128;  // work in millionths of a nanosecond does not fit into 64 bits
using Call = std::function<void()>;

inline i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

/// Take over a new reference; throw the Python error if there is none.
inline nb::object own(PyObject *p) {
    if (!p) throw nb::python_error();
    return nb::steal(p);
}

/// Read an integer of any Python or NumPy type; one beyond 64 bits becomes the nearest that they hold, which no check lets pass.
inline i64 as_int(PyObject *p) {
    if (!PyLong_CheckExact(p)) return as_int(own(PyNumber_Index(p)).ptr());
    int beyond;
    i64 found = PyLong_AsLongLongAndOverflow(p, &beyond);
    if (beyond) return beyond < 0 ? INT64_MIN : INT64_MAX;
    return found;
}
inline i64 as_int(nb::handle h) { return as_int(h.ptr()); }

inline bool truth(PyObject *p) {
    int found = PyObject_IsTrue(p);
    if (found < 0) throw nb::python_error();
    return found;
}

/// The Python string of a name, which is a literal: made once, and found by where the literal lies.
inline PyObject *interned(const char *name) {
    static std::unordered_map<const char *, PyObject *> known;
    PyObject *&found = known[name];
    if (!found) found = PyUnicode_InternFromString(name);
    return found;
}

inline nb::object attr(nb::handle of, const char *name) { return own(PyObject_GetAttr(of.ptr(), interned(name))); }
inline i64 int_attr(nb::handle of, const char *name) { return as_int(attr(of, name)); }

/// Write a value as an f-string does.
inline std::string text(nb::handle of) {
    if (!PyUnicode_Check(of.ptr())) return text(own(PyObject_Str(of.ptr())));
    Py_ssize_t n;
    const char *found = PyUnicode_AsUTF8AndSize(of.ptr(), &n);
    if (!found) throw nb::python_error();
    return {found, size_t(n)};
}
/// Refuse what cannot be the key of a dict, as a look-up by name in Python does.
inline void check_key(nb::handle name) {
    if (!PyUnicode_CheckExact(name.ptr()) && PyObject_Hash(name.ptr()) == -1) throw nb::python_error();
}
inline std::string repr_of(nb::handle of) { return text(own(PyObject_Repr(of.ptr()))); }

/// Make a named tuple of the contract without its Python constructor, as `tuple.__new__` does. Takes the references over.
template <class... Items> nb::object named(PyTypeObject *type, Items... items) {
    PyObject *made = type->tp_alloc(type, sizeof...(items));
    if (!made) throw nb::python_error();
    Py_ssize_t at = 0;
    (PyTuple_SET_ITEM(made, at++, items), ...);
    return nb::steal(made);
}
inline PyObject *ref(PyObject *p) { return Py_NewRef(p); }
inline PyObject *ref(nb::handle h) { return Py_NewRef(h.ptr()); }
inline PyObject *num(i64 n) {
    PyObject *made = PyLong_FromLongLong(n);
    if (!made) throw nb::python_error();
    return made;
}

inline nb::list list_of(const std::vector<nb::object> &items) {
    nb::list found;
    for (const nb::object &one : items) found.append(one);
    return found;
}

}  // namespace moesim
