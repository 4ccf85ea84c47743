"""Results of served workloads: a row a request in folders and from Python, the table, a queue that grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import moesim
from moesim.cli.main import main
from moesim.core.table import Format
from moesim.errors import ConfigError
from moesim.experiment.report import describe_run, result_table
from moesim.experiment.run import run_experiment
from moesim.experiment.store import Store, read_records, read_summary, records_bytes
from moesim.reporting.tables import result_table as result_lines
from moesim.reporting.tables import settings_of
from tests.engine.engine_kit import assert_same
from tests.experiment.experiment_kit import resolve, small, write_yaml

SERVED: dict[str, Any] = {
    "arrivals": "poisson", "rate": [0.2, 50.0], "n_requests": 12, "prompt_tokens": 4, "answer_tokens": 3,
    "scheduler": {"name": "vllm", "max_num_seqs": 2}, "limits": {"ttft_s": 5.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> moesim.Result:
    return moesim.run(small(tmp_path_factory.mktemp("served"), workload=SERVED, plots=[]), jobs=1, progress=False)


def test_a_row_for_each_request(result: moesim.Result):
    found = result.requests()
    assert len(found) == 4 * 12
    assert list(found)[:3] == ["run", "policy", "request"]
    for row in result.rows:
        mine = found[found["run"] == row["run"]]
        assert mine["policy"].unique().tolist() == [row["policy"]]
        assert mine["ttft_ns"].median() == row["ttft_p50_ns"]
        assert mine["e2e_ns"].mean() == row["e2e_mean_ns"]
        assert mine["tpot_ns"].astype(float).mean() == pytest.approx(row["tpot_mean_ns"])
        assert (mine["arrival_ns"] <= mine["start_ns"]).all() and (mine["first_ns"] < mine["end_ns"]).all()
        assert mine["user"].isna().all()  # nobody waits for an answer before asking again
    assert result.requests(policy="lru", rate=0.2)["run"].unique().tolist() == [1]


def test_requests_that_have_not_ended_have_no_times(tmp_path: Path):
    found = moesim.run(
        small(tmp_path, workload={**SERVED, "rate": 50.0, "until_s": 1.0}, policies=["lru"], plots=[]), jobs=1, progress=False
    )
    requests = found.requests()
    assert requests["end_ns"].isna().any() and requests["e2e_ns"].isna().sum() == requests["end_ns"].isna().sum()
    assert found.rows[0]["n_requests_unfinished"] == requests["end_ns"].isna().sum()


def test_batches_have_no_requests_to_show(tmp_path: Path):
    found = moesim.run(small(tmp_path, policies=["lru"], plots=[]), jobs=1, progress=False)
    with pytest.raises(ConfigError, match="expected a run of a served workload"):
        found.requests()
    assert "answer" not in str(found)


def test_a_folder_has_the_requests_wherever_its_runs_were(tmp_path: Path, result: moesim.Result):
    file = write_yaml(tmp_path, workload=SERVED, plots=[], timeline=None)
    for name, jobs in (("one", 1), ("two", 2)):
        moesim.run(file, out=tmp_path / name, jobs=jobs, progress=False)
    one, two = (tmp_path / name for name in ("one", "two"))
    assert (one / "requests.parquet").read_bytes() == (two / "requests.parquet").read_bytes()
    read = pd.read_parquet(one / "requests.parquet")
    pd.testing.assert_frame_equal(read, result.requests().astype(read.dtypes.to_dict()))
    pd.testing.assert_frame_equal(moesim.load(one).requests(), result.requests())
    saved = result.save(tmp_path / "saved")
    assert (saved / "requests.parquet").read_bytes() == (one / "requests.parquet").read_bytes()


def test_a_run_whose_requests_are_lost_is_done_again(tmp_path: Path):
    experiment = resolve(tmp_path, workload={**SERVED, "rate": 0.2}, plots=[])
    folder = tmp_path / "out"
    done = run_experiment(experiment, folder=folder)
    assert done.n_found == 0 and all(one.records is None for one in done.outcomes)  # memory has none of them
    assert run_experiment(experiment, folder=folder).n_found == 2
    next((folder / "records").iterdir()).unlink()
    again = run_experiment(experiment, folder=folder)
    assert again.n_found == 1
    kept = [Store(folder).records(str(one.row["key"]), 0) for one in again.outcomes]
    assert all(records is not None and records.served is not None and not len(records.tasks) for records in kept)


def test_records_in_a_file_have_the_requests(tmp_path: Path):
    experiment = resolve(tmp_path, workload={**SERVED, "rate": 50.0}, policies=["lru"])
    (outcome,) = run_experiment(experiment, keep=lambda index: True).outcomes
    assert outcome.records is not None and outcome.records.served is not None
    data = records_bytes(outcome.records)
    back = read_records(data, "file")
    assert_same(back, outcome.records)
    assert records_bytes(back) == data


def test_the_table_has_waiting_times_next_to_totals(result: moesim.Result):
    text = str(result)
    head, *lines = text.splitlines()
    assert head.split()[:6] == ["requests/s", "policy", "TTFT", "p50", "p99", "TPOT"]
    assert "tok/s" in head and "good/s" in head
    assert all("+" in line for line in lines if line.startswith("50"))
    assert not any("+" in line for line in lines if line.startswith("0.2"))
    assert "+ the queue grew: requests come faster than they are served" in text
    assert "answer 3" in text and "scheduler vllm(max_num_seqs=2)" in text and "batch" not in text and "decode" not in text
    assert "the queue grew to 1" in str(result.rows[-1]["notes"])
    wide = result_table(result.rows, Format.TABLE, wide=True).splitlines()[0]
    assert "queue" in wide and "in slots %" in wide and "waited for" in wide


def test_users_never_make_a_queue_that_grows(tmp_path: Path):
    closed = {name: value for name, value in SERVED.items() if name not in ("arrivals", "rate")} | {"closed": 12}
    found = moesim.run(small(tmp_path, workload=closed, policies=["lru"], plots=[]), jobs=1, progress=False)
    assert "queue grew" not in str(found.rows[0]["notes"])
    assert found.requests()["user"].tolist() == list(range(12))


def test_requests_that_had_not_ended_are_noted(tmp_path: Path):
    workload = {**SERVED, "rate": 50.0, "until_s": 0.3}
    found = moesim.run(small(tmp_path, workload=workload, policies=["lru"], plots=[]), jobs=1, progress=False)
    row = found.rows[0]
    assert 0 < row["n_requests_unfinished"] <= row["n_requests_arrived"]
    assert f"{row['n_requests_unfinished']} of {row['n_requests_arrived']} requests had not ended" in str(row["notes"])


def test_lengths_from_a_file_are_no_empty_word(tmp_path: Path):
    (tmp_path / "requests.csv").write_text("Time (s),prompt_tokens,completion_tokens\n0,4,2\n1,5,3\n")
    workload = {"arrivals": str(tmp_path / "requests.csv"), "drafts": {"n": 1, "accept": 0.5}, "scheduler": "freetoken"}
    found = moesim.run(small(tmp_path, workload=workload, policies=["lru"], plots=[]), jobs=1, progress=False)
    assert found.requests()[["prompt", "answer"]].to_numpy().tolist() == [[4, 2], [5, 3]]
    assert "prompt None" not in str(found) and "freetoken has no drafts in its released form" in str(found)


def test_figures_of_served_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plots = ["latency_by_load", "goodput", {"kind": "request_gantt", "where": {"rate": 50.0}, "first": 3}, "slots_over_time"]
    file = write_yaml(tmp_path, workload=SERVED, plots=plots)
    out = tmp_path / "out"
    assert main(["run", str(file), "--out", str(out)]) == 0
    assert {path.stem for path in (out / "plots").glob("*.png")} == {
        "latency_by_load",
        "goodput",
        "request_gantt",
        "slots_over_time",
    }
    gantt = pd.read_csv(out / "plots" / "request_gantt.csv")
    assert gantt["request"].max() == 2 and gantt["begin_s"].max() < 12
    assert "requests/s 50" in (out / "plots" / "request_gantt.txt").read_text()
    drawn = ["plot", "request_gantt", str(out), "--where", "rate=50.0", "--option", "first=3", "--out", str(tmp_path / "again")]
    assert main(drawn) == 0
    assert (tmp_path / "again" / "request_gantt.csv").read_bytes() == (out / "plots" / "request_gantt.csv").read_bytes()
    figure = moesim.load(out).plot("request_gantt", where={"rate": 50.0}, first=3)
    assert figure.data.shape == gantt.shape  # type: ignore[attr-defined]


def test_figures_that_need_served_runs_say_so(tmp_path: Path):
    found = moesim.run(small(tmp_path, policies=["lru"], plots=[]), jobs=1, progress=False)
    for kind in ("request_gantt", "slots_over_time", "latency_by_load"):
        with pytest.raises(ConfigError, match=r"served|requests_per_s"):
            found.plot(kind)


def test_a_report_has_the_measures_of_requests(tmp_path: Path):
    file, out = write_yaml(tmp_path, workload=SERVED, plots=[]), tmp_path / "out"
    moesim.run(file, out=out, progress=False)
    rows = read_summary(out)["runs"]
    headings = [heading for heading, *_ in result_lines(rows, {}).headings]
    assert headings[:9] == [
        "policy", "rate", "cache ratio", "TTFT p50 (ms)", "TTFT p99 (ms)", "TPOT p50 (ms)", "tok/s", "req/s", "good/s",
    ]  # fmt: skip
    assert "decode tok/s" not in headings
    settings = dict(settings_of(rows))
    assert settings["rate"] == "0.2, 50" and not {"batch size", "n batches"} & settings.keys()
    assert describe_run(rows[0]) == "run 0 (on-demand, cache 0.25, requests/s 0.2)"


def test_a_moved_result_finds_its_file_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "requests.csv").write_text("time_s,prompt,answer\n0,4,2\n1,5,3\n")
    monkeypatch.chdir(tmp_path)
    file = write_yaml(tmp_path, workload={"arrivals": "requests.csv"}, policies=["lru"], timeline=None, plots=[])
    moesim.run(file, out="out", progress=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    whole = moesim.load("../out").records()  # next to the result
    moved = Path("../requests.csv").rename("renamed.csv")
    with pytest.raises(
        ConfigError, match=r"out: run 0 \(lru\): expected the requests requests.csv .* name its folder with --inp"
    ):
        moesim.load("../out").records()
    moved.rename("requests.csv")
    assert_same(moesim.load("../out", inputs=elsewhere).records(), whole)
    Path("requests.csv").write_text("time_s,prompt,answer\n0,4,2\n1,5,4\n")
    with pytest.raises(ConfigError, match="expected the same result when simulated again"):
        moesim.load("../out", inputs=elsewhere).records()
