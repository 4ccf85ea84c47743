// Which experts to keep, as `moesim.policies.algorithms.caching` says it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace moesim::algorithms {

using i64 = std::int64_t;

/// Victims and newcomers of a cache, pair by pair.
struct Swaps {
    std::vector<int> victims, newcomers;
};

/// DALI's Algorithm 2: the `u_size` residents with the lowest scores make room for the others with the highest, ties to the lower
/// id. `resident[e]`: expert e is in the cache. `u_size` is not negative.
inline Swaps workload_aware_swap(std::span<const i64> scores, const std::vector<bool> &resident, i64 u_size, bool only_if_better) {
    Swaps found;
    for (int e = 0; e < int(scores.size()); ++e) (resident[e] ? found.victims : found.newcomers).push_back(e);
    i64 n = std::min<i64>({u_size, i64(found.victims.size()), i64(found.newcomers.size())});
    auto keep_first = [n](std::vector<int> &ids, auto before) {
        std::partial_sort(ids.begin(), ids.begin() + n, ids.end(), before);
        ids.resize(n);
    };
    keep_first(found.victims, [&](int a, int b) { return scores[a] != scores[b] ? scores[a] < scores[b] : a < b; });
    keep_first(found.newcomers, [&](int a, int b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
    if (only_if_better) {
        size_t kept = 0;
        for (size_t i = 0; i < found.victims.size(); ++i)
            if (scores[found.newcomers[i]] > scores[found.victims[i]]) {
                found.victims[kept] = found.victims[i];
                found.newcomers[kept++] = found.newcomers[i];
            }
        found.victims.resize(kept);
        found.newcomers.resize(kept);
    }
    return found;
}

}  // namespace moesim::algorithms
