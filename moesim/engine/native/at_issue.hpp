// A composition that names victims as it issues loads, as `moesim.policies.systems.hybrimoe.HybriMoECode` does.
#pragma once

#include "composed.hpp"

#include <set>

namespace moesim {

/// What HybriMoE's released code adds to its parts: a victim leaves when its load is issued, and the GPU may wait for prefetches.
struct AtIssue : Composed {
    AtIssue(State &state, nb::dict described);
    const Answer &routed(const Routing &routing) override { return issue(Composed::routed(routing)); }
    const Answer &predicted(const Predicted &prediction) override { return issue(Composed::predicted(prediction)); }
    const Answer &layer_end(int step, int layer) override { return issue(Composed::layer_end(step, layer)); }
    const Answer &fetched(int layer, int expert) override;
    i64 evict(const Transfer *fetch) override;
    void over() override;

private:
    nb::object ended;  // is told how many victims were in use
    bool waits;  // whether the GPU waits for prefetches
    i64 overwrites = 0;
    std::vector<i64> slots;  // of each layer
    std::vector<std::vector<bool>> inside;  // of each layer: experts in the cache, or promised a place in it, by decisions so far
    std::vector<i64> n_inside;
    std::set<i64> outstanding;  // prefetches that have not arrived
    std::set<i64> awaited;  // those for which the held experts wait
    std::vector<i64> held;  // experts for the GPU, in order
    std::vector<i64> late;  // of these, the ones to be loaded in the place of another one held
    std::vector<i64> doomed;  // the ones in whose place
    Answer issued;

    const Answer &issue(const Answer &given);
    void load_into_cache(const Answer &given, const Answer::Action &fetch, const std::vector<i64> &running, bool hold);
    void drop_doomed();
    const Answer &release();
    void put(i64 unit, bool in);
};

}  // namespace moesim
