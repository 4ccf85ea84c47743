"""Questions of the page and their answers, without a browser."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

import moesim
from moesim.cli.main import main
from moesim.errors import CapacityError, ConfigError
from moesim.explore.answers import curve, side_by_side, speed, upgrades
from moesim.explore.question import LLAMA_CPP, Question, bits_of, command_of, place_of, run_of
from moesim.explore.results import Opened
from moesim.explore.worker import Asking, Overtaken
from tests.report.report_kit import row, write_folder

BRIEF = Question(prompt=32, answer=8, context=4096)
LARGE = replace(BRIEF, model="gpt-oss-120b", bits="MXFP4", ram="32GB")


def test_the_best_place_is_where_the_curve_leaves_the_cliff():
    *_, (done, points) = curve(BRIEF, Asking())
    assert done == 1 and min(one.place.number for one in points if not one.misfit) == place_of(BRIEF).number
    simulated, at = speed(BRIEF, Asking()).decode, place_of(BRIEF).number
    assert simulated is not None
    assert next(one for one in points if one.place.number == at).decode.value == pytest.approx(simulated.value, rel=0.02)


def test_the_advice_has_the_same_place():
    advice = moesim.recommend(BRIEF.model, BRIEF.hardware, bits=BRIEF.bits, context=4096, quick=True, progress=False)
    assert advice.point is not None and advice.point.place == place_of(BRIEF)
    assert f"--n-cpu-moe {advice.point.place.number}" in command_of(BRIEF, run_of(BRIEF))


def test_parts_are_written_as_a_machine_of_parts():
    assert Question(pcie="3x8").hardware == "rtx 3060 + ryzen 5 5600 + 64GB DDR4-3200 + PCIe 3x8"
    assert Question(gpu="", cpu="ryzen 5 5600", ram="").hardware == "ryzen 5 5600 +"


def test_a_policy_that_cannot_run_does_not_keep_others_from_running():
    answers = {name: one for _, name, one in side_by_side(BRIEF, ["all-gpu", LLAMA_CPP], Asking())}
    assert isinstance(answers["all-gpu"], str) and not isinstance(answers[LLAMA_CPP], str)


def test_upgrades_are_those_of_whatif():
    (_, before), (_, after) = upgrades(BRIEF, ["gpu rtx 3090"], Asking())
    assert before.name == "as it is" and before.decode is not None and after.decode is not None
    assert after.decode.value > before.decode.value


def test_usual_upgrades_are_in_the_words_of_the_advice():
    advice = moesim.recommend(BRIEF.model, BRIEF.hardware, bits=BRIEF.bits, context=4096, quick=True, progress=False)
    rows = {one.name: one for _, one in upgrades(BRIEF, [], Asking())}
    own, gains = rows["as it is"].decode, {gain.change: gain.decode for gain in advice.gains}
    assert own is not None and "RAM 1.5 times as fast" in gains
    assert [*rows] == ["as it is", *gains, "96 GiB of RAM", "a second GPU of this kind"]
    for name, gain in gains.items():
        assert rows[name].decode == own.times(gain)
    assert rows["96 GiB of RAM"].decode == own  # it fits as it is
    two = rows["a second GPU of this kind"].decode
    assert two is not None and two.value > own.value


@pytest.mark.parametrize(("texts", "fits"), [([], "64 GiB of RAM"), (["ram 64GB", "gpu rtx 3090"], "ram 64GB")])
def test_an_upgrade_makes_a_model_fit_that_does_not(texts: list[str], fits: str):
    rows = {one.name: one for _, one in upgrades(LARGE, texts, Asking())}
    assert [name for name, one in rows.items() if one.decode is not None] == [fits] and len(rows) == 3
    assert all(one.what.startswith("does not fit: needs ") for name, one in rows.items() if name != fits)


@pytest.mark.parametrize(("model", "bits"), [("gpt-oss-120b", "MXFP4"), ("glm-4.5-air", "Q4_K_M"), ("gpt-oss-1000b", "Q8_0")])
def test_another_model_has_its_own_bits(model: str, bits: str):
    assert bits_of(Question(model=model, bits="Q8_0")) == bits  # of an unknown one those that were chosen


def test_a_newer_question_ends_an_older_one():
    asking = Asking()
    pieces = curve(BRIEF, asking)
    next(pieces)
    asking.cancel()
    with pytest.raises(Overtaken):
        next(pieces)
    with pytest.raises(Overtaken):
        speed(BRIEF, asking)


def test_what_does_not_fit_says_so():
    with pytest.raises(CapacityError, match=r"it does not fit: needs .* of RAM: .*; it fits with 64 GiB of RAM \(19 tokens/s\)$"):
        place_of(LARGE)
    with pytest.raises(CapacityError, match=r"of gpu0: .*; it fits with .*, or a shorter context, or fewer users$"):
        place_of(replace(BRIEF, context=131072, users=16))
    with pytest.raises(CapacityError, match=r"it fits with 24 GiB of RAM \(.* tokens/s\), or Q4_K_M \(17.3 GiB\)$"):
        place_of(replace(BRIEF, bits="Q8_0", ram="16GB"))


def test_memory_without_a_unit_is_refused_by_the_name_of_its_field():
    with pytest.raises(ConfigError, match=r"RAM: expected a size with its unit, such as '64GB', got '64'; add the unit"):
        run_of(replace(BRIEF, ram=" 64 "))


def test_a_filter_means_what_a_person_types(tmp_path):
    folder = tmp_path / "result"
    moesim.compare(
        ["lru", "fiddler"], trace="mini-mixtral", batch=[1, 8], cache=[0.25, 0.5], prompt=4, decode=2, jobs=1, out=folder,
        progress=False,
    )  # fmt: skip
    opened = Opened(str(folder))
    every = opened.rows(range(8))

    def found(words: str) -> list[tuple[str, int, float]]:
        return [(row["policy"], row["batch_size"], row["cache_ratio"]) for row in opened.rows(opened.found(words))]

    assert len(every) == len(found("")) == 8
    assert found("batch 8 lru") == [("lru", 8, 0.25), ("lru", 8, 0.5)]
    assert found("LRU cache 25% batch 1") == [("lru", 1, 0.25)]
    assert found("batch 80") == found("nothing") == []


def test_a_mapping_is_shown_in_words(tmp_path):
    rows = [row(0, "lru", kv=None), row(1, "lru", kv='{"host": 0.5}')]
    opened = Opened(str(write_folder(tmp_path / "result", rows)))
    assert [one["kv"] for one in opened.rows(opened.found("kv"))] == ["50 % of KV in host, streamed"]
    assert [one["kv"] for one in opened.rows([0])] == [""]


def test_without_the_extra_a_line_says_what_to_install(monkeypatch, capsys):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "nicegui" or name in ("moesim.explore.server", "moesim.explore.page"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nicegui", None)
    assert main(["explore"]) == 2
    assert (
        capsys.readouterr().err
        == "moesim: explore: expected the package nicegui, got none; in a checkout of moesim: pip install '.[explore]'\n"
    )


def test_a_folder_that_is_not_there_is_refused_before_anything_is_served(capsys):
    assert main(["explore", "nowhere"]) == 2
    assert "moesim: explore: nowhere: expected the folder of a result" in capsys.readouterr().err
