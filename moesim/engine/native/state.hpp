// All of a run: the workload's present step and layer, the machine, and what has just happened. Rules are functions over it.
#pragma once

#include "clock.hpp"
#include "memory.hpp"
#include "visit.hpp"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string_view>
#include <unordered_map>

namespace moesim {

/// The names of the contract that the engine makes or compares, looked up once a run.
enum EventKind { STEP_BEGIN, LAYER_BEGIN, ROUTED, PREDICTED, FETCHED, RAN, SHARED_RAN, SENT, LAYER_END, STEP_END, N_EVENTS };
enum ActionKind { FETCH, DROP, MOVE, RUN, SKIP, PREDICT, SEND, WORK, N_ACTIONS };

struct Contract {
    PyTypeObject *event[N_EVENTS];
    PyTypeObject *action[N_ACTIONS];
    nb::object keep[int(N_EVENTS) + int(N_ACTIONS)];
    nb::object decide, evict;  // names of methods
    nb::object texts;  // moesim.engine.native.texts: messages and rare computations
    nb::object fail;

    void load() {
        static const char *events[] = {"StepBegin", "LayerBegin", "Routed", "Predicted", "Fetched",
                                       "Ran", "SharedRan", "Sent", "LayerEnd", "StepEnd"};
        static const char *actions[] = {"Fetch", "Drop", "Move", "Run", "Skip", "Predict", "Send", "Work"};
        nb::object policy = nb::module_::import_("moesim.policy");
        for (int i = 0; i < N_EVENTS; ++i) {
            keep[i] = attr(policy, events[i]);
            event[i] = reinterpret_cast<PyTypeObject *>(keep[i].ptr());
        }
        for (int i = 0; i < N_ACTIONS; ++i) {
            keep[int(N_EVENTS) + i] = attr(policy, actions[i]);
            action[i] = reinterpret_cast<PyTypeObject *>(keep[int(N_EVENTS) + i].ptr());
        }
        decide = nb::steal(PyUnicode_InternFromString("decide"));
        evict = nb::steal(PyUnicode_InternFromString("evict"));
        texts = nb::module_::import_("moesim.engine.native.texts");
        fail = attr(texts, "fail");
    }
};

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
    bool begun = false;  // its first expert
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
    nb::object name, link;  // the profile's link
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
    i64 layer_host = 0;  // of the host in each layer that it runs the router of
    i64 first_extra = 0;  // for the first expert of a group
    std::vector<i64> more_rows;  // and, of so many rows that take part; the last: of more
    std::vector<nb::object> ask_expert_ns;  // of each width: the cost of rows
    std::vector<std::vector<i64>> expert_ns;  // what it has answered; -1: not asked
    std::vector<Transfer *> pending;  // of each unit, what is on its way here
    Lane main, side;
};

inline void Group::begin_anew(Visit *of, Visit *waiting, DeviceState *on, int read, int words) {
    visit = of, into = waiting, device = on, first_extra = on->first_extra, begun = false, inputs_from = read;
    tasks.clear();
    left = rows = 0;
    all.assign(words, 0);
}

/// A source of predictions, and what it has answered.
struct Source {
    nb::object name, predictor, predict;  // the last: its method
    std::vector<int> needed;  // of each layer: that whose gate input must exist, -1: none, -2: not asked
    std::map<std::pair<int, int>, i64> work = {};  // of a device and rows
    nb::object step = {};  // of which a composition asked last
    bool at_once = false;  // whether it gives the ids of all layers of a step at once
    std::unique_ptr<Table> table = {};  // these; none: it says nothing of this step
    int first_layer = 0;  // of which it speaks
};

/// The thread that submits Runs one after another, each for the same time.
struct HostThread {
    i64 submit_ns = 0;
    bool shared = false;  // whether it also computes the host's experts: it submits nothing until such a Run is done
    std::vector<Task *> queue;  // a heap
    bool busy = false;
    Task *computing = nullptr;
};

/// A contiguous run of a step's rows that holds whole requests.
struct MicroBatch {
    i64 first_row, n_rows, work2;
    nb::object layers, experts;  // routing of each layer, as Python prepares it; its ids alone
    std::unique_ptr<Table> ids;  // (n_rows, n_layers, top_k)
    /// What the router said of the chosen experts, (n_rows, n_layers, top_k); read when asked for; null if not recorded.
    const Table *weights() const;
    /// And of all, (n_rows, n_layers, n_experts).
    const Table *scores() const;

    /// What Python is shown of a layer: its ids, weights or scores, of each row; None: not recorded.
    nb::handle shown(int field, int layer);

    mutable std::unique_ptr<Table> kept_weights, kept_scores;
    nb::object by_layer[3];
};

struct Streams;
struct Composed;
struct Answer;

/// A routed micro-batch as plain numbers: each expert's rows, and those that have any, ascending.
struct Routing {
    std::vector<i64> rows;
    std::vector<int> active;
    std::vector<int> ids;  // (n_rows, top_k) in rank order
    const MicroBatch *micro = nullptr;
    int step = 0, layer = 0, mb = 0, n_rows = 0, top_k = 0;

    void read(const MicroBatch &micro);
};

/// Objects that are made and given back all the time. All go with the run.
template <class T> struct Store {
    std::deque<T> made;
    std::vector<T *> unused;
    template <class... Fields> T *make(Fields &&...fields) {
        if (unused.empty()) return &made.emplace_back(std::forward<Fields>(fields)...);
        T *found = unused.back();
        unused.pop_back();
        std::destroy_at(found);
        return new (found) T(std::forward<Fields>(fields)...);
    }
    void give_back(T *one) { unused.push_back(one); }
};

/// Which device runs which part of the model that is no expert.
struct Layout {
    std::vector<DeviceState *> attention_at, dense_at, shared_at, core_at;  // of each layer; core_at: may be none
    std::map<std::string, DeviceState *> step_parts;
    std::unique_ptr<Streams> streams;  // of parts that are copied for each use, if there are any

    Layout();
    ~Layout();
};

struct State {
    Contract py;
    nb::object twin;  // the run as Python's setup knows it; released with the run
    nb::object policy, view, costs, steps, progress, predictors, model;
    std::deque<Source> predicting;  // sources of predictions that were asked for
    nb::dict predicting_by_name;  // their places
    std::string policy_name;
    bool listens[N_EVENTS] = {};
    i64 decision_ns = 0;
    // The model.
    int n_layers = 0, n_leading = 0, n_experts = 0, top_k = 0, hidden = 0, n_shared = 0;
    std::vector<int> alike;  // for each layer the first that costs the same but for its experts
    std::pair<i64, i64> kv_held{-1, -1};  // tokens and requests whose cache is held
    std::vector<std::pair<i64, i64>> core_widths;  // of each layer, numbers of a row that cross to what reads its cache, and back
    Weights weights;
    Records records;
    // The machine and where the parts of the model are.
    std::deque<DeviceState> devices;
    std::vector<DeviceState *> gpus;
    std::deque<LinkState> links;
    std::deque<Medium> media;
    std::vector<nb::object> pool_names;
    std::vector<std::unique_ptr<Layout>> layouts;  // of all steps, or of those with fewer rows than `offload_from` and of the others
    Layout unplaced, *layout = &unplaced;  // of the present step
    i64 offload_from = 1;
    std::vector<std::vector<LinkState *>> paths;  // from each device to each other; empty: not asked
    std::vector<std::vector<LinkState *>> alone;  // each link as a path
    std::unordered_map<i64, i64> activation_bytes;  // of rows, as far as asked
    std::map<std::tuple<std::string_view, int, i64, int>, i64> part_ns;  // answers of costs: part, device, rows, layer
    std::vector<std::vector<DeviceState *>> sources;
    std::unique_ptr<HostThread> thread;
    std::unique_ptr<Composed> composed;  // decides in the policy's place, if it is one of parts that are there in C++
    Contention contention;
    Clock clock;
    i64 chunk_bytes = 0;  // 0: transfers are in one piece
    // Completed at this instant and not yet reported.
    i64 now = 0;
    std::vector<Transfer *> arrived, arriving;  // the second of each: what is being taken in
    std::vector<Task *> finished, finishing;
    std::vector<Call> deferred;
    Call goes_on = nullptr;  // what follows embedding, leading layers or the head
    std::vector<int> routed, routing_now;
    struct Prediction {
        int step, layer;
        Source *source;
    };
    std::vector<Prediction> predicted;
    std::vector<nb::object> sent;
    // What may have something to start.
    std::vector<Lane *> lanes_to_start;
    std::vector<Medium *> media_to_start, media_starting, blocked;
    std::vector<LinkState *> links_tried;
    // The present step and layer.
    i64 task_numbers = 1, fetch_numbers = 1;
    nb::object step, phase;
    int step_index = 0, step_rows = 0, words = 1;
    bool decoding = false, mixed = false;
    std::vector<MicroBatch> micro;
    int mb = 0;  // micro-batch of the event being answered
    Visit *visit = nullptr;
    Routing routing;  // routed last
    int reached = -1;  // the layer begun last in this step
    std::vector<Visit> visits;  // of each layer, in this step
    std::deque<Group> groups;  // of this step, and others to be used again
    size_t n_groups = 0;  // of this step
    std::vector<Visit *> future;  // of each layer of this step that has early Runs
    std::vector<std::vector<Call>> gate_input_waiters;  // of each layer
    DeviceState *hidden_at = nullptr;
    i64 step_began = 0;
    double gate_mass = 0;
    i64 last_end = -1;  // of the step that ended last
    nb::object sink = nb::none();  // takes the records piece by piece, if it is not None
    size_t piece = 0;  // tasks of a piece at least
    std::map<std::tuple<int, int, int>, i64> dense_memo;  // device, micro-batch, layer -> ns of a whole dense part
    bool deciding = false;  // a decision is being charged
    std::vector<Call> unheard;  // what happened meanwhile, each a call that reports it
    std::vector<int> undecided;  // micro-batches routed meanwhile
    bool over = false;
    Store<Task> tasks;
    Store<Transfer> transfers;

    State();
    ~State();
    int n_mbs() const { return std::max(1, int(micro.size())); }  // 1 before the first step
};

// what an action names
[[noreturn]] void fail(State &state, const std::string &what, const std::string &remedy);
DeviceState *find_device(State &state, PyObject *name);
State *state_of(nb::handle view);
DeviceState *device_of(State &state, PyObject *name, const std::string &what);
i64 unit_of(State &state, i64 layer, i64 expert, const std::string &what, PyObject *bits = Py_None);
i64 first_of(State &state, PyObject *bits, const std::function<std::string()> &what);
PoolState *pool_of(State &state, DeviceState *device, PyObject *name, const std::string &what);
std::string unit_text(i64 layer, i64 expert);
std::string short_repr(State &state, nb::handle value);
std::string unknown_name(State &state, const char *kind, nb::handle name, nb::handle known);

// state
bool gate_input_exists(State &state, int layer);
void when_gate_input(State &state, int layer, Call call);
Task *new_task(State &state, Kind kind, int layer, int mb, int rows, i64 work, Call then = nullptr);
Visit *new_visit(State &state, int layer);
nb::object ask(State &state, nb::handle callable, std::initializer_list<PyObject *> arguments);
Source *source_of(State &state, nb::handle name);

// loop
void run(State &state);

// steps
void next_step(State &state);
void begin_layer(State &state, int layer);
void end_layer(State &state, Visit *visit);
i64 dense_ns(State &state, int layer);
i64 part_ns(State &state, const char *cost, DeviceState *device, i64 rows, int layer = -1);

// delivery
bool knows_step(State &state, Source &source);
void routed(State &state, int mb);
void predicted(State &state, const State::Prediction &prediction);

// lanes
void submit(State &state, Lane *lane, Task *task);
void wake(State &state, Task *task);
void start_next(State &state, Lane *lane);
void done(State &state, Task *task, i64 end);
i64 reading_share(State &state, DeviceState *device, int rows, int width);
i64 expert_ns(State &state, DeviceState *device, int width, int rows);
void take_in_turn(HostThread &thread, Task *task);
void submit_next(State &state, HostThread &thread);
void computed(State &state, HostThread &thread, Task *task);

// links
void enqueue(State &state, LinkState *link, Transfer *transfer);
void dequeue(Transfer *transfer);
void hasten(State &state, Transfer *transfer, i64 urgency);
Transfer *send_message(State &state, const std::vector<LinkState *> &path, i64 n_bytes, i64 urgency, Call then, bool has_cause,
                       Cause cause, int layer, int rows = 0);
bool start_next(State &state, Medium *medium);
void complete(State &state, LinkState *link, i64 now);
void cut_off(State &state);
i64 remaining_ns(State &state, Transfer *transfer);
void hand_over(State &state, nb::object records);
void cross_over(State &state, DeviceState *src, DeviceState *dst, const Crossing &crossing, Call then);
/// Move the activations of some rows from one device to another, hop by hop, then go on: at once if it is one.
template <class Then>
void cross(State &state, DeviceState *src, DeviceState *dst, int layer, int rows, const char *direction, Then &&then) {
    if (src == dst) return then();
    cross_over(state, src, dst, {layer, rows, direction}, std::forward<Then>(then));
}
i64 activation_ns(State &state, LinkState *link, int rows);
i64 activation_bytes(State &state, int rows);
i64 transfer_ns(State &state, LinkState *link, i64 n_bytes);

// paths
const std::vector<LinkState *> &path_between(State &state, DeviceState *src, DeviceState *dst);
const std::vector<DeviceState *> &sources(State &state, DeviceState *device);

// actions
void report(State &state, EventKind kind, const nb::object &event);
nb::object collected(State &state, nb::handle actions);
void apply(State &state, nb::handle actions);
void apply(State &state, const Answer &answer);
using Groups = std::vector<std::pair<std::tuple<int, i64, bool, i64>, Group *>>;
void run_experts(State &state, PyObject *action, Groups &groups);
void run_experts(State &state, DeviceState *device, const int *experts, int n, Groups &groups);
void launch(State &state, Group *group);
void progress(State &state, Group *group);
void fetch(State &state, PyObject *action);
void drop(State &state, PyObject *action);
void move(State &state, PyObject *action);
void send(State &state, PyObject *action);
void fetch_expert(State &state, i64 layer, i64 expert, i64 unit, DeviceState *device, PoolState *pool, i64 urgency, PyObject *source);
void drop_expert(State &state, i64 layer, i64 expert, i64 unit, DeviceState *device);
void move_expert(State &state, i64 layer, i64 expert, i64 unit, DeviceState *device, PoolState *pool);

// stuck
std::string explain(State &state);

/// Items of a list, a tuple or anything that can be iterated.
struct Items {
    nb::object fast;
    explicit Items(PyObject *of) : fast(own(PySequence_Fast(of, "expected a sequence"))) {}
    Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(fast.ptr()); }
    PyObject *operator[](Py_ssize_t i) const { return PySequence_Fast_GET_ITEM(fast.ptr(), i); }
};

}  // namespace moesim
