#include "prefetching.hpp"

#include "drawing.hpp"

namespace moesim {

/// Count the rows of each expert among the best `top_k` of every row of ids, on top of what is counted.
void Predicted::add_rows(std::vector<i64> &counts, i64 top_k) const {
    i64 n = i64(counts.size()), width = std::min(ids.width(), top_k);
    for (i64 row = 0; row < ids.n_rows; ++row)
        for (i64 at = 0; at < width; ++at) {
            i64 expert = ids(row, at);
            if (expert < 0) expert += n;  // as a list counts from its end
            if (expert < 0 || expert >= n) throw nb::index_error("list index out of range");
            ++counts[expert];
        }
}

void RandomAhead::start(const Setup &setup) {
    state = &setup.state;
    gpu = setup.gpu;
}

/// Draw once per layer visit.
void RandomAhead::ahead(const Routing &routing, const Plan &, Units &units) {
    i64 layer = routing.layer + lookahead;
    if (routing.mb || layer >= state->n_layers) return;
    for (int expert : sample(state->n_experts, size, seed, u64(routing.step) * state->n_layers + layer))
        if (!gpu->memory.resident(layer * state->n_experts + expert)) units.emplace_back(layer, expert);
}

/// Forget the counts of an earlier run.
void TopPredicted::start(const Setup &setup) {
    state = &setup.state;
    gpu = setup.gpu;
    step = -1;
    seen.clear();
}

/// Ask about the layer ahead, once per layer visit.
void TopPredicted::ask(const Routing &routing, std::vector<Question> &questions) {
    if (routing.mb) return;
    i64 last = routing.layer + lookahead;
    i64 first = ask_nearer && routing.layer == 0 ? 1 : last;
    for (i64 layer = first; layer <= last && layer < state->n_layers; ++layer) questions.push_back({int(layer), source, side});
}

/// Count predicted rows over the micro-batches so far; choose the top, at most `size` in all.
void TopPredicted::choose(const Predicted &prediction, Units &units) {
    int layer = prediction.layer;
    if (step != prediction.step) {
        step = prediction.step;
        seen.clear();
    }
    int n = state->n_experts;
    auto &[counts, chosen] = seen[layer];
    counts.resize(n);
    prediction.add_rows(counts, state->top_k);
    auto resident = [&](int expert) { return gpu->memory.resident(i64(layer) * n + expert); };
    top.clear();
    for (int expert = 0; expert < n; ++expert)
        if (counts[expert] > 0 && (over_all || !resident(expert))) top.push_back(expert);
    size_t kept = size_t(std::min<i64>(size, i64(top.size())));
    std::partial_sort(top.begin(), top.begin() + kept, top.end(),
                      [&](int a, int b) { return counts[a] != counts[b] ? counts[a] > counts[b] : a < b; });
    for (size_t i = 0; i < kept && i64(chosen.size()) < size; ++i) {
        if (resident(top[i]) || std::find(chosen.begin(), chosen.end(), top[i]) != chosen.end()) continue;
        chosen.push_back(top[i]);
        units.emplace_back(layer, top[i]);
    }
}

}  // namespace moesim
