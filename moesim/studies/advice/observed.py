"""An advice for a machine of which speeds were observed: it is identified first, and llama.cpp's settings stand beside."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from moesim.core.atomic import write_bytes
from moesim.core.progress import telling
from moesim.core.table import Format, render_records
from moesim.studies.advice.curve import (
    IDENTIFIED,
    Point,
    check_machine,
    curve,
    curve_pictures,
    curve_records,
    curve_text,
    with_buffers,
)
from moesim.studies.advice.recommend import Advice, recommend
from moesim.studies.advice.setting import Asked, Setting, look_up
from moesim.studies.identify.identify import identify
from moesim.studies.identify.reading import read_observations
from moesim.studies.identify.report import remarks
from moesim.studies.identify.results import Identified


@dataclass(frozen=True)
class Observed:
    """What observed speeds told."""

    identified: Identified
    profile: bytes  # file of the machine that placements were searched on: of its GPU the engine's buffers are taken
    setting: Setting  # the question, on the machine before that
    points: list[Point]  # settings of llama.cpp

    def text(self, form: Format, *, pictured: bool = False) -> str:
        """Write it for people; in Markdown with the picture of the folder, if wanted."""
        mark = "- " if form is Format.MD else ""
        image = "![speed over --n-cpu-moe by context](curve.png)\n\n" if pictured else ""
        said = "".join(f"{mark}{one}\n" for one in remarks(self.identified, []))
        return f"{curve_text(self.points, self.setting, form)}\n{image}{said}"

    def values(self) -> dict[str, Any]:
        """Give it for programs."""
        return {"identified": remarks(self.identified, []), "curve": curve_records(self.points)}

    def files(self) -> dict[str, bytes]:
        """Give the files of a folder by name."""
        table = render_records(curve_records(self.points), Format.CSV).encode()
        return {IDENTIFIED: self.profile, "curve.csv": table, **curve_pictures(self.points, self.setting, self.identified)}


def recommend_observed(asked: Asked, file: Path, *, jobs: int | None = 1, progress: bool = False) -> Advice:
    """Identify the machine by observed speeds, and search on it."""
    rows = read_observations(file, [asked.model] if isinstance(asked.model, str) and asked.gguf is None else [])
    with telling(lines=True, enabled=progress) as tell, tempfile.TemporaryDirectory(prefix="moesim.") as folder:
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
