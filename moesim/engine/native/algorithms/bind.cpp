// The algorithms as Python sees them: functions with the names and arguments of their references.
#include "caching.hpp"
#include "python.hpp"
#include "queues.hpp"

namespace moesim::algorithms {

namespace {

constexpr const char *ASSIGNMENT = "moesim.policies.algorithms.assignment";
constexpr const char *CACHING = "moesim.policies.algorithms.caching";
constexpr const char *QUEUES_MODULE = "moesim.policies.algorithms.queues";

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

constexpr Twin SWAP = {CACHING, "workload_aware_swap", 4, [](Arguments of) -> nb::object {
    std::vector<i64> scores = numbers(of[0]);
    nb::object residents = PyAnySet_CheckExact(of[1]) ? own(PySequence_List(of[1])) : nb::borrow(of[1]);
    std::vector<bool> here(scores.size());
    for (int expert : experts(residents, scores.size())) here[expert] = true;
    Swaps found = workload_aware_swap(scores, here, small(of[2]), truth(of[3]));
    return nb::make_tuple(list_of(found.victims), list_of(found.newcomers));
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

}  // namespace

void bind(nb::module_ &module) {
    add<GREEDY>(module);
    add<THRESHOLD>(module);
    add<SWAP>(module);
    add<QUEUES>(module);
    add<REPLAY>(module);
}

}  // namespace moesim::algorithms
