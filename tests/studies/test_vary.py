"""`moesim whatif --model --hardware`: the machine as it is has the answer of `moesim recommend`, each change its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesim.cli.main import main
from moesim.core.table import Format
from moesim.errors import ConfigError
from moesim.studies.advice.llama_cpp import LlamaCpp
from moesim.studies.advice.question import Asked, look_up
from moesim.studies.advice.vary import records, table, vary
from moesim.studies.whatif.settings import parse_vary

BOX = "RTX 3060 + Ryzen 5 5600 + 64GB DDR4-3200"
ASKED = Asked("qwen3-30b-a3b", BOX, prompt=64, decode=8)


def best(tmp_path: Path, hardware: str, bits: str = "") -> tuple[str, float]:
    found = LlamaCpp(look_up(Asked("qwen3-30b-a3b", hardware, bits=bits, prompt=64, decode=8), tmp_path)).best
    assert found is not None
    return found.place.title, found.decode.value


def test_each_change_is_the_answer_for_that_machine(tmp_path: Path):
    found = vary(ASKED, [*parse_vary("gpu rtx 4090"), *parse_vary("bits Q8_0"), *parse_vary("ram 1x16 ddr4-2133 & bits 16")])
    as_is, gpu, bits, none = records(found)
    assert (as_is["options"], as_is["tokens_per_s"]) == pytest.approx(best(tmp_path, BOX)) and as_is["change"] == 1
    assert (gpu["options"], gpu["tokens_per_s"]) == best(tmp_path, BOX.replace("RTX 3060", "rtx 4090"))
    assert (bits["options"], bits["tokens_per_s"]) == best(tmp_path, BOX, "Q8_0")
    assert gpu["change"] == pytest.approx(gpu["tokens_per_s"] / as_is["tokens_per_s"])
    assert "RAM" in none["misfit"] and "tokens_per_s" not in none
    text = table(found, Format.TABLE)
    assert "does not fit" in text and "x1.00" in text


def test_the_command(capsys: pytest.CaptureFixture[str]):
    line = ["whatif", "--model", "qwen3-30b-a3b", "--hardware", BOX]
    assert main([*line, "--vary", "threads 3", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["what_if"] for row in rows] == ["as it is", "threads 3"] and 0.5 < rows[1]["change"] < 1
    assert main([*line, "experiments/quickstart.yaml"]) == 2
    assert main(["whatif", "--model", "qwen3-30b-a3b"]) == 2
    assert main([*line, "--vary", "fan 2"]) == 2
    said = capsys.readouterr().err
    assert said.count("expected an experiment, or model with hardware") == 2
    assert "unknown knob 'fan'" in said and "threads" in said


def test_more_memory_has_the_speed_of_the_memory_that_is_there(tmp_path: Path):
    box = BOX.replace("DDR4-3200", "DDR4-3600")
    ram, pcie = vary(Asked("qwen3-30b-a3b", box, prompt=64, decode=8), [*parse_vary("ram 128gb"), *parse_vary("pcie gen5")])[1:]
    assert ram.point is not None and pcie.point is not None
    assert (ram.point.place.title, ram.point.decode.value) == pytest.approx(best(tmp_path, box))
    assert "the link stays PCIe 4.0 x16" in pcie.note and pcie.note in table([pcie], Format.TABLE) and not ram.note


def test_a_knob_that_is_no_knob_has_an_example():
    with pytest.raises(ConfigError, match="'ram 64gb'"):
        parse_vary("more ram")
