"""Makes the gallery of figures: ``python docs/gallery.py`` runs its commands, and writes pictures and page.

With ``--page`` it writes the page alone, with names of kinds their pictures alone.
"""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "guide" / "gallery.md"
PICTURES: Final = ROOT / "docs" / "images" / "gallery"
_SCALE: Final = 0.5  # of the pictures that `moesim plot` writes
_COLOURS: Final = 128
_LINE: Final = 95  # characters of a command

_ONE: Final = "--set workload.batch_size=4 --set workload.prompt_tokens=64 --set cache.ratio=0.25 --set frames=false"
RESULTS: Final[Mapping[str, str]] = {
    "results/gallery": "moesim run experiments/gallery.yaml --out results/gallery",
    "results/whatif": (
        f'moesim whatif experiments/gallery.yaml {_ONE} --set "policies=[lru, dali, prescope]" --out results/whatif'
    ),
    "results/regret": (
        f'moesim regret experiments/gallery.yaml {_ONE} --set "policies=[lru, dali, prescope]" --out results/regret'
    ),
    "results/league": (
        f'moesim league experiments/gallery.yaml {_ONE} --set "workload.seed=[0, 1, 2]" '
        '--set "policies=[llama-cpp-fit, pooled-cache, exllamav3, dali, lru]" --out results/league'
    ),
    "results/serving": "moesim run experiments/serving.yaml --out results/serving",
    "results/kv-split": "moesim run experiments/kv-split.yaml --out results/kv-split",
    "results/capacity": (
        'moesim capacity --model "{base: qwen3-30b-a3b, expert_bits: 4}" --hardware rtx3090-epyc7532 '
        "--policies lru,fiddler,llama-cpp-cache --trace mini-qwen3 --cache 0.25 --prompt 64 --answer 32 --ttft 2 --tpot 0.25 "
        '--users --scheduler "{name: llama-server, parallel: 16}" --requests 40 --seeds 3 --out results/capacity'
    ),
    "results/lookahead": (
        "moesim trace lookahead mini-mixtral mini-deepseek-v2-lite mini-qwen3 --max-tokens 256 --out results/lookahead"
    ),
}
"""Folder -> command that writes it."""

_SETTING: Final = "--where batch_size=4 --where prompt_tokens=64 --where cache_ratio=0.25"
_BATCHES: Final = "--where prompt_tokens=64 --where cache_ratio=0.25"
_CACHES: Final = "--where batch_size=4 --where prompt_tokens=64"
DRAWN: Final[Mapping[str, str]] = {
    "decode_speed": f"results/gallery {_BATCHES}",
    "prefill_speed": f"results/gallery {_CACHES}",
    "speedup": f"results/gallery --baseline lru {_BATCHES}",
    "speedup_lines": f"results/gallery --baseline lru --x batch_size {_BATCHES}",
    "throughput": f"results/gallery {_BATCHES}",
    "speed_by_context": "results/gallery --where cache_ratio=0.25",
    "hit_rate": f"results/gallery {_CACHES}",
    "breakdown": f"results/gallery {_SETTING}",
    "ladder": f"results/gallery --policies on-demand,lru,dali {_CACHES}",
    "heatmap": "results/gallery --x batch_size --y cache_ratio --where policy=dali --where prompt_tokens=64",
    "best_setting": "results/kv-split --metric answer_tokens_per_s",
    "energy": f"results/gallery {_CACHES}",
    "vram": f"results/gallery {_CACHES}",
    "tornado": "results/whatif",
    "regret": "results/regret",
    "crossover": "results/league",
    "validation": "hardware_profiles/zen4-2core/validation",
    "printed": "docs/background/results.csv",
    "latency_by_load": "results/serving",
    "goodput": "results/serving",
    "request_gantt": "results/serving --where rate=1.0",
    "slots_over_time": "results/serving --where rate=1.0",
    "capacity": "results/capacity",
    "hit_rate_by_token": f"results/gallery {_SETTING}",
    "latency_cdf": f"results/gallery {_SETTING}",
    "balance_cdf": f"results/gallery {_SETTING}",
    "time_by_layer": f"results/gallery --policies dali {_SETTING}",
    "gantt": f"results/gallery --policies lru,dali,prescope {_SETTING}",
    "signal_accuracy": "mini-mixtral",
    "signal_accuracy_by_layer": "mini-mixtral",
    "popularity_drift": "mini-mixtral",
    "lookahead": "results/lookahead",
    "reuse_map": "mini-mixtral",
    "coactivation": "mini-mixtral",
    "coactivation_ranks": "mini-mixtral",
}
"""Kind -> what follows it in the command that draws its picture."""

_HEAD: Final = """\
# Gallery

All [figures](figures.md) of `moesim plot`, each with the command that draws it. The results come from:

```sh
{commands}
```

These runs are small and their routing is that of a miniature, so the pictures show what a figure is like
and no ranking of policies. `validation` and `printed` draw files of a clone, where `python docs/gallery.py` makes
this page and its pictures.
"""
_ENTRY: Final = """
## {kind}

{title}.

```sh
{command}
```

![{kind}](../images/gallery/{kind}.png)
"""


def page() -> str:
    """Write the page."""
    from moesim.plots.catalogue import KINDS

    titles = {name: f"{kind.title[0].upper()}{kind.title[1:]}" for name, kind in KINDS.items()}
    commands = "\n".join(_wrapped(command) for command in RESULTS.values())
    draws = {kind: _wrapped(f"moesim plot {kind} {words} --out figures") for kind, words in DRAWN.items()}
    entries = [_ENTRY.format(kind=kind, title=titles[kind], command=command) for kind, command in draws.items()]
    return _HEAD.format(commands=commands) + "".join(entries)


def _wrapped(command: str) -> str:
    """Break a command into lines between its options."""
    first, *options = command.split(" --")
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) + 3 <= _LINE:
            lines[-1] += f" --{option}"
        else:
            lines.append(f"    --{option}")
    return " \\\n".join(lines)


def small(png: bytes) -> bytes:
    """Make a picture for the page of one for print."""
    from PIL import Image

    whole = Image.open(io.BytesIO(png)).convert("RGB")
    size = round(whole.width * _SCALE), round(whole.height * _SCALE)
    found = whole.resize(size, Image.Resampling.LANCZOS).quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    found.save(buffer, "png", optimize=True)
    return buffer.getvalue()


def draw(kinds: Sequence[str]) -> None:
    """Run the commands of some kinds, and write their pictures."""
    with tempfile.TemporaryDirectory() as temporary:
        made: set[str] = set()
        for kind in kinds:
            words = [f"{temporary}/{word}" if word in RESULTS else word for word in shlex.split(DRAWN[kind])]
            for folder in set(RESULTS) & set(shlex.split(DRAWN[kind])) - made:
                _moesim(RESULTS[folder].replace(f"--out {folder}", f"--out {temporary}/{folder}"))
                made.add(folder)
            out = Path(temporary) / "figures" / kind
            _moesim(shlex.join(["moesim", "plot", kind, *words, "--out", str(out)]))
            (picture,) = out.glob("*.png")
            PICTURES.mkdir(parents=True, exist_ok=True)
            (PICTURES / f"{kind}.png").write_bytes(small(picture.read_bytes()))


def _moesim(command: str) -> None:
    _, *words = shlex.split(command)
    print(command, file=sys.stderr)
    subprocess.run([sys.executable, "-m", "moesim", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    asked = sys.argv[1:]
    PAGE.write_text(page(), encoding="utf-8")
    if asked != ["--page"]:
        draw(asked or list(DRAWN))
