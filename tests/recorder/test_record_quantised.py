"""A quantised checkpoint that is read layer by layer gives the routing of the weights that it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moesim.errors import InputError
from moesim.recorder import checkpoint
from moesim.recorder.checkpoint import WORKING_BYTES, Fp8, LayeredModel, Mxfp4
from moesim.recorder.loading import LoadOptions
from moesim.trace import Trace
from tests.recorder import record_kit
from tests.recorder.record_kit import make_home, run, save_tiny

FP4 = np.array([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
Stored = dict[str, torch.Tensor]


def fp8(codes: np.ndarray) -> np.ndarray:
    """Values of E4M3: a sign, four bits of exponent with a bias of 7, three of mantissa."""
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return np.where(codes & 128, -values, values)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Places in a table."""
    order = np.argsort(table, kind="stable")
    middles = (table[order][1:] + table[order][:-1]) / 2
    return order[np.searchsorted(middles, values)]


def to_mxfp4(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Quantise a stack (experts, inputs, outputs); give what is stored, and the weight that it stands for."""
    values = weight.double().numpy().swapaxes(1, 2)
    blocks = values.reshape(*values.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))) - 2
    codes = nearest(blocks / 2.0 ** exponents[..., None], FP4)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    meant = (FP4[codes] * 2.0 ** exponents[..., None]).reshape(values.shape).swapaxes(1, 2)
    stored = {f"{name}_blocks": packed, f"{name}_scales": (exponents + 127).astype(np.uint8)}
    return {key: torch.tensor(np.ascontiguousarray(value)) for key, value in stored.items()}, torch.tensor(
        meant, dtype=torch.float32
    )


def to_fp8(name: str, weight: torch.Tensor, block: tuple[int, int], suffix: str) -> tuple[Stored, torch.Tensor]:
    """Quantise a weight in blocks; those at the ends may be smaller."""
    values = weight.double().numpy()
    rows, columns = (np.arange(n) // size for n, size in zip(values.shape, block, strict=True))
    scales = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
    np.maximum.at(scales, (rows[:, None], columns), (np.abs(values) / 448).astype(np.float32))
    spread = scales[rows[:, None], columns]
    table = fp8(np.arange(256))
    table[[0x7F, 0xFF]] = np.inf, -np.inf  # no numbers
    codes = nearest(values / spread, table).astype(np.uint8)
    meant = fp8(codes).astype(np.float32) * spread  # in float32, as the format's own code does
    stored = {name: torch.tensor(codes).view(torch.float8_e4m3fn), name + suffix: torch.tensor(scales)}
    return stored, torch.tensor(meant)


def save_quantised(
    folder: Path, plain: Path, config: dict[str, Any], quantise: Callable[[str, torch.Tensor], tuple[Stored, torch.Tensor] | None]
) -> None:
    """Write a checkpoint again: quantised into `folder`, and what that stands for in place of the weights that were there."""
    weights = load_file(plain / "model.safetensors")
    stored: Stored = {}
    for name, weight in list(weights.items()):
        made = quantise(name, weight)
        if made is None:
            stored[name] = weight
        else:
            stored |= made[0]
            weights[name] = made[1].contiguous()
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    folder.mkdir(exist_ok=True)
    for path in plain.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    set_config(folder, config)


def set_config(folder: Path, quantised: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))


BLOCK = (16, 24)  # divides neither the rows nor the columns of every weight
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def compressed(**weights: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors."""
    weights = {"type": "float", "num_bits": 8, "symmetric": True, "block_structure": None} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups, "ignore": ["lm_head"]}


def experts(name: str, weight: torch.Tensor) -> Any:
    return to_mxfp4(name, weight) if weight.ndim == 3 else None


def linear(name: str, weight: torch.Tensor, *, suffix: str, rows: int | None = None, columns: int | None = None) -> Any:
    """Quantise all but embeddings, norms and routers."""
    if weight.ndim != 2 or not name.endswith("_proj.weight"):
        return None
    stored, meant = to_fp8(name, weight, (rows or weight.shape[0], columns or weight.shape[1]), suffix)
    if rows is columns is None:
        stored[name + suffix] = stored[name + suffix].reshape(1)
    return stored, meant


KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "mxfp4": ("gpt_oss", MXFP4, experts),
    "fp8 in blocks": ("deepseek_v3", FP8, partial(linear, suffix="_scale_inv", rows=BLOCK[0], columns=BLOCK[1])),
    "fp8 by weight": ("qwen3_moe", {"quant_method": "fp8", "activation_scheme": "static"}, partial(linear, suffix="_scale")),
    "fp8 by row": ("mixtral", compressed(strategy="channel"), partial(linear, suffix="_scale", rows=1)),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each kind a quantised checkpoint, and one with the weights that it stands for."""
    home = make_home(tmp_path_factory.mktemp("record"))
    with pytest.MonkeyPatch.context() as patch:
        usual = record_kit.CONFIGS["gpt_oss"]()
        usual.intermediate_size = 64  # blocks of 32 divide it
        patch.setitem(record_kit.CONFIGS, "gpt_oss 64", lambda: usual)
        for kind, (name, config, quantise) in KINDS.items():
            plain = save_tiny(home / f"{kind} plain", "gpt_oss 64" if name == "gpt_oss" else name)
            save_quantised(home / kind, plain, config, quantise)
    return home


def check_same(one: Trace, other: Trace) -> None:
    for name in ("experts", "weights", "scores"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for name, signal in one.signals.items():
        np.testing.assert_array_equal(signal.scores, other.signals[name].scores)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "bfloat16") for kind in KINDS), ("mxfp4", "float32"), ("fp8 in blocks", "float32")]
)
def test_routing_is_that_of_the_weights_that_are_stood_for(kind: str, dtype: str, home: Path, tmp_path: Path) -> None:
    how = ("--max-new-tokens", "0", "--dtype", dtype, "--scores")
    whole = run(home, tmp_path / "whole.safetensors", *how, model=f"{kind} plain")
    streamed = run(home, tmp_path / "streamed.safetensors", "--stream-layers", *how, model=kind)
    check_same(streamed, whole)
    assert streamed.header["routers_sha256"] == whole.header["routers_sha256"]
    assert streamed.header["quantisation"]["method"] == KINDS[kind][1]["quant_method"]
    assert whole.header["quantisation"] is None


def test_routing_is_that_of_the_same_checkpoint_in_memory(home: Path, tmp_path: Path) -> None:
    """There transformers dequantises it."""
    how = ("--max-new-tokens", "0", "--dtype", "bfloat16", "--scores")
    whole = run(home, tmp_path / "whole.safetensors", *how, model="mxfp4")
    streamed = run(home, tmp_path / "streamed.safetensors", "--stream-layers", *how, model="mxfp4")
    check_same(streamed, whole)
    assert streamed.header["quantisation"] == whole.header["quantisation"]


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_parameters_are_exact(kind: str, home: Path) -> None:
    """All of a layer, next to one of the checkpoint that was written with the reference's weights."""
    layered, plain = (LayeredModel.open(LoadOptions(str(home / name), device_map="cpu")) for name in (kind, f"{kind} plain"))
    for number in range(layered.n_layers):
        part = layered.layer_name(number)
        layered.load(part)
        plain.load(part)
        found, wanted = (one.model.get_submodule(part).state_dict() for one in (layered, plain))
        assert found.keys() == wanted.keys()
        for name in found:
            assert torch.equal(found[name], wanted[name]), name
        layered.free(part)
        plain.free(part)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_counts_the_dequantised_layer(kind: str, home: Path) -> None:
    layered, plain = (LayeredModel.open(LoadOptions(str(home / name), device_map="cpu")) for name in (kind, f"{kind} plain"))
    part = layered.layer_name(layered.n_layers - 1)
    parameters = layered.model.get_submodule(part).state_dict().values()
    assert layered.bytes_to_load(part) > sum(parameter.nbytes for parameter in parameters)
    assert 0 < layered.bytes_to_load(part) - plain.bytes_to_load(part) <= WORKING_BYTES


def dequantised(rule: Mxfp4 | Fp8, codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    filled = torch.full(shape, torch.nan)
    for place, values in rule.pieces(codes, scales):
        filled[place] = values
    return filled


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two and more of each weight here."""
    monkeypatch.setattr(checkpoint, "_PIECE", 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_as_transformers_has_it(dtype: torch.dtype) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, 5, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 252, (2, 5, 3), dtype=torch.uint8, generator=generator)
    found = torch.stack([dequantised(Mxfp4(), codes[n], scales[n], (96, 5)) for n in range(2)])
    assert Mxfp4().shape(tuple(codes.shape), tuple(scales.shape)) == tuple(found.shape) == (2, 96, 5)
    assert torch.equal(found.to(dtype), mxfp4.convert_moe_packed_tensors(codes, scales, dtype=dtype))


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_is_as_transformers_has_it(scale_type: torch.dtype) -> None:
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    stored, _ = to_fp8("weight", weight, (128, 128), "_scale_inv")
    scales = stored["weight_scale_inv"].to(scale_type)
    theirs = integration.Fp8Dequantize(None).convert({"weight": stored["weight"], "weight_scale_inv": scales})["weight"]
    ours = dequantised(Fp8((128, 128)), stored["weight"], scales, (256, 384))
    assert torch.equal(ours.to(theirs.dtype), theirs)


def test_fp8_in_blocks_that_do_not_divide_a_weight() -> None:
    """DeepSeek-V3 has weights of 576 rows."""
    stored, meant = to_fp8("w", torch.randn(576, 300, generator=torch.Generator().manual_seed(0)), (128, 128), "_scale_inv")
    assert stored["w_scale_inv"].shape == (5, 3)
    rule = Fp8((128, 128))
    assert rule.shape((576, 300), (5, 3)) == (576, 300)
    assert rule.shape((576, 300), (4, 3)) is None
    assert torch.equal(dequantised(rule, stored["w"], stored["w_scale_inv"], (576, 300)), meant)


def test_every_code_of_fp8_is_read_as_the_definition_has_it() -> None:
    codes = np.delete(np.arange(256), [0x7F, 0xFF]).astype(np.uint8)[None]
    read = dequantised(Fp8(), torch.tensor(codes).view(torch.float8_e4m3fn), torch.tensor(0.5), codes.shape)
    np.testing.assert_array_equal(read.numpy(), 0.5 * fp8(codes))


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq, bits 4"),
        ({"quant_method": "gptq", "bits": 8}, "gptq, bits 8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, load_in_4bit True"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        (FP8 | {"expert_dtype": "fp4"}, "fp8, expert_dtype fp4"),
        (compressed(strategy="tensor") | {"format": "pack-quantized"}, "compressed-tensors, format pack-quantized"),
        (compressed(strategy="tensor", num_bits=4), "compressed-tensors, format float-quantized"),
        (compressed(strategy="token"), "compressed-tensors, format float-quantized"),
        (compressed() | {"config_groups": {"group_0": {"weights": None}}}, "compressed-tensors, format float-quantized"),
    ],
)
def test_other_quantisations_are_refused(stated: dict[str, Any], told: str, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny(folder, "mixtral")
    set_config(folder, stated)
    with pytest.raises(InputError) as error:
        run(home, tmp_path / "x.safetensors", "--stream-layers", model=str(folder))
    text = str(error.value)
    assert "\n" not in text
    assert f"expected weights that are not quantised, or are in MXFP4 or FP8, got {told}; leave the option out" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_blocks_without_a_size_are_refused(home: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "mixtral")
    set_config(tmp_path / "model", FP8 | {"weight_block_size": [128, 0]})
    with pytest.raises(InputError, match=r"got: blocks of \[128, 0\] in its quantization_config instead of two positive numbers"):
        run(home, tmp_path / "x.safetensors", "--stream-layers", model=str(tmp_path / "model"))


def nothing(weights: dict[str, torch.Tensor], key: str) -> None:
    del weights[key]


def a_row_less(weights: dict[str, torch.Tensor], key: str) -> None:
    weights[key] = weights[key][:-1].contiguous()


def whole_numbers(weights: dict[str, torch.Tensor], key: str) -> None:
    weights[key] = weights[key].to(torch.int32)


def no_numbers(weights: dict[str, torch.Tensor], key: str) -> None:
    weights[key].view(torch.uint8).fill_(255)


_DOWN = "model.layers.1.mlp.experts."
_SCALES = {"mxfp4": f"{_DOWN}down_proj_scales", "fp8 in blocks": f"{_DOWN}3.down_proj.weight_scale_inv"}


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        (
            "mxfp4",
            nothing,
            "expected all weights of a GptOssForCausalLM, got none that fits for model.layers.1.mlp.experts.down_proj",
        ),
        ("mxfp4", a_row_less, "expected MXFP4 in blocks of 32, got U8 (8, 32, 2, 16) and U8 (7, 32, 2)"),
        ("mxfp4", whole_numbers, "expected MXFP4 in blocks of 32, got U8 (8, 32, 2, 16) and I32 (8, 32, 2)"),
        ("mxfp4", no_numbers, f"{_DOWN}down_proj: expected numbers once it is dequantised, got none"),
        ("fp8 in blocks", nothing, "expected one of F64, F32, F16, BF16, or a scale next to it, got F8_E4M3"),
        ("fp8 in blocks", a_row_less, "expected FP8 in blocks of 16 x 24, got F8_E4M3 (32, 16) and F32 (1, 1)"),
        ("fp8 in blocks", no_numbers, f"{_DOWN}3.down_proj.weight: expected numbers once it is dequantised"),
    ],
)
def test_a_damaged_checkpoint_is_refused(kind: str, change: Any, told: str, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (home / kind).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    change(weights, _SCALES[kind])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError) as error:
        run(home, tmp_path / "x.safetensors", "--stream-layers", model=str(folder))
    assert "\n" not in str(error.value)
    assert told in str(error.value)
    assert not (tmp_path / "x.safetensors").exists()
