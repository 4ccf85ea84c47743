"""BigMoeOnEdge's ``route_trace v1``: CSV with weights, after a preamble of ``#`` lines.

The preamble has the model's shape and each layer's bytes of an expert; a turn becomes a request, the step its position, and
``residency`` and ``expert_bytes`` (of its cache) are not read. The last layer of a prompt is there for its final token only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesim.trace.formats.contract import Format, Options, Part, Store, wrong
from moesim.trace.formats.tables import read_csv
from moesim.trace.formats.visits import complete_tokens

_MAGIC = "# route_trace v1"
_NEEDED = ("turn", "phase", "step", "layer", "slot", "expert", "weight")


@dataclass(frozen=True)
class Preamble:
    """Facts from the first lines of a file."""

    n_lines: int
    model: str  # file name of the model, without folder and ending
    arch: str
    n_layers: int
    n_experts: int
    top_k: int
    # expert_bytes, dense_bytes: of one expert, and of the dense part, of each layer
    expert_bytes: tuple[int, ...]
    dense_bytes: tuple[int, ...]


def read_preamble(path: Path) -> Preamble:
    """Read the ``#`` lines of a file."""
    lines = []
    with path.open("rb") as file:
        while (line := file.readline(65_536)).startswith(b"#"):
            lines.append(line.decode("utf-8", "replace").strip())
            if len(lines) > 10_000:
                raise wrong(path, "a preamble of a few lines", "more than 10000", "record it again")
    if not lines or lines[0] != _MAGIC:
        raise wrong(f"{path}: line 1", _MAGIC, repr(lines[0][:80] if lines else line[:40]), "name another --format")
    facts = [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in lines]
    general = next((fact for fact in facts if "n_layer" in fact), {})
    n_layers, n_experts, top_k = (_number(path, general, key) for key in ("n_layer", "n_expert", "n_expert_used"))
    layers = [fact for fact in facts if "layer" in fact]
    if [_number(path, fact, "layer") for fact in layers] != list(range(n_layers)):
        raise wrong(
            f"{path}: preamble", f"a line '# layer=' for each of the {n_layers} layers", f"{len(layers)}", "record it again"
        )
    model = general.get("model", "").replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".gguf")
    expert_bytes, dense_bytes = (tuple(_number(path, fact, key) for fact in layers) for key in ("expert_bytes", "dense_bytes"))
    return Preamble(len(lines), model, general.get("arch", ""), n_layers, n_experts, top_k, expert_bytes, dense_bytes)


def _number(path: Path, facts: dict[str, str], key: str) -> int:
    text = facts.get(key, "")
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise wrong(f"{path}: preamble: {key}", "a whole number", repr(text[:40]), "record it again")
    return int(text)


def read(path: Path, options: Options, store: Store) -> Part:
    """Read a file."""
    preamble = read_preamble(path)
    table = read_csv(path, {name: name for name in _NEEDED}, skip=preamble.n_lines)
    part = complete_tokens(
        str(path), store, options.incomplete, table["expert"], weights=table["weight"], request=table["turn"],
        layer=table["layer"], token=table["step"], rank=table["slot"], phase=table["phase"],
    )  # fmt: skip
    _check_shape(path, preamble, part, store)
    facts: dict[str, Any] = {
        "arch": preamble.arch,
        "expert_bytes_by_layer": list(preamble.expert_bytes),
        "dense_bytes_by_layer": list(preamble.dense_bytes),
        "not_imported": ["residency", "expert_bytes of each lookup"],
    }
    return replace(part, phased=True, n_experts=preamble.n_experts, model=preamble.model or None, facts=part.facts | facts)


def _check_shape(path: Path, preamble: Preamble, part: Part, store: Store) -> None:
    layers = part.facts.get("layers", [])
    n_layers, top_k = store.shape or (0, 0)
    if top_k != preamble.top_k or n_layers > preamble.n_layers or (layers and layers[-1] >= preamble.n_layers):
        expected = f"{preamble.n_layers} layers and {preamble.top_k} experts a token as the preamble says"
        raise wrong(path, expected, f"{n_layers} and {top_k}", "record it again")


FORMAT = Format(
    "bigmoe-route",
    "route_trace v1 of BigMoeOnEdge: CSV with weights and bytes of experts",
    lambda probe: probe.head.startswith(_MAGIC.encode()),
    read,
)
