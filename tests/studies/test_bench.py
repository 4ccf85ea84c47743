"""Speeds as people paste them: formats, models, placements by tensor names, groups, machines, and texts that are cut anywhere."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.errors import ConfigError, InputError
from moesim.hardware import load_hardware
from moesim.model import load_model
from moesim.model.load import model_names
from moesim.studies.identify.bench import overridden_layers, part_names, read_bench, read_speeds
from moesim.studies.identify.named import NotUsableError, find_bits, find_model

GPU = "ggml_cuda_init: found 1 CUDA devices:\n  Device 0: NVIDIA GeForce RTX 4080, compute capability 8.9, VMM: yes\n"
HEAD = "| model | size | params | backend | ngl | {} test | t/s |\n| --- | ---: | ---: | --- | --: |{} ---: | ---: |\n"
ROW = "| qwen3moe 30B.A3B Q4_K - Medium | 17.28 GiB | 30.53 B | CUDA | 99 | {} {} | {} |\n"
ONE = ROW.format("", "tg128", "50.10 ± 0.40")
TABLE = GPU + HEAD.format("", "") + ONE + "\nbuild: 6a8dd5ea6 (10097)\n"
RECORD = {
    "build_commit": "6a8dd5ea6", "cpu_info": "AMD Ryzen 9 7950X 16-Core Processor", "gpu_info": "NVIDIA GeForce RTX 4080",
    "backends": "CUDA", "model_filename": "/home/me/Qwen3-30B-A3B-Q4_K_M.gguf", "model_type": "qwen3moe 30B.A3B Q4_K - Medium",
    "model_size": 18556689568, "model_n_params": 30532122624, "n_batch": 2048, "n_ubatch": 512, "n_threads": 16,
    "type_k": "f16", "type_v": "f16", "n_gpu_layers": 99, "n_cpu_moe": 24, "no_kv_offload": False, "flash_attn": 1,
    "devices": "auto", "tensor_split": "0.00", "tensor_buft_overrides": "none", "use_mmap": True, "n_prompt": 0, "n_gen": 128,
    "n_depth": 0, "avg_ts": 50.1, "stddev_ts": 0.4,
}  # fmt: skip
SWEEP = "| PP | TG | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s |\n|----|----|------|--------|----------|--------|----------|\n"
BATCHED = "| PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |\n" + "|---" * 10 + "|\n"
SERVER = "$ ./llama-server -m models/Qwen3-30B-A3B-Q4_K_M.gguf -ngl 99 --n-cpu-moe 24 -fa on -c 16384\n"
TIMES = (
    "slot print_timing: id  0 | task 0 |\n"
    "prompt eval time =     512.00 ms /   256 tokens (    2.00 ms per token,   500.00 tokens per second)\n"
    "       eval time =    2000.00 ms /   100 tokens (   20.00 ms per token,    50.00 tokens per second)\n"
)
VERBOSE = (
    "prompt eval count:    26 token(s)\nprompt eval duration: 130ms\nprompt eval rate:     200.00 tokens/s\n"
    "eval count:           298 token(s)\neval duration:        5.9s\neval rate:            50.50 tokens/s\n"
)
PS = "NAME            ID     SIZE     PROCESSOR    CONTEXT    UNTIL\nqwen3:30b-a3b   0b2    19 GB    100% GPU     4096    now\n"
SERVING = (
    "============ Serving Benchmark Result ============\nSuccessful requests:                     10\n"
    "Maximum request concurrency:             1\nTotal input tokens:                      2560\n"
    "Total generated tokens:                  1280\nMean TPOT (ms):                          20.00\n"
)


def jsons(*changes: dict[str, Any]) -> str:
    return json.dumps([RECORD | change for change in changes])


# name -> text, rows as (kind, tokens before or of the prompt, setting, tokens/s), reasons of rows that are skipped
FORMS: dict[str, tuple[str, list[tuple[str, int, str, float]], list[str]]] = {
    "table": (TABLE, [("decode", 0, "ngl=99", 50.1)], []),
    "bars in a pattern": (
        GPU + HEAD.format(" ot |", " --- |") + ROW.format(r"\.ffn_(up|down|gate)_exps\.=CPU |", "tg128", "20.5 ± 0.1"),
        [("decode", 0, "ngl=99 n_cpu_moe=48", 20.5)],
        [],
    ),
    "table without its head's pipes": (TABLE.replace("\n| ", "\n").replace(" |\n", "\n"), [("decode", 0, "ngl=99", 50.1)], []),
    "table after a prompt": ("me@box:~$ ./llama-bench -m q.gguf | tee log\n" + TABLE, [("decode", 0, "ngl=99", 50.1)], []),
    "two tables": (
        TABLE + HEAD.format("n_cpu_moe |", " ---: |") + ROW.format("48 |", "tg128", "30.00") + "\nbuild: 6a8dd5ea6 (10097)\n",
        [("decode", 0, "ngl=99", 50.1), ("decode", 0, "ngl=99 n_cpu_moe=48", 30.0)], [],
    ),
    "depth, prompts and both": (
        GPU + HEAD.format("", "") + "".join(
            ROW.format("", test, "70.5 ± 1.5") for test in ("pp512", "tg128 @ d4096", "pp512 @ d4096", "pp512+tg128")
        ),
        [("prefill", 512, "ngl=99", 70.5), ("decode", 4096, "ngl=99", 70.5)],
        ["a prompt behind others (-d) is not simulated", "prompt and decoding in one number (-pg)"],
    ),
    "cells that are empty": (
        HEAD.format("fa | n_ubatch |", "---|---|") + ROW.format("- | |", "tg128", "50.1") + ROW.format("1 | 512 |", "tg64", "-"),
        [("decode", 0, "ngl=99", 50.1)], ["no test such as pp512 or tg128, or no speed"],
    ),
    "JSON": (jsons({}, {"n_cpu_moe": 48, "avg_ts": 35.2}), [
        ("decode", 0, "ngl=99 n_cpu_moe=24", 50.1), ("decode", 0, "ngl=99 n_cpu_moe=48", 35.2),
    ], []),
    "JSON behind other lines": (
        GPU + "main: warming up [1/2]\n" + jsons({}) + "\nbye\n", [("decode", 0, "ngl=99 n_cpu_moe=24", 50.1)], [],
    ),
    "JSON that is wrapped": (json.dumps({"host": {"results": [RECORD]}}), [("decode", 0, "ngl=99 n_cpu_moe=24", 50.1)], []),
    "JSON that is cut off": (jsons({}, {})[:-40], [("decode", 0, "ngl=99 n_cpu_moe=24", 50.1)], []),
    "an object a line": (json.dumps(RECORD) + "\n" + json.dumps(RECORD | {"n_gen": 64}) + "\n", [
        ("decode", 0, "ngl=99 n_cpu_moe=24", 50.1), ("decode", 0, "ngl=99 n_cpu_moe=24", 50.1),
    ], []),
    "CSV": (
        ",".join(RECORD) + "\n" + ",".join(f'"{value}"' for value in RECORD.values()) + "\n",
        [("decode", 0, "ngl=99 n_cpu_moe=24", 50.1)], [],
    ),
    "llama-sweep-bench": (
        "llama-sweep-bench -m Qwen3-30B-A3B-Q4_K_M.gguf \\\n  -ngl 99 -ot exps=CPU -ub 1024\n" + SWEEP
        + "| 1024 | 256 | 0 | 1 | 300.5 | 9 | 28.4 |\n| 1024 | 256 | 1024 | 1 | 280.5 | 9 | 27.9 |\n",
        [("prefill", 1024, "ngl=99 n_cpu_moe=48", 300.5), ("decode", 0, "ngl=99 n_cpu_moe=48", 28.4),
         ("decode", 1024, "ngl=99 n_cpu_moe=48", 27.9)],
        ["a prompt behind others (-d) is not simulated"],
    ),
    "llama-batched-bench": (
        "llama-batched-bench -m Qwen3-30B-A3B-Q4_K_M.gguf -ngl 99 -npp 128 -ntg 64 -npl 4\n" + BATCHED
        + "| 128 | 64 | 4 | 768 | 1 | 512.5 | 1 | 256.5 | 2 | 300 |\n| 128 | 64 | 4 | 384 | 1 | 128.5 | 1 | 250.5 | 2 | 300 |\n",
        [("prefill", 128, "ngl=99", 512.5), ("decode", 128, "ngl=99", 256.5), ("prefill", 128, "ngl=99", 128.5)],
        ["sequences that share a prompt are not simulated"],
    ),
    "llama-server": (SERVER + TIMES, [
        ("prefill", 256, "ngl=99 n_cpu_moe=24", 500), ("decode", 256, "ngl=99 n_cpu_moe=24", 50),
    ], []),
    "llama-server's JSON": (
        SERVER + json.dumps({"content": "x", "timings": {
            "cache_n": 100, "prompt_n": 28, "prompt_per_second": 300.5, "predicted_n": 64, "predicted_per_second": 51.5,
        }}),
        [("decode", 128, "ngl=99 n_cpu_moe=24", 51.5)], ["a prompt behind others (-d) is not simulated"],
    ),
    "Ollama": ("$ ollama run qwen3:30b-a3b --verbose\n" + PS + VERBOSE, [
        ("prefill", 26, "ngl=99", 200), ("decode", 26, "ngl=99", 50.5),
    ], []),
    "Ollama's API": (
        "load_tensors: offloaded 49/49 layers to GPU\n" + json.dumps({
            "model": "qwen3:30b-a3b", "prompt_eval_count": 20, "prompt_eval_duration": 100_000_000, "eval_count": 50,
            "eval_duration": 1_000_000_000,
        }),
        [("prefill", 20, "ngl=49", 200), ("decode", 20, "ngl=49", 50)], [],
    ),
    "KTransformers": (
        "python -m ktransformers.local_chat --model_path Qwen/Qwen3-30B-A3B --gguf_path Qwen3-30B-A3B-Q4_K_M.gguf\n" + VERBOSE,
        [("prefill", 26, "policy=kt-expert gpu_experts=0", 200), ("decode", 26, "policy=kt-expert gpu_experts=0", 50.5)], [],
    ),
    "KTransformers' log": (
        "python ktransformers/server/main.py --model_path Qwen/Qwen3-30B-A3B --gguf_path Qwen3-30B-A3B-Q4_K_M\n"
        "INFO base.py[64]: Performance(T/s): prefill 100.0, decode 12.5. Time(s): tokenize 0.1, prefill 1.0, decode 8.0\n",
        [("prefill", 100, "policy=kt-expert gpu_experts=0", 100), ("decode", 100, "policy=kt-expert gpu_experts=0", 12.5)], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "crlf"])
def test_forms(name: str, encoding: str, tmp_path: Path):
    text, rows, reasons = FORMS[name]
    file = tmp_path / "paste.txt"
    file.write_bytes(text.replace("\n", "\r\n").encode() if encoding == "crlf" else text.encode(encoding))
    bench = read_speeds(file)
    assert [(one.kind, one.context, one.setting, one.value) for one in bench.rows] == rows
    assert [reason for _, _, reason in bench.skipped] == reasons
    assert {one.model for one in bench.rows} == {"qwen3-30b-a3b"} and bench.n_read == len(rows) + len(reasons)


def test_what_a_row_keeps():
    (row,) = read_bench(TABLE, "x").rows
    assert (row.row, row.bits, row.decode, row.spread, row.place, row.source) == (
        "1:tg128", "Q4_K_M", 128, 0.4, "x:5", "llama-bench 6a8dd5ea6",
    )  # fmt: skip
    (row,) = read_bench(jsons({"n_prompt": 512, "n_gen": 0, "n_ubatch": 2048, "n_batch": 1024}), "x").rows
    assert (row.ubatch, row.kind, row.place) == (1024, "prefill", "x: row 1")
    decode = read_bench(FORMS["llama-batched-bench"][0], "x").rows[1]
    assert (decode.batch, decode.decode) == (4, 64)


@pytest.mark.parametrize(
    ("line", "gpu"),
    [
        ("ggml_cuda_init: found 1 ROCm devices (Total: 1 MiB):\n  Device 0: AMD Radeon RX 7900 XTX, gfx1100 (0x1100), VMM: no",
         "AMD Radeon RX 7900 XTX"),
        ("ggml_vulkan: Found 1 Vulkan devices:\nggml_vulkan: 0 = AMD Radeon RX 7900 XTX (RADV NAVI31) (radv) | uma: 0 | fp16: 1",
         "AMD Radeon RX 7900 XTX"),
        ("ggml_metal_device_init: GPU name:   Apple M4 Max", "Apple M4 Max"),
        ("llama_load: using device CUDA0 (NVIDIA GeForce RTX 3090) - 23306 MiB free", "NVIDIA GeForce RTX 3090"),
    ],
)  # fmt: skip
def test_the_machine_is_in_the_lines(line: str, gpu: str):
    bench = read_bench("Model name:   AMD Ryzen 5 5600 6-Core Processor\n" + line + "\n" + HEAD.format("", "") + ONE, "x")
    assert bench.machine == {"gpu": gpu, "cpu": "AMD Ryzen 5 5600 6-Core Processor"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"type_k": "q8_0", "n_depth": 8192}, "a KV cache of q8_0"),
        ({"no_kv_offload": True}, "-nkvo"),
        ({"tensor_buft_overrides": r"blk\.(1|2)\.attn.*=CPU"}, "-ot moves more than experts: blk.1.attn_norm.weight"),
        ({"tensor_buft_overrides": "ffn_(up|down)_exps=CPU"}, "only a part of the experts' matrices"),
        ({"tensor_buft_overrides": "exps=CUDA1"}, "a place that is not simulated"),
        ({"tensor_buft_overrides": "(a+)+b=CPU"}, "a pattern that could take too long"),
        ({"tensor_buft_overrides": "a*b*c*d*e=CPU"}, "a pattern that could take too long"),
        ({"tensor_buft_overrides": "ffn_(up=CPU"}, "no regular expression"),
        (
            {"tensor_buft_overrides": "blk.[5-9].ffn_.*_exps=CPU", "n_gpu_layers": 20, "n_cpu_moe": 0},
            "of layers that are not the first",
        ),
        ({"gpu_info": "NVIDIA GeForce RTX 4080, NVIDIA GeForce RTX 4080"}, "2 GPUs"),
        ({"backends": "CUDA,RPC", "rpc_servers": "10.0.0.2:50052"}, "RPC"),
        ({"backends": "CUDA,RPC", "devices": "CUDA0/RPC0"}, "RPC"),
        ({"fit_target": 1024}, "-fitt"),
        ({"avg_ts": -1}, "above 0"),
        ({"avg_ts": "fast"}, "value: expected a number"),
        ({"n_gen": "many"}, "n_gen: expected a whole number"),
        ({"n_gen": 0}, "neither a prompt nor decoded tokens"),
        ({"n_gen": None}, "the field n_gen of llama-bench is missing"),
        ({"model_type": "llama 70B Q4_K - Medium", "model_n_params": 70_600_000_000, "model_filename": "x"}, "a dense model"),
        ({"model_type": "mine ?B Q4_0", "model_n_params": 1, "model_filename": "x"}, "--model 'PART OF ITS NAME=MODEL'"),
    ],
)
def test_rows_that_cannot_be_used_are_listed(change: dict[str, Any], reason: str):
    bench = read_bench(jsons(change, {"n_cpu_moe": 48}), "x")
    assert len(bench.rows) == 1 and len(bench.skipped) == 1 and reason in bench.skipped[0][2]
    with pytest.raises(ConfigError, match="x: expected a row that can be used, got 1 of llama-bench that cannot: ") as error:
        read_bench(jsons(change), "x")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"n_gpu_layers": -1, "n_cpu_moe": 0}, "ngl=99"),
        ({"n_gpu_layers": 20, "n_cpu_moe": 0}, "ngl=20"),
        ({"n_gpu_layers": 0}, "ngl=0"),
        ({"n_cpu_moe": 999}, "ngl=99 n_cpu_moe=48"),
        ({"backends": "CPU", "n_gpu_layers": 99}, "ngl=0 op_offload=false"),
        ({"no_op_offload": 1}, "ngl=99 n_cpu_moe=24 op_offload=false"),
        ({"n_prompt": 512, "n_gen": 0, "use_mmap": False}, "ngl=99 n_cpu_moe=24 mmap=false"),
        ({"n_cpu_moe": 0, "tensor_buft_overrides": r"blk\.1[5-9]\.ffn_.*_exps\.=CPU"}, "ngl=99 n_cpu_moe=5"),
        ({"n_cpu_moe": 2, "tensor_buft_overrides": r"blk\.(2|3)\.ffn_.*_exps=CPU"}, "ngl=99 n_cpu_moe=4"),
        ({"split_mode": "none", "gpu_info": "NVIDIA A10, NVIDIA A10"}, "ngl=99 n_cpu_moe=24"),
        ({"devices": "CUDA0", "gpu_info": "NVIDIA A10, NVIDIA A10"}, "ngl=99 n_cpu_moe=24"),
        ({"type_k": "q8_0", "type_v": "q8_0"}, "ngl=99 n_cpu_moe=24"),
    ],
)
def test_placements(change: dict[str, Any], setting: str):
    assert [one.setting for one in read_bench(jsons(change), "x").rows] == [setting]


@pytest.mark.parametrize(
    ("model", "patterns", "layers"),
    [
        ("qwen3-30b-a3b", "exps=CPU", range(48)),
        ("qwen3-30b-a3b", r"\.ffn_(up|down|gate)_exps\.=CPU", range(48)),
        ("qwen3-30b-a3b", r"blk\.[0-9]\.ffn_.*_exps\.=CPU", range(10)),
        ("qwen3-30b-a3b", "blk.1[5-9].ffn_.*_exps.=CPU", range(15, 20)),
        ("qwen3-30b-a3b", "blk.1.=CUDA0;exps=CPU", [0, 2, *range(3, 10), *range(20, 48)]),
        ("qwen3-30b-a3b", r"blk\.(0|1)\.ffn_.*exps=CUDA0,ffn_.*_exps=CPU", range(2, 48)),
        ("qwen3-30b-a3b", "blk.4[0-9].*exps=CPU;blk.0.*exps=CPU", [0, *range(40, 48)]),
        ("nemotron-3-nano-30b-a3b", "_exps=CPU", load_model("nemotron-3-nano-30b-a3b").positions),
        ("deepseek-v2-lite", r"blk\.[0-4]\.ffn_.*_exps=CPU", range(1, 5)),
    ],
)
def test_patterns_by_the_names_of_tensors(model: str, patterns: str, layers: Any):
    assert list(overridden_layers(patterns, load_model(model))) == list(layers)


def test_a_log_of_moved_tensors_is_a_placement():
    moved = "".join(
        f"tensor blk.{i}.ffn_{part}_exps.weight (1 MiB q4_K) buffer type overridden to CPU\n"
        for i in range(30) for part in ("gate", "up", "down")
    )  # fmt: skip
    text = SERVER.replace("--n-cpu-moe 24 ", "") + moved
    assert {one.setting for one in read_bench(text + TIMES, "x").rows} == {"ngl=99 n_cpu_moe=30"}
    cut = text.replace("blk.3.ffn_up_exps", "blk.3.attn_q")
    with pytest.raises(ConfigError, match="moves more than experts"):
        read_bench(cut + TIMES, "x")


@pytest.mark.parametrize("text", [TIMES, VERBOSE, SWEEP + "| 1024 | 256 | 0 | 1 | 300.5 | 9 | 28.4 |\n"])
def test_speeds_without_a_placement_say_what_is_missing(text: str):
    with pytest.raises(ConfigError, match="add the line that started it, with -m, -ngl, -ncmoe or -ot"):
        read_bench(text, "x", ["qwen3-30b-a3b"])


@pytest.mark.parametrize(
    ("text", "looks"),
    [
        ("", "nothing"), ("hello\nworld\n", "2 lines without a speed"), ("<!DOCTYPE html><p>", "a web page"),
        ("INSERT INTO test (build) VALUES ('x');", "SQL"), ('{"a": 1}', "other JSON"), ("[[[[[", "other JSON"),
        ("Throughput: 3.5 requests/s, 900.0 total tokens/s, 400.0 output tokens/s\n", "prompts and decoding in one number"),
    ],
)  # fmt: skip
def test_a_text_without_rows_says_what_it_looked_like(text: str, looks: str):
    with pytest.raises(ConfigError, match="x: expected") as error:
        read_bench(text, "x")
    assert looks in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"flash_attn": 0}, "another -fa: off (used: on)"),
        ({"n_threads": 8}, "another -t: 8 (used: 16)"),
        ({"build_commit": "0253fb21f"}, "another build: 0253fb21f (used: 6a8dd5ea6)"),
        ({"backends": "Vulkan"}, "another backend: Vulkan (used: CUDA)"),
        ({"type_k": "q8_0"}, "another KV cache: f16/q8_0 (used: f16)"),
        ({"gpu_info": "NVIDIA GeForce RTX 3090"}, "another GPU: NVIDIA GeForce RTX 3090 (used: NVIDIA GeForce RTX 4080)"),
        ({"n_cpu_moe": 24, "avg_ts": 70.0}, "measured again, more than 2 % and three spreads from the first time"),
    ],
)
def test_one_group_of_comparable_rows(change: dict[str, Any], name: str):
    bench = read_bench(jsons({}, {"n_cpu_moe": 48, "avg_ts": 35.2}, {"n_cpu_moe": 36, "avg_ts": 42.0} | change), "x")
    assert [one.value for one in bench.rows] == [50.1, 35.2] and [reason for *_, reason in bench.skipped] == [name]
    assert bench.lines()[0].startswith("rows: 3 read, 2 used (model qwen3-30b-a3b, -fa on, GPU NVIDIA GeForce RTX 4080, ")
    assert bench.lines()[1:] == [f"skipped 3: {name}"]


def test_models_that_are_asked_for():
    other = {
        "model_type": "gpt-oss 20B MXFP4 MoE",
        "model_n_params": 20_914_757_184,
        "model_size": 12_100_000_000,
        "model_filename": "g",
    }
    text = jsons({}, {"n_cpu_moe": 48}, other)
    assert [one.model for one in read_bench(text, "x").rows] == ["qwen3-30b-a3b"] * 2
    assert [one.model for one in read_bench(text, "x", ["gpt-oss-20b"]).rows] == ["gpt-oss-20b"]
    both = read_bench(text, "x", ["gpt-oss-20b", "qwen3-30b-a3b"])
    assert len(both.rows) == 3 and not both.skipped
    assert "another model" in read_bench(text, "x", ["gpt-oss-20b"]).skipped[0][2]
    assert [one.model for one in read_bench(text, "x", ["gpt-oss=olmoe"]).rows] == ["olmoe"]


TYPES = {
    "llama 8x7B Q4_K - Medium": (46.70, "mixtral-8x7b"), "llama 8x22B Q4_K - Medium": (140.62, "mixtral-8x22b"),
    "qwen3moe 30B.A3B Q4_K - Medium": (30.53, "qwen3-30b-a3b"), "qwen3vlmoe 30B.A3B Q8_0": (30.53, "qwen3-vl-30b-a3b"),
    "qwen3moe 235B.A22B Q3_K - Medium": (235.09, "qwen3-235b-a22b"), "qwen3next 80B.A3B Q4_0": (79.67, "qwen3-next-80b-a3b"),
    "qwen35moe 122B.A10B IQ2_M - 2.7 bpw": (124.64, "qwen3.5-122b-a10b"), "qwen35moe 35B.A3B Q4_0": (34.66, "qwen3.5-35b-a3b"),
    "gpt-oss ?B F16": (20.91, "gpt-oss-20b"), "gpt-oss 120B MXFP4 MoE": (116.83, "gpt-oss-120b"),
    "deepseek2 16B Q4_K - Medium": (15.71, "deepseek-v2-lite"), "deepseek2 671B Q2_K - Medium": (671.03, "deepseek-v3"),
    "deepseek2 30B.A3B Q4_0": (29.94, "glm-4.7-flash"), "deepseek2 ?B Q2_K - Medium": (1026.41, "kimi-k2"),
    "deepseek2 671B Q4_K - Medium": (1026.41, "kimi-k2"), "qwen35moe 35B.A3B Q5_K - Medium": (35.51, "qwen3.5-35b-a3b"),
    "glm4moe 106B.A12B Q4_K - Small": (110.47, "glm-4.5-air"), "glm4moe 355B.A32B Q2_K - Medium": (356.79, "glm-4.5"),
    "bailingmoe2 100B.A6B Q4_K - Medium": (102.89, "ling-flash-2.0"), "bailingmoe2 16B.A1B Q8_0": (16.26, "ling-mini-2.0"),
    "hunyuan-moe A13B Q6_K": (80.39, "hunyuan-a13b"), "ernie4_5-moe 21B.A3B Q4_0": (21.83, "ernie-4.5-21b-a3b"),
    "minimax-m2 230B.A10B Q4_0": (228.69, "minimax-m2.5"), "llama4 17Bx16E (Scout) Q4_0": (107.77, "llama-4-scout"),
    "granitehybrid ?B Q4_0": (32.21, "granite-4.0-h-small"), "step35 196B.A11B Q4_0": (196.96, "step-3.5-flash"),
    "mimo2 310B.A15B Q4_0": (308.78, "mimo-v2-flash"), "nemotron_h_moe 31B.A3.5B Q4_0": (31.58, "nemotron-3-nano-30b-a3b"),
    "lfm2moe 8B.A1B Q4_0": (8.34, "lfm2-8b-a1b"), "dots1 142B Q4_0": (142.77, "dots.llm1"), "dbrx 16x12B Q4_0": (131.6, "dbrx"),
    "gemma4 26B.A4B Q4_0": (25.23, "gemma-4-26b-a4b"), "never-heard 102B.A12B Q4_0": (102.65, "solar-open-100b"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_llama_cpp(kind: str):
    billions, name = TYPES[kind]
    fields = {"model_type": kind, "model_n_params": 1e9 * billions, "model_filename": "x.gguf"}
    assert find_model(fields, []) == name and find_model(fields, [name]) == name
    others = [one for one in ("olmoe", "mixtral-8x7b", "qwen3-30b-a3b") if one != name]
    for other in others:
        with pytest.raises(NotUsableError, match=f"another model: '{kind.split()[0]}"):
            find_model(fields, [other])


@pytest.mark.parametrize("name", model_names())
def test_every_model_is_found_by_its_file(name: str):
    assert find_model({"model_filename": f"C:\\models\\{name}-Q4_K_M.gguf"}, []) == name


@pytest.mark.parametrize("model", ["{base: qwen3-30b-a3b, n_layers: 47}", "olmoe"])
def test_a_row_of_no_known_type_is_of_the_model_that_is_given(model: str):
    assert find_model({"model_type": "mine", "model_filename": "x.gguf"}, [model]) == model


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ({"model_type": "qwen3moe 30B.A3B Q4_K - Medium"}, (4.85, 5.35)),
        ({"model_type": "qwen3moe 30B.A3B Q4_K - Medium", "model_size": 17.0e9, "model_n_params": 30.53e9}, (4.43, 4.89)),
        ({"model_type": "qwen3moe 30B.A3B IQ2_XXS", "model_size": 9.0e9, "model_n_params": 30.53e9}, (2.34, 3.17)),
    ],
)
def test_bits_are_those_of_the_file(fields: dict[str, Any], bits: tuple[float, float]):
    written = find_bits(fields, "qwen3-30b-a3b")
    spec = load_model({"base": "qwen3-30b-a3b", "expert_bits": bits[0], "other_bits": bits[1]})
    if "model_size" in fields:
        experts, rest = map(float, written.split("/"))
        assert (experts, rest) == (pytest.approx(bits[0], rel=0.02), pytest.approx(bits[1], rel=0.02))
        assert spec.n_bytes == pytest.approx(fields["model_size"], rel=0.02)
    else:
        assert written == "Q4_K_M"


def test_experts_keep_the_bits_of_their_maker():
    size = {"model_type": "gpt-oss 20B F16", "model_size": 13_779_630_336, "model_n_params": 20_914_757_184}
    experts, rest = map(float, find_bits(size, "gpt-oss-20b").split("/"))
    assert experts == 4.25 and rest == pytest.approx(16, rel=0.03)


@pytest.mark.parametrize(
    ("hardware", "change", "usable"),
    [
        ("ryzen7950x-rtx4080", {}, True),
        ("ryzen7950x-rtx4080", {"gpu_info": "NVIDIA GeForce RTX 4080 SUPER"}, False),
        ("ryzen7950x-rtx4080", {"cpu_info": "AMD Ryzen 9 5950X 16-Core Processor"}, False),
        ("ryzen7950x-rtx4080", {"cpu_info": "AMD Eng Sample: 100-000001243-50_Y", "gpu_info": ""}, True),
        ("rtx4070-i5-12600k", {"gpu_info": "NVIDIA GeForce RTX 4070", "cpu_info": "12th Gen Intel(R) Core(TM) i5-12600K"}, True),
        ("rtx4070-i5-12600k", {"gpu_info": "NVIDIA GeForce RTX 4070 Ti", "cpu_info": ""}, False),
        ("rtx4070-i5-12600k", {}, False),
        ("ryzen-ai-max-395", {"gpu_info": "Radeon 8060S Graphics", "cpu_info": "AMD RYZEN AI MAX+ 395 w/ Radeon 8060S"}, True),
        ("h100-llama-cpp", {"gpu_info": "NVIDIA H100 80GB HBM3"}, True),
        ("m4-max", {"gpu_info": "Apple M4 Max", "cpu_info": "Apple M4 Max"}, True),
        ("m4-max", {"gpu_info": "Apple M4 Pro", "cpu_info": "Apple M4 Pro"}, False),
        ("epyc9355-rtx3090", {"gpu_info": "NVIDIA GeForce RTX 3090", "cpu_info": "AMD EPYC 9355 32-Core Processor"}, True),
        ("xeon-e5-2683v4", {"gpu_info": "", "cpu_info": "Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz", "n_gpu_layers": 0}, False),
        ("xeon-e5-2683v4", {"gpu_info": "", "cpu_info": "Intel(R) Xeon(R) CPU E5-2683 v4 @ 2.10GHz", "n_gpu_layers": 0}, True),
    ],
)
def test_names_of_parts_are_compared(hardware: str, change: dict[str, Any], usable: bool):
    profile = load_hardware(hardware)
    if usable:
        assert len(read_bench(jsons(change), "x", [], profile).rows) == 1
    else:
        with pytest.raises(ConfigError, match=r"another machine: .*--any-machine takes it"):
            read_bench(jsons(change), "x", [], profile)
        assert len(read_bench(jsons(change), "x", [], profile, any_machine=True).rows) == 1


def test_names_of_parts():
    assert part_names("13th Gen Intel(R) Core(TM) i7-13700K @ 3.40GHz, 64GB DDR5") == {("13700k", frozenset())}
    assert part_names("RTX 4070Ti SUPER") == {("4070", frozenset({"ti", "super"}))}


def test_a_machine_without_a_gpu_takes_rows_of_the_cpu_alone():
    bench = read_bench(jsons({"n_gpu_layers": 0}, {"n_gpu_layers": 99}), "x", [], load_hardware("ryzen5900x"), any_machine=True)
    assert [one.setting for one in bench.rows] == ["all_cpu"] and "which the profile does not have" in bench.skipped[0][2]


def test_vllm_at_one_request_on_its_own_costs():
    text = "vllm bench serve --model Qwen/Qwen3-30B-A3B --max-concurrency 1\n" + SERVING
    profile = load_hardware({"base": "h100-llama-cpp", "engine": "vllm"})
    (row,) = read_bench(text.replace("-A3B", "-A3B-FP8"), "x", ["qwen3-30b-a3b"], profile).rows
    assert (row.setting, row.value, row.context, row.decode, row.bits) == ("all_gpu", 50, 256, 128, "FP8")
    for change, words in (
        (("", ""), "--engine vllm"),
        (("concurrency:             1", "concurrency:             8"), "--max-concurrency 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_bench(
                text.replace("concurrency 1", "concurrency 8").replace(*change) if change[0] else text, "x", ["qwen3-30b-a3b"]
            )


@pytest.mark.parametrize("name", FORMS)
def test_a_text_that_is_cut_anywhere_is_read_or_refused(name: str):
    text = FORMS[name][0]
    n = 0
    for end in {len(text), *range(0, len(text), 37), *(i for i, sign in enumerate(text) if sign == "\n")}:
        with suppress(InputError):
            n = max(n, len(read_bench(text[:end], "x").rows))
    assert n >= len(FORMS[name][1]) - 1


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\x00" * 100, b"GGUF\x03\x00\x00\x00" * 9, bytes(range(256)), b"\xfe\xff\x00|"])
def test_bytes_that_are_no_text_are_one_line(data: bytes, tmp_path: Path):
    (tmp_path / "x.log").write_bytes(data)
    with pytest.raises(ConfigError, match=r"x\.log: expected") as error:
        read_speeds(tmp_path / "x.log")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 50_000, "|" * 100_000, "eval time = " * 20_000, "Device 1: " * 20_000])
def test_large_nonsense_is_refused_in_time(text: str):
    with pytest.raises(ConfigError, match="expected what llama-bench"):
        read_bench(text, "x")


def test_identified_lists_what_was_skipped_and_gives_rows_back(tmp_path: Path):
    (tmp_path / "paste.json").write_text(jsons({}, {"n_cpu_moe": 48, "avg_ts": 35.2}, {"flash_attn": 0}))
    options: dict[str, Any] = {"free": ["cpu_read_rate"], "progress": False, "contribute": tmp_path / "mine.json"}
    found = moesim.calibrate(tmp_path / "paste.json", "ryzen7950x-rtx4080", **options)
    assert found.bench is not None and [reason for *_, reason in found.bench.skipped] == ["another -fa: off (used: on)"]
    assert "rows: 3 read, 2 used" in found.text() and "skipped 3: another -fa: off (used: on)" in found.text()
    values = json.loads(found.text("json"))
    assert (values["read"], values["used"], values["skipped"][0]["reason"]) == (3, 2, "another -fa: off (used: on)")
    text = (tmp_path / "mine.json").read_text()
    given = json.loads(text)
    assert [one["measured"] for one in given["rows"]] == [50.1, 35.2] and given["rows"][0]["setting"] == "ngl=99 n_cpu_moe=24"
    assert given["machine"]["parts"] == {"gpu": "NVIDIA GeForce RTX 4080", "cpu": "AMD Ryzen 9 7950X 16-Core Processor"}
    assert given["moesim"] == moesim.__version__ and str(tmp_path) not in text and "/home/me" not in text


def test_without_a_profile_and_without_names_of_parts(tmp_path: Path):
    (tmp_path / "t.md").write_text(HEAD.format("", "") + ONE)
    with pytest.raises(
        ConfigError, match=r"t\.md: expected lines that name GPU or CPU, got none; name the machine with hardware"
    ):
        moesim.calibrate(tmp_path / "t.md", progress=False)


def test_one_paste_is_a_machine(tmp_path: Path):
    one = ONE.replace("qwen3moe 30B.A3B Q4_K - Medium | 17.28 GiB | 30.53 B", "olmoe A1.7B Q4_K - Medium | 3.92 GiB | 6.92 B")
    text = "CPU: AMD Eng Sample: 100-000001243-50_Y\n" + GPU.replace(" 4080", " 3060") + HEAD.format("", "") + one
    (tmp_path / "t.md").write_text(text)
    found = moesim.calibrate(tmp_path / "t.md", free=["gpu_read_rate"], name="mybox", progress=False)
    assert found.profile.name == "mybox" and "3060" in found.profile.machine["gpu"]
    first = found.text().splitlines()[0]
    assert first.startswith("machine: GeForce RTX 3060") and "cpu: cores as of" in first and "--hardware" in first
    assert found.bench is not None and found.bench.machine["cpu"] == "AMD Eng Sample: 100-000001243-50_Y"


def test_a_build_that_could_use_other_hosts_is_taken_and_said():
    table = TABLE.replace("| CUDA |", "| CUDA,RPC |")
    bench = read_bench(table, "x")
    assert len(bench.rows) == 1 and any("CUDA,RPC" in line for line in bench.lines())
    with pytest.raises(ConfigError, match="RPC"):
        read_bench("$ llama-bench -m x.gguf --rpc 10.0.0.2:50052\n" + table, "x")
