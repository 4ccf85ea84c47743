"""Rows of measured engines: what texts mean, what is skipped, and the order of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import moesim.studies.validation.engines as engines
from moesim.cli.main import main
from moesim.core.table import Format
from moesim.errors import ConfigError
from moesim.studies.identify.named import NotUsableError
from moesim.studies.validation.engine_rows import Row, policy_of, read_rows
from moesim.studies.validation.engines import orders, run_engines, summary, table

HEAD = "model,quant,gpu,cpu,ram,engine,setting,n_ctx_or_prompt,tok_s,kind(pp/tg),source,quote\n"
CARD = "RTX 3090 24 GB (device read 888 GB/s),Core i9-11900KF (8C/16T),125 GB; read 44.9 GB/s"


def rows(folder: Path, *lines: str, head: str = HEAD) -> tuple[list[Row], list[tuple[str, str, str]], list[str]]:
    path = folder / "rows.csv"
    path.write_text(head + "".join(f"{line}\n" for line in lines), encoding="utf-8")
    return read_rows(path)


def one(folder: Path, engine: str, setting: str, model: str = "gpt-oss-120b,MXFP4", more: str = "tg128,30,tg") -> Row:
    found, skipped, _ = rows(folder, f'{model},{CARD},{engine},"{setting}",{more},here,')
    assert not skipped, skipped
    return found[0]


@pytest.mark.parametrize(
    ("engine", "setting", "policy", "cache"),
    [
        ("llama.cpp llama-bench -ngl 99 -c 4096", "--n-cpu-moe 25 of 36", {"name": "llama-cpp", "n_cpu_moe": 25}, 1),
        ("llama.cpp --n-cpu-moe", "experts on GPU 11 %", {"name": "llama-cpp", "n_cpu_moe": 32}, 1),
        ("ik_llama.cpp", "experts of blocks 5-35 on CPU (31 of 36)", {"name": "llama-cpp", "n_cpu_moe": 31}, 1),
        ("ik_llama.cpp", "FFN of blocks 0-4 of 36 on GPU", {"name": "llama-cpp", "n_cpu_moe": 31}, 1),
        ("llama.cpp", "experts of the first 9 of 36 layers on GPU", {"name": "llama-cpp", "n_cpu_moe": 27}, 1),
        ("llama.cpp", "-cmoe", {"name": "llama-cpp", "n_cpu_moe": 36}, 1),
        ("llama.cpp", "-ngl 12 of 36 (whole layers)", {"name": "llama-cpp", "n_gpu_layers": 12}, 1),
        ("moe-speed-of-light expert cache (DFA)", "11 % of experts on GPU (C 14)", {"name": "dfa-cache", "kappa": 1}, 14 / 128),
        ("moe-speed-of-light", "2 of 8 experts a layer on GPU; hit 31.5 %", {"name": "dfa-cache", "kappa": 1}, 2 / 128),
        ("FreeToken hybrid", "cache 64", {"name": "freetoken", "backend": "hybrid"}, 0.5),
        ("llama.cpp PR 27861", "66 slots", {"name": "two-uploads-lru"}, 66 / 128),
        ("llama.cpp moe-cache fork b11608", "cache 32 slots", {"name": "two-uploads-lru"}, 0.25),
        ("pooled cache (PR 24524)", "40 % cached", {"name": "pooled-cache"}, 0.4),
        ("llama.cpp", "expert cache 48 slots", {"name": "llama-cpp-cache"}, 0.375),
        ("KTransformers kt-kernel", "experts on CPU", {"name": "kt-expert"}, 0),
        ("heat-cache", "auto cache", {"name": "heat-cache"}, 1),
        ("llama.cpp PR 27861", "66 slots, inserts 3", {"name": "two-uploads-lru", "inserts": 3}, 66 / 128),
        ("llama.cpp PR 28414", "-ncmoe 25 --prefetch-experts-slots 3",
         {"name": "llama-cpp", "n_cpu_moe": 25, "prefetch_experts_slots": 3}, 1),
        ("exllamav3", "stream decode, 40 % cached", {"name": "exllamav3", "stream_decode": True}, 0.4),
    ],
)  # fmt: skip
def test_words_of_engines_become_policies(tmp_path: Path, engine: str, setting: str, policy: dict[str, Any], cache: float):
    case = one(tmp_path, engine, setting).case
    assert case.setting.policy == policy
    assert case.setting.cache["ratio"] == pytest.approx(cache, rel=1e-6)


@pytest.mark.parametrize(
    ("context", "kind", "expected"),
    [
        ("tg64 @ d8192", "tg", (8192, 64)), ("AIME-25, 256 tokens", "tg", (64, 256)), ("10k prompt", "tg", (10_000, 128)),
        ("ctx 10K-64K", "tg", (37_000, 128)), ("65588", "tg", (65_588, 128)), ("pp2048", "pp", (2048, 1)), ("", "tg", (64, 128)),
        ("", "pp", (512, 1)),
    ],
)  # fmt: skip
def test_contexts(tmp_path: Path, context: str, kind: str, expected: tuple[int, int]):
    found = one(tmp_path, "llama.cpp", "-ncmoe 30", more=f'"{context}",30,{kind}').case.observation
    assert (found.context, 1 if found.kind == "prefill" else found.decode) == expected


def test_a_known_pair_has_its_profile_and_others_are_made_of_parts(tmp_path: Path):
    assert one(tmp_path, "llama.cpp", "-cmoe").hardware == "rtx3090-i9-11900kf"
    found, _, _ = rows(tmp_path, "Mixtral-8x7B,Q4_K_M,RTX 3090,Ryzen 9 7950X,not stated,llama.cpp (Windows),-cmoe,,9,tg,,")
    assert found[0].hardware == {"parts": {"gpu": "RTX 3090", "cpu": "Ryzen 9 7950X", "ram": "32GB", "os": "windows"}}


def test_plain_columns_replace_texts(tmp_path: Path):
    head = "model,bits,hardware,policy,slots,batch,context,hit,tok_s,colour\n"
    line = 'qwen3-30b-a3b,4.5/5,RTX 5070 + Ryzen 9 7950X,"{name: dfa-cache, kappa: 1.0}",32,4,100,61 %,50,red'
    found, skipped, ignored = rows(tmp_path, line, head=head)
    assert not skipped
    assert ignored == ["colour"]
    row = found[0]
    assert row.case.setting.policy == {"name": "dfa-cache", "kappa": 1.0}
    assert (row.case.setting.cache, row.case.observation.batch, row.hit) == ({"ratio": 0.25}, 4, 0.61)
    assert (row.case.model.expert_bits, row.case.model.other_bits) == (4.5, 5)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"gpt-oss-20b,MXFP4,{CARD},imp,24 slots,,9,tg,,", "no policy for the engine 'imp'"),
        (f"gpt-oss-20b,MXFP4,{CARD},llama.cpp,,,9,tg,,", "where experts were is not said"),
        (f"gpt-oss-20b,MXFP4,{CARD},llama.cpp PR 27861,cache 40 + MTP head,,9,tg,,", "with a draft model"),
        (f"gpt-oss-20b,MXFP4,{CARD},FreeToken,64 slots,,9,tg,,", "more slots of a layer than the 32 experts"),
        (f"gpt-oss-20b,MXFP4,{CARD},FreeToken,8 slots,,fast,tg,,", "speed: expected a number, got 'fast'"),
        ("gpt-oss-20b,MXFP4,2x RTX 5090,Ryzen 9 9950X,,llama.cpp,-cmoe,,9,tg,,", "2 GPUs"),
        (f"Nobody-30B,Q4_K_M,{CARD},llama.cpp,-cmoe,,9,tg,,", "no model that is known"),
        (f"Mixtral-8x7B,,{CARD},llama.cpp,-cmoe,,9,tg,,", "neither its name nor its size"),
    ],
)  # fmt: skip
def test_a_row_that_says_too_little_is_skipped_with_its_reason(tmp_path: Path, line: str, reason: str):
    found, skipped, _ = rows(tmp_path, line)
    assert not found
    assert skipped[0][0].endswith("rows.csv:2")
    assert skipped[0][2].startswith(reason)


def test_an_engine_without_a_policy_is_named():
    with pytest.raises(NotUsableError, match="no policy for the engine 'imp'"):
        policy_of("imp; auto")


def test_order_counts_pairs_that_differ_and_names_wrong_ones():
    common = {"machine": "m", "model": "x", "bits": "4/4", "kind": "decode", "batch": 1, "setting": ""}
    said = [("a", 100, 50), ("b", 90, 60), ("c", 50, 55), ("c", 30, 70)]  # a and b differ by too little, c is one setting
    frame = pd.DataFrame(
        [
            common | {"engine": name, "measured": speed, "predicted": ours, "place": f"f:{i}"}
            for i, (name, speed, ours) in enumerate(said, 2)
        ]
    )
    assert orders(frame) == [("m", "x", 4, 1, "2 over 4, 2 over 5, 3 over 5")]


def test_rows_are_predicted_and_the_others_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engines, "_DECODE", 4)
    path = tmp_path / "rows.csv"
    machine = "RTX 3060 + Ryzen 5 5600 + 32GB DDR4-3200"
    path.write_text(
        "model,bits,hardware,engine,setting,context,hit,tok_s\n"
        f"olmoe,Q4_K_M,{machine},FreeToken,16 slots,4 tokens,50%,100\n"
        f"olmoe,Q4_K_M,{machine},llama.cpp,-cmoe,4 tokens,,60\n"
        f"mixtral-8x22b,Q8_0,{machine},llama.cpp,-cmoe,4 tokens,,60\n"
    )
    result = run_engines(path, jobs=1)
    assert list(result.frame["engine"]) == ["FreeToken", "llama.cpp"]
    assert all(result.frame["low"] < result.frame["predicted"])
    assert all(result.frame["predicted"] < result.frame["high"])
    assert result.frame["hit"][0] > 0
    assert "needs" in result.skipped[0][2]
    assert result.orders[0][2] == 1
    lines = summary(result)
    assert lines[0].startswith("2 rows predicted")
    assert lines[-2] == "1 rows skipped"
    assert table(result, Format.JSON).count('"skipped"') == 3


def test_a_file_without_a_usable_row_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rows.csv"
    path.write_text("model,setting\na,b\n")
    assert main(["validate", "--engines", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(":1: expected a column engine or policy, got model,setting; add it")
    path.write_text(f"{HEAD}Nobody,Q4_K_M,{CARD},llama.cpp,-cmoe,,9,tg,,\n")
    with pytest.raises(ConfigError, match="expected a row that can be predicted, got 1 that cannot"):
        run_engines(path)
