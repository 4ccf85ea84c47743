#include "prefetching.hpp"

#include "drawing.hpp"

namespace moesim {

void RandomAhead::start(const Setup &setup) {
    state = &setup.state;
    gpu = setup.gpu;
}

/// Draw once per layer visit.
int RandomAhead::ahead(int step, int routed, int mb, std::vector<int> &experts) {
    i64 layer = routed + lookahead;
    if (mb || layer >= state->n_layers) return -1;
    for (int expert : sample(state->n_experts, size, seed, u64(step) * state->n_layers + layer))
        if (!gpu->memory.resident(layer * state->n_experts + expert)) experts.push_back(expert);
    return int(layer);
}

/// Forget the counts of an earlier run.
void TopPredicted::start(const Setup &setup) {
    state = &setup.state;
    gpu = setup.gpu;
    about = {-1, -1};
    counts.assign(state->n_experts, 0);
    chosen.clear();
}

/// Ask about the layer ahead, once per layer visit.
int TopPredicted::ask(int routed, int mb) {
    i64 layer = routed + lookahead;
    return mb || layer >= state->n_layers ? -1 : int(layer);
}

/// Count predicted rows over the micro-batches so far; choose the top, at most `size` in all.
void TopPredicted::choose(int step, int layer, const PredictedIds &ids, std::vector<int> &experts) {
    if (about != std::pair(step, layer)) {
        about = {step, layer};
        std::fill(counts.begin(), counts.end(), 0);
        chosen.clear();
    }
    int n = state->n_experts;
    i64 width = std::min<i64>(ids.width(), state->top_k);
    for (i64 row = 0; row < ids.n_rows; ++row)
        for (i64 at = 0; at < width; ++at) {
            int expert = ids(row, at);
            if (expert < 0) expert += n;  // as a list counts from its end
            if (expert < 0 || expert >= n) throw nb::index_error("list index out of range");
            ++counts[expert];
        }
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
        experts.push_back(top[i]);
    }
}

}  // namespace moesim
