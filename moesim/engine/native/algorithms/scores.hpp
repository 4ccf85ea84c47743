// HybriMoE's minus recent scores, as `moesim.policies.algorithms.scores` says it, to the last bit of NumPy's answers.
#pragma once

#include <algorithm>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

namespace moesim::algorithms {

/// Keep the `p` largest scores of a row, and all equal to the smallest of these; the others become 0.
inline void keep_top(std::span<float> row, size_t p, std::vector<float> &room) {
    if (p >= row.size()) return;
    room.assign(row.begin(), row.end());
    std::nth_element(room.begin(), room.begin() + (p - 1), room.end(), std::greater<float>());
    for (float &one : row)
        if (!(one >= room[p - 1])) one = 0;
}

/// Give the `p` largest scores of a row to the same experts by id: the largest to the lowest of them, and so on.
inline void credit_by_id(std::span<float> row, size_t p) {
    std::vector<int> best(row.size());
    std::iota(best.begin(), best.end(), 0);
    std::stable_sort(best.begin(), best.end(), [&](int a, int b) { return row[a] > row[b]; });
    best.resize(std::min(p, best.size()));
    std::vector<float> values;
    for (int e : best) values.push_back(row[e]);
    std::sort(best.begin(), best.end());
    std::fill(row.begin(), row.end(), 0.0f);
    for (size_t i = 0; i < best.size(); ++i) row[best[i]] = values[i];
}

/// Move scores on by a visit: alpha times the mean of its rows and 1 - alpha times what was. `rows` has row after row.
inline void recent_scores(std::span<double> scores, std::span<float> rows, size_t p, double alpha, bool by_id) {
    size_t n = scores.size(), n_rows = rows.size() / n;
    std::vector<float> room;
    std::vector<double> sum(n);
    for (size_t at = 0; at < n_rows; ++at) {
        std::span<float> row = rows.subspan(at * n, n);
        if (by_id) credit_by_id(row, p);
        else keep_top(row, p, room);
        for (size_t e = 0; e < n; ++e) sum[e] += double(row[e]);
    }
    for (size_t e = 0; e < n; ++e) {
        // NumPy multiplies the one row in 32 bits, and the mean of several in 64.
        double now = n_rows == 1 ? double(float(alpha) * rows[e]) : alpha * (sum[e] / double(n_rows));
        scores[e] = now + (1 - alpha) * scores[e];
    }
}

/// The same where weights of chosen experts stand in for scores; all others have 0. `ids` and `weights` have rows of `k`.
inline void recent_weights(std::span<double> scores, std::span<const int> ids, std::span<const float> weights, size_t k, size_t p,
                           double alpha, bool by_id) {
    size_t n_rows = ids.size() / k;
    std::vector<std::pair<int, float>> row(k);  // by id
    std::vector<float> kept(k), room;
    std::vector<double> sum(scores.size());
    for (size_t first = 0; first < ids.size(); first += k) {
        for (size_t at = 0; at < k; ++at) row[at] = {ids[first + at], weights[first + at]};
        std::sort(row.begin(), row.end());
        for (size_t at = 0; at < k; ++at) kept[at] = row[at].second;
        if (by_id) credit_by_id(kept, p);
        else keep_top(kept, p, room);
        for (size_t at = 0; at < k; ++at) sum[row[at].first] += double(kept[at]);
    }
    for (size_t e = 0; e < scores.size(); ++e) scores[e] = alpha * (sum[e] / double(n_rows)) + (1 - alpha) * scores[e];
}

}  // namespace moesim::algorithms
