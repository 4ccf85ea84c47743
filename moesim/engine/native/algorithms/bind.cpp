// The algorithms as Python sees them: functions with the names and arguments of their references.
#include "caching.hpp"
#include "python.hpp"

namespace moesim::algorithms {

namespace {

/// Rows of the experts of a layer, and how long each would be waited for.
struct Layer {
    std::vector<i64> loads, waiting;

    Layer(PyObject *rows, PyObject *times) : loads(numbers(rows)), waiting(numbers(times)) {
        if (loads.size() != waiting.size()) throw Beyond{};
    }
};

constexpr Twin GREEDY = {"moesim.policies.algorithms.assignment", "greedy_layer_plan", 7, [](Arguments of) {
    Layer layer(of[0], of[1]);
    Extras extra{small(of[4]), small(of[5]), small(of[6])};
    return plan_of(greedy_assignment(layer_costs(layer.loads, layer.waiting, Table(of[2]), Table(of[3])), extra));
}};

constexpr Twin THRESHOLD = {"moesim.policies.algorithms.assignment", "threshold_layer_plan", 4, [](Arguments of) {
    Layer layer(of[0], of[1]);
    return plan_of(threshold_assignment(loading_costs(layer.loads, layer.waiting, Table(of[2]), Table(of[3]))));
}};

constexpr Twin SWAP = {"moesim.policies.algorithms.caching", "workload_aware_swap", 4, [](Arguments of) -> nb::object {
    std::vector<i64> scores = numbers(of[0]);
    nb::object residents = PyAnySet_CheckExact(of[1]) ? own(PySequence_List(of[1])) : nb::borrow(of[1]);
    std::vector<bool> here(scores.size());
    for (int expert : experts(residents, scores.size())) here[expert] = true;
    i64 size = small(of[2]);
    if (size < 0) throw Beyond{};
    Swaps found = workload_aware_swap(scores, here, size, truth(of[3]));
    return nb::make_tuple(list_of(found.victims), list_of(found.newcomers));
}};

}  // namespace

void bind(nb::module_ &module) {
    add<GREEDY>(module);
    add<THRESHOLD>(module);
    add<SWAP>(module);
}

}  // namespace moesim::algorithms
