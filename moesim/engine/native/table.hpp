// Arrays of NumPy as they lie in memory.
#pragma once

#include "common.hpp"

#include <cstring>

namespace moesim {

/// Read-only view of a NumPy array of integers with two or three axes.
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
    i64 operator()(i64 row, i64 layer, i64 column) const {
        return number(row * buffer.strides[0] + layer * buffer.strides[1] + column * buffer.strides[2]);
    }

private:
    i64 number(i64 offset) const {
        const char *at = static_cast<const char *>(buffer.buf) + offset;
        switch (buffer.itemsize) {
        case 1: return is_signed ? read<std::int8_t>(at) : read<std::uint8_t>(at);
        case 2: return is_signed ? read<std::int16_t>(at) : read<std::uint16_t>(at);
        case 4: return is_signed ? read<std::int32_t>(at) : read<std::uint32_t>(at);
        default: return read<i64>(at);
        }
    }
    template <class T> static i64 read(const char *at) {
        T found;
        std::memcpy(&found, at, sizeof found);
        return i64(found);
    }
};

}  // namespace moesim
