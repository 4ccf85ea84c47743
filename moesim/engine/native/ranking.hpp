// Replacement parts that go by a rank of each expert.
#pragma once

#include "replacement.hpp"

#include <array>

namespace moesim {

/// Members by a rank that changes only when they are used: the lowest goes first, of equals the one used longest ago.
struct Ranked : Admitting {
    void start(const Setup &setup) override;
    void used(const Routing &routing) override;
    void inserted(int layer, const std::vector<int> &experts) override;
    i64 victim(int layer) override;

protected:
    using Rank = std::array<i64, 3>;
    std::vector<i64> last;  // of each unit, the number of its last use
    virtual Rank rank(i64 unit) const = 0;

private:
    struct Order {
        bool made = false;  // at the first question
        std::vector<std::pair<Rank, i64>> members;  // by rank

        auto place_of(const Rank &rank, i64 unit) { return std::lower_bound(members.begin(), members.end(), std::pair(rank, unit)); }
    };
    std::vector<Order> orders;  // of each pool
    std::vector<Rank> ranks;  // of each unit, as it stands in its order
    std::vector<bool> in_order;
    std::vector<int> in_use_order;  // the experts of the present visit
    i64 n_uses = 0;
    void renew(int layer, const std::vector<int> &experts);
};

/// The one used in the fewest layer visits since the start, whether cached or not.
struct LFU : Ranked {
    bool by_last_use = true;  // the option `ties`

    void start(const Setup &setup) override;
    void used(const Routing &routing) override;

private:
    std::vector<i64> counts;  // of each unit
    Rank rank(i64 unit) const override { return {counts[unit], by_last_use ? last[unit] : 0, 0}; }
};

/// The one whose next use is farthest in the future; of equals the one used longest ago.
struct Belady : Ranked {
    std::vector<std::vector<i64>> uses;  // of each unit, the steps in which it is used

    void start(const Setup &setup) override;
    void used(const Routing &routing) override;

private:
    int n_experts = 0;
    std::pair<int, int> now{-1, -1};  // step and layer
    Rank rank(i64 unit) const override;
};

}  // namespace moesim
