// Rows of a step as bits: bit r is row r. All sets of a step have as many words as its rows need.
#pragma once

#include "common.hpp"

#include <bit>
#include <memory>

namespace moesim {

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

}  // namespace moesim
