"""The report: what stands in it, that it loads nothing, runs nothing that came from a file, and always has the same bytes."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from moesim.cli.main import main
from moesim.core.table import Format, render_records
from moesim.plots.catalogue import KINDS
from moesim.reporting import read_folder, report_page
from moesim.reporting.figures import MAX_PLAIN
from moesim.reporting.timeline import FIELDS, page_timeline
from tests.experiment.experiment_kit import write_yaml
from tests.report.report_kit import POLICIES, SHA, events_of, failed, png, resolved, row, rows_of, write_folder

LOADS = ("src", "href", "srcset", "action", "data", "poster", "formaction", "xlink:href", "background")


class Page(HTMLParser):
    """A page taken apart: tags with their attributes, text, scripts, cells of the table of runs."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.styles: list[str] = []
        self.runs: list[list[str]] = []
        self.classes: list[str] = []
        self._open: list[str] = []
        self._in_runs = self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append((tag, found))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append((found, ""))
        if tag == "table":
            self._in_runs = found.get("id") == "runs"
        if self._in_runs and tag == "tr":
            self.runs.append([])
            self.classes.append(found.get("class", ""))
        if self._in_runs and tag in ("th", "td"):
            self.runs[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("th", "td")
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        elif inside == "style":
            self.styles.append(data)
        else:
            self.texts.append(data)
            if self._in_cell:
                self.runs[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def column(self, heading: str) -> list[str]:
        at = self.runs[0].index(heading)
        return [line[at] for line in self.runs[1:]]

    @property
    def timeline(self) -> Any:
        return next(json.loads(text) for attributes, text in self.scripts if attributes.get("id") == "tl-data")


def page_of(folder: Path) -> Page:
    return Page(report_page(read_folder(folder)))


def content(uri: str) -> bytes:
    return base64.b64decode(uri.partition(";base64,")[2], validate=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "result", rows_of(6), events_of())


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result as the command line writes it."""
    place = tmp_path_factory.mktemp("simulated")
    file = write_yaml(place, plots=[], timeline={"steps": 2}, cache={"ratio": [0.25, 0.5]})
    assert main(["run", str(file), "--out", str(place / "out"), "-o", "csv"]) == 0
    return place / "out"


# ---- what stands in it


def test_says_what_was_run(folder: Path):
    page = page_of(folder)
    for expected in ("made-by-hand", "Three policies.", SHA, "12" * 32, "34" * 32, "cd" * 32, "python 3.11.0", "label: measured"):
        assert expected in page.text
    assert "labels: published, derived" in page.text
    (link,) = [a for a in page.all("a") if a.get("download") == "config.resolved.yaml"]
    assert content(link["href"]) == (folder / "config.resolved.yaml").read_bytes()


def test_table_has_a_line_for_each_run_and_columns_for_what_differs(folder: Path):
    page = page_of(folder)
    assert len(page.runs) == 1 + 6
    assert page.column("decode tok/s") == ["10.0", "17.0", "24.0", "31.0", "38.0", "45.0"]
    assert page.column("batch size") == ["1", "1", "1", "2", "2", "2"]
    assert page.column("MB/token demand") == ["10.0"] * 6
    assert page.column("MB/token other") == ["1.0"] * 6
    assert page.column("link busy %") == ["75.0"] * 6
    assert page.column("label") == ["derived"] * 6
    assert "seed" not in page.runs[0]  # the same in all
    assert "J/token" not in page.runs[0]  # in none


def test_policies_that_are_not_exact_are_marked_with_what_they_serve(folder: Path):
    page = page_of(folder)
    assert page.column("fresh %") == ["100.0", "100.0", "75.1*", "100.0", "100.0", "75.1*"]  # rounded down
    assert [name.split()[0] for name in page.column("policy") if "not exact" in name] == ["daop", "daop"]
    assert page.classes.count("lossy") == 2
    assert "Never read the speed of such a policy without its share" in page.text
    exact = page_of(write_folder(folder.parent / "exact", rows_of(2)))
    assert "not exact" not in exact.text
    assert exact.classes.count("lossy") == 0


def test_failed_runs_stand_in_the_table_with_their_error(tmp_path: Path):
    rows = [*rows_of(3), failed(3, "prescope", "cache: expected 1 GiB, got 2", batch_size=7)]
    page = page_of(write_folder(tmp_path / "r", rows))
    assert page.runs[4] == ["prescope", "7", "0.25", "failed: cache: expected 1 GiB, got 2"]
    spans = [int(cell["colspan"]) for cell in page.all("td") if "colspan" in cell]
    assert spans == [len(page.runs[0]) - 3]  # up to the edge
    assert "1 failed" in page.text


def test_the_csv_holds_every_value_of_every_run(folder: Path):
    (link,) = [a for a in page_of(folder).all("a") if a.get("download") == "runs.csv"]
    assert content(link["href"]).decode() == render_records(read_folder(folder).rows, Format.CSV)
    frame = pd.DataFrame(rows_of(6))
    assert content(link["href"]).decode().count("\n") == 1 + len(frame)


def test_figures_of_the_folder_with_caption_and_data(folder: Path):
    page = page_of(folder)
    (image,) = page.all("img")
    assert content(image["src"]) == png()
    assert "Decode speed of all < three & policies." in page.text
    (link,) = [a for a in page.all("a") if a.get("download") == "decode_speed.csv"]
    assert content(link["href"]) == (folder / "plots" / "decode_speed.csv").read_bytes()


@pytest.mark.long
def test_figures_are_drawn_where_the_folder_has_none(simulated: Path):
    page = page_of(simulated)
    frame = pd.DataFrame(read_folder(simulated).rows)
    links = {a["download"]: a["href"] for a in page.all("a") if a.get("download", "").endswith(".csv")}
    assert {"decode_speed.csv", "hit_rate.csv"} <= set(links)
    assert content(links["decode_speed.csv"]).decode() == KINDS["decode_speed"].drawing(frame).data.to_csv(
        index=False, lineterminator="\n"
    )
    assert " ".join(KINDS["decode_speed"].drawing(frame).caption.split()) in page.text
    assert "Not drawn: plot heatmap" in page.text
    assert "ladder.csv" not in links  # two systems are no ablation
    assert all(content(image["src"]).startswith(b"\x89PNG") for image in page.all("img"))


def test_notes_say_which_runs_they_are_about(tmp_path: Path):
    rows = [row(0, "lru", notes="miniature"), row(1, "dali", notes="miniature, extrapolated")]
    page = page_of(write_folder(tmp_path / "r", rows))
    assert "miniature all runs extrapolated 1 of 2 runs: dali" in page.text


# ---- self-contained, safe, the same


def assert_self_contained(page: Page) -> None:
    for tag, attributes in page.tags:
        for name in LOADS:
            if name in attributes:
                assert attributes[name].startswith(("data:", "#")), (tag, name, attributes[name][:80])
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    for text in page.styles:
        assert "url(" not in text
        assert "@import" not in text
    for attributes, text in page.scripts:
        assert "src" not in attributes
        if "type" not in attributes:
            for word in ("fetch(", "XMLHttpRequest", "import(", "WebSocket", "innerHTML", "http:", "https:"):
                assert word not in text


def test_loads_nothing(folder: Path):
    page = page_of(folder)
    assert_self_contained(page)
    assert len(page.all("img")) == 1


def test_the_security_policy_allows_our_script_alone(folder: Path):
    page = page_of(folder)
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    (script,) = [text for attributes, text in page.scripts if "type" not in attributes]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'>&amp;"


def test_what_comes_from_files_is_text(tmp_path: Path):
    rows = [
        row(0, EVIL, model=EVIL, notes=EVIL.replace(",", ""), source_label=EVIL),
        row(1, "lru", batch_size=2),
        failed(2, "dali", EVIL, batch_size=3),
    ]
    events = events_of((EVIL, "lru"))
    for event in events:
        if event["ph"] == "X":
            event["name"] = EVIL
    config = resolved(experiment={"name": EVIL, "description": EVIL}, inputs={EVIL: {EVIL: {"sha256": EVIL, EVIL: EVIL}}})
    folder = write_folder(tmp_path / "r", rows, events, config=config, pictures=("decode_speed.evil<img src=x>",))
    (folder / "plots" / "decode_speed.evil<img src=x>.txt").write_text(EVIL)
    page = page_of(folder)
    assert_self_contained(page)
    assert len(page.scripts) == 2  # the data and ours
    assert len(page.all("img")) == 1
    assert page.runs[1][0] == EVIL
    assert page.runs[3][-1] == f"failed: {EVIL}"
    assert page.timeline["names"] == [EVIL]
    assert page.timeline["runs"][0]["name"] == EVIL
    harmless = page_of(write_folder(tmp_path / "harmless", rows_of(3), events_of()))
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in harmless.tags}


def test_same_folder_same_bytes(folder: Path, tmp_path: Path):
    first = report_page(read_folder(folder))
    copied = tmp_path / "elsewhere"
    shutil.copytree(folder, copied)
    assert report_page(read_folder(copied)) == first
    assert str(tmp_path) not in first


# ---- timeline


def unpacked(lane: dict[str, Any], names: list[str]) -> list[tuple[int, int, str]]:
    found, at = [], 0
    for k in range(0, len(lane["slices"]), len(FIELDS)):
        wait, duration, name = lane["slices"][k : k + 3]
        found.append((at + wait, duration, names[name]))
        at += wait + duration
    return found


@pytest.mark.long
def test_every_slice_of_the_timeline_is_in_the_page(simulated: Path):
    events = json.loads((simulated / "timeline.json").read_text())["traceEvents"]
    data = page_of(simulated).timeline
    expected = sorted((round(e["ts"] * 1000), round(e["dur"] * 1000), e["name"]) for e in events if e["ph"] == "X")
    got = sorted(one for run in data["runs"] for lane in run["lanes"] for one in unpacked(lane, data["names"]))
    assert len(expected) > 500
    assert got == expected
    assert [run["name"] for run in data["runs"]] == ["on-demand", "lru"]


def test_lanes_steps_and_arrows():
    found = page_timeline(events_of(), "", "timeline.json")
    assert found is not None
    assert found.note == ""
    runs = found.data["runs"]
    assert [run["name"] for run in runs] == list(POLICIES)
    dali = runs[1]
    assert [lane["name"] for lane in dali["lanes"]] == ["steps", "layers", "gpu0", "cpu0->gpu0"]
    assert [lane["unit"] for lane in dali["lanes"]] == ["tokens", "", "rows", "bytes"]
    assert dali["steps"] == [
        [0, 2_000_000, 0, "prefill 0"],
        [2_000_000, 4_000_000, 1, "decode 1"],
        [4_000_000, 6_000_000, 2, "decode 2"],
    ]
    assert dali["arrows"][:8] == [3, 0, 2, 0, 3, 1, 2, 1]  # from the link to the GPU, slice by slice
    demand = dict(zip(FIELDS, dali["lanes"][3]["slices"][: len(FIELDS)], strict=True))
    assert demand == {
        "wait": 20_000, "duration": 80_000, "name": found.data["names"].index("demand L0/E0"),
        "cause": [cause[0] for cause in found.data["causes"]].index("exposed_demand"), "step": 0, "layer": 0, "expert": 0,
        "amount": 88_080_384, "waited": 20_000,
    }  # fmt: skip


def test_a_long_timeline_is_cut_and_says_so(folder: Path):
    found = page_timeline(events_of(n_steps=4), "", "t", most=120)
    assert found is not None
    assert found.n_all == 3 * 4 * 31
    assert found.n_slices <= 120
    assert found.note.startswith(f"Cut: the first {found.n_slices} of 372 slices are drawn (lru up to ")
    for run in found.data["runs"]:
        numbers = [len(lane["slices"]) // len(FIELDS) for lane in run["lanes"]]
        assert sum(numbers) > 30  # of each policy
        for lane in run["lanes"]:
            assert all(a[0] + a[1] <= b[0] for a, b in pairwise(unpacked(lane, found.data["names"])))
    whole = page_of(folder)
    assert "Cut:" not in whole.text


# ---- folders of all kinds


@pytest.mark.long
def test_five_thousand_runs(tmp_path: Path):
    events = events_of(POLICIES, n_steps=10, per_step=1000)
    folder = write_folder(tmp_path / "r", rows_of(5000), events)
    text = report_page(read_folder(folder))
    assert len(text) < 12e6
    page = Page(text)
    assert len(page.runs) == 5001
    (link,) = [a for a in page.all("a") if a.get("download", "").startswith("runs")]
    assert link["download"] == "runs.csv.gz"
    plain = gzip.decompress(content(link["href"]))
    assert len(plain) > MAX_PLAIN
    assert plain.decode() == render_records(read_folder(folder).rows, Format.CSV)


def test_repeats_are_one_line_with_an_interval(tmp_path: Path):
    rows = [
        row(i, "lru", seed=i, repeat=i, requests_drawn=str(i), decode_tokens_per_s=speed)
        for i, speed in enumerate((9.0, 10.0, 11.0))
    ]
    rows.append(failed(3, "lru", "no memory", seed=3, repeat=3))
    page = page_of(write_folder(tmp_path / "r", rows))
    assert len(page.runs) == 1 + 2
    assert page.runs[2][-1] == "failed: no memory"
    assert page.runs[1][page.runs[0].index("repeats")] == "3"
    assert page.runs[1][page.runs[0].index("decode tok/s")] == "10.0 ± 2.5"  # t(2) = 4.303, s = 1, n = 3
    assert "4 runs" in page.text
    (link,) = [a for a in page.all("a") if a.get("download") == "runs.csv"]
    assert content(link["href"]).count(b"\n") == 1 + 4


# ---- the command, and bad input


def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    answer, wrote = printed.err.splitlines()
    assert printed.out == "" and wrote == f"wrote {out}" and answer in html.unescape(out.read_text())
    assert out.read_text() == report_page(read_folder(folder))
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_bytes() == out.read_bytes()  # an earlier page changes nothing
    assert main(["report", str(folder)]) == 0


Damage = Callable[[Path], object]
DAMAGE: dict[str, tuple[Damage, str]] = {
    "no folder": (shutil.rmtree, "expected the folder of a result, got nothing there"),
    "no summary": (lambda d: (d / "summary.json").unlink(), "got one without summary.json"),
    "summary is no JSON": (lambda d: (d / "summary.json").write_text('{"runs": ['), "summary.json: expected the summary"),
    "summary is a list": (lambda d: (d / "summary.json").write_text("[1]"), "summary.json: expected"),
    "summary of other runs": (
        lambda d: (d / "summary.json").write_text('{"runs": [{"run": 0, "policy": "lru"}]}'),
        "expected the 6 runs of runs.parquet, got 1",
    ),
    "no runs": (lambda d: (d / "runs.parquet").unlink(), "runs.parquet: expected the runs of a result as Parquet"),
    "corrupt runs": (
        lambda d: (d / "runs.parquet").write_bytes(b"PAR1 no"),
        "runs.parquet: expected the runs of a result as Parquet",
    ),
    "cut runs": (
        lambda d: (d / "runs.parquet").write_bytes((d / "runs.parquet").read_bytes()[:-9]),
        "runs.parquet: expected the runs of a result as Parquet",
    ),
    "runs without policies": (
        lambda d: pd.DataFrame({"a": range(6)}).to_parquet(d / "runs.parquet"),
        "expected one row a run with its policy",
    ),
    "no configuration": (lambda d: (d / "config.resolved.yaml").unlink(), "config.resolved.yaml: expected the configuration"),
    "configuration is no YAML": (
        lambda d: (d / "config.resolved.yaml").write_text("a: [1"),
        "config.resolved.yaml: expected valid YAML",
    ),
    "configuration is a list": (
        lambda d: (d / "config.resolved.yaml").write_text("[1]"),
        "expected the configuration of a result, got list",
    ),
    "configuration is no text": (
        lambda d: (d / "config.resolved.yaml").write_bytes(b"\xff\xfe\xfa"),
        "expected the configuration",
    ),
    "timeline is no JSON": (lambda d: (d / "timeline.json").write_text("{"), "timeline.json: expected trace events as JSON"),
    "timeline without events": (
        lambda d: (d / "timeline.json").write_text("{}"),
        "expected a list of trace events, got NoneType",
    ),
    "timeline of numbers": (
        lambda d: (d / "timeline.json").write_text("[1, 2]"),
        "timeline.json: event 0: expected a trace event",
    ),
    "timeline without lanes": (
        lambda d: (d / "timeline.json").write_text('[{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 1}]'),
        "timeline.json: event 0: expected a trace event of a named lane",
    ),
    "picture is none": (
        lambda d: (d / "plots" / "decode_speed.png").write_bytes(b"GIF89a"),
        "decode_speed.png: expected a picture",
    ),
}


@pytest.mark.parametrize("case", list(DAMAGE))
def test_bad_folders_are_refused_in_one_line(case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    damage, message = DAMAGE[case]
    damage(folder)
    out = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
    assert str(folder) in said
    assert not out.exists()


@pytest.mark.parametrize(("name", "message"), [("page.txt", "ends in .html"), ("", "got a folder"), ("file/page.html", "file")])
def test_bad_places_for_the_page(name: str, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("x")
    assert main(["report", str(folder), "--out", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
