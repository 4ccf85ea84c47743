"""Specification of a workload, where each parameter is declared once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, NamedTuple

from moesim.errors import WorkloadError


def _asked(default: Any, word: str, *, least: int | None = None, head: str = "", usual: str = "") -> Any:
    """Declare a parameter: default, words of its column, usual value, bound."""
    column = {"word": word, "head": head, "usual": usual}
    return field(default=default, metadata={"column": column, "least": least})


class Size(NamedTuple):
    """How much a workload takes of a trace."""

    requests: int
    prompt: int | None  # tokens of each; None: as recorded
    decode: int | None


@dataclass(frozen=True)
class WorkloadSpec:
    """Specification of a workload: how many requests at once, how long, and in which groups.

    Parameters
    ----------
    batch_size : int
        Requests active at once.
    prompt_tokens : int or None
        Tokens of each prompt; None: as recorded, which makes prompts ragged. 0: requests begin with their
        first decoded token, and contexts count from there.
    decode_tokens : int or None
        Decode steps of each request; None: as recorded.
    n_batches : int
        Batches, one after another; all their requests are distinct.
    seed : int
        Seed of the choice of requests.
    micro_batches : int
        Groups into which each step is split; a step with fewer sequences has fewer.
    prefill_chunk : int or None
        Most tokens of a prefill step, over all its requests, first come first served; None: all prompts in
        one step.
    refill : bool
        Admit the next request as soon as one leaves, so that ``n_batches * batch_size`` requests pass
        through.
    reuse : "shifted" or None
        How to go beyond what was recorded; None: not at all.
    requests : None, "all" or sequence of int
        None: chosen with the seed. "all": every request that qualifies, in trace order. Or just these, in
        this order. With "all" or a list, the number of batches follows from it.

    Raises
    ------
    WorkloadError
        If a value is out of range.
    """

    batch_size: int = _asked(1, "batch", least=1)
    prompt_tokens: int | None = _asked(None, "prompt", least=0)
    decode_tokens: int | None = _asked(None, "decode", least=0)
    n_batches: int = _asked(1, "batches", least=1)
    seed: int = _asked(0, "seed", least=0)
    micro_batches: int = _asked(1, "micro-batches", head="micro", usual="1", least=1)
    prefill_chunk: int | None = _asked(None, "prefill chunk", least=1)
    refill: bool = _asked(False, "refill", usual="False")
    reuse: Literal["shifted"] | None = _asked(None, "reuse")
    requests: str | tuple[int, ...] | list[int] | None = _asked(None, "requests")  # noqa: RUF009, it returns a field

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise WorkloadError(f"workload.{name}: expected an integer of at least {least}, got {value!r}")
        if self.prompt_tokens == self.decode_tokens == 0:
            raise WorkloadError("workload: expected prompt_tokens or decode_tokens of at least 1, got 0 of both; ask for some")
        if not isinstance(self.refill, bool):
            raise WorkloadError(f"workload.refill: expected true or false, got {self.refill!r}")
        if self.reuse not in (None, "shifted"):
            raise WorkloadError(f"workload.reuse: expected 'shifted' or nothing, got {self.reuse!r}")
        if self.micro_batches > self.batch_size:
            raise WorkloadError(
                f"workload.micro_batches: expected at most batch_size = {self.batch_size}, got "
                f"{self.micro_batches}; a micro-batch holds whole requests"
            )
        if isinstance(self.requests, list):
            object.__setattr__(self, "requests", tuple(self.requests))
        self._check_requests()

    def _check_requests(self) -> None:
        if self.requests is None:
            return
        named = self.requests
        if named != "all" and not (
            isinstance(named, tuple) and named and all(isinstance(r, int) and not isinstance(r, bool) for r in named)
        ):
            raise WorkloadError(f"workload.requests: expected 'all' or a list of request numbers, got {named!r}")
        if self.n_batches != 1:
            raise WorkloadError(
                f"workload.n_batches: expected 1 (the default) next to workload.requests, got {self.n_batches}"
                "; the number of batches follows from the requests"
            )
        if isinstance(named, tuple) and len(set(named)) != len(named) and self.reuse is None:
            raise WorkloadError("workload.requests: a request is named twice; name it once, or set workload.reuse: shifted")

    @property
    def size(self) -> Size:
        """How much it takes of a trace, if requests are chosen with the seed."""
        return size_of(vars(self))


LEAST: Final[Mapping[str, int]] = {
    one.name: one.metadata["least"] for one in fields(WorkloadSpec) if one.metadata["least"] is not None
}
"""Parameters that count something, with the least of each."""
_MAY_BE_NONE: Final = tuple(one.name for one in fields(WorkloadSpec) if one.default is None)


def size_of(asked: Mapping[str, Any]) -> Size:
    """Compute how much a workload takes of a trace, by its parameters."""
    return Size(asked["batch_size"] * asked["n_batches"], asked["prompt_tokens"], asked["decode_tokens"])


def shortened(asked: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Ask for one batch that decodes no more than so many tokens."""
    wanted = asked["decode_tokens"]
    return {**asked, "decode_tokens": tokens if wanted is None else min(wanted, tokens), "n_batches": 1}
