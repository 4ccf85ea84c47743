// Plans of a layer as Python sees them: functions with the names and arguments of their references.
#include "impact.hpp"
#include "presched.hpp"
#include "python.hpp"
#include "search.hpp"
#include "two_ended.hpp"

namespace moesim::algorithms {

namespace {

constexpr const char *ASSIGNMENT = "moesim.policies.algorithms.assignment";
constexpr const char *QUEUES_MODULE = "moesim.policies.algorithms.queues";
constexpr const char *SEARCH = "moesim.policies.algorithms.search";
constexpr const char *TWO_ENDED_MODULE = "moesim.policies.algorithms.two_ended";
constexpr const char *PRESCHED = "moesim.policies.algorithms.presched";

/// Rows of the experts of a layer, and how long each would be waited for.
struct Layer {
    std::vector<i64> loads, waiting;

    Layer(PyObject *rows, PyObject *times) : loads(numbers(rows)), waiting(numbers(times)) {
        if (loads.size() != waiting.size()) throw Beyond{};
    }
};

constexpr Twin GREEDY = {ASSIGNMENT, "greedy_layer_plan", 7, [](Arguments of) {
    Layer layer(of[0], of[1]);
    Extras extra{small(of[4]), small(of[5]), small(of[6])};
    return plan_of(greedy_assignment(layer_costs(layer.loads, layer.waiting, Table(of[2]), Table(of[3])), extra));
}};

constexpr Twin THRESHOLD = {ASSIGNMENT, "threshold_layer_plan", 4, [](Arguments of) {
    Layer layer(of[0], of[1]);
    return plan_of(threshold_assignment(loading_costs(layer.loads, layer.waiting, Table(of[2]), Table(of[3]))));
}};

constexpr Twin BEAM = {SEARCH, "beam_assignment", 5, [](Arguments of) {
    LayerCosts costs{numbers(of[0]), numbers(of[1])};
    i64 width = small(of[2]);
    if (costs.gpu.size() != costs.cpu.size() || width < 1 || width > LONGEST) throw Beyond{};
    return plan_of(beam_assignment(costs, width, {0, small(of[3]), small(of[4])}));
}};

Timings<Table> timings_of(PyObject *of) {
    static PyTypeObject *type = imported_type(QUEUES_MODULE, "Timings");
    PyObject **field = fields(of, type);
    return {small(field[0]), Table(field[1]), Table(field[2]), field[2] != Py_None, small(field[3]), small(field[4])};
}

bool is(PyObject *text, const char *wanted) {
    return PyUnicode_CheckExact(text) && PyUnicode_CompareWithASCIIString(text, wanted) == 0;
}

Reading reading_of(PyObject *of) {
    static PyTypeObject *type = imported_type(QUEUES_MODULE, "Reading");
    PyObject **field = fields(of, type);
    Reading found;
    found.by_completion = is(field[0], "completion");
    if (is(field[1], "cpu")) found.order = {CPU, GPU, LINK};
    else if (is(field[1], "link")) found.order = {LINK, GPU, CPU};
    else if (!is(field[1], "gpu")) throw Beyond{};
    found.count_compute = truth(field[2]);
    found.overtake = truth(field[3]);
    return found;
}

constexpr Twin QUEUES = {QUEUES_MODULE, "queue_layer_plan", 5, [](Arguments of) {
    Layer layer(of[0], of[1]);
    Timings<Table> costs = timings_of(of[2]);
    Split split = split_layer(layer.loads, layer.waiting, costs.transfer);
    i64 link_free = 0;
    for (i64 time : split.arrival) link_free = std::max(link_free, time);
    return plan_of(queue_plan(std::move(split), costs, link_free, small(of[3]), reading_of(of[4])));
}};

constexpr Twin TWO_ENDED = {TWO_ENDED_MODULE, "two_ended_plan", 4, [](Arguments of) {
    std::vector<i64> loads = numbers(of[2]);
    std::vector<int> order = experts(of[0], loads.size());
    Timings<Table> costs = timings_of(of[3]);
    if (!costs.has_cpu) throw Beyond{};
    nb::object listed = PyAnySet_CheckExact(of[1]) ? own(PySequence_List(of[1])) : nb::borrow(of[1]);
    std::vector<bool> cached(loads.size());
    for (int expert : experts(listed, loads.size())) cached[expert] = true;
    return plan_of(two_ended_plan(std::move(order), [&](int e) { return bool(cached[e]); }, std::span<const i64>(loads), costs));
}};

constexpr Twin REPLAY = {QUEUES_MODULE, "replay", 5, [](Arguments of) {
    static PyTypeObject *type = imported_type(QUEUES_MODULE, "Ends");
    std::vector<i64> loads = numbers(of[1]), arrival(loads.size(), -1);
    PyObject **field = fields(of[0], plan_type());
    Plan plan{experts(field[0], loads.size()), experts(field[1], loads.size()), 0, 0, experts(field[4], loads.size())};
    if (!PyDict_CheckExact(of[3])) throw Beyond{};
    PyObject *expert, *time;
    for (Py_ssize_t at = 0; PyDict_Next(of[3], &at, &expert, &time);) {
        i64 which = small(expert);
        if (which >= i64(loads.size())) throw Beyond{};
        arrival[which] = small(time);
    }
    Ends ends = replay(plan, loads, timings_of(of[2]), std::move(arrival), small(of[4]));
    return named(type, num(ends.gpu), num(ends.cpu), num(ends.link));
}};

constexpr const char *IMPACT_MODULE = "moesim.policies.algorithms.impact";

Ahead ahead_of(PyObject *of) {
    static PyTypeObject *type = imported_type(IMPACT_MODULE, "Ahead");
    PyObject **field = fields(of, type);
    Ahead ahead{small(field[0]), numbers(field[1]), {}};
    for (PyObject *one : items(field[2])) {
        std::vector<i64> pair = numbers(one);  // expert and rows
        if (pair.size() != 2) throw Beyond{};
        ahead.missing.emplace_back(pair[1], -pair[0]);
    }
    return ahead;
}

Budget budget_of(PyObject *of) {
    if (is(of, "ends")) return Budget::ENDS;
    if (is(of, "begins")) return Budget::BEGINS;
    if (is(of, "none")) return Budget::NONE;
    throw Beyond{};
}

constexpr Twin IMPACT = {IMPACT_MODULE, "impact_driven", 6, [](Arguments of) {
    static PyTypeObject *type = imported_type(IMPACT_MODULE, "QueueMakespans");
    if (Py_TYPE(of[1]) != type) throw Beyond{};
    nb::object all_timings = attr(of[1], "timings");
    Reading reading = reading_of(attr(of[1], "reading").ptr());
    std::span<PyObject *> by_layer = items(all_timings);
    std::vector<Ahead> ahead;
    for (PyObject *one : items(of[0])) ahead.push_back(ahead_of(one));
    auto makespan_of = [&](i64 layer) {
        if (layer >= i64(by_layer.size())) throw Beyond{};
        return [&reading, costs = timings_of(by_layer[layer])](const std::vector<i64> &cached, const std::vector<i64> &missing) {
            if (i64(cached.size() + missing.size()) > LONGEST) throw Beyond{};
            return queue_makespan(std::span<const i64>(cached), std::span<const i64>(missing), costs, reading);
        };
    };
    nb::object made = own(PyList_New(0));
    i64 idle = PyLong_CheckExact(of[3]) && as_int(of[3]) < 0 ? std::max(as_int(of[3]), -LARGEST) : small(of[3]);
    for (auto [layer, expert] : impact_driven(std::move(ahead), makespan_of, small(of[2]), idle, budget_of(of[4]), small(of[5])))
        if (PyList_Append(made.ptr(), nb::make_tuple(layer, expert).ptr())) throw nb::python_error();
    return made;
}};

NoneBetter none_better_of(PyObject *of) {
    if (is(of, "eq2")) return NoneBetter::EQ2;
    if (is(of, "printed")) return NoneBetter::PRINTED;
    if (is(of, "sentinel")) return NoneBetter::SENTINEL;
    throw Beyond{};
}

Timing<Table> timing_of(PyObject *of) {
    static PyTypeObject *type = imported_type(PRESCHED, "Timing");
    PyObject **field = fields(of, type);
    return {Table(field[0]), small(field[1]), small(field[2]), small(field[3]), small(field[4]), small(field[5])};
}

constexpr Twin CERTAIN = {PRESCHED, "certain_for_cpu", 3, [](Arguments of) {
    return own(num(certain_for_cpu(std::span<const i64>(numbers(of[0])), timing_of(of[1]), none_better_of(of[2]))));
}};

constexpr Twin CROSS_LAYER = {PRESCHED, "cross_layer_plan", 5, [](Arguments of) {
    static PyTypeObject *type = imported_type(PRESCHED, "CrossLayerPlan");
    std::vector<i64> current = numbers(of[0]), upcoming = numbers(of[1]);
    Timing<Table> timing = timing_of(of[2]);
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
}};

}  // namespace

void bind_plans(nb::module_ &module) {
    add<GREEDY>(module);
    add<THRESHOLD>(module);
    add<BEAM>(module);
    add<QUEUES>(module);
    add<TWO_ENDED>(module);
    add<REPLAY>(module);
    add<IMPACT>(module);
    add<CERTAIN>(module);
    add<CROSS_LAYER>(module);
}

}  // namespace moesim::algorithms
