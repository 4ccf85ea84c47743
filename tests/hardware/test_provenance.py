"""Every number of a profile that a cost depends on stands in its provenance, and its label counts.

A machine has every number that the format knows. Each cost is asked with each number changed: where the answer changes, the
answer with the number as it was must name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from moesim.hardware import HardwareProfile, build_profile
from moesim.hardware.costs import CostModel
from moesim.hardware.read import is_number, keys_at, override, type_at
from moesim.hardware.types import OPERATIONS
from tests.hardware.costs_kit import number, tiny_model

PARTS = ("attention", "dense", "shared", "head", "embedding", "leading")


def linear(base: float, slope: float, **more: Any) -> dict[str, Any]:
    return {"form": "linear", "range": [1, 500], "base_us": number(base), "per_token_us": number(slope), **more}


def flat(us: float, **more: Any) -> dict[str, Any]:
    knee = {"flat_us": number(us), "knee_tokens": number(2), "per_token_us": number(us / 7)}
    return {"form": "flat_linear", "range": [1, 500], **knee, **more}


def sloped(us: float, **more: Any) -> dict[str, Any]:
    return linear(us, 2, **more)


def points(us: float, **more: Any) -> dict[str, Any]:
    return {"form": "points", "range": [1, 500], "points": number([[1, us], [500, 9 * us]]), **more}


def device(kind: str, **more: Any) -> dict[str, Any]:
    rates = {"memory_bytes_per_s": number(3e9), "flops": number(2e11)}
    return {"kind": kind, "memory_bytes": number("1 GiB"), **rates, **more}


def copies(latency: float, rate: float) -> dict[str, Any]:
    return {"latency_us": number(latency), "bytes_per_s": number(rate)}


SHAPE = {"hidden": 64, "intermediate": 128, "bits": 16.0}
POWER = {"idle_w": number(10), "busy_w": number(90)}
RAW: dict[str, Any] = {
    "name": "all",
    "description": "every number there is",
    "compute": "curves",
    "backing": ["linear"],
    "devices": {
        "curves": device(
            "gpu",
            experts=[linear(40, 3, shape=SHAPE, first_extra_us=number(7))],
            router_us=number(6),
            token_us=number(30),
            parts=[
                form(20 + at, model="tiny", part=part)
                for at, (part, form) in enumerate(zip(PARTS, (flat, points, sloped, flat, points, sloped), strict=True))
            ]
            + [points(50, model="tiny", part="context")],
            predict={"gate": points(11)},
            workspace_bytes=number("1 MiB"),
            **POWER,
        ),
        "knees": device(
            "gpu", experts=[flat(60, shape=SHAPE)], first_extra_us=number(4), wake_us=number(3),
            more_rows=number([[2, 5], [4, 6]]), predict={"gate": flat(9)}),
        "pointwise": device("gpu", experts=[points(60, shape=SHAPE)], predict={"gate": sloped(9)}),
        "rooflines": device(
            "gpu",
            launch_us=number(5),
            launches={part: number(9 * at + 3) for at, part in enumerate((*PARTS, "expert", "predict"))},
        ),
        "counted": device(
            "gpu", operations="llama.cpp", operation_us=number(2), latent_attention_us=number(13), token_us=number(30)
        ),
        "counted with a start": device("gpu", operations="llama.cpp", operation_us=number(2), first_extra_us=number(17)),
        "linear": device(
            "cpu",
            expert_cost={
                "per_expert_us": number(9), "per_row_us": number(1), "read_bytes_per_s": number(2e9),
                "few_row_flops": number(5e9), "many_row_flops": number(9e9), "crossover_rows": number(20),
            },
        ),
        "unpacking": device(
            "cpu", memory_bytes_per_s=number(1e12), flops=number(1e9), expert_cost={"few_row_flops": number(5e9)}
        ),
        "reading": device("cpu", expert_cost={"few_row_flops": number(5e9)}),
        "share": device("cpu", expert_cost={"few_row_flops": number(5e9), "read_share": number(0.5)}),
        "by size": device(
            "cpu",
            expert_cost={
                "read_rates": [{"bytes": 40_000, "bytes_per_s": number(1e9)}, {"bytes": 60_000, "bytes_per_s": number(1.2e9)}],
                "few_row_flops": number(5e9),
            },
        ),
    },
    "links": {
        "linear->curves": {
            "pinned": copies(10, 1e9),
            "pageable": copies(20, 5e8),
            "chunked": copies(30, 7e8),
            "activation": copies(3, 2e9),
        },
        "curves->linear": {
            name: {"points": number([[1, 5.0], [10**8, 9e4]])} for name in ("pinned", "pageable", "chunked", "activation")
        },
        "linear->knees": {"any": copies(11, 1e9)},
        "knees->linear": {"any": {"points": number([[1, 6.0], [10**8, 9e4]])}},
    },
    "contention": [
        {"a": "linear.experts", "b": "linear->curves", "a_rate": number(0.5), "b_rate": number(0.5)},
    ],
    "host_us": {operation: number(5) for operation in OPERATIONS},
    "host_expert_us": number(8),
    "host_shared": number(True),
    "platform_w": number(100),
}  # fmt: skip
NO_COSTS = ("memory_bytes", "workspace_bytes", "idle_w", "busy_w", "platform_w")
MODELS = {
    "plain": tiny_model(),
    "latent": tiny_model(kv_lora_rank=16, nope_head_dim=8, rope_head_dim=8, v_head_dim=8, name="other"),
}


def questions() -> Iterator[tuple[str, Callable[[CostModel], int]]]:
    """Ask for each cost on each device and link, at rows on either side of what a number of the machine divides."""
    for name in RAW["devices"]:
        for rows in (1, 2, 3, 50, 400):
            yield f"expert {name} {rows}", lambda costs, n=name, r=rows: costs.expert_ns(n, r)
        yield f"first extra {name}", lambda costs, n=name: costs.first_extra_ns(n)
        yield f"more rows {name}", lambda costs, n=name: sum(costs.more_rows_table(n))
        for rows, work2 in ((1, 2), (3, 300), (3, 10**6)):
            yield f"attention {name} {work2}", lambda costs, n=name, r=rows, w=work2: costs.attention_ns(n, r, w, 1)
            yield f"core {name} {work2}", lambda costs, n=name, r=rows, w=work2: costs.core_ns(n, r, w, 1)
            yield f"leading {name} {work2}", lambda costs, n=name, r=rows, w=work2: costs.leading_ns(n, r, w, 1)
        for rows in (1, 3, 400):
            for part in ("dense", "shared", "embedding", "head"):
                yield f"{part} {name} {rows}", lambda costs, n=name, r=rows, p=part: getattr(costs, f"{p}_ns")(n, r)
            for source in ("gate", "other", "shadow-int8"):
                yield f"{source} {name} {rows}", lambda costs, n=name, r=rows, s=source: costs.predict_ns(n, r, s)
    for link in RAW["links"]:
        for n_bytes in (100, 10**6):
            yield f"transfer {link} {n_bytes}", lambda costs, n=link, b=n_bytes: costs.transfer_ns(costs.hardware.link(n), b)
        yield f"activation {link}", lambda costs, n=link: costs.activation_ns(costs.hardware.link(n), 3)
    yield "submission", lambda costs: costs.host_expert_ns()
    yield "host thread", lambda costs: int(costs.host_shared())
    for operation in OPERATIONS:
        yield f"operation {operation}", lambda costs, o=operation: costs.operation_ns(o)
    yield "narrow expert", lambda costs: costs.at_bits(4).expert_ns("linear", 3)


def changed(value: Any) -> Iterator[Any]:
    """Give a number a little less, and a little more."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, list | tuple):
        yield from ([[n, us * factor] for n, us in value] for factor in (0.9, 1.1))
    elif isinstance(value, int) and value < 1000:
        yield from (value - 1, value + 1)
    else:
        yield from (value * 0.9, value * 1.1)


@cache
def machine(key: str = "", value: Any = None) -> HardwareProfile:
    """Build the machine with one number changed, all of them measured."""
    given = [*map(list, value)] if isinstance(value, tuple) else value
    raw = override(RAW, {key: number(given)}, "all") if key else RAW
    built = build_profile(raw, "all")
    return replace(built, contention=(), numbers={k: replace(n, source="measured") for k, n in built.numbers.items()})


def ask(
    question: Callable[[CostModel], int], model: str, transfer: str, hardware: HardwareProfile
) -> tuple[int | None, CostModel]:
    costs = CostModel(MODELS[model], hardware, transfer=transfer, extrapolate=True)
    return question(costs), costs


KEYS = [key for key in machine().numbers if not key.endswith(NO_COSTS) and not key.startswith("contention")]


@pytest.mark.parametrize("key", KEYS)
def test_a_number_that_a_cost_depends_on_is_named_and_its_label_counts(key: str) -> None:
    base = machine()
    value = base.numbers[key].value
    others = [machine(key, tuple(map(tuple, one)) if isinstance(one, list) else one) for one in changed(value)]
    weak = replace(base, numbers={**base.numbers, key: replace(base.numbers[key], source="assumed")})
    mattered = 0
    for name, question in questions():
        for model in MODELS:
            for transfer in ("pinned", "pageable", "chunked") if "transfer" in name else ("pinned",):
                answer, costs = ask(question, model, transfer, weak)
                if all(ask(question, model, transfer, other)[0] == answer for other in others):
                    continue
                mattered += 1
                stated = costs.provenance()
                assert all(cost["numbers"] for cost in stated.values()), f"{name}: a cost of no number: {stated}"
                named = {one for cost in stated.values() for one in cost["numbers"]}
                assert key in named, f"{name} ({model}, {transfer}): depends on {key}, and does not say so"
                assert costs.label() == "assumed", f"{name} ({model}, {transfer}): a label that {key} does not weaken"
                assert ask(question, model, transfer, base)[1].label() != "assumed"
    assert mattered, f"no cost that is asked for depends on {key}"


def test_the_machine_has_every_number_that_the_format_knows() -> None:
    def numbers(*place: str) -> Iterator[str]:
        if is_number(place):
            yield ".".join(place)
            return
        for key in keys_at(place) or (["*"] if type_at([*place, "*"]) is not None else []):
            yield from numbers(*place, key)

    def shape(key: str) -> str:
        steps = key.split(".")
        named = {1} if steps[0] in ("devices", "links", "contention", "host_us") else set()
        named |= {3} if len(steps) > 3 and steps[2] in ("launches", "experts", "parts", "predict") else set()
        named |= {4} if "read_rates" in steps else set()
        return ".".join("*" if at in named else step for at, step in enumerate(steps))

    assert set(numbers()) - {shape(key) for key in build_profile(RAW, "all").numbers} == set()
