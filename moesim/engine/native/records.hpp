// What a run leaves behind, in the order in which it was completed: one flat struct a record.
#pragma once

#include "common.hpp"

#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace moesim {

enum class Kind : std::uint8_t { expert, attention, dense, shared, embedding, leading, head, predict, host, draft };
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
    i64 left = 0;  // bytes that had not moved when the run ended
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
    std::uint8_t phase;  // as in PHASES
};

struct MemoryRecord {
    i64 time, n_bytes;
    int device;
};

/// Let the system map memory that is about to be written in large pages, of which it then has to clear few.
inline void in_large_pages([[maybe_unused]] void *memory, [[maybe_unused]] size_t n_bytes) {
#ifdef MADV_HUGEPAGE
    constexpr std::uintptr_t page = 4096;
    auto first = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) / page * page;
    if (n_bytes >= size_t(4) << 20) madvise(reinterpret_cast<void *>(first), n_bytes - page, MADV_HUGEPAGE);
#endif
}

/// What is written down one after another. Room that is never written costs nothing, so there is soon a lot of it.
template <class T> class Log {
    static_assert(std::is_trivially_copyable_v<T>);
    T *first = nullptr;
    size_t n = 0, room = 0;

    void grow() {
        size_t more = room ? 4 * room : 64;
        void *found = std::realloc(first, more * sizeof(T));
        if (!found) throw std::bad_alloc();
        first = static_cast<T *>(found), room = more;
        in_large_pages(first, more * sizeof(T));
    }

public:
    Log() = default;
    Log(Log &&other) noexcept { swap(other); }
    Log &operator=(Log &&other) noexcept {
        swap(other);
        return *this;
    }
    ~Log() { std::free(first); }

    void push_back(const T &one) {
        if (n == room) grow();
        first[n++] = one;
    }
    size_t size() const { return n; }
    bool empty() const { return !n; }
    const T *data() const { return first; }
    T *begin() const { return first; }
    T *end() const { return first + n; }

private:
    void swap(Log &other) {
        std::swap(first, other.first);
        std::swap(n, other.n);
        std::swap(room, other.room);
    }
};

struct Records {
    Log<TaskRecord> tasks;
    Log<TransferRecord> transfers;
    Log<ActivationRecord> activations;
    Log<LookupRecord> lookups;
    Log<int> looked_experts, looked_rows;
    Log<std::uint8_t> looked_hits, looked_in_flight;
    Log<EvictionRecord> evictions;
    Log<DecisionRecord> decisions;
    std::vector<nb::object> inexact;  // few: made when they arise
    Log<LayerRecord> layers;
    Log<StepRecord> steps;
    Log<MemoryRecord> memory;
    Log<i64> used_fetches;  // each once
};

}  // namespace moesim
