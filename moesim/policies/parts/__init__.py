"""Parts of a policy: placement, assignment, prefetch and replacement, one decision each.

A part decides one thing and never returns engine actions where a list of experts will do; `Composed` turns the answers into
actions. A part is started once per run, and may keep state between its questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import Field, PlainValidator, WithJsonSchema

from moesim.errors import ConfigError
from moesim.policies.options import Declared
from moesim.policy import UPDATE, Fetch, Predict, Predicted, Routed, View

Unit = tuple[int, int]  # (layer, expert)


class Setup(NamedTuple):
    """Facts that every part gets before a run."""

    view: View
    gpu: str
    cpu: str  # "" if nothing is computed on the host
    slots: Sequence[int]  # cache slots of each layer if per_layer, else one number for all layers together
    per_layer: bool


class Plan(NamedTuple):
    """Who executes what."""

    gpu: tuple[int, ...]  # expert ids in execution order
    cpu: tuple[int, ...]  # expert ids in execution order
    gpu_total: float = 0  # planned, in the unit of the costs
    cpu_total: float = 0
    loads: tuple[int, ...] = ()  # order of the transfers, where the rule plans one

    @property
    def makespan(self) -> float:
        return max(self.gpu_total, self.cpu_total)


class Swap(NamedTuple):
    """Cached experts of a layer to be replaced, decided at the end of the layer."""

    victims: Sequence[int]
    newcomers: Sequence[int]
    urgency: int = UPDATE
    relabel: bool = False  # keep a newcomer that happens to be on the GPU instead of copying it again


class PlacementPart(Protocol):
    """Which experts are in the cache at the start."""

    @property
    def needs(self) -> frozenset[str]:
        """Trace data that it reads; see `moesim.policy.Policy.needs`."""

    def choose(self, setup: Setup) -> list[list[int]]:
        """Return the experts of each layer; none for an empty start."""


class AssignmentPart(Protocol):
    """Which device executes each active expert.

    One that wants more than rows may have ``routed(event: Routed)``, which is called before each `assign`.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Trace data that it reads."""

    @property
    def uses_cpu(self) -> bool:
        """False: it never sends anything to the CPU, and `assign` is not asked."""

    def start(self, setup: Setup) -> None:
        """Begin a run."""

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Return a plan; ``waiting``: time in ns until an expert's weights could be on the GPU."""


class PrefetchPart(Protocol):
    """Which experts of a later layer to fetch before they are asked for."""

    @property
    def needs(self) -> frozenset[str]:
        """Trace data that it reads."""

    @property
    def transient(self) -> bool:
        """True: prefetches go to a pool emptied at the end of the layer; False: to the cache."""

    @property
    def slots(self) -> int:
        """Experts that its own pool holds."""

    def start(self, setup: Setup) -> None:
        """Begin a run."""

    @property
    def predicts(self) -> bool:
        """True: it asks for predictions, and `choose` answers them."""

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        """Return the predictions to pay for now that a layer is routed."""

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        """Return prefetches without a prediction, best first, as (layer, expert), once planned.

        The layer's demand loads are queued before it. Parts that need the plan later keep it.
        """

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        """Return what to fetch now that a prediction is in, best first, as (layer, expert)."""


class ReplacementPart(Protocol):
    """Choice of the expert that leaves the cache for another one."""

    @property
    def needs(self) -> frozenset[str]:
        """Trace data that it reads."""

    @property
    def admits(self) -> bool:
        """True: a demand load enters the cache. False: it is staged, and dropped after its layer."""

    def start(self, setup: Setup, residents: Sequence[Sequence[int]]) -> None:
        """Begin a run with these residents of each layer."""

    def used(self, event: Routed) -> None:
        """Take note of a routed layer."""

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Take note of experts that are being fetched into the cache."""

    def victim(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Name a resident of the cache for a fetch to replace, in use or not; None to wait."""

    def layer_end(self, step: int, layer: int) -> Swap | None:
        """Return replacements to make at the end of a layer, if any."""


class Part(Declared):
    """Defaults of all parts: nothing needed, nothing to begin, printed with its options."""

    _called = frozenset(
        name for kind in (PlacementPart, AssignmentPart, PrefetchPart, ReplacementPart) for name in vars(kind) if name[0] != "_"
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def start(self, setup: Setup) -> None:
        """Begin a run."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.options().items())})"


PartSpec = str | Mapping[str, Any]
"""A part by its name, or by a mapping of ``name`` and its options."""
_NO_PARTS = (bool, int, float, list, tuple, set, type(None))


def _part(value: Any) -> Any:
    if isinstance(value, _NO_PARTS):
        raise AssertionError("no part")
    return value


def _written(kind: str) -> WithJsonSchema:
    return WithJsonSchema({"part": kind, "expected": "a part by name or by a mapping"})


PlacementOption = Annotated[
    PartSpec | PlacementPart, PlainValidator(_part), _written("placement"),
    Field(description="What is in the cache at the start: a part by its name, by a mapping of ``name`` and its options, or the "
                      "object itself."),
]  # fmt: skip
AssignmentOption = Annotated[
    PartSpec | AssignmentPart, PlainValidator(_part), _written("assignment"),
    Field(description="Which device executes each active expert; a part."),
]  # fmt: skip
PrefetchOption = Annotated[
    PartSpec | PrefetchPart, PlainValidator(_part), _written("prefetch"),
    Field(description="What is fetched before it is asked for; a part."),
]  # fmt: skip
ReplacementOption = Annotated[
    PartSpec | ReplacementPart, PlainValidator(_part), _written("replacement"),
    Field(description="What leaves the cache when something else wants its place; a part."),
]  # fmt: skip


def source_needs(source: str) -> frozenset[str]:
    """Return the recorded signal that a prediction source needs of the trace, if any.

    >>> sorted(source_needs("signal:residual")), sorted(source_needs("residual")), sorted(source_needs("frequency"))
    (['signal:residual'], ['signal:residual'], [])
    >>> sorted(source_needs("shadow-int8:synthetic:0.97")), sorted(source_needs("shadow-int8:T1:KV1"))
    ([], ['signal:shadow-int8:T1:KV1'])
    """
    kind, _, rest = source.partition(":")
    if kind.startswith("shadow") and rest.startswith(("synthetic:", "oracle")):
        kind, _, rest = rest.partition(":")
    if kind == "synthetic":
        _check_recalls(source, rest)
        return frozenset()
    if (kind, rest) == ("oracle", "") or (kind in ("frequency", "coactivation") and rest in ("", "running")):
        return frozenset()
    return frozenset({f"signal:{source.removeprefix('signal:')}"})


def _check_recalls(source: str, recalls: str) -> None:
    try:
        wrong = not all(0 <= float(one) <= 1 for one in recalls.split(","))
    except ValueError:
        wrong = True
    if wrong:
        raise ConfigError(f"prediction source '{source}': expected a recall from 0 to 1, such as synthetic:0.9, got '{recalls}'")
