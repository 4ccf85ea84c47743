"""Files and folders that may not be read: one line with the path and the reason, and exit code 2 before anything runs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moesim.cli.main import main
from tests.experiment.experiment_kit import write_yaml

_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
_AS_OTHERS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner"] if _ROOT else []
_RUN = """
import contextlib, io, json, sys
from moesim.cli.main import main
answers = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""
COMMANDS = {
    "run small.yaml --out no-dataset": "no-dataset/dataset: ",
    "run small.yaml --out no-dataset --dry-run": "no-dataset/dataset: ",
    "run small.yaml --out no-frames": "no-frames/frames/",
    "run small.yaml --out no-frames --dry-run": "no-frames/frames/",
    "run small.yaml --out no-records": "no-records/records: ",
    "report no-plots": "no-plots/plots: ",
    "diff no-result:0 no-result:1": "no-result/summary.json: ",
    "plot decode_speed no-result --out new": "no-result/",
    "plot decode_speed no/runs.parquet --out new": "no/runs.parquet: ",
    "run small.yaml --out new --set trace=no/t.safetensors": "no/t.safetensors: ",
    "run small.yaml --out new --set hardware=no/h.yaml": "no/h.yaml: ",
    "run no/small.yaml --out new": "no/small.yaml: ",
    "trace stats no/t.safetensors": "no/t.safetensors: ",
    "trace import no/x.csv --out new.safetensors": "no/x.csv: ",
    "trace export ./no/t.safetensors --format csv --out new.csv": "no/t.safetensors: ",
    "profile show no/h.yaml": "no/h.yaml: ",
    "profile check no/h.yaml": "no/h.yaml: ",
    "profile compare no/h.yaml no/h.yaml": "no/h.yaml: ",
    "recommend --model no/x.gguf --hardware rtx3090-epyc7532": "no/x.gguf: ",
}


@pytest.mark.long
def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if _ROOT and shutil.which("setpriv") is None:
        pytest.skip("root reads everything, and setpriv is not installed")
    monkeypatch.chdir(tmp_path)
    write_yaml(tmp_path)
    assert main(["run", "small.yaml", "--out", "result"]) == 0
    (tmp_path / "no").mkdir()
    for name in ("no-dataset", "no-frames", "no-records", "no-plots", "no-result"):
        shutil.copytree("result", name)
        (tmp_path / name / name.removeprefix("no-")).mkdir(exist_ok=True)
    shutil.copy("small.yaml", "no")
    closed = [Path("no"), Path("no-result"), *(Path(f"no-{name}/{name}") for name in ("dataset", "frames", "records", "plots"))]
    before = _files()
    for folder in closed:
        folder.chmod(0)
    try:
        done = subprocess.run(
            [*_AS_OTHERS, sys.executable, "-c", _RUN],
            input=json.dumps([command.split() for command in COMMANDS]),
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for folder in closed:
            folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    for (command, place), (code, out, err) in zip(COMMANDS.items(), json.loads(done.stdout), strict=True):
        assert (code, out, err.count("\n")) == (2, "", 1), (command, out, err)
        assert err.startswith(f"moesim: {place}"), command
        assert "Permission denied" in err, command
    assert _files() == before, "nothing is written if the input cannot be read"


def _files() -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(errno.ENOENT, "gone", "x"), OSError("no file at all"), PermissionError(errno.EACCES, "of no file")],
)
def test_a_defect_keeps_its_traceback(error: OSError, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("moesim.profile.load_hardware", fail)
    with pytest.raises(type(error)):
        main(["profile", "show", "rtx3090-epyc7532"])
