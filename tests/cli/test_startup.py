"""Commands import what they use, and no more: what they start with decides how long a small question takes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Packages that take long to import, and parts of moesim that bring them. Typer may bring Pydantic, for the types of options.
HEAVY = (
    "numpy", "pandas", "scipy", "pyarrow", "matplotlib", "yaml", "simpy", "jinja2", "rich",
    "moesim.engine", "moesim.experiment", "moesim.hardware", "moesim.live", "moesim.metrics", "moesim.plots", "moesim.policies",
    "moesim.reporting", "moesim.studies", "moesim.trace",
)  # fmt: skip
POLICIES = {"numpy", "yaml", "moesim.policies", "moesim.trace"}


def imported(code: str) -> set[str]:
    """Run some code in a process of its own, and say what of `HEAVY` it has imported."""
    told = f"{code}\nimport sys; print('\\n=', *(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("=")[2].split())


@pytest.mark.parametrize(
    ("argv", "needed"),
    [
        ("--version", set()),
        ("--help", {"rich"}),
        pytest.param("list", set(), marks=pytest.mark.long),
        pytest.param("list --help", {"rich"}, marks=pytest.mark.long),
        ("list nothing", set()),
        ("list policies", POLICIES),
        pytest.param("list policies lru dali", POLICIES, marks=pytest.mark.long),
        pytest.param("list policies --long", POLICIES, marks=pytest.mark.long),
        ("list policy-parts", POLICIES | {"rich"}),
        ("list models", {"yaml", "rich"}),
        pytest.param("list models -o csv", {"yaml"}, marks=pytest.mark.long),
        ("list traces", {"numpy", "rich", "moesim.trace"}),
        ("list formats", {"numpy", "yaml", "rich", "moesim.trace"}),
        ("list hardware", {"numpy", "yaml", "rich", "moesim.hardware"}),
    ],
)
def test_a_command_imports_no_more_than_it_needs(argv: str, needed: set[str]) -> None:
    code = f"from moesim.cli.main import main; main({argv.split()})"
    assert imported(code) <= needed


@pytest.mark.parametrize("module", ["moesim.experiment.workers", "moesim.cli.runs"])
def test_a_sweep_begins_without_what_draws(module: str) -> None:
    assert not imported(f"import {module}") & {"scipy", "matplotlib", "jinja2", "moesim.plots", "moesim.reporting", "moesim.live"}


@pytest.mark.long
def test_the_plan_of_a_measurement_imports_no_pytorch() -> None:
    code = "import moesim.live.profiler.request, sys; 'torch' in sys.modules and sys.exit(1)"
    assert "moesim.live" in imported(code)


@pytest.mark.long
def test_figures_need_no_statistics_of_scipy() -> None:
    """Student's t comes from scipy.special: all of scipy.stats takes longer than most figures."""
    code = "import moesim.plots.catalogue, sys; sys.modules.get('scipy.stats') and sys.exit(1)"
    assert "matplotlib" in imported(code)


def test_a_character_that_a_pipe_does_not_have_becomes_a_question_mark():
    """Pipes of Windows lack many."""
    told = "from moesim.cli import main as m; m.main(['--version']); print('é')"
    done = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert done.stdout.splitlines()[-1] == "?"
