"""The contract of schedulers: requests come and leave, and the rows of the next step are asked for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from moesim.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.serving.requests import Request


class Rows(NamedTuple):
    """Rows of one request in a step: its next tokens."""

    request: Request
    n: int


def asked(default: Any, words: str, least: int = 1) -> Any:
    """Declare an option of a scheduler: a number of at least `least`, or true or false."""
    return field(default=default, metadata={"words": words, "least": least})


@dataclass
class Scheduler:
    """Decides which rows a step has; a subclass is one released server, or one of its modes.

    The server that calls it gives requests in the order of arrival to `add`, then asks `plan` for the rows of the next step.
    After the step it has counted what was computed and generated, and calls `leave` for each request with its last token.

    Attributes
    ----------
    name : str
        The name by which a workload asks for it.
    kv_tokens : int or None
        Tokens of KV cache that the server reserves as it starts, for all requests; None: as many as its most requests need
        when each is the longest of the workload.
    """

    name: ClassVar[str]
    kv_tokens: int | None = asked(None, "tokens of KV cache, for all requests")
    longest: int = field(default=0, init=False)  # tokens of the longest request, prompt and answer
    waiting: deque[Request] = field(default_factory=deque, init=False)

    @property
    def most_requests(self) -> int:
        """Requests at once."""
        raise NotImplementedError

    @property
    def most_rows(self) -> int:
        """Rows of the largest pass through the model."""
        raise NotImplementedError

    @property
    def pass_rows(self) -> int | None:
        """Rows of a pass through the model where a step is cut into several; None: it is not."""
        return None

    @property
    def capacity(self) -> int:
        """Tokens of KV cache that are reserved for all requests."""
        return self.kv_tokens if self.kv_tokens is not None else self.most_requests * self.longest

    @property
    def longest_possible(self) -> int:
        """Tokens of the longest request that fits."""
        return self.capacity

    def add(self, request: Request) -> None:
        """Take a request that has arrived."""
        self.waiting.append(request)

    def plan(self, now_ns: int) -> Sequence[Rows]:
        """Return the rows of the next step, in their order; none: nothing can run before another request arrives."""
        raise NotImplementedError

    def leave(self, request: Request) -> None:
        """Let a request go, which has its last token."""
        raise NotImplementedError

    @property
    def n_running(self) -> int:
        """Requests that have been admitted and have not left."""
        raise NotImplementedError


SCHEDULERS: dict[str, type[Scheduler]] = {}
"""Schedulers by name."""


def scheduler(found: type[Scheduler]) -> type[Scheduler]:
    """Register a scheduler under its name."""
    SCHEDULERS[found.name] = found
    return found


def make_scheduler(written: Mapping[str, Any], place: str = "workload.scheduler") -> Scheduler:
    """Make a scheduler from its name and options; ConfigError names what is wrong."""
    options = dict(written)
    name = options.pop("name", None)
    if name not in SCHEDULERS:
        raise ConfigError(f"{place}: {unknown_name('scheduler', str(name), SCHEDULERS)}")
    known = {one.name: one for one in fields(SCHEDULERS[name]) if one.init}
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"{place}: {unknown_name(f'option of {name}', key, known)}")
        least, kind = known[key].metadata["least"], type(known[key].default)
        if kind is bool and not isinstance(value, bool):
            raise ConfigError(f"{place}.{key}: expected true or false, got {value!r}")
        if kind is not bool and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"{place}.{key}: expected an integer of at least {least}, got {value!r}")
    return SCHEDULERS[name](**options)
