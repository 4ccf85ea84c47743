// Counts, scores and what follows from them, as Python sees them: functions with the names and arguments of their references.
#include "caching.hpp"
#include "python.hpp"
#include "scores.hpp"

#include <bit>
#include <cstring>

namespace moesim::algorithms {

namespace {

constexpr Twin SWAP = {"moesim.policies.algorithms.caching", "workload_aware_swap", 4, [](Arguments of) -> nb::object {
    std::vector<i64> scores = numbers(of[0]);
    nb::object residents = PyAnySet_CheckExact(of[1]) ? own(PySequence_List(of[1])) : nb::borrow(of[1]);
    std::vector<bool> here(scores.size());
    for (int expert : experts(residents, scores.size())) here[expert] = true;
    Swaps found = workload_aware_swap(scores, here, small(of[2]), truth(of[3]));
    return nb::make_tuple(list_of(found.victims), list_of(found.newcomers));
}};

/// An array of two dimensions, read without a copy.
struct Matrix {
    Py_buffer view;
    size_t n_rows, n_columns;

    explicit Matrix(PyObject *of) {
        if (PyObject_GetBuffer(of, &view, PyBUF_FORMAT | PyBUF_STRIDES)) {
            PyErr_Clear();
            throw Beyond{};
        }
        bool fits = view.ndim == 2 && view.format && view.format[0] && !view.format[1];
        if (!fits) {
            PyBuffer_Release(&view);
            throw Beyond{};
        }
        n_rows = view.shape[0], n_columns = view.shape[1];
    }
    Matrix(const Matrix &) = delete;
    ~Matrix() { PyBuffer_Release(&view); }
    char kind() const { return view.format[0]; }
    template <class T> T at(size_t row, size_t column) const {
        T found;
        std::memcpy(&found, static_cast<char *>(view.buf) + row * view.strides[0] + column * view.strides[1], sizeof(T));
        return found;
    }
};

/// A score, of 16 or 32 bits, that is a number and not negative.
float score_at(const Matrix &scores, size_t row, size_t column) {
    std::uint32_t bits;
    if (scores.kind() == 'e') {
        bits = scores.at<std::uint16_t>(row, column);
        if (bits < 1 << 10) return float(bits) * 0x1p-24f;
        if (bits >= 31 << 10) throw Beyond{};
        bits = (bits << 13) + (112u << 23);
    } else {
        bits = scores.at<std::uint32_t>(row, column);
        if (bits >= 255u << 23) throw Beyond{};
    }
    return std::bit_cast<float>(bits);
}

std::vector<double> floats(PyObject *of) {
    std::vector<double> found;
    for (PyObject *one : items(of)) {
        if (!PyFloat_CheckExact(one)) throw Beyond{};
        found.push_back(PyFloat_AS_DOUBLE(one));
    }
    return found;
}

nb::object list_of_floats(const std::vector<double> &of) {
    nb::object made = own(PyList_New(Py_ssize_t(of.size())));
    for (size_t e = 0; e < of.size(); ++e) PyList_SET_ITEM(made.ptr(), e, PyFloat_FromDouble(of[e]));
    return made;
}

/// All scores of at least one row, row after row.
std::vector<float> flat(const Matrix &rows) {
    if ((rows.kind() != 'e' && rows.kind() != 'f') || !rows.n_rows) throw Beyond{};
    std::vector<float> found;
    found.reserve(rows.n_rows * rows.n_columns);
    for (size_t row = 0; row < rows.n_rows; ++row)
        for (size_t column = 0; column < rows.n_columns; ++column) found.push_back(score_at(rows, row, column));
    return found;
}

/// Scores that count, and their weight.
struct Counting {
    i64 p;
    double alpha;

    Counting(PyObject *of_row, PyObject *weight) : p(small(of_row)) {
        if (!p || !PyFloat_CheckExact(weight)) throw Beyond{};
        alpha = PyFloat_AS_DOUBLE(weight);
    }
};

constexpr const char *SCORES = "moesim.policies.algorithms.scores";

constexpr Twin RECENT = {SCORES, "recent_scores", 5, [](Arguments of) -> nb::object {
    std::vector<double> scores = floats(of[0]);
    Matrix rows(of[1]);
    if (rows.n_columns < 2 || rows.n_columns != scores.size()) throw Beyond{};
    auto [p, alpha] = Counting(of[2], of[3]);
    std::vector<float> values = flat(rows);
    recent_scores(scores, values, size_t(p), alpha, truth(of[4]));
    return list_of_floats(scores);
}};

i64 id_at(const Matrix &ids, size_t row, size_t column) {
    switch (ids.kind()) {
    case 'B': return ids.at<std::uint8_t>(row, column);
    case 'H': return ids.at<std::uint16_t>(row, column);
    case 'h': return ids.at<std::int16_t>(row, column);
    case 'i': return ids.at<std::int32_t>(row, column);
    case 'l': return ids.at<long>(row, column);
    default: throw Beyond{};
    }
}

constexpr Twin RECENT_WEIGHTS = {SCORES, "recent_weights", 6, [](Arguments of) -> nb::object {
    std::vector<double> scores = floats(of[0]);
    Matrix ids(of[1]), weights(of[2]);
    size_t k = ids.n_columns;
    if (!k || k != weights.n_columns || ids.n_rows != weights.n_rows) throw Beyond{};
    auto [p, alpha] = Counting(of[3], of[4]);
    std::vector<int> chosen;
    for (size_t row = 0; row < ids.n_rows; ++row) {
        for (size_t column = 0; column < k; ++column) {
            i64 id = id_at(ids, row, column);
            if (id < 0 || id >= i64(scores.size()) || std::find(chosen.end() - column, chosen.end(), id) != chosen.end()) throw Beyond{};
            chosen.push_back(int(id));
        }
    }
    std::vector<float> values = flat(weights);
    recent_weights(scores, chosen, values, k, size_t(p), alpha, truth(of[5]));
    return list_of_floats(scores);
}};

constexpr Twin COUNT = {"moesim.policies.algorithms.counting", "add_rows", 3, [](Arguments of) {
    if (!PyDict_CheckExact(of[0])) throw Beyond{};
    nb::dict counts = nb::borrow<nb::dict>(of[0]);
    Matrix ids(of[1]);
    size_t width = std::min<size_t>(ids.n_columns, small(of[2]));
    std::vector<i64> added(LONGEST);
    std::vector<i64> order;  // in which they are first counted, as Python's dicts keep it
    for (size_t row = 0; row < ids.n_rows; ++row)
        for (size_t column = 0; column < width; ++column) {
            i64 id = id_at(ids, row, column);
            if (id < 0 || id >= LONGEST) throw Beyond{};
            if (!added[id]++) order.push_back(id);
        }
    std::vector<nb::object> keys;
    for (i64 id : order) {
        keys.push_back(own(num(id)));
        PyObject *before = PyDict_GetItemWithError(counts.ptr(), keys.back().ptr());
        if (before) added[id] += small(before);
    }
    for (size_t at = 0; at < order.size(); ++at)
        if (PyDict_SetItem(counts.ptr(), keys[at].ptr(), own(num(added[order[at]])).ptr())) throw nb::python_error();
    return nb::object(counts);
}};

constexpr Twin TOP = {"moesim.policies.algorithms.counting", "top_counted", 2, [](Arguments of) {
    if (!PyDict_CheckExact(of[0])) throw Beyond{};
    std::vector<std::pair<i64, i64>> ranked;  // rows, negative, and expert
    PyObject *expert, *rows;
    for (Py_ssize_t at = 0; PyDict_Next(of[0], &at, &expert, &rows);) ranked.emplace_back(-small(rows), small(expert));
    size_t n = std::min<size_t>(small(of[1]), ranked.size());
    std::partial_sort(ranked.begin(), ranked.begin() + n, ranked.end());
    std::vector<i64> top;
    for (size_t at = 0; at < n; ++at) top.push_back(ranked[at].second);
    return list_of(top);
}};

}  // namespace

void bind_scoring(nb::module_ &module) {
    add<SWAP>(module);
    add<RECENT>(module);
    add<RECENT_WEIGHTS>(module);
    add<COUNT>(module);
    add<TOP>(module);
}

}  // namespace moesim::algorithms
