"""Schedulers that are not moesim's own: errors are one line that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesim.core.own_code import reading
from moesim.errors import MoesimError
from moesim.experiment.resolve import Experiment, run_keys
from moesim.experiment.run import run_experiment
from moesim.serving import make_scheduler
from tests.serving.serving_kit import experiment, own_module

HEAD = """
from dataclasses import dataclass, field
from moesim.serving.scheduler import Pooled, Rows, Scheduler, asked

"""
ONE = """
@dataclass
class Mine(Scheduler):
    chunk: int = asked(4, "tokens")
    most_requests = 1
    most_rows = 64
    n_running = 0
    now = None

    def plan(self, now_ns):
        if self.now is None and self.waiting:
            self.now = self.waiting.popleft()
            self.n_running = 1
        return [Rows(self.now, ROWS)] if self.now else []

    def leave(self, request):
        self.now, self.n_running = None, 0
"""
RIGHT = HEAD + ONE.replace("ROWS", "min(self.chunk, self.now.known - self.now.computed)")


def failure(found: Experiment) -> str:
    """Return the error of the only run."""
    (row,) = run_experiment(found, jobs=1).rows
    return str(row["error"])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("99", "scheduler my_module:Mine: expected at most 64 rows in a step, got 99; correct its plan"),
        ("9", "scheduler my_module:Mine: expected 1 to 6 rows of request 0, got 9; correct its plan"),
        ("None", "scheduler my_module:Mine: expected a list of Rows(request, n), n an int, got n of NoneType; correct its plan"),
        ("1 // 0", "scheduler my_module:Mine raised ZeroDivisionError: integer division or modulo by zero (my_module.py:18)"),
    ],
)
def test_a_plan_that_is_impossible_ends_the_run_with_one_line(
    rows: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own_module(tmp_path, monkeypatch, HEAD + ONE.replace("ROWS", rows))
    workload = {"closed": 1, "n_requests": 2, "prompt_tokens": 6, "answer_tokens": 2, "scheduler": "my_module:Mine"}
    assert failure(experiment(workload)).startswith(words)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (("", ""), {"name": "my_modul:Mine"}, "cannot import module 'my_modul' of 'my_modul:Mine': No module named 'my_modul'"),
        (("", ""), {"name": "my_module:Min"}, "expected a class 'Min' in module 'my_module', got none"),
        (("", ""), {"name": ":Mine"}, "expected package.module:Class, got ':Mine'"),
        (("", ""), {"name": "my_module:Mine", "chunks": 4}, "unknown option of my_module:Mine 'chunks'; did you mean 'chunk'"),
        (("", ""), {"name": "my_module:Mine", "chunk": 0}, "workload.scheduler.chunk: expected an integer of at least 1, got 0"),
        (("@dataclass", ""), {}, "expected @dataclass above a class with chunk = asked(...), got none; add it"),
        (('asked(4, "tokens")', "4"), {}, "expected chunk = asked(...) or field(init=False), got neither"),
        (("(Scheduler)", ""), {}, "expected a subclass of moesim.serving.scheduler.Scheduler, got Mine"),
        (
            ("    most_rows = 64\n", ""),
            {},
            "expected most_requests, most_rows, n_running, plan, leave, got no most_rows; add them",
        ),
        (("(Scheduler)", "(Pooled)"), {}, "n_running, plan, leave, block, got no block; add them"),
        (("most_rows = 64", "most_rows = 0"), {}, "my_module:Mine: expected most_rows, an integer of at least 1, got 0"),
        (
            ("most_rows = 64", "most_rows = property(lambda self: 1 / 0)"),
            {},
            "my_module:Mine: most_rows raised ZeroDivisionError",
        ),
        (("    now = None", "    def __post_init__(self): 1 / 0"), {}, "my_module:Mine raised ZeroDivisionError"),
    ],
)
def test_a_wrong_class_is_one_line(
    change: tuple[str, str], options: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own_module(tmp_path, monkeypatch, RIGHT.replace(*change) if change[0] else RIGHT)
    with pytest.raises(MoesimError) as caught:
        experiment({"closed": 1, "n_requests": 2, "scheduler": options or "my_module:Mine"})
    assert str(caught.value).startswith("a.yaml: workload.scheduler") and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_source_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    workload = {"closed": 1, "n_requests": 2, "scheduler": "my_module:Mine"}
    own_module(tmp_path, monkeypatch, RIGHT)
    found = experiment(workload)
    before = run_keys(found)
    assert list(found.inputs()["schedulers"]) == ["my_module:Mine"] and "policies" not in found.inputs()
    (tmp_path / "my_module.py").write_text(RIGHT + "# another\n")
    assert run_keys(found) != before


def test_its_code_is_not_imported_to_read_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own_module(tmp_path, monkeypatch, RIGHT)
    with reading(trust=False) as refused, pytest.raises(MoesimError, match="whose code is not imported to read a result"):
        make_scheduler({"name": "my_module:Mine"})
    assert refused == {"my_module:Mine"}
