"""The contract of schedulers: requests come and leave, and the rows of the next step are asked for."""

from __future__ import annotations

from collections import deque
from dataclasses import Field, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from moesim.core.own_code import check_target, import_class
from moesim.core.units import ceil_div
from moesim.errors import ConfigError, describe_exception, mistyped, unknown_name
from moesim.serving.blocks import Blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.serving.requests import Request


class Rows(NamedTuple):
    """Rows of one request in a step.

    Attributes
    ----------
    request : Request
    n : int
        How many: its next tokens, of which the first is the one after those computed.
    """

    request: Request
    n: int


def asked(default: Any, words: str, least: int = 1) -> Any:
    """Declare an option of a scheduler.

    Parameters
    ----------
    default : bool, int, float or None
        Its default, by whose type a value is checked; None: an integer, or nothing.
    words : str
        How ``moesim list schedulers NAME`` explains it.
    least : int
        Least value of a number.

    Returns
    -------
    dataclasses.Field
    """
    return field(default=default, metadata={"words": words, "least": least})


@dataclass
class Scheduler:
    """Decides which rows a step has; a subclass is one released server, or one of its modes.

    Requests come to `add` in the order of arrival. Then `plan` is asked for the rows of the next step. After the step, what was
    computed and generated is counted, and `leave` is called for each request with its last token.

    A class of your own is named in a workload as ``package.module:Class``.

    Attributes
    ----------
    name : str
        The name by which a workload asks for it.
    drafts : bool
        Whether the released server has drafts; a workload's are run all the same, with a note.
    kv_tokens : int or None
        Tokens of KV cache that the server reserves as it starts, for all requests; None: as many as its most requests need
        when each is the longest of the workload.
    longest : int
        Tokens of the longest request of the workload, prompt and answer.
    at_once : int
        Requests that can be there together: users, or all of the workload.
    window : int
        Most rows of a request that decodes: a token and its drafts.
    waiting : deque of Request
        Requests that have arrived and have not been admitted, in order.
    """

    name: ClassVar[str]
    drafts: ClassVar[bool] = True
    kv_tokens: int | None = asked(None, "tokens of KV cache, for all requests")
    longest: int = field(default=0, init=False)
    at_once: int = field(default=1_000_000, init=False)
    window: int = field(default=1, init=False)
    waiting: deque[Request] = field(default_factory=deque, init=False)

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = f"{cls.__module__}:{cls.__qualname__}"

    @property
    def most_requests(self) -> int:
        """Requests that are admitted at once, at most."""
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
        return self.capacity // self.most_requests

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

    def ends_prompts(self, rows: Sequence[Rows]) -> bool:
        """Return whether a step of prompts is the last for requests that were admitted together."""
        return any(request.computed + n == request.known for request, n in rows)

    def check(self) -> None:
        """Raise if what it counts does not add up; SimulationError. Called after every plan."""

    def room(self, request: Request) -> int | None:
        """Return for how many tokens a request has KV cache now; None: for as many as it may get."""
        return None


class Pooled(Scheduler):
    """A scheduler with one KV cache for all requests, in blocks that they take and give back.

    Attributes
    ----------
    blocks : moesim.serving.blocks.Blocks
        The pool: `match`, `admit`, `grow` and `release`.
    """

    @property
    def block(self) -> int:
        """Tokens of a block."""
        raise NotImplementedError

    @property
    def caching(self) -> bool:
        """Whether blocks stay cached, and are shared by prompts that begin alike."""
        return True

    @property
    def each(self) -> int:
        """Blocks for the longest request of the workload, in the default size of the pool."""
        return ceil_div(self.longest, self.block)

    @property
    def n_blocks(self) -> int:
        return self.most_requests * self.each if self.kv_tokens is None else self.kv_tokens // self.block

    @property
    def capacity(self) -> int:
        return self.n_blocks * self.block

    @property
    def longest_possible(self) -> int:
        return self.capacity

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks(self.n_blocks, self.block, caching=self.caching)

    @property
    def in_use(self) -> int:
        """Tokens of KV cache that requests have now."""
        return (self.blocks.n - self.blocks.available) * self.block

    def resize(self, tokens: int) -> None:
        """Have a KV cache of so many tokens from now on, empty; no request has any."""
        self.kv_tokens = tokens
        self.blocks = Blocks(self.n_blocks, self.block, caching=self.caching)

    def check(self) -> None:
        self.blocks.check()

    def room(self, request: Request) -> int:
        return self.blocks.of(request) * self.block


SCHEDULERS: dict[str, type[Scheduler]] = {}
"""Schedulers by name."""


def scheduler(found: type[Scheduler]) -> type[Scheduler]:
    """Register a scheduler of moesim's under its name."""
    SCHEDULERS[found.name] = found
    return found


def options_of(found: type[Scheduler]) -> dict[str, Field[Any]]:
    """Return the options of a scheduler by name, with default and, in `metadata`, words."""
    return {one.name: one for one in fields(found) if one.init}


def make_scheduler(written: Mapping[str, Any], place: str = "workload.scheduler") -> Scheduler:
    """Make a scheduler from its name, or ``package.module:Class``, and options; ConfigError names what is wrong."""
    options = dict(written)
    name = options.pop("name", None)
    if name is None:
        raise ConfigError(f"{place}.name: expected one of {', '.join(sorted(SCHEDULERS))}, got none; add it")
    found = scheduler_class(str(name), place)
    known = options_of(found)
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"{place}: {unknown_name(f'option of {name}', key, known)}")
        _check_option(f"{place}.{key}", value, known[key].metadata["least"], type(known[key].default))
    try:
        return found(**options)
    except ConfigError as error:
        raise ConfigError(f"{place}: {name}: {error}") from None
    except Exception as error:
        raise ConfigError(f"{place}: {name} raised {describe_exception(error)}") from None


def scheduler_class(name: str, place: str) -> type[Scheduler]:
    """Find a scheduler's class by its name or as ``package.module:Class``; ConfigError names what is wrong."""
    if name in SCHEDULERS:
        return SCHEDULERS[name]
    if ":" not in name:
        raise ConfigError(f"{place}: {unknown_name('scheduler', name, SCHEDULERS)}")
    found = import_class(check_target(name, place), place)
    if not issubclass(found, Scheduler):
        raise ConfigError(f"{place}: {name}: expected a subclass of moesim.serving.scheduler.Scheduler, got {found.__name__}")
    needed = [*_NEEDED, "block"] if issubclass(found, Pooled) else _NEEDED
    if lacking := [one for one in needed if getattr(found, one) in (getattr(Scheduler, one, None), getattr(Pooled, one))]:
        raise ConfigError(f"{place}: {name}: expected {', '.join(needed)}, got no {', no '.join(lacking)}; add them")
    # Without its decorator a dataclass has no options, and says nothing.
    if bare := [key for key, value in vars(found).items() if isinstance(value, Field)]:
        raise ConfigError(f"{place}: {name}: expected @dataclass above a class with {bare[0]} = asked(...), got none; add it")
    if other := [key for key, one in options_of(found).items() if "least" not in one.metadata]:
        raise ConfigError(f"{place}: {name}: expected {other[0]} = asked(...) or field(init=False), got neither; write one")
    return found


_NEEDED: Final = ("most_requests", "most_rows", "n_running", "plan", "leave")


def _check_option(place: str, value: Any, least: int, kind: type) -> None:
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{place}: expected true or false, got {value!r}")
        return
    types, word = (int | float, "a number") if kind is float else (int, "an integer")
    if not isinstance(value, types) or isinstance(value, bool) or not least <= value < float("inf"):
        several = "; list several schedulers instead" if isinstance(value, list) else ""
        raise ConfigError(f"{place}: {mistyped(f'{word} of at least {least}', value)}{several}")
