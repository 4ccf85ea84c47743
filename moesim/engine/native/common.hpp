// What all files of the native engine use: integers, calls to make later, Python objects, and arrays of NumPy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
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

/// List whole numbers, most of which may be 0.
template <class Number> PyObject *tuple_of(const std::vector<Number> &numbers) {
    nb::object made = own(PyTuple_New(Py_ssize_t(numbers.size()))), zero = nb::steal(num(0));
    for (size_t i = 0; i < numbers.size(); ++i) PyTuple_SET_ITEM(made.ptr(), i, numbers[i] ? num(numbers[i]) : ref(zero));
    return made.release().ptr();
}

inline nb::list list_of(const std::vector<nb::object> &items) {
    nb::list found;
    for (const nb::object &one : items) found.append(one);
    return found;
}

/// The number that a NumPy array of 16-bit floats holds as bits; it is finite.
inline float from_half(std::uint16_t bits) {
    float size = bits & 0x7c00 ? std::bit_cast<float>((bits & 0x7fffu) << 13) * 0x1p112f : float(bits & 0x3ff) * 0x1p-24f;
    return bits >> 15 ? -size : size;
}

/// Read-only view of a NumPy array with two or three axes.
struct Table {
    Py_buffer buffer;
    bool is_signed;
    explicit Table(nb::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_FULL_RO)) throw nb::python_error();
        is_signed = buffer.format && std::string("bhilq").find(buffer.format[0]) != std::string::npos;
    }
    ~Table() { PyBuffer_Release(&buffer); }
    Table(const Table &) = delete;
    Table &operator=(const Table &) = delete;

    i64 operator()(i64 row, i64 column) const { return number(row * buffer.strides[0] + column * buffer.strides[1]); }
    i64 operator()(i64 row, i64 layer, i64 column) const { return number(offset(row, layer, column)); }
    /// A float of 16, 32 or 64 bits, as one of 32.
    float real(i64 row, i64 layer, i64 column) const {
        const char *at = static_cast<const char *>(buffer.buf) + offset(row, layer, column);
        switch (buffer.itemsize) {
        case 2: return from_half(bits<std::uint16_t>(at));
        case 4: return bits<float>(at);
        default: return float(bits<double>(at));
        }
    }

    /// Read all columns of all rows of a layer.
    void read(i64 layer, std::vector<int> &found) const {
        with_type([&](auto type) {
            const char *row = static_cast<const char *>(buffer.buf) + layer * buffer.strides[1];
            for (i64 r = 0, n_columns = buffer.shape[2]; r < buffer.shape[0]; ++r, row += buffer.strides[0])
                for (i64 column = 0; column < n_columns; ++column)
                    found.push_back(int(read<decltype(type)>(row + column * buffer.strides[2])));
            return 0;
        });
    }

private:
    i64 offset(i64 row, i64 layer, i64 column) const {
        return row * buffer.strides[0] + layer * buffer.strides[1] + column * buffer.strides[2];
    }
    i64 number(i64 offset) const {
        const char *at = static_cast<const char *>(buffer.buf) + offset;
        return with_type([at](auto type) { return read<decltype(type)>(at); });
    }
    /// Call with a number of the type of the array's.
    template <class Call> i64 with_type(Call call) const {
        switch (buffer.itemsize) {
        case 1: return is_signed ? call(std::int8_t()) : call(std::uint8_t());
        case 2: return is_signed ? call(std::int16_t()) : call(std::uint16_t());
        case 4: return is_signed ? call(std::int32_t()) : call(std::uint32_t());
        default: return call(i64());
        }
    }
    template <class T> static i64 read(const char *at) { return i64(bits<T>(at)); }
    template <class T> static T bits(const char *at) {
        T found;
        std::memcpy(&found, at, sizeof found);
        return found;
    }
};

}  // namespace moesim
