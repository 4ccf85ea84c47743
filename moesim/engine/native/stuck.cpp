// Rule 10: say who waits for what.
#include "state.hpp"
#include "streams.hpp"

namespace moesim {

/// Build the message of a deadlock from the state.
std::string explain(State &state) {
    Visit *visit = state.visit;
    int layer = visit ? visit->layer : -1;
    auto bytes = [&](i64 n) { return text(ask(state, attr(state.py.texts, "format_bytes"), {num(n)})); };
    std::vector<std::string> waits;
    for (LinkState &link : state.links)
        for (size_t i = 0; i < link.queue.size() && i < 4; ++i) {
            Transfer *transfer = link.queue[i];
            if (!transfer->pool) {
                waits.push_back("a transfer of " + bytes(transfer->n_bytes) + " waits on " + text(link.name));
                continue;
            }
            std::string fetch = "Fetch(" + unit_text(transfer->layer, transfer->expert) + ", " + text(transfer->dst->name) +
                                ", urgency=" + std::to_string(transfer->urgency) + ") waits for memory ";
            if (transfer->hop + 1 < transfer->path->size()) {
                waits.push_back(fetch + "on " + text(link.to->name) + " on its way (" +
                                bytes(std::max<i64>(0, link.to->memory.spare)) + " claimed by nobody)");
                continue;
            }
            PoolState *pool = transfer->pool;
            int at = pool->at(transfer->layer);
            // Only the head of each urgency class of a link asks; that it was asked for, and waits, is noted.
            std::string asked = transfer->waited_memory ? "evict returned None" : "evict is asked for those before it first";
            waits.push_back(fetch + "in pool '" + text(pool->name) + "' (" + bytes(pool->used[at]) + " of " +
                            bytes(pool->capacity[at]) + " used, " + asked + ")");
        }
    for (DeviceState &device : state.devices) {
        std::vector<Transfer *> pending;
        for (Transfer *transfer : device.pending)
            if (transfer) pending.push_back(transfer);
        std::sort(pending.begin(), pending.end(), [](Transfer *a, Transfer *b) { return a->fetch < b->fetch; });
        for (Transfer *transfer : pending)
            for (auto [task, shown] = std::pair(transfer->waiting, 0); task && shown < 2; task = task->next_waiting, ++shown)
                waits.push_back("Run(" + unit_text(task->layer, task->expert) + ", " + text(device.name) + ") waits for its fetch");
        if (device.main.n_waiting && pending.empty())
            waits.push_back(std::to_string(device.main.n_waiting) + " tasks on " + text(device.name) + " wait for inputs");
    }
    if (visit && visit->routed()) {
        int slots = 0, shown = 0;
        std::string left;
        for (int e = 0; e < state.n_experts; ++e) {
            int rows = count(visit->of(e), visit->words);
            slots += rows;
            if (rows && shown++ < 8) left += (left.empty() ? "" : ", ") + std::to_string(e);
        }
        if (slots)
            waits.push_back("layer " + std::to_string(layer) + " has " + std::to_string(slots) + " unserved slots of experts [" + left +
                            "]: no Run or Skip names them");
    }
    std::string who;
    for (const std::string &one : waits) who += (who.empty() ? "" : "; ") + one;
    std::string when = text(ask(state, attr(state.py.texts, "format_ns"), {num(state.now)}));
    return "t=" + when + ", step " + std::to_string(state.step_index) + ", layer " + std::to_string(layer) +
           ": nothing can happen and work remains: " + (who.empty() ? "no work is queued" : who) + " [policy=" + state.policy_name + "]";
}

}  // namespace moesim
