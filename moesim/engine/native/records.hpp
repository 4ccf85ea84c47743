// What a run leaves behind, in the order in which it was completed: one flat struct a record.
#pragma once

#include "common.hpp"

#include <unordered_set>

namespace moesim {

enum class Kind : std::uint8_t { expert, attention, dense, shared, embedding, leading, head, predict };
enum class Cause : std::uint8_t { demand, prefetch, update, write_back, message, activation };

inline const char *const DIRECTIONS[] = {"in", "out", "hidden"};

struct TaskRecord {
    i64 start, end, work, submitted, ready;
    int step, layer, mb, expert, rows;
    std::int16_t device, width;  // width 0: the full one
    std::uint8_t side;
    Kind kind;
};

struct TransferRecord {
    i64 start, end, n_bytes, urgency, submitted, fetch;
    int layer, expert;
    std::int16_t link, width;
    Cause cause;
    bool last, waited_memory;
};

struct ActivationRecord {
    i64 start, end, n_bytes, submitted;
    int link, step, layer, rows;
    i64 direction;  // index into DIRECTIONS
};

struct LookupRecord {
    i64 time;
    int step, layer, mb;
    i64 first;  // where its experts, their rows, hits and copies in flight begin
};

struct EvictionRecord {
    i64 time, fetch;
    int layer, expert, pool;  // number of the pool over all devices
    std::int16_t device, width;
    std::uint8_t dropped;
    bool used;
};

struct DecisionRecord {
    i64 start, end;
    int step, layer;
};

struct LayerRecord {
    i64 begin, end;
    int step, layer;
};

struct StepRecord {
    i64 begin, end, step, batch, n_tokens, n_sequences;
    double gate_mass;
    std::uint8_t decode;
};

struct MemoryRecord {
    i64 time, n_bytes;
    int device;
};

struct Records {
    std::vector<TaskRecord> tasks;
    std::vector<TransferRecord> transfers;
    std::vector<ActivationRecord> activations;
    std::vector<LookupRecord> lookups;
    std::vector<int> looked_experts, looked_rows;
    std::vector<std::uint8_t> looked_hits, looked_in_flight;
    std::vector<EvictionRecord> evictions;
    std::vector<DecisionRecord> decisions;
    std::vector<nb::object> inexact;  // few: made when they arise
    std::vector<LayerRecord> layers;
    std::vector<StepRecord> steps;
    std::vector<MemoryRecord> memory;
    std::unordered_set<i64> used_fetches;
};

}  // namespace moesim
