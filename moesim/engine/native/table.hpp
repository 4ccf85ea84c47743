// Arrays of NumPy as they lie in memory.
#pragma once

#include "common.hpp"

#include <bit>
#include <cstring>

namespace moesim {

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
