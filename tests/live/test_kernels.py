"""Experts, dense parts, buffers, copies and files that are computed and moved for real."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from moesim.errors import CapacityError, InputError  # noqa: E402
from moesim.live.kernels import host, memory, require_torch  # noqa: E402
from moesim.live.kernels.dense import DenseKernel  # noqa: E402
from moesim.live.kernels.experts import ExpertKernel  # noqa: E402
from moesim.live.kernels.memory import Buffers, FileExperts, copy, copy_in_chunks  # noqa: E402
from moesim.live.kernels.plans import PAGE, ExpertShape, KernelError, buffer_bytes, dense_bytes  # noqa: E402
from moesim.model import ModelSpec  # noqa: E402
from moesim.model.keys import read_model  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")

SMALL = ModelSpec(
    name="small", n_layers=5, n_experts=8, top_k=2, hidden=64, expert_intermediate=96,
    n_heads=4, n_kv_heads=2, head_dim=16, vocab=101, other_bits=32, kv_bits=32,
)  # fmt: skip
LATENT = replace(
    SMALL, name="latent", n_kv_heads=4, head_dim=24, kv_lora_rank=32, rope_head_dim=8, nope_head_dim=16, v_head_dim=12
)
SEQUENCES = [(3, 0), (1, 5), (2, 4), (1, 0)]


def quantise(kernel: ExpertKernel) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A flat buffer with random weights, and the same as float32 matrices."""
    shape, source = kernel.shape, torch.Generator().manual_seed(1)
    up, down = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    parts, plain = [], []
    for i, (out, inner) in enumerate([up] * (shape.n_mats - 1) + [down]):
        scales = kernel._scales[i].float()
        if shape.bits >= 16:
            weight = (torch.randn(out, inner, generator=source) / math.sqrt(inner)).to(kernel.act_dtype)
            parts.append(weight)
            plain.append(weight.float())
        elif shape.bits == 8:
            weight = torch.randint(-128, 128, (out, inner), generator=source, dtype=torch.int8)
            parts.append(weight)
            plain.append(weight * scales[:, None])
        else:
            weight = torch.randint(0, 16, (out, inner), generator=source, dtype=torch.int32)
            parts.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight, 2))
            group = inner // scales.shape[0]
            scale, zero = (scales[..., j].T.repeat_interleave(group, dim=1) for j in (0, 1))
            plain.append((weight - 8) * scale + zero)
    flat = torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])
    return flat, plain


def reference(plain: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    if len(plain) == 2:
        inner = x @ plain[0].T
        return (0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))) @ plain[1].T
    gate = x @ plain[0].T
    return (gate / (1 + torch.exp(-gate)) * (x @ plain[1].T)) @ plain[2].T


@pytest.mark.parametrize("n_mats", [3, 2])
@pytest.mark.parametrize(("bits", "tolerance"), [(32, 1e-5), (16, 0.02), (8, 0.02), (4, 0.02)])
def test_an_expert_computes_its_matrices(bits: int, tolerance: float, n_mats: int):
    model = replace(SMALL, expert_bits=bits, n_mats=n_mats)
    kernel = ExpertKernel(ExpertShape.of(model))
    flat, plain = quantise(kernel)
    assert flat.numel() == model.expert_bytes()
    weights = kernel.bind(flat)
    assert len(weights) == n_mats
    assert {weight.untyped_storage().data_ptr() for weight in weights} == {flat.untyped_storage().data_ptr()}  # no copy
    for rows in (1, 7):
        x = torch.randn(rows, model.hidden, generator=torch.Generator().manual_seed(2)).to(kernel.act_dtype)
        result, wanted = kernel.run(weights, x), reference(plain, x)
        assert result.dtype == kernel.act_dtype == (torch.float32 if bits == 32 else torch.bfloat16)
        assert result.shape == (rows, model.hidden)
        assert (result.float() - wanted).abs().max() < tolerance * wanted.abs().max()


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_filled_experts_are_finite_of_unit_gain_and_reproducible(bits: int):
    model = replace(SMALL, hidden=512, expert_intermediate=384, expert_bits=bits, expert_bias=True)
    kernel = ExpertKernel(ExpertShape.of(model))
    buffers = Buffers(3, model.expert_bytes())
    for i, seed in enumerate((7, 7, 8)):
        buffers[i].fill_(255)  # NaN in every float
        kernel.fill(buffers[i], seed)
    assert torch.equal(buffers[0], buffers[1])
    assert not torch.equal(buffers[0], buffers[2])
    weights = kernel.bind(buffers[0])
    if bits >= 16:
        for weight in weights:
            assert weight.float().std().item() == pytest.approx(1 / math.sqrt(weight.shape[1]), rel=0.02)
            assert ((weight == 0) | (weight.abs() > torch.finfo(weight.dtype).tiny)).all()  # no denormals
    x = torch.randn(16, model.hidden).to(kernel.act_dtype)
    out = kernel.run(weights, x).float()
    assert 0.1 < out.std() < 1  # silu and product of two unit normals: 0.6
    assert abs(out.mean()) < 0.1
    biases = model.expert_bytes() - sum(weight.nbytes for weight in weights)
    assert biases == (2 * 384 + 512) * 4
    assert not buffers[0][-biases:].any()


def test_an_expert_of_another_length_is_not_bound():
    kernel = ExpertKernel(ExpertShape.of(SMALL))
    with pytest.raises(ValueError, match="the buffer has 5"):
        kernel.bind(torch.empty(5, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"expert_bits": 4.25}, "expected expert_bits of 4, 8, 16 or 32 to measure or replay, got 4.25"),
        ({"expert_bytes_by_layer": (10, 10, 10, 10, 20)}, "one precision for the experts of all layers"),
        ({"expert_bits": 4, "expert_intermediate": 40}, r"divisible by 32, got hidden and intermediate \(64, 40\)"),
    ],
)
def test_experts_without_a_kernel_are_refused_in_one_line(changes: dict, expected: str):
    with pytest.raises(KernelError, match=expected) as error:
        ExpertKernel(ExpertShape.of(replace(SMALL, **changes)))
    assert isinstance(error.value, InputError)
    assert "\n" not in str(error.value)


def test_a_device_without_the_operator_is_refused(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def no_kernel(operator: str, key: str) -> bool:
        asked.append((operator, key))
        return False

    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", no_kernel)
    monkeypatch.setattr(ExpertKernel, "_constant", lambda self, shape, value: torch.full(shape, value))
    for bits, device in ((8, "cpu"), (4, "cpu"), (8, "cuda"), (4, "cuda")):
        with pytest.raises(KernelError, match=f"experts of {bits} bits on {device}: expected the operator _weight_int"):
            ExpertKernel(ExpertShape.of(replace(SMALL, expert_bits=bits)), device)
    assert asked == [
        ("aten::_weight_int8pack_mm", "CPU"),
        ("aten::_weight_int4pack_mm_for_cpu", "CPU"),
        ("aten::_weight_int8pack_mm", "CUDA"),
        ("aten::_weight_int4pack_mm", "CUDA"),
    ]


@pytest.mark.parametrize(("hidden", "tiles"), [(32, 2), (64, 4), (4096, 8)])
def test_the_cuda_layout_of_4_bits_has_the_bytes_of_the_expert(monkeypatch: pytest.MonkeyPatch, hidden: int, tiles: int):
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(ExpertKernel, "_constant", lambda self, shape, value: torch.full(shape, value))
    model = replace(SMALL, hidden=hidden, expert_bits=4)
    kernel = ExpertKernel(ExpertShape.of(model), "cuda")
    gate, up, down = kernel.bind(torch.zeros(model.expert_bytes(), dtype=torch.uint8))
    assert gate.shape == up.shape == (96 // 8, hidden // (16 * tiles), 32, tiles // 2)
    assert down.shape == (hidden // 8, 96 // 32, 32, 1)
    assert sum(weight.nbytes for weight in (gate, up, down)) == model.expert_bytes()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(KernelError, match=r"expected compute capability 8.0 or more \(Ampere\), got 7.5"):
        ExpertKernel(ExpertShape.of(model), "cuda")


def dense(model: ModelSpec = SMALL, **changes) -> DenseKernel:
    options = {"distinct_layers": 2, "max_rows": 16, "max_kv_tokens": 32, "with_head": True} | changes
    return DenseKernel(model, **options)


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def turn(x: torch.Tensor, position: int) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = position * 10_000.0 ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(half), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ keys.T / math.sqrt(q.shape[-1]), -1) @ values


def grouped_reference(
    model: ModelSpec, w: dict, x: torch.Tensor, sequences: list[tuple[int, int]], window: int = 10**6
) -> torch.Tensor:  # fmt: skip
    heads, kv_heads, width = model.n_heads, model.n_kv_heads, model.head_dim
    outputs, row, slot = [], 0, 0
    for new, before in sequences:
        keys = w["kv"][0][:, slot : slot + before].clone()
        values = w["kv"][1][:, slot : slot + before].clone()
        for i in range(new):
            q, k, v = (w["qkv"] @ rms(x[row])).split([heads * width, kv_heads * width, kv_heads * width])
            if model.qk_norm == "full":
                q, k = rms(q), rms(k)
            q, k = q.view(heads, width), k.view(kv_heads, width)
            if model.qk_norm == "head":
                q, k = rms(q), rms(k)
            keys = torch.cat([keys, turn(k, before + i)[:, None]], dim=1)
            values = torch.cat([values, v.view(kv_heads, 1, width)], dim=1)
            q, group = turn(q, before + i), heads // kv_heads
            seen = [(keys[h // group][-window:], values[h // group][-window:]) for h in range(heads)]
            mixed = torch.cat([attended(q[h], *seen[h]) for h in range(heads)])
            outputs.append(x[row] + w["out"] @ mixed)
            row += 1
        slot += before + new
    return torch.stack(outputs)


def latent_reference(model: ModelSpec, w: dict, x: torch.Tensor, sequences: list[tuple[int, int]]) -> torch.Tensor:
    """Not absorbed: keys and values of every head are made from the latents."""
    nope, rank = model.nope_head_dim, model.kv_lora_rank
    outputs, row, slot = [], 0, 0
    for new, before in sequences:
        cache = w["kv"][0, 0, slot : slot + before].clone()
        for i in range(new):
            normed = rms(x[row])
            q = w["q_up"] @ (rms(w["q_down"] @ normed) if model.q_lora_rank else normed)
            q = q.view(model.n_heads, -1)
            down = w["kv_down"] @ normed
            cache = torch.cat([cache, torch.cat([rms(down[:rank]), turn(down[rank:], before + i)])[None]])
            mixed = []
            for h in range(model.n_heads):
                keys = torch.cat([cache[:, :rank] @ w["k_up"][h].T, cache[:, rank:]], dim=1)
                query = torch.cat([q[h, :nope], turn(q[h, nope:], before + i)])
                mixed.append(attended(query, keys, cache[:, :rank] @ w["v_up"][h]))
            outputs.append(x[row] + w["out"] @ torch.cat(mixed))
            row += 1
        slot += before + new
    return torch.stack(outputs)


@pytest.mark.parametrize(
    ("model", "by_hand"),
    [
        (SMALL, grouped_reference),
        (replace(SMALL, qk_norm="head"), grouped_reference),
        (replace(SMALL, qk_norm="full", n_kv_heads=4), grouped_reference),
        (LATENT, latent_reference),
        (replace(LATENT, q_lora_rank=20), latent_reference),
    ],
    ids=["grouped", "head-norm", "full-norm", "latent", "latent-query"],
)
def test_attention_is_that_of_a_naive_reference(model: ModelSpec, by_hand):
    kernel = dense(model)
    for sequences in (SEQUENCES, [(1, 31)], [(16, 0)], SEQUENCES):
        x = torch.randn(sum(new for new, _ in sequences), model.hidden)
        wanted = by_hand(model, kernel._layers[1], x, sequences)
        assert torch.allclose(kernel.attention(3, x, sequences), wanted, atol=1e-4)


WINDOWED = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "dtype": "float32", "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def test_a_layer_sees_its_own_window():
    model = read_model(WINDOWED, None, "windowed", "config.json")
    kernel = dense(model)
    for sequences in (SEQUENCES, [(1, 31)], [(16, 0)], [(3, 1), (5, 9)], [(4, 0), (1, 4), (1, 5), (2, 4)]):
        for layer, window in ((0, 5), (1, 10**6)):
            x = torch.randn(sum(new for new, _ in sequences), model.hidden)
            wanted = grouped_reference(model, kernel._layers[layer], x, sequences, window)
            assert torch.allclose(kernel.attention(layer, x, sequences), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"layer_types": None, "model_type": "qwen3_next", "full_attention_interval": 2, "linear_num_value_heads": 2,
          "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
         "linear, gated delta net"),
        ({"interleave_moe_layer_step": 2, "num_hidden_layers": 4, "layer_types": None, "intermediate_size": 8},
         "dense parts between them or next to experts"),
        ({"moe_latent_size": 16}, "experts of another input width"),
    ],
)  # fmt: skip
def test_layers_that_no_kernel_computes_are_refused(changes: dict, got: str):
    model = read_model(WINDOWED | changes, None, "odd", "config.json")
    with pytest.raises(KernelError, match=f"expected layers of plain attention and experts to measure or replay, got {got}"):
        ExpertShape.of(replace(model, expert_bytes_by_layer=None))


def test_new_rows_are_context_of_the_next_step():
    kernel = dense()
    x = torch.randn(6, SMALL.hidden)
    whole = kernel.attention(0, x, [(6, 0)])
    first = kernel.attention(0, x[:4], [(4, 0)])
    chunk, last = kernel.attention(0, x[4:5], [(1, 4)]), kernel.attention(0, x[5:], [(1, 5)])
    assert torch.allclose(torch.cat([first, chunk, last]), whole, atol=1e-5)


FULL = replace(
    SMALL, name="full", n_dense_layers=3, dense_intermediate=160, n_shared=2, shared_intermediate=192,
    shared_gate=True, norm_bias=True,
)  # fmt: skip


@pytest.mark.parametrize("model", [SMALL, LATENT, FULL, replace(FULL, n_mats=2, tie_embeddings=True, other_bits=16, kv_bits=16)])
@pytest.mark.parametrize("with_head", [True, False])
def test_required_bytes_are_what_is_allocated(model: ModelSpec, with_head: bool):
    kernel = dense(model, with_head=with_head)
    tensors = [t for group in (kernel._layers, kernel._leading, kernel._ends) for part in group for t in part.values()]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in [*tensors, *(getattr(kernel._step, name) for name in ("_slots", "_table", "_turns"))]
    }
    assert kernel.n_bytes == sum(storages.values())
    assert kernel._layers[0]["kv"].nbytes == 32 * model.kv_bytes(0, 1)
    assert kernel.n_bytes == dense_bytes(model, distinct_layers=2, max_rows=16, max_kv_tokens=32, with_head=with_head)


@pytest.mark.parametrize("model", [SMALL, LATENT, FULL, replace(LATENT, q_lora_rank=20), replace(SMALL, qk_norm="full")])
def test_weights_are_those_of_the_model(model: ModelSpec):
    kernel = dense(model, distinct_layers=99)
    assert len(kernel._layers) == model.n_layers
    for layer in kernel._layers:
        total = sum(tensor.nbytes for name, tensor in layer.items() if name != "kv")
        assert total == model.attention_bytes + model.dense_bytes() + model.shared_bytes
    leading = sum(t.nbytes for layer in kernel._leading for name, t in layer.items() if name != "kv")
    assert leading == model.leading_bytes
    assert sum(tensor.nbytes for tensor in kernel._ends[0].values()) == model.embedding_bytes + model.head_bytes


def test_the_other_parts_compute_what_they_say():
    kernel = dense(FULL)
    x = kernel.embed(torch.tensor([5, 0, 100]))
    assert torch.equal(x, kernel._ends[0]["embedding"][[5, 0, 100]])
    w = kernel._layers[0]
    normed, ids = kernel.router(2, x)
    deviation = torch.sqrt(x.var(-1, correction=0, keepdim=True) + 1e-6)
    assert torch.allclose(normed, (x - x.mean(-1, keepdim=True)) / deviation, atol=1e-5)
    assert torch.equal(ids, torch.topk(normed @ w["router"].T, 2).indices)
    assert torch.equal(kernel.predict(4, normed), ids)  # layers 2 and 4 share weights
    assert not torch.equal(kernel.predict(3, normed), ids)
    plain = reference([w["shared_gate"], w["shared_up"], w["shared_down"]], normed)
    assert torch.allclose(kernel.shared(2, normed), plain * torch.sigmoid(normed @ w["shared_scale"].T), atol=1e-5)
    assert torch.equal(kernel.head(x), (normed @ kernel._ends[0]["head"].T).argmax(-1))


def test_a_leading_layer_is_attention_and_a_feed_forward_part():
    model = replace(FULL, norm_bias=False)
    kernel = dense(model)
    x, w = torch.randn(3, model.hidden), kernel._leading[0]
    middle = grouped_reference(model, w, x, [(3, 0)])
    wanted = middle + reference([w["dense_gate"], w["dense_up"], w["dense_down"]], rms(middle))
    assert torch.allclose(kernel.leading(2, x, [(3, 0)]), wanted, atol=1e-4)


def test_the_dense_part_runs_in_bfloat16_and_stays_finite():
    model = replace(LATENT, other_bits=16, kv_bits=16, n_shared=1, shared_intermediate=96)
    kernel = dense(model)
    x = kernel.embed(torch.arange(7))
    for layer in range(model.n_layers):
        x = kernel.attention(layer, x, SEQUENCES)
        normed, _ = kernel.router(layer, x)
        x = x + kernel.shared(layer, normed)
    assert x.dtype == torch.bfloat16
    assert torch.isfinite(x).all()
    assert kernel.head(x).shape == (7,)


def test_wrong_calls_are_refused():
    kernel, x = dense(with_head=False), torch.randn(2, SMALL.hidden)
    for error, expected, call in (
        (ValueError, "expected sequences of 2 new rows together", lambda: kernel.attention(0, x, [(1, 0)])),
        (ValueError, "at most 16 rows and 32 tokens of KV, got 2 and 33", lambda: kernel.attention(0, x, [(2, 31)])),
        (ValueError, "each at least 1", lambda: kernel.attention(0, x, [(3, 0), (-1, 0)])),
        (IndexError, "layer 5 of model 'small'", lambda: kernel.router(5, x)),
        (IndexError, "leading layer 0", lambda: kernel.leading(0, x, [(2, 0)])),
        (ValueError, "has no shared experts", lambda: kernel.shared(0, x)),
        (ValueError, "without embedding and head", lambda: kernel.head(x)),
        (ValueError, "at least one distinct layer", lambda: dense(distinct_layers=0)),
        (KernelError, "expected other_bits of 16 or 32, got 8", lambda: dense(replace(SMALL, other_bits=8))),
        (
            KernelError,
            r"kv_bits equal to other_bits \(32\) to measure or replay, got 8",
            lambda: dense(replace(SMALL, kv_bits=8)),
        ),
        (KernelError, "expected an even width to rotate, got 15", lambda: dense(replace(SMALL, head_dim=15))),
        (CapacityError, "the dense part of model 'small' on cpu: expected", lambda: dense(max_kv_tokens=10**13)),
        (CapacityError, "buffers of 4096 bytes on cpu: expected", lambda: Buffers(10**10, 4096)),
    ):
        with pytest.raises(error, match=expected):
            call()


def test_buffers_are_page_aligned_in_one_allocation():
    buffers = Buffers(3, PAGE + 5)
    assert (len(buffers), buffers.n, buffers.n_bytes, buffers.total_bytes) == (3, 3, PAGE + 5, 7 * PAGE)
    assert buffers[0].untyped_storage().nbytes() == buffers.total_bytes == buffer_bytes(3, PAGE + 5)
    assert [buffers[i].data_ptr() % PAGE for i in range(3)] == [0, 0, 0]
    assert [buffers[i].numel() for i in range(3)] == [PAGE + 5] * 3
    for i in range(3):
        buffers[i].fill_(i)
    assert [buffers[i].unique().tolist() for i in range(3)] == [[0], [1], [2]]
    with pytest.raises(IndexError, match="buffer 3 of 3"):
        buffers[3]
    with pytest.raises(ValueError, match="at least one buffer"):
        Buffers(0, 5)


def test_only_host_memory_is_pinned_and_only_for_a_gpu(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(KernelError, match="expected host memory to page-lock, got meta"):
        Buffers(1, 8, "meta", pinned=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="expected a CUDA GPU that copies from them, got none"):
        Buffers(1, 8, pinned=True)


def test_pinning_registers_the_memory_and_gives_it_back(monkeypatch: pytest.MonkeyPatch):
    calls = []

    class Runtime:
        def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
            calls.append(("register", pointer, size, flags))
            return 0

        def cudaHostUnregister(self, pointer: int) -> int:
            calls.append(("unregister", pointer))
            return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    buffers = Buffers(2, 100, pinned=True)
    start = buffers[0].data_ptr()
    del buffers
    assert calls == [("register", start, 2 * PAGE, 0), ("unregister", start)]


@pytest.mark.parametrize("n_chunks", [1, 3, 100])
def test_copies_copy_everything(n_chunks: int):
    src, dst = Buffers(1, 5 * PAGE + 7)[0], Buffers(1, 5 * PAGE + 7)[0]
    src.copy_(torch.randint(0, 256, src.shape, dtype=torch.uint8))
    copy_in_chunks(dst, src, n_chunks)
    assert torch.equal(dst, src)
    dst.zero_()
    copy(dst, src, non_blocking=True)
    assert torch.equal(dst, src)
    for call in (lambda: copy(dst[1:], src), lambda: copy_in_chunks(dst[1:], src, 2)):
        with pytest.raises(ValueError, match="of one length"):
            call()
    with pytest.raises(ValueError, match="at least one chunk"):
        copy_in_chunks(dst, src, 0)


def test_chunks_go_to_the_streams_in_turn(monkeypatch: pytest.MonkeyPatch):
    log = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.device = name, "cuda:0"

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            log.append(f"copy on {self.name}")

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    src, dst = torch.ones(3 * PAGE, dtype=torch.uint8), torch.zeros(3 * PAGE, dtype=torch.uint8)
    copy_in_chunks(dst, src, 3, [Stream("a"), Stream("b")])
    assert torch.equal(dst, src)
    assert log == [
        "a waits for main", "b waits for main", "copy on a", "copy on b", "copy on a", "main waits for a", "main waits for b",
    ]  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="no os.preadv")
@pytest.mark.parametrize("refused", [None, "open", "read"])
def test_experts_come_back_from_a_file(tmp_path, monkeypatch: pytest.MonkeyPatch, refused: str | None):
    model = replace(SMALL, expert_bias=True)  # bytes that are no whole pages
    kernel, n_bytes = ExpertKernel(ExpertShape.of(model)), model.expert_bytes()
    assert n_bytes % PAGE
    opened, preadv = os.open, os.preadv
    direct = set()

    def open_(path, flags, *rest):
        if refused == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = opened(path, flags, *rest)
        if flags & getattr(os, "O_DIRECT", 0):
            direct.add(fd)
        return fd

    def read(fd, buffers, offset):
        if refused == "read" and fd in direct:
            direct.discard(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(memory.os, "open", open_)
    monkeypatch.setattr(memory.os, "preadv", read)
    path = tmp_path / "experts"
    held = FileExperts.create(path, 3, n_bytes, kernel.fill, seed=4)
    if refused:
        assert held.mode == "buffered"
    buffers = Buffers(2, n_bytes)
    for i in (2, 0, 1):
        held.read(i, buffers[0])
        kernel.fill(buffers[1], 4 + i)
        assert torch.equal(buffers[0], buffers[1])
    kernel.fill(buffers[1], 99)
    held.write(1, buffers[1])
    held.close()
    again = FileExperts(path, 3, n_bytes)
    again.read(1, buffers[0])
    assert torch.equal(buffers[0], buffers[1])
    again.read(2, buffers[0])
    kernel.fill(buffers[1], 6)
    assert torch.equal(buffers[0], buffers[1])  # its neighbour is as it was
    with pytest.raises(IndexError, match="expert 3 of 3"):
        again.read(3, buffers[0])
    with pytest.raises(ValueError, match="page-aligned buffer"):
        again.read(0, Buffers(1, n_bytes + 1)[0][1:])
    again.remove()
    assert not path.exists()
    again.close()


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="no os.preadv")
def test_files_that_cannot_be_are_refused_and_leave_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch):
    kernel, n_bytes, path = ExpertKernel(ExpertShape.of(SMALL)), SMALL.expert_bytes(), tmp_path / "experts"
    with pytest.raises(CapacityError, match="free bytes for 1000000000000 experts"):
        FileExperts.create(path, 10**12, n_bytes, kernel.fill)
    with pytest.raises(KernelError, match="expected a file of experts, got: No such file"):
        FileExperts(path, 1, n_bytes)
    path.write_bytes(b"x")
    with pytest.raises(KernelError, match="expected a new file that can be written, got: File exists"):
        FileExperts.create(path, 1, n_bytes, kernel.fill)
    with pytest.raises(KernelError, match="expected 1 experts in 36864 bytes, got 1"):
        FileExperts(path, 1, n_bytes)
    path.unlink()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory, "_write_all", fail)
    with pytest.raises(KernelError, match="expected to write 1 experts, got: No space left"):
        FileExperts.create(path, 1, n_bytes, kernel.fill)
    assert not list(tmp_path.iterdir())


def test_the_machine_is_described_in_words():
    words = host.describe()
    assert {"processor", "cores", "memory", "caches", "kernel", "python", "torch"} <= set(words)
    assert all(isinstance(value, str) and value for value in words.values())
    assert words["torch"] == torch.__version__
    assert host.l3_bytes() is None or host.l3_bytes() > 0


def test_available_memory_is_the_smaller_of_kernel_and_control_group(tmp_path):
    proc, group = tmp_path / "proc", tmp_path / "group"
    proc.mkdir()
    group.mkdir()
    assert host.available_memory_bytes(proc, group) is None
    (proc / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:     50 kB\n")
    assert host.available_memory_bytes(proc, group) == 50 * 1024
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("9000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 1000\n")
    assert host.available_memory_bytes(proc, group) == 50 * 1024
    (group / "memory.max").write_text("10000\n")
    assert host.available_memory_bytes(proc, group) == 2000  # cached files give way


def test_energy_is_counted_over_a_turn_of_the_counter(tmp_path):
    assert host.package_energy_uj(tmp_path) is None
    for name, energy in (("intel-rapl:0", 900), ("intel-rapl:1", 10), ("intel-rapl:0:0", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{energy}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("999\n")
    before = host.package_energy_uj(tmp_path)
    assert before == {"intel-rapl:0": (900, 999), "intel-rapl:1": (10, 999)}
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100\n")
    after = host.package_energy_uj(tmp_path)
    assert after is not None
    assert host.joules_between(before, after) == pytest.approx(200e-6)


@pytest.mark.parametrize(("printed", "watts"), [("123.45\n", 123.45), ("[N/A]\n", None)])
def test_power_is_what_the_driver_says(tmp_path, monkeypatch: pytest.MonkeyPatch, printed: str, watts: float | None):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = --id=1 ] && printf '{printed.strip()}\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert host.gpu_power_w(1) == watts
    program.write_text("#!/bin/sh\nexit 9\n")
    assert host.gpu_power_w(1) is None


def test_without_torch_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    require_torch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KernelError, match=r"profile measure and replay need PyTorch: .*pip install '\.\[profile\]'"):
        require_torch()


@needs_gpu
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_an_expert_on_a_gpu_is_that_of_the_host(bits: int):
    model = replace(SMALL, hidden=256, expert_intermediate=512, expert_bits=bits)
    shape = ExpertShape.of(model)
    host = ExpertKernel(shape)
    try:
        gpu = ExpertKernel(shape, "cuda")
    except KernelError as error:
        assert bits in (4, 8)
        pytest.skip(str(error))
    buffers, copies = Buffers(1, shape.n_bytes, pinned=True), Buffers(1, shape.n_bytes, "cuda")
    assert buffers[0].is_pinned()
    host.fill(buffers[0], 3)
    copy(copies[0], buffers[0], non_blocking=True)
    x = torch.randn(5, model.hidden).to(host.act_dtype)
    result = gpu.run(gpu.bind(copies[0]), x.cuda()).cpu().float()
    assert torch.isfinite(result).all()
    if bits != 4:  # the layouts of 4 bits differ between devices: the same bytes are another matrix
        wanted = host.run(host.bind(buffers[0]), x).float()
        assert (result - wanted).abs().max() < 0.03 * wanted.abs().max()


@needs_gpu
@pytest.mark.parametrize("model", [SMALL, LATENT])
def test_attention_on_a_gpu_is_that_of_the_host(model: ModelSpec):
    host, gpu = dense(model), dense(model, device="cuda")
    x = torch.randn(7, model.hidden)
    assert torch.allclose(gpu.attention(1, x.cuda(), SEQUENCES).cpu(), host.attention(1, x, SEQUENCES), atol=1e-3)
