#include "visit.hpp"

#include "table.hpp"

#include <memory>

namespace moesim {

bool Visit::has_unserved(i64 expert) const {
    if (expert < 0 || expert >= n_experts || !routed()) return false;
    return count(unserved.data() + size_t(expert) * words, words) > 0;
}

/// Take in one micro-batch's routing: `ids` (n, k), and which experts have rows.
void Visit::route(nb::handle ids, nb::handle gate_weights, const std::vector<int> &active, int n_rows) {
    --mbs_left;
    open += i64(n_rows) * k - 1;
    if (!routed()) unserved.assign(size_t(n_experts) * words, 0);
    if (n_rows == 1) {
        for (int e : active) of(e)[routed_rows >> 6] |= u64(1) << (routed_rows & 63);
    } else {
        Table table(ids);
        for (i64 r = 0; r < n_rows; ++r) {
            i64 row = routed_rows + r;
            for (int slot = 0; slot < k; ++slot) of(int(table(r, slot)))[row >> 6] |= u64(1) << (row & 63);
        }
    }
    experts.push_back(nb::borrow(ids));
    weights.push_back(nb::borrow(gate_weights));
    routed_rows += n_rows;
}

/// Serve all rows routed to an expert that no Run has taken, hold the layer open for their task, and count them.
int Visit::take(int expert, Rows *into) {
    u64 *bits = of(expert);
    int n = 0;
    for (int i = 0; i < words; ++i) {
        n += std::popcount(bits[i]);
        if (into) (*into)[i] |= bits[i];
        bits[i] = 0;
    }
    open += 1 - n;
    return n;
}

/// Serve the slots of an expert for rows; rows not routed to it wait for `serve_substitutes`.
void Visit::serve(const Early &run) {
    Rows here(words, 0), others(words, 0);
    bool all = true;
    for (int i = 0; i < words; ++i) {
        here[i] = of(run.expert)[i] & run.rows[i];
        others[i] = here[i] ^ run.rows[i];
        all = all && !others[i];
    }
    close(run.expert, here, run.kind);
    if (!all) substitutes.push_back({run.expert, others, run.stale ? SUBSTITUTED_STALE : SUBSTITUTED, run.stale});
    open -= count(run.rows);
}

void Visit::close(int expert, const Rows &rows, int kind) {
    for (int i = 0; i < words; ++i) of(expert)[i] ^= rows[i];
    if (kind != FRESH && any(rows)) inexact.push_back({kind, expert, rows});
}

/// Serve the Runs that were issued before the layer was routed, where they match.
void Visit::serve_early() {
    for (const Early &run : early) serve(run);
    early.clear();
}

/// Give each Run of an expert that was not routed for a row that row's next unserved slot, in rank order.
/// False if there is none left: for which expert and row.
bool Visit::serve_substitutes(int &expert, int &row) {
    if (substitutes.empty()) return true;
    std::vector<std::unique_ptr<Table>> tables;
    std::vector<i64> firsts;
    i64 first = 0;
    for (nb::object &ids : experts) {
        tables.push_back(std::make_unique<Table>(ids));
        firsts.push_back(first);
        first += tables.back()->buffer.shape[0];
    }
    for (const Early &run : substitutes) {
        for (int r : rows_of(run.rows)) {
            size_t mb = firsts.size() - 1;
            while (firsts[mb] > r) --mb;
            int replaced = -1;
            for (int slot = 0; slot < k && replaced < 0; ++slot) {
                int e = int((*tables[mb])(r - firsts[mb], slot));
                if (of(e)[r >> 6] >> (r & 63) & 1) replaced = e;
            }
            if (replaced < 0) {
                expert = run.expert;
                row = r;
                return false;
            }
            Rows one(words, 0);
            set(one, r);
            close(replaced, one, run.kind);
        }
    }
    substitutes.clear();
    return true;
}

}  // namespace moesim
