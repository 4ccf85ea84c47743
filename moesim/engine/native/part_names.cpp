// Parts by the names that `moesim.policies.native_parts` gives them.
#include "assigning.hpp"
#include "composed.hpp"
#include "prefetching.hpp"
#include "ranking.hpp"
#include "replacement.hpp"

namespace moesim {

static std::string text_of(const PartOptions &options, const char *name) { return text(nb::handle(options[name])); }
static bool is(const PartOptions &options, const char *name, const char *value) { return text_of(options, name) == value; }

static i64 number(const PartOptions &options, const char *name) { return as_int(nb::handle(options[name])); }
static bool flag(const PartOptions &options, const char *name) { return truth(nb::handle(options[name]).ptr()); }

std::unique_ptr<Replacement> make_replacement(const PartOptions &options) {
    std::string name = text_of(options, "name");
    auto admitting = [&](auto part) {
        part->unrouted_first = is(options, "victims", "unrouted-first");
        return part;
    };
    if (name == "lru") {
        auto part = admitting(std::make_unique<LRU>());
        part->by_rank = is(options, "use_order", "rank");
        return part;
    }
    if (name == "fifo") return admitting(std::make_unique<FIFO>());
    if (name == "lfu") {
        auto part = admitting(std::make_unique<LFU>());
        part->by_last_use = is(options, "ties", "last-use");
        return part;
    }
    if (name == "random") {
        auto part = admitting(std::make_unique<RandomVictim>());
        part->seed = u64(number(options, "seed"));
        return part;
    }
    if (name == "belady") {
        auto part = admitting(std::make_unique<Belady>());
        nb::object listed(options["uses"]);
        Items units(listed.ptr());
        for (Py_ssize_t i = 0; i < units.size(); ++i) {
            Items steps(units[i]);
            std::vector<i64> &uses = part->uses.emplace_back();
            for (Py_ssize_t at = 0; at < steps.size(); ++at) uses.push_back(as_int(steps[at]));
        }
        return part;
    }
    if (name == "static") return std::make_unique<Static>();
    if (name == "workload-aware") {
        auto part = std::make_unique<WorkloadAware>();
        part->w_size = number(options, "w_size");
        part->u_size = number(options, "u_size");
        part->printed = is(options, "firing", "printed");
        part->only_if_better = flag(options, "only_if_better");
        part->blocking = flag(options, "blocking");
        part->relabel = flag(options, "relabel");
        return part;
    }
    throw std::logic_error("no replacement part: " + name);
}

std::unique_ptr<Assignment> make_assignment(const PartOptions &options) {
    std::string name = text_of(options, "name");
    if (name == "all-gpu") return nullptr;
    if (name == "all-cpu") return std::make_unique<AllCpu>();
    if (name == "resident") return std::make_unique<Resident>();
    if (name == "resident-in-decode") return std::make_unique<ResidentInDecode>();
    if (name == "threshold") return std::make_unique<Threshold>();
    if (name == "fixed-threshold") {
        auto part = std::make_unique<FixedThreshold>();
        part->cpu_ms = nb::cast<double>(options["cpu_ms"]);
        part->load_ms = nb::cast<double>(options["load_ms"]);
        return part;
    }
    if (name == "greedy") {
        auto part = std::make_unique<Greedy>();
        part->shared_in_plan = flag(options, "shared_in_plan");
        return part;
    }
    if (name == "queues") {
        using namespace algorithms;
        auto part = std::make_unique<Queues>();
        part->shared_in_plan = flag(options, "shared_in_plan");
        part->reading.by_completion = is(options, "timeline", "completion");
        if (is(options, "ties", "cpu")) part->reading.order = {CPU, GPU, LINK};
        if (is(options, "ties", "link")) part->reading.order = {LINK, GPU, CPU};
        part->reading.count_compute = flag(options, "count_compute");
        part->reading.overtake = flag(options, "overtake");
        return part;
    }
    throw std::logic_error("no assignment part: " + name);
}

std::unique_ptr<Prefetch> make_prefetch(const PartOptions &options) {
    std::string name = text_of(options, "name");
    if (name == "none") return nullptr;
    auto pooled = [&](auto part) {
        part->size = number(options, "size");
        part->lookahead = number(options, "lookahead");
        part->transient = is(options, "pool", "transient");
        return part;
    };
    if (name == "random") {
        auto part = pooled(std::make_unique<RandomAhead>());
        part->seed = u64(number(options, "seed"));
        return part;
    }
    if (name == "predicted") {
        auto part = pooled(std::make_unique<TopPredicted>());
        part->over_all = is(options, "over", "all");
        part->source = std::make_unique<Source>();
        part->source->name = options["source"];
        part->source->side = is(options, "lane", "side");
        return part;
    }
    throw std::logic_error("no prefetch part: " + name);
}

static DeviceState *device_in(State &state, const nb::dict &described, const char *name) {
    nb::object found(described[name]);
    return found.is_none() ? nullptr : find_device(state, found.ptr());
}

static PoolState *pool_in(DeviceState *device, const nb::dict &described, const char *name) {
    nb::object found(described[name]);
    return found.is_none() ? nullptr : device->memory.pool(found);
}

/// Make what Python describes, and start its parts.
Composed::Composed(State &state, nb::dict described)
    : state(state), gpu(device_in(state, described, "gpu")), cpu(device_in(state, described, "cpu")),
      cache(pool_in(gpu, described, "cache")), staging(pool_in(gpu, described, "staging")),
      load_order(is(described, "load_order", "plan")   ? LoadOrder::plan
                 : is(described, "load_order", "rows") ? LoadOrder::rows
                                                       : LoadOrder::id),
      cache_only(flag(described, "cache_only")), exact(flag(described, "exact")),
      assignment(make_assignment(nb::cast<nb::dict>(described["assignment"]))),
      prefetch(make_prefetch(nb::cast<nb::dict>(described["prefetch"]))),
      replacement(make_replacement(nb::cast<nb::dict>(described["replacement"]))),
      transient{state, gpu, pool_in(gpu, described, "prefetched")} {
    nb::object times(described["load_ns"]), placed(described["residents"]);
    Items of_layer(times.ptr()), residents(placed.ptr());
    Setup setup{state, gpu, cpu, cache, flag(described, "per_layer"), {}, {}};
    for (Py_ssize_t layer = 0; layer < of_layer.size(); ++layer) {
        load_ns.push_back(as_int(of_layer[layer]));
        Items experts(residents[layer]);
        std::vector<int> &listed = setup.residents.emplace_back();
        for (Py_ssize_t i = 0; i < experts.size(); ++i) listed.push_back(int(as_int(experts[i])));
    }
    setup.load_ns = load_ns;
    start(setup);
}

std::unique_ptr<Composed> compose(State &state, nb::handle described) {
    return std::make_unique<Composed>(state, nb::cast<nb::dict>(described));
}

}  // namespace moesim
