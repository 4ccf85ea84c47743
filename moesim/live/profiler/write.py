"""Files of a measurement: profiles as YAML, and samples, fits, figure and report in a folder beside them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pandas as pd
import yaml

from moesim.core.output_folder import OutputFolder
from moesim.core.table import frame_csv
from moesim.hardware import build_profile
from moesim.live.profiler.figure import draw
from moesim.live.profiler.fits import fit_all
from moesim.live.profiler.store import COMMAND

_BESIDE: Final = ("samples.csv", "fits.csv", "curves.png", "measurement.json")
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
    """Mark numbers with their source, shapes, and lists of numbers, which are easier to read on a line."""
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
    """Write everything; all is made before the first file appears, the profiles come last, and each file is whole."""
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


def check_free(out: Path, name: str, profiles: Iterable[str]) -> None:
    """Raise `InputError` if a file that moesim did not write stands where `write_all` is to write one."""
    names = [*(f"{name}/{file}" for file in _BESIDE), *(f"{which}.yaml" for which in profiles)]
    OutputFolder(out, COMMAND, owned=False).check_free(names)
