// The present visit of a layer: which slots are served, and what is still under way (rule 3, serving).
#pragma once

#include "common.hpp"

namespace moesim {

// Rows of a step as bits: bit r is row r. All sets of a step have as many words as its rows need.
using Rows = std::vector<u64>;

inline int count(const u64 *bits, int words) {
    int n = 0;
    for (int i = 0; i < words; ++i) n += std::popcount(bits[i]);
    return n;
}
inline int count(const Rows &rows) { return count(rows.data(), int(rows.size())); }

/// One more than the largest row; 0 of none.
inline int length(const Rows &rows) {
    for (int i = int(rows.size()); i-- > 0;)
        if (rows[i]) return 64 * i + 64 - std::countl_zero(rows[i]);
    return 0;
}
inline bool any(const Rows &rows) { return length(rows) > 0; }
inline void set(Rows &rows, i64 row) { rows[row >> 6] |= u64(1) << (row & 63); }

inline std::vector<int> rows_of(const u64 *bits, int words) {
    std::vector<int> found;
    for (int i = 0; i < words; ++i)
        for (u64 left = bits[i]; left; left &= left - 1) found.push_back(64 * i + std::countr_zero(left));
    return found;
}
inline std::vector<int> rows_of(const Rows &rows) { return rows_of(rows.data(), int(rows.size())); }

enum Served { FRESH = 1, STALE, SUBSTITUTED, SUBSTITUTED_STALE, SKIPPED, LATE, REDUCED };

/// A Run that was issued before its rows were routed, or for rows that were not routed to its expert.
struct Early {
    int expert;
    Rows rows;
    int kind;
    bool stale;
};

struct Inexact {
    int kind;
    int expert;  // whose slots were served that way
    Rows rows;
};

/// One visit of a layer.
struct Visit {
    int step = -1, layer;
    i64 base;  // unit of its expert 0
    int k;
    int mbs_left = 0;  // micro-batches not yet routed
    int n_experts;
    int words = 1;  // of a set of rows of the step
    i64 begin = -1;  // not begun: only early Runs refer to it
    int routed_rows = 0;  // rows of the micro-batches routed so far
    Rows unserved;  // of each expert, the rows routed to it that no Run has taken; empty before the first routing
    std::vector<Early> early;
    std::vector<Early> substitutes;  // Runs for rows that were not routed to their expert: served last
    std::vector<Inexact> inexact;
    i64 open;  // what keeps the layer open: micro-batches to route, slots to serve, tasks and crossings to end

    Visit(int layer, i64 base, int k, int n_experts) : layer(layer), base(base), k(k), n_experts(n_experts) {}
    void begin_anew(int in_step, int mbs, int words_of_step);

    void hold() { ++open; }
    void let_go() { --open; }
    u64 *of(int expert) { return unserved.data() + size_t(expert) * words; }
    bool routed() const { return !unserved.empty(); }
    bool has_unserved(i64 expert) const;

    void route(const std::vector<int> &ids, const std::vector<int> &active, int n_rows);
    int take(int expert, Rows *into);
    void serve(const Early &run);
    void serve_early();
    bool serve_substitutes(const std::vector<const Table *> &ids, int &expert, int &row);

private:
    void close(int expert, const Rows &rows, int kind);
};

}  // namespace moesim
