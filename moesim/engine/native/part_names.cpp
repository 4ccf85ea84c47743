// Parts by the names that `moesim.policies.native_parts` gives them.
#include "composed.hpp"
#include "ranking.hpp"
#include "replacement.hpp"

namespace moesim {

static std::string text_of(const PartOptions &options, const char *name) { return text(nb::handle(options[name])); }
static bool is(const PartOptions &options, const char *name, const char *value) { return text_of(options, name) == value; }

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
        part->seed = u64(as_int(nb::handle(options["seed"])));
        return part;
    }
    if (name == "static") return std::make_unique<Static>();
    throw std::logic_error("no replacement part: " + name);
}

std::unique_ptr<Assignment> make_assignment(const PartOptions &options) {
    std::string name = text_of(options, "name");
    if (name == "all-gpu") return nullptr;
    throw std::logic_error("no assignment part: " + name);
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
      cache_only(truth(nb::handle(described["cache_only"]).ptr())),
      assignment(make_assignment(nb::cast<nb::dict>(described["assignment"]))),
      replacement(make_replacement(nb::cast<nb::dict>(described["replacement"]))) {
    nb::object times(described["load_ns"]), placed(described["residents"]);
    Items of_layer(times.ptr()), residents(placed.ptr());
    Setup setup{state, gpu, cpu, cache, truth(nb::handle(described["per_layer"]).ptr()), {}};
    for (Py_ssize_t layer = 0; layer < of_layer.size(); ++layer) {
        load_ns.push_back(as_int(of_layer[layer]));
        Items experts(residents[layer]);
        std::vector<int> &listed = setup.residents.emplace_back();
        for (Py_ssize_t i = 0; i < experts.size(); ++i) listed.push_back(int(as_int(experts[i])));
    }
    start(setup);
}

std::unique_ptr<Composed> compose(State &state, nb::handle described) {
    return std::make_unique<Composed>(state, nb::cast<nb::dict>(described));
}

}  // namespace moesim
