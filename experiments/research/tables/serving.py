"""Predict measured concurrency and drafts: step times by streams, experts that a window shares, and whether drafts pay.

Each part is a table; ``--page`` writes it next to docs/background/serving.md, and its sums and some rows into that page.

    python -m experiments.research.tables.serving streams   # step times, measured and predicted: a minute
    python -m experiments.research.tables.serving unions    # experts of windows and of batches: some seconds
    python -m experiments.research.tables.serving drafts    # speed with drafts over speed without: some minutes
    python -m experiments.research.tables.serving peers     # a run of vLLM that another simulator published: two minutes
"""

from __future__ import annotations

import csv
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np

import moesim
from experiments.research.tables import command, peers
from moesim.core.table import Format, render
from moesim.core.text import say
from moesim.core.units import digits
from moesim.core.yaml_reader import read_yaml_value
from moesim.studies.validation.engines import run_engines
from moesim.trace import Trace
from moesim.trace.made import read_made
from moesim.trace.stats.balance import distinct_experts, uniform_distinct
from moesim.trace.synthesis import synthesize
from moesim.trace.synthesis.lift import parameters_for

VALIDATION: Final = Path(__file__).parents[2] / "validation"
STREAMS, DRAFTS = VALIDATION / "serving.csv", VALIDATION / "drafts.csv"
PAGE: Final = Path(__file__).parents[3] / "docs" / "background" / "serving.md"
_FITTED: Final = 2  # streams up to which a machine's factor is fitted


@dataclass(frozen=True)
class Step:
    """A measured step of so many streams, and its prediction."""

    line: str
    machine: str
    model: str
    setting: str
    streams: int
    # ms of a step
    measured: float
    predicted: float
    low: float
    high: float
    factor: float = 1.0  # of its machine, measured over predicted where it was fitted

    @property
    def fitted(self) -> float:
        return self.predicted * self.factor

    @property
    def error(self) -> float:
        return self.fitted / self.measured - 1


def streams(path: Path = STREAMS) -> list[Step]:
    """Predict the steps of a file, each times the factor that is right on average for one and two streams of its machine."""
    frame = run_engines(path).frame
    found = [
        Step(
            str(row["place"]).rpartition(":")[2], row["machine"], row["model"], f"{row['engine']}: {row['setting']}",
            row["batch"], *(1e3 * row["batch"] / row[key] for key in ("measured", "predicted", "high", "low")),
        )
        for row in frame.to_dict("records")
    ]  # fmt: skip
    factors = {
        machine: exp(
            fmean(log(one.measured / one.predicted) for one in found if one.machine == machine and one.streams <= _FITTED)
        )
        for machine in {one.machine for one in found}
    }
    return [Step(**{**vars(one), "factor": factors[one.machine]}) for one in found]


def rises(found: Sequence[Step]) -> list[tuple[Step, Step, bool, bool]]:
    """Return neighbouring numbers of streams of one setting, and whether the second has the larger total: measured, predicted."""
    settings: dict[tuple[str, str, str], list[Step]] = {}
    for one in found:
        settings.setdefault((one.machine, one.model, one.setting), []).append(one)
    return [
        (few, more, *(more.streams / getattr(more, key) > few.streams / getattr(few, key) for key in ("measured", "predicted")))
        for steps in settings.values() for few, more in pairwise(steps)
    ]  # fmt: skip


def streams_table(found: Sequence[Step], form: Format) -> str:
    """Write the steps."""
    head = [
        "line",
        "machine",
        "model",
        "setting",
        "streams",
        "measured, ms",
        "predicted, ms",
        "interval of 90 %",
        "fitted, ms",
        "error",
    ]
    cells = [
        [one.line, one.machine, one.model, one.setting, str(one.streams), digits(one.measured), digits(one.predicted),
         f"{digits(one.low)} to {digits(one.high)}", digits(one.fitted),
         "in the fit" if one.streams <= _FITTED else f"{100 * one.error:+.0f} %"]
        for one in found
    ]  # fmt: skip
    return render(head, cells, form, [head[0], *head[4:]])


def streams_summary(found: Sequence[Step]) -> list[str]:
    """Say how near steps of more streams are, and how often the sign of a gain is right."""
    both = {one.machine for one in found if one.streams == _FITTED}
    own = [abs(one.error) for one in found if one.machine in both and one.streams in (4, 8)]
    other = [abs(one.error) for one in found if one.machine not in both and one.streams > _FITTED]
    pairs = rises(found)
    wrong = [f"{few.streams} to {more.streams} on {few.machine}" for few, more, was, is_ in pairs if was != is_]
    said = f"more streams raise the total or not: right in {len(pairs) - len(wrong)} of {len(pairs)} pairs"
    lines = [_error("4 and 8 streams where one and two are fitted", own), _error("more streams where one is fitted", other)]
    return [*filter(None, lines), said + (f"; wrong: {', '.join(wrong)}" if wrong else "")]


FIRST: Final = (149.1, 379.2)
"""Mean ms to the first token of prompts of 512 tokens, one and four at once, on an M5 Max with mlxcel (lablup/mlxcel#1616)."""


def first_tokens() -> str:
    """Compare the time to the first token of the one machine of the table for which it is printed."""
    frame = moesim.run({
        "name": "first", "model": {"base": "qwen3-30b-a3b", "expert_bits": 4.5, "other_bits": 4.5}, "hardware": "M5 Max + 128GB",
        "trace": {"synthesize": "qwen3-30b-a3b", "requests": 8, "prompt": 512, "decode": 16}, "plots": [], "timeline": None,
        "workload": {
            "closed": [1, 4], "n_requests": 8, "prompt_tokens": 512, "answer_tokens": 128,
            "scheduler": [{"name": "vllm", "max_num_batched_tokens": 512}, {"name": "llama-server"}],
        },
        "cache": {"ratio": 1.0}, "policies": ["all-gpu"],
    }).table  # fmt: skip
    one, _, turns, together = (frame["ttft_mean_ns"] / 1e6).tolist()
    return (
        f"first token of 512-token prompts on the M5 Max, one and four at once: measured {FIRST[0]:.0f} and {FIRST[1]:.0f} ms, "
        f"predicted {one:.0f} and {turns:.0f} ms with prompts one after another, {together:.0f} ms with all in one step"
    )


def _error(what: str, errors: Sequence[float]) -> str:
    return (
        f"{what}: median error {100 * median(errors):.0f} % of {len(errors)}, worst {100 * max(errors):.0f} %" if errors else ""
    )


WINDOWS: Final = (2, 3, 4, 5, 8)
_EXPERTS: Final[Sequence[tuple[str, Mapping[str, Any], Mapping[int, float], Mapping[int, float]]]] = (
    # routing, how it is made, experts of neighbouring tokens and of independent ones over those of one, as recorded
    ("gpt-oss-20b", {"synthesize": "gpt-oss-20b"}, dict(zip(WINDOWS, (1.56, 1.99, 2.33, 2.61, 3.22), strict=True)),
     dict(zip(WINDOWS, (1.81, 2.48, 3.04, 3.49, 4.48), strict=True))),
    ("deepseek-v2-lite", {"synthesize": "deepseek-v2-lite"}, dict(zip(WINDOWS, (1.72, 2.34, 2.88, 3.39, 4.61), strict=True)),
     dict(zip(WINDOWS, (1.89, 2.69, 3.42, 4.06, 5.66), strict=True))),
    ("qwen3-30b-a3b", {"synthesize": "qwen3-30b-a3b"}, dict(zip(WINDOWS, (1.61, 2.13, 2.57, 2.96, 3.90), strict=True)), {}),
    ("glm-4.7-flash, assumed", {"synthesize": "assumed", "shape": "8x64x4"}, {2: 1.74}, {}),
)  # fmt: skip


@dataclass(frozen=True)
class Union:
    """Distinct experts of some rows of a layer over those of one: of neighbours, of other requests, by chance."""

    rows: int
    neighbours: float
    independent: float
    even: float


def unions(trace: Trace, rows: Sequence[int] = WINDOWS) -> list[Union]:
    """Count the experts of windows of decoded tokens, and of as many tokens of requests that differ."""
    experts, n_experts, top_k = np.asarray(trace.experts), trace.n_experts, trace.experts.shape[2]
    lengths = trace.requests.n_prompt + trace.requests.n_decode
    first = np.cumsum(lengths) - lengths + trace.requests.n_prompt
    shortest = int(trace.requests.n_decode.min())
    found = []
    for n in rows:
        windows = [begin + np.arange(0, shortest - n + 1, n)[:, None] + np.arange(n) for begin in first]
        batches = [np.roll(first, shift)[:n] + np.arange(shortest)[:, None] for shift in range(len(first))]
        own, other = (float(distinct_experts(experts, one, n_experts).mean()) / top_k for one in (windows, batches))
        found.append(Union(n, own, other, uniform_distinct(n_experts, top_k, n) / top_k))
    return found


def unions_found() -> list[list[str]]:
    """Count recorded unions next to those of the routing that a model gets here, as cells of a table."""
    cells = []
    for name, written, together, apart in _EXPERTS:
        made = read_made({"requests": 24, "prompt": 8, "decode": 128, **written}, name)
        trace = synthesize(parameters_for(made), n_requests=made.requests, n_prompt=made.prompt, n_decode=made.decode)
        for one in unions(trace):
            recorded = [f"{of[one.rows]:.2f}" if one.rows in of else "" for of in (together, apart)]
            own = [f"{one.neighbours:.2f}", f"{one.independent:.2f}"]
            cells.append([name, str(one.rows), recorded[0], own[0], recorded[1], own[1], f"{one.even:.2f}"])
    return cells


def unions_table(cells: Sequence[Sequence[str]], form: Format) -> str:
    """Write unions."""
    head = [
        "routing",
        "tokens",
        "neighbours, recorded",
        "neighbours, here",
        "independent, recorded",
        "independent, here",
        "even routing",
    ]
    return render(head, cells, form, head[1:])


@dataclass(frozen=True)
class Gain:
    """Measured and predicted speed with drafts over that without."""

    line: int
    model: str
    machine: str
    drafter: str
    n: int
    task: str
    measured: float
    predicted: float
    low: float
    high: float
    note: str

    @property
    def right(self) -> bool:
        return (self.predicted > 1) == (self.measured > 1)


def each(accepted: float, n: int) -> float:
    """Return the share of drafts accepted if all before them are, of which so many of n drafts are accepted on average.

    >>> round(each(0.75, 1), 3), round(each((0.8 + 0.64 + 0.512) / 3, 3), 3)
    (0.75, 0.8)
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle ** (i + 1) for i in range(n)) < accepted * n else (low, middle)
    return (low + high) / 2


def drafts(path: Path = DRAFTS, tokens: int = 256) -> list[Gain]:
    """Predict each row of a file: requests in turn with and without drafts, on routing with each lift that is assumed."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    groups: dict[tuple[str, ...], list[tuple[int, dict[str, str]]]] = {}
    for line, row in enumerate(rows, 2):
        groups.setdefault((row["model"], row["hardware"], row["policy"]), []).append((line, row))
    return sorted((one for group in groups.values() for one in _gains(group, tokens)), key=lambda one: one.line)


_REQUESTS: Final = 8  # so that chance of acceptance moves a ratio by a percent or two


def _gains(group: Sequence[tuple[int, dict[str, str]]], tokens: int) -> Iterable[Gain]:
    (_, first), *_ = group
    model, policy = (read_yaml_value(first[key], f"{DRAFTS.name}: {key}") for key in ("model", "policy"))
    asked: list[Any] = [None]
    own: list[tuple[int, dict[str, str], list[int]]] = []
    for line, row in group:
        times: list[float | None] = [float(row[key]) for key in ("draft_ms", "draft_ms_most") if row[key]]
        own.append((line, row, list(range(len(asked), len(asked) + max(1, len(times))))))
        asked += [_asked(row, ms) for ms in times or [None]]
    frame = moesim.run({
        "name": "drafts", "model": model, "hardware": first["hardware"], "policies": [policy], "cache": {"ratio": 1.0},
        "workload": {"closed": 1, "n_requests": _REQUESTS, "prompt_tokens": 32, "answer_tokens": tokens, "drafts": asked},
        "plots": [], "timeline": None,
    }).table  # fmt: skip
    ms = frame["tpot_mean_ns"].to_numpy().reshape(-1, len(asked))  # by routing, the middle lift first
    for line, row, places in own:
        ratios = ms[:, :1] / ms[:, places]
        name = model["base"] if isinstance(model, dict) else model
        yield Gain(
            line, str(name), row["hardware"], row["drafter"], int(row["n"]), row["task"], float(row["ratio"]),
            float(ratios[0, 0]), float(ratios.min()), float(ratios.max()), row["note"],
        )  # fmt: skip


def _asked(row: Mapping[str, str], draft_ms: float | None) -> dict[str, Any]:
    shares = [float(one) for one in row["accept"].split()]
    n = int(row["n"])
    accept: Any = shares if len(shares) > 1 else each(shares[0], n)
    return {"n": n, "by": row["by"], "accept": accept} | ({} if draft_ms is None else {"draft_ms": draft_ms})


def drafts_table(found: Sequence[Gain], form: Format) -> str:
    """Write measured and predicted gains."""
    head = ["line", "model", "machine", "drafter", "drafts", "task", "measured", "predicted", "range", "sign"]
    cells = [
        [str(one.line), one.model, one.machine, one.drafter, str(one.n), one.task, f"{one.measured:.2f}", f"{one.predicted:.2f}",
         f"{one.low:.2f} to {one.high:.2f}" if one.high > one.low else "", "right" if one.right else "wrong"]
        for one in found
    ]  # fmt: skip
    return render(head, cells, form, [head[0], head[4], *head[6:9]])


def drafts_summary(found: Sequence[Gain]) -> list[str]:
    """Say how often the sign is right."""
    slow = [one for one in found if (one.low > 1 if one.measured > 1 else one.low < 1)]
    factor = exp(median(log(one.predicted / one.measured) for one in found))
    return [
        f"gain or loss right in {sum(one.right for one in found)} of {len(found)} rows; "
        f"in {len(slow)} at the slower end of their ranges",
        f"predicted over measured: median {factor:.2f}",
    ]


@dataclass(frozen=True)
class _Part:
    """A table: what is found, its sums, all its rows, and those that the page shows."""

    find: Callable[[], Any]
    summary: Callable[[Any], list[str]]
    table: Callable[[Any, Format], str]
    shown: Callable[[Any], Any]


_PARTS: Final[Mapping[str, _Part]] = {
    "streams": _Part(streams, lambda found: [*streams_summary(found), first_tokens()], streams_table, lambda found: []),
    "unions": _Part(unions_found, lambda found: [], unions_table, lambda found: [one for one in found if one[1] == "8"]),
    "drafts": _Part(drafts, drafts_summary, drafts_table, lambda found: [one for one in found if not one.right]),
    "peers": _Part(
        lambda: peers.rows([peers.drawn(seed) for seed in peers.DRAWS]), peers.summary, peers.table,
        lambda found: {name: found[name] for name in (*peers.PUBLISHED, next(iter(peers.RUNS)), list(peers.RUNS)[-1])},
    ),
}  # fmt: skip


def all_of(part: str) -> Path:
    """Return where all rows of a part are."""
    return PAGE.with_name(f"serving_{part}.csv")


def _work(given: Namespace) -> None:
    part = _PARTS[given.part]
    found = part.find()
    if not given.page:
        sys.stdout.write("".join(f"{line}\n" for line in part.summary(found)) + "\n" + part.table(found, given.form))
        return
    all_of(given.part).write_text(part.table(found, Format.CSV), encoding="utf-8")
    lines = "".join(f"* {line}\n" for line in part.summary(found))
    shown = [lines, *([part.table(some, Format.MD)] if (some := part.shown(found)) else [])]
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(f"<!-- {given.part} -->\n")
    PAGE.write_text(
        f"{before}{begin}\n{chr(10).join(filter(None, shown))}\n{rest[rest.index('<!-- end -->') :]}", encoding="utf-8"
    )
    say(f"wrote {PAGE} and {all_of(given.part)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, or write it into the page."""
    options = command.parser("experiments.research.tables.serving", __doc__)
    options.add_argument("part", choices=list(_PARTS), help="which table")
    options.add_argument("--page", action="store_true", help="write its CSV, and its sums into docs/background/serving.md")
    return command.run(_work, options, arguments)


if __name__ == "__main__":
    sys.exit(main())
