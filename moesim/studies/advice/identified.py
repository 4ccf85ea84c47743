"""An advice for a machine of which speeds were observed: it is identified first."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from moesim.core.files import write_bytes
from moesim.core.progress import telling
from moesim.studies.advice.advice import Advice
from moesim.studies.advice.curve import IDENTIFIED, check_machine, curve, with_buffers
from moesim.studies.advice.observed import Observed
from moesim.studies.advice.recommend import recommend
from moesim.studies.advice.routing import find_routing
from moesim.studies.advice.setting import PLACE, Asked, look_up
from moesim.studies.identify.identify import identify
from moesim.studies.identify.reading import read_observations


def recommend_observed(asked: Asked, file: Path, *, jobs: int | None = 1, progress: bool = False) -> Advice:
    """Identify the machine by observed speeds, and search on it."""
    rows = read_observations(file, [asked.model] if isinstance(asked.model, str) and asked.gguf is None else [])
    with telling(lines=True, enabled=progress) as tell, tempfile.TemporaryDirectory(prefix="moesim.") as folder:
        setting = look_up(asked, Path(folder))  # what is wrong with the question is known before the machine is identified
        check_machine(setting)
        if asked.trace is not None:
            find_routing(setting.model, asked.trace, asked.batch, asked.prompt, asked.decode, PLACE, ())
        found = identify(asked.hardware, rows, leave_out=False, tell=tell)
        raw = {**found.raw, "name": f"{found.predictor.machine.base.name}-identified"}
        profile = write_bytes(Path(folder) / IDENTIFIED, _dumped(raw))
        asked = replace(asked, hardware=str(profile))
        tell("placements")
        setting = look_up(asked, Path(folder))
        check_machine(setting)
        contents = _dumped(with_buffers(raw, setting))
        write_bytes(profile, contents)
        # A terminal has room for one thing that moves.
        advice = recommend(asked, jobs=jobs, progress=progress and not sys.stderr.isatty())
        tell("settings of llama.cpp")
        return replace(advice, observed=Observed(found, contents, setting, curve(setting, found)))


def _dumped(raw: Any) -> bytes:
    return yaml.safe_dump(raw, sort_keys=False, width=120).encode()
