"""The folder that an advice leaves behind: the advice, its runs, and the best placement as an experiment."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from moesim import __version__
from moesim.core.files import OutputFolder
from moesim.core.table import Format, render_records
from moesim.experiment.store import SUMMARY
from moesim.studies.advice.advice import Advice
from moesim.studies.advice.candidates import STAND_INS, experiment_of
from moesim.studies.advice.curve import IDENTIFIED
from moesim.studies.advice.setting import model_yaml
from moesim.studies.advice.show import text
from moesim.studies.advice.values import document, rows_of


def write_folder(advice: Advice, out: Path) -> None:
    """Write an advice; an earlier result in the folder is replaced at the end."""
    rows = rows_of(advice)
    raw = experiment_of(advice.setting, advice.routing.written, [advice.best.candidate], advice.setting.asked.decode)
    raw.pop("timeline")
    raw["workload"]["n_batches"] = len(advice.routing.groups)
    if advice.best.candidate.note:
        raw["predictors"] = dict(STAND_INS)
    files = {} if advice.observed is None else advice.observed.files()
    if advice.observed is not None:
        raw["hardware"] = {**raw["hardware"], "base": str(out / IDENTIFIED)}
    if advice.setting.asked.gguf is not None:
        files["model.yaml"] = model_yaml(advice.setting.model).encode()
        raw["model"] = str(out / "model.yaml")
    files["best.yaml"] = yaml.safe_dump({"name": "best", **raw}, sort_keys=False).encode()
    files["recommendation.json"] = (json.dumps(document(advice), indent=2) + "\n").encode()
    files["recommendation.md"] = text(advice, Format.MD, pictured=True).encode()
    files["runs.csv"] = render_records(rows, Format.CSV).encode()
    files[SUMMARY] = (json.dumps({"moesim": __version__, "runs": rows}, indent=2) + "\n").encode()
    if advice.observed is not None:
        path = advice.setting.hardware.path.encode()  # where the machine was while it was simulated is of no use to a reader
        files = {name: content.replace(path, IDENTIFIED.encode()) for name, content in files.items()}
    OutputFolder(out, "recommend").replace(files, last=SUMMARY)
