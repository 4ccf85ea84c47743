"""A league's map on draws of routing that had no part in it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import moesim
from experiments.research.tables.fresh_draws import fresh_draws, main, on_fresh_draws
from moesim.experiment.config import parse_config
from moesim.experiment.workers import Workers
from moesim.studies.league import CPU_COST, NOISE, League, Meetings, league
from tests.experiment.experiment_kit import small, write_yaml

SYSTEMS = ["on-demand", "lru", "fiddler", "daop-paper"]
WORK = {"batch_size": [1, 2], "prompt_tokens": 6, "decode_tokens": 2, "seed": [0, 1]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> League:
    config = parse_config(small(tmp_path_factory.mktemp("league"), policies=SYSTEMS, workload=WORK), "small.yaml")
    return league(config, "small.yaml", ratios=(0.125, 2.0), shares=(0.25, 0.75), jobs=1)


def test_fresh_draws_count_what_the_map_says(found: League):
    doubts = ((), (NOISE,), (CPU_COST,))
    cells = [replace(one, contest=replace(one.contest, doubts=some)) for one, some in zip(found.cells, doubts, strict=False)]
    systems = [{"name": name} for name in SYSTEMS]
    with Workers(1) as workers:
        meetings = Meetings("x", workers)
        counts = on_fresh_draws(cells, systems, 2, meetings)
    assert (counts.certain, counts.noisy, meetings.n_runs) == (1, 1, 12)
    raws = [json.loads(raw) for raw in fresh_draws(cells[0].setting.draws[0], 2)]
    assert [raw["workload"]["seed"] for raw in raws] == [1000, 1001]
    speeds = [
        moesim.run(raw | {"policies": [cells[0].contest.best, cells[0].contest.second]}, progress=False).table for raw in raws
    ]
    ratios = [float(one["decode_tokens_per_s"][0] / one["decode_tokens_per_s"][1]) for one in speeds]
    assert counts.kept == (math.prod(ratios) > 1)


def test_the_command_finds_the_runs_of_the_league(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_yaml(tmp_path, policies=SYSTEMS[:3], workload=WORK | {"batch_size": 1})
    given = [str(file), "--draws", "2", "--ratios", "0.125", "2", "--shares", "0.5", "--out", str(tmp_path / "out"), "-j", "1"]
    assert main(given) == 0
    said = capsys.readouterr().out
    assert said.startswith("on 2 fresh draws the best is faster than the second in ")
    assert main(given) == 0
    assert capsys.readouterr().out == said
