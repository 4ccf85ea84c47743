"""The form of experiment files: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moesim.core.limits import CACHE_RATIO, COUNT
from moesim.errors import ConfigError
from moesim.experiment.config import Config, apply_override, json_schema, load_config, parse_config, read_merged
from moesim.experiment.sweep import expand, quick

BASE: dict[str, Any] = {
    "model": "mixtral-8x7b",
    "hardware": "rtx3090-epyc7532",
    "trace": "t",
    "cache": {"ratio": 0.5},
    "policies": ["lru"],
}


def parse(**changes: Any) -> Config:
    return parse_config(BASE | changes, "a.yaml")


YAML_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"cache": {"ratio": [0.5, "half"]}}, "cache.ratio[1]: expected a number in [0, 1], got 'half'"),
    ({"cache": {"ratio": -0.1}}, "cache.ratio: expected a number in [0, 1], got -0.1; choose a value in this range"),
    ({"cache": {"ratio": "12 parsecs"}},
     "cache.ratio: expected a number in [0, 1], got '12 parsecs'; for bytes use cache.budget"),
    ({"cache": {"ratio": 12}},
     "cache.ratio: expected a number in [0, 1], got 12; a quarter is 0.25; for bytes use cache.budget, or --cache 12GB"),
    ({"cache": {"ratio": True}}, "cache.ratio: expected a number in [0, 1], got True"),
    ({"cache": {"ratio": "0.5"}}, "cache.ratio: expected a number in [0, 1], got '0.5'; write it without quotes"),
    ({"cache": {"ratio": "3/2"}},
     "cache.ratio: expected a number in [0, 1], got 1.5; a quarter is 0.25; for bytes use cache.budget, or --cache 1.5GB"),
    ({"cache": {"ratio": "1/0"}}, "cache.ratio: expected a number in [0, 1], got '1/0'"),
    ({"cache": {"ratio": "-1/3"}}, "cache.ratio: expected a number in [0, 1], got '-1/3'"),
    ({"zip": ["model"]}, "zip[0]: expected a list, got 'model'; write [[KEY, KEY]]"),
    ({"name": 5}, "name: expected a text, got 5; put it in quotes"),
    ({"cache": {}}, "cache: expected ratio or budget, got neither"),
    ({"cache": {"budget": ["8 GiB", 0]}}, "cache.budget[1]: expected a size of at least 1 byte, got 0"),
    ({"cache": {"budget": "8 G"}},
     "cache.budget: expected a size with a unit (b, kb, mb, gb, tb, kib, mib, gib, tib), got '8 G'; write for example "
     "'8 GiB'"),
    ({"workload": {"batch_size": [1, "x"]}}, "workload.batch_size[1]: expected an integer, got 'x'"),
    ({"workload": {"batch_size": 0}},
     "workload.batch_size: expected an integer of at least 1, got 0; choose a value in this range"),
    ({"workload": {"batch_size": 1.5}}, "workload.batch_size: expected an integer, got 1.5"),
    ({"workload": {"batch_size": True}}, "workload.batch_size: expected an integer, got True"),
    ({"workload": {"batch_size": []}}, "workload.batch_size: expected at least one entry, got []"),
    ({"workload": {"prompt_tokens": [None, -1]}},
     "workload.prompt_tokens[1]: expected an integer of at least 0, got -1; choose a value in this range"),
    ({"workload": {"reuse": "often"}}, "workload.reuse: expected 'shifted', got 'often'"),
    ({"workload": {"refill": "yes"}}, "workload.refill: expected true or false, got 'yes'; write it without quotes"),
    ({"transfer": 3}, "transfer: expected a mapping, got 3; its keys are curve, chunk"),
    ({"transfer": {"curve": "pined"}},
     "transfer.curve: expected 'own', 'pinned', 'pageable' or 'chunked', got 'pined'; choose one of these"),
    ({"policies": []}, "policies: expected at least one entry, got []"),
    ({"policies": "lru"}, "policies: expected a list, got 'lru'; put it in brackets"),
    ({"policies": [{"alpha": 1}]}, "policies[0]: expected a policy's name or a mapping with the key name, got {'alpha': 1}"),
    ({"model": ["m", 3]},
     "model[1]: expected a model's name, the path of a config.json, or a mapping with the key base or name, got 3"),
    ({"decision_us": -1}, "decision_us: expected a number of at least 0.0, got -1; choose a value in this range"),
    ({"model": {1: 2, "base": "m"}},
     "model: expected a model's name, the path of a config.json, or a mapping with the key base or name, got {1: 2, ..."),
    ({"decision_us": float("inf")}, "decision_us: expected a finite number, got inf"),
    ({"cache": {"ratio": "8 G"}}, "cache.ratio: expected a number in [0, 1], got '8 G'; for bytes use cache.budget"),
    ({"cache": {"ratio": "G"}}, "cache.ratio: expected a number in [0, 1], got 'G'"),
    ({"decision_us": 2e9}, "decision_us: expected a number of at most 1000000000.0, got 2000000000.0; choose a ..."),
    ({"repeat": COUNT.most + 1}, f"repeat: expected an integer of at most {COUNT.most}, got {COUNT.most + 1}; choose a ..."),
    ({"timeline": {"steps": 0}}, "timeline.steps: expected an integer of at least 1, got 0; choose a value in this range"),
    ({"workload": {"closed": 1, "limits": 2}}, "workload.limits: expected a mapping, got 2; write it as {ttft_s: 2}"),
    ({"trace": 3}, "trace: expected a trace's name, the path of a file, or a mapping with the key synthesize, got 3"),
    ({"zip": [["model", "trace"]], "model": ["a", "b"]},
     "zip[0]: trace: expected a list, got 't'; give it one, or remove it from zip"),
    ({"zip": [["model", "cache.ratio"]], "model": ["a", "b"], "cache": {"ratio": [0.5]}},
     "zip[0]: expected lists of one length, got model 2, cache.ratio 1"),
    ({"zip": [["model", "workload.batch_siz"]], "model": ["a"]},
     "zip[0]: unknown field 'workload.batch_siz'; did you mean 'workload.batch_size'..."),
    ({"workload": {"batch_sise": 1}},
     "workload.batch_sise: unknown key 'batch_sise'; did you mean 'batch_size'? known: answer_tokens, ..."),
    ({"exclude": [{"workload.seed": 3}]}, "exclude[0]: expected a combination of the grid, got workload.seed: 3; ..."),
    ({"exclude": [{"policies": "dali"}]}, "exclude[0]: expected a combination of the grid, got policies: dali; ..."),
    ({"exclude": [{"extrapolate": 0}]}, "exclude[0]: expected a combination of the grid, got extrapolate: 0; ..."),
    ({"exclude": [{"decision_us": False}]}, "exclude[0]: expected a combination of the grid, got decision_us: False; ..."),
    ({"exclude": [{"cache.ratio": []}]}, "exclude[0]: expected a combination of the grid, got cache.ratio: ; ..."),
    ({"exclude": [{"policys": "lru"}]}, "exclude[0]: unknown field 'policys'; did you mean 'policies'?..."),
    ({"exclude": [{"workload": 1}]}, "exclude[0]: unknown field 'workload'; did you mean ..."),
    ({"exclude": [{"cache.budget": "8 G"}]}, "exclude[0]: cache.budget: expected a size with a unit..."),
    ({"exclude": [{"policies": "lru"}]}, "exclude: expected to leave a combination to run, got none; exclude less..."),
    ({"exclude": [{}]}, "exclude[0]: expected at least one entry, got {}..."),
    ({"zip": [["model", "hardware"]], "model": ["a", "b"]}, "zip[0]: hardware: expected a list, got 'rtx3090-epyc7532'..."),
    ({"zip": [["model", "trace"]], "model": ["a", "b"], "trace": ["t"]}, "zip[0]: expected lists of one length, got model..."),
    ({"zip": [["model", "model"]], "model": ["a", "b"]}, "zip[0]: expected each field once, got model again; remove one..."),
    ({"zip": [["modell", "trace"]]}, "zip[0]: unknown field 'modell'; did you mean 'model'?..."),
    ({"zip": [["model"]]}, "zip[0]: expected ..."),
    ({"zip": [["workload.batch_size", "trace"]], "trace": ["a", "b"]},
     "zip[0]: workload.batch_size: expected a list, got 1..."),
    ({"zip": [["model.x.y", "trace"]], "trace": ["a", "b"]}, "zip[0]: model.x.y: expected a list, got None..."),
    ({"repeat": 2, "workload": {"seed": [0, 1]}},
     "repeat: expected one workload.seed, the first of 2, got [0, 1]; remove either..."),
    ({"repeat": 2, "trace": {"synthesize": "m", "seed": [0, 1]}},
     "repeat: expected one trace.seed, the first of 2, got [0, 1]; remove ..."),
    ({"repeat": 0}, "repeat: expected an integer of at least 1, got 0..."),
    ({"repeat": [1, 2]}, "repeat: expected an integer, got [1, 2]..."),
    *(({"workload": {"requests": wrong}}, "workload.requests: expected all, or a list of request numbers (or several such lists "
       f"to sweep), got {wrong!r}") for wrong in (3, "some", [], [1, -1], [1, True], [[1], []], [[1], 2], ["all", 3], [[[1]]],
                                                  [[1, -1]], [[2], [1, "2"]])),
]  # fmt: skip
"""Changes of an experiment, and what is wrong with them: the whole message, or how it begins (...)."""


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("quikstart", "did you mean 'quickstart'?"), ("x/quikstart", "correct the path"), ("quikstart.yaml", "correct the path"),
     ("mime.yaml", "did you mean 'mine.yaml'?")],
)  # fmt: skip
def test_a_missing_file_is_looked_for_among_its_neighbours_or_by_name_among_those_shipped(
    name: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("model: x")
    with pytest.raises(ConfigError, match=rf"^{name}: expected an experiment file, got: .*; {re.escape(remedy)}$"):
        read_merged(Path(name))


def test_the_least_and_the_largest_value_are_accepted():
    ratios = [0, CACHE_RATIO.least, 1]
    assert parse(cache={"ratio": ratios}).cache.ratio == ratios
    with pytest.raises(ConfigError, match=r"expected a share of all experts of at least .*; less is no expert"):
        parse(cache={"ratio": CACHE_RATIO.least / 2})
    assert parse(cache={"budget": [1, "2 B"]}).cache.budget == [1, 2]
    with pytest.raises(ConfigError, match="expected a size of at least 1 byte, got 0"):
        parse(cache={"budget": 0})
    least = parse(warm_up_steps=0, repeat=1, decision_us=0, workload={"prompt_tokens": 0, "batch_size": 1})
    assert (least.warm_up_steps, least.repeat, least.decision_us) == (0, 1, 0)
    assert (least.workload.prompt_tokens, least.workload.batch_size) == (0, 1)
    assert parse(repeat=COUNT.most, decision_us=1e9).repeat == COUNT.most


@pytest.mark.parametrize(("n", "more"), [(1, ""), (2, " (and 1 more)"), (4, " (and 3 more)")])
def test_of_several_problems_the_first_is_told_unknown_keys_before_others(n: int, more: str):
    with pytest.raises(ConfigError) as error:
        parse(repeat=0, **{f"qqq{i}": 1 for i in range(n - 1)})
    first = "qqq0: unknown key 'qqq0'" if n > 1 else "repeat: expected an integer of at least 1, got 0"
    assert f": {first}" in str(error.value) and (str(error.value).endswith(more) if more else "more)" not in str(error.value))


@pytest.mark.parametrize(("changes", "message"), YAML_ERRORS)
def test_a_wrong_value_is_refused_with_its_place(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        expand(parse(**changes), "a.yaml")
    found = str(error.value)
    assert "\n" not in found
    assert found.startswith(f"a.yaml: {message[:-3]}") if message.endswith("...") else found == f"a.yaml: {message}"


def test_a_misspelt_key_comes_before_the_one_it_leaves_missing():
    raw = {**BASE, "policys": ["lru"]}
    del raw["policies"]
    with pytest.raises(ConfigError, match=r"policys: unknown key 'policys'; did you mean 'policies'\?"):
        parse_config(raw, "a.yaml")


def test_a_missing_key():
    with pytest.raises(ConfigError) as error:
        parse_config({k: v for k, v in BASE.items() if k != "model"}, "a.yaml")
    assert str(error.value) == "a.yaml: model: expected this key, got nothing; add it"


@pytest.mark.parametrize(("text", "got"), [("", "nothing"), ("- 1", "list"), ("a", "str")])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, got: str):
    path = tmp_path / "e.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == f"{path}: expected a mapping with model, hardware, trace, cache and policies, got {got}"


@pytest.mark.parametrize("name", ["quickstart", "experiments/quickstart", "experiments/quickstart.yaml"])
def test_a_shipped_experiment_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    shipped = load_config(Path(__file__).resolve().parents[2] / "experiments/quickstart.yaml")
    monkeypatch.chdir(tmp_path)
    assert load_config(Path(name)) == shipped
    own = tmp_path / name  # a file that is here comes first
    own.parent.mkdir(exist_ok=True)
    own.write_text("- 1")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_config(Path(name))


@pytest.mark.parametrize("name", ["quickstart.yaml", "other/quickstart.yaml", "nothing", ""])
def test_no_other_path_means_a_shipped_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="expected an experiment file"):
        load_config(Path(name))


def test_broken_yaml_and_repeated_keys_are_one_line(tmp_path: Path):
    path = tmp_path / "e.yaml"
    path.write_text("a: [1,\nb: }")
    with pytest.raises(ConfigError, match=r"expected valid YAML, got") as error:
        load_config(path)
    assert "\n" not in str(error.value)
    path.write_text("model: a\ntrace: t\nmodel: b\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == f"{path}: line 3: expected each key once, got 'model' again; remove one"


def test_overrides_reach_below_names_and_into_lists():
    raw = json.loads(json.dumps(BASE | {"policies": ["lru", "dali"]}))
    for text in (
        "hardware.devices.gpu0.memory_bytes=12 GiB",
        "model.top_k=1",
        "policies.1={name: dali, w_size: 2}",
        "cache.ratio=[0.1, 0.2]",
    ):
        apply_override(raw, text)
    assert raw["hardware"] == {"base": "rtx3090-epyc7532", "devices": {"gpu0": {"memory_bytes": "12 GiB"}}}
    assert raw["model"] == {"base": "mixtral-8x7b", "top_k": 1}
    assert raw["policies"] == ["lru", {"name": "dali", "w_size": 2}]
    assert raw["cache"] == {"ratio": [0.1, 0.2]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache", "--set cache: expected key.path=value, got 'cache'"),
        ("trace.x=1", "--set trace.x=1: expected trace to be a mapping or a list, got 't'"),
        ("policies.4=lru", "--set policies.4=lru: expected an index below 1, got '4'"),
    ],
)
def test_wrong_overrides(override: str, message: str):
    with pytest.raises(ConfigError) as error:
        apply_override(json.loads(json.dumps(BASE)), override)
    assert str(error.value) == message


def test_the_grid_is_a_product_in_a_fixed_order_with_policies_fastest():
    config = parse(
        workload={"batch_size": [1, 4], "seed": [0, 1]},
        cache={"ratio": [0.25, 0.5]},
        policies=["lru", {"name": "fiddler", "rule": ["code", "profile"]}],
    )
    found = [(p.workload["batch_size"], p.workload["seed"], p.ratio, p.policy.get("rule")) for p in expand(config, "a.yaml")]
    expected = [(b, s, r, rule) for b in (1, 4) for s in (0, 1) for r in (0.25, 0.5) for rule in (None, "code", "profile")]
    assert found == expected


def test_numbers_of_models_and_machines_sweep_too():
    config = parse(
        model={"base": "mixtral-8x7b", "expert_bits": [4, 8]},
        hardware={"base": "rtx3090-epyc7532", "devices": {"gpu0": {"memory_bytes": ["12 GiB", "24 GiB"]}}, "corrections": ["a"]},
    )
    points = expand(config, "a.yaml")
    assert [p.model["expert_bits"] for p in points] == [4, 4, 8, 8]
    assert [p.hardware["devices.gpu0.memory_bytes"] for p in points] == ["12 GiB", "24 GiB"] * 2
    assert all(p.hardware["corrections"] == ["a"] for p in points)


def test_zipped_fields_vary_together():
    config = parse(
        zip=[["model", "trace"], ["workload.batch_size", "cache.ratio"]],
        model=["mixtral-8x7b", "olmoe"],
        trace=["a", {"synthesize": "b", "seed": [0, 1]}],
        workload={"batch_size": [1, 4], "seed": [0, 1]},
        cache={"ratio": [0.25, 0.5]},
        policies=["lru"],
    )
    found = [(p.model, p.trace, p.workload["batch_size"], p.ratio, p.workload["seed"]) for p in expand(config, "a.yaml")]
    made = [{"synthesize": "b", "seed": seed} for seed in (0, 1)]
    together = ((1, 0.25), (4, 0.5))
    expected = [("mixtral-8x7b", "a", b, r, s) for b, r in together for s in (0, 1)]
    expected += [("olmoe", trace, b, r, s) for b, r in together for trace in made for s in (0, 1)]
    assert found == expected
    assert (quick(config).zip, quick(config).cache.ratio) == ([], 0.25)


def test_quick_takes_the_first_of_everything_but_all_policies():
    config = parse(
        model=["mixtral-8x7b", "olmoe"],
        workload={"batch_size": [4, 1], "decode_tokens": 64, "n_batches": 3},
        policies=["lru", "dali"],
    )
    small = quick(config)
    assert small.model == "mixtral-8x7b"
    assert (small.workload.batch_size, small.workload.decode_tokens, small.workload.n_batches) == (4, 4, 1)
    assert small.policies == [{"name": "lru"}, {"name": "dali"}]
    assert quick(parse(workload={"decode_tokens": 2})).workload.decode_tokens == 2


def test_a_config_survives_its_own_dump():
    config = parse(cache={"budget": "8 GiB"}, transfer={"chunk": "4 MiB"}, decision_us=[1, 2])
    assert parse_config(config.model_dump(mode="json"), "a.yaml") == config


def test_the_schema_describes_every_key():
    schema = json.loads(json_schema())
    assert set(schema["properties"]) == {*Config.model_fields, "include"}
    assert schema["additionalProperties"] is False
    assert "required" not in schema  # what a file lacks may stand in one that it includes


def test_the_schema_states_the_bounds_of_values_and_of_those_in_lists():
    schema = json.loads(json_schema())
    cache, workload = (schema["$defs"][f"{name}Config"]["properties"] for name in ("Cache", "Workload"))
    budget, ratio = (cache[name]["anyOf"][0]["oneOf"] for name in ("budget", "ratio"))
    number = {"type": "number", "minimum": 0, "maximum": CACHE_RATIO.most}
    assert budget[0]["anyOf"] == [{"type": "integer", "minimum": 1}, {"type": "string"}] and ratio[0]["anyOf"][0] == number
    assert all(listed == {"type": "array", "minItems": 1, "items": one} for one, listed in (budget, ratio))
    text = ratio[0]["anyOf"][1]["pattern"]
    assert [bool(re.search(text, one)) for one in ("3/8", " 12.5 % ", "3", "x/8", "8 GiB")] == [True, True, False, False, False]
    either = [{"const": "all"}, {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}]
    assert workload["requests"]["anyOf"] == [*either, {"type": "array", "items": {"anyOf": either}}, {"type": "null"}]
    for requests in ("all", [1, 0], [COUNT.most], ["all", [3]], [[1], [2, 0]]):
        assert parse(workload={"requests": requests}).workload.requests == requests
    assert schema["properties"]["name"]["anyOf"][0] == {"type": "string", "minLength": 1}
    with pytest.raises(ConfigError, match="name"):
        parse(name="")
