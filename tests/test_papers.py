"""Published figures beside simulated ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesim.errors import ConfigError
from moesim.experiment.config import load_config
from moesim.experiment.naming import CACHE_SETTINGS, SETTINGS, policy_label
from moesim.experiment.sweep import expand
from moesim.studies.papers import COLUMNS, PUBLISHED, Published, compare, paper_folder, read_published, variants

SHIPPED = read_published(paper_folder() / PUBLISHED)


def figure(**changes: Any) -> Published:
    texts = dict.fromkeys(COLUMNS, "") | {"kind": "value", "experiment": "a", "policy": "p", "metric": "speed"}
    return Published(**{**texts, "published": 2.0, **changes})  # type: ignore[arg-type]


def row(policy: str, speed: float, **changes: Any) -> dict[str, Any]:
    settings = dict.fromkeys((*SETTINGS, *CACHE_SETTINGS), 0)
    shape = {"model": "m (expert_bits=4)", "cache_ratio": 0.5, "batch_size": 1, "error": None, "source_label": "derived"}
    return {"policy": policy, "speed": speed, **settings, **shape, **changes}


def test_a_value_is_the_mean_over_the_runs_that_count():
    rows = [row("p", 3.0), row("p", 5.0, batch_size=4), row("p", 100.0, batch_size=8), row("q", 7.0), row("p", 1.0, error="x")]
    found = compare(figure(where="model=m;batch_size=1|4;cache_ratio=0.5"), {"a": rows})
    assert (found.simulated, found.low, found.high, found.n_runs, found.ratio, found.label) == (4.0, 3.0, 5.0, 2, 2.0, "derived")


def test_a_speedup_compares_like_with_like():
    rows = [row("p", 8.0), row("q", 2.0), row("p", 9.0, batch_size=4), row("q", 1.0, batch_size=4), row("p", 50.0, batch_size=8)]
    found = compare(figure(kind="speedup", baseline="q"), {"a": rows})
    assert found.n_runs == 2  # the third setting has no baseline
    assert found.simulated == pytest.approx(6.0)  # geometric mean of 4 and 9
    assert (found.low, found.high) == (4.0, 9.0)


def test_a_gain_is_in_percent_and_its_ratio_is_one_of_speeds():
    found = compare(figure(kind="gain", baseline="q", published=50.0), {"a": [row("p", 3.0), row("q", 1.0)]})
    assert (found.simulated, found.ratio) == (pytest.approx(200.0), pytest.approx(2.0))


def test_less_is_better_where_the_metric_says_so():
    assert compare(figure(kind="speedup", baseline="q", metric="1/speed"), {"a": [row("p", 2.0), row("q", 3.0)]}).simulated == 1.5


def test_a_baseline_may_come_from_another_experiment():
    found = compare(
        figure(kind="speedup", baseline="q", baseline_experiment="b"), {"a": [row("p", 6.0)], "b": [row("q", 3.0, model="m")]}
    )
    assert found.simulated == 2.0


@pytest.mark.parametrize("key", ["transfer_curve", "prefill_chunk", "decision_ns", "seed"])
def test_runs_that_differ_in_any_setting_are_not_compared(key: str):
    found = compare(figure(kind="speedup", baseline="q"), {"a": [row("p", 8.0), row("q", 2.0, **{key: 1})]})
    assert found.simulated is None


def test_without_runs_there_is_no_figure():
    assert compare(figure(policy=""), {"a": [row("", 1.0)]}).simulated is None
    assert compare(figure(), {}).ratio is None


@pytest.mark.parametrize("name", sorted({f.experiment for f in SHIPPED} - {""}))
def test_every_shipped_figure_names_runs_of_its_experiment(name: str):
    path = paper_folder() / f"{name}.yaml"
    points = expand(load_config(path), path.name)
    labels = {policy_label(point.policy) for point in points}
    for one in SHIPPED:
        for experiment, policy in ((one.experiment, one.policy), (one.baseline_experiment or one.experiment, one.baseline)):
            assert experiment != name or not policy or policy in labels, (one.what, policy, sorted(labels))


def test_what_has_no_counterpart_says_why():
    lacking = [one for one in SHIPPED if not one.policy]
    assert lacking
    assert all(one.remark for one in lacking)
    assert all(one.metric and one.experiment for one in SHIPPED if one.policy)
    assert {one.paper for one in SHIPPED} == {"dali", "hybrimoe", "prescope", "daop", "odmoe"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", "expected the columns paper,ref"),
        (",".join(COLUMNS) + "\np,r,w,ratio,x,1,e,p,,,m,,\n", "unknown kind 'ratio'"),
        (",".join(COLUMNS) + "\np,r,w,value,x,many,e,p,,,m,,\n", "published: expected a number, got 'many'"),
        (",".join(COLUMNS) + "\np,r,w,value,x,1,e,p,,,m,,a,b\n", "expected 13 fields"),
    ],
)
def test_a_wrong_table_is_told(tmp_path: Path, text: str, message: str):
    path = tmp_path / "published.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_published(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_variants_stand_beside_the_first_policy():
    rows = [
        row("p", 0.0, decode_tokens_per_s=10.0, ttft_mean_ns=8.0, fidelity_fresh_decode=1.0),
        row("p", 0.0, decode_tokens_per_s=10.0, ttft_mean_ns=8.0, fidelity_fresh_decode=1.0, batch_size=4),
        row("q", 0.0, decode_tokens_per_s=20.0, ttft_mean_ns=16.0, fidelity_fresh_decode=0.9),
        row("q", 0.0, decode_tokens_per_s=80.0, ttft_mean_ns=16.0, fidelity_fresh_decode=0.8, batch_size=4),
        row("q", 0.0, decode_tokens_per_s=80.0, ttft_mean_ns=16.0, fidelity_fresh_decode=0.1, batch_size=8),  # p has no such run
    ]
    first, second = variants("a", rows)
    assert (first.policy, first.n_settings, first.decode, first.prefill) == ("p", 2, 1.0, 1.0)
    assert (second.n_settings, second.decode, second.low, second.high) == (2, pytest.approx(4.0), 2.0, 8.0)
    assert (second.prefill, second.fidelity) == (0.5, 0.8)
