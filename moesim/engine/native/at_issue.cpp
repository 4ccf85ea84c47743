#include "at_issue.hpp"

namespace moesim {

static bool among(const std::vector<i64> &units, i64 unit) { return std::find(units.begin(), units.end(), unit) != units.end(); }

AtIssue::AtIssue(State &state, nb::dict described)
    : Composed(state, described), inside(state.n_layers, std::vector<bool>(state.n_experts)), n_inside(state.n_layers) {
    nb::dict more = nb::cast<nb::dict>(described["at_issue"]);
    ended = more["ended"];
    waits = truth(nb::object(more["waits"]).ptr());
    nb::object dealt(more["slots"]), placed(described["residents"]);
    Items of_layer(dealt.ptr()), residents(placed.ptr());
    for (int layer = 0; layer < state.n_layers; ++layer) {
        slots.push_back(as_int(of_layer[layer]));
        Items experts(residents[layer]);
        for (Py_ssize_t at = 0; at < experts.size(); ++at) put(unit(layer, int(as_int(experts[at]))), true);
    }
}

/// Take note that an expert has a place in the cache, or has none.
void AtIssue::put(i64 unit, bool in) {
    i64 layer = unit / state.n_experts;
    auto there = inside[layer][unit % state.n_experts];
    n_inside[layer] += int(in) - int(there);
    there = in;
}

/// Name the victims of what is loaded, and hold back what must wait.
const Answer &AtIssue::issue(const Answer &given) {
    if (given.actions.empty()) return given;
    issued.clear();
    std::vector<i64> running;
    for (const Answer::Action &action : given.actions)
        if (action.kind == RUN && action.device == gpu)
            for (int i = 0; i < action.n; ++i) running.push_back(unit(action.layer, given.experts[action.first + i]));
    bool hold = !running.empty() && !outstanding.empty() && waits && state.step_rows == 1;
    for (const Answer::Action &action : given.actions) {
        if (action.kind == FETCH && action.pool == cache) {
            load_into_cache(given, action, running, hold);
        } else if (action.kind == RUN && hold && action.device == gpu) {
            held = running, awaited = outstanding;
        } else {
            if (action.kind == DROP)
                for (int i = 0; i < action.n; ++i) put(unit(action.layer, given.experts[action.first + i]), false);
            issued.add(given, action);
        }
    }
    if (!hold && held.empty()) drop_doomed();  // after the Run that still needs them
    return issued;
}

/// Fetch what can be loaded now, after a Drop of what leaves for it.
void AtIssue::load_into_cache(const Answer &given, const Answer::Action &fetch, const std::vector<i64> &running, bool hold) {
    int layer = fetch.layer;
    std::vector<int> leaving, now;
    for (int i = 0; i < fetch.n; ++i) {
        int expert = given.experts[fetch.first + i];
        if (inside[layer][expert]) {  // under way as a prefetch; if the layer is held, that is waited for anyway
            if (!hold) now.push_back(expert);
            continue;
        }
        bool blocked = false;
        if (n_inside[layer] >= slots[layer]) {
            i64 victim = replacement->victim(layer);
            bool is_named = victim >= 0 && inside[layer][victim % state.n_experts];
            blocked = !is_named || among(running, victim);
            overwrites += blocked;
            if (is_named) {
                put(victim, false);
                if (blocked) doomed.push_back(victim);
                else leaving.push_back(int(victim % state.n_experts));
            } else if (fetch.urgency == PREFETCH) {
                continue;
            }
        }
        put(unit(layer, expert), true);
        if (blocked && hold) late.push_back(unit(layer, expert));
        else now.push_back(expert);
    }
    if (fetch.urgency == PREFETCH && waits)
        for (int expert : now)
            if (!resident(layer, expert)) outstanding.insert(unit(layer, expert));
    if (!leaving.empty()) issued.add(DROP, layer, leaving, gpu);
    if (!now.empty()) issued.add(FETCH, layer, now, gpu, fetch.urgency, cache);
}

void AtIssue::drop_doomed() {
    for (i64 one : doomed) issued.add(DROP, int(one / state.n_experts), {int(one % state.n_experts)}, gpu);
    doomed.clear();
}

/// Take note of an arrival; the last one awaited lets the held experts go.
const Answer &AtIssue::fetched(int layer, int expert) {
    outstanding.erase(unit(layer, expert));
    awaited.erase(unit(layer, expert));
    issued.clear();
    return held.empty() || !awaited.empty() ? issued : release();
}

/// Run what was held. A load that is not queued yet, because its decision is still being made, runs on arrival.
const Answer &AtIssue::release() {
    int layer = int(held[0] / state.n_experts);
    std::vector<int> there, loaded;
    std::vector<i64> left;
    for (i64 one : held) {
        if (gpu->memory.resident(one) || gpu->pending[one]) there.push_back(int(one % state.n_experts));
        else if (!among(late, one)) left.push_back(one);
    }
    for (i64 one : late) loaded.push_back(int(one % state.n_experts));
    held = std::move(left);
    late.clear();
    if (!there.empty()) issued.add(RUN, layer, there, gpu);
    drop_doomed();
    if (!loaded.empty()) {
        issued.add(FETCH, layer, loaded, gpu, DEMAND, cache);
        issued.add(RUN, layer, loaded, gpu);
    }
    return issued;
}

/// Name a victim for a load that found no place when it was issued; a place that was promised is about to be free.
i64 AtIssue::evict(const Transfer *fetch) {
    if (fetch->pool == cache && n_inside[fetch->layer] <= slots[fetch->layer]) return -1;
    i64 found = Composed::evict(fetch);
    if (found >= 0 && fetch->pool == cache) put(found, false);
    return found;
}

void AtIssue::over() { ask(state, ended, {num(overwrites)}); }

}  // namespace moesim
