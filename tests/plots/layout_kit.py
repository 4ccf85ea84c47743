"""Small results for every kind of figure with any number of policies, and what collides in a figure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.text
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesim.metrics.breakdown import CAUSES
from moesim.metrics.machine import Machine
from moesim.plots.catalogue import KINDS
from moesim.records import LayerRecord, Records, StepRecord, TaskRecord, TransferRecord
from moesim.serving.requests import RequestRecord
from moesim.serving.steps import Served
from moesim.trace import Signal, Trace
from tests.plots.plots_kit import rows

S, MS = 10**9, 10**6


def policies(n: int) -> list[str]:
    """Name policies at length; the last is the optimum, the second one is not exact."""
    parts = "composed(replacement=my_experiments.caches.newest:Newest{},prefetch=predicted)"
    long = ["a-policy-without-a-break-in-its-name-{}", "Ours: windows of four layers, and two uploads at once, {}", parts]
    return [long[i % 3].format(i) for i in range(n - 1)] + ["belady"]


def _rows(names: Sequence[str], **swept: Sequence[Any]) -> pd.DataFrame:
    """Rows of two repeats at each combination of values."""
    grid: list[dict[str, Any]] = [{}]
    for name, values in swept.items():
        grid = [{**one, name: value} for one in grid for value in values]
    found = []
    for i, policy in enumerate(names):
        for j, setting in enumerate(grid):
            for seed in range(2):
                speed = (3.1 + 7.7 * i + seed) * (1 + j)
                more = {
                    "n_decode_tokens": 8, "hit_rate_decode": min(0.99, 0.2 + 0.04 * i + 0.1 * j),
                    "peak_memory_bytes.gpu0": (20 + i) << 29, "fidelity_fresh_decode": 0.95 if i == 1 else 1.0,
                    "source_label": "oracle" if policy == "belady" else "published",
                    "prefill_tokens_per_s": 40 * speed, "energy_j_per_token": 300 / speed, "energy_label": "assumed",
                    "ttft_p50_ns": S / speed, "e2e_mean_ns": 9 * S / speed, "requests_per_s": speed,
                    "goodput_per_s": 0.37 * speed,
                    **{f"decode_time_{cause}_ns": MS * (k + 1) * (i + 1) for k, cause in enumerate(CAUSES)},
                }  # fmt: skip
                found.append((policy, speed, {"hardware": "rtx3090-epyc7532", **setting, "seed": seed, "repeat": seed, **more}))
    frame = rows(*found)
    return frame.assign(policy_name=frame["policy"], run=range(len(frame)))


def _heat_map(n: int) -> pd.DataFrame:
    return _rows(["dali"], batch_size=list(range(1, n + 1)), prompt_tokens=[16, 64, 1024, 65536])


def _steps(names: Sequence[str]) -> pd.DataFrame:
    found = []
    for run, policy in enumerate(names):
        for step in range(9):
            begin, end = (MS * (run + 1) * 40 * at * (at + 1) for at in (step, step + 1))
            decode = {"token": step, "lookups": 8, "hits": (run + step) % 8} if step else {"token": None, "lookups": 8, "hits": 8}
            found.append({"policy": policy, "run": run, "step": step, "phase": "decode" if step else "prefill", "begin": begin,
                          "end": end, "batch": 0, "n_tokens": 2, "n_sequences": 2, "cache_ratio": 0.25, "cache_share": 0.25,
                          "source_label": "derived", **decode})  # fmt: skip
    return pd.DataFrame(found)


def _layers(names: Sequence[str]) -> pd.DataFrame:
    found = []
    for i, policy in enumerate(names):
        for layer in range(32):
            times = {f"{side}_{what}_ns": MS * (1 + (layer * (i + 3) + k) % 7)
                     for k, (side, what) in enumerate((s, w) for s in ("cpu", "gpu") for w in ("done", "longest"))}  # fmt: skip
            causes = {f"time_{cause}_ns": MS * (k + layer) for k, cause in enumerate(CAUSES)}
            found.append({"policy": policy, "layer": layer, "phase": "decode", "cache_ratio": 0.25, "source_label": "derived",
                          **times, **causes})  # fmt: skip
    return pd.DataFrame(found)


def _run() -> Records:
    run = Records(makespan_ns=8 * MS)
    for layer in (0, 1):
        at = 4 * MS * layer
        run.tasks += [
            TaskRecord(at + k * MS, at + (k + 1) * MS, "gpu0", "main", "expert", 0, layer, 0, 117 + k, 1, 1, at, at)
            for k in range(3)
        ]
        run.tasks += [TaskRecord(at, at + 3 * MS, "cpu0", "main", "expert", 0, layer, 0, 17, 1, 1, at, at)]
        run.transfers += [TransferRecord(at + k * MS, at + (k + 1) * MS, "cpu0->gpu0", cause, layer, 100 + k, 9, 0, 1, 1, True, 0)
                          for k, cause in enumerate(("demand", "prefetch"))]  # fmt: skip
        run.layers.append(LayerRecord(at, at + 4 * MS, 0, layer))
    run.steps.append(StepRecord(0, 8 * MS, 0, "decode", 0, 1, 1, 1.0))
    return run


def _served() -> Served:
    made = [
        RequestRecord(i, -1, *(t * S for t in (i, i + i // 2, i + i // 2 + 1, 2 * i + 9)), 4, 2, 2, 0, i == 3, 0)
        for i in range(20)
    ]
    return Served(made, array("q"), 0, 0, 0, 0, 60 * S)


def _trace() -> Trace:
    """Six layers of eight experts, top 2, with three signals of long names."""
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((64, 6, 8)), axis=2)[:, :, :2].astype(np.uint8)
    named = np.argsort(rng.random((64, 6, 2)), axis=2).astype(np.uint8)
    which = np.arange(64, dtype=np.int32)
    signals = {name: Signal(name=name, rows=which, scores=np.ones(named.shape, np.float16), ids=named, lookahead=0, first_layer=0)
               for name in ("residual", "shadow-of-a-smaller-router-int8", "learned-from-the-states-of-two-layers")}  # fmt: skip
    return Trace.build(
        experts=experts, weights=np.ones(experts.shape), n_prompt=[0] * 4, n_decode=[16] * 4, n_experts=8, signals=signals,
        model="a-model-of-the-tests", label="synthetic", prompt_offset=1,
    )  # fmt: skip


def _whatif(names: Sequence[str]) -> pd.DataFrame:
    knobs = {"cpu0->gpu0 bandwidth": "16 GB/s", "CPU memory bandwidth": "a second memory module of 40 GB/s", "GPU": "another"}
    return pd.DataFrame([
        {"policy": policy, "knob": knob, "setting": f"{setting} x{factor}", "factor": factor, "source_label": "derived",
         "model": "mixtral-8x7b", "hardware": "rtx3090-epyc7532", "decode_tokens_per_s": (9.0 + i) * factor**0.4,
         "base_decode_tokens_per_s": 9.0 + i}
        for i, policy in enumerate(names) for knob, setting in knobs.items() for factor in (0.5, 2)
    ])  # fmt: skip


def _regret(names: Sequence[str]) -> pd.DataFrame:
    decisions = ("prediction", "replacement", "assignment", "bandwidth")
    return pd.DataFrame([
        {"policy": policy, "order": order, "decision": one, "replaced": True, "base_ns": (9 + i) * S,
         "before_ns": (9 + i - k) * S, "after_ns": (8 + i - k) * S, "lower_bound_ns": 3 * S,
         "lower_bound_instant_links_ns": S, "source_label": "derived"}
        for i, policy in enumerate(names) for order in ("forward", "reversed") for k, one in enumerate(decisions)
    ])  # fmt: skip


def _league(names: Sequence[str]) -> pd.DataFrame:
    models = [f"a-model-of-{i}b (expert_bits 4)" for i in range(5)]
    machines = [f"rtx-{3060 + i}+ryzen-7-5700x+64gb" for i in range(6)]
    cells = [(model, machine, batch, phase) for model in models for machine in machines for batch in (1, 16)
             for phase in ("decode", "prefill")]  # fmt: skip
    return pd.DataFrame([
        {"model": model, "hardware": machine, "batch_size": batch, "phase": phase, "best": names[i % len(names)],
         "margin": 1 + i / 9, "certain": i % 3 > 0, "source_label": "derived"}
        for i, (model, machine, batch, phase) in enumerate(cells)
    ])  # fmt: skip


def _lookahead(names: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame([
        {"model": name, "trace": f"mini-{i}", "slots": slots, "cached_share": slots / 64, "top_k": 2 + i % 7, "tokens": 256,
         "window_tokens": window, "closed": 1 - 0.5**window, "half_window_tokens": slots / 3 + i}
        for i, name in enumerate(names) for slots in (8, 16, 32) for window in (0, 1, 2, 4, 8)
    ])  # fmt: skip


def _capacity(names: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame([
        {"policy": policy, "unit": "requests per second", "capacity": 0.4 * (i + 1), "low": 0.3 * (i + 1), "high": 0.5 * (i + 1),
         "bound": "at least" if i == 2 else "", "ttft_p50_s": 0.2 + 1.7 * i, "share": 0.9, "asked": "TTFT 2 s",
         "label": "assumed"}
        for i, policy in enumerate(names)
    ])  # fmt: skip


def _validation(names: Sequence[str]) -> pd.DataFrame:
    sides = {"predicted": 1.1, "measured": 1.0, "low": 0.9, "high": 1.2}
    return pd.DataFrame([
        {"policy": policy, "repeats": 3, "source_label": "measured", "model": "mixtral-8x7b",
         **{f"decode_step_ns_{side}": MS * factor * (i + 1) * 30 for side, factor in sides.items()}}
        for i, policy in enumerate(names)
    ])  # fmt: skip


def _papers(names: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame([
        {"paper": name, "figure": "Fig. 1", "system": "dali", "over": "", "kind": "value", "published": 2.0 * 1.4**i,
         "simulated": 2.2 * 1.4**i, "identified": 2.1 * 1.4**i, "consistent": "no" if i == 1 else "yes", "source": "runs"}
        for i, name in enumerate(names)
    ])  # fmt: skip


def inputs(kind: str, n: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and options of a kind, of n policies."""
    names, machine = policies(n), Machine({"gpu0": "gpu", "cpu0": "cpu"}, ("cpu0->gpu0", "gpu0->cpu0"))
    swept = {
        "heatmap": {}, "hit_rate": {"cache_ratio": [0.125, 0.25, 0.5]}, "vram": {"cache_ratio": [0.125, 0.25, 0.5]},
        "speed_by_context": {"prompt_tokens": [16, 64, 1024, 65536], "batch_size": [1, 2, 4, 8, 16, 32]},
        "latency_by_load": {"rate": [0.25, 0.5, 1.0, 2.0, 4.0], "batch_size": [1, 2, 4, 8]},
        "goodput": {"rate": [0.25, 0.5, 1.0, 2.0]},
        "best_setting": {"prompt_tokens": [16, 1024, 65536], "batch_size": [1, 2, 4, 8]},
        "breakdown": {"cache_ratio": [0.125, 0.25]}, "prefill_speed": {"batch_size": [1, 4]}, "energy": {"batch_size": [1, 4]},
        "ladder": {"hardware": ["rtx3090-epyc7532", "another-machine"]},
    }.get(kind, {"batch_size": [1, 16], "cache_ratio": [0.125, 0.25, 0.375, 0.5, 0.625, 0.75]})  # fmt: skip
    made = {
        "rows": lambda: [_heat_map(n) if kind == "heatmap" else _rows(names, **swept)],
        "steps": lambda: [_steps(names)],
        "layers": lambda: [_layers(names[1:2] if kind == "time_by_layer" else names)],
        "records": lambda: [{name: _run() for name in names}, machine],
        "requests": lambda: [{name: _served() for name in names}],
        "trace": lambda: [_trace()],
        "capacity": lambda: [_capacity(names)], "validation": lambda: [_validation(names)], "papers": lambda: [_papers(names)],
        "regret": lambda: [_regret(names)], "whatif": lambda: [_whatif(names)], "league": lambda: [_league(names)],
        "lookahead": lambda: [_lookahead(names)],
    }[KINDS[kind].source]()  # fmt: skip
    options: dict[str, Any] = {
        "heatmap": {"x": "batch_size", "y": "prompt_tokens"}, "speedup_lines": {"x": "batch_size"},
        "gantt": {"step": 0, "layers": [0, 1]}, "best_setting": {"y": "batch_size"}, "reuse_map": {"lags": 8},
    }.get(kind, {})  # fmt: skip
    return made, options


def collisions(figure: Figure) -> list[str]:
    """List texts that overlap one another or leave the canvas, by their extents as rendered."""
    figure.set_dpi(240)  # as pictures are saved
    figure.draw_without_rendering()
    beyond = {id(label) for axes in figure.axes for label in _beyond(axes)}
    texts = [one for one in figure.findobj(matplotlib.text.Text) if one.get_visible() and id(one) not in beyond]
    shown = [(one.get_text(), one.get_window_extent()) for one in texts if one.get_text().strip()]
    whole, found = figure.bbox, []
    for name, box in shown:
        if box.x0 < whole.x0 - 1 or box.y0 < whole.y0 - 1 or box.x1 > whole.x1 + 1 or box.y1 > whole.y1 + 1:
            found.append(f"'{name}' leaves the canvas")
    for i, (name, one) in enumerate(shown):
        for other, two in shown[i + 1 :]:
            across, up = min(one.x1, two.x1) - max(one.x0, two.x0), min(one.y1, two.y1) - max(one.y0, two.y0)
            if across > 0.5 and up > 0.5:
                found.append(f"'{name}' on '{other}'")
    return found


def _beyond(axes: Axes) -> Iterator[matplotlib.text.Text]:
    """Labels of ticks that are not drawn, as they are beyond the limits of their axis."""
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not (axes.axison and min(limits) <= tick.get_loc() <= max(limits)):
                yield from (tick.label1, tick.label2)
