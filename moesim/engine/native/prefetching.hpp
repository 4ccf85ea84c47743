// Prefetch parts: which experts of a later layer to fetch before they are asked for.
#pragma once

#include <map>

#include "parts.hpp"

namespace moesim {

/// Fetch experts of a following layer at random.
struct RandomAhead : Prefetch {
    i64 size = 1, lookahead = 1;
    u64 seed = 0;

    void start(const Setup &setup) override;
    void ahead(const Routing &routing, const Plan &plan, Units &units) override;

private:
    State *state = nullptr;
    DeviceState *gpu = nullptr;
};

/// Fetch the experts that a predictor gives the most rows in a following layer.
struct TopPredicted : Prefetch {
    i64 size = 1, lookahead = 1;
    bool over_all = true;  // the option `over`
    nb::object source;
    bool side = false;  // the option `lane`
    bool ask_nearer = false;  // the option `nearer`

    void start(const Setup &setup) override;
    void ask(const Routing &routing, std::vector<Question> &questions) override;
    void choose(const Predicted &prediction, Units &units) override;

private:
    struct Seen {
        std::vector<i64> counts;
        std::vector<int> chosen;
    };

    State *state = nullptr;
    DeviceState *gpu = nullptr;
    int step = -1;
    std::map<int, Seen> seen;  // of that step, by layer
    std::vector<int> top;
};

}  // namespace moesim
