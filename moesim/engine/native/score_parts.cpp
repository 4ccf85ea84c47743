#include "score_parts.hpp"

#include "algorithms/scores.hpp"

namespace moesim {

/// Begin with all scores 0.
void RecentScores::start(const State &state) {
    if (!p) p = 2 * state.top_k;
    n_experts = state.n_experts;
    s.assign(size_t(state.n_layers) * n_experts, 0);
}

/// Move the scores of a layer on by one visit; a micro-batch is a visit.
void RecentScores::update(const Routing &routing) {
    std::span<double> scores(s.data() + i64(routing.layer) * n_experts, n_experts);
    const Table *all = routing.micro->scores(), *from = all ? all : routing.micro->weights();
    if (!from) throw std::runtime_error("recent scores: the trace was promised to hold scores or weights, and holds neither");
    int n_rows = first ? 1 : routing.n_rows, width = all ? n_experts : routing.top_k;
    std::vector<float> values;
    std::vector<int> ids;
    for (int row = 0; row < n_rows; ++row)
        for (int at = 0; at < width; ++at) {
            values.push_back(from->real(row, routing.layer, at));
            if (!all) ids.push_back(routing.ids[row * routing.top_k + at]);
        }
    if (all) algorithms::recent_scores(scores, values, size_t(p), alpha, by_id);
    else algorithms::recent_weights(scores, ids, values, size_t(width), size_t(p), alpha, by_id);
}

void MRS::start(const Setup &setup) {
    recent.start(setup.state);
    LRU::start(setup);
}

/// Mark the active experts as used, and move the scores of their layer on.
void MRS::used(const Routing &routing) {
    LRU::used(routing);
    recent.update(routing);
}

/// Name the one with the smallest score, and forget it.
i64 MRS::victim(int layer) {
    i64 found = -1, routed = -1;
    for (i64 one : members.of(pool(layer))) {
        i64 &lowest = unrouted_first && visit.has(one) ? routed : found;
        if ((lowest < 0 || recent.s[one] < recent.s[lowest]) && resident(one)) lowest = one;
    }
    if (found < 0) found = routed;
    if (found >= 0) members.erase(found);
    return found;
}

void MRSScore::start(const Setup &setup) {
    state = &setup.state;
    gpu = setup.gpu;
    recent.start(setup.state);
}

/// Move the scores on, and ask for no prediction.
void MRSScore::ask(const Routing &routing, std::vector<Question> &) { recent.update(routing); }

/// Choose in the next layer, largest S first, then lowest id; only in steps of one row, and if the GPU has something to do.
void MRSScore::ahead(const Routing &routing, const Plan &plan, Units &units) {
    int layer = routing.layer + 1, n = state->n_experts;
    if (state->step_rows > 1 || plan.gpu.empty() || layer == state->n_layers) return;
    const double *scores = recent.s.data() + i64(layer) * n;
    auto resident = [&](int expert) { return gpu->memory.resident(i64(layer) * n + expert); };
    best.clear();
    for (int expert = 0; expert < n; ++expert)
        if (over_all || !resident(expert)) best.push_back(expert);
    std::stable_sort(best.begin(), best.end(), [&](int a, int b) { return scores[a] > scores[b]; });
    best.resize(size_t(std::min<i64>(size, i64(best.size()))));
    for (int expert : best)
        if (!resident(expert)) units.emplace_back(layer, expert);
}

}  // namespace moesim
