#include "state.hpp"

#include <algorithm>
#include <string_view>

namespace moesim {

/// Queue a task that lacks nothing any more.
void Clock::ready(State &state, Task *task) {
    Lane *lane = task->lane;
    lane->push(task);
    if (!lane->task) state.lanes_to_start.push_back(lane);
}

/// Be busy with a task.
void Clock::begin(State &state, Lane *lane, Task *task) {
    if (lane->plain) {
        ring(state.now + task->work, lane, false);
        return;
    }
    if (task->unit >= 0) {
        i64 share = reading_share(state, lane->device, task->rows, task->width);
        state.contention.begin(state, lane, lane->expert_activity, task->work, share);
    } else {
        state.contention.begin(state, lane, lane->dense_activity, task->work);
    }
}

/// Be busy with some bytes of a transfer.
void Clock::set_off(State &state, LinkState *link, i64 work) {
    if (link->plain) {
        link->end = state.now + work;
        ring(link->end, link, false);
    } else {
        state.contention.begin(state, link, link->activity_number, work);
    }
}

/// A lane or a link has done what it did.
void Clock::over(State &state, Server *server) {
    if (server->is_link) {
        complete(state, static_cast<LinkState *>(server), state.now);
        return;
    }
    Lane *lane = static_cast<Lane *>(server);
    Task *task = lane->task;
    lane->task = nullptr;
    if (!lane->queue.empty()) state.lanes_to_start.push_back(lane);
    done(state, task, state.now);
}

static i64 direction_of(const Crossing &crossing) {
    return std::find(std::begin(DIRECTIONS), std::end(DIRECTIONS), std::string_view(crossing.direction)) - std::begin(DIRECTIONS);
}

/// Move activations on the link's control lane, next to the weights, or among them if the profile says so.
void Clock::send_rows(State &state, LinkState *link, const Crossing &crossing, Call then) {
    i64 n_bytes = activation_bytes(state, crossing.rows);
    if (link->shared) {
        send_message(state, state.alone[link->index], n_bytes, DEMAND, std::move(then), true, Cause::activation, crossing.layer,
                     crossing.rows);
        return;
    }
    i64 start = std::max(link->control_free, state.now);
    i64 end = link->control_free = start + activation_ns(state, link, crossing.rows);
    state.records.activations.push_back({start, end, n_bytes, state.now, link->index, state.step_index, crossing.layer,
                                         crossing.rows, direction_of(crossing)});
    after(state, end - state.now, std::move(then));
}

/// Do something after a time, among the completions of that instant.
void Clock::after(State &state, i64 delay, Call call) {
    calls.emplace_back(ring(state.now + delay, nullptr, false), std::move(call));
}

/// Step through all events of the next instant; false if there is none.
bool Clock::next_instant(State &state) {
    if (events.empty()) return false;
    state.now = events.top().time;
    while (!events.empty() && events.top().time == state.now) {
        Event event = events.top();
        events.pop();
        if (event.contended) {
            state.contention.on_alarm(state, event.server, event.number);
        } else if (event.server) {
            over(state, event.server);
        } else {
            auto due = std::find_if(calls.begin(), calls.end(), [&](auto &one) { return one.first == event.number; });
            state.deferred.push_back(std::move(due->second));
            *due = std::move(calls.back());
            calls.pop_back();
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------- contention

/// Number an activity by name.
int Contention::number(const std::string &activity) {
    for (size_t i = 0; i < names.size(); ++i)
        if (names[i] == activity) return int(i);
    names.push_back(activity);
    of_link.push_back(false);
    partners.emplace_back();
    active.emplace_back();
    return int(names.size()) - 1;
}

/// Start an activity that takes `work_ns` alone, `share` millionths of it to read memory.
void Contention::begin(State &state, Server *server, int activity, i64 work_ns, i64 share) {
    server->activity = activity;
    server->share = share;
    server->rate = FULL;
    server->left = i128(work_ns) * FULL;
    server->last = state.now;
    if (partners[activity].empty()) {
        schedule(state, server);
        return;
    }
    server->rate = rate_of(server);
    schedule(state, server);
    active[activity].push_back(server);
    touch(state, activity);
}

void Contention::on_alarm(State &state, Server *server, u64 alarm) {
    if (alarm != server->alarm) return;  // its end has moved since
    int activity = server->activity;
    server->activity = -1;
    if (!partners[activity].empty()) {
        auto &there = active[activity];
        there.erase(std::find(there.begin(), there.end(), server));
        touch(state, activity);
    }
    state.clock.over(state, server);
}

void Contention::touch(State &state, int activity) {
    for (const Partner &partner : partners[activity])
        for (Server *server : active[partner.other]) set_rate(state, server, rate_of(server));
}

void Contention::set_rate(State &state, Server *server, i64 rate) {
    if (rate == server->rate) return;
    server->left -= i128(state.now - server->last) * server->rate;
    server->last = state.now;
    server->rate = rate;
    if (server->left > 0) schedule(state, server);  // else its end is due at this very instant
}

void Contention::schedule(State &state, Server *server) {
    i64 end = server->last + i64((server->left + server->rate - 1) / server->rate);
    server->end = end;
    server->alarm = state.clock.ring(end, server, true);
}

i64 Contention::rate_between(int activity, int other) const {
    for (const Partner &partner : partners[activity])
        if (partner.other == other) return partner.rate;
    return FULL;
}

/// The smallest rate that the other activities leave a server.
i64 Contention::rate_of(const Server *server) const {
    i64 rate = FULL;
    int activity = server->activity;
    for (const Partner &partner : partners[activity]) {
        if (partner.rate >= rate || active[partner.other].empty()) continue;
        if (of_link[partner.other]) {
            rate = std::min(rate, partner.rate * FULL / server->share);
        } else if (of_link[activity]) {
            i64 reading = rate_between(partner.other, activity);  // what of its full rate a partner that only reads keeps
            i64 most = 0;
            for (const Server *one : active[partner.other]) most = std::max(most, one->share);
            i64 drawn = std::min(reading, most);
            rate = std::min(rate, FULL - (FULL - partner.rate) * drawn / reading);
        } else {
            rate = partner.rate;
        }
    }
    return rate;
}

}  // namespace moesim
