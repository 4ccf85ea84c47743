// Parts by the names that `moesim.policies.native_parts` gives them.
#include "assigning.hpp"
#include "at_issue.hpp"
#include "impact_part.hpp"
#include "prefetching.hpp"
#include "ranking.hpp"
#include "score_parts.hpp"

#include <nanobind/stl/array.h>

namespace moesim {

static std::string text_of(const PartOptions &options, const char *name) { return text(nb::handle(options[name])); }
static bool is(const PartOptions &options, const char *name, const char *value) { return text_of(options, name) == value; }

static i64 number(const PartOptions &options, const char *name) { return as_int(nb::handle(options[name])); }
static double real(const PartOptions &options, const char *name) { return nb::cast<double>(options[name]); }
static bool flag(const PartOptions &options, const char *name) { return truth(nb::handle(options[name]).ptr()); }

static RecentScores scores_of(const PartOptions &options) {
    nb::object p(options["p"]);
    return {real(options, "alpha"), p.is_none() ? 0 : as_int(p), is(options, "tokens", "first"), is(options, "credit", "by-id")};
}

static algorithms::Reading reading_of(const PartOptions &options) {
    using namespace algorithms;
    Reading reading;
    reading.by_completion = is(options, "timeline", "completion");
    if (is(options, "ties", "cpu")) reading.order = {CPU, GPU, LINK};
    if (is(options, "ties", "link")) reading.order = {LINK, GPU, CPU};
    reading.count_compute = flag(options, "count_compute");
    reading.overtake = flag(options, "overtake");
    return reading;
}

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
    if (name == "mrs") {
        auto part = admitting(std::make_unique<MRS>());
        part->by_rank = is(options, "use_order", "rank");
        part->recent = scores_of(options);
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
        part->cpu_ms = real(options, "cpu_ms");
        part->load_ms = real(options, "load_ms");
        return part;
    }
    if (name == "greedy") {
        auto part = std::make_unique<Greedy>();
        part->shared_in_plan = flag(options, "shared_in_plan");
        return part;
    }
    if (name == "beam") {
        auto part = std::make_unique<Beam>();
        part->width = number(options, "width");
        return part;
    }
    if (name == "hss") {
        auto part = std::make_unique<TwoEnded>();
        part->counts_issued = is(options, "cached_from", "issue");
        part->split_all = is(options, "multi_row", "cpu-and-gpu");
        nb::object times(options["constants"]);
        if (!times.is_none()) {
            auto [transfer, gpu, cpu, gpu_first, cpu_first] = nb::cast<std::array<double, 5>>(times);
            part->constants = {transfer, {gpu, 0}, {0, cpu}, true, gpu_first, cpu_first};
        }
        return part;
    }
    if (name == "queues") {
        auto part = std::make_unique<Queues>();
        part->shared_in_plan = flag(options, "shared_in_plan");
        part->reading = reading_of(options);
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
        part->source = options["source"];
        part->side = is(options, "lane", "side");
        part->ask_nearer = is(options, "nearer", "ask");
        return part;
    }
    if (name == "mrs-score") {
        auto part = std::make_unique<MRSScore>();
        part->size = number(options, "size");
        part->over_all = is(options, "over", "all");
        part->recent = scores_of(options);
        return part;
    }
    if (name == "impact-driven") {
        using algorithms::Budget;
        auto part = std::make_unique<ImpactDriven>();
        nb::object listed(options["sources"]);
        Items sources(listed.ptr());
        for (Py_ssize_t i = 0; i < sources.size(); ++i) part->sources.push_back(nb::borrow(sources[i]));
        part->side = is(options, "lane", "side");
        part->budget = is(options, "budget", "ends") ? Budget::ENDS : is(options, "budget", "begins") ? Budget::BEGINS : Budget::NONE;
        part->candidates = number(options, "candidates");
        part->reading = reading_of(options);
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
    nb::dict options = nb::cast<nb::dict>(described);
    if (options.contains("at_issue")) return std::make_unique<AtIssue>(state, options);
    return std::make_unique<Composed>(state, options);
}

}  // namespace moesim
