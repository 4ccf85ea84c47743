// Replacement parts, as in `moesim.policies.parts.replacement`: what leaves the cache when something else wants its place.
#include "parts.hpp"

namespace moesim {

namespace {

/// Victims and newcomers of a cache, pair by pair.
struct Swaps {
    std::vector<int> victims, newcomers;
};

/// DALI's Algorithm 2: the `u_size` residents with the lowest scores make room for the others with the highest, ties to the lower
/// id. `resident[e]`: expert e is in the cache. `u_size` is not negative.
Swaps workload_aware_swap(std::span<const i64> scores, const std::vector<bool> &resident, i64 u_size, bool only_if_better) {
    Swaps found;
    for (int e = 0; e < int(scores.size()); ++e) (resident[e] ? found.victims : found.newcomers).push_back(e);
    i64 n = std::min<i64>({u_size, i64(found.victims.size()), i64(found.newcomers.size())});
    auto keep_first = [n](std::vector<int> &ids, auto before) {
        std::partial_sort(ids.begin(), ids.begin() + n, ids.end(), before);
        ids.resize(n);
    };
    keep_first(found.victims, [&](int a, int b) { return scores[a] != scores[b] ? scores[a] < scores[b] : a < b; });
    keep_first(found.newcomers, [&](int a, int b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
    if (only_if_better) {
        size_t kept = 0;
        for (size_t i = 0; i < found.victims.size(); ++i)
            if (scores[found.newcomers[i]] > scores[found.victims[i]]) {
                found.victims[kept] = found.victims[i];
                found.newcomers[kept++] = found.newcomers[i];
            }
        found.victims.resize(kept);
        found.newcomers.resize(kept);
    }
    return found;
}

}  // namespace

void Ordered::clear(i64 units, int pools) {
    n_units = units;
    places.assign(units + pools, {-1, -1});
    for (int pool = 0; pool < pools; ++pool) places[end(pool)] = {int(end(pool)), int(end(pool))};
}

void Ordered::append(int pool, i64 unit) {
    Place &last = places[end(pool)];
    places[unit] = {int(end(pool)), last.previous};
    places[last.previous].next = int(unit);
    last.previous = int(unit);
}

void Ordered::erase(i64 unit) {
    auto [next, previous] = places[unit];
    places[previous].next = next;
    places[next].previous = previous;
    places[unit].next = -1;
}

// --------------------------------------------------------------------------------------------------------------- LRU, MRS

void LRU::start(const Setup &setup) {
    know(setup);
    per_layer = setup.per_layer;
    ranked.clear();
    routed.assign(state->n_experts, false);
    members.clear(i64(state->n_layers) * state->n_experts, state->n_layers);
    for (int layer = 0; layer < state->n_layers; ++layer) inserted(layer, setup.residents[layer]);
}

/// Move the cached ones among the active to the recent end, those of a single row by rank.
void LRU::used(const Routing &routing) {
    if (present_step != routing.step || present_layer != routing.layer) {
        present_step = routing.step, present_layer = routing.layer;
        routed.assign(state->n_experts, false);
    }
    for (int expert : routing.active) routed[expert] = true;
    ranked.clear();
    if (by_rank && routing.n_rows == 1) ranked.assign(routing.ids.begin(), routing.ids.begin() + routing.top_k);
    mark(routing.layer, ranked.empty() ? routing.active : ranked);
}

/// Put what is fetched at the recent end; what is loaded on demand takes its place in the order of the visit.
void LRU::inserted(int layer, const std::vector<int> &experts) {
    for (int expert : experts) {
        i64 one = unit(layer, expert);
        if (members.has(one)) members.erase(one);
        members.append(pool(layer), one);
    }
    if (present_layer == layer) mark(layer, ranked);
}

void LRU::mark(int layer, const std::vector<int> &experts) {
    for (int expert : experts)
        if (i64 one = unit(layer, expert); members.has(one)) {
            members.erase(one);
            members.append(pool(layer), one);
        }
}

i64 LRU::take_best(int layer, const std::function<bool(i64, i64)> &better) {
    i64 found = -1, spared = -1, end = members.end(pool(layer));
    for (i64 one = members.after(end); one != end && (better || found < 0); one = members.after(one)) {
        bool is_spared = unrouted_first && one / state->n_experts == present_layer && routed[one % state->n_experts];
        i64 &so_far = is_spared ? spared : found;
        if ((so_far < 0 || (better && better(one, so_far))) && resident(one)) so_far = one;
    }
    if (found < 0) found = spared;
    if (found >= 0) members.erase(found);
    return found;
}

/// Name the one used longest ago, and forget it.
i64 LRU::victim(int layer) { return take_best(layer); }

/// Begin with all scores 0.
void MRS::start(const Setup &setup) {
    if (!p) p = 2 * setup.state.top_k;
    scores.assign(size_t(setup.state.n_layers) * setup.state.n_experts, 0);
    LRU::start(setup);
}

/// Mark the active experts as used, and move the scores of their layer on by one visit; a micro-batch is a visit.
void MRS::used(const Routing &routing) {
    LRU::used(routing);
    std::span<double> of_layer(scores.data() + unit(routing.layer, 0), state->n_experts);
    const Table *all = routing.micro->scores(), *from = all ? all : routing.micro->weights();
    if (!from) throw std::runtime_error("recent scores: the trace was promised to hold scores or weights, and holds neither");
    int n_rows = first ? 1 : routing.n_rows, width = all ? state->n_experts : routing.top_k;
    std::vector<float> values;
    for (int row = 0; row < n_rows; ++row)
        for (int at = 0; at < width; ++at) values.push_back(from->real(row, routing.layer, at));
    if (all) algorithms::recent_scores(of_layer, values, size_t(p), alpha, by_id);
    else algorithms::recent_weights(of_layer, std::span(routing.ids).first(values.size()), values, size_t(width), size_t(p), alpha, by_id);
}

/// Name the one with the smallest score, and forget it.
i64 MRS::victim(int layer) {
    return take_best(layer, [this](i64 one, i64 other) { return scores[one] < scores[other]; });
}

// ------------------------------------------------------------------------------------------------------------------- DALI

/// Begin with empty windows.
void WorkloadAware::start(const Setup &setup) {
    know(setup);
    cache = setup.cache;
    scores.assign(state->n_layers, std::vector<i64>(state->n_experts, 0));
    visits.assign(state->n_layers, 0);
    members.assign(state->n_layers, std::vector<bool>(state->n_experts, false));
    for (int layer = 0; layer < state->n_layers; ++layer)
        for (int expert : setup.residents[layer]) members[layer][expert] = true;
}

/// Add the rows of this layer to its window.
void WorkloadAware::used(const Routing &routing) {
    for (int expert : routing.active) scores[routing.layer][expert] += routing.rows[expert];
}

/// Replace the u_size lowest residents by the u_size highest others when a window is over.
bool WorkloadAware::layer_end(int layer, Swap &swap) {
    i64 visit = visits[layer]++;
    if ((printed ? visit : visit + 1) % w_size) return false;
    Swaps found = workload_aware_swap(scores[layer], members[layer], u_size, only_if_better);
    std::fill(scores[layer].begin(), scores[layer].end(), 0);
    for (int expert : found.victims) members[layer][expert] = false;
    for (int expert : found.newcomers) members[layer][expert] = true;
    swap = {std::move(found.victims), std::move(found.newcomers), blocking ? DEMAND : UPDATE, relabel};
    return !swap.victims.empty();
}

/// Name a copy that was replaced while it was on its way, and then asked for once more.
i64 WorkloadAware::victim(int layer) {
    std::vector<int> cached;
    residents(*state, cache, layer, cached);
    for (int expert : cached)
        if (i64 one = unit(layer, expert); !members[layer][expert] && gpu->memory.copies[one].in_use <= 0) return one;
    return -1;
}

/// Make a part by its name.
std::unique_ptr<Replacement> make_replacement(const PartOptions &options) {
    auto ordered = [&](auto part) {
        part->unrouted_first = is(options, "victims", "unrouted-first");
        part->by_rank = is(options, "use_order", "rank");
        return part;
    };
    if (is(options, "name", "lru")) return ordered(std::make_unique<LRU>());
    if (is(options, "name", "mrs")) {
        auto part = ordered(std::make_unique<MRS>());
        nb::object p(options["p"]);
        part->alpha = nb::cast<double>(options["alpha"]);
        part->p = p.is_none() ? 0 : as_int(p);
        part->first = is(options, "tokens", "first");
        part->by_id = is(options, "credit", "by-id");
        return part;
    }
    if (is(options, "name", "workload-aware")) {
        auto part = std::make_unique<WorkloadAware>();
        part->w_size = number(options, "w_size");
        part->u_size = number(options, "u_size");
        part->printed = is(options, "firing", "printed");
        part->only_if_better = flag(options, "only_if_better");
        part->blocking = flag(options, "blocking");
        part->relabel = flag(options, "relabel");
        return part;
    }
    throw std::logic_error("no replacement part: " + text_of(options, "name"));
}

}  // namespace moesim
