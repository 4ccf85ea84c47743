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

/// Tell the composition of a copy that has arrived; while it decides, this waits.
static void tell_fetched(State &state, int layer, int expert) {
    if (state.deciding) {
        state.unheard.push_back([&state, layer, expert] { tell_fetched(state, layer, expert); });
    } else {
        apply(state, state.composed->fetched(layer, expert));
    }
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
            if (state.composed) {
                tell_fetched(state, transfer->layer, transfer->expert);
            } else {
                tell(state, FETCHED, named(state.py.event[FETCHED], num(transfer->layer), num(transfer->expert),
                                           ref(transfer->dst->name)));
            }
        }
    if (state.listens[RAN])
        for (Task *task : finished)
            if (task->unit >= 0) {
                PyObject *experts = PyTuple_New(1);
                if (!experts) throw nb::python_error();
                PyTuple_SET_ITEM(experts, 0, num(task->expert));
                tell(state, RAN, named(state.py.event[RAN], num(task->step), num(task->layer), experts,
                                       ref(task->lane->device->name)));
            }
    if (state.listens[SHARED_RAN])
        for (Task *task : finished)
            if (task->kind == Kind::shared)
                tell(state, SHARED_RAN, named(state.py.event[SHARED_RAN], num(task->step), num(task->layer), num(task->mb),
                                              ref(task->lane->device->name)));
    for (Task *task : finished) state.tasks.give_back(task);
    for (Transfer *transfer : arrived) state.transfers.give_back(transfer);
    if (!state.sent.empty()) {
        std::vector<nb::object> sent = std::move(state.sent);
        state.sent.clear();
        for (nb::object &tag : sent) tell(state, SENT, named(state.py.event[SENT], ref(tag)));
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

}  // namespace moesim
