#include "state.hpp"

namespace moesim {

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
