"""Parts of a model's layers: attention kinds with what they keep, and feed-forward kinds.

A kind is a function that turns widths into figures: parameters, what is kept of earlier tokens, operations. Costs need no more.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from moesim.core.limits import BITS, BYTES, EXPERTS, LAYERS, WIDTH
from moesim.core.units import ceil_div
from moesim.errors import ModelError


@lru_cache(maxsize=4096)  # asked for each layer of each run, and few answers differ
def bits_to_bytes(count: int, bits: float) -> int:
    """Bytes of ``count`` numbers of ``bits`` bits each, rounded up once.

    The decimal form of ``bits`` counts: 4.85 means 485/100, not the nearest binary fraction.

    >>> bits_to_bytes(176_160_768, 16), bits_to_bytes(32, 4.25), bits_to_bytes(100, 4.8)
    (352321536, 17, 60)
    """
    return math.ceil(count * Fraction(str(bits)) / 8)


Count = Annotated[int, Field(ge=0, le=BYTES.most)]
Width = Annotated[int, Field(ge=1, le=WIDTH.most)]


@dataclass(frozen=True)
class Store:
    """Numbers that a layer keeps of earlier tokens, and reads for each new one."""

    numbers: Count  # of a row
    operations: Count = 0  # of one new token for each row that it reads
    per: Width = 1  # tokens that share a row
    kept: Width | None = None  # rows that are kept at most: a window
    read: Width | None = None  # rows that are read at most: the choice of an indexer
    shared: bool = False  # an earlier layer keeps them

    def pairs2(self, n_rows: int, work2: int, n_requests: int | None) -> tuple[int, int]:
        """Return twice a micro-batch's rows read, and twice its pairs of a new token and a row."""
        # `work2` and `n_requests` are those of `CostModel.attention_ns`. Limits are exact for
        # requests of one length; others count as if all had the mean, which is never too little.
        if n_requests is None:
            n_requests = n_rows
        if self.per == 1 and self.kept is None and self.read is None:
            return ceil_div(work2 * n_requests, n_rows), work2
        new = ceil_div(n_rows, n_requests)
        before = max(0, (ceil_div(work2, n_rows) - new) // 2)
        pairs = sum(self.rows_read(before + i) for i in range(1, new + 1)) if new < 64 else self._sum(before, new)
        rows = min(self.rows_kept(before + new), self.rows_read(before + new) + ceil_div(new - 1, self.per))
        return 2 * n_requests * rows, 2 * n_requests * pairs

    def _sum(self, before: int, new: int) -> int:
        """Return the rows that so many new tokens read, one after the other."""
        most = min(one for one in (self.kept, self.read, before + new) if one is not None)
        full = max(before, min(before + new, most * self.per))  # tokens up to here read fewer than the most
        return (before + new - full) * most + self._sum_of(full) - self._sum_of(before)

    def _sum_of(self, n: int) -> int:
        """Return the sum of ceil(i / per) for i from 1 to n."""
        whole, rest = divmod(n, self.per)
        return self.per * whole * (whole + 1) // 2 + rest * (whole + 1)

    def rows_kept(self, n_tokens: int) -> int:
        rows = -(-n_tokens // self.per)
        return rows if self.kept is None else min(rows, self.kept)

    def rows_read(self, n_tokens: int) -> int:
        """Return the rows that a new token reads after so many tokens."""
        rows = self.rows_kept(n_tokens)
        return rows if self.read is None else min(rows, self.read)


@dataclass(frozen=True)
class Mixer:
    """Mixing of tokens in a layer: attention, a linear recurrence, a convolution."""

    kind: str  # for a reader
    weights: tuple[tuple[str, Count], ...]  # parameters by matrix, as checkpoints name them; what is small is "rest"
    stores: tuple[Store, ...] = ()
    state_bytes: Count = 0  # of a sequence, however long it is
    operations: Count = 0  # of a token on the state
    crosses: tuple[Count, Count] = (0, 0)  # numbers of a row that what reads stores and state takes, and gives

    @property
    def own(self) -> tuple[Store, ...]:
        """Stores that are not those of an earlier layer."""
        return tuple(store for store in self.stores if not store.shared)

    @property
    def params(self) -> int:
        """Weights, biases and norms."""
        return sum(params for _, params in self.weights)


@dataclass(frozen=True)
class Block:
    """A layer: its mixer and its feed-forward part, in parameters and bytes."""

    mixer: Mixer | None  # None: a feed-forward part alone
    routed: bool
    dense: Count = 0  # parameters of a dense feed-forward part, alone or parallel to routed experts
    norms: Count = 0  # parameters of norms and scales around the parts
    mixer_bytes: Count = 0
    dense_bytes: Count = 0
    router_bytes: Count = 0  # with norms, and projections around experts
    shared_bytes: Count = 0
    expert_bytes: Count = 0  # of one routed expert


@dataclass(frozen=True)
class Shape:
    """A model: its layers one by one, what each routed layer has, and what comes once."""

    hidden: Width
    vocab: Width
    blocks: tuple[Block, ...]
    n_experts: Annotated[int, Field(ge=1, le=EXPERTS.most)]
    top_k: Width
    mats: Width  # matrices of an expert
    expert_width: Width
    expert_input: Width  # another than `hidden` if projections around the experts change it
    expert_params: Count
    router_params: Count  # with those projections
    shared_params: Count  # of all shared experts of a layer
    n_shared: Count
    tied: bool  # the output head is the embedding
    head_params: Count  # of the final norm, and biases of the head
    zero_experts: Count = 0  # experts without weights, which a router may choose
    embedding_bytes: Count = 0
    head_bytes: Count = 0  # what the head reads
    lookup_bytes: Count = 0  # tables of which a token reads a row
    lookup_params: Count = 0
    kv_bits: Annotated[float, Field(ge=BITS.least, le=BITS.most)] = 16
    notes: tuple[str, ...] = field(default=(), compare=False)  # what was left out, assumed or not understood
    name: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the shape for a YAML file; alike neighbouring layers are one entry with a count."""
        fields = asdict(self) | {"blocks": []}
        for key in ("name", "source", "notes"):  # the specification has them
            del fields[key]
        for block, group in groupby(self.blocks):
            one = {key: value for key, value in asdict(block).items() if value not in (0, None, False)}
            if block.mixer:
                mixer = {key: value for key, value in one["mixer"].items() if value}
                stores = [{key: value for key, value in asdict(store).items() if value} for store in block.mixer.stores]
                one["mixer"] = mixer | {"weights": dict(block.mixer.weights)} | ({"stores": stores} if stores else {})
            fields["blocks"].append({"layers": len(list(group)), **one})
        return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}

    @classmethod
    def from_dict(cls, given: Any, place: str) -> Shape:
        """Read what `to_dict` gives; `ModelError` if it is something else."""
        try:
            values = dict(given)
            values["blocks"] = [one for entry in values["blocks"] for one in _blocks_of(dict(entry))]
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ModelError(f"{place}.{where}: expected {first['msg'].lower()}, got {first['input']!r}") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            what = "layers as a result of moesim has them"
            raise ModelError(f"{place}: expected {what}, got {str(given)[:60]!r}; give the model's config.json") from None

    def at_bits(self, bits: float) -> Shape:
        """Return the same with another precision of everything but routed experts."""
        blocks = tuple(
            replace(
                block, mixer_bytes=bits_to_bytes(block.mixer.params if block.mixer else 0, bits),
                dense_bytes=bits_to_bytes(block.dense, bits),
                router_bytes=bits_to_bytes(block.norms + block.routed * self.router_params, bits),
                shared_bytes=bits_to_bytes(block.routed * self.shared_params, bits),
            )
            for block in self.blocks
        )  # fmt: skip
        ends = self.vocab * self.hidden
        return replace(
            self,
            blocks=blocks,
            embedding_bytes=bits_to_bytes(ends, bits),
            head_bytes=bits_to_bytes(ends + self.head_params, bits),
        )


def _blocks_of(entry: dict[str, Any]) -> list[dict[str, Any]]:
    n = min(int(entry.pop("layers")), int(LAYERS.most))
    mixer = entry.get("mixer")
    weights = {"weights": tuple(mixer["weights"].items())} if mixer else {}
    return [{"routed": False, "mixer": None} | entry | ({"mixer": {**mixer, **weights}} if mixer else {})] * n


# Operations of a token on a state, 5 to 7 for each of its numbers, are estimates: engines differ.

# ---- kinds of attention: d hidden size, h query heads, k key and value heads, a and v widths of a key and a value head


def _mixer(
    kind: str, weights: dict[str, int], crosses: tuple[int, int], *stores: Store, state: int = 0, operations: int = 0
) -> Mixer:  # fmt: skip
    return Mixer(kind, tuple((name, n) for name, n in weights.items() if n), stores, state, operations, crosses)


def grouped(
    d: int, h: int, k: int, a: int, v: int, *, window: int | None = None, gate: int = 0, v_from_k: bool = False,
    rest: int = 0, q_rank: int = 0,
) -> Mixer:  # fmt: skip
    """Return grouped-query attention, in a window or global; `gate`: weights of an output gate."""
    weights = {
        "q_proj": (q_rank * (d + h * a) if q_rank else d * h * a) + gate,
        "k_proj": d * k * a, "v_proj": 0 if v_from_k else d * k * v, "o_proj": h * v * d,
        "rest": rest,
    }  # fmt: skip
    kind = "grouped" if window is None else f"grouped, window {window}"
    return _mixer(kind, weights, (h * a + k * (a + v), h * v), Store(k * (a + v), 2 * h * (a + v), kept=window))


def latent(
    d: int, h: int, q_rank: int, kv_rank: int, nope: int, rope: int, v: int, *, bias: bool = False, gate: int = 0,
    window: int | None = None, index_heads: int = 0, index_width: int = 0, read: int | None = None, owns_index: bool = True,
    pool: int = 0,
) -> Mixer:  # fmt: skip
    """Return latent attention, with an indexer that chooses what is read (in pools of tokens) if it has index heads."""
    down, query = kv_rank + rope, h * (nope + rope)
    weights = {
        "q_proj": 0 if q_rank else d * query, "q_a_proj": q_rank * d, "q_b_proj": q_rank * query,
        "kv_a_proj_with_mqa": d * down, "kv_b_proj": kv_rank * h * (nope + v), "o_proj": h * v * d, "g_proj": gate,
        "rest": kv_rank + q_rank + bias * (q_rank + down + d),
    }  # fmt: skip
    store = Store(down, 2 * h * (2 * kv_rank + rope), kept=window, read=read if index_heads else None)
    crosses = query + down, h * v
    if not index_heads:
        return _mixer("latent" if window is None else f"latent, window {window}", weights, crosses, store)
    kind = f"latent, {read} chosen tokens"
    if not owns_index:
        return _mixer(kind, weights, crosses, store)
    weights["indexer"] = ((q_rank or d) * index_heads + d) * index_width + d * index_heads + 2 * index_width
    weights["indexer"] += bool(pool) * (d + pool) * index_width
    return _mixer(kind, weights, crosses, store, Store(index_width, 2 * index_heads * index_width, pool or 1))


def block_sparse(d: int, h: int, k: int, a: int, *, rest: int, index_heads: int, index_width: int, read: int) -> Mixer:
    """Return grouped-query attention over chosen blocks of tokens (MiniMax-M3)."""
    weights = dict(grouped(d, h, k, a, a, rest=rest).weights)
    weights["indexer"] = d * index_heads * index_width + d * index_width + 2 * index_width
    stores = Store(2 * k * a, 4 * h * a, read=read), Store(index_width, 2 * index_heads * index_width)
    crosses = h * a + 2 * k * a + (index_heads + 1) * index_width, h * a
    return _mixer(f"grouped, {read} chosen tokens", weights, crosses, *stores)


def compressed(
    d: int, h: int, a: int, q_rank: int, o_rank: int, o_groups: int, *, window: int, per: int, index_heads: int,
    index_width: int, read: int,
) -> Mixer:  # fmt: skip
    """Return DeepSeek-V4's attention: a window, and rows that stand for `per` tokens (0: none)."""
    weights = {
        "wq_a": d * q_rank, "wq_b": q_rank * h * a, "wkv": d * a, "wo_a": h * a * o_rank, "wo_b": o_groups * o_rank * d,
        "rest": q_rank + a + h,
    }  # fmt: skip
    if per:  # norms, and places within a row: of the compressor, and of the indexer's
        weights["rest"] += a + (2 * per * (a + index_width) + index_width if per < 100 else per * a)
    kind, stores = f"grouped, window {window}", [Store(a, 4 * h * a, kept=window)]
    if per and per < 100:  # overlapping rows, of which an indexer chooses
        kind += f" and {read} chosen rows of {per} tokens"
        weights |= {
            "compressor": 4 * a * d,
            "indexer": q_rank * index_heads * index_width + d * index_heads + 4 * d * index_width,
        }
        stores += [Store(a, 4 * h * a, per, read=read), Store(index_width, 2 * index_heads * index_width, per)]
    elif per:
        kind += f" and rows of {per} tokens"
        weights["compressor"] = 2 * a * d
        stores.append(Store(a, 4 * h * a, per))
    return _mixer(kind, weights, (h * a + a, h * a), *stores)


def delta_net(d: int, key_heads: int, value_heads: int, a: int, v: int, kernel: int) -> Mixer:
    """Return a gated delta net (Qwen3-Next): each value head has an a x v state in 32 bits."""
    mixed, inner = 2 * key_heads * a + value_heads * v, value_heads * v
    weights = {
        "in_proj_qkvz": d * (mixed + inner), "in_proj_ba": 2 * d * value_heads, "out_proj": inner * d,
        "rest": kernel * mixed + 2 * value_heads + v,
    }  # fmt: skip
    state = 4 * inner * a + 2 * (kernel - 1) * mixed
    return _mixer("linear, gated delta net", weights, (mixed, inner), state=state, operations=7 * inner * a)


def kimi_delta(d: int, h: int, a: int, kernel: int, *, full_gate: bool, full_decay: bool = False) -> Mixer:
    """Return Kimi's delta attention: 3 convolved projections, decay and gate of a rank or full."""
    inner = h * a
    weights = {
        "q_proj": d * inner, "k_proj": d * inner, "v_proj": d * inner, "o_proj": inner * d,
        "f_proj": d * inner if full_decay else d * a + a * inner, "g_proj": d * inner if full_gate else d * a + a * inner,
        "b_proj": d * h,
        "rest": 3 * kernel * inner + inner + h + a,
    }  # fmt: skip
    state = 4 * inner * a + 2 * (kernel - 1) * 3 * inner
    return _mixer("linear, Kimi delta", weights, (3 * inner, inner), state=state, operations=7 * inner * a)


def mamba2(d: int, heads: int, width: int, groups: int, n: int, kernel: int) -> Mixer:
    """Return Mamba-2: n numbers of state for each of heads x width channels, in 32 bits."""
    inner = heads * width
    mixed = inner + 2 * groups * n
    weights = {"in_proj": d * (inner + mixed + heads), "out_proj": inner * d, "rest": mixed * (kernel + 1) + 3 * heads + inner}
    state = 4 * inner * n + 2 * (kernel - 1) * mixed
    return _mixer("state space, Mamba-2", weights, (mixed + heads, inner), state=state, operations=6 * inner * n)


def mamba1(d: int, expand: int, n: int, rank: int, kernel: int) -> Mixer:
    """Return Mamba-1 (Jamba)."""
    inner = expand * d
    weights = {
        "in_proj": 2 * d * inner, "x_proj": inner * (rank + 2 * n), "dt_proj": rank * inner, "out_proj": inner * d,
        "rest": inner * (kernel + 1) + inner + inner * n + inner + rank + 2 * n,
    }  # fmt: skip
    state = 4 * inner * n + 2 * (kernel - 1) * inner
    return _mixer("state space, Mamba", weights, (inner, inner), state=state, operations=6 * inner * n)


def lightning(d: int, h: int, a: int) -> Mixer:
    """Return lightning attention (MiniMax-01): a state of a x a for each head, in 32 bits."""
    inner = h * a
    weights = {"qkv_proj": 3 * d * inner, "output_gate": d * inner, "out_proj": inner * d, "rest": inner}
    return _mixer("linear, lightning", weights, (3 * inner, inner), state=4 * inner * a, operations=5 * inner * a)


def short_convolution(d: int, kernel: int) -> Mixer:
    """Return a gated short convolution (LFM2)."""
    weights = {"in_proj": 3 * d * d, "out_proj": d * d, "rest": d * kernel}
    return _mixer("convolution", weights, (d, d), state=2 * (kernel - 1) * d, operations=2 * kernel * d)


def reusing(mixer: Mixer) -> Mixer:
    """Return attention to keys and values of an earlier layer."""
    left_out = ("k_proj", "v_proj", "kv_a_proj_with_mqa")
    return replace(
        mixer,
        kind=f"{mixer.kind}, of an earlier layer",
        weights=tuple((name, n) for name, n in mixer.weights if name not in left_out),
        stores=tuple(replace(store, shared=store.kept is None or len(mixer.stores) == 1) for store in mixer.stores),
    )


def routed_heads(mixer: Mixer, d: int, wide: int, n: int) -> Mixer:
    """Return attention whose queries and output come from chosen ones of n experts (JetMoE)."""
    weights = dict(mixer.weights) | {"q_proj": n * d * wide, "o_proj": n * wide * d, "rest": n * d + d}
    return replace(mixer, kind=f"{mixer.kind}, {n} experts counted whole", weights=tuple(weights.items()))


def repeated(mixer: Mixer, times: int) -> Mixer:
    """Return several of a kind in one layer (LongCat)."""
    weights = tuple((name, times * n) for name, n in mixer.weights)
    kind, state, operations = f"{mixer.kind}, {times} a layer", times * mixer.state_bytes, times * mixer.operations
    return Mixer(kind, weights, mixer.stores * times, state, operations, (times * mixer.crosses[0], times * mixer.crosses[1]))
