// Sources of predictions, as far as they have been asked in a run.
#pragma once

#include "machine.hpp"
#include "table.hpp"

#include <map>

namespace moesim {

/// A source of predictions, and what it has answered.
struct Source {
    nb::object name, predictor, predict;  // the last: its method
    std::vector<int> needed;  // of each layer: that whose gate input must exist, -1: none, -2: not asked
    std::map<std::pair<int, int>, i64> work = {};  // of a device and rows
    nb::object step = {};  // of which a composition asked last
    bool at_once = false;  // whether it tells the ids of all layers of a step at once
    std::unique_ptr<Table> table = {};  // these; none: it tells nothing of this step
    int first_layer = 0;  // of which it tells
};

}  // namespace moesim
