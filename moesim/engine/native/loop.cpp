// The loop over instants, and the order of things within one (rule 2).
#include "composed.hpp"
#include "streams.hpp"

namespace moesim {

static void arrive(State &state, Transfer *transfer) {
    i64 unit = transfer->unit, now = state.now;
    if (unit < 0) {
        transfer->on_arrival();
        return;
    }
    DeviceState *dst = transfer->dst;
    if (transfer->transit) transfer->transit->memory.hold(-transfer->n_bytes, now);
    dst->pending[unit] = nullptr;
    transfer->src->memory.release(unit, now);
    if (dst->backing) return;
    CopyState *copy = dst->memory.arrive(unit, transfer->pool, transfer->fetch);
    copy->in_use = transfer->in_use;
    for (Task *task = transfer->waiting; task; task = task->next_waiting) {
        ++copy->in_use;
        wake(state, task);
    }
    if (transfer->drop_on_arrival) dst->memory.drop(unit, now);
}

/// Take in completions, in the order of submission.
static void take_in(State &state) {
    std::vector<Task *> &finished = state.finishing;
    finished.clear();
    finished.swap(state.finished);
    if (finished.size() > 1)
        std::stable_sort(finished.begin(), finished.end(), [](Task *a, Task *b) { return a->key < b->key; });
    for (Task *task : finished) {
        if (task->unit < 0) {
            if (task->layer < 0) {
                state.goes_on = std::move(task->then);
            } else {
                task->then();
            }
            continue;
        }
        task->lane->device->memory.release(task->unit, state.now);
        task->visit->let_go();
        if (task->group) progress(state, task->group);
        if (state.thread) computed(state, *state.thread, task);
    }
    std::vector<Transfer *> &arrived = state.arriving;
    arrived.clear();
    arrived.swap(state.arrived);
    if (arrived.size() > 1)
        std::sort(arrived.begin(), arrived.end(), [](Transfer *a, Transfer *b) { return a->fetch < b->fetch; });
    for (Transfer *transfer : arrived) arrive(state, transfer);
    if (!state.deferred.empty()) {
        std::vector<Call> deferred = std::move(state.deferred);
        state.deferred.clear();
        for (Call &call : deferred) call();
    }
    if (state.listens[FETCHED])
        for (Transfer *transfer : arrived) {
            if (transfer->unit < 0) continue;
            report(state, FETCHED, named(state.py.event[FETCHED], num(transfer->layer), num(transfer->expert),
                                       ref(transfer->dst->name)));
        }
    if (state.listens[RAN])
        for (Task *task : finished)
            if (task->unit >= 0) {
                PyObject *experts = PyTuple_New(1);
                if (!experts) throw nb::python_error();
                PyTuple_SET_ITEM(experts, 0, num(task->expert));
                report(state, RAN, named(state.py.event[RAN], num(task->step), num(task->layer), experts,
                                       ref(task->lane->device->name)));
            }
    if (state.listens[SHARED_RAN])
        for (Task *task : finished)
            if (task->kind == Kind::shared)
                report(state, SHARED_RAN, named(state.py.event[SHARED_RAN], num(task->step), num(task->layer), num(task->mb),
                                              ref(task->lane->device->name)));
    for (Task *task : finished) state.tasks.give_back(task);
    for (Transfer *transfer : arrived) state.transfers.give_back(transfer);
    if (!state.sent.empty()) {
        std::vector<nb::object> sent = std::move(state.sent);
        state.sent.clear();
        for (nb::object &tag : sent) report(state, SENT, named(state.py.event[SENT], ref(tag)));
    }
}

/// Tell what happened at this instant, in the order of rule 2, then start what can start.
static void flush(State &state) {
    auto completed = [&] {
        return !state.finished.empty() || !state.arrived.empty() || !state.deferred.empty() || !state.sent.empty();
    };
    while (true) {
        if (completed()) take_in(state);
        if (state.visit && state.visit->open <= 0) {
            end_layer(state, state.visit);
        } else if (state.goes_on) {
            Call call = std::move(state.goes_on);
            state.goes_on = nullptr;
            call();
        } else if (!state.routed.empty()) {
            std::vector<int> &mbs = state.routing_now;
            mbs.clear();
            mbs.swap(state.routed);
            std::sort(mbs.begin(), mbs.end());
            for (int mb : mbs) routed(state, mb);
        } else if (!state.predicted.empty()) {
            std::vector<State::Prediction> found = std::move(state.predicted);
            state.predicted.clear();
            for (auto &prediction : found) predicted(state, prediction);
        } else if (!completed()) {
            break;
        }
    }
    if (!state.blocked.empty()) {
        state.media_to_start.insert(state.media_to_start.end(), state.blocked.begin(), state.blocked.end());
        state.blocked.clear();
    }
    if (!state.media_to_start.empty()) {
        std::vector<Medium *> &media = state.media_starting;
        media.clear();
        media.swap(state.media_to_start);
        for (Medium *medium : media) {
            if (start_next(state, medium)) continue;
            if (std::find(state.blocked.begin(), state.blocked.end(), medium) == state.blocked.end())
                state.blocked.push_back(medium);
        }
    }
    for (size_t i = 0; i < state.lanes_to_start.size(); ++i) start_next(state, state.lanes_to_start[i]);
    state.lanes_to_start.clear();
}

/// Give the records since the last piece away: at the end of a step, when all of its instant is written.
static void hand_out(State &state) {
    nb::object records = attr(state.twin, "records");
    hand_over(state, records);
    i64 settled = state.now;  // nothing starts before that is not written yet
    for (DeviceState &device : state.devices)
        for (Lane *lane : {&device.main, &device.side})
            if (lane->task) settled = std::min(settled, lane->task->start);
    for (LinkState &link : state.links)
        if (link.current) settled = std::min(settled, link.start);
    ask(state, state.sink, {ref(records), num(settled)});
    attr(records, "clear")();
}

/// Carry out all steps.
void run(State &state) {
    next_step(state);
    flush(state);
    for (int instants = 0; !state.over; ++instants) {
        if (!(instants & 255) && PyErr_CheckSignals()) throw nb::python_error();
        if (!state.clock.next_instant(state)) {
            ask(state, attr(state.py.texts, "deadlock"), {nb::cast(explain(state)).release().ptr()});
        }
        flush(state);
        if (!state.sink.is_none() && !state.over && state.now == state.last_end && state.records.tasks.size() >= state.piece)
            hand_out(state);
    }
    cut_off(state);
}

// -------------------------------------------------------------------------------------------------- who waits for what

/// Build the message of a deadlock from the state.
std::string explain(State &state) {
    Visit *visit = state.visit;
    int layer = visit ? visit->layer : -1;
    auto bytes = [&](i64 n) { return text(ask(state, attr(state.py.texts, "format_bytes"), {num(n)})); };
    std::vector<std::string> waits;
    for (LinkState &link : state.links)
        for (size_t i = 0; i < link.queue.size() && i < 4; ++i) {
            Transfer *transfer = link.queue[i];
            if (!transfer->pool) {
                waits.push_back("a transfer of " + bytes(transfer->n_bytes) + " waits on " + text(link.name));
                continue;
            }
            std::string fetch = "Fetch(" + unit_text(transfer->layer, transfer->expert) + ", " + text(transfer->dst->name) +
                                ", urgency=" + std::to_string(transfer->urgency) + ") waits for memory ";
            if (transfer->hop + 1 < transfer->path->size()) {
                waits.push_back(fetch + "on " + text(link.to->name) + " on its way (" +
                                bytes(std::max<i64>(0, link.to->memory.spare)) + " claimed by nobody)");
                continue;
            }
            PoolState *pool = transfer->pool;
            int at = pool->at(transfer->layer);
            // Only the head of each urgency class of a link asks; that it was asked for, and waits, is noted.
            std::string asked = transfer->waited_memory ? "evict returned None" : "evict is asked for those before it first";
            waits.push_back(fetch + "in pool '" + text(pool->name) + "' (" + bytes(pool->used[at]) + " of " +
                            bytes(pool->capacity[at]) + " used, " + asked + ")");
        }
    for (DeviceState &device : state.devices) {
        std::vector<Transfer *> pending;
        for (Transfer *transfer : device.pending)
            if (transfer) pending.push_back(transfer);
        std::sort(pending.begin(), pending.end(), [](Transfer *a, Transfer *b) { return a->fetch < b->fetch; });
        for (Transfer *transfer : pending)
            for (auto [task, shown] = std::pair(transfer->waiting, 0); task && shown < 2; task = task->next_waiting, ++shown)
                waits.push_back("Run(" + unit_text(task->layer, task->expert) + ", " + text(device.name) + ") waits for its fetch");
        if (device.main.n_waiting && pending.empty())
            waits.push_back(std::to_string(device.main.n_waiting) + " tasks on " + text(device.name) + " wait for inputs");
    }
    if (visit && visit->routed()) {
        int slots = 0, shown = 0;
        std::string left;
        for (int e = 0; e < state.n_experts; ++e) {
            int rows = count(visit->of(e), visit->words);
            slots += rows;
            if (rows && shown++ < 8) left += (left.empty() ? "" : ", ") + std::to_string(e);
        }
        if (slots)
            waits.push_back("layer " + std::to_string(layer) + " has " + std::to_string(slots) + " unserved slots of experts [" + left +
                            "]: no Run or Skip names them");
    }
    std::string who;
    for (const std::string &one : waits) who += (who.empty() ? "" : "; ") + one;
    std::string when = text(ask(state, attr(state.py.texts, "format_ns"), {num(state.now)}));
    return "t=" + when + ", step " + std::to_string(state.step_index) + ", layer " + std::to_string(layer) +
           ": nothing can happen and work remains: " + (who.empty() ? "no work is queued" : who) + " [policy=" + state.policy_name + "]";
}

}  // namespace moesim
