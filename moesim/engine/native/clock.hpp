// Simulated time: a queue of what ends when, in the order of SimPy's events.
#pragma once

#include "machine.hpp"

#include <queue>

namespace moesim {

struct State;

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
