"""What `moesim.trace` and `moesim.profile` return is what their commands print, and their errors name arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim import profile, trace
from moesim.cli.main import main
from moesim.errors import InputError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("asked", "command", "form"),
    [
        (lambda: trace.caches("mini-mixtral", policies=["lru"], slots=["25%"], requests=2, jobs=1),
         "trace caches mini-mixtral --policies lru --slots 25% --requests 2 --jobs 1", "json"),
        (lambda: trace.lookahead(moesim.load_trace("mini-mixtral"), max_tokens=64),
         "trace lookahead mini-mixtral --max-tokens 64", "table"),
        (lambda: trace.catalogue(), "trace catalogue", "csv"),
        pytest.param(
            lambda: trace.fit("mixtral-8x7b", from_="mixtral-8x7b", only_report=True, fresh=1),
            "trace fit --targets mixtral-8x7b --from mixtral-8x7b --only-report --fresh 1", "csv", marks=pytest.mark.long,
        ),
        (lambda: profile.compare("rtx3090-epyc7532", moesim.load_hardware("zen4-2core")),
         "profile compare rtx3090-epyc7532 zen4-2core", "json"),
    ],
)  # fmt: skip
def test_a_function_returns_what_its_command_prints(
    asked: Callable[[], Any], command: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked()
    capsys.readouterr()
    assert main([*command.split(), "-o", form]) == 0
    assert capsys.readouterr().out.split() == found.text(form).split()  # a terminal's lines are broken
    assert len(found.table) and "<" in repr(found)


@pytest.mark.parametrize("command", ["show rtx3090-epyc7532 --model mixtral-8x7b", "check rtx3090-epyc7532"])
def test_a_page_of_a_profile(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb, name, *more = command.split()
    found = getattr(profile, verb)(name, **({"model": more[1]} if more else {}))
    assert main(["profile", *command.split()]) == 0
    assert capsys.readouterr().out.split() == found.text().split()


def test_what_is_written_is_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    """A trace that is split, then exported; a synthetic one; a profile."""
    found = [
        trace.split("mini-mixtral", "a.safetensors", units=2), trace.export("a.safetensors", "a.csv", format="csv"),
        trace.synthesize("mixtral-8x7b", "c.safetensors", requests=1, prompt=2, decode=2, progress=False),
    ]  # fmt: skip
    box = profile.new("mybox", gpu="rtx 3060", cpu="ryzen 5 5600", out="a.yaml")
    for command in (
        "trace split mini-mixtral --units 2 --out b.safetensors", "trace export b.safetensors --format csv --out b.csv",
        "trace synthesize --parameters mixtral-8x7b --requests 1 --prompt 2 --decode 2 --out d.safetensors",
        "profile new mybox --gpu rtx#3060 --cpu ryzen#5#5600 --out b.yaml",
    ):  # fmt: skip
        assert main([word.replace("#", " ") for word in command.split()]) == 0
    for one, other in (
        ("a.safetensors", "b.safetensors"),
        ("a.csv", "b.csv"),
        ("c.safetensors", "d.safetensors"),
        ("a.yaml", "b.yaml"),
    ):
        assert Path(one).read_bytes() == Path(other).read_bytes()
    said = capsys.readouterr().err
    assert found[0].text().replace("a.safe", "b.safe") in said and found[0].trace.n_experts == 16
    assert box.text() == Path("b.yaml").read_text() and box.hardware.name == "mybox" and all(note in said for note in box.notes)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: trace.split("mini-mixtral", "a.st"), "trace.split: out a.st: expected a name that ends in .safetensors"),
        (lambda: trace.split("mini-mixtral", "a.csv", units=4), "trace.split: units: expected 2 or 3, got 4"),
        (lambda: trace.export("mini-mixtral", "a.bin", format="oracleGeneral", object_size=1, layer=99),
         "trace.export: layer 99: expected 0"),
        (lambda: trace.export("mini-mixtral", "a.csv", format="cvs"), "trace.export: format: unknown word 'cvs'; did you mean"),
        (lambda: trace.calibrate("mini-mixtral", "a.safetensors", share=1, counts="c"),
         "trace.calibrate: counts c: expected no share"),
        (lambda: trace.caches(policies=["lru"]), "trace.caches: expected a trace or model, got neither"),
        (lambda: trace.lookahead("mini-mixtral", max_tokens=1), "trace.lookahead: max_tokens: expected a whole number of at"),
        (lambda: trace.synthesize("mixtral-8x7b", "a.safetensors", requests=1, inputs=2), "trace.synthesize: inputs 2: expected"),
        (lambda: trace.fit(hold_out=True, targets="mixtral-8x7b"), "trace.fit: hold_out=True: expected trace, whose"),
        (lambda: trace.record("m", "p", "a.safetensors", keep_inputs="x"), "m: expected a folder or a hub name"),
        (lambda: trace.learn("a", "b", "a.safetensors", groups="c"), "trace.learn: groups: unknown word 'c'; known: eighths"),
        (lambda: profile.new("mybox", gpu="rtx 3060", vram="1GB"), "profile.new: expected parts or a paper's numbers, got gpu"),
        (lambda: profile.measure("mine", mode="slow", dry_run=True, no_disk=True), "profile.measure: mode: expected quick"),
        (lambda: profile.show("rtx3090-epyc7532", models="dali"),
         "profile.show(): unknown argument 'models'; did you mean 'model'"),
        (lambda: moesim.validate(), "validate: expected out FOLDER, got nothing"),
        (lambda: moesim.validate(public=True, repeats=2),
         "validate public=True: expected no repeats, which changes nothing here"),
    ],
)  # fmt: skip
def test_an_error_names_function_and_argument(wrong: Callable[[], Any], said: str) -> None:
    with pytest.raises(InputError) as found:
        wrong()
    assert said in str(found.value) and "--" not in str(found.value)
    assert not list(Path().iterdir())
