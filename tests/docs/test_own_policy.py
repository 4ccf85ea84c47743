"""Parts of one's own can be named in YAML; the page on own policies shows examples that run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim.cli.main import main
from moesim.errors import ConfigError
from moesim.experiment.sweep import policies_of
from moesim.policies.composed import Composed
from moesim.policies.cpu_cache import BackgroundCache
from moesim.policies.registry import POLICIES, make_policy, policy_class
from moesim.policies.user_code import sources_digest, would_import
from moesim.testing import check_policy
from tests.experiment.experiment_kit import write_yaml

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "own-policy.md").read_text(encoding="utf-8")
PART, COMPOSITION, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
BLOCKS = [yaml.safe_load(block)["policies"] for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
NEWEST = "my_module:NewestFirst"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    (tmp_path / "my_module.py").write_text(PART)
    return tmp_path


POINTS = [point for spec in [*BLOCKS[0], *BLOCKS[1]] for point in policies_of(spec, "page", imports=False)]


@pytest.mark.parametrize("spec", POINTS, ids=str)
def test_the_compositions_of_the_page_pass_the_checks(spec: dict[str, Any]) -> None:
    policy = make_policy(spec)
    assert ("NewestFirst" in str(spec)) == (type(policy.parts.replacement).__name__ == "NewestFirst")  # type: ignore[attr-defined]
    check_policy(lambda: make_policy(spec))


def test_the_page_shows_a_part_alone_with_options_and_a_sweep() -> None:
    assert [str(point.get("replacement")).count("NewestFirst") for point in POINTS] == [1, 0, 1, 0]


@pytest.mark.parametrize("spec", BLOCKS[3], ids=str)
def test_the_decisions_of_a_background_cache_on_the_page_pass_the_checks(spec: dict[str, Any]) -> None:
    check_policy(lambda: make_policy(spec), slots=(12,))


def test_the_caches_of_engines_on_the_page_are_registered() -> None:
    text = PAGE.partition("## Caches of engines")[2].partition("\n\n")[2].partition("\n\n")[0]
    names = [name for name in re.findall(r"`([\w-]+)`", text) if name in POLICIES]
    bases = {name for name in POLICIES if issubclass(policy_class(name), BackgroundCache) and name != "background-cache"}
    assert len(names) == 12 and bases <= set(names)


def test_the_named_composition_of_the_page_passes_the_checks(folder: Path) -> None:
    (folder / "my_module.py").write_text(COMPOSITION)
    policy = make_policy({"name": "my_module:Frequent", "ties": "last-use"})
    assert isinstance(policy, Composed)
    assert repr(policy.parts.replacement) == "LFU(victims='unrouted-first', ties='last-use')"
    with pytest.raises(ConfigError, match="unknown option 'scope'"):
        make_policy({"name": "my_module:Frequent", "scope": "global"})
    check_policy(type(policy))


def test_a_part_is_imported_by_a_run_and_not_by_a_dry_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_module.py").write_text(PART + "\nopen('ran', 'w').close()\n")
    write_yaml(folder, policies=[{"name": "composed", "replacement": {"name": NEWEST, "keep": 3}}, "lru"])
    assert main(["run", "small.yaml", "--dry-run"]) == 0
    assert f"would import and run my_module ({folder / 'my_module.py'})" in capsys.readouterr().out
    assert not (folder / "ran").exists()
    assert main(["run", "small.yaml", "--jobs", "1"]) == 0
    assert (folder / "ran").exists()


def test_the_source_of_a_part_is_part_of_what_a_result_depends_on(folder: Path) -> None:
    spec = {"name": "composed", "replacement": NEWEST}
    names = ("composed", NEWEST)
    found = would_import(spec)
    assert found is not None and found.files == (folder / "my_module.py",)
    (folder / "a_module.py").write_text(PART)
    both = would_import({"name": "a_module:Newest", "replacement": NEWEST})
    assert both is not None and both.files == (folder / "a_module.py", folder / "my_module.py")
    assert both.module == "a_module and my_module"
    before = sources_digest(names)
    assert before is not None
    (folder / "my_module.py").write_text(PART + "\n# another\n")
    assert sources_digest(names) != before
    assert sources_digest(("composed",)) is None
    assert would_import({"name": "dali", "prefetch_source": "signal:residual"}) is None


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        ("my_module:Newest", "expected a class 'Newest' in module 'my_module', got none; unknown class 'Newest'"),
        ("my_modul:NewestFirst", "cannot import module 'my_modul' of 'my_modul:NewestFirst'"),
        ({"name": NEWEST, "keep": -1}, f"replacement {NEWEST}: option keep: expected an integer of at least 0, got -1"),
        (
            {"name": NEWEST, "keep": [1, 3]},
            "expected an integer of at least 0, got [1, 3]; to sweep it, list the part: [{..., keep: 1}, {..., keep: 3}]",
        ),
        ({"name": NEWEST, "keep": [1, -3]}, "option keep: expected an integer of at least 0, got [1, -3]"),
        (
            {"name": "workload-aware", "w_size": [1, 2, 3, 4]},
            "list the part: [{..., w_size: 1}, {..., w_size: 2}, {..., w_size: 3}, ...]",
        ),
        (":NewestFirst", "expected package.module:Class, got ':NewestFirst'"),
        ("moesim.policies.parts.placement:Random", "expected a class with start, used, inserted, victim, layer_end"),
        ("moesim.policies.parts.placement:Random", "; it can be named as placement"),
        ("moesim.errors:ConfigError", "; add them"),
    ],
)
def test_a_wrong_part_is_one_line(replacement: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_policy({"name": "composed", "replacement": replacement}, "a.yaml")
    assert str(caught.value).startswith("a.yaml: policy composed: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_page_says_how_a_part_is_checked_and_swept(capsys: pytest.CaptureFixture[str]) -> None:
    (spec,) = re.findall(r"`moesim check '(.*?)'`", PAGE)
    assert main(["check", spec]) == 0
    assert NEWEST.partition(":")[2] in capsys.readouterr().out
    (swept,) = re.findall(r"as in `(\[.*?\])`", PAGE)
    parts = yaml.safe_load(swept.replace("...", f'name: "{NEWEST}"'))
    points = policies_of({"name": "composed", "replacement": parts}, "page")
    assert [make_policy(point).parts.replacement.keep for point in points] == [1, 3]  # type: ignore[attr-defined]


def test_the_list_explains_a_part_of_the_current_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "policy-parts", NEWEST]) == 0
    out = capsys.readouterr().out
    assert "  keep: an integer of at least 0; default 2\n      Of the newest, so many stay.\n" in out
