// The action that computes: Run, and the groups in which Runs cross to a device.
#include "state.hpp"
#include "streams.hpp"

namespace moesim {

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
    bool grouped = device != state.layout->dense_at[visit->layer] || device->first_extra;
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
    Group *group = nullptr;
    if (device != state.layout->dense_at[layer] || device->first_extra || !whole) {
        i64 read = inputs_from == Py_None ? layer : as_int(inputs_from);
        group = group_of(state, groups, visit, into, device, read, late, as_int(PyTuple_GET_ITEM(action, 7)));
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

/// Take note that one Run of a group is done; with the last, its outputs go back.
void progress(State &state, Group *group) {
    if (--group->left) return;
    Visit *into = group->into;
    cross(state, group->device, state.layout->dense_at[into->layer], group->visit->layer, group->rows, "out", [into] { into->let_go(); });
}

}  // namespace moesim
