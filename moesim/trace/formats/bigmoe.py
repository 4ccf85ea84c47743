"""BigMoeOnEdge's ``route_trace v1``: CSV with weights, after a preamble of ``#`` lines.

The preamble has the model's shape and each layer's bytes of an expert; a turn becomes a request, the step its position, and
``residency`` and ``expert_bytes`` (of its cache) are not read. The last layer of a prompt is there for its final token only.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moesim.trace.formats.contract import Format, Options, Part, Probe, Store, wrong
from moesim.trace.formats.tables import read_csv
from moesim.trace.formats.visits import complete_tokens

_MAGIC = "# route_trace v1"
_NEEDED = ("turn", "phase", "step", "layer", "slot", "expert", "weight")


def read(path: Path, options: Options, store: Store) -> Part:
    """Read a file."""
    probe = Probe(path)
    lines = probe.preamble
    if not lines or lines[0] != _MAGIC:
        got = repr(lines[0][:80] if lines else probe.head[:40])
        raise wrong(f"{path}: line 1", _MAGIC, got, "name another --format")
    facts = [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in lines]
    general, layers = next((fact for fact in facts if "n_layer" in fact), {}), [fact for fact in facts if "layer" in fact]
    n_layers, n_experts, top_k = (_number(path, general, key) for key in ("n_layer", "n_expert", "n_expert_used"))
    if [_number(path, fact, "layer") for fact in layers] != list(range(n_layers)):
        expected = f"a line '# layer=' for each of the {n_layers} layers"
        raise wrong(f"{path}: preamble", expected, f"{len(layers)}", "record it again")
    n_bytes = {key: [_number(path, fact, key) for fact in layers] for key in ("expert_bytes", "dense_bytes")}
    table = read_csv(path, {name: name for name in _NEEDED}, skip=len(lines))
    part = complete_tokens(
        str(path), store, options.incomplete, table["expert"], weights=table["weight"], request=table["turn"],
        layer=table["layer"], token=table["step"], rank=table["slot"], phase=table["phase"],
    )  # fmt: skip
    names, (found, width) = part.facts.get("layers", [-1]), store.shape or (0, 0)
    if width != top_k or found > n_layers or names[-1] >= n_layers:
        expected = f"{n_layers} layers and {top_k} experts a token as the preamble says"
        raise wrong(path, expected, f"{found} and {width}", "record it again")
    more = {
        "arch": general.get("arch", ""), **{f"{key}_by_layer": values for key, values in n_bytes.items()},
        "not_imported": ["residency", "expert_bytes of each lookup"],
    }  # fmt: skip
    model = general.get("model", "").replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".gguf") or None
    return replace(part, phased=True, n_experts=n_experts, model=model, facts=part.facts | more)


def _number(path: Path, facts: dict[str, str], key: str) -> int:
    text = facts.get(key, "")
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise wrong(f"{path}: preamble: {key}", "a whole number", repr(text[:40]), "record it again")
    return int(text)


FORMAT = Format(
    "bigmoe-route",
    "route_trace v1 of BigMoeOnEdge: CSV with weights and bytes of experts",
    lambda probe: probe.head.startswith(_MAGIC.encode()),
    read,
)
