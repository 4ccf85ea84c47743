"""Numbers drawn from a counter: the same in every run, whatever was drawn before."""

from __future__ import annotations

_WORD = (1 << 64) - 1


def scramble(x: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64: Steele, Lea, Flood, OOPSLA 2014).

    >>> hex(scramble(0)), hex(scramble(1))
    ('0xe220a8397b1dcdaf', '0x910a2dec89025cc1')
    """
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def sample(population: int, n: int, seed: int, place: int) -> list[int]:
    """Draw distinct numbers below ``population``, the same for the same seed and place.

    The draw depends on ``seed`` and ``place``, which is below 2 ** 32.

    >>> sample(8, 3, seed=0, place=5) == sample(8, 3, seed=0, place=5), len(set(sample(8, 20, 0, 5)))
    (True, 8)
    """
    numbers = list(range(population))
    state = scramble((seed << 32) + place)
    for i in range(min(n, population)):  # Fisher and Yates's shuffle, its first n exchanges
        state = scramble(state)
        j = i + state % (population - i)
        numbers[i], numbers[j] = numbers[j], numbers[i]
    return numbers[:n]
