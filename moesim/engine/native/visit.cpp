#include "visit.hpp"

#include <algorithm>

namespace moesim {

bool Visit::has_unserved(i64 expert) const {
    if (expert < 0 || expert >= n_experts || !routed()) return false;
    const u64 *bits = unserved.data() + size_t(expert) * words;
    return std::any_of(bits, bits + words, [](u64 word) { return word != 0; });
}

/// Begin the layer's visit of another step.
void Visit::begin_anew(int in_step, int mbs, int words_of_step) {
    step = in_step, words = words_of_step;
    mbs_left = mbs, open = mbs;
    begin = -1;
    routed_rows = 0;
    unserved.clear();
    early.clear();
    substitutes.clear();
    inexact.clear();
}

/// Take in one micro-batch's routing: the ids of each row, and which experts have rows.
void Visit::route(const std::vector<int> &ids, const std::vector<int> &active, int n_rows) {
    --mbs_left;
    open += i64(n_rows) * k - 1;
    if (!routed()) unserved.assign(size_t(n_experts) * words, 0);
    if (n_rows == 1) {
        for (int e : active) of(e)[routed_rows >> 6] |= u64(1) << (routed_rows & 63);
    } else {
        for (i64 r = 0; r < n_rows; ++r) {
            i64 row = routed_rows + r;
            for (int slot = 0; slot < k; ++slot) of(ids[r * k + slot])[row >> 6] |= u64(1) << (row & 63);
        }
    }
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
/// False if there is none left: for which expert and row. `ids`: of each micro-batch.
bool Visit::serve_substitutes(const std::vector<const Table *> &ids, int &expert, int &row) {
    if (substitutes.empty()) return true;
    std::vector<i64> firsts;
    i64 first = 0;
    for (const Table *table : ids) {
        firsts.push_back(first);
        first += table->buffer.shape[0];
    }
    for (const Early &run : substitutes) {
        for (int r : rows_of(run.rows)) {
            size_t mb = firsts.size() - 1;
            while (firsts[mb] > r) --mb;
            int replaced = -1;
            for (int slot = 0; slot < k && replaced < 0; ++slot) {
                int e = int((*ids[mb])(r - firsts[mb], layer, slot));
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
