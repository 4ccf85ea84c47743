// What is of the machine: devices, lanes, links, and the tasks and transfers that occupy them. Plain data.
#pragma once

#include "contention.hpp"
#include "memory.hpp"
#include "visit.hpp"

#include <algorithm>
#include <unordered_map>

namespace moesim {

constexpr i64 AHEAD = -(i64(1) << 60);  // added to the number of a task that goes ahead of everything queued
constexpr i64 DEMAND = 0, PREFETCH = 1, UPDATE = 2;

struct DeviceState;
struct Group;
struct Lane;
struct LinkState;
struct Use;

/// One occupation of a lane, from submission to completion.
struct Task {
    i64 key;  // submission order
    Kind kind;
    int step, layer, mb, rows;
    i64 work, submitted, ready;
    int expert = -1;
    i64 unit = -1;  // the unit whose weights it reads
    Visit *visit = nullptr;
    Group *group = nullptr;
    Call then = nullptr;  // at completion; none for experts, and for dense parts, which are followed by Routed
    int waits = 0;  // weights and inputs still missing
    i64 start = 0;
    Lane *lane = nullptr;  // once submitted
    Use *reads = nullptr;  // the use of streamed weights that it reads
    int width = 0;  // of its weights; 0: the full one
    Task *next_waiting = nullptr;  // for the same transfer

    // Written out, since compilers clear a large aggregate first, and slowly.
    Task(i64 key, Kind kind, int step, int layer, int mb, int rows, i64 work, i64 now)
        : key(key), kind(kind), step(step), layer(layer), mb(mb), rows(rows), work(work), submitted(now), ready(now) {}
};

/// Runs returned together for one device: their rows cross once, their outputs come back once (rule 8).
struct Group {
    Visit *visit = nullptr, *into = nullptr;  // `into` waits for the outputs: the next layer's if they come late
    DeviceState *device = nullptr;
    i64 first_extra = 0;
    int inputs_from = 0;  // the layer whose hidden state is read
    std::vector<Task *> tasks = {};
    int left = 0;
    Rows all = {};  // rows of the step that take part
    int rows = 0;

    void begin_anew(Visit *of, Visit *waiting, DeviceState *on, int read, int words);
};

/// Activations that go from one device to another (rule 8).
struct Crossing {
    int layer, rows;
    const char *direction;
};

/// The main or side lane of a device: ready tasks in submission order, and the task that runs.
struct Lane : Server {
    DeviceState *device = nullptr;
    bool side = false, plain = true;
    int expert_activity = -1, dense_activity = -1;
    std::vector<Task *> queue;  // a heap
    int n_waiting = 0;  // tasks that lack weights or inputs
    Task *task = nullptr;
    bool recorded = false;  // whether it has a task among the records that are not handed over yet

    static bool later(const Task *a, const Task *b) { return a->key > b->key; }
    void push(Task *one) {
        queue.push_back(one);
        std::push_heap(queue.begin(), queue.end(), later);
    }
    Task *pop() {
        std::pop_heap(queue.begin(), queue.end(), later);
        Task *one = queue.back();
        queue.pop_back();
        return one;
    }
};

/// One fetch of one expert on its way, or a message.
struct Transfer {
    i64 fetch;  // number, also the submission order
    i64 unit;  // -1: a message
    int layer, expert;
    i64 n_bytes;
    i64 left;  // bytes that this hop has still to move
    const std::vector<LinkState *> *path;
    i64 urgency, submitted;
    LinkState *link;  // where it is queued or under way
    DeviceState *src = nullptr, *dst = nullptr;  // none for messages
    PoolState *pool = nullptr;
    Task *waiting = nullptr, *last_waiting = nullptr;  // tasks that need it, by `Task::next_waiting`
    size_t hop = 0;
    bool started = false;
    bool first_chunk = true;  // the next chunk is the first of its hop: memory is not reserved yet
    bool drop_on_arrival = false, waited_memory = false;
    bool has_cause = false;  // of a message, unless it is streamed weights
    Cause cause = Cause::message;
    DeviceState *transit = nullptr;  // intermediate device that holds it after a hop
    int in_use = 0;  // decisions under way that need the copy once it is there
    Call on_arrival = nullptr;  // for messages
    int rows = 0;  // of activations that share the link
    int width = 0;  // of the copy; 0: the full one

    Transfer(i64 fetch, i64 unit, int layer, int expert, i64 n_bytes, const std::vector<LinkState *> *path, i64 urgency, i64 now)
        : fetch(fetch), unit(unit), layer(layer), expert(expert), n_bytes(n_bytes), left(n_bytes), path(path), urgency(urgency),
          submitted(now), link((*path)[0]) {}

    void wait_for(Task *task) {
        (waiting ? last_waiting->next_waiting : waiting) = task;
        last_waiting = task;
    }
};

/// Links that are serial together. A link without a named medium has one of its own.
struct Medium {
    bool busy = false;
    std::vector<LinkState *> links;
};

/// A directed link: its queue, what is in flight, and its control lane.
struct LinkState : Server {
    int index = 0;
    nb::object name, link, ask_ns;  // the profile's link; the cost of bytes on it
    std::unordered_map<i64, i64> transfer_ns, activation_ns;  // what costs have answered, of bytes and of rows
    i64 asked_bytes = -1, asked_ns = 0;  // and what they have answered last
    DeviceState *to = nullptr;
    Medium *medium = nullptr;
    bool plain = true, shared = false;  // shared: activations travel among the weights
    int activity_number = -1;
    std::vector<Transfer *> queue;  // ascending in (urgency, fetch number)
    Transfer *current = nullptr;
    i64 current_bytes = 0, start = 0;
    i64 control_free = 0;  // when the control lane has no activations any more

    static bool before(const Transfer *a, const Transfer *b) {
        return a->urgency != b->urgency ? a->urgency < b->urgency : a->fetch < b->fetch;
    }
};

/// A device: its memory, its lanes and what is on its way to it.
struct DeviceState {
    int index = 0;
    nb::object name, twin;  // twin: the same device as Python's setup has it
    bool is_gpu = false, computes = false, backing = false;
    DeviceMemory memory;
    i64 first_extra = 0;  // for the first expert of a group
    std::vector<nb::object> ask_expert_ns;  // of each width: the cost of rows
    std::vector<std::vector<i64>> expert_ns;  // what it has answered; -1: not asked
    std::vector<Transfer *> pending;  // of each unit, what is on its way here
    Lane main, side;
};

inline void Group::begin_anew(Visit *of, Visit *waiting, DeviceState *on, int read, int words) {
    visit = of, into = waiting, device = on, first_extra = on->first_extra, inputs_from = read;
    tasks.clear();
    left = rows = 0;
    all.assign(words, 0);
}

}  // namespace moesim
