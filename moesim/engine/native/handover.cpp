// A run's records as Python has them: lists of named tuples.
#include "state.hpp"
#include "streams.hpp"

namespace moesim {

static const char *KINDS[] = {"expert", "attention", "dense", "shared", "embedding", "leading", "head", "predict"};
static const char *CAUSES[] = {"demand", "prefetch", "update", "write-back", "message", "activation"};

namespace {

/// Texts that occur again and again, made once.
struct Texts {
    std::vector<nb::object> made;
    template <size_t n> explicit Texts(const char *(&words)[n]) {
        for (const char *word : words) made.push_back(nb::steal(PyUnicode_InternFromString(word)));
    }
    PyObject *operator[](size_t i) const { return ref(made[i]); }
};

/// Append a record for each of a vector to a list of Python's records.
template <class Record, class Make> void fill(nb::handle records, const char *name, std::vector<Record> &from, Make make) {
    nb::object list = attr(records, name);
    for (Record &one : from) {
        nb::object made = make(one);
        if (PyList_Append(list.ptr(), made.ptr())) throw nb::python_error();
    }
    from = {};
}

PyObject *flag(bool value) { return ref(value ? Py_True : Py_False); }

}  // namespace

/// Tasks by completion, start, and the names of device and lane, once several lanes ran any.
static void order_tasks(State &state) {
    auto &tasks = state.records.tasks;
    auto lane = [](const TaskRecord &one) { return std::pair(one.device, one.side); };
    bool several = std::any_of(tasks.begin(), tasks.end(), [&](auto &one) { return lane(one) != lane(tasks[0]); });
    if (!several) return;
    std::vector<std::string> names;
    for (DeviceState &device : state.devices) names.push_back(text(device.name));
    std::stable_sort(tasks.begin(), tasks.end(), [&](const TaskRecord &a, const TaskRecord &b) {
        if (a.end != b.end) return a.end < b.end;
        if (a.start != b.start) return a.start < b.start;
        if (a.device != b.device) return names[a.device] < names[b.device];
        return a.side < b.side;
    });
}

/// Fill in Python's records.
void hand_over(State &state, nb::object records) {
    nb::object module = nb::module_::import_("moesim.records");
    auto type = [&](const char *name) { return reinterpret_cast<PyTypeObject *>(attr(module, name).ptr()); };  // the module keeps it
    Records &from = state.records;
    Texts kinds(KINDS), causes(CAUSES);
    nb::object main = nb::cast("main"), side = nb::cast("side"), evict = nb::cast("evict"), dropped = nb::cast("drop");
    auto device = [&](int index) { return ref(state.devices[index].name); };
    auto link = [&](int index) { return ref(state.links[index].name); };
    auto bits = [&](int width) { return width ? ref(state.weights.widths[width]) : ref(Py_None); };
    order_tasks(state);
    PyTypeObject *of = type("TaskRecord");
    fill(records, "tasks", from.tasks, [&](TaskRecord &r) {
        return named(of, num(r.start), num(r.end), device(r.device), ref(r.side ? side : main), kinds[size_t(r.kind)], num(r.step),
                     num(r.layer), num(r.mb), num(r.expert), num(r.rows), num(r.work), num(r.submitted), num(r.ready),
                     bits(r.width));
    });
    of = type("TransferRecord");
    fill(records, "transfers", from.transfers, [&](TransferRecord &r) {
        return named(of, num(r.start), num(r.end), link(r.link), causes[size_t(r.cause)], num(r.layer), num(r.expert),
                     num(r.n_bytes), num(r.urgency), num(r.submitted), num(r.fetch), flag(r.last), flag(r.waited_memory),
                     bits(r.width));
    });
    of = type("ActivationRecord");
    fill(records, "activations", from.activations, [&](ActivationRecord &r) {
        return named(of, num(r.start), num(r.end), link(r.link), num(r.step), num(r.layer), num(r.rows), num(r.n_bytes),
                     PyUnicode_InternFromString(r.direction), num(r.submitted));
    });
    of = type("LookupRecord");
    fill(records, "lookups", from.lookups, [&](LookupRecord &r) {
        auto tuple_of = [&](const auto &values) {
            PyObject *made = PyTuple_New(r.n);
            if (!made) throw nb::python_error();
            for (int i = 0; i < r.n; ++i) PyTuple_SET_ITEM(made, i, num(values[r.first + i]));
            return made;
        };
        return named(of, num(r.time), num(r.step), num(r.layer), num(r.mb), ref(r.active), tuple_of(from.looked_rows),
                     tuple_of(from.looked_hits), tuple_of(from.looked_in_flight));
    });
    of = type("EvictionRecord");
    fill(records, "evictions", from.evictions, [&](EvictionRecord &r) {
        return named(of, num(r.time), device(r.device), ref(state.pool_names[r.pool]), num(r.layer), num(r.expert),
                     ref(r.dropped ? dropped : evict), flag(r.used), num(r.fetch), bits(r.width));
    });
    of = type("DecisionRecord");
    fill(records, "decisions", from.decisions,
         [&](DecisionRecord &r) { return named(of, num(r.start), num(r.end), num(r.step), num(r.layer)); });
    of = type("LayerRecord");
    fill(records, "layers", from.layers,
         [&](LayerRecord &r) { return named(of, num(r.begin), num(r.end), num(r.step), num(r.layer)); });
    of = type("MemoryRecord");
    fill(records, "memory", from.memory, [&](MemoryRecord &r) { return named(of, num(r.time), device(r.device), num(r.n_bytes)); });
    auto same = [](nb::object &one) { return one; };
    i64 makespan = from.steps.empty() ? -1 : as_int(PyTuple_GET_ITEM(from.steps.back().ptr(), 1));
    fill(records, "inexact", from.inexact, same);
    fill(records, "steps", from.steps, same);
    nb::object used = attr(records, "used_fetches");
    for (i64 fetch : from.used_fetches)
        if (PySet_Add(used.ptr(), nb::steal(num(fetch)).ptr())) throw nb::python_error();
    if (makespan < 0) throw nb::index_error("list index out of range");
    nb::setattr(records, "makespan_ns", nb::int_(makespan));
    nb::dict peaks = nb::cast<nb::dict>(attr(records, "peak_bytes")), pool_peaks = nb::cast<nb::dict>(attr(records, "pool_peak_bytes"));
    for (DeviceState &one : state.devices) {
        peaks[one.name] = one.memory.peak;
        for (auto &pool : one.memory.pools) pool_peaks[nb::make_tuple(one.name, pool->name)] = pool->peak;
    }
}

}  // namespace moesim
