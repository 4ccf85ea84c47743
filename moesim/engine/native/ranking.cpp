#include "ranking.hpp"

namespace moesim {

void Ranked::start(const Setup &setup) {
    size_t units = size_t(setup.state.n_layers) * setup.state.n_experts;
    orders.assign(setup.state.n_layers, {});
    ranks.assign(units, {});
    in_order.assign(units, false);
    last.assign(units, 0);
    n_uses = 0;
    Admitting::start(setup);
}

void Ranked::used(const Routing &routing) {
    Admitting::used(routing);
    if (routing.n_rows == 1) {
        ranked(routing, in_use_order);
    } else {
        in_use_order = routing.active;
    }
    for (int expert : in_use_order) last[unit(routing.layer, expert)] = ++n_uses;
    renew(routing.layer, routing.active);
}

void Ranked::inserted(int layer, const std::vector<int> &experts) {
    Admitting::inserted(layer, experts);
    for (int expert : experts)
        if (!visit.has(unit(layer, expert))) last[unit(layer, expert)] = ++n_uses;
    renew(layer, experts);
}

i64 Ranked::victim(int layer) {
    int at = pool(layer);
    Order &order = orders[at];
    if (!order.made) {
        for (i64 one : members.of(at)) {
            ranks[one] = rank(one);
            in_order[one] = true;
            order.members.emplace_back(ranks[one], one);
        }
        std::sort(order.members.begin(), order.members.end());
        order.made = true;
    }
    i64 found = first_resident(order.members.begin(), order.members.end());
    if (found >= 0) {
        order.members.erase(order.place_of(ranks[found], found));
        in_order[found] = false;
        members.erase(found);
    }
    return found;
}

void Ranked::renew(int layer, const std::vector<int> &experts) {
    Order &order = orders[pool(layer)];
    if (!order.made) return;
    for (int expert : experts) {
        i64 one = unit(layer, expert);
        if (!members.has(one)) continue;
        if (in_order[one]) order.members.erase(order.place_of(ranks[one], one));
        ranks[one] = rank(one);
        order.members.insert(order.place_of(ranks[one], one), std::pair(ranks[one], one));
        in_order[one] = true;
    }
}

void LFU::start(const Setup &setup) {
    counts.assign(size_t(setup.state.n_layers) * setup.state.n_experts, 0);
    Ranked::start(setup);
}

/// Count one visit for each active expert.
void LFU::used(const Routing &routing) {
    for (int expert : routing.active) ++counts[unit(routing.layer, expert)];
    Ranked::used(routing);
}

/// Begin before the first step.
void Belady::start(const Setup &setup) {
    n_experts = setup.state.n_experts;
    now = {-1, -1};
    Ranked::start(setup);
}

/// Remember the present step and layer.
void Belady::used(const Routing &routing) {
    now = {routing.step, routing.layer};
    Ranked::used(routing);
}

Ranked::Rank Belady::rank(i64 unit) const {
    constexpr i64 NEVER = i64(1) << 62;
    auto [step, layer] = now;
    i64 of_layer = unit / n_experts;
    // A layer that is still to come in this step may use it in this very step.
    i64 after = of_layer <= layer ? step : step - 1;
    auto next = std::upper_bound(uses[unit].begin(), uses[unit].end(), after);
    return {next == uses[unit].end() ? -NEVER : -*next, -of_layer, last[unit]};
}

}  // namespace moesim
