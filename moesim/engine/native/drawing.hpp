// Numbers drawn from a counter, as in `moesim.policies.algorithms.drawing`.
#pragma once

#include "common.hpp"

namespace moesim {

/// Scramble 64 bits (the finaliser of SplitMix64).
inline u64 scramble(u64 x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

/// Draw distinct numbers below `population`, the same for the same seed and place.
inline std::vector<int> sample(int population, i64 n, u64 seed, u64 place) {
    std::vector<int> numbers(population);
    for (int i = 0; i < population; ++i) numbers[i] = i;
    u64 state = scramble((seed << 32) + place);
    if (n > population) n = population;
    for (i64 i = 0; i < n; ++i) {  // Fisher and Yates's shuffle, its first n exchanges
        state = scramble(state);
        std::swap(numbers[i], numbers[i + state % (population - i)]);
    }
    numbers.resize(n);
    return numbers;
}

}  // namespace moesim
