// Transfers over directed, serial links (rules 5 and 6).
#include "composed.hpp"

namespace moesim {

// ------------------------------------------------------------------------------------------------------------------ queue

/// Queue a transfer on a link.
void enqueue(State &state, LinkState *link, Transfer *transfer) {
    transfer->link = link;
    auto &queue = link->queue;
    if (queue.empty() || LinkState::before(queue.back(), transfer)) {
        queue.push_back(transfer);
    } else {
        queue.insert(std::upper_bound(queue.begin(), queue.end(), transfer, LinkState::before), transfer);
    }
    if (!link->medium->busy) state.media_to_start.push_back(link->medium);
}

/// Take a transfer that has not started out of its queue.
void dequeue(Transfer *transfer) {
    auto &queue = transfer->link->queue;
    queue.erase(std::find(queue.begin(), queue.end(), transfer));
}

/// Make a transfer more urgent, wherever it is.
void hasten(State &state, Transfer *transfer, i64 urgency) {
    if (urgency >= transfer->urgency) return;
    if (transfer->link->current == transfer) {
        transfer->urgency = urgency;
    } else {
        dequeue(transfer);
        transfer->urgency = urgency;
        enqueue(state, transfer->link, transfer);
    }
}

/// Queue what is no expert; `then` follows its arrival. Activations have rows.
Transfer *send_message(State &state, const std::vector<LinkState *> &path, i64 n_bytes, i64 urgency, Call then, bool has_cause,
                       Cause cause, int layer, int rows) {
    Transfer *message = state.transfers.make(state.fetch_numbers++, -1, layer, -1, n_bytes, &path, urgency, state.now);
    message->has_cause = has_cause;
    message->cause = cause;
    message->rows = rows;
    message->on_arrival = std::move(then);
    enqueue(state, path[0], message);
    return message;
}

static std::string asked(const Transfer *transfer) {
    return "evict(" + unit_text(transfer->layer, transfer->expert) + ", " + text(transfer->dst->name) + ")";
}

/// Make the Fetch with which a policy is asked for a victim.
static nb::object question(State &state, const Transfer *transfer) {
    PyObject *experts = PyTuple_New(1);
    if (!experts) throw nb::python_error();
    PyTuple_SET_ITEM(experts, 0, num(transfer->expert));
    nb::handle bits = transfer->width ? nb::handle(state.weights.widths[transfer->width]) : nb::handle(Py_None);
    return named(state.py.action[FETCH], num(transfer->layer), experts, ref(transfer->dst->name), num(transfer->urgency),
                 ref(transfer->pool->name), ref(Py_None), ref(bits));
}

/// What a policy named to be evicted.
struct Victim {
    i64 layer, expert, first;  // first: unit of its width
};

/// Ask the policy for a victim; false: it names none.
static bool ask_victim(State &state, const Transfer *transfer, nb::handle question, Victim &found) {
    PyObject *arguments[] = {state.policy.ptr(), question.ptr(), state.view.ptr()};
    nb::object victim = own(PyObject_VectorcallMethod(state.py.evict.ptr(), arguments, 3, nullptr));
    if (victim.is_none()) return false;
    try {
        if (PyObject_Size(victim.ptr()) < 0) throw nb::python_error();
        Items items(victim.ptr());
        if (items.size() == 2 || items.size() == 3) {
            found.layer = as_int(items[0]);
            found.expert = as_int(items[1]);
            nb::object of_width = items.size() == 3 ? nb::borrow(items[2]) : nb::none();
            found.first = first_of(state, of_width.ptr(), [&] { return "evict named " + unit_text(found.layer, found.expert); });
            return true;
        }
    } catch (nb::python_error &error) {
        if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_ValueError)) throw;
    }
    fail(state, asked(transfer) + ": expected (layer, expert) or None, got " + short_repr(state, victim),
         "name a resident of the pool, or return None to wait");
}

/// Evict what the policy named, if it may go.
static void evict(State &state, const Transfer *transfer, const Victim &victim) {
    auto [layer, expert, first] = victim;
    PoolState *pool = transfer->pool;
    bool there = 0 <= layer && layer < state.n_layers && 0 <= expert && expert < state.n_experts;
    i64 unit = there ? first + layer * state.n_experts + expert : -1;
    CopyState *copy = transfer->dst->memory.get(unit);
    std::string wrong, remedy;
    if (!copy || transfer->dst->memory.origins[unit].pool != pool) {
        wrong = "not resident in pool '" + text(pool->name) + "'", remedy = "name a resident of the pool that is full";
    } else if (copy->leaves == Leaves::evicted) {
        wrong = "it is leaving already", remedy = "name each victim once, or return None to wait";
    } else if (pool->per_layer && layer != transfer->layer) {
        wrong = "another layer's pool", remedy = "name an expert of layer " + std::to_string(transfer->layer);
    }
    if (!wrong.empty()) fail(state, asked(transfer) + " named " + unit_text(layer, expert) + ": " + wrong, remedy);
    transfer->dst->memory.evict(unit, state.now);
}

/// Ask for victims until the transfer fits; false: it waits for one to be named, or for those named to be idle.
static bool make_room(State &state, Transfer *transfer) {
    nb::object fetch;
    while (transfer->pool->lacks(transfer->layer, transfer->n_bytes)) {
        Victim victim;
        if (state.composed) {
            i64 unit = state.composed->evict(transfer);
            if (unit < 0) return false;
            victim = {unit / state.n_experts, unit % state.n_experts, 0};
        } else {
            if (!fetch) fetch = question(state, transfer);
            if (!ask_victim(state, transfer, fetch, victim)) return false;
        }
        evict(state, transfer, victim);
    }
    return transfer->pool->lands(transfer->layer, transfer->n_bytes);
}

/// The first in (urgency, submission) that can start now; its memory is not yet taken, but there.
/// Victims are asked for on behalf of the head of each urgency class of each link.
static Transfer *next_candidate(State &state, const std::vector<Transfer *> &queue) {
    i64 seen_class = -1;
    std::vector<LinkState *> &seen = state.links_tried;  // links whose head of this class has been tried
    for (Transfer *transfer : queue) {
        LinkState *link = transfer->link;
        if (!transfer->first_chunk || !transfer->dst) return transfer;
        if (transfer->urgency != seen_class) {
            seen_class = transfer->urgency;
            seen.clear();
        }
        bool head = std::find(seen.begin(), seen.end(), link) == seen.end();
        if (head) seen.push_back(link);
        if (transfer->hop + 1 < transfer->path->size()) {  // an intermediate device
            if (transfer->n_bytes <= link->to->memory.spare) return transfer;
        } else if (!transfer->pool || transfer->n_bytes <= transfer->pool->free(transfer->layer)) {
            return transfer;  // of a write-back, the backing copy's place is always there
        } else if (head && make_room(state, transfer)) {
            return transfer;
        }
        if (head) transfer->waited_memory = true;
    }
    return nullptr;
}

// ---------------------------------------------------------------------------------------------------------- start and end

constexpr i64 FOREVER = i64(1) << 60;  // longer than any run may be, and far from what 64 bits cannot count

/// Time of some bytes of weights over a link, asked of the costs once.
i64 transfer_ns(State &state, LinkState *link, i64 n_bytes) {
    if (link->asked_bytes == n_bytes) return link->asked_ns;
    auto found = link->transfer_ns.find(n_bytes);
    if (found == link->transfer_ns.end())
        found = link->transfer_ns.emplace(n_bytes, std::min(as_int(ask(state, attr(state.costs, "transfer_ns"), {ref(link->link), num(n_bytes)})), FOREVER)).first;
    link->asked_bytes = n_bytes;
    return link->asked_ns = found->second;
}

/// Time of activations over a link, asked of the costs once.
i64 activation_ns(State &state, LinkState *link, int rows) {
    auto found = link->activation_ns.find(rows);
    if (found == link->activation_ns.end()) {
        i64 ns = as_int(ask(state, attr(state.costs, "activation_ns"), {ref(link->link), num(rows)}));
        found = link->activation_ns.emplace(rows, ns).first;
    }
    return found->second;
}

/// Bytes of the hidden states of some rows.
i64 activation_bytes(State &state, int rows) {
    auto found = state.activation_bytes.find(rows);
    if (found == state.activation_bytes.end()) {
        i64 n_bytes = as_int(ask(state, attr(state.model, "activation_bytes"), {num(rows)}));
        found = state.activation_bytes.emplace(rows, n_bytes).first;
    }
    return found->second;
}

static void start(State &state, Transfer *transfer) {
    LinkState *link = transfer->link;
    dequeue(transfer);
    if (transfer->first_chunk) {
        transfer->first_chunk = false;
        transfer->started = true;
        if (transfer->dst) {
            if (transfer->hop + 1 < transfer->path->size()) {
                link->to->memory.hold(transfer->n_bytes, state.now);
            } else if (transfer->pool) {
                transfer->dst->memory.reserve(transfer->pool, transfer->layer, transfer->n_bytes, state.now);
            }
        }
    }
    i64 n_bytes = transfer->left, work;
    if (transfer->rows) {  // activations: their own curve, and in one piece
        work = activation_ns(state, link, transfer->rows);
    } else {
        if (state.chunk_bytes) n_bytes = std::min(n_bytes, state.chunk_bytes);
        work = transfer_ns(state, link, n_bytes);
    }
    link->current = transfer;
    link->current_bytes = n_bytes;
    link->start = state.now;
    link->medium->busy = true;
    state.clock.set_off(state, link, work);
}

/// Start the first transfer that can; false if some are queued and none can.
bool start_next(State &state, Medium *medium) {
    if (medium->busy) return true;
    Transfer *next;
    bool none;
    if (medium->links.size() == 1) {
        none = medium->links[0]->queue.empty();
        next = next_candidate(state, medium->links[0]->queue);
    } else {  // one order over all, so that a victim is asked for only if the transfer then starts
        std::vector<Transfer *> queue;
        for (LinkState *link : medium->links) queue.insert(queue.end(), link->queue.begin(), link->queue.end());
        std::sort(queue.begin(), queue.end(), LinkState::before);
        none = queue.empty();
        next = next_candidate(state, queue);
    }
    if (!next) return none;
    start(state, next);
    return true;
}

static Cause cause_of(const Transfer *transfer) {
    if (transfer->unit < 0 && transfer->has_cause) return transfer->cause;
    if (transfer->dst && transfer->dst->backing) return Cause::write_back;
    return transfer->urgency == DEMAND ? Cause::demand : transfer->urgency == PREFETCH ? Cause::prefetch : Cause::update;
}

/// Store and forward: the weights are now at an intermediate device; queue them on the next link.
static void next_hop(State &state, LinkState *link, Transfer *transfer) {
    if (transfer->transit) transfer->transit->memory.hold(-transfer->n_bytes, state.now);
    transfer->transit = transfer->dst ? link->to : nullptr;
    ++transfer->hop;
    transfer->left = transfer->n_bytes;
    transfer->first_chunk = true;
    transfer->waited_memory = false;
    enqueue(state, (*transfer->path)[transfer->hop], transfer);
}

/// Take in the end of what was in flight.
void complete(State &state, LinkState *link, i64 now) {
    link->medium->busy = false;
    state.media_to_start.push_back(link->medium);
    Transfer *transfer = link->current;
    link->current = nullptr;
    i64 n_bytes = link->current_bytes;
    transfer->left -= n_bytes;
    bool last = !transfer->left && transfer->hop + 1 == transfer->path->size();
    state.records.transfers.push_back({link->start, now, n_bytes, transfer->urgency, transfer->submitted, transfer->fetch,
                                       transfer->layer, transfer->expert, std::int16_t(link->index),
                                       std::int16_t(transfer->width), cause_of(transfer), last, transfer->waited_memory});
    if (last) {
        state.arrived.push_back(transfer);
    } else if (transfer->left) {
        enqueue(state, link, transfer);
    } else {
        next_hop(state, link, transfer);
    }
}

/// Count the bytes of what is in flight that have moved: none during the latency, then evenly, rounded down.
static i64 moved(State &state, LinkState *link, const Transfer *transfer) {
    bool rows = transfer->rows > 0;
    i64 n_bytes = link->current_bytes;
    i64 work = rows ? activation_ns(state, link, transfer->rows) : transfer_ns(state, link, n_bytes);
    i64 latency = as_int(ask(state, attr(state.costs, "latency_ns"), {ref(link->link), ref(rows ? Py_True : Py_False)}));
    i128 done = link->done(work, link->start, state.now) - i128(latency) * FULL, whole = i128(work - latency) * FULL;
    return done <= 0 ? 0 : std::min(i64(n_bytes * done / std::max<i128>(1, whole)), n_bytes - 1);
}

/// Record what is under way as the run ends: the time until then, and how many of its bytes have moved.
void cut_off(State &state) {
    for (LinkState &link : state.links)
        if (Transfer *transfer = link.current) {
            i64 n_bytes = moved(state, &link, transfer);
            state.records.transfers.push_back({link.start, state.now, n_bytes, transfer->urgency, transfer->submitted,
                                               transfer->fetch, transfer->layer, transfer->expert, std::int16_t(link.index),
                                               std::int16_t(transfer->width), cause_of(transfer), false, transfer->waited_memory,
                                               link.current_bytes - n_bytes});
        }
}

/// Time to the arrival of a transfer as things stand: what is in flight, then its chunks and hops alone.
i64 remaining_ns(State &state, Transfer *transfer) {
    LinkState *link = transfer->link;
    i64 left = transfer->left, total = 0, chunk = state.chunk_bytes;
    if (link->current == transfer) {
        total = link->end - state.now;
        left -= link->current_bytes;
    }
    for (size_t hop = transfer->hop; hop < transfer->path->size(); ++hop) {
        LinkState *over = (*transfer->path)[hop];
        if (left) {
            i64 full = chunk ? left / chunk : 0, rest = chunk ? left % chunk : left;
            if (full) total += full * transfer_ns(state, over, chunk);
            if (rest || !full) total += transfer_ns(state, over, rest);
        }
        left = transfer->n_bytes;
    }
    return total;
}

// ------------------------------------------------------------------------------------------------------------ activations

static void hop(State &state, const std::vector<LinkState *> &path, size_t i, const Crossing &crossing, Call then) {
    if (i == path.size()) {
        then();
        return;
    }
    if (i + 1 == path.size()) {
        state.clock.send_rows(state, path[i], crossing, std::move(then));
        return;
    }
    Call next = [&state, &path, i, crossing, then = std::move(then)] { hop(state, path, i + 1, crossing, then); };
    state.clock.send_rows(state, path[i], crossing, std::move(next));
}

/// Move activations from one device to another, hop by hop, then go on.
void cross_over(State &state, DeviceState *src, DeviceState *dst, const Crossing &crossing, Call then) {
    hop(state, path_between(state, src, dst), 0, crossing, std::move(then));
}

// ------------------------------------------------------------------------------------------------------------------ paths

/// The links from one device to another.
const std::vector<LinkState *> &path_between(State &state, DeviceState *src, DeviceState *dst) {
    std::vector<LinkState *> &path = state.paths[src->index * state.devices.size() + dst->index];
    if (path.empty()) {
        nb::object found = ask(state, attr(state.costs, "path"), {ref(src->name), ref(dst->name)});
        Items items(found.ptr());
        for (Py_ssize_t i = 0; i < items.size(); ++i) {
            std::string name = text(attr(items[i], "name"));
            for (LinkState &link : state.links)
                if (text(link.name) == name) path.push_back(&link);
        }
    }
    return path;
}

/// Devices from which weights can come to another, nearest first, then by name.
const std::vector<DeviceState *> &sources(State &state, DeviceState *device) {
    auto &known = state.sources[device->index];
    if (known.empty()) {
        nb::object found = ask(state, attr(state.py.texts, "sources"), {ref(state.twin), ref(device->twin)});
        Items items(found.ptr());
        for (Py_ssize_t i = 0; i < items.size(); ++i) known.push_back(find_device(state, items[i]));
    }
    return known;
}

}  // namespace moesim
