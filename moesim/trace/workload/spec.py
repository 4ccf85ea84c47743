"""Specification of a workload, where each parameter is declared once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal, NamedTuple

from moesim.core.units import as_share
from moesim.errors import IN_RANGE, WorkloadError, unknown_name


def _asked(default: Any, word: str, *, least: int | None = None, head: str = "", usual: str = "") -> Any:
    """Declare a parameter: default, words of its column, usual value, bound."""
    column = {"word": word, "head": head, "usual": usual}
    return field(default=default, metadata={"column": column, "least": least})


class Size(NamedTuple):
    """How much a workload takes of a trace."""

    requests: int
    prompt: int | None  # tokens of each; None: as recorded
    decode: int | None


class KvPlace(NamedTuple):
    """Where the KV cache lies that a policy leaves on GPUs."""

    host: float = 1.0  # share of the layers whose cache grows with the context, the last ones first
    read: str = "streamed"  # while decoding, or "attended" by the CPU where it lies
    resident: int = 0  # newest tokens of each request that stay on the GPU; older ones are streamed


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
    arrivals : str or None
        A served workload: ``"poisson"``, or the path of a file of requests with their times and lengths
        (`moesim.serving.files`). Requests arrive while others are served, and a scheduler makes the steps.
    rate : float or None
        Requests a second, on average; times of a file are stretched to it.
    burstiness : float or None
        Shape of the gamma distribution of the times between two arrivals; None: 1, a Poisson process.
    closed : int or None
        A served workload of so many users, each of whom asks again once the answer is there.
    think_s : float
        Seconds between an answer and the user's next request.
    n_requests : int or None
        Requests of a served workload, of a file the first; None: all of the file, or 64.
    answer_tokens : int or None
        Tokens of each answer of a served workload, whatever ``lengths`` or a file says; the first comes with the last row of the
        prompt.
    lengths : str, mapping or None
        Tokens of the requests of a served workload, unless ``prompt_tokens`` or ``answer_tokens`` says them: the path of a file,
        read round and round, or of ``prompt`` and ``answer`` the quantiles ``p50`` and ``p90`` of a lognormal distribution, which
        ends at ``most``.
    until_s : float or None
        Simulated seconds at which a served workload ends, whatever is left.
    scheduler : str, mapping or None
        Name of a scheduler, or that under ``name`` and its options.
    drafts : mapping or None
        Speculative decoding: ``n`` drafts a step, ``accept``, ``by`` and ``draft_ms``, see `moesim.serving.drafts.Drafts`.
    kv : mapping or None
        Where the KV cache lies that a policy leaves on GPUs, see `KvPlace`.
    limits : mapping or None
        Seconds within which a request is good: ``ttft_s``, ``tpot_s``, ``e2e_s``.

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
    arrivals: str | None = _asked(None, "arrivals")
    rate: float | None = _asked(None, "requests/s")
    burstiness: float | None = _asked(None, "burstiness")
    closed: int | None = _asked(None, "users", least=1)
    think_s: float | None = _asked(None, "think s")
    n_requests: int | None = _asked(None, "requests in all", least=1)
    answer_tokens: int | None = _asked(None, "answer", least=1)
    lengths: str | dict[str, Any] | None = _asked(None, "lengths")  # noqa: RUF009, it returns a field
    until_s: float | None = _asked(None, "until s")
    scheduler: str | dict[str, Any] | None = _asked(None, "scheduler")  # noqa: RUF009, it returns a field
    drafts: str | dict[str, Any] | None = _asked(None, "drafts")  # noqa: RUF009, it returns a field
    limits: str | dict[str, Any] | None = _asked(None, "limits")  # noqa: RUF009, it returns a field
    kv: str | dict[str, Any] | None = _asked(None, "kv")  # noqa: RUF009, it returns a field

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
        self._check_served()

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

    def _check_served(self) -> None:
        for name in FORMS:
            value = getattr(self, name)
            if isinstance(value, dict):
                object.__setattr__(self, name, json.dumps(value))
            elif value is not None:
                _check_text(name, value)
        _ = self.kv_place  # checks it
        given = [name for name in SERVED if getattr(self, name) is not None]
        if not self.served:
            if given:
                raise WorkloadError(f"workload.{given[0]}: expected arrivals or closed next to it, got neither; add one")
            return
        for name in ("rate", "burstiness", "think_s", "until_s"):
            value = getattr(self, name)
            least = 0 if name == "think_s" else 1e-9
            if value is not None and not (isinstance(value, int | float) and least <= value < float("inf")):
                words = "of at least 0" if least == 0 else "above 0"
                raise WorkloadError(f"workload.{name}: expected a number {words}, got {value!r}; {IN_RANGE}")
        _ = self.limit_seconds  # checks them
        if (self.n_requests or 0) > MOST_SERVED:
            raise WorkloadError(f"workload.n_requests: expected at most {MOST_SERVED:,}, got {self.n_requests}; ask for fewer")
        if self.arrivals is not None and self.closed is not None:
            raise WorkloadError("workload: expected arrivals or closed, got both; leave one out")
        if self.arrivals == POISSON and self.rate is None:
            raise WorkloadError("workload.rate: expected requests a second next to arrivals: poisson, got none; add it")
        if self.closed is not None and self.rate is not None:
            raise WorkloadError(
                "workload.rate: expected it next to arrivals, got it next to closed, where users set the rate; leave it out"
            )
        if self.prompt_tokens == 0:
            raise WorkloadError("workload.prompt_tokens: expected at least 1 in a served workload, got 0; raise it")
        for name, fits, where in (
            ("think_s", self.closed is not None, "closed"),
            ("burstiness", self.arrivals == POISSON, "arrivals: poisson"),
            ("lengths", self.arrivals in (None, POISSON), "closed or arrivals: poisson, for a file has lengths of its own"),
        ):
            if getattr(self, name) is not None and not fits:
                got = "closed" if self.arrivals is None else f"arrivals: {self.arrivals}"
                raise WorkloadError(f"workload.{name}: expected it next to {where}, got {got}; leave it out")
        for name in ("decode_tokens", "micro_batches", "prefill_chunk", "refill", "requests", "n_batches", "batch_size"):
            default = WorkloadSpec.__dataclass_fields__[name].default
            if getattr(self, name) != default:
                remedy = {
                    "decode_tokens": "use answer_tokens", "batch_size": "use closed, or options of the scheduler",
                    "requests": "use n_requests", "n_batches": "use n_requests",
                }  # fmt: skip
                raise WorkloadError(
                    f"workload.{name}: expected nothing in a served workload, got {getattr(self, name)!r}; "
                    f"{remedy.get(name, 'use options of the scheduler')}"
                )

    @property
    def served(self) -> bool:
        """Whether requests arrive, instead of being there in batches."""
        return self.arrivals is not None or self.closed is not None

    @property
    def file(self) -> tuple[str, str, int | None] | None:
        """Key and path of the file of requests, and how many of them count."""
        if self.arrivals not in (None, POISSON):
            return "arrivals", str(self.arrivals), self.n_requests
        if self.lengths is None or str(self.lengths).startswith("{"):
            return None
        return "lengths", str(self.lengths), self.n_requests

    def of_batches(self) -> dict[str, Any]:
        """Return the parameters of batches, as they are hashed since before there were others."""
        apart = (*SERVED, "arrivals", "closed", *(["kv"] if self.kv is None else []))
        return {name: value for name, value in asdict(self).items() if name not in apart}

    @property
    def scheduler_options(self) -> dict[str, Any]:
        """Name and options of the scheduler."""
        return _scheduler(self.scheduler)

    def usual(self) -> WorkloadSpec:
        """Return the same with the usual scheduler."""
        return replace(self, scheduler=None)

    @property
    def limit_seconds(self) -> dict[str, float]:
        """Seconds within which a request is good."""
        found: dict[str, float] = json.loads(self.limits) if isinstance(self.limits, str) else {}
        for name, value in found.items():
            if name not in LIMITS:
                raise WorkloadError(f"workload.limits: {unknown_name('limit', name, LIMITS)}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise WorkloadError(
                    f"workload.limits.{name}: expected seconds above 0, got {value!r}; write a number, without a unit"
                )
        return found

    @property
    def kv_place(self) -> KvPlace | None:
        """Where the KV cache of GPUs lies instead; None: where a policy puts it."""
        if self.kv is None:
            return None
        found: dict[str, Any] = json.loads(str(self.kv))
        for name in found:
            if name not in KvPlace._fields:
                raise WorkloadError(f"workload.kv: {unknown_name('key', name, KvPlace._fields)}")
        try:
            found["host"] = as_share(found.get("host", 1.0))
        except ValueError as error:
            raise WorkloadError(f"workload.kv.host: {error}") from None
        place = KvPlace(**found)
        if isinstance(place.host, bool) or not isinstance(place.host, int | float) or not 0 <= place.host <= 1:
            raise WorkloadError(f"workload.kv.host: expected a share of the layers in [0, 1], got {place.host!r}; {IN_RANGE}")
        if place.read not in KV_READ:
            raise WorkloadError(f"workload.kv.read: {unknown_name('word', str(place.read), KV_READ)}")
        tokens = place.resident
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise WorkloadError(f"workload.kv.resident: expected tokens of each request, at least 0, got {tokens!r}; {IN_RANGE}")
        if tokens and place.read == "attended":
            raise WorkloadError("workload.kv.resident: expected it next to read: streamed, got attended; leave one out")
        return place

    @property
    def size(self) -> Size:
        """How much it takes of a trace, if requests are chosen with the seed."""
        return size_of(vars(self))


def _scheduler(written: Any) -> dict[str, Any]:
    """Return name and options of a scheduler, written as a name, a mapping or its text."""
    if isinstance(written, Mapping):
        return dict(written)
    text = str(written or "llama-server")
    found: dict[str, Any] = json.loads(text) if text.startswith("{") else {"name": text}
    return found


def own_scheduler(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ``package.module:Class`` that a workload's parameters name as its scheduler, if they do.

    >>> own_scheduler({"scheduler": {"name": "my_module:Shortest", "chunk": 4}}), own_scheduler({"scheduler": "vllm"})
    (('my_module:Shortest',), ())
    """
    name = _scheduler(asked.get("scheduler")).get("name")
    return (name,) if isinstance(name, str) and ":" in name else ()


def _check_text(name: str, value: Any) -> None:
    """Raise unless a text is one that this parameter may have: a name, a path, or a mapping that was written as JSON."""
    words, example = FORMS[name]
    mapping = isinstance(value, str) and value.startswith("{")
    with suppress(ValueError):
        if isinstance(value, str) and (isinstance(json.loads(value), dict) if mapping else " or " in words):
            return
    raise WorkloadError(f"workload.{name}: expected {words}, got {value!r}; write it as {example}, without quotes")


SERVED: Final = (
    "rate", "burstiness", "think_s", "n_requests", "answer_tokens", "lengths", "until_s", "scheduler", "drafts", "limits"
)  # fmt: skip
"""Parameters of a served workload alone."""
POISSON: Final = "poisson"
"""Of `WorkloadSpec.arrivals`; anything else is a file."""
KV_READ: Final = ("streamed", "attended")
LIMITS: Final = ("ttft_s", "tpot_s", "e2e_s")
FORMS: Final = {
    "scheduler": ("a name or a mapping", "{name: vllm}"), "lengths": ("a path or a mapping", "{prompt: {p50: 800, p90: 2400}}"),
    "drafts": ("a mapping", "{n: 2, accept: 0.8}"),
    "kv": ("a mapping", "{host: 0.5, read: attended}"), "limits": ("a mapping", "{ttft_s: 2}"),
}  # fmt: skip
"""Parameters that may be mappings: what is expected of them, and an example."""
MOST_SERVED: Final = 10_000_000
"""Requests of a served workload, which takes about 1 kB of memory for each."""
REQUESTS = 64
"""Requests of a served workload that does not say how many."""
_ROUTED = 32  # requests whose routing is made up for a served workload; others read them from other places
PROMPT, ANSWER = 512, 128
"""Tokens of a prompt and of an answer of a served workload that does not say how many."""
LEAST: Final[Mapping[str, int]] = {
    one.name: one.metadata["least"] for one in fields(WorkloadSpec) if one.metadata["least"] is not None
}
"""Parameters that count something, with the least of each."""
_MAY_BE_NONE: Final = tuple(one.name for one in fields(WorkloadSpec) if one.default is None)


def size_of(asked: Mapping[str, Any]) -> Size:
    """Compute how much a workload takes of a trace, by its parameters."""
    if asked.get("arrivals") is not None or asked.get("closed") is not None:
        requests, answer = asked.get("n_requests") or REQUESTS, asked.get("answer_tokens") or ANSWER
        return Size(min(requests, _ROUTED), asked["prompt_tokens"], answer)
    return Size(asked["batch_size"] * asked["n_batches"], asked["prompt_tokens"], asked["decode_tokens"])


def shortened(asked: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Ask for one batch that decodes no more than so many tokens."""
    if asked.get("arrivals") is not None or asked.get("closed") is not None:
        rate = asked.get("rate") if asked.get("arrivals") == POISSON else None  # two requests of a file may have come at once
        return {**asked, "n_requests": 2, "rate": rate, "answer_tokens": min(asked.get("answer_tokens") or tokens, tokens)}
    wanted = asked["decode_tokens"]
    return {**asked, "decode_tokens": tokens if wanted is None else min(wanted, tokens), "n_batches": 1}


def kv_in_words(written: object) -> str:
    """Describe where the KV cache lies.

    >>> kv_in_words('{"host": 0.5, "resident": 4096}'), kv_in_words(None)
    ('50 % of KV in host, streamed but for 4,096 tokens', 'KV as placed')
    """
    place = WorkloadSpec(kv=written).kv_place if isinstance(written, str) else None
    near = f" but for {place.resident:,} tokens" if place and place.resident else ""
    return f"{100 * place.host:g} % of KV in host, {place.read}{near}" if place else "KV as placed"


IN_WORDS = {"kv": kv_in_words}
"""Settings that have words of their own in tables and figures."""
