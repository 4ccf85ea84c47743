// Reporting to the policy, and running what it returns: validation first, then effect, in the order returned.
#include "composed.hpp"
#include "streams.hpp"

namespace moesim {

/// Tell the policy an event that it listens to, and apply its answer; while it decides, the event waits.
void report(State &state, EventKind kind, const nb::object &event) {
    if (!state.listens[kind]) return;
    if (state.deciding) {
        state.unheard.push_back([&state, kind, event] { report(state, kind, event); });
        return;
    }
    PyObject *arguments[] = {state.policy.ptr(), event.ptr(), state.view.ptr()};
    nb::object actions = own(PyObject_VectorcallMethod(state.py.decide.ptr(), arguments, 3, nullptr));
    if (truth(actions.ptr())) apply(state, actions);
}

static bool is_empty(PyObject *items) {
    Py_ssize_t n = PyObject_Size(items);
    if (n < 0) throw nb::python_error();
    return n == 0;
}

/// Leave open slots of the present layer out.
static void skip(State &state, PyObject *action) {
    i64 layer = as_int(PyTuple_GET_ITEM(action, 0));
    PyObject *rows = PyTuple_GET_ITEM(action, 2);
    Visit *visit = state.visit;
    if (!visit || layer != visit->layer || visit->mbs_left)
        fail(state, "Skip(L" + std::to_string(layer) + ")", "skip slots of the present layer, once it is routed");
    Items experts(PyTuple_GET_ITEM(action, 1));
    for (Py_ssize_t i = 0; i < experts.size(); ++i) {
        i64 expert = as_int(experts[i]);
        unit_of(state, layer, expert, "Skip");
        const u64 *open = visit->of(int(expert));
        Rows chosen(state.words, 0);
        bool sound = true;
        Py_ssize_t named = 0;
        if (rows == Py_None) {
            chosen.assign(open, open + state.words);
            named = count(chosen);
        } else {
            Items items(rows);
            named = items.size();
            for (Py_ssize_t r = 0; r < named; ++r) {
                i64 row = as_int(items[r]);
                if (row >= i64(64) * state.words) sound = false;
                if (sound && row >= 0) set(chosen, row);
            }
        }
        for (int word = 0; word < state.words; ++word) sound = sound && !(chosen[word] & ~open[word]);
        if (!sound || !any(chosen) || count(chosen) != named) {
            nb::object of = rows == Py_None ? own(PyList_New(0)) : nb::borrow(rows);
            nb::object few = ask(state, attr(state.py.texts, "first_rows"), {ref(of)});
            fail(state, "Skip(" + unit_text(layer, expert) + "): rows " + text(few) + " are not routed to it, or are served",
                 "skip only open slots");
        }
        visit->serve({int(expert), chosen, SKIPPED, false});
    }
}

/// Submit a prediction, which waits for the state that it needs.
static void predict(State &state, Source &source, int layer, DeviceState *device, bool side) {
    if (side && device->side.plain)
        fail(state, "Predict(L" + std::to_string(layer) + ", " + text(device->name) + "): the profile has no rate for the side lane",
             "measure a contention pair with '" + text(device->name) + ".side', or use lane='main'");
    auto work = source.work.find({device->index, state.step_rows});
    if (work == source.work.end()) {
        nb::object ns = ask(state, attr(state.costs, "predict_ns"), {ref(device->name), num(state.step_rows), ref(source.name)});
        work = source.work.emplace(std::pair(device->index, state.step_rows), as_int(ns)).first;
    }
    int &needed = source.needed[layer];
    if (needed == -2) {
        nb::object of_layer = ask(state, attr(source.predictor, "needs_layer"), {num(layer)});
        needed = of_layer.is_none() ? -1 : int(as_int(of_layer));
    }
    Task *task = new_task(state, Kind::predict, layer, -1, state.step_rows, work->second);
    if (!side) task->key += AHEAD;
    State::Prediction prediction{state.step_index, layer, &source};
    task->then = [&state, prediction] { state.predicted.push_back(prediction); };
    if (needed >= 0 && !gate_input_exists(state, needed)) {
        task->waits = 1;
        when_gate_input(state, needed, [&state, task] { wake(state, task); });
    }
    submit(state, side ? &device->side : &device->main, task);
}

/// Find what answers for a source of predictions.
static Source &predictor_of(State &state, nb::handle name) {
    if (Source *found = source_of(state, name)) return *found;
    fail(state, "Predict: " + unknown_name(state, "source", name, state.predictors), "list it in Policy.needs");
}

/// Check and submit a prediction.
static void predict(State &state, PyObject *action) {
    i64 step = as_int(PyTuple_GET_ITEM(action, 0)), layer = as_int(PyTuple_GET_ITEM(action, 1));
    std::string lane = text(PyTuple_GET_ITEM(action, 4));
    DeviceState *device = device_of(state, PyTuple_GET_ITEM(action, 3), "Predict");
    auto of_layer = [&] { return "L" + std::to_string(layer); };
    if (step != state.step_index)
        fail(state, "Predict(step " + std::to_string(step) + ", " + of_layer() + "): this is step " + std::to_string(state.step_index),
             "predict within the present step");
    unit_of(state, layer, 0, "Predict");
    Source &source = predictor_of(state, PyTuple_GET_ITEM(action, 2));
    if (lane != "side" && lane != "main") fail(state, "Predict(" + of_layer() + "): lane '" + lane + "'", "lanes are 'main' and 'side'");
    predict(state, source, int(layer), device, lane == "side");
}

/// Submit operations of the host that occupy a device's lane; those that take no time leave no record.
static void work(State &state, PyObject *action) {
    i64 n = as_int(PyTuple_GET_ITEM(action, 2));
    nb::handle operation = PyTuple_GET_ITEM(action, 0);
    DeviceState *device = device_of(state, PyTuple_GET_ITEM(action, 1), "Work");
    if (n < 0 || !device->computes)
        fail(state, "Work(" + short_repr(state, operation) + ", " + text(device->name) + ", " + std::to_string(n) + ")",
             "give a number of operations, and a CPU or GPU");
    i64 ns = n * as_int(ask(state, attr(state.costs, "operation_ns"), {ref(operation)}));
    if (ns) submit(state, &device->main, new_task(state, Kind::host, state.visit ? state.visit->layer : -1, -1, 0, ns, [] {}));
}

/// Apply one action; an action that names no expert, or no row, is ignored.
static void apply_one(State &state, PyObject *action, Groups &groups) {
    int kind = 0;
    while (kind < N_ACTIONS && Py_TYPE(action) != state.py.action[kind]) ++kind;
    if (kind <= SKIP && is_empty(PyTuple_GET_ITEM(action, 1))) return;
    if (kind == RUN || kind == SKIP) {
        PyObject *rows = PyTuple_GET_ITEM(action, kind == RUN ? 3 : 2);
        if (rows != Py_None && is_empty(rows)) return;
    }
    switch (kind) {
    case RUN: return run_experts(state, action, groups);
    case FETCH: return fetch(state, action);
    case DROP: return drop(state, action);
    case MOVE: return move(state, action);
    case SEND: return send(state, action);
    case SKIP: return skip(state, action);
    case PREDICT: return predict(state, action);
    case WORK: return work(state, action);
    default: fail(state, "decide returned " + repr_of(action), "return Fetch, Drop, Move, Run, Skip, Predict, Send or Work");
    }
}

/// Collect an answer before any of it takes effect: a generator must not see its own consequences.
nb::object collected(State &state, nb::handle actions) {
    for (PyTypeObject *type : state.py.action)  // a tuple itself: its fields are no actions
        if (PyObject_TypeCheck(actions.ptr(), type)) fail(state, "decide returned a bare " + repr_of(actions), "return a list of actions");
    if (PyUnicode_Check(actions.ptr()) || !truth(ask(state, attr(state.py.texts, "is_iterable"), {ref(actions)}).ptr()))
        fail(state, "decide returned " + short_repr(state, actions), "return a list of actions");
    return own(PySequence_List(actions.ptr()));
}

/// Apply the actions returned for one event; Runs among them that share a device and layer form a group.
void apply(State &state, nb::handle returned) {
    nb::object actions = nb::borrow(returned);
    if (!PyList_CheckExact(actions.ptr()) && !PyTuple_CheckExact(actions.ptr())) actions = collected(state, actions);
    Groups groups;
    Items items(actions.ptr());
    for (Py_ssize_t i = 0; i < items.size(); ++i) {
        try {
            apply_one(state, items[i], groups);
        } catch (nb::python_error &error) {
            if (!error.matches(PyExc_TypeError)) throw;
            fail(state, "decide returned " + short_repr(state, items[i]), text(attr(state.py.texts, "WRONG_TYPE")));
        }
    }
    for (auto &[key, group] : groups) launch(state, group);
    if (state.thread) submit_next(state, *state.thread);
}

/// Apply the actions of an answer that is given in C++; as above, action by action.
void apply(State &state, const Answer &answer) {
    Groups groups;
    for (const Answer::Action &action : answer.actions) {
        const int *experts = answer.experts.data() + action.first;
        int layer = action.layer;
        i64 base = i64(layer) * state.n_experts;
        switch (action.kind) {
        case RUN: run_experts(state, action.device, experts, action.n, groups); break;
        case FETCH:
            for (int i = 0; i < action.n; ++i)
                fetch_expert(state, layer, experts[i], base + experts[i], action.device, action.pool, action.urgency, Py_None);
            break;
        case DROP:
            for (int i = 0; i < action.n; ++i) drop_expert(state, layer, experts[i], base + experts[i], action.device);
            break;
        case PREDICT: predict(state, predictor_of(state, action.source), layer, action.device, action.side); break;
        case MOVE:
            for (int i = 0; i < action.n; ++i)
                move_expert(state, layer, experts[i], base + experts[i], action.device, action.pool);
            break;
        default: throw std::logic_error("no part returns this action");
        }
    }
    for (auto &[key, group] : groups) launch(state, group);
    if (state.thread) submit_next(state, *state.thread);
}

// ----------------------------------------------------------------------------------------------------------------- Run

/// Return the visit of a later layer of this step, which only early Runs know as yet.
static Visit *future_visit(State &state, int layer) {
    Visit *&visit = state.future[layer];
    if (!visit) visit = new_visit(state, layer);
    return visit;
}

static std::string run_text(State &, i64 layer, PyObject *name) { return "Run(L" + std::to_string(layer) + ", " + text(name); }

/// Return the visit that a Run belongs to when it is not simply the present, routed layer.
static Visit *visit_for(State &state, i64 layer, PyObject *rows, PyObject *inputs_from, PyObject *name) {
    Visit *now = state.visit;
    int now_layer = now ? now->layer : state.reached + 1;
    if (layer < now_layer || layer >= state.n_layers)
        fail(state, run_text(state, layer, name) + "): that layer is over or does not exist",
             "run experts of this layer or a later one of this step");
    bool routed = now && layer == now_layer && now->mbs_left < state.n_mbs();
    if (inputs_from != Py_None) {
        i64 from = as_int(inputs_from);
        if (from < 0 || from > layer)
            fail(state, run_text(state, layer, name) + "): inputs_from=" + std::to_string(from),
                 "name a layer in 0.." + std::to_string(layer));
    }
    if (!routed && rows == Py_None)
        fail(state, run_text(state, layer, name) + "): not routed yet", "name its rows, or wait for Routed");
    if (inputs_from != Py_None && rows == Py_None)
        fail(state, run_text(state, layer, name) + "): inputs_from without rows", "name the rows that read the other state");
    if (layer == now_layer && now) return now;
    return future_visit(state, int(layer));
}

/// Return the visit that late outputs of a layer are added to.
static Visit *next_visit(State &state, Visit *visit, PyObject *name) {
    int layer = visit->layer + 1;
    if (layer == state.n_layers)
        fail(state, run_text(state, visit->layer, name) + ", late): no layer comes after it", "run the last layer's experts in time");
    return future_visit(state, layer);
}

static Rows bits_of_rows(State &state, i64 layer, i64 expert, PyObject *rows) {
    unit_of(state, layer, expert, "Run");
    Items items(rows);
    Rows found(state.words, 0);
    bool sound = true;
    for (Py_ssize_t i = 0; i < items.size(); ++i) {
        i64 row = as_int(items[i]);
        sound = sound && row >= 0 && row < state.step_rows && !(found[row >> 6] >> (row & 63) & 1);
        if (sound) set(found, row);
    }
    if (!sound) {
        nb::object few = ask(state, attr(state.py.texts, "first_rows"), {ref(rows)});
        fail(state, "Run(" + unit_text(layer, expert) + "): rows " + text(few),
             "name distinct rows in 0.." + std::to_string(state.step_rows - 1));
    }
    return found;
}

[[noreturn]] static void refuse_unrouted(State &state, i64 layer, i64 expert, PyObject *name) {
    unit_of(state, layer, expert, "Run");
    fail(state, "Run(" + unit_text(layer, expert) + ", " + text(name) + "): no row is routed to it, or all have been taken",
         "run each active expert once; name rows to run another expert instead");
}

/// Serve some rows, now or once they are routed; what is stale is so before it is anything else.
static void serve(Visit *visit, int expert, const Rows &rows, PyObject *inputs_from, int kind) {
    bool stale = inputs_from != Py_None && as_int(inputs_from) != visit->layer;
    Early early{expert, rows, stale ? int(STALE) : kind, stale};
    if (length(rows) <= visit->routed_rows) {
        visit->serve(early);
    } else {
        visit->early.push_back(early);
    }
}

/// Find or begin the group of Runs on a device that read the hidden state of a layer.
static Group *group_of(State &state, Groups &groups, Visit *visit, Visit *into, DeviceState *device, i64 read, bool late, i64 part) {
    Groups::value_type::first_type key{device->index, read * state.n_layers + visit->layer, late, part};
    for (auto &[of, known] : groups)
        if (of == key) return known;
    if (state.n_groups == state.groups.size()) state.groups.emplace_back();
    Group *group = &state.groups[state.n_groups++];
    group->begin_anew(visit, into, device, int(read), state.words);
    groups.emplace_back(key, group);
    return group;
}

/// Take all rows of an expert that no Run has taken.
static int take(State &state, Visit *visit, DeviceState *device, i64 expert, Group *group) {
    if (!visit->has_unserved(expert)) refuse_unrouted(state, visit->layer, expert, device->name.ptr());
    return visit->take(int(expert), group ? &group->all : nullptr);
}

/// Make the task of an expert, and submit it unless its group is to be launched.
static void run_expert(State &state, Visit *visit, Visit *into, DeviceState *device, Group *group, i64 unit, int expert, int n_rows) {
    int width = state.weights.width(unit);
    i64 work = expert_ns(state, device, width, n_rows);
    Task *task = state.tasks.make(state.task_numbers++, Kind::expert, visit->step, visit->layer, state.mb, n_rows, work, state.now);
    task->expert = expert;
    task->unit = unit;
    task->visit = into;
    task->group = group;
    task->width = width;
    if (CopyState *copy = device->memory.get(unit)) {
        ++copy->in_use;
    } else {
        Transfer *transfer = device->pending[unit];
        if (!transfer)
            fail(state, "Run(" + unit_text(visit->layer, expert) + ", " + text(device->name) + "): not resident and no fetch pending",
                 "return Fetch(" + unit_text(visit->layer, expert) + ", " + text(device->name) + ") before it");
        transfer->wait_for(task);
        task->waits = 1;
    }
    if (group) {
        group->tasks.push_back(task);
        return;
    }
    if (state.thread) take_in_turn(*state.thread, task);
    submit(state, &device->main, task);
}

/// Run experts of the present layer for all rows that no Run has taken.
void run_experts(State &state, DeviceState *device, const int *experts, int n, Groups &groups) {
    Visit *visit = state.visit;
    bool grouped = device != state.layout->dense_at[visit->layer] || device->first_extra || !device->more_rows.empty();
    Group *group = grouped ? group_of(state, groups, visit, visit, device, visit->layer, false, 0) : nullptr;
    for (int i = 0; i < n; ++i) {
        int n_rows = take(state, visit, device, experts[i], group);
        run_expert(state, visit, visit, device, group, visit->base + experts[i], experts[i], n_rows);
    }
}

/// Make a task of each expert; those of no group are submitted at once.
void run_experts(State &state, PyObject *action, Groups &groups) {
    i64 layer = as_int(PyTuple_GET_ITEM(action, 0));
    PyObject *name = PyTuple_GET_ITEM(action, 2), *rows = PyTuple_GET_ITEM(action, 3);
    PyObject *inputs_from = PyTuple_GET_ITEM(action, 4), *bits = PyTuple_GET_ITEM(action, 5);
    bool late = truth(PyTuple_GET_ITEM(action, 6));
    DeviceState *device = device_of(state, name, "Run");
    if (!device->computes)
        fail(state, run_text(state, layer, name) + "): a disk computes nothing", "run experts where the dense part runs");
    Visit *visit = state.visit;
    if (!visit || layer != visit->layer || visit->mbs_left == state.n_mbs() || inputs_from != Py_None)
        visit = visit_for(state, layer, rows, inputs_from, name);
    i64 first = visit->base + first_of(state, bits, [&] { return run_text(state, layer, name) + ")"; });
    int width = state.weights.width(first);
    Visit *into = late ? next_visit(state, visit, name) : visit;
    bool whole = rows == Py_None && !width && !late;
    int kind = late ? LATE : width ? REDUCED : FRESH;
    i64 part = as_int(PyTuple_GET_ITEM(action, 7));
    Group *group = nullptr;
    if (device != state.layout->dense_at[layer] || device->first_extra || !device->more_rows.empty() || !whole) {
        i64 read = inputs_from == Py_None ? layer : as_int(inputs_from);
        group = group_of(state, groups, visit, into, device, read, late, part);
    }
    Items experts(PyTuple_GET_ITEM(action, 1));
    for (Py_ssize_t i = 0; i < experts.size(); ++i) {
        i64 expert = as_int(experts[i]);
        if (rows == Py_None && !visit->has_unserved(expert)) refuse_unrouted(state, layer, expert, name);
        int n_rows;
        if (whole) {
            n_rows = visit->take(int(expert), group ? &group->all : nullptr);
        } else {
            Rows served = rows == Py_None ? Rows(visit->of(int(expert)), visit->of(int(expert)) + visit->words)
                                          : bits_of_rows(state, layer, expert, rows);
            serve(visit, int(expert), served, inputs_from, kind);
            into->hold();  // until its task is done
            for (int word = 0; word < state.words; ++word) group->all[word] |= served[word];
            n_rows = count(served);
        }
        run_expert(state, visit, into, device, group, first + expert, int(expert), n_rows);
    }
}

/// Submit a group: at once where the hidden state is, else when its rows have crossed.
void launch(State &state, Group *group) {
    Visit *visit = group->visit;
    int layer = visit->layer;
    group->left = int(group->tasks.size());
    group->rows = count(group->all);
    DeviceState *home = state.layout->dense_at[group->inputs_from];
    for (Task *task : group->tasks) {
        ++task->waits;
        if (state.thread) take_in_turn(*state.thread, task);
        submit(state, &group->device->main, task);
    }
    group->into->hold();  // until its outputs are back
    Call bring_inputs = [&state, group, home, layer] {
        cross(state, home, group->device, layer, group->rows, "in", [&state, group] {
            for (Task *task : group->tasks) wake(state, task);
        });
    };
    bool ready = gate_input_exists(state, group->inputs_from);
    if (!ready && group->inputs_from == layer)  // the micro-batches it reads may be routed, if not all are
        ready = length(group->all) <= visit->routed_rows;
    if (ready) {
        bring_inputs();
    } else {
        when_gate_input(state, group->inputs_from, bring_inputs);
    }
}

/// Note that one Run of a group is done; with the last, its outputs go back.
void progress(State &state, Group *group) {
    if (--group->left) return;
    Visit *into = group->into;
    cross(state, group->device, state.layout->dense_at[into->layer], group->visit->layer, group->rows, "out", [into] { into->let_go(); });
}

// --------------------------------------------------------------------------------------------- Fetch, Drop, Move, Send

static void new_transfer(State &state, i64 layer, i64 expert, i64 unit, DeviceState *device, PoolState *pool, i64 urgency,
                         PyObject *source) {
    i64 n_bytes = state.weights.bytes_of(unit);
    auto what = [&] { return "Fetch(" + unit_text(layer, expert) + ", " + text(device->name) + ")"; };
    if (pool && n_bytes > pool->capacity[pool->at(layer)])
        fail(state, what() + ": pool '" + text(pool->name) + "' holds " + std::to_string(pool->capacity[pool->at(layer)]) +
                        " bytes, the expert has " + std::to_string(n_bytes),
             "make the pool at least one expert large");
    DeviceState *src = nullptr;
    CopyState *copy = nullptr;
    auto try_one = [&](DeviceState *one) {
        copy = one == device ? nullptr : one->memory.get(unit);
        src = copy ? one : nullptr;
        return src != nullptr;
    };
    if (source == Py_None) {
        const auto &listed = sources(state, device);
        std::any_of(listed.begin(), listed.end(), try_one);
    } else if (DeviceState *named = find_device(state, source)) {
        try_one(named);
    }
    if (!src) {
        std::string known = truth(source) ? "no copy on " + text(source) : "no copy anywhere that can be reached";
        fail(state, what() + ": " + known, "leave source out, or fetch it to there first");
    }
    ++copy->in_use;
    const std::vector<LinkState *> &path = path_between(state, src, device);
    Transfer *transfer =
        state.transfers.make(state.fetch_numbers++, unit, int(layer), int(expert), n_bytes, &path, urgency, state.now);
    transfer->src = src;
    transfer->dst = device;
    transfer->pool = pool;
    transfer->width = state.weights.width(unit);
    device->pending[unit] = transfer;
    enqueue(state, path[0], transfer);
}

/// Queue a copy of an expert, or hasten it if it is queued.
void fetch_expert(State &state, i64 layer, i64 expert, i64 unit, DeviceState *device, PoolState *pool, i64 urgency, PyObject *source) {
    if (Transfer *transfer = device->pending[unit]) {
        transfer->drop_on_arrival = false;
        hasten(state, transfer, urgency);
        return;
    }
    CopyState *copy = device->memory.get(unit);
    if (copy && !device->backing) {
        device->memory.keep(unit);
    } else {
        new_transfer(state, layer, expert, unit, device, pool, urgency, source);
    }
}

/// Forget a copy once it is idle, or cancel what is queued.
void drop_expert(State &state, i64 layer, i64 expert, i64 unit, DeviceState *device) {
    if (device->memory.get(unit)) {
        device->memory.drop(unit, state.now);
        return;
    }
    Transfer *transfer = device->pending[unit];
    if (!transfer)
        fail(state, "Drop(" + unit_text(layer, expert) + ", " + text(device->name) + "): neither resident nor being fetched",
             "drop only what is there");
    if (transfer->started || transfer->waiting) {
        transfer->drop_on_arrival = true;
    } else {
        dequeue(transfer);
        device->pending[unit] = nullptr;
        transfer->src->memory.release(unit, state.now);
        state.transfers.give_back(transfer);
    }
}

/// Let a copy on its way arrive in another pool, which counts its bytes from now on if it is in flight, full or not.
static void divert(Transfer *transfer, PoolState *pool) {
    transfer->drop_on_arrival = false;
    if (transfer->hop + 1 == transfer->path->size() && !transfer->first_chunk && transfer->pool) {
        transfer->pool->take(transfer->layer, -transfer->n_bytes);
        pool->take(transfer->layer, transfer->n_bytes);
    }
    transfer->pool = pool;
}

/// Relabel a copy that is there or on its way.
void move_expert(State &state, i64 layer, i64 expert, i64 unit, DeviceState *device, PoolState *pool) {
    if (Transfer *transfer = device->pending[unit]) {
        divert(transfer, pool);
        return;
    }
    CopyState *copy = device->memory.get(unit);
    auto what = [&] { return "Move(" + unit_text(layer, expert) + ", " + text(device->name) + ")"; };
    if (!copy) fail(state, what() + ": neither resident nor being fetched", "move only what is there or on its way");
    if (device->memory.origins[unit].pool != pool && pool->free(layer) < state.weights.bytes_of(unit))
        fail(state, what() + ": pool '" + text(pool->name) + "' is full", "Drop or Move something out of it first");
    device->memory.relabel(unit, pool, layer);
}

/// Queue copies of experts, or hasten those that are queued.
void fetch(State &state, PyObject *action) {
    i64 layer = as_int(PyTuple_GET_ITEM(action, 0)), urgency = as_int(PyTuple_GET_ITEM(action, 3));
    PyObject *name = PyTuple_GET_ITEM(action, 2), *pool_name = PyTuple_GET_ITEM(action, 4);
    DeviceState *device = device_of(state, name, "Fetch");
    auto what = [&] { return "Fetch(L" + std::to_string(layer) + ", " + text(name) + ")"; };
    PoolState *pool = device->backing ? nullptr : device->memory.pool(pool_name);
    if (!pool && !device->backing) pool_of(state, device, pool_name, what());
    if (urgency < 0) fail(state, what() + ": urgency " + std::to_string(urgency), "classes start at 0 (demand)");
    Items experts(PyTuple_GET_ITEM(action, 1));
    for (Py_ssize_t i = 0; i < experts.size(); ++i) {
        i64 expert = as_int(experts[i]), unit = unit_of(state, layer, expert, "Fetch", PyTuple_GET_ITEM(action, 6));
        fetch_expert(state, layer, expert, unit, device, pool, urgency, PyTuple_GET_ITEM(action, 5));
    }
}

/// Forget copies once idle; cancel what is queued.
void drop(State &state, PyObject *action) {
    i64 layer = as_int(PyTuple_GET_ITEM(action, 0));
    PyObject *name = PyTuple_GET_ITEM(action, 2);
    DeviceState *device = device_of(state, name, "Drop");
    if (device->backing)
        fail(state, "Drop(L" + std::to_string(layer) + ", " + text(name) + "): copies on a backing device stay",
             "drop copies on other devices only");
    Items experts(PyTuple_GET_ITEM(action, 1));
    for (Py_ssize_t i = 0; i < experts.size(); ++i) {
        i64 expert = as_int(experts[i]), unit = unit_of(state, layer, expert, "Drop", PyTuple_GET_ITEM(action, 3));
        drop_expert(state, layer, expert, unit, device);
    }
}

/// Relabel copies that are there or on their way.
void move(State &state, PyObject *action) {
    i64 layer = as_int(PyTuple_GET_ITEM(action, 0));
    PyObject *name = PyTuple_GET_ITEM(action, 2), *pool_name = PyTuple_GET_ITEM(action, 3);
    DeviceState *device = device_of(state, name, "Move");
    PoolState *pool = pool_of(state, device, pool_name, "Move(L" + std::to_string(layer) + ", " + text(name) + ")");
    Items experts(PyTuple_GET_ITEM(action, 1));
    for (Py_ssize_t i = 0; i < experts.size(); ++i) {
        i64 expert = as_int(experts[i]), unit = unit_of(state, layer, expert, "Move", PyTuple_GET_ITEM(action, 4));
        move_expert(state, layer, expert, unit, device, pool);
    }
}

/// Queue a message.
void send(State &state, PyObject *action) {
    PyObject *src = PyTuple_GET_ITEM(action, 1), *dst = PyTuple_GET_ITEM(action, 2);
    i64 n_bytes = as_int(PyTuple_GET_ITEM(action, 0));
    int same = PyObject_RichCompareBool(src, dst, Py_EQ);
    if (same < 0) throw nb::python_error();
    if (same || n_bytes < 1)
        fail(state, "Send(" + std::to_string(n_bytes) + ", " + text(src) + ", " + text(dst) + ")",
             "send at least one byte between two devices");
    DeviceState *from = device_of(state, src, "Send"), *to = device_of(state, dst, "Send");
    nb::object tag = nb::borrow(PyTuple_GET_ITEM(action, 3));
    send_message(state, path_between(state, from, to), n_bytes, DEMAND, [&state, tag] { state.sent.push_back(tag); }, true,
                 Cause::message, -1);
}

}  // namespace moesim
