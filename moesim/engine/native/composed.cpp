#include "composed.hpp"

namespace moesim {

/// Begin a run.
void Composed::start(const Setup &setup) {
    waiting.assign(state.n_experts, 0);
    if (assignment) assignment->start(setup);
    replacement->start(setup);
}

/// Answer a routed micro-batch.
const Answer &Composed::routed(const Routing &routing, int step, int layer, int) {
    now = {step, layer};
    answer.clear();
    replacement->used(step, layer, routing);
    plan.cpu.clear();
    if (assignment) {
        plan.gpu.clear();
        wait(layer, routing);
        assignment->assign(layer, routing, waiting, plan);
        for (int expert : routing.active) waiting[expert] = 0;
    } else {
        plan.gpu = routing.active;
    }
    if (!plan.cpu.empty()) answer.add(RUN, layer, plan.cpu, cpu);
    if (!plan.gpu.empty()) {
        misses.clear();
        planned.clear();
        for (int expert : plan.gpu) (resident(layer, expert) ? planned : misses).push_back(expert);
        if (!misses.empty()) {
            in_order(routing);
            load(layer);
        }
        planned.insert(planned.end(), misses.begin(), misses.end());
        answer.add(RUN, layer, load_order == LoadOrder::plan ? plan.gpu : planned, gpu);
    }
    return answer;
}

/// Order demand loads.
void Composed::in_order(const Routing &routing) {
    if (load_order == LoadOrder::plan) return;  // as no assignment here plans the order of transfers
    std::sort(misses.begin(), misses.end());
    if (load_order == LoadOrder::rows)
        std::stable_sort(misses.begin(), misses.end(), [&](int a, int b) { return routing.rows[a] > routing.rows[b]; });
}

/// Find the time until each active expert could be on the GPU: 0, what is left of a transfer, or a whole one.
void Composed::wait(int layer, const Routing &routing) {
    for (int expert : routing.active) {
        if (cache_only) {
            waiting[expert] = resident(layer, expert) && cached(layer, expert) ? 0 : load_ns[layer];
        } else if (!resident(layer, expert)) {
            Transfer *coming = gpu->pending[unit(layer, expert)];
            waiting[expert] = coming ? remaining_ns(state, coming) : load_ns[layer];
        }
    }
}

/// Fetch what the GPU lacks.
void Composed::load(int layer) {
    if (replacement->admits) {
        replacement->inserted(layer, misses);
        answer.add(FETCH, layer, misses, gpu, DEMAND, cache);
    } else {
        answer.add(FETCH, layer, misses, gpu, DEMAND, staging);
    }
}

/// List the experts of a layer that are in a pool, ascending.
void Composed::residents(const PoolState *pool, int layer, std::vector<int> &found) const {
    int words = gpu->memory.words();
    if (!pool->held[layer]) return;
    const u64 *bits = pool->members.data() + i64(layer) * words;
    for (int i = 0; i < words; ++i)
        for (u64 left = bits[i]; left; left &= left - 1) found.push_back(64 * i + std::countr_zero(left));
}

/// Answer the end of a layer.
const Answer &Composed::layer_end(int, int layer) {
    answer.clear();
    held.clear();
    if (!replacement->admits) residents(staging, layer, held);
    if (!held.empty()) answer.add(DROP, layer, held, gpu);
    return answer;
}

/// Name a victim: by the replacement in the cache, whatever has been used elsewhere; -1: none.
i64 Composed::evict(const Transfer *fetch) {
    if (fetch->pool == cache) return replacement->victim(fetch);
    held.clear();
    residents(fetch->pool, fetch->layer, held);
    for (int expert : held)
        if (gpu->memory.copies[unit(fetch->layer, expert)].in_use <= 0) return unit(fetch->layer, expert);
    return -1;
}

}  // namespace moesim
