// A run's records as Python has them: lists of named tuples.
#include "state.hpp"
#include "streams.hpp"

#include <nanobind/ndarray.h>

namespace moesim {

static const char *KINDS[] = {"expert", "attention", "dense", "shared", "embedding", "leading", "head", "predict", "host", "draft"};
static const char *CAUSES[] = {"demand", "prefetch", "update", "write-back", "message", "activation"};

namespace {

/// How to copy a field of records, the first of which is at `from`.
struct Field {
    const char *from;
    char *to;
    size_t width;  // of a number of the copy
    void (*copy)(const char *from, size_t stride, char *to, size_t n);
};

template <class From, class To> void copy_field(const char *from, size_t stride, char *to, size_t n) {
    for (size_t i = 0; i < n; ++i) reinterpret_cast<To *>(to)[i] = To(*reinterpret_cast<const From *>(from + i * stride));
}

/// Records that have become columns. They are NumPy's views of the fields, which keep the records. Or `apart`, each is an array:
/// metrics read many columns of a piece, and a record is in the cache when all its fields are copied together.
template <class Record> struct Kept {
    Log<Record> *records;
    nb::object owner;
    bool apart;
    std::vector<Field> fields;
    explicit Kept(Log<Record> &from, bool apart = false) : records(new Log<Record>(std::move(from))), apart(apart) {
        owner = nb::capsule(records, [](void *p) noexcept { delete static_cast<Log<Record> *>(p); });
    }
    /// A field of all records, or what lies `at` it. Apart it is filled in by `copy`; whole numbers are as wide as Python's `column`.
    template <class T, class Of> nb::object operator()(T Of::*field) {
        using Number = std::conditional_t<std::is_enum_v<T>, std::uint8_t, T>;
        const auto *first = records->empty() ? nullptr : reinterpret_cast<const Number *>(&(records->data()->*field));
        if (!apart) return view(first);
        using Wide = std::conditional_t<std::is_same_v<T, int>, i64, Number>;
        auto *to = new Wide[records->size()];
        nb::capsule kept(to, [](void *p) noexcept { delete[] static_cast<Wide *>(p); });
        fields.push_back({reinterpret_cast<const char *>(first), reinterpret_cast<char *>(to), sizeof(Wide), copy_field<Number, Wide>});
        return nb::cast(nb::ndarray<nb::numpy, const Wide>(to, {records->size()}, kept));
    }
    /// Copy some records after the other, each field of them.
    void copy() {
        constexpr size_t SOME = 256;
        for (size_t i = 0; i < records->size(); i += SOME)
            for (Field &field : fields) {
                const size_t n = std::min(SOME, records->size() - i);
                field.copy(field.from + i * sizeof(Record), sizeof(Record), field.to, n);
                field.to += n * field.width;
            }
    }
    nb::object all() const { return view(records->data()); }
    template <class T> nb::object view(const T *first) const {
        static_assert(sizeof(Record) % sizeof(T) == 0);
        size_t shape[] = {records->size()};
        std::int64_t strides[] = {std::int64_t(sizeof(Record) / sizeof(T))};
        return nb::cast(nb::ndarray<nb::numpy, const T>(first, 1, shape, owner, strides));
    }
};

template <size_t n> nb::object words(const char *const (&from)[n]) {
    nb::object made = own(PyTuple_New(n));
    for (size_t i = 0; i < n; ++i) PyTuple_SET_ITEM(made.ptr(), i, PyUnicode_InternFromString(from[i]));
    return made;
}

/// Names of devices or links.
template <class Of> nb::object names_of(const Of &all) {
    nb::list names;
    for (const auto &one : all) names.append(one.name);
    return nb::tuple(names);
}

}  // namespace

/// Tasks by completion, start, and the names of device and lane, once several lanes ran any.
static void order_tasks(State &state) {
    auto &tasks = state.records.tasks;
    int lanes = 0;
    for (DeviceState &device : state.devices)
        for (Lane *lane : {&device.main, &device.side}) lanes += std::exchange(lane->recorded, false);
    if (lanes < 2) return;
    std::vector<std::string> names;
    for (DeviceState &device : state.devices) names.push_back(text(device.name));
    auto before = [&](const TaskRecord &a, const TaskRecord &b) {
        if (a.start != b.start) return a.start < b.start;
        if (a.device != b.device) return names[a.device] < names[b.device];
        return a.side < b.side;
    };
    for (TaskRecord *first = tasks.begin(), *next; first != tasks.end(); first = next) {  // they are there as they were completed
        next = std::find_if(first, tasks.end(), [&](const TaskRecord &one) { return one.end != first->end; });
        if (next - first > 1) std::stable_sort(first, next, before);
    }
}

/// Give Python's records all that has been completed and not been given yet.
void hand_over(State &state, nb::object records) {
    nb::object module = nb::module_::import_("moesim.core.record_table"), coded = attr(module, "Coded"), lists = attr(module, "Lists");
    static const char *const LANES[] = {"main", "side"}, *const REASONS[] = {"evict", "drop"}, *const PHASES[] = {"prefill", "decode", "mixed"};
    Records &from = state.records;
    nb::object devices = names_of(state.devices), links = names_of(state.links), pools = nb::tuple(list_of(state.pool_names));
    nb::list widths = nb::list(list_of(state.weights.widths));
    if (widths.size()) widths[0] = nb::none();  // the full one
    nb::object bits = nb::tuple(widths);
    const bool apart = !state.sink.is_none();  // they are read soon, and not kept
    auto put = [&](const char *name, nb::dict columns, auto &of) {
        of.copy();
        attr(attr(records, name), "fill")(columns);
    };
    order_tasks(state);
    {
        Kept<TaskRecord> of(from.tasks, apart);
        using R = TaskRecord;
        nb::dict to;
        to["start"] = of(&R::start), to["end"] = of(&R::end), to["device"] = coded(of(&R::device), devices);
        to["lane"] = coded(of(&R::side), words(LANES)), to["kind"] = coded(of(&R::kind), words(KINDS));
        to["step"] = of(&R::step), to["layer"] = of(&R::layer), to["mb"] = of(&R::mb), to["expert"] = of(&R::expert);
        to["rows"] = of(&R::rows), to["work"] = of(&R::work), to["submitted"] = of(&R::submitted), to["ready"] = of(&R::ready);
        to["bits"] = coded(of(&R::width), bits);
        put("tasks", to, of);
    }
    {
        Kept<TransferRecord> of(from.transfers, apart);
        using R = TransferRecord;
        nb::dict to;
        to["start"] = of(&R::start), to["end"] = of(&R::end), to["link"] = coded(of(&R::link), links);
        to["cause"] = coded(of(&R::cause), words(CAUSES)), to["layer"] = of(&R::layer);
        to["expert"] = of(&R::expert), to["n_bytes"] = of(&R::n_bytes), to["urgency"] = of(&R::urgency);
        to["submitted"] = of(&R::submitted), to["fetch"] = of(&R::fetch), to["last"] = of(&R::last);
        to["waited_memory"] = of(&R::waited_memory), to["bits"] = coded(of(&R::width), bits);
        to["left"] = of(&R::left);
        put("transfers", to, of);
    }
    {
        Kept<ActivationRecord> of(from.activations, apart);
        using R = ActivationRecord;
        nb::dict to;
        to["start"] = of(&R::start), to["end"] = of(&R::end), to["link"] = coded(of(&R::link), links), to["step"] = of(&R::step);
        to["layer"] = of(&R::layer), to["rows"] = of(&R::rows), to["n_bytes"] = of(&R::n_bytes);
        to["direction"] = coded(of(&R::direction), words(DIRECTIONS)), to["submitted"] = of(&R::submitted);
        put("activations", to, of);
    }
    {
        Log<i64> places;
        for (const LookupRecord &one : from.lookups) places.push_back(one.first);
        places.push_back(i64(from.looked_rows.size()));
        Kept<i64> begin(places);
        Kept<int> active(from.looked_experts), loads(from.looked_rows);
        Kept<std::uint8_t> hits(from.looked_hits), in_flight(from.looked_in_flight);
        Kept<LookupRecord> of(from.lookups, apart);
        using R = LookupRecord;
        nb::dict to;
        to["time"] = of(&R::time), to["step"] = of(&R::step), to["layer"] = of(&R::layer), to["mb"] = of(&R::mb);
        to["active"] = lists(begin.all(), active.all()), to["loads"] = lists(begin.all(), loads.all());
        to["hits"] = lists(begin.all(), hits.all()), to["in_flight"] = lists(begin.all(), in_flight.all());
        put("lookups", to, of);
    }
    {
        Kept<EvictionRecord> of(from.evictions, apart);
        using R = EvictionRecord;
        nb::dict to;
        to["time"] = of(&R::time), to["device"] = coded(of(&R::device), devices), to["pool"] = coded(of(&R::pool), pools);
        to["layer"] = of(&R::layer), to["expert"] = of(&R::expert), to["reason"] = coded(of(&R::dropped), words(REASONS));
        to["used"] = of(&R::used), to["fetch"] = of(&R::fetch), to["bits"] = coded(of(&R::width), bits);
        put("evictions", to, of);
    }
    {
        Kept<DecisionRecord> of(from.decisions, apart);
        using R = DecisionRecord;
        nb::dict to;
        to["start"] = of(&R::start), to["end"] = of(&R::end), to["step"] = of(&R::step), to["layer"] = of(&R::layer);
        put("decisions", to, of);
    }
    {
        Kept<LayerRecord> of(from.layers, apart);
        using R = LayerRecord;
        nb::dict to;
        to["begin"] = of(&R::begin), to["end"] = of(&R::end), to["step"] = of(&R::step), to["layer"] = of(&R::layer);
        put("layers", to, of);
    }
    {
        Kept<StepRecord> of(from.steps, apart);
        using R = StepRecord;
        nb::dict to;
        to["begin"] = of(&R::begin), to["end"] = of(&R::end), to["step"] = of(&R::step);
        to["phase"] = coded(of(&R::phase), words(PHASES)), to["batch"] = of(&R::batch), to["n_tokens"] = of(&R::n_tokens);
        to["n_sequences"] = of(&R::n_sequences), to["gate_mass"] = of(&R::gate_mass);
        put("steps", to, of);
    }
    {
        Kept<MemoryRecord> of(from.memory, apart);
        using R = MemoryRecord;
        nb::dict to;
        to["time"] = of(&R::time), to["device"] = coded(of(&R::device), devices), to["n_bytes"] = of(&R::n_bytes);
        put("memory", to, of);
    }
    nb::list inexact = list_of(from.inexact);
    from.inexact = {};
    attr(attr(records, "inexact"), "extend")(inexact);
    nb::object used = attr(records, "used_fetches");
    for (i64 fetch : std::exchange(from.used_fetches, {}))
        if (PySet_Add(used.ptr(), nb::steal(num(fetch)).ptr())) throw nb::python_error();
}

/// Say what holds for the whole run: its end, and the largest sizes.
void sum_up(State &state, nb::object records) {
    if (state.last_end < 0) throw nb::index_error("list index out of range");
    nb::setattr(records, "makespan_ns", nb::int_(state.last_end));
    nb::dict peaks = nb::cast<nb::dict>(attr(records, "peak_bytes")), pool_peaks = nb::cast<nb::dict>(attr(records, "pool_peak_bytes"));
    for (DeviceState &one : state.devices) {
        peaks[one.name] = one.memory.peak;
        for (auto &pool : one.memory.pools) pool_peaks[nb::make_tuple(one.name, pool->name)] = pool->peak;
    }
}

}  // namespace moesim
