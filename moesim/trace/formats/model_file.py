"""Bytes of experts that a source records for each layer, as a model that experiments can name."""

from __future__ import annotations

from pathlib import Path

import yaml

from moesim.core import atomic
from moesim.trace.formats.importing import Imported

_SUFFIX = ".model.yaml"


def model_file(trace: Path) -> Path:
    """Return the file next to a trace that holds its model."""
    return trace.with_name(trace.stem + _SUFFIX)


def write_model_file(imported: Imported) -> Path | None:
    """Write a model beside an imported trace, for ``model:`` of an experiment."""
    trace, spec = imported.trace, imported.spec
    n_bytes = trace.header.get("expert_bytes_by_layer")
    if n_bytes is None or spec is None or len(n_bytes) != trace.n_layers:
        return None
    content = {
        "base": trace.header["said_by_user"]["model"],
        "top_k": trace.top_k,
        "expert_bytes_by_layer": n_bytes,
        "source": f"{spec.source}; bytes of experts as {trace.header['source_files'][0]['name']} records them",
    }
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)
    return atomic.write_bytes(model_file(imported.path), text.encode())
