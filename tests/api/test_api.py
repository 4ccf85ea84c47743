"""`import moesim`: the same results as the commands, from objects, with the same errors."""

from __future__ import annotations

import ast
import html
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

import moesim
from moesim.api.arguments import written
from moesim.cli.main import main
from moesim.core.colours import SERIES
from moesim.core.files import FILE
from moesim.errors import ConfigError, InputError
from moesim.hardware import read_profile
from moesim.model import builtin_models
from moesim.policies.composed import Composed
from moesim.policies.systems.caches import LRU
from moesim.policies.systems.dali import Dali
from moesim.policies.systems.fiddler import Fiddler
from moesim.policies.systems.hybrimoe import Queues
from moesim.testing.traces import synthetic_trace

SMALL: dict[str, Any] = {
    "model": {"base": "mixtral-8x7b", "expert_bits": 4},
    "cache": 0.25,
    "prompt": 8,
    "decode": 4,
    "trace": "mini-mixtral",
    "progress": False,
    "jobs": 1,
}


@pytest.fixture(scope="module")
def result() -> moesim.Result:
    return moesim.compare(["lru", "fiddler"], **SMALL | {"cache": [0.25, 0.5]})


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, moesim; print(*sorted(n for n in ('numpy', 'pandas', 'simpy', 'typer', 'scipy') if n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_all_names_are_there_and_no_other() -> None:
    for name in moesim.__all__:
        assert getattr(moesim, name) is not None
        assert name in dir(moesim)
    with pytest.raises(AttributeError, match="no attribute 'compere'"):
        moesim.compere  # noqa: B018


def test_names_in_one_text_and_a_result_where_a_folder_is_asked_for():
    with pytest.raises(
        ConfigError, match=r"policies: expected a name or a list of names, got 'lru,dali'; write \['lru', 'dali'\]"
    ):
        moesim.compare("lru,dali")
    result: Any = object()
    with pytest.raises(ConfigError, match="plot: results: expected folders or files, got object"):
        moesim.plot("speedup", result, "out")


def test_the_rows_are_those_of_the_command(result: moesim.Result) -> None:
    arguments = ["--policies", "lru,fiddler", "--cache", "0.25,0.5", "--prompt", "8", "--decode", "4", "--trace", "mini-mixtral"]
    done = subprocess.run(
        [sys.executable, "-m", "moesim", "compare", *arguments, "-o", "json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == result.rows


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Dali(), "dali"),
        (Dali(w_size=2, lane="side"), {"name": "dali", "w_size": 2, "lane": "side"}),
        (Fiddler, "fiddler"),
        (LRU(), "lru"),
        (Composed(assignment=Queues(ties="cpu")), {"name": "composed", "assignment": {"name": "queues", "ties": "cpu"}}),
        ({"name": "fiddler", "rule": "code"}, {"name": "fiddler", "rule": "code"}),
        ("lru", "lru"),
    ],
)
def test_policies_are_written_as_in_a_file(policy: Any, said: Any) -> None:
    assert written(policy, "policies") == said


class Plain:
    """A policy that derives from nothing."""

    place = decide = evict = None

    def __init__(self, share: float = 0.5, hidden: int = 1) -> None:
        self.share = share
        self._hidden = hidden


def test_arguments_of_a_plain_class_are_read_from_its_attributes() -> None:
    policy = Plain(0.25)
    with pytest.raises(ConfigError, match="policies: expected an attribute for each argument of Plain, got none for hidden"):
        written(policy, "policies")
    policy.hidden = 1  # type: ignore[attr-defined]
    assert written(policy, "policies") == {"name": f"{__name__}:Plain", "share": 0.25}


@pytest.mark.parametrize("name", sorted(builtin_models()))
def test_models_are_written_as_in_a_file(name: str) -> None:
    assert written(moesim.load_model(name), "model") == name
    changed = {"base": name, "top_k": 1, "expert_bits": [8, 4, 2]}
    model = moesim.load_model(changed)
    again = written(model, "model")
    assert again["expert_bits"] == [[8, 4, 2]]  # one model of three precisions, no sweep
    assert moesim.load_model({**again, "expert_bits": again["expert_bits"][0]}) == model
    other = replace(moesim.load_model(name), name="mine")
    assert moesim.load_model(written(other, "model")).figures() == other.figures()


def test_a_machine_is_written_as_it_was_loaded() -> None:
    changed = {"base": "rtx3090-epyc7532", "devices.gpu0.memory_bytes": "12 GiB"}
    assert written(moesim.load_hardware(changed), "hardware") == changed
    with pytest.raises(ConfigError, match="hardware: expected a machine as load_hardware"):
        written(replace(moesim.load_hardware("rtx3090-epyc7532"), platform_w=3.0), "hardware")


def test_objects_give_the_same_rows_as_names(result: moesim.Result) -> None:
    found = moesim.compare(
        [LRU(), Fiddler()],
        **SMALL
        | {
            "model": moesim.load_model(SMALL["model"]),
            "hardware": moesim.load_hardware("rtx3090-epyc7532"),
            "trace": moesim.load_trace("mini-mixtral"),
            "cache": np.array([0.25, 0.5]),
        },
    )
    assert found.rows == result.rows


def test_a_trace_that_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = synthetic_trace(32, 8, 2, 1, 8, 4)
    here = moesim.compare("lru", **SMALL | {"trace": trace})
    apart = moesim.compare("lru", **SMALL | {"trace": trace, "jobs": 2, "out": tmp_path / "out"})
    assert here.rows == apart.rows
    assert here.rows[0]["trace"] == f"given:{trace.digest[:16]}"
    loaded = moesim.load(tmp_path / "out")
    assert loaded.table.equals(here.table)
    assert loaded.plots("breakdown") and loaded.timeline().events, "the folder has what they take"
    shutil.rmtree(tmp_path / "out" / "records")
    loaded = moesim.load(tmp_path / "out")
    with pytest.raises(
        InputError, match=r"run 0 \(lru\): expected the trace given:[0-9a-f]{16} \(sha256 .* got none of that name;"
    ):
        loaded.records(0)
    for name in "ab":
        synthetic_trace(32, 8, 2, 1, 8, 5).write(tmp_path / "others" / f"{name}.safetensors")
    with monkeypatch.context() as patch, pytest.raises(InputError, match=r"got another in .*a\.safetensors;"):
        listed = Path.glob
        patch.setattr(Path, "glob", lambda *asked: sorted(listed(*asked), reverse=True))  # folders have any order
        moesim.load(tmp_path / "out", inputs=tmp_path / "others").records(0)
    trace.write(tmp_path / "written.safetensors")
    assert moesim.load(tmp_path / "out", inputs=tmp_path).records(0) == here.records(0)


def test_a_whole_machine_and_a_whole_model_in_an_experiment() -> None:
    machine = read_profile("rtx3090-epyc7532")[0]
    found = moesim.run(
        {
            "model": replace(moesim.load_model("mixtral-8x7b"), name="mine", expert_bits=4),
            "hardware": machine,
            "trace": "mini-mixtral",
            "workload": {"prompt_tokens": 2, "decode_tokens": 1},
            "cache": {"ratio": 0.25},
            "policies": ["lru"],
        },
        progress=False,
    )
    assert (found.rows[0]["model"], found.rows[0]["hardware"]) == ("mine", machine["name"])


def test_a_policy_typed_into_a_script(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import moesim\n"
        "from moesim.policies.options import option\n"
        "from moesim.policies.systems.caches import LRU\n"
        "class Mine(LRU):\n    threshold: int = option(1)\n"
        "if __name__ == '__main__':\n"
        "    found = moesim.compare(['lru', Mine(threshold=3)], cache=0.25, prompt=4, decode=2, trace='mini-mixtral', "
        "jobs=2, out='out')\n"
        "    print(*found.table['policy'], found.rows[0]['makespan_ns'] == found.rows[1]['makespan_ns'])\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "lru __main__:Mine(threshold=3) True\n"
    assert moesim.load(tmp_path / "out").rows[1]["policy"] == "__main__:Mine(threshold=3)"


def test_records_by_number_and_by_settings(result: moesim.Result) -> None:
    records = result.records(policy="lru", cache_ratio=0.5)
    assert records is result.records(2)
    assert records.makespan_ns == result.rows[2]["makespan_ns"]
    with pytest.raises(ConfigError, match=r"expected one run, got run 0 \(lru.*run 2 \(lru"):
        result.records(policy="lru")
    with pytest.raises(ConfigError, match="expected one run, got none"):
        result.records(9)
    with pytest.raises(ConfigError, match="unknown column 'polcy'"):
        result.records(polcy="lru")


def test_a_figure_for_a_paper_has_its_words_in_the_caption(result: moesim.Result) -> None:
    screen, paper = result.plot("speedup"), result.plot("speedup", medium="paper", width="column")
    said = ["".join(one.get_text() for one in figure.findobj(Text)) for figure in (screen, paper)]
    assert ["mixtral-8x7b" in one for one in said] == [True, False]
    assert ["Speed-up over" in one for one in said] == [True, False]
    assert "mixtral-8x7b" in paper.caption and list(paper.data["policy"].unique()) == ["fiddler"]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"plot speedup: medium: unknown medium 'print'"):
        result.plot("speedup", medium="print")  # type: ignore[arg-type]


def test_figures(result: moesim.Result) -> None:
    assert isinstance(result.plot("speedup"), Figure)
    assert result.plot("gantt", policies=["fiddler"], width="column").get_figwidth() == 3.35
    with pytest.raises(ConfigError, match=r"plot gantt: width: expected column, page, slide, or 2.5 to 20 inches, got '1'"):
        result.plot("gantt", policies=["fiddler"], width=1)
    assert list(result.plots("breakdown", where={"cache_ratio": 0.5})) == ["breakdown"]
    (bars,) = result.plot("decode_speed", policies=["fiddler"], where={"cache_ratio": 0.5}).axes
    assert to_hex(bars.patches[0].get_facecolor()).upper() == SERIES[2]  # of this policy in every result
    tokens = result.plot("hit_rate_by_token", where={"cache": 0.5})
    assert isinstance(tokens, Figure)
    with pytest.raises(ConfigError, match="unknown option 'colour'"):
        result.plot("speedup", colour="red")
    with pytest.raises(ConfigError, match="plot regret: expected a figure of runs"):
        result.plot("regret")
    batches = moesim.compare("lru", **SMALL | {"prompt": [4, 8], "cache": [0.25, 0.5], "batch": [1, 2]})
    with pytest.raises(ConfigError, match=r"expected settings of one figure, got those of \d: .*where="):
        batches.plot("breakdown")


def test_a_figure_is_written_as_the_command_writes_it(result: moesim.Result, tmp_path: Path) -> None:
    figure: Any = result.plot("decode_speed", where={"cache": 0.5}, medium="paper", width="column")
    written = figure.write(tmp_path / "speed")
    assert [one.name for one in written] == ["speed.png", "speed.pdf", "speed.csv", "speed.txt"]
    assert written[3].read_text() == figure.caption + "\n"
    result.save(tmp_path / "folder")
    from moesim.cli.main import main

    options = ["--where", "cache_ratio=0.5", "--for", "paper", "--width", "column", "--out", str(tmp_path / "out")]
    assert main(["plot", "decode_speed", str(tmp_path / "folder"), *options]) == 0
    for one in written:
        (other,) = (tmp_path / "out").glob(f"*{one.suffix}")
        assert other.read_bytes() == one.read_bytes(), one.name


def test_runs_that_a_figure_leaves_out_are_not_simulated_again(result: moesim.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[int] = []
    real = moesim.Result._outcome
    monkeypatch.setattr(moesim.Result, "_outcome", lambda self, i, **more: again.append(i) or real(self, i, **more))
    result.plot("hit_rate_by_token", policies=["fiddler"], where={"cache": 0.5})
    assert [(result.rows[i]["policy"], result.rows[i]["cache_ratio"]) for i in again] == [("fiddler", 0.5)]


@pytest.mark.long
def test_the_folder_is_that_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(
        "model: {base: mixtral-8x7b, expert_bits: 4}\nhardware: rtx3090-epyc7532\ntrace: mini-mixtral\n"
        "workload: {prompt_tokens: 4, decode_tokens: 2}\ncache: {ratio: [0.25, 0.5]}\npolicies: [lru, fiddler]\n"
        "plots: [decode_speed, gantt]\n"
    )
    command = [sys.executable, "-m", "moesim", "run", str(file), "--out", str(tmp_path / "command")]
    subprocess.run(command, capture_output=True, check=True)
    found = moesim.run(file, progress=False)
    found.save(tmp_path / "saved")
    moesim.run(file, progress=False, out=tmp_path / "out")
    paths = [
        {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != FILE
        }
        for folder in (tmp_path / "command", tmp_path / "saved", tmp_path / "out")
    ]
    assert paths[0] == paths[1] == paths[2]
    loaded = moesim.load(tmp_path / "saved")
    assert loaded.rows == found.rows
    assert loaded.records(0).makespan_ns == found.rows[0]["makespan_ns"]
    with pytest.raises(ConfigError, match="copy that folder"):
        loaded.save(tmp_path / "again")
    timeline = loaded.timeline().save(tmp_path / "timeline.json")
    assert timeline.read_bytes() == (tmp_path / "command" / "timeline.json").read_bytes()
    with pytest.raises(ConfigError, match="unknown policy of the first setting 'dali'"):
        loaded.timeline("dali")


def test_overrides_as_a_mapping_and_as_texts(tmp_path: Path) -> None:
    raw = {
        "model": {"base": "mixtral-8x7b", "expert_bits": 4}, "hardware": "rtx3090-epyc7532", "trace": "mini-mixtral",
        "workload": {"prompt_tokens": 4, "decode_tokens": 2}, "cache": {"ratio": 0.25}, "policies": ["lru"],
    }  # fmt: skip
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(raw))
    changed = {"workload": {"decode_tokens": 3}}
    rows = [
        moesim.run(what, overrides=more, progress=False).rows[0]["makespan_ns"]
        for what in (raw, file)
        for more in (changed, ["workload.decode_tokens=3"])
    ]
    assert len(set(rows)) == 1 != moesim.run(raw, progress=False).rows[0]["makespan_ns"]
    with pytest.raises(ConfigError, match="put it into a list"):
        moesim.run(raw, overrides="workload.decode_tokens=3")


def test_what_is_shown(result: moesim.Result) -> None:
    assert repr(result) == "<moesim.Result: 4 runs of lru, fiddler>"
    assert str(result).startswith("policy ")
    html = result._repr_html_()
    assert html.count("<tr>") == 5
    rows = [dict(result.rows[0], policy="<b>")]
    assert "&lt;b&gt;" in moesim.Result(rows, None)._repr_html_()


def test_failed_runs_are_told() -> None:
    found = moesim.compare(["lru", "all-gpu"], **SMALL | {"model": {"base": "mixtral-8x7b", "expert_bits": 8}})
    assert len(found.failures) == 1
    assert found.failures[0].startswith("run 1 (all-gpu, cache 0.25, batch 1): ")
    with pytest.raises(ConfigError, match="expected a run that succeeded"):
        found.records(1)


def test_wrong_input_is_the_error_of_the_command() -> None:
    with pytest.raises(InputError, match="unknown policy 'lruu'"):
        moesim.compare("lruu", **SMALL)
    with pytest.raises(ConfigError, match=r"policies\[0\]: expected a name, a number, a mapping"):
        moesim.compare([object()], **SMALL)
    with pytest.raises(ConfigError, match="nothing there"):
        moesim.load("nowhere")


def test_the_types_are_of_the_same_names() -> None:
    tree = ast.parse(Path(moesim.__file__).with_suffix(".pyi").read_text())
    told = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    told |= {"trace": "moesim.trace:", "profile": "moesim.profile:"}  # modules
    assert told == moesim._FROM  # type: ignore[attr-defined]


def test_a_notebook_shows_what_models_machines_and_traces_are() -> None:
    shown = moesim.load_trace("mini-mixtral")._repr_html_()
    assert "<tr><th>routing of</th><td>mini-mixtral</td></tr>" in shown
    assert "<tr><th>top_k</th><td>2</td></tr>" in shown
    assert "<td>25.8 GB (24 GiB)</td>" in moesim.load_hardware("rtx3090-epyc7532")._repr_html_()
    assert "<tr><th>experts</th><td>128</td></tr>" in moesim.load_model("qwen3-30b-a3b")._repr_html_()
    named = replace(moesim.load_model("qwen3-30b-a3b"), source="<a & b>")._repr_html_()
    assert "&lt;a &amp; b&gt;" in named


@pytest.mark.parametrize(
    ("call", "given", "said"),
    [
        (moesim.run, {"experiment": "x.yaml", "trace": "t"}, "run(): unknown argument 'trace'; pass overrides={'trace': ...}"),
        (moesim.run, {"experiment": "x.yaml", "batch": 4}, "run(): unknown argument 'batch'; pass overrides={'workload': {'"),
        (moesim.compare, {"policies": "lru", "batch_size": 4}, "compare(): unknown argument 'batch_size'; did you mean 'batch'?"),
        (moesim.diff, {"run_a": "a", "trusts": True}, "diff(): unknown argument 'trusts'; did you mean 'trust'? known: "),
        (moesim.capacity, {"policies": "lru"}, "capacity(): expected model and hardware by name, got nothing; add them"),
        (moesim.league, {"file": "x.yaml"}, "league(): unknown argument 'file'"),
        (moesim.report, {}, "report(): missing a required argument: 'folder'"),
        (moesim.whatif, {"model": "mixtral-8x7b"}, "whatif: expected an experiment, or model with hardware"),
    ],
)  # fmt: skip
def test_a_call_with_a_wrong_argument_names_it_and_what_is_meant(call: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        call(**given)
    assert str(found.value).startswith(said)


def test_a_report_is_that_of_the_command(tmp_path: Path) -> None:
    moesim.run({"policies": ["lru"], "model": SMALL["model"], "hardware": "rtx3090-epyc7532", "trace": "mini-mixtral",
                "cache": {"ratio": 0.25}, "workload": {"prompt_tokens": 2, "decode_tokens": 2}},
               out=tmp_path / "ran", jobs=1, progress=False)  # fmt: skip
    found = moesim.report(tmp_path / "ran", out=tmp_path / "page.html", progress=False)
    assert found.answer in html.unescape(found.path.read_text()) and found.text() == f"{found.answer}\nwrote {found.path}\n"
    assert main(["report", str(tmp_path / "ran")]) == 0
    assert found.path.read_bytes() == (tmp_path / "ran" / "report.html").read_bytes()


def test_a_trace_is_imported_and_described_as_by_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{request},{token},{layer},{token % 4}" for request in range(2) for token in range(6) for layer in range(2)]
    (tmp_path / "log.csv").write_text("\n".join(["request,token,layer,expert", *rows]) + "\n")
    given: dict[str, Any] = {"n_experts": 4, "phase": "decode", "label": "measured"}
    found = moesim.trace.import_(tmp_path / "log.csv", tmp_path / "a.safetensors", **given)
    options = ["--n-experts", "4", "--phase", "decode", "--label", "measured"]
    assert main(["trace", "import", str(tmp_path / "log.csv"), *options, "--out", str(tmp_path / "b.safetensors")]) == 0
    assert re.sub(r"\bb(?=\.safe|-calibrated)", "a", capsys.readouterr().err) == found.text()
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r"import_: out .*got a file; pass overwrite=True or choose another name"):
        moesim.trace.import_([tmp_path / "log.csv"], found.path, **given)
    with pytest.raises(ConfigError, match="import_: hold_back: unknown word 'tokens'"):
        moesim.trace.import_(tmp_path / "log.csv", tmp_path / "c.safetensors", hold_back="tokens", **given)
    described = moesim.stats(found.path, progress=False)
    assert main(["trace", "stats", str(found.path), "-q"]) == 0
    assert capsys.readouterr().out == described.text()
    assert len(described.table) and moesim.stats(moesim.load_trace(found.path), progress=False).text() == described.text()


def test_remarks_are_logged_for_whoever_listens_and_printed_by_nobody_else() -> None:
    code = """if True:
        import logging, sys, moesim
        def ask():
            moesim.compare("lru", cache=0.25, prompt=2, decode=2, jobs=1, progress=False)
        ask()
        print("listening", file=sys.stderr)
        logging.basicConfig(format="%(name)s %(levelname)s")
        ask()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    silent, _, heard = done.stderr.partition("listening\n")
    assert silent == "" and set(heard.splitlines()) == {"moesim WARNING"}
