"""What figures are drawn from: frames read from the folders that commands have written."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from moesim.core.manifest import read_verified
from moesim.core.text import uncell
from moesim.core.units import as_share
from moesim.errors import ConfigError, unknown_name
from moesim.plots.rows import REPEATS, column_of, group_name, settings_in

FILES: Final = {
    "rows": "runs.parquet",
    "steps": "frames/steps.parquet",
    "layers": "frames/layers.parquet",
    "validation": "results.csv",
    "papers": "papers.csv",
    "regret": "regret.csv",
    "whatif": "whatif.parquet",
    "league": "map.csv",
    "lookahead": "lookahead.csv",
}
"""Source -> file in its folder."""

_REMEDY: Final = {
    "rows": "write one with `moesim run EXPERIMENT.yaml --out FOLDER`",
    "steps": "set `frames: true` in the experiment and run it again",
    "layers": "set `frames: true` in the experiment and run it again",
    "validation": "write one with `moesim validate EXPERIMENT.yaml --out FOLDER`",
    "papers": "write one with `moesim papers --out FOLDER`",
    "regret": "write one with `moesim regret EXPERIMENT.yaml --out FOLDER`",
    "whatif": "write one with `moesim whatif EXPERIMENT.yaml --out FOLDER`",
    "league": "write one with `moesim league --out FOLDER`",
    "lookahead": "write one with `moesim trace lookahead TRACE --out FOLDER`",
}
_RUNS: Final = 1_000_000  # more than a sweep has; what numbers the runs of a further folder


def read_frames(source: str, paths: Sequence[Path], what: str) -> pd.DataFrame:
    """Read the frame of a source from folders or files, one after the other."""
    frames = []
    for number, path in enumerate(paths):
        frame = _read(_file(source, path, what), what)
        if "run" in frame and pd.api.types.is_numeric_dtype(frame["run"]):
            frame["run"] += number * _RUNS
        frames.append(frame)
    return _once(frames)


def all_policies(source: str, paths: Sequence[Path], frame: pd.DataFrame, what: str) -> list[str]:
    """List the policies of whole results in their order: those of all runs, of which steps and layers lack what failed."""
    known: list[str] = []
    for path in paths if source in ("steps", "layers") else ():
        file = path / FILES["rows"]
        if file.is_file():
            runs = _read(file, what)
            known += runs["policy"].astype(str).tolist() if "policy" in runs else []
    return list(dict.fromkeys([*known, *(frame["policy"].astype(str) if "policy" in frame else [])]))


def _once(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Join frames without the runs that an earlier one has."""
    records: list[dict[Any, Any]] = []
    seen: set[str] = set()
    for frame in frames:
        names = ["key"] if "key" in frame and frame["key"].notna().all() else [name for name in frame if name != "run"]
        texts = ["\x1f".join(map(str, values)) for values in frame[names].astype(object).itertuples(index=False)]
        kept = [text not in seen for text in texts]
        records += frame[kept].astype(object).to_dict("records")
        seen.update(texts)
    columns = list(dict.fromkeys(name for frame in frames for name in frame))
    return pd.DataFrame(records, columns=columns).infer_objects() if len(frames) > 1 else frames[0]


def _file(source: str, path: Path, what: str) -> Path:
    if path.is_dir():
        file = path / FILES[source]
        if not file.is_file():
            raise ConfigError(f"{path}: plot {what}: expected {FILES[source]} in it, got no such file; {_REMEDY[source]}")
        return file
    if not path.is_file():
        raise ConfigError(f"{path}: plot {what}: expected a folder with {FILES[source]}, got nothing there; {_REMEDY[source]}")
    return path


def _read(file: Path, what: str) -> pd.DataFrame:
    try:
        if file.suffix == ".parquet":
            return pd.read_parquet(io.BytesIO(read_verified(file)))
        if file.suffix == ".csv":
            read = pd.read_csv(io.BytesIO(read_verified(file)))
            return read.rename(columns=uncell).map(uncell, na_action="ignore")
    except (OSError, ValueError) as error:  # of Arrow and of the CSV reader too
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"{file}: plot {what}: expected a table that can be read, got: {said}; write it again") from None
    raise ConfigError(f"{file}: plot {what}: expected a folder, or a file that ends in .parquet or .csv, got '{file.name}'")


def chosen(frame: pd.DataFrame, policies: Sequence[str], where: Sequence[tuple[str, str]], what: str) -> pd.DataFrame:
    """Keep some policies, in the order in which they are named, and the rows with the given values."""
    for column, value in where:
        column = column_of(frame, column)
        if column not in frame:
            settings = [name for name in ("policy", "policy_name", *settings_in(frame), *REPEATS) if name in frame]
            raise ConfigError(f"plot {what}: --where: {unknown_name('column', column, settings)}")
        names = [{group_name(one, column), group_name(one), str(one)} for one in frame[column]]
        wanted = {value, str(as_share(value))}  # 1/3 is one, too
        kept = [not wanted.isdisjoint(found) for found in names]
        if not any(kept):
            values = ", ".join(dict.fromkeys(group_name(one, column) for one in frame[column]))
            raise ConfigError(f"plot {what}: --where: expected {column} to be one of {values}, got '{value}'")
        frame = frame[kept]
    if not policies:
        return frame
    if "policy" not in frame:
        raise ConfigError(f"plot {what}: --policies: expected results of policies, got a table without the column policy")
    known = list(dict.fromkeys(frame["policy"]))
    for name in policies:
        if name not in known:
            raise ConfigError(f"plot {what}: --policies: {unknown_name('policy of these results', name, known)}")
    return pd.concat([frame[frame["policy"] == name] for name in dict.fromkeys(policies)])
