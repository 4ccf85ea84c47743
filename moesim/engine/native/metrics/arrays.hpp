// Columns of records as NumPy has them, read without a copy; and results, which become arrays without a copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

namespace moesim::metrics {

namespace nb = nanobind;
using i64 = std::int64_t;

template <class T> using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
/// Several columns of whole numbers, one after the other.
using Rows = nb::ndarray<const i64, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

/// A column of a dict of columns, by its name.
template <class T> const T *column(const nb::dict &columns, const char *name) {
    return nb::cast<Column<T>>(columns[name]).data();
}

/// An array that keeps the numbers.
inline nb::object array(std::vector<i64> &&numbers, std::initializer_list<size_t> shape) {
    auto *kept = new std::vector<i64>(std::move(numbers));
    nb::capsule owner(kept, [](void *p) noexcept { delete static_cast<std::vector<i64> *>(p); });
    return nb::cast(nb::ndarray<nb::numpy, i64>(kept->data(), shape, owner));
}

}  // namespace moesim::metrics
