// Parts that go by the router's recent scores: HybriMoE's cache (MRS), and the prefetch of its released code.
#pragma once

#include "replacement.hpp"

namespace moesim {

/// One score S for each expert of each layer: S <- alpha TopP(s) + (1 - alpha) S at every visit (HybriMoE, eq. 3).
struct RecentScores {
    double alpha = 0;
    i64 p = 0;  // scores of a row that count; 0: twice the model's top_k
    bool first = false, by_id = false;  // the options `tokens` and `credit`
    int n_experts = 0;
    std::vector<double> s = {};  // of each unit

    void start(const State &state);
    void update(const Routing &routing);
};

/// HybriMoE's minus recent score: the idle resident with the smallest S; among equals the least recently used.
struct MRS : LRU {
    RecentScores recent;

    void start(const Setup &setup) override;
    void used(const Routing &routing) override;
    i64 victim(int layer) override;
};

/// The prefetch of HybriMoE's released code: the experts of the next layer with the largest S, without any prediction.
struct MRSScore : Prefetch {
    i64 size = 1;
    bool over_all = true;  // the option `over`
    RecentScores recent;

    void start(const Setup &setup) override;
    void ask(const Routing &routing, std::vector<Question> &questions) override;
    void ahead(const Routing &routing, const Plan &plan, Units &units) override;

private:
    State *state = nullptr;
    DeviceState *gpu = nullptr;
    std::vector<int> best;
};

}  // namespace moesim
