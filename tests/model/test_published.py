"""The table of public configs in docs/background/models.csv, read again from the files where they are."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from moesim.errors import ModelError
from moesim.model import load_model

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT.parent / "shared" / "files" / "models"
TABLE = ROOT / "docs" / "background" / "models.csv"
ROWS = {cells[0]: cells for cells in list(csv.reader(TABLE.read_text(encoding="utf-8").splitlines()))[1:]}


def test_totals_are_within_two_per_cent_or_named() -> None:
    apart = {name: abs(float(cells[1]) / float(cells[2]) - 1) for name, cells in ROWS.items() if cells[1] != "refused"}
    assert len(ROWS) == 32 and [name for name, share in apart.items() if share > 0.0196] == ["minicpm"]
    for cells in ROWS.values():
        if cells[2] != "-":
            off = 100 * (float(cells[1]) / float(cells[2]) - 1)
            assert float(cells[3].removesuffix(" %")) == pytest.approx(off, abs=0.16)


@pytest.mark.skipif(not FILES.is_dir(), reason="the public configs are not here")
@pytest.mark.parametrize("name", ROWS)
def test_a_public_config_is_read_as_the_table_has_it(name: str) -> None:
    path = next(path for path in FILES.glob("*.json") if path.stem.removesuffix("_config") == name)
    cells = ROWS[name]
    if cells[1] == "refused":
        with pytest.raises(ModelError, match="is_encoder_decoder"):
            load_model(path)
        return
    model = load_model(path)
    active = model.active_params - (0 if model.tie_embeddings else model.embedding_params)
    assert cells[1] == f"{model.total_params / 1e9:.2f}"
    assert cells[4] == f"{active / 1e9:.2f}, {model.active_params / 1e9:.2f}"
    assert cells[6] == f"{model.n_bytes / 2**30:.1f} GiB"
