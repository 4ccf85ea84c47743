"""``whatif --vary drafts``: values as written, ratios, the acceptance from which drafts pay, and wrong input."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.errors import ConfigError
from moesim.serving.drafts import Drafts
from moesim.studies.whatif.drafts import ACCEPT, Line, mapping_of, read
from moesim.studies.whatif.settings import Setting, parse_vary

RAW: dict[str, Any] = {
    "name": "d", "model": "mixtral-8x7b", "hardware": "rtx3090-epyc7532", "cache": {"ratio": 0.125}, "policies": ["on-demand"],
    "trace": {"synthesize": "mixtral-8x7b", "requests": 3, "prompt": 6, "decode": 9},
    "workload": {"batch_size": 1, "prompt_tokens": 4, "decode_tokens": 9},
}  # fmt: skip


def line(n: int, ratio: float, accept: float, tokens: int = 100_000, **more: Any) -> Line:
    drafts = Drafts(n, tuple(accept ** (i + 1) for i in range(n)), "ngram", **more)
    return Line("p", drafts, (ratio,), {"answer_tokens_per_s": tokens, "makespan_ns": 1e9}, "", 1)


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("", Drafts(3, ACCEPT[:3])),
        ("2", Drafts(2, ACCEPT[:2])),
        ("2 at 0.5", Drafts(2, (0.5, 0.25))),
        ("2 ngram at 0.5/0.4", Drafts(2, (0.5, 0.4), "ngram")),
        ("ngram at 0", Drafts(3, (0.0, 0.0, 0.0), "ngram")),
    ],
)
def test_values_as_written(text: str, last: Drafts):
    found = read(Setting("drafts", text))
    assert found[-1] == last and [one.n for one in found] == list(range(1, last.n + 1))


def test_what_is_not_written_is_that_of_the_workload():
    known = {"n": 2, "by": "model", "draft_ms": 5, "accept": 0.9, "proposed": 0.8}
    one, two = read(Setting("drafts", ""), known)
    assert two == Drafts(2, (0.9, 0.81), "model", 5, (0.8, 0.8**2)) and one.n == 1
    assert read(Setting("drafts", "1 ngram"), known) == [Drafts(1, (0.9,), "ngram", None, (0.8,))]
    assert read(Setting("drafts", ""), mapping_of(two))[-1].accept == two.accept


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x2", "expected number, drafter and acceptance"),
        ("0", "expected 1 to 64 drafts, got 0"),
        ("8", "expected an acceptance, got none; write '8 at 0.7'"),
        ("2 ngram", "expected an acceptance, got none"),
        ("2 at 0.5/0.6", "expected a share for each draft"),
        ("2 at 1.2.3", "expected shares such as 0.8"),
        ("3 at 0.5/0.4", "expected a share for each draft"),
    ],
)
def test_wrong_values(text: str, message: str):
    with pytest.raises(ConfigError) as error:
        read(Setting("drafts", text))
    assert message in str(error.value) and str(error.value).startswith("--vary drafts")


def test_drafts_pay_from_the_acceptance_whose_tokens_are_worth_the_window():
    """A window of two drafts brings 1.75 tokens at 0.5; at 1.25 times the speed it takes 1.4 steps: 1 + a + a^2 at 0.3062."""
    found = line(2, 1.25, 0.5)
    assert found.pays_from == pytest.approx((math.sqrt(2.6) - 1) / 2) and found.verdict == "yes"
    assert line(2, 1.75 / 3.01, 0.5).pays_from == math.inf, "a window that takes more than three steps"
    assert line(1, 1.2, 0.5, proposed=(0.5,)).pays_from == pytest.approx((1.25 / 1.2 - 1) / 0.5)


def test_what_chance_does_is_neither_a_gain_nor_a_loss():
    """One draft at 0.5: 1.5 tokens a window, with a standard deviation of 0.5; 600 tokens are 400 windows."""
    assert line(1, 1.0, 0.5, 600).chance == pytest.approx(0.5 / 20 / 1.5)
    assert [line(1, ratio, 0.5, 600).verdict for ratio in (0.96, 0.97, 1.03, 1.04)] == ["no", "even", "even", "yes"]


def test_ratios_are_those_of_two_runs():
    found = moesim.whatif(RAW, ["drafts 1 ngram at 1"], progress=False)
    plain, one = found.rows
    assert one["ratio"] == pytest.approx(one["tokens_per_s"] / plain["tokens_per_s"]) and 1 < one["ratio"] < 2
    assert one["pays"] == "yes" and one["typed"] == "workload.drafts: {n: 1, by: ngram, accept: [1.0]}"
    served = {"closed": 1, "n_requests": 150, "prompt_tokens": 4, "answer_tokens": 10, "scheduler": "llama-server"}
    drafted = moesim.run(
        RAW | {"workload": served | {"drafts": {"n": 1, "by": "ngram", "accept": 1}}, "plots": []}, progress=False
    )
    assert one["tokens_per_s"] == pytest.approx(1e9 / drafted.table["tpot_mean_ns"][0], rel=0.01)
    assert found.text().startswith("policy") and "pays from" in found.text()


def test_a_served_experiment_stays_as_it_is():
    workload = {"closed": 2, "n_requests": 4, "prompt_tokens": 4, "answer_tokens": 6, "scheduler": "vllm"}
    drafts = {"n": 2, "by": "model", "draft_ms": 9000, "accept": 0}
    found = moesim.whatif(RAW | {"workload": workload | {"drafts": drafts}}, ["drafts"], progress=False)
    assert [row["drafts"] for row in found.rows] == [0, 1, 2]
    assert found.rows[2]["pays"] == "no" and found.rows[2]["pays_from"] == math.inf
    assert "2 users" in found.text()


def test_strata_drafts_one_token_in_each_slot():
    two = RAW["workload"] | {"batch_size": 2}
    found = moesim.whatif(RAW | {"policies": ["strata"], "workload": two}, ["drafts 2 at 1"], progress=False)
    _, one = found.rows
    assert one["drafts"] == 1 and one["ratio"] > 1.05


def test_llama_cpp_gets_its_options(tmp_path: Path):
    found = moesim.whatif(RAW | {"policies": ["llama-cpp"]}, ["drafts 1"], progress=False)
    assert found.rows[1]["typed"] == "--spec-type draft-mtp --spec-draft-n-max 1"
    found.save(tmp_path / "out")
    assert "pays_from" in (tmp_path / "out" / "whatif.csv").read_text()


@pytest.mark.parametrize("vary", [["drafts 2", "batch 2"], ["drafts 1,2"], ["drafts 2 & batch 2"]])
def test_drafts_are_varied_alone(vary: list[str]):
    with pytest.raises(ConfigError, match="expected nothing else that is varied"):
        moesim.whatif(RAW, vary, progress=False)


def test_answers_of_one_token_have_no_speed():
    workload = {"batch_size": 1, "prompt_tokens": 4, "decode_tokens": 0}
    with pytest.raises(ConfigError, match="expected answers of 2 tokens or more"):
        moesim.whatif(RAW | {"workload": workload}, ["drafts 1"], progress=False)


def test_no_number_is_needed():
    assert parse_vary("drafts") == [(Setting("drafts", ""),)]
