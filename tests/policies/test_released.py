"""Tables that systems release as data: how they are read and refused, and what each policy does with its own."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim import load
from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.folder import Output
from moesim.experiment.resolve import Experiment
from moesim.policies.registry import make_policy
from moesim.policies.released import Released
from moesim.records import Records
from moesim.testing import FakeView
from tests.engine.engine_kit import Oracle, cpu, gpu, link, machine, play, tiny_model, workload

SOURCE = "somebody/system src/tables.py at 1a2b3c4"
GOOD = {"source": SOURCE, "recall": [0.0, 0.5, 0.5, 1.0]}


# ------------------------------------------------------------------------------------------------------------------ reading
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"recall": [1.0]}, "source: expected where the numbers come from, .*, got nothing; name the work, the file and its ver"),
        ({"source": " ", "recall": [1.0]}, "source: expected where the numbers come from"),
        ({"source": "a (b)", "recall": [1.0]}, r"source: .* without round brackets, got 'a \(b\)'"),
        ({"source": "a" * 121, "recall": [1.0]}, "source: .*, at most 120 characters"),
        ({"source": 5, "recall": [1.0]}, "source: .*, got 5"),
        ({"source": "b" * 120 + "(", "recall": [1.0]}, f"source: .*, got '{'b' * 59}; name the work"),
        ({"source": "a"}, "expected at least one of recall, single, sensitivity, got none; add it"),
        ({"source": "a", "recal": [1.0]}, "unknown table 'recal'; did you mean 'recall'?"),
        ("tables.yaml", "expected {file: PATH}, or a mapping with source and recall, single, sensitivity, got 'tables.yaml'"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: policy adapmoe: option released: {message}") as error:
        make_policy({"name": "adapmoe", "released": value}, "here")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([0.5] * 3, "expected a list of 4, of 4 numbers in all, got 3; give one for each"),
        (0.5, "expected a list of 4, of 4 numbers in all, got 0.5"),
        ("c" * 50, f"expected a list of 4, of 4 numbers in all, got '{'c' * 39}; give one"),
        ([0.5, 0.5, 1.5, 0.5], r"\[2\]: expected a number from 0 to 1, got 1.5; choose a value in this range"),
        ([0.5, -0.1, 0.5, 0.5], r"\[1\]: expected a number from 0 to 1, got -0.1"),
        ([math.nan, 0.5, 0.5, 0.5], r"\[0\]: expected a number from 0 to 1, got nan"),
        ([0.5, True, 0.5, 0.5], r"\[1\]: expected a number from 0 to 1, got True"),
        ([0.5, "0.5", 0.5, 0.5], r"\[1\]: expected a number from 0 to 1, got '0.5'; write it without quotes"),
    ],
)
def test_a_table_of_another_shape_is_refused_with_its_place(table: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^policy p: tiny: released \({SOURCE}\): recall: ?{message}|recall{message}"):
        Released(SOURCE, {"recall": table}).table("recall", (4,), "policy p: tiny", 1.0)


def test_tables_are_given_as_a_mapping_as_an_object_or_not_at_all() -> None:
    one = Released("a" * 120, {"recall": [0.5]})
    assert repr(one) == "a" * 120 and "recall" in one and "single" not in one
    policies: list[Any] = [make_policy({"name": "adapmoe", "released": given}) for given in (one, None, GOOD)]
    assert policies[0].released is one and policies[1].released is None
    assert (policies[2].released.source, policies[2].released.tables) == (SOURCE, {"recall": GOOD["recall"]})
    made: Any = make_policy({"name": "adapmoe", "released": {"source": f" {one.source} ", "recall": [1.0]}})
    assert made.released == Released(one.source, {"recall": [1.0]})


def test_numbers_of_a_table_are_bounded() -> None:
    assert Released("a", {"x": [0, 1e15]}).table("x", (2,), "p").tolist() == [0.0, 1e15]
    assert Released("a", {"x": [[1], [2]]}).table("x", (2, 1), "p").tolist() == [[1.0], [2.0]]
    with pytest.raises(ConfigError, match=r"x\[1\]\[0\]: expected a number from 0 to 1e\+15, got 1100000000000000.0"):
        Released("a", {"x": [[1], [1.1e15]]}).table("x", (2, 1), "p")
    with pytest.raises(ConfigError, match=r"x\[1\]: expected a list of 1, of 1 numbers in all, got 2"):
        Released("a", {"x": [[1], [1, 2]]}).table("x", (2, 1), "p")


# ---------------------------------------------------------------------------------------------------------- an experiment's
def experiment(policies: list[Any]) -> Experiment:
    raw = {
        "model": {"base": "mixtral-8x7b", "expert_bits": 4}, "hardware": "rtx3090-epyc7532",
        "trace": "mini-mixtral", "cache": {"ratio": 0.5},
        "workload": {"batch_size": 1, "prompt_tokens": 2, "decode_tokens": 2}, "policies": policies,
        "plots": [], "timeline": None,
    }  # fmt: skip
    return Experiment(parse_config(raw, "a.yaml"), "a.yaml")


def written(path: Path, content: Any) -> dict[str, str]:
    path.write_text(yaml.safe_dump(content))
    return {"file": str(path)}


def test_a_result_holds_the_tables_and_its_labels_their_source(tmp_path: Path) -> None:
    even = written(tmp_path / "even.yaml", {"source": "even, made up", "recall": [0.5] * 32})
    rising = written(tmp_path / "rising.yaml", {"source": "rising, made up", "recall": [i / 32 for i in range(32)]})
    made = experiment([{"name": "adapmoe", "source": "frequency", "released": [even, rising]}])
    for path in (even, rising):
        Path(path["file"]).unlink()  # its content is in the experiment
    output = Output(made, tmp_path / "out")
    results = run_experiment(made, keep=lambda index: None, folder=tmp_path / "out")
    output.write(results)
    found = load(tmp_path / "out").table
    labels = [f"adapmoe(source=frequency,released={name}, made up)" for name in ("even", "rising")]
    assert found["policy"].tolist() == labels
    options = json.loads(found["policy_options"][0])
    assert options["released"]["source"] == "even, made up" and re.fullmatch("[0-9a-f]{16}", options["released"]["sha256"])
    assert found["cache_slots_used"].tolist() == [128, 128]
    records = load(tmp_path / "out").records(policy=labels[1])  # simulated again
    assert records.makespan_ns == found["makespan_ns"][1] != found["makespan_ns"][0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "none.yaml: expected released tables, got: No such file or directory; check the path"),
        (3, "file: expected a text, the path of a YAML file, got 3"),
        (" ", "file: expected a text, the path of a YAML file, got ' '"),
        ([1, 2], "t.yaml: expected a mapping with tables and source, .*, got list; add it"),
        ({"recall": [1]}, "t.yaml: expected a mapping with tables and source, .*, got the keys recall; add it"),
    ],
)
def test_a_file_that_is_no_table_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    named = (
        {"file": content or str(tmp_path / "none.yaml")} if content in (None, 3, " ") else written(tmp_path / "t.yaml", content)
    )
    with pytest.raises(ConfigError, match=message) as error:
        experiment([{"name": "adapmoe", "source": "frequency", "released": named}])
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------------------ policies
TOY = {"gpu0": gpu(predict={"told": 10}), "cpu0": cpu()}
FAST = machine(TOY, {"cpu0->gpu0": link(100), "gpu0->cpu0": link(100)})


def placed(policy: dict[str, Any], slots: int, n_layers: int, n_experts: int = 4) -> list[list[int]]:
    """Return the experts of each layer that are on the GPU at the start."""
    view = FakeView(tiny_model(n_layers=n_layers, n_experts=n_experts))
    view.slots, view.tables = slots, {}
    found: list[list[int]] = [[] for _ in range(n_layers)]
    for copy in make_policy(policy).place(view).copies:
        found[copy.layer] += copy.experts
    return [sorted(experts) for experts in found]


def test_adapmoe_sizes_its_caches_by_the_tables() -> None:
    """Of equal layers the first is the largest; a layer whose predictions are always right needs two slots less."""
    base = {"name": "adapmoe", "source": "frequency"}
    sizes = {
        key: [len(of_layer) for of_layer in placed({**base, "released": {"source": "a", **tables}}, 8, 3)]
        for key, tables in {
            "equal": {"recall": [0.0, 0.5, 0.5]}, "others": {"recall": [1.0, 0.0, 1.0]},
            "single": {"recall": [0.0, 0.0, 0.0], "single": [1.0, 1.0, 0.0]},
        }.items()
    }  # fmt: skip
    assert sizes["equal"] == [len(of_layer) for of_layer in placed({**base, "recall": 0.5}, 8, 3)] == [4, 2, 2]
    assert sizes["others"] == [2, 4, 2]
    assert sizes["single"] == [3, 1, 4]  # of equal ones the last layer has the smallest
    with pytest.raises(ConfigError, match=r"^policy adapmoe: tiny: released \(a\): recall: expected a list of 3.*, got 2"):
        placed({**base, "released": {"source": "a", "recall": [0.0, 0.5]}}, 8, 3)


def test_adapmoe_leaves_the_second_expert_out_by_the_sensitivity_of_the_layer() -> None:
    # The weights are 0.75 and 0.25: below sqrt(0.005 / 0.07), not below sqrt(0.005 / 0.08); 0 is below any.
    work = workload([[[[0, 2], [1, 0], [3, 2]]]])
    policy = make_policy({"name": "adapmoe", "source": "told", "released": {"source": "a", "sensitivity": [0.07, 0.08, 0]}})
    assert not policy.exact and "scores-or-weights" in policy.needs
    records: Records = play(policy, work, FAST, model=tiny_model(n_layers=3), slots={"gpu0": 12}, predictors={"told": Oracle()})
    ran = [(t.layer, t.expert) for t in records.tasks if t.expert >= 0]
    assert ran == [(0, 0), (1, 0), (1, 1), (2, 3)]


def test_klotski_starts_from_the_given_counts() -> None:
    """Experts 2 and 3 are followed by 1. By the pairs 2 is the most popular of layer 0, by the counts of this layer 3."""
    pairs = [[[0, 0, 0, 0], [0, 0, 0, 0], [0, 9, 4, 0], [0, 5, 0, 1]]]
    tables = {"source": "a", "coactivation": pairs}
    hot = {}
    for key, more in {"alone": {}, "first": {"first": [0, 1, 0, 7]}}.items():
        policy = make_policy({"name": "klotski", "n_hot": 1, "released": {**tables, **more}})
        assert policy.needs == frozenset()
        records = play(policy, workload([[[[2, 3], [1, 0]]]]), model=tiny_model(n_layers=2), tables={})
        begin = {visit.begin for visit in records.layers}
        hot[key] = [(t.layer, t.expert) for t in records.transfers if t.submitted in begin]
    assert hot == {"alone": [(0, 2), (1, 1)], "first": [(0, 3), (1, 1)]}
    with pytest.raises(ConfigError, match=r"coactivation: expected a list of 2, of 2 x 8 x 8 numbers in all, got 1"):
        placed({"name": "klotski", "released": tables}, 8, 3, n_experts=8)


def test_fiddler_fills_the_gpu_in_the_given_order() -> None:
    order = [[1, 3], [0, 2], [1, 0], [0, 0], [0, 1], [0, 3], [1, 1], [1, 2]]
    policy = {"name": "fiddler", "released": {"source": "a", "popularity": order}}
    assert make_policy(policy).needs == frozenset()
    assert placed(policy, 3, 2) == [[2], [0, 3]]
    assert placed(policy, 5, 2) == [[0, 1, 2], [0, 3]]
    twice = {"name": "fiddler", "released": {"source": "a", "popularity": [[1, 3], *order[:-1]]}}
    with pytest.raises(
        ConfigError, match=r"popularity: expected each pair \[layer, expert\] once, got none for \[1, 2\]; add it"
    ):
        placed(twice, 3, 2)


def test_kt_expert_takes_the_most_frequent_of_the_given_statistics() -> None:
    """The worked example: of two layers of four experts, three on the GPU."""
    frequency = [[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]]
    policy = {"name": "kt-expert", "strategy": "frequency", "released": {"source": "a", "activation_frequency": frequency}}
    assert make_policy(policy).needs == frozenset()
    assert placed(policy, 3, 2) == [[1, 3], [2]]
