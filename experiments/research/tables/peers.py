"""Predict a run of vLLM that another simulator published: all experts on GPUs, requests that arrive at random.

The case is an example of LLMServingSim (casys-kaist/LLMServingSim): Qwen3-30B-A3B in bfloat16 with vLLM 0.19 on two RTX PRO
6000. Each GPU has vLLM's scheduler for its own requests and half of all experts; steps begin together. Figures are typed
from its files, at the commits named next to them.

    python -m experiments.research.tables.serving peers          # requests drawn here: two minutes
    python -m experiments.research.tables.peers requests.jsonl   # those of its file: half a minute
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

import moesim
from experiments.research.tables import command
from moesim.core.table import Format, render
from moesim.core.units import NS_PER_S
from moesim.metrics.serving import Times
from moesim.serving import make_scheduler
from moesim.serving.arrivals import Arrival, gamma_times, scaled
from moesim.serving.requests import Request, Routing
from moesim.serving.steps import Served, ServedStep, Serving

SCHEDULER: Final = {"name": "vllm", "max_num_seqs": 128, "max_num_batched_tokens": 2048, "prefix_caching": False}
"""Of each GPU, vllm/meta.json at 5daddb21; the KV cache has room for all requests, and prompts differ."""

# Requests: quantiles of vllm/requests.jsonl at 5daddb21, and when the last one arrives.
_N, _LAST_S = 300, 29.12
_AT: Final = (0, 10, 25, 50, 75, 90, 95, 99, 100)  # percent
_PROMPT: Final = (257, 356, 472, 728, 1125, 1452, 1814, 2768, 4570)  # tokens
_ANSWER: Final = (512, 533, 566, 638, 769, 785, 814, 1001, 1224)
DRAWS: Final = range(3)

_TAILS: Final = (50, 90, 99)
MEASURES: Final = (
    "TTFT mean",
    "TTFT p50",
    "TTFT p90",
    "TTFT p99",
    "TPOT mean",
    "TPOT p50",
    "TPOT p90",
    "TPOT p99",
    "whole request",
)
PUBLISHED: Final = {  # ms, validation/summary.txt at 32efe53d
    "vLLM, measured": (1086.0, 138.8, 5182.6, 9587.9, 47.3, 48.9, 52.2, 53.3, 32344.6),
    "LLMServingSim": (1022.8, 111.1, 5163.0, 10102.6, 47.2, 48.9, 52.7, 54.0, 32217.9),
}

# Times of a layer but of the head, by the profiler of LLMServingSim (profiler/perf/RTXPRO6000/.../bf16/tp1).
_LAYERS, _EXPERTS, _TOP_K = 48, 128, 8
_DENSE: Final = ((1, 128, 512, 1024, 2048), (26.7, 44.5, 101.2, 178.8, 318.4))
"""Tokens, us: norms, projections and rotary embedding, dense.csv at 72c16bac, added up."""
_HEAD: Final = ((1, 64, 128), (431.6, 490.5, 552.0))  # sequences, us: head and sampler, per_sequence.csv at 72c16bac
_EXPERT_US, _TOKEN_US = 6.7, 0.066  # moe.csv at 0d3de681: 64 experts with 128 tokens take 433 us, with 2048 565 us
_ATTENTION_US, _KV_NS, _MIXED_NS = 10.0, 1.65, 4.5
"""attention.csv at 72c16bac: 128 answers after 1384 tokens take 290 us, in a step with a prompt of 16 tokens 803 us."""
_PAIR_NS: Final = 0.1  # a token of a prompt and one before it: 16,384 operations at 166 TFLOP/s, assumed
_LINK: Final = 20.0, 16e9  # us, bytes/s: configs/Qwen3-30B-A3B-Instruct-2507.json at 32efe53d
_ROW_BYTES: Final = 4096
_LATER: Final = ((1, 32, 128, 256, 512, 1024, 2048), (20.3, 32.4, 56.3, 95.1, 164.8, 308.9, 602.0))
"""Tokens of a GPU, us: all-gather and reduce-scatter, measured later (hardware.yaml at 1b2cc02d)."""


@dataclass(frozen=True)
class Law:
    """Time of a step by the peer's numbers; each cause can be changed."""

    link: str = "config"  # or "later", "none"
    mixed: bool = True  # answers in a step with a prompt are attended by the prompt's kernel
    together: bool = True  # steps begin together on all GPUs
    expert_us: float = _EXPERT_US
    host_us: float = 0.0  # of a step

    def ns(self, steps: Sequence[ServedStep | None]) -> int:
        """Return the time of a step of which each GPU has its own part; one without a part runs a token for the others."""
        tokens = [1 if step is None else step.n_tokens for step in steps]
        share = _EXPERTS / len(steps) * (1 - (1 - _TOP_K / _EXPERTS) ** sum(tokens))
        layer = max(self._own_us(step) for step in steps) + share * self.expert_us + sum(tokens) * _TOKEN_US
        if self.link == "config":
            layer += 2 * (_LINK[0] + 1e6 * max(tokens) * _ROW_BYTES / _LINK[1])  # all-gather and reduce-scatter
        elif self.link == "later":
            layer += float(np.interp(max(tokens), *_LATER))
        head = max(float(np.interp(len(step.sequences), *_HEAD)) for step in steps if step is not None)
        return round(1e3 * (_LAYERS * layer + head + self.host_us))

    def _own_us(self, step: ServedStep | None) -> float:
        if step is None:
            return _DENSE[1][0] + _ATTENTION_US
        kv = sum(context + n for n, context in step.sequences if n == 1)
        pairs = sum(n * (context + n / 2) for n, context in step.sequences if n > 1)
        each = _MIXED_NS if self.mixed and step.phase != "decode" else _KV_NS
        return float(np.interp(step.n_tokens, *_DENSE)) + _ATTENTION_US + 1e-3 * (each * kv + _PAIR_NS * pairs)


def drawn(seed: int) -> list[Arrival]:
    """Draw requests: arrivals at random until the last published one, and lengths of the published quantiles."""
    rng = np.random.default_rng(seed)
    even = 100 * (np.arange(_N) + 0.5) / _N
    prompt, answer = (rng.permutation(np.interp(even, _AT, lengths)).astype(int) for lengths in (_PROMPT, _ANSWER))
    ns = scaled(gamma_times(1.0, _N, seed), (_N - 1) / _LAST_S)
    return list(map(Arrival, ns.tolist(), prompt.tolist(), answer.tolist()))


def read(path: Path) -> list[Arrival]:
    """Read the requests of a benchmark that LLMServingSim recorded."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    begin = rows[0]["arrival_time"]
    return [Arrival(round(NS_PER_S * (one["arrival_time"] - begin)), one["input_toks"], one["output_toks"]) for one in rows]


class _Listed:
    """Requests that arrive at given times."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._left = list(arrivals)

    def next_ns(self) -> int | None:
        return self._left[0].ns if self._left else None

    def take(self) -> Arrival:
        return self._left.pop(0)

    def ended(self, request: Request, now_ns: int) -> None:
        """It changes nothing."""


def _begin(arrivals: Sequence[Arrival]) -> Serving:
    """Begin vLLM's scheduler on one GPU; routing is not looked up."""
    scheduler = make_scheduler(dict(SCHEDULER))
    scheduler.longest, scheduler.at_once = max(one.prompt + one.answer for one in arrivals), len(arrivals)
    workload: Any = SimpleNamespace(
        trace=None, scheduler=scheduler, make_source=lambda: _Listed(arrivals), route=lambda number: Routing(0, 1, 0, 1, 1, 0),
        end_ns=None, drafts=None, spec=SimpleNamespace(seed=0),
    )  # fmt: skip
    return Serving(workload)


def serve(gpus: Sequence[Sequence[Arrival]], law: Callable[[Sequence[ServedStep | None]], int]) -> list[Served]:
    """Serve the requests of some GPUs whose steps begin together; the law says how long each step takes."""
    serving = [_begin(arrivals) for arrivals in gpus]
    now, found = 0, [one.after(0) for one in serving]
    while any(one is not None for one in found):
        steps = [one if isinstance(one, ServedStep) else None for one in found]
        now = now + law(steps) if any(steps) else min(one for one in found if isinstance(one, int))
        found = [one.after(now) for one in serving]
    return [one.served() for one in serving]


def scheduled(arrivals: Sequence[Arrival], law: Law) -> list[float]:
    """Serve requests, in turn by two GPUs, in steps of the peer's times; return `MEASURES`."""
    gpus = [arrivals[::2], arrivals[1::2]]
    if law.together:
        return _measures(serve(gpus, law.ns))
    alone = [serve([own], lambda steps: law.ns([*steps, *steps])) for own in gpus]  # as if the other did the same
    return _measures([one for (one,) in alone])


def _measures(served: Sequence[Served]) -> list[float]:
    times = [Times.of(one) for one in served]
    ttft, tpot, whole = (np.concatenate([getattr(one, name) for one in times]) / 1e6 for name in ("ttft", "tpot", "e2e"))
    found = [ttft.mean(), *np.percentile(ttft, _TAILS), tpot.mean(), *np.percentile(tpot, _TAILS), whole.mean()]
    return [float(one) for one in found]


_TWO: Final = {"source": "derived", "how": "two GPUs, each with its own requests and half of all experts"}
MACHINE: Final = {
    "name": "two RTX PRO 6000",
    "parts": {"gpu": "RTX PRO 6000 Blackwell Server", "cpu": "epyc 9654", "ram": "12x32 ddr5-4800"},
    # Two memories; operations of one GPU, since the other waits for a prompt.
    "devices": {"gpu0": {"memory_bytes": {"value": "192 GiB", **_TWO}, "memory_bytes_per_s": {"value": 3194e9, **_TWO}}},
}
"""One machine in the place of two; the CPU is not named, and computes nothing."""


def whole(arrivals: Sequence[Arrival]) -> list[float]:
    """Run the whole simulator on the machine; return `MEASURES`."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "requests.csv"
        lines = [f"{one.ns},{one.prompt},{one.answer}" for one in arrivals]
        file.write_text("\n".join(["time_ns,prompt,answer", *lines, ""]), encoding="utf-8")
        row = moesim.run({
            "name": "peers", "model": "qwen3-30b-a3b", "cache": {"ratio": 1.0}, "plots": [], "timeline": None,
            "hardware": MACHINE,
            "trace": {"synthesize": "qwen3-30b-a3b", "requests": 8, "prompt": 512, "decode": 128},
            "policies": [{"name": "all-gpu", "engine": "vllm"}],
            "workload": {"arrivals": str(file), "scheduler": {
                **SCHEDULER, "max_num_seqs": 256, "max_num_batched_tokens": 4096, "long_prefill_token_threshold": 2048,
            }},
        }).table.iloc[0]  # fmt: skip
    keys = [f"{name}_{of}_ns" for name in ("ttft", "tpot") for of in ("mean", *(f"p{one}" for one in _TAILS))]
    return [float(row[key]) / 1e6 for key in [*keys, "e2e_mean_ns"]]


_OURS: Final = Law("none", mixed=False, expert_us=9.437 / (0.7 * 1.597), host_us=2600.0)
"""MB of an expert by what moesim's profile of vLLM reads of the memory's TB/s; its host time of a step."""
RUNS: Final[Mapping[str, Callable[[Sequence[Arrival]], list[float]]]] = {
    "scheduler of moesim, steps by the peer's numbers": lambda asked: scheduled(asked, Law()),
    "the same, collectives as measured later": lambda asked: scheduled(asked, Law(link="later")),
    "the same, no collectives": lambda asked: scheduled(asked, Law(link="none")),
    "the same, one attention kernel": lambda asked: scheduled(asked, Law(mixed=False)),
    "the same, each GPU on its own": lambda asked: scheduled(asked, Law(together=False)),
    "no collectives, one kernel, experts and host as in moesim's vllm": lambda asked: scheduled(asked, _OURS),
    "moesim, machine from its parts": whole,
}


def rows(lists: Sequence[Sequence[Arrival]]) -> dict[str, list[list[float]]]:
    """Run each list of requests; published figures come first."""
    found = {name: [list(one)] for name, one in PUBLISHED.items()}
    return found | {name: [run(asked) for asked in lists] for name, run in RUNS.items()}


def table(found: Mapping[str, Sequence[Sequence[float]]], form: Format) -> str:
    """Write the means over lists of requests."""
    cells = [
        [name, *(f"{ms:.1f}" if ms < 100 else f"{ms:.0f}" for ms in np.mean(np.array(runs), axis=0))]
        for name, runs in found.items()
    ]
    head = ["ms", *MEASURES]
    return render(head, cells, form, head[1:])


def summary(found: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """Compare the scheduler and the whole simulator with the measurement."""
    (measured,), lines = found["vLLM, measured"], []
    for name in (next(iter(RUNS)), list(RUNS)[-1]):
        runs = np.array(found[name])
        mean = 100 * (runs.mean(axis=0) / measured - 1)
        ttft = f"{runs[:, 0].min():.0f} to {runs[:, 0].max():.0f} ms" if len(runs) > 1 else f"{runs[0, 0]:.0f} ms"
        lines.append(f"{name}: mean TPOT {mean[4]:+.0f} %, whole request {mean[8]:+.0f} %; mean TTFT {ttft}")
    return lines


def _work(given: Namespace) -> None:
    found = rows([read(given.requests)])
    sys.stdout.write("\n".join([*summary(found), "", table(found, given.form)]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table for recorded requests."""
    options = command.parser("experiments.research.tables.peers", __doc__)
    options.add_argument("requests", type=Path, help="vllm/requests.jsonl of the example")
    return command.run(_work, options, arguments)


if __name__ == "__main__":
    sys.exit(main())
