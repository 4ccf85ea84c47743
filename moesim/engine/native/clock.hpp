// Simulated time, and rates of activities that overlap (rules 1 and 9). Work is counted in millionths of a nanosecond at full rate,
// rates in millionths.
#pragma once

#include "common.hpp"

#include <queue>

namespace moesim {

constexpr i64 FULL = 1'000'000;

struct Crossing;
struct Lane;
struct LinkState;
struct State;
struct Task;

/// What does one thing at a time: a lane of a device, or a link.
struct Server {
    int activity = -1;  // what it does at present, if others may slow it down
    i64 end = 0;  // when that ends, as things stand
    i128 left = 0;  // work left at `last`, in millionths of ns
    i64 last = 0;
    i64 rate = FULL;
    i64 share = FULL;  // of its time that reading memory takes, in millionths
    u64 alarm = 0;  // number of the valid alarm
    bool is_link = false;

    /// What is done of its work, which began at `start`, in millionths of ns.
    i128 done(i64 work_ns, i64 start, i64 now) const {
        if (activity < 0) return i128(now - start) * FULL;  // nothing slows it down
        return i128(work_ns) * FULL - left + i128(now - last) * rate;
    }
};

/// All measured pairs, and which contended activities go on at present. After a change of rate the old alarm is passed over.
struct Contention {
    struct Partner {
        int other;
        i64 rate;  // of the activity while the other goes on
    };
    std::vector<std::string> names;
    std::vector<bool> of_link;
    std::vector<std::vector<Partner>> partners;
    std::vector<std::vector<Server *>> active;

    int number(const std::string &activity);
    void begin(State &state, Server *server, int activity, i64 work_ns, i64 share = FULL);
    void on_alarm(State &state, Server *server, u64 alarm);

private:
    void touch(State &state, int activity);
    void set_rate(State &state, Server *server, i64 rate);
    void schedule(State &state, Server *server);
    i64 rate_of(const Server *server) const;
    i64 rate_between(int activity, int other) const;
};

/// A queue of what ends when, in the order of SimPy's events.
struct Clock {
    struct Event {
        i64 time;
        u64 number;  // events of an instant come in the order in which they were made
        Server *server;  // none: something to do after a time
        bool contended;
        bool operator<(const Event &other) const {
            return time != other.time ? time > other.time : number > other.number;
        }
    };
    std::priority_queue<Event> events;
    std::vector<std::pair<u64, Call>> calls;  // by the number of their event; few at a time
    u64 made = 0;

    u64 ring(i64 at, Server *server, bool contended) {
        events.push({at, ++made, server, contended});
        return made;
    }
    void ready(State &state, Task *task);
    void begin(State &state, Lane *lane, Task *task);
    void set_off(State &state, LinkState *link, i64 work);
    void send_rows(State &state, LinkState *link, const Crossing &crossing, Call then);
    void after(State &state, i64 delay, Call call);
    bool next_instant(State &state);
    void over(State &state, Server *server);
};

}  // namespace moesim
