#include "streams.hpp"

namespace moesim {

Layout::Layout() = default;
Layout::~Layout() = default;

/// List the uses of a step; the first may be copied while nothing of it is reached.
void Streams::begin_step(State &state) {
    streams.clear();
    by_part.clear();
    auto stream_of = [&](DeviceState *device) -> Stream * {
        for (auto &[of, stream] : streams)
            if (of == device) return &stream;
        return &streams.emplace_back(device, Stream{depth, {}}).second;
    };
    for (const StreamUse &one : order) stream_of(one.device);
    for (StreamUse of : order) {
        int tasks = of.layer >= 0 ? state.n_mbs() : 1;
        if (of.parts == std::vector<std::string>{"head"} && !int_attr(state.step, "n_head_rows"))
            continue;  // a chunk that produces no token
        if (state.decoding && of.layer >= 0 && state.layout->core_at[of.layer]) {  // the cache is read where it lies
            of.parts.erase(std::remove(of.parts.begin(), of.parts.end(), "kv"), of.parts.end());
            int reading = 0;
            for (const std::string &part : of.parts) reading += part == "attention" || part == "dense" || part == "shared";
            tasks *= reading;
            if (!tasks) continue;
        }
        Stream *stream = stream_of(of.device);
        auto use = std::make_shared<Use>(Use{of, stream, int(stream->uses.size()), tasks, -1, {}, {}});
        stream->uses.push_back(use);
        for (const std::string &part : of.parts) by_part[{part, of.layer}] = use;
    }
    for (auto &[device, stream] : streams) go_on(state, stream);
}

Use *Streams::use_of(const std::string &part, int layer) {
    auto found = by_part.find({part, layer});
    return found == by_part.end() ? nullptr : found->second.get();
}

/// Let a task wait for what of these parts is streamed; it has not been submitted yet.
void Streams::read(State &state, Task *task, std::initializer_list<const char *> parts) {
    Use *use = nullptr;
    for (const char *part : parts)
        if ((use = use_of(part, task->layer))) break;
    if (!use) return;
    task->reads = use;
    reach(state, use);
    if (use->missing) {
        ++task->waits;
        use->waiting.push_back(task);
    }
}

/// Reach what attention reads: its copies, and those of later uses, come before what the policy asks for.
void Streams::begin_layer(State &state, int layer) {
    Use *use = use_of("attention", layer);
    if (!use) use = use_of("kv", layer);
    if (use) reach(state, use);
}

/// Somebody wants it now: what is queued becomes urgent, and later uses may be copied.
void Streams::reach(State &state, Use *use) {
    Stream *stream = use->stream;
    if (use->number <= stream->reached) return;
    stream->reached = use->number;
    for (Transfer *copy : use->copies)
        if (use->missing && copy && copy->left) hasten(state, copy, DEMAND);
    go_on(state, *stream);
}

/// Note that a task is done; after the last of a use its place in the buffer is free.
void Streams::read_by(State &state, Task *task) {
    Use *use = task->reads;
    if (--use->left) return;
    ++use->stream->over;
    if (std::find(use->of.parts.begin(), use->of.parts.end(), "kv") != use->of.parts.end()) {  // what the step adds to it
        i64 n_bytes = as_int(moesim::ask(state, attr(twin, "leaving_bytes"), {ref(state.model), ref(state.step), num(use->of.layer)}));
        const auto &path = path_between(state, use->of.device, source.at({"kv", use->of.layer}));
        send_message(state, path, n_bytes, UPDATE, [] {}, true, Cause::write_back, use->of.layer);
    }
    go_on(state, *use->stream);
}

void Streams::go_on(State &state, Stream &stream) {
    while (stream.asked < int(stream.uses.size()) && stream.asked <= std::min(stream.reached, stream.over) + stream.depth) {
        auto use = stream.uses[stream.asked++];
        ask(state, use, use->number <= stream.reached ? DEMAND : PREFETCH);
    }
}

/// Queue the copies of a use, each from where it lies.
void Streams::ask(State &state, const std::shared_ptr<Use> &use, i64 urgency) {
    std::vector<std::pair<std::string, i64>> sizes;
    use->missing = 0;
    for (const std::string &part : use->of.parts) {
        sizes.emplace_back(part, bytes_of(state, part, use->of.layer));
        use->missing += sizes.back().second > 0;
    }
    auto arrived = [&state, use](size_t copy) {
        if (copy < use->copies.size()) use->copies[copy] = nullptr;
        if (--use->missing) return;
        std::vector<Task *> waiting = std::move(use->waiting);
        use->waiting.clear();
        for (Task *task : waiting) wake(state, task);
    };
    for (auto &[part, n_bytes] : sizes) {
        if (!n_bytes) continue;
        const auto &path = path_between(state, source.at({part, use->of.layer}), use->of.device);
        size_t number = use->copies.size();
        Transfer *copy = send_message(state, path, n_bytes, urgency, [arrived, number] { arrived(number); }, false, Cause::message,
                                      use->of.layer);
        state.records.used_fetches.push_back(copy->fetch);
        use->copies.push_back(copy);
    }
    if (!use->missing) {  // a cache that is still empty
        use->missing = 1;
        arrived(use->copies.size());
    }
}

/// Bytes of a part, or of what the active requests have in the cache before this step.
i64 Streams::bytes_of(State &state, const std::string &part, int layer) {
    if (part == "kv") return as_int(moesim::ask(state, attr(twin, "context_bytes"), {ref(state.model), ref(state.step), num(layer)}));
    return as_int(moesim::ask(state, attr(state.model, "part_bytes"), {nb::cast(part).release().ptr(), num(layer)}));
}

}  // namespace moesim
