"""Golden placements: the pools, with their sizes, and the copies that each policy begins with, few slots or more than experts.

``--regenerate`` writes ``tests/policies/golden_places.json`` anew; with ``-k dali`` only the selected policies. No run is needed:
options are tried one by one on settings in which each limit of a size is the one that counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from moesim.errors import MoesimError
from moesim.policy import Placement
from moesim.testing import FakeView
from tests.policies.options_kit import (
    BESIDE,
    DISKS,
    GPUS,
    ONE_GPU,
    POLICY_SUBJECTS,
    Options,
    Setting,
    Subject,
    machine_of,
    workload_of,
)

GOLDEN = Path(__file__).with_name("golden_places.json")
REMEDY = "if the change is meant, run this test with --regenerate and say why"
WIDE = Setting(layers=6, experts=16, top_k=4, shared=1)
# Slots of all GPUs, rows of the largest step, and the setting: with 100 or 200 slots every expert has one.
PLACES = [
    *((slots, rows, Setting()) for slots, rows in ((0, 2), (3, 1), (13, 64), (24, 1), (31, 64), (100, 5))),
    *((slots, rows, WIDE) for slots, rows in ((5, 1), (43, 3), (70, 300), (200, 2))),
    (19, 4, Setting(layers=7, top_k=1, gpu_mib=5)),
]


def variants(subject: Subject) -> Iterator[Options]:
    """Give the defaults, then each other value of each option with what it needs."""
    yield {}
    for name, values in subject.values(every=True).items():
        yield from ({**BESIDE.get((subject.name, name), {}), name: value} for value in values)


def view_of(subject: Subject, slots: int, rows: int, setting: Setting) -> FakeView:
    """Give a view whose layers' experts differ in size, but for the first setting's."""
    model, trace, _ = workload_of(setting)
    model = replace(model, low_bits=getattr(subject.cls, "low_bits", ()))
    if setting is WIDE and not model.low_bits:
        sizes = (model.expert_bytes(0) + 512 * (layer * 5 % model.n_layers) for layer in range(model.n_layers))
        model = replace(model, expert_bytes_by_layer=tuple(sizes))
    gpus = GPUS.get(subject.name, ONE_GPU)
    hardware = machine_of(setting, gpus, subject.name in DISKS)
    return FakeView(model, hardware, slots=slots // len(gpus), tables=trace.tables, max_tokens=rows)


def shown(placed: Placement, n_layers: int) -> str:
    """Write the sizes of pools for people, and a digest of everything."""
    pools = [f"{pool.device}.{pool.name} {sum(pool.sizes(n_layers))}+{pool.landing}" for pool in placed.pools]
    copies = [(one.layer, list(map(int, one.experts)), one.device, one.pool, one.bits) for one in placed.copies]
    sizes = [(pool.device, pool.name, list(map(int, pool.sizes(n_layers))), pool.per_layer) for pool in placed.pools]
    rest = [sorted(one.items()) for one in (placed.parts, placed.reserved, placed.streamed, placed.offloaded)]
    whole = json.dumps([copies, sizes, rest, placed.enforce_capacity, placed.stream_depth, placed.offload_from])
    return f"{', '.join(pools)}; {sum(len(one.experts) for one in placed.copies)} {sha256(whole.encode()).hexdigest()[:8]}"


def places(subject: Subject, options: Options) -> list[str]:
    """Place one policy in all settings."""
    found = []
    for slots, rows, setting in PLACES:
        view = view_of(subject, slots, rows, setting)
        try:
            found.append(shown(subject.make(options).place(view), view.model.n_layers))
        except MoesimError as error:
            found.append(type(error).__name__)
    return found


def kept_of(subject: Subject) -> dict[str, Any]:
    """Give the placements by default, and a digest for each option that changes some."""
    usual = places(subject, {})
    others = {json.dumps(options): places(subject, options) for options in variants(subject) if not subject.refusal(options)}
    return {"": usual} | {
        options: sha256("\n".join(found).encode()).hexdigest()[:12] for options, found in others.items() if found != usual
    }


@pytest.mark.parametrize("subject", POLICY_SUBJECTS, ids=lambda subject: subject.name)
def test_golden_places(subject: Subject, regenerate: bool) -> None:
    kept: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    of, found = kept.get(subject.name, {}), kept_of(subject)
    if regenerate:
        kept = {one.name: kept[one.name] for one in POLICY_SUBJECTS if one.name in kept} | {subject.name: found}
        GOLDEN.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
        return
    moved = [
        f"{options}: {of.get(options)} -> {found.get(options)}" for options in of | found if of.get(options) != found.get(options)
    ]
    assert not moved, "\n  ".join([f"{subject.name} begins otherwise; {REMEDY}:", *moved])
