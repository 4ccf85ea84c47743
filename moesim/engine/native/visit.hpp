// The present visit of a layer: which slots are served, and what is still under way (rule 3, serving).
#pragma once

#include "rows.hpp"

namespace moesim {

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
    int step, layer;
    i64 base;  // unit of its expert 0
    int k;
    int mbs_left;  // micro-batches not yet routed
    int n_experts;
    int words;  // of a set of rows of the step
    i64 begin = -1;  // not begun: only early Runs refer to it
    int routed_rows = 0;  // rows of the micro-batches routed so far
    Rows unserved;  // of each expert, the rows routed to it that no Run has taken; empty before the first routing
    std::vector<nb::object> experts, weights;  // per micro-batch (n, k)
    std::vector<Early> early;
    std::vector<Early> substitutes;  // Runs for rows that were not routed to their expert: served last
    std::vector<Inexact> inexact;
    i64 open;  // what keeps the layer open: micro-batches to route, slots to serve, tasks and crossings to end

    Visit(int step, int layer, i64 base, int k, int mbs, int n_experts, int words)
        : step(step), layer(layer), base(base), k(k), mbs_left(mbs), n_experts(n_experts), words(words), open(mbs) {}

    void hold() { ++open; }
    void let_go() { --open; }
    u64 *of(int expert) { return unserved.data() + size_t(expert) * words; }
    bool routed() const { return !unserved.empty(); }
    bool has_unserved(i64 expert) const;

    void route(nb::handle ids, nb::handle gate_weights, const std::vector<int> &active, int n_rows);
    int take(int expert, Rows *into);
    void serve(const Early &run);
    void serve_early();
    bool serve_substitutes(int &expert, int &row);

private:
    void close(int expert, const Rows &rows, int kind);
};

}  // namespace moesim
