// Parts whose weights or KV cache lie in the memory of another device, and are copied for each use (rule 7).
#pragma once

#include "state.hpp"

namespace moesim {

struct Stream;

/// What of a step is copied together, for the tasks that read it.
struct StreamUse {
    DeviceState *device;
    int layer;
    std::vector<std::string> parts;
};

/// One use of streamed parts in the present step, and its copies.
struct Use {
    StreamUse of;
    Stream *stream;
    int number;  // in the order of its device
    int left;  // tasks that have not read it yet
    int missing = -1;  // copies that have not arrived; -1: not asked for
    std::vector<Transfer *> copies;
    std::vector<Task *> waiting;
};

/// What one device is sent in a step, in order; its buffer holds `depth` uses and the present one.
struct Stream {
    int depth;
    std::vector<std::shared_ptr<Use>> uses;
    int asked = 0;  // uses whose copies have been asked for
    int reached = -1;  // the last use that some task wants to read
    int over = 0;  // uses that all tasks have read
};

struct Streams {
    nb::object twin;  // the Python one, which knows what the KV cache takes
    std::map<std::pair<std::string, int>, DeviceState *> source;
    std::vector<StreamUse> order;
    int depth = 0;
    std::map<std::pair<std::string, int>, std::shared_ptr<Use>> by_part;
    std::deque<std::pair<DeviceState *, Stream>> streams;  // of the present step

    void begin_step(State &state);
    void begin_layer(State &state, int layer);
    bool holds(const std::string &part, int layer) const { return by_part.count({part, layer}) > 0; }
    void read(State &state, Task *task, std::initializer_list<const char *> parts);
    void read_by(State &state, Task *task);

private:
    Use *use_of(const std::string &part, int layer);
    void reach(State &state, Use *use);
    void go_on(State &state, Stream &stream);
    void ask(State &state, const std::shared_ptr<Use> &use, i64 urgency);
    i64 bytes_of(State &state, const std::string &part, int layer);
};

}  // namespace moesim
