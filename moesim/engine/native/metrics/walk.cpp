// The walk of `moesim.metrics.critical_path`: from the end of each window back along what was waited for.
#include "arrays.hpp"

#include <algorithm>

namespace moesim::metrics {
namespace {

// As in `moesim.metrics.activities` and `moesim.metrics.causes`.
enum Trait { SAME_PLACE = 1, SAME_MEDIUM = 2, SAME_FETCH = 4, BROUGHT = 8, AT_SOURCE = 16, DECISION = 32, IF_DECIDED = 128 };
enum More { MODEL = 256, CROSSING = 512, COMPLETE = 1024 };
constexpr i64 N_CAUSES = 10, IDLE = 9;

struct End {
    i64 at, index;
};

/// Sort by the time, stably: records come in a few stretches that are sorted, so whole stretches are merged.
std::vector<End> merged(std::vector<End> ends) {
    auto earlier = [](const End &a, const End &b) { return a.at < b.at; };
    std::vector<size_t> edges{0};
    for (size_t i = 1; i < ends.size(); ++i)
        if (ends[i].at < ends[i - 1].at) edges.push_back(i);
    edges.push_back(ends.size());
    std::vector<End> other(ends.size());
    while (edges.size() > 2) {
        std::vector<size_t> left{0};
        size_t i = 0;
        for (; i + 2 < edges.size(); i += 2) {
            auto from = ends.begin();
            std::merge(from + edges[i], from + edges[i + 1], from + edges[i + 1], from + edges[i + 2], other.begin() + edges[i], earlier);
            left.push_back(edges[i + 2]);
        }
        if (i + 1 < edges.size()) {  // one is left over
            std::copy(ends.begin() + edges[i], ends.end(), other.begin() + edges[i]);
            left.push_back(ends.size());
        }
        ends.swap(other);
        edges.swap(left);
    }
    return ends;
}

/// Twin of `moesim.metrics.activities.by_end`.
nb::object by_end(Column<i64> end, Column<std::int8_t> rank, Column<std::int16_t> place, Column<std::int16_t> order) {
    std::vector<i64> found(end.shape(0));
    {
        nb::gil_scoped_release released;
        std::vector<End> ends(end.shape(0));
        for (size_t i = 0; i < ends.size(); ++i) ends[i] = {end.data()[i], i64(i)};
        ends = merged(std::move(ends));
        const i64 n_places = order.shape(0);
        auto tie = [&](const End &one) { return rank.data()[one.index] * n_places + order.data()[place.data()[one.index]]; };
        for (size_t i = 0, j; i < ends.size(); i = j) {
            for (j = i + 1; j < ends.size() && ends[j].at == ends[i].at;) ++j;
            if (j - i > 1)
                std::stable_sort(ends.begin() + i, ends.begin() + j, [&](const End &a, const End &b) { return tie(a) < tie(b); });
        }
        for (size_t i = 0; i < ends.size(); ++i) found[i] = ends[i].index;
    }
    const size_t n = found.size();
    return array(std::move(found), {n});
}

/// Activities in the order of their ends, by whose numbers they are asked for; -1 ended before everything.
struct Ended {
    const i64 *begins, *fetch;
    const std::int8_t *cause;
    const std::int16_t *place, *wants, *traits;
    const std::int32_t *step, *layer, *expert;
    const i64 *order, *device, *source, *target, *medium;
    std::vector<i64> ends;

    i64 end(i64 i) const { return i < 0 ? -1 : ends[i]; }

    /// Whether b, which ended as a began, is something that a wants.
    bool related(i64 a, i64 b) const {
        a = order[a], b = order[b];
        const auto at = place[a], there = place[b];
        const bool own = layer[a] == layer[b] && expert[a] == expert[b] && (traits[b] & COMPLETE);
        const bool brought = target[there] == device[at] && (own || (traits[b] & CROSSING));
        const int found = (at == there) * SAME_PLACE | (medium[at] == medium[there]) * SAME_MEDIUM | (fetch[a] == fetch[b]) * SAME_FETCH |
                          brought * BROUGHT | (device[there] == source[at]) * AT_SOURCE | traits[b];
        return found & wants[a] & (IF_DECIDED - 1);
    }
    /// Of several things that ended at one instant, the first that passes a test, or else the first of all.
    template <class Test> i64 of_instant(i64 first, i64 last, Test passes) const {
        for (i64 i = first; i <= last; ++i)
            if (passes(i)) return i;
        return first;
    }
    i64 first_of(i64 last) const {
        i64 first = last;
        while (first > 0 && ends[first - 1] == ends[last]) --first;
        return first;
    }
    /// What an activity waited for.
    i64 before(i64 a) const {
        const i64 start = begins[order[a]];
        i64 last = a;
        while (last >= 0 && ends[last] > start) --last;
        if (last < 0) return last;
        const i64 first = first_of(last);
        const int wanted = wants[order[a]];
        if (first == last || ends[last] != start || !wanted) return first;
        if (wanted & IF_DECIDED) {
            bool decided = false;
            for (i64 i = first; i <= last; ++i) decided |= (traits[order[i]] & DECISION) != 0;
            if (!decided) return first;
        }
        return of_instant(first, last, [&](i64 b) { return related(a, b); });
    }
    /// What a window ended with: a layer with its own runs and outputs, whatever else happens to end then.
    i64 last_of(i64 until, i64 of_step, i64 of_layer) const {
        const i64 last = std::upper_bound(ends.begin(), ends.end(), until) - ends.begin() - 1;
        if (last < 0) return last;
        const i64 first = first_of(last);
        if (first == last || ends[last] != until) return first;
        return of_instant(first, last, [&](i64 b) {
            b = order[b];
            return layer[b] == of_layer && ((traits[b] & CROSSING) || ((traits[b] & MODEL) && step[b] == of_step));
        });
    }
    void explain(i64 begin, i64 until, i64 of_step, i64 of_layer, i64 *charged) const {
        i64 at = last_of(until, of_step, of_layer);
        charged[IDLE] += until - std::max(end(at), begin);
        while (end(at) > begin) {
            const i64 start = begins[order[at]];
            charged[cause[order[at]]] += ends[at] - std::max(start, begin);
            if (start <= begin) return;
            at = before(at);
            charged[IDLE] += start - std::max(end(at), begin);
        }
    }
};

/// Twin of `moesim.metrics.critical_path.charged`.
nb::object charged(nb::dict of, Column<i64> order, Rows places, Rows windows) {
    const size_t n = windows.shape(1), n_places = places.shape(1);
    const i64 *rows = places.data();
    Ended ended{column<i64>(of, "start"), column<i64>(of, "fetch"), column<std::int8_t>(of, "cause"),
                column<std::int16_t>(of, "place"), column<std::int16_t>(of, "wants"), column<std::int16_t>(of, "traits"),
                column<std::int32_t>(of, "step"), column<std::int32_t>(of, "layer"), column<std::int32_t>(of, "expert"),
                order.data(), rows, rows + n_places, rows + 2 * n_places, rows + 3 * n_places, {}};
    const i64 *end = column<i64>(of, "end");
    std::vector<i64> found(n * N_CAUSES);
    {
        nb::gil_scoped_release released;
        ended.ends.resize(order.shape(0));
        for (size_t i = 0; i < ended.ends.size(); ++i) ended.ends[i] = end[order.data()[i]];
        const i64 *begin = windows.data(), *until = begin + n, *step = until + n, *layer = step + n;
        for (size_t i = 0; i < n; ++i) ended.explain(begin[i], until[i], step[i], layer[i], &found[i * N_CAUSES]);
    }
    return array(std::move(found), {n, size_t(N_CAUSES)});
}

}  // namespace

void bind_walk(nb::module_ &module) {
    module.def("by_end", &by_end);
    module.def("charged", &charged);
}

}  // namespace moesim::metrics
