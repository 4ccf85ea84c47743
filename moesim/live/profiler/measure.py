"""Measure a machine: from a request to YAML profiles, samples, fits, figure and report."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from moesim import __version__
from moesim.core.files import OutputFolder
from moesim.core.progress import Progress
from moesim.core.table import frame_csv
from moesim.errors import ConfigError, InputError
from moesim.hardware import build_profile
from moesim.live.profiler.bench import Machine, RealBench
from moesim.live.profiler.figure import draw
from moesim.live.profiler.fits import fit_all
from moesim.live.profiler.plan import Plan
from moesim.live.profiler.profile import Facts, profiles_of
from moesim.live.profiler.request import Prepared
from moesim.live.profiler.samples import COMMAND, Bench, Store, sample

DRIFT = 0.1  # by how much sentinels may differ before a warning


def measure(
    prepared: Prepared, *, bench: Bench | None = None, progress: bool = True,
    warn: Callable[[str], None] = lambda text: None, until: float = math.inf,
) -> list[Path]:  # fmt: skip
    """Measure what has been prepared, and write profiles and samples.

    Parameters
    ----------
    prepared : Prepared
        From `prepare`.
    bench : Bench, optional
        What runs the probes; by default the machine that it has been prepared for.
    progress : bool
        Show a bar on a terminal.
    warn : callable
        Gets what the reader of the profile must know.
    until : float, seconds
        Of the monotonic clock: what is not measured by then is left out, and models that are not whole.

    Returns
    -------
    list of Path
        The profiles.

    Raises
    ------
    InputError
        If files cannot be written, or an unfinished measurement is of another machine or plan. What was measured until
        then is kept, and the same command goes on.
    """
    request, plan = prepared.request, prepared.plan
    store = Store(request.out / request.name, plan, prepared.words, resume=request.resume)
    machine = prepared.machine if isinstance(prepared.machine, Machine) else Machine()
    carrier: Bench = bench or RealBench(plan, machine)
    try:
        with Progress(plan.repeats * len(plan.probes), enabled=progress) as bar:

            def tell(text: str, steps: int) -> None:
                bar.describe(text)
                bar.advance(steps)

            seconds = sample(plan, carrier, store, tell, until)
    except OSError as error:
        raise InputError(f"profile measure: expected disk and workers to work, got: {error}; the same command goes on") from None
    finally:
        carrier.close()
    plan = _whole(plan, store)
    samples = store.frame()
    drift = sentinel_drift(samples, plan.repeats)
    for what, found in drift.items():
        if abs(found["drift"]) > DRIFT:
            warn(
                f"the sentinel '{what}' took {found['low_us']:.4g} to {found['high_us']:.4g} us in the course of the measurement "
                f"({100 * found['drift']:.0f} %): something throttled or disturbed this machine; measure again when it is quiet"
            )
    for text in plan.notes:
        warn(text)
    report = _report(replace(prepared, plan=plan), store, drift, seconds, carrier.disk_mode)
    places = {device.place for device in plan.layout.devices.values()}
    capacities = {place: prepared.machine.capacity_bytes(place, plan.layout.disk) for place in places}
    facts = Facts(request.name, report["date"], prepared.words, capacities, plan.notes)
    paths = write_all(request.out, request.name, profiles_of(samples, plan.layout, plan.wanted, facts), samples, report)
    store.remove()
    return paths


def _whole(plan: Plan, store: Store) -> Plan:
    """Return a plan without the blocks that a store lacks a part of, and their models."""
    lacking = [b.name for b in plan.blocks if not all(store.has(p, plan.repeats - 1) for p in b.probes)]
    if not lacking:
        return plan
    wanted = tuple(each for each in plan.wanted if f"model {each.model.name}" not in lacking)
    if not wanted or "copies" in lacking:
        raise ConfigError(
            f"profile measure: expected time for copies and a model, got too little for {', '.join(lacking)}; give more"
        )
    blocks = tuple(block for block in plan.blocks if block.name not in lacking)
    return replace(plan, wanted=wanted, blocks=blocks, notes=(*plan.notes, f"no time was left for all of: {', '.join(lacking)}"))


def sentinel_drift(samples: pd.DataFrame, repeats: int) -> dict[str, dict[str, Any]]:
    """Compare the medians of each sentinel over a measurement; ``drift`` is high / low - 1."""
    found = {}
    for subject, rows in samples[samples["kind"] == "sentinel"].groupby("subject", sort=True):
        groups = rows.groupby([rows["variant"], rows["repeat"] // repeats])
        times = groups.agg(us=("time_us", "median"), order=("order", "min")).sort_values("order")["us"]
        low, high = float(times.min()), float(times.max())
        found[str(subject)] = {
            "first_us": float(times.iloc[0]), "last_us": float(times.iloc[-1]), "low_us": low, "high_us": high,
            "drift": high / low - 1,
        }  # fmt: skip
    return found


def _report(prepared: Prepared, store: Store, drift: dict[str, Any], seconds: float, disk_mode: str) -> dict[str, Any]:
    request, plan = prepared.request, prepared.plan
    return {
        "name": request.name, "date": time.strftime("%Y-%m-%d", time.gmtime()), "command": request.command,
        "moesim": __version__, "machine": prepared.words, "mode": plan.mode, "seed": plan.seed,
        "repeats": plan.repeats, "models": [each.model.name for each in plan.wanted],
        "memory_budget_bytes": prepared.budgets["cpu"], "seconds": round(seconds, 1),
        "sessions": store.sessions, "probes": len(plan.probes), "skipped": store.skipped, "disk": disk_mode,
        "sentinels": drift, "notes": list(plan.notes),
    }  # fmt: skip


_HEAD = """\
# Measured with moesim profile measure, {date}. Samples, fitted forms, figure and report: {folder}/.
# Labels and format: README.md. Times are medians; the command that was given is in {folder}/measurement.json.
"""


class _Flow(dict[str, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(_Flow, lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True))
_Dumper.add_representer(tuple, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True))


def _flowing(value: Any) -> Any:
    if isinstance(value, Mapping):
        inner = {key: _flowing(each) for key, each in value.items()}
        return _Flow(inner) if "source" in value or "bits" in value else inner
    if isinstance(value, list):
        inner_list = [_flowing(each) for each in value]
        return tuple(inner_list) if all(isinstance(each, (int, float, tuple)) for each in inner_list) and value else inner_list
    return value


def profile_text(content: Mapping[str, Any], date: str, folder: str) -> str:
    """Write a profile as YAML."""
    build_profile(content, f"{content['name']}.yaml")
    body = yaml.dump(_flowing(content), Dumper=_Dumper, sort_keys=False, width=130, allow_unicode=True)
    return _HEAD.format(date=date, folder=folder) + "\n" + body


def write_all(
    out: Path, name: str, profiles: Mapping[str, Mapping[str, Any]], samples: pd.DataFrame, report: Mapping[str, Any]
) -> list[Path]:
    """Write all files, the profiles last; all are made before the first one appears."""
    texts = {which: profile_text(content, str(report["date"]), name) for which, content in profiles.items()}
    fits = fit_all(samples)
    picture = io.BytesIO()
    draw(samples, fits).savefig(picture, format="png", dpi=150, metadata={"Software": None})
    told = samples.copy()
    told["time_us"] = told["time_us"].round(3)
    beside = {
        "samples.csv": frame_csv(told),
        "fits.csv": frame_csv(fits, float_format="%.6g"),
        "curves.png": picture.getvalue(),
        "measurement.json": (json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    files = {f"{name}/{file}": data for file, data in beside.items()} | {
        f"{which}.yaml": text.encode() for which, text in texts.items()
    }
    OutputFolder(out, COMMAND, owned=False).put(files, last=f"{next(iter(texts))}.yaml")
    return [out / f"{which}.yaml" for which in texts]
