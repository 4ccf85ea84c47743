"""What observed speeds of a machine tell beside an advice: its constants, and llama.cpp's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesim.core.table import Format, render_records
from moesim.studies.advice.curve import (
    IDENTIFIED,
    Point,
    curve_pictures,
    curve_records,
    curve_text,
)
from moesim.studies.advice.setting import Setting
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
