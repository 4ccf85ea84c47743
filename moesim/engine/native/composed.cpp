// A policy made of parts, as in `moesim.policies.composed`, where each part is there in C++.
#include "composed.hpp"

namespace moesim {

// ------------------------------------------------------------------------------------------------------ what is transient

static auto of_layer(int layer) {
    return [layer](const auto &one) { return one.first == layer; };
}

/// Take note of experts of a later layer that are fetched.
void Transient::fetch(int layer, const std::vector<int> &experts) {
    auto found = std::find_if(ahead.begin(), ahead.end(), of_layer(layer));
    if (found == ahead.end()) found = ahead.insert(ahead.end(), {layer, {}});
    found->second.insert(found->second.end(), experts.begin(), experts.end());
}

/// Find what is on its way, which is to become more urgent in the pool it was meant for, and what is still to be loaded.
void Transient::demand(int layer, const std::vector<int> &misses, std::vector<int> &early, std::vector<int> &rest) {
    if (size_t(layer) < late.size() && !late[layer].empty()) {
        std::vector<int> again, others;
        for (int expert : late[layer])
            if (pending(layer, expert))
                (std::find(misses.begin(), misses.end(), expert) != misses.end() ? again : others).push_back(expert);
        late[layer] = others;
        if (!again.empty()) fetch(layer, again);
    }
    auto found = std::find_if(ahead.begin(), ahead.end(), of_layer(layer));
    for (int expert : misses) {
        bool asked = found != ahead.end() && std::find(found->second.begin(), found->second.end(), expert) != found->second.end();
        (asked && pending(layer, expert) ? early : rest).push_back(expert);
    }
}

/// List what is to be dropped of a layer that ends: what is there, and what is on its way to this pool, for nobody.
void Transient::layer_end(int layer, std::vector<int> &held) {
    auto found = std::find_if(ahead.begin(), ahead.end(), of_layer(layer));
    if (found == ahead.end()) return;
    residents(state, pool, layer, held);
    late.resize(state.n_layers);
    for (int expert : found->second)
        if (pending(layer, expert)) {
            held.push_back(expert);
            auto &known = late[layer];
            if (std::find(known.begin(), known.end(), expert) == known.end()) known.push_back(expert);
        }
    ahead.erase(found);
}

/// Leave experts on their way to another pool.
void Transient::forget(int layer, const std::vector<int> &experts) {
    if (size_t(layer) >= late.size()) return;
    std::erase_if(late[layer], [&](int e) { return std::find(experts.begin(), experts.end(), e) != experts.end(); });
}

/// Find a prefetched expert whose layer is routed and that nothing uses; for a demand load, any idle one; -1: none.
i64 Transient::spent(const Transfer *fetch, int routed) {
    for (auto &[layer, experts] : ahead) {
        if (layer > routed && fetch->urgency != DEMAND) continue;
        for (size_t i = 0; i < experts.size(); ++i) {
            i64 found = unit(layer, experts[i]);
            if (!device->memory.resident(found) || device->memory.copies[found].in_use > 0) continue;
            experts.erase(experts.begin() + i);
            return found;
        }
    }
    return -1;
}

/// List the experts of a layer that are in a pool, ascending.
void residents(const State &state, const PoolState *pool, int layer, std::vector<int> &found) {
    if (!pool->held[layer]) return;
    int words = (state.n_experts + 63) / 64;
    const u64 *bits = pool->members.data() + i64(layer) * words;
    for (int i = 0; i < words; ++i)
        for (u64 left = bits[i]; left; left &= left - 1) found.push_back(64 * i + std::countr_zero(left));
}

// -------------------------------------------------------------------------------------------------------- the composition

static DeviceState *device_in(State &state, const nb::dict &described, const char *name) {
    nb::object found(described[name]);
    return found.is_none() ? nullptr : find_device(state, found.ptr());
}

static PoolState *pool_in(DeviceState *device, const nb::dict &described, const char *name) {
    nb::object found(described[name]);
    return found.is_none() ? nullptr : device->memory.pool(found);
}

/// Make what Python describes, and start its parts.
Composed::Composed(State &state, nb::dict described)
    : state(state), gpu(device_in(state, described, "gpu")), cpu(device_in(state, described, "cpu")),
      cache(pool_in(gpu, described, "cache")), staging(pool_in(gpu, described, "staging")),
      load_order(is(described, "load_order", "plan")   ? LoadOrder::plan
                 : is(described, "load_order", "rows") ? LoadOrder::rows
                                                       : LoadOrder::id),
      cache_only(flag(described, "cache_only")), exact(flag(described, "exact")),
      assignment(make_assignment(nb::cast<nb::dict>(described["assignment"]))),
      prefetch(make_prefetch(nb::cast<nb::dict>(described["prefetch"]))),
      replacement(make_replacement(nb::cast<nb::dict>(described["replacement"]))),
      transient{state, gpu, pool_in(gpu, described, "prefetched")}, waiting(state.n_experts) {
    nb::object times(described["load_ns"]), placed(described["residents"]);
    Items of_layer(times.ptr()), residents(placed.ptr());
    Setup setup{state, gpu, cpu, cache, flag(described, "per_layer"), {}, {}};
    for (Py_ssize_t layer = 0; layer < of_layer.size(); ++layer) {
        load_ns.push_back(as_int(of_layer[layer]));
        Items experts(residents[layer]);
        std::vector<int> &listed = setup.residents.emplace_back();
        for (Py_ssize_t i = 0; i < experts.size(); ++i) listed.push_back(int(as_int(experts[i])));
    }
    setup.load_ns = load_ns;
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
    if (prefetch) prefetch->ahead(routing, plan);
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
const Answer &Composed::layer_end(int layer) {
    auto remove = [](std::vector<int> &from, const std::vector<int> &these) {
        std::erase_if(from, [&](int e) { return std::find(these.begin(), these.end(), e) != these.end(); });
    };
    answer.clear();
    held.clear();
    if (!replacement->admits) residents(state, staging, layer, held);
    transient.layer_end(layer, held);
    std::vector<int> newcomers;
    if (replacement->layer_end(layer, swap)) {
        newcomers = swap.newcomers;
        answer.add(DROP, layer, swap.victims, gpu);
        remove(held, swap.victims);
        std::vector<int> coming;
        for (int expert : newcomers)
            if (pending(layer, expert)) coming.push_back(expert);  // late, or from a window before
        if (!coming.empty()) {
            transient.forget(layer, coming);
            answer.add(MOVE, layer, coming, gpu, DEMAND, cache);
            remove(held, coming);
        }
        if (swap.relabel) {  // keep newcomers that are there and that the cache has room for; a victim on its way takes a slot
            std::vector<int> kept;
            i64 room = cache->free(layer) / state.weights.n_bytes[layer];
            for (int expert : swap.victims) room += resident(layer, expert);
            for (int expert : newcomers)
                if (i64(kept.size()) < room && std::find(held.begin(), held.end(), expert) != held.end()) kept.push_back(expert);
            remove(newcomers, kept);
            remove(held, kept);
            if (!kept.empty()) answer.add(MOVE, layer, kept, gpu, DEMAND, cache);
        }
    }
    if (!held.empty()) answer.add(DROP, layer, held, gpu);
    if (!newcomers.empty()) answer.add(FETCH, layer, newcomers, gpu, swap.urgency, cache);
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
