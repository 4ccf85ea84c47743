"""The gallery has every kind of figure, the command of each picture, and pictures of the size that they are drawn in."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest

from moesim.experiment.config import load_config
from moesim.plots.catalogue import KINDS
from moesim.plots.drawing import read_frames
from moesim.trace import Trace, find_trace

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "gallery.py")
gallery = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gallery)


def test_the_page_is_what_the_script_writes_and_has_every_kind():
    assert list(gallery.DRAWN) == list(KINDS)
    assert gallery.PAGE.read_text(encoding="utf-8") == gallery.page(), "python docs/gallery.py --page"


def test_every_kind_has_a_small_picture_and_nothing_else_lies_there():
    pictures = {path.name: path.stat().st_size for path in gallery.PICTURES.iterdir()}
    assert set(pictures) == {f"{kind}.png" for kind in KINDS}
    assert sum(pictures.values()) < 1_500_000


def test_commands_name_policies_and_settings_of_the_experiment():
    config = load_config(ROOT / "experiments" / "gallery.yaml")
    policies = [one if isinstance(one, str) else one.name for one in config.policies]
    lengths = config.workload.prompt_tokens
    known = {
        "batch_size": config.workload.batch_size,
        "prompt_tokens": lengths,
        "cache_ratio": config.cache.ratio,
        "policy": policies,
        "rate": load_config(ROOT / "experiments" / "serving.yaml").workload.rate,
    }
    for words in gallery.DRAWN.values():
        for asked in words.split("--where ")[1:]:
            name, _, value = asked.split()[0].partition("=")
            assert value in map(str, known[name]), words
        for asked in words.split("--policies ")[1:]:
            assert set(asked.split()[0].split(",")) <= set(known["policy"]), words


@pytest.mark.parametrize("kind", ["printed", "popularity_drift"])
def test_pictures_are_as_large_as_the_figures_now(kind: str):
    source = gallery.DRAWN[kind]
    given = Trace.read(find_trace(source)) if kind != "printed" else read_frames("papers", [ROOT / source], kind)
    figure = KINDS[kind](given)
    pixels = struct.unpack(">II", (gallery.PICTURES / f"{kind}.png").read_bytes()[16:24])
    assert pixels == pytest.approx([120 * figure.get_figwidth(), 120 * figure.get_figheight()], abs=1.5)  # half of 240 an inch
