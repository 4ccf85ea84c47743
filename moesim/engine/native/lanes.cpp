// Lanes of devices, and the host thread that submits Runs to them (rule 4).
#include "state.hpp"
#include "streams.hpp"

namespace moesim {

/// Give a lane a task, which may still wait for weights or inputs.
void submit(State &state, Lane *lane, Task *task) {
    task->lane = lane;
    if (task->waits) {
        ++lane->n_waiting;
    } else {
        state.clock.ready(state, task);
    }
}

/// Note that one thing is there that a submitted task waited for.
void wake(State &state, Task *task) {
    if (--task->waits) return;
    --task->lane->n_waiting;
    task->ready = state.now;
    state.clock.ready(state, task);
}

/// Note that a Run reads its copy, and charge the extra of a group's first expert.
static void read_copy(State &state, Task *task) {
    DeviceMemory &memory = task->lane->device->memory;
    bool &used = memory.copies[task->unit].used;
    if (!used) {
        used = true;
        i64 fetch = memory.origins[task->unit].fetch;
        if (fetch >= 0) state.records.used_fetches.push_back(fetch);
    }
    if (Group *group = task->group; group && !group->begun) {
        const std::vector<i64> &more = group->device->more_rows;
        task->work += group->first_extra + (more.empty() ? 0 : more[std::min(size_t(group->rows), more.size() - 1)]);
        group->begun = true;
    }
}

/// Start the first ready task, unless one runs.
void start_next(State &state, Lane *lane) {
    if (lane->task || lane->queue.empty()) return;
    Task *task = lane->task = lane->pop();
    task->start = state.now;
    if (task->unit >= 0) read_copy(state, task);
    state.clock.begin(state, lane, task);
}

/// Record a task that is done; the loop reports it to who must know.
void done(State &state, Task *task, i64 end) {
    Lane *lane = task->lane;
    state.records.tasks.push_back({task->start, end, task->work, task->submitted, task->ready, task->step, task->layer, task->mb,
                                   task->expert, task->rows, std::int16_t(lane->device->index), std::int16_t(task->width),
                                   lane->side, task->kind});
    lane->recorded = true;
    if (task->reads) state.layout->streams->read_by(state, task);
    if (!task->then && task->unit < 0) {
        state.routed.push_back(task->mb);  // a dense part: its layer is routed
        state.tasks.give_back(task);
    } else {
        state.finished.push_back(task);
    }
}

/// Time of an expert at a width, asked of the costs once.
i64 expert_ns(State &state, DeviceState *device, int width, int rows) {
    auto &known = device->expert_ns[width];
    if (size_t(rows) >= known.size()) known.resize(rows + 1, -1);
    if (known[rows] < 0) known[rows] = as_int(ask(state, device->ask_expert_ns[width], {ref(device->name), num(rows)}));
    return known[rows];
}

/// The part of an expert's time that reading its weights takes, in millionths: all of it with one row, and on a GPU.
i64 reading_share(State &state, DeviceState *device, int rows, int width) {
    if (device->is_gpu || rows <= 1) return FULL;
    i64 one = expert_ns(state, device, width, 1), all = expert_ns(state, device, width, rows);
    return std::max<i64>(1, std::min<i64>(FULL, i64(i128(one) * FULL / std::max<i64>(1, all))));
}

// ---------------------------------------------------------------- the host thread, where a profile says what submitting takes

/// Let a Run wait for its submission; `submit_next` begins it once all Runs of a decision are there.
void take_in_turn(HostThread &thread, Task *task) {
    ++task->waits;
    thread.queue.push_back(task);
    std::push_heap(thread.queue.begin(), thread.queue.end(), Lane::later);
}

static void submit_now(State &state, HostThread &thread, Task *task) {
    if (thread.shared && !task->lane->device->is_gpu) {
        thread.busy = true;
        thread.computing = task;
    }
    wake(state, task);
}

/// Submit the next Run, unless the thread is busy.
void submit_next(State &state, HostThread &thread) {
    while (!thread.queue.empty() && !thread.busy) {
        std::pop_heap(thread.queue.begin(), thread.queue.end(), Lane::later);
        Task *task = thread.queue.back();
        thread.queue.pop_back();
        if (!thread.submit_ns) {
            submit_now(state, thread, task);
            continue;
        }
        thread.busy = true;
        state.records.decisions.push_back({state.now, state.now + thread.submit_ns, task->step, task->layer});
        state.clock.after(state, thread.submit_ns, [&state, &thread, task] {
            thread.busy = false;
            submit_now(state, thread, task);
            submit_next(state, thread);
        });
    }
}

/// Note that a Run is done: a shared thread goes on once it has computed it.
void computed(State &state, HostThread &thread, Task *task) {
    if (task != thread.computing) return;
    thread.computing = nullptr;
    thread.busy = false;
    submit_next(state, thread);
}

}  // namespace moesim
