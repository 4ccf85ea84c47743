#include "composed.hpp"

namespace moesim {

/// Begin a run.
void Composed::start(const Setup &setup) {
    waiting.assign(state.n_experts, 0);
    if (assignment) assignment->start(setup);
    if (prefetch) prefetch->start(setup);
    replacement->start(setup);
}

/// Answer a routed micro-batch.
const Answer &Composed::routed(const Routing &routing) {
    int layer = routing.layer;
    now = {routing.step, layer};
    answer.clear();
    if (prefetch) {  // first: computed ahead of the Runs below
        questions.clear();
        prefetch->ask(routing, questions);
        for (const Question &one : questions) answer.predict(one, state.layout->dense_at[layer]);
    }
    replacement->used(routing);
    if (assignment) {
        wait(routing);
        plan = assignment->assign(routing, waiting);
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
    if (prefetch) {
        units.clear();
        prefetch->ahead(routing, plan, units);
        fetch_ahead(routing.step);
    }
    return answer;
}

/// Order demand loads.
void Composed::in_order(const Routing &routing) {
    if (load_order == LoadOrder::plan) {
        auto place = [&](int expert) { return std::find(plan.loads.begin(), plan.loads.end(), expert); };
        std::stable_sort(misses.begin(), misses.end(), [&](int a, int b) { return place(a) < place(b); });
        return;
    }
    std::sort(misses.begin(), misses.end());
    if (load_order == LoadOrder::rows)
        std::stable_sort(misses.begin(), misses.end(), [&](int a, int b) { return routing.rows[a] > routing.rows[b]; });
}

/// Find the time until each active expert could be on the GPU: 0, what is left of a transfer, or a whole one.
void Composed::wait(const Routing &routing) {
    int layer = routing.layer;
    for (int expert : routing.active) {
        if (cache_only) {
            waiting[expert] = resident(layer, expert) && cached(layer, expert) ? 0 : load_ns[layer];
        } else if (!resident(layer, expert)) {
            Transfer *coming = gpu->pending[unit(layer, expert)];
            waiting[expert] = coming ? remaining_ns(state, coming) : load_ns[layer];
        }
    }
}

/// Fetch what the GPU lacks; what is already on its way only becomes more urgent, in the pool it was meant for.
void Composed::load(int layer) {
    early.clear();
    rest.clear();
    transient.demand(layer, misses, early, rest);
    if (!early.empty()) answer.add(FETCH, layer, early, gpu, DEMAND, transient.pool);
    if (rest.empty()) return;
    if (replacement->admits) {
        replacement->inserted(layer, rest);
        answer.add(FETCH, layer, rest, gpu, DEMAND, cache);
    } else {
        answer.add(FETCH, layer, rest, gpu, DEMAND, staging);
    }
}

/// Answer a prediction that is not too late.
const Answer &Composed::predicted(const Predicted &prediction) {
    answer.clear();
    units.clear();
    prefetch->choose(prediction, units);
    fetch_ahead(prediction.step);
    return answer;
}

/// Fetch what the prefetch part chose, unless its layer is routed or it is on its way: together what is of one layer in a row.
void Composed::fetch_ahead(int step) {
    std::erase_if(units, [&](auto &unit) { return is_late(step, unit.first) || pending(unit.first, unit.second); });
    for (size_t at = 0; at < units.size();) {
        int layer = units[at].first;
        ahead.clear();
        for (; at < units.size() && units[at].first == layer; ++at) ahead.push_back(units[at].second);
        if (prefetch->transient) {
            transient.fetch(layer, ahead);
            answer.add(FETCH, layer, ahead, gpu, PREFETCH, transient.pool);
        } else {
            replacement->inserted(layer, ahead);
            answer.add(FETCH, layer, ahead, gpu, PREFETCH, cache);
        }
    }
}

/// Answer the end of a layer.
const Answer &Composed::layer_end(int, int layer) {
    answer.clear();
    held.clear();
    if (!replacement->admits) residents(state, staging, layer, held);
    transient.layer_end(layer, held);
    bool swaps = replacement->layer_end(layer, swap);
    newcomers.clear();
    if (swaps) {
        newcomers = swap.newcomers;
        answer.add(DROP, layer, swap.victims, gpu);
        std::erase_if(held, [&](int e) { return std::find(swap.victims.begin(), swap.victims.end(), e) != swap.victims.end(); });
        coming.clear();
        for (int expert : newcomers)
            if (pending(layer, expert)) coming.push_back(expert);  // late, or from a window before
        if (!coming.empty()) {
            transient.forget(layer, coming);
            answer.add(MOVE, layer, coming, gpu, DEMAND, cache);
            std::erase_if(held, [&](int e) { return std::find(coming.begin(), coming.end(), e) != coming.end(); });
        }
        if (swap.relabel) relabel(layer);
    }
    if (!held.empty()) answer.add(DROP, layer, held, gpu);
    if (!newcomers.empty()) answer.add(FETCH, layer, newcomers, gpu, swap.urgency, cache);
    return answer;
}

/// Keep newcomers that are there and that the cache has room for; a victim on its way still takes a slot.
void Composed::relabel(int layer) {
    std::vector<int> kept;
    i64 room = cache->free(layer) / state.weights.n_bytes[layer];
    for (int expert : swap.victims) room += resident(layer, expert);
    for (int expert : newcomers)
        if (i64(kept.size()) < room && std::find(held.begin(), held.end(), expert) != held.end()) kept.push_back(expert);
    auto is_kept = [&](int expert) { return std::find(kept.begin(), kept.end(), expert) != kept.end(); };
    std::erase_if(newcomers, is_kept);
    std::erase_if(held, is_kept);
    if (!kept.empty()) answer.add(MOVE, layer, kept, gpu, DEMAND, cache);
}

/// Answer an arrival: parts do not wait for any.
const Answer &Composed::fetched(int, int) {
    answer.clear();
    return answer;
}

/// Name a victim: by the replacement in the cache, whatever has been used elsewhere; -1: none.
i64 Composed::evict(const Transfer *fetch) {
    if (fetch->pool == cache) return replacement->victim(fetch->layer);
    if (fetch->pool != staging) return transient.spent(fetch, now.second);
    held.clear();
    residents(state, staging, fetch->layer, held);
    for (int expert : held)
        if (gpu->memory.copies[unit(fetch->layer, expert)].in_use <= 0) return unit(fetch->layer, expert);
    return -1;
}

}  // namespace moesim
