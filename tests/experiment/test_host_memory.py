"""Memory of the host: what an engine keeps there, and what the system pages where a little is lacking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesim.experiment.runner import run_one
from moesim.model import load_model
from tests.experiment.experiment_kit import resolve

MODEL = {"base": "mixtral-8x7b", "expert_bits": 4}
MIXTRAL = load_model(MODEL)
LAYER = MIXTRAL.n_experts * MIXTRAL.expert_bytes(0)
HALF = 16 * LAYER + MIXTRAL.embedding_bytes
"""What the host keeps with the experts of 16 of 32 layers on the GPU."""


def row(folder: Path, policy: Any, ram: int) -> dict[str, Any]:
    hardware = {"base": "rtx3090-epyc7532", "devices.cpu0.memory_bytes": ram, "devices.cpu0.workspace_bytes": 0}
    found = resolve(folder, hardware=hardware, policies=[policy], cache={"ratio": 0.5})
    return run_one(found, found.specs[0]).row


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"name": "llama-cpp", "n_cpu_moe": 16}, HALF),
        ({"name": "llama-cpp-fit"}, HALF),
        ({"name": "exllamav3", "cpu_layers": 16}, HALF),
        ({"name": "exllamav3", "cpu_split": 4}, 32 * LAYER + MIXTRAL.embedding_bytes),
        ({"name": "all-gpu", "assume_fits": True}, 0),
        ("lru", 32 * LAYER),  # its cache holds copies
        ("llama-cpp-cache", 32 * LAYER + MIXTRAL.embedding_bytes),
    ],
)
def test_the_host_keeps_what_the_engine_keeps(policy: Any, kept: int, tmp_path: Path) -> None:
    done = row(tmp_path, policy, 32 * LAYER + MIXTRAL.embedding_bytes)
    assert (done["error"], done["peak_memory_bytes.cpu0"]) == (None, kept)


def test_a_host_with_less_memory_than_the_file_runs_what_it_has_room_for(tmp_path: Path) -> None:
    policy = {"name": "llama-cpp", "n_cpu_moe": 16}
    done, other = row(tmp_path, policy, HALF), row(tmp_path, "lru", HALF)
    assert done["error"] is None and "lacks" not in str(done["notes"])
    assert "cpu0 of rtx3090-epyc7532: needs" in str(other["error"])
    assert done["decode_tokens_per_s"] == row(tmp_path, policy, 40 * LAYER)["decode_tokens_per_s"]


@pytest.mark.parametrize(("share", "runs"), [(0.91, True), (0.89, False)])
def test_a_little_too_little_is_a_warning_with_its_size(share: float, runs: bool, tmp_path: Path) -> None:
    done = row(tmp_path, {"name": "llama-cpp", "n_cpu_moe": 16}, int(share * HALF))
    notes = [note for note in str(done.get("notes")).split(", ") if note.startswith("cpu0 lacks")]
    assert (done["error"] is None, len(notes)) == (runs, runs)
    if runs:  # a token of top-2 of 8 experts reads a quarter of what is lacking
        assert notes == [
            "cpu0 lacks 990.2 MiB of 10.74 GiB: the system drops pages of the model's file and reads about 247.5 MiB a token "
            "again; this speed leaves that out"
        ]
    else:
        assert "needs 10.74 GiB, has 9.562 GiB: experts 10.5 GiB" in str(done["error"])


def test_without_a_file_that_is_mapped_nothing_may_lack(tmp_path: Path) -> None:
    done = row(tmp_path, {"name": "exllamav3", "cpu_layers": 16}, int(0.95 * HALF))
    assert "cpu0 of rtx3090-epyc7532: needs" in str(done["error"])
