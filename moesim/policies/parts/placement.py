"""Placement parts: which experts are in the cache at the start."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from moesim.errors import ConfigError
from moesim.policies.base import deal_slots
from moesim.policies.options import option
from moesim.policies.parts import Part, Setup

Phase = Literal["all", "decode"]
_TABLES = {"all": "activation_frequency", "decode": "activation_frequency_decode"}


class Empty(Part):
    """Nothing: a cold start."""

    def choose(self, setup: Setup) -> list[list[int]]:
        return [[] for _ in range(setup.view.model.n_layers)]


class Random(Part):
    """Experts drawn at random: by each layer's slots, or over all layers for a global pool."""

    seed: int = option(0, "Of the draws.")

    def choose(self, setup: Setup) -> list[list[int]]:
        model = setup.view.model
        draw = random.Random(self.seed)
        if setup.per_layer:
            return [sorted(draw.sample(range(model.n_experts), count)) for count in setup.slots]
        units = draw.sample(range(model.n_layers * model.n_experts), setup.slots[0])
        return [
            sorted(unit % model.n_experts for unit in units if unit // model.n_experts == layer)
            for layer in range(model.n_layers)
        ]


class LowestIds(Part):
    """Experts 0, 1, 2 ... of each layer; those of a global pool are dealt out to the layers."""

    def choose(self, setup: Setup) -> list[list[int]]:
        return [list(range(count)) for count in layer_counts(setup)]


class HighestIds(Part):
    """The last experts of each layer; those of a global pool are dealt out to the layers."""

    def choose(self, setup: Setup) -> list[list[int]]:
        n_experts = setup.view.model.n_experts
        return [list(range(n_experts - count, n_experts)) for count in layer_counts(setup)]


class _Frequent(Part):
    """The most frequent of a calibration table: of all its tokens, or of those generated."""

    phase: Phase = option("all", "Frequencies of all tokens, or of those generated.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({f"table:{_TABLES[self.phase]}"})

    def table(self, setup: Setup) -> list[list[float]]:
        """Return the frequencies, (n_layers, n_experts)."""
        rows: list[list[float]] = setup.view.tables[_TABLES[self.phase]].tolist()
        return rows


class FrequencyGlobal(_Frequent):
    """The most frequent (layer, expert) pairs of the calibration table; needs a global pool."""

    def choose(self, setup: Setup) -> list[list[int]]:
        if setup.per_layer:
            raise ConfigError(
                "placement frequency-global: expected scope 'global', got 'per-layer'; "
                "choose frequency-per-layer, or scope: global in a policy that has that option"
            )
        return global_top(self.table(setup), setup.slots[0])


class FrequencyPerLayer(_Frequent):
    """The most frequent experts of each layer; a global pool's rest goes by global frequency."""

    def choose(self, setup: Setup) -> list[list[int]]:
        table = self.table(setup)
        return per_layer_top(table, setup.slots) if setup.per_layer else per_layer_top_with_remainder(table, setup.slots[0])


def layer_counts(setup: Setup) -> Sequence[int]:
    """Return how many experts of each layer fill the slots."""
    model = setup.view.model
    return setup.slots if setup.per_layer else deal_slots(setup.slots[0], model.n_layers, model.n_experts)


def global_top(frequency: Sequence[Sequence[float]], n_slots: int) -> list[list[int]]:
    """Fill slots with the most frequent (layer, expert) pairs, ties to the lower pair.

    >>> global_top([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]], 3)
    [[1, 3], [2]]
    """
    chosen: list[list[int]] = [[] for _ in frequency]
    for layer, expert in by_frequency(frequency)[:n_slots]:
        chosen[layer].append(expert)
    return [sorted(experts) for experts in chosen]


def per_layer_top(frequency: Sequence[Sequence[float]], slots: Sequence[int]) -> list[list[int]]:
    """Fill each layer's slots with its most frequent experts, ascending; ties to the lower id.

    >>> per_layer_top([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]], [1, 2])
    [[3], [1, 2]]
    """
    return [sorted(sorted(range(len(row)), key=lambda e: -row[e])[:n]) for row, n in zip(frequency, slots, strict=True)]


def per_layer_top_with_remainder(frequency: Sequence[Sequence[float]], n_slots: int) -> list[list[int]]:
    """Fill equal shares of slots by layer, and the rest with the globally most frequent (DAOP).

    >>> per_layer_top_with_remainder([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]], 3)
    [[1, 3], [2]]
    """
    chosen = per_layer_top(frequency, deal_slots(n_slots, len(frequency), len(frequency[0]), "equal"))
    left = n_slots - sum(len(experts) for experts in chosen)
    for layer, expert in by_frequency(frequency):
        if left <= 0:
            break
        if expert not in chosen[layer]:
            chosen[layer].append(expert)
            left -= 1
    return [sorted(experts) for experts in chosen]


def by_frequency(frequency: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return all (layer, expert) pairs, the most frequent first; ties to the lower pair."""
    pairs = [(layer, expert) for layer, row in enumerate(frequency) for expert in range(len(row))]
    return sorted(pairs, key=lambda pair: -frequency[pair[0]][pair[1]])  # stable: already in (layer, expert) order
