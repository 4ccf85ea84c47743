// `moesim.metrics.arrivals.settle`: the experts that GPUs ran, and those of them that a demand fetch had brought.
#include "arrays.hpp"

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <utility>

namespace moesim::metrics {
namespace {

/// Five columns: device, layer, expert and time; and of a Run the step, of an arrival whether on demand.
struct Five {
    const i64 *row[5];
    explicit Five(const Rows &from) {
        for (int i = 0; i < 5; ++i) row[i] = from.data() + i * from.shape(1);
    }
    i64 time(i64 i) const { return row[3][i]; }
    i64 last(i64 i) const { return row[4][i]; }
};

/// Sort by time, stably; mostly they are.
void sort(std::vector<i64> &chosen, const Five &of) {
    auto earlier = [&](i64 a, i64 b) { return of.time(a) < of.time(b); };
    if (!std::is_sorted(chosen.begin(), chosen.end(), earlier)) std::stable_sort(chosen.begin(), chosen.end(), earlier);
}

/// One number for device, layer and expert.
struct Numbers {
    i64 size[3] = {1, 1, 1}, least = 0;
    void fit(const Five &of, const std::vector<i64> &chosen) {
        for (int row = 0; row < 3; ++row)
            for (i64 i : chosen) size[row] = std::max(size[row], of.row[row][i] + 1), least = std::min(least, of.row[row][i]);
    }
    i64 of(const Five &from, i64 i) const { return (from.row[0][i] * size[1] + from.row[1][i]) * size[2] + from.row[2][i]; }
    double n() const { return double(size[0]) * double(size[1]) * double(size[2]); }
    /// Whether a table with a row for each is no waste.
    bool few(i64 n_columns) const { return least >= 0 && n() <= 64.0 * double(n_columns + 1024); }
};

/// What is known of an expert on a device.
struct Known {
    i64 arrived = -1;  // the last arrival since a Run
    i64 visit = INT64_MIN, demanded = INT64_MIN;  // steps of the last that were counted
};

/// Counts different pairs of an expert and a step: one by one where steps ascend, which they mostly do.
struct Pairs {
    bool ascend;
    i64 n = 0;
    std::vector<std::pair<i64, i64>> all = {};
    void add(i64 &newest, i64 number, i64 step) {
        if (!ascend) all.emplace_back(number, step);
        n += step != newest;
        newest = step;
    }
    i64 count() {
        if (ascend) return n;
        std::sort(all.begin(), all.end());
        return std::unique(all.begin(), all.end()) - all.begin();
    }
};

struct Settled {
    i64 n_visits = 0, n_demanded = 0;
    std::vector<i64> arrived, runs;  // numbers of those that are kept

    template <class Table> void count(const Five &arrived_, std::vector<i64> arriving, const Five &runs_, std::vector<i64> running,
                                      const Numbers &numbers, Table &table) {
        const bool ascend = std::is_sorted(running.begin(), running.end(), [&](i64 a, i64 b) { return runs_.last(a) < runs_.last(b); });
        Pairs visits{ascend}, demanded{ascend};
        size_t next = 0;
        for (i64 run : running) {
            for (; next < arriving.size() && arrived_.time(arriving[next]) <= runs_.time(run); ++next)
                table[numbers.of(arrived_, arriving[next])].arrived = arriving[next];
            const i64 number = numbers.of(runs_, run), step = runs_.last(run);
            Known &known = table[number];
            visits.add(known.visit, number, step);
            if (known.arrived >= 0 && arrived_.last(known.arrived)) demanded.add(known.demanded, number, step);
            known.arrived = -1;
        }
        for (; next < arriving.size(); ++next) table[numbers.of(arrived_, arriving[next])].arrived = arriving[next];
        for (i64 one : arriving)
            if (arrived_.last(one) && table[numbers.of(arrived_, one)].arrived == one) arrived.push_back(one);
        std::sort(arrived.begin(), arrived.end(), [&](i64 a, i64 b) { return numbers.of(arrived_, a) < numbers.of(arrived_, b); });
        n_visits = visits.count();
        n_demanded = demanded.count();
    }
};

std::vector<i64> chosen_of(const Rows &from, const std::vector<i64> &chosen) {
    std::vector<i64> found;
    found.reserve(5 * chosen.size());
    for (int row = 0; row < 5; ++row)
        for (i64 i : chosen) found.push_back(from.data()[row * from.shape(1) + i]);
    return found;
}

/// Twin of `moesim.metrics.arrivals.longer`.
nb::object longer(Rows rows, nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu> flags, nb::args columns) {
    std::vector<Column<i64>> more;
    for (nb::handle one : columns) more.push_back(nb::cast<Column<i64>>(one));
    const size_t n = rows.shape(1), n_more = std::count(flags.data(), flags.data() + flags.shape(0), true), length = n + n_more;
    std::vector<i64> found(more.size() * length);
    {
        nb::gil_scoped_release released;
        i64 *to = found.data();
        for (size_t row = 0; row < more.size(); ++row) {
            to = std::copy_n(rows.data() + row * n, n, to);
            for (size_t i = 0; i < flags.shape(0); ++i)
                if (flags.data()[i]) *to++ = more[row].data()[i];
        }
    }
    return array(std::move(found), {more.size(), length});
}

/// Twin of `moesim.metrics.arrivals.settle`.
nb::object settle(Rows arrived, Rows runs, std::optional<i64> until) {
    Settled settled;
    std::vector<i64> kept_arrived, kept_runs;
    {
        nb::gil_scoped_release released;
        const Five a(arrived), r(runs);
        const i64 n_arrived = arrived.shape(1), n_runs = runs.shape(1);
        std::vector<i64> arriving, running, later;
        arriving.reserve(n_arrived), running.reserve(n_runs);
        i64 open_step = INT64_MAX, known = until ? *until : INT64_MAX;  // a step goes on from the first; arrivals are known up to then
        if (until)
            for (i64 i = 0; i < n_runs; ++i)
                if (r.time(i) >= *until) open_step = std::min(open_step, r.last(i));
        for (i64 i = 0; i < n_runs; ++i) {
            const bool goes_on = open_step != INT64_MAX && r.last(i) >= open_step;
            (goes_on ? settled.runs : running).push_back(i);
            if (goes_on) known = std::min(known, r.time(i));
        }
        for (i64 i = 0; i < n_arrived; ++i) (until && a.time(i) >= known ? later : arriving).push_back(i);
        sort(arriving, a);
        sort(running, r);
        Numbers numbers;
        numbers.fit(a, arriving);
        numbers.fit(r, running);
        if (numbers.few(n_arrived + n_runs)) {
            std::vector<Known> table(size_t(numbers.n()));
            settled.count(a, std::move(arriving), r, std::move(running), numbers, table);
        } else {
            std::unordered_map<i64, Known> table;
            settled.count(a, std::move(arriving), r, std::move(running), numbers, table);
        }
        settled.arrived.insert(settled.arrived.end(), later.begin(), later.end());
        kept_arrived = chosen_of(arrived, settled.arrived);
        kept_runs = chosen_of(runs, settled.runs);
    }
    const size_t n_kept = settled.arrived.size(), n_open = settled.runs.size();
    return nb::make_tuple(settled.n_visits, settled.n_demanded, array(std::move(kept_arrived), {5, n_kept}),
                          array(std::move(kept_runs), {5, n_open}));
}

}  // namespace

void bind_demand(nb::module_ &module) {
    module.def("settle", &settle, nb::arg(), nb::arg(), nb::arg().none());
    module.def("longer", &longer);
}

}  // namespace moesim::metrics
