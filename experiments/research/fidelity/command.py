"""Measure what inexact execution costs a model, next to the gate-mass fidelity that a simulation prints.

Usage::

    python experiments/research/measure_fidelity.py build/mini-mixtral --out build/fidelity

`docs/background/fidelity.md` says what is run and what came out.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from fidelity.calibration import calibrate
from fidelity.figure import fidelity
from fidelity.measure import ALL, FIRST_PREDICTED, RATIOS, batches, cases, measure, rows
from miniature import corpus as corpora
from miniature.command import load_checkpoint
from miniature.recorded import check_corpus
from moesim.core.files import OutputFolder
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.core.text import say
from moesim.errors import InputError
from moesim.plots.style import pictures


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python experiments/research/measure_fidelity.py``."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        _run(options)
    except InputError as error:
        say(f"error: {error}")
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    for ratio in options.ratios:
        if not 0 <= ratio <= 1:
            raise InputError(f"--ratios: expected 0 to 1, got {ratio:g}")
    checkpoint = Path(options.checkpoint)
    name = options.name or checkpoint.name
    model, tokenizer, corpus = _load(checkpoint)

    def windows(of: str, n_tokens: int) -> dict[str, Tensor]:
        rows = {k: corpora.encode_texts(tokenizer, list(corpus.documents[of][k].values())) for k in corpora.KINDS}
        return {k: draw_windows(row, n_tokens, options.window, options.seed, f"{of} {k}") for k, row in rows.items()}

    held_out, calibrating = windows("prompts", options.tokens), windows("calibration", options.calibration_tokens)
    calibration = calibrate(model, [b for text in calibrating.values() for b in batches(text)])
    listed = cases(calibration, options.ratios, options.first_predicted)
    n_batches = sum(len(list(batches(text))) for text in held_out.values())
    with Progress(n_batches * (1 + len(listed))) as progress:
        exact, outcomes = measure(model, held_out, listed, progress)
    found = rows(listed, exact, outcomes, options.seed)
    facts = {
        "checkpoint": name,
        "options": {k: v for k, v in vars(options).items() if k not in ("checkpoint", "out")},
        "corpus_sha256": corpus.sha256,
        "sensitivity": calibration.sensitivity.tolist(),
        "cosine_with_previous_input": calibration.cosine.tolist(),
        "gate_reuse_recall": calibration.reuse_recall.tolist(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    base = f"fidelity-{name}"
    files = {
        f"{base}.csv": render_records(found, Format.CSV).encode(),
        f"{base}.json": (json.dumps(facts, indent=1) + "\n").encode(),
    }
    files |= pictures(fidelity(pd.DataFrame(found), name), base)
    print(table(found), end="")
    print(*OutputFolder(Path(options.out), "fidelity", owned=False).put(files), sep=", ")


def _load(checkpoint: Path) -> tuple[Any, Tokenizer, corpora.Corpus]:
    if not (checkpoint / "model.safetensors").exists():
        raise InputError(f"{checkpoint}: expected a trained miniature, got no model.safetensors; train one first")
    try:
        model, tokenizer, training = load_checkpoint(checkpoint)
        corpus = corpora.read_corpus(corpora.standard_library(), int(training["seed"]))
        check_corpus(corpus, training)
    except (OSError, KeyError, ValueError) as error:
        raise InputError(f"{checkpoint}: {' '.join(str(error).split())}") from error
    return model, tokenizer, corpus


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python experiments/research/measure_fidelity.py",
        description="Execute DAOP's substitutions and stale inputs, AdapMoE's skips and deferral in a trained miniature, and "
        "compare the change of perplexity with the gate-mass fidelity.",
    )
    parser.add_argument("checkpoint", help="folder of a trained miniature")
    parser.add_argument("--out", required=True, help="folder of the CSV, the facts and the figure")
    parser.add_argument("--name", help="in titles and file names (default: the checkpoint folder's)")
    parser.add_argument("--tokens", type=int, default=20_480, help="held-out tokens of each kind (default: %(default)s)")
    parser.add_argument("--calibration-tokens", type=int, default=10_240, help="of each kind (default: %(default)s)")
    parser.add_argument("--window", type=int, default=256, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the windows and the bootstrap (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s; another number adds up in another order")
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS), help="cache ratios (default: %(default)s)")
    parser.add_argument(
        "--first-predicted",
        type=int,
        default=FIRST_PREDICTED,
        help="MoE layer from which on DAOP predicts; 1: all (default: %(default)s)",
    )
    return parser


def draw_windows(tokens: NDArray[np.int64], n_tokens: int, window: int, seed: int, what: str) -> Tensor:
    """Draw windows, in the order of the text, from all that follow each other in a row of tokens.

    Returns
    -------
    Tensor of int64, (n_tokens // window, window)

    Raises
    ------
    InputError
        If the text does not have that many, or a window has no token to predict.
    """
    n_wanted, n_there = n_tokens // window if window > 1 else 0, len(tokens) // max(window, 1)
    if not 1 <= n_wanted <= n_there:
        raise InputError(
            f"{what}: expected 1 to {n_there} windows of 2 or more tokens, got {n_tokens} tokens in windows of {window}; "
            "ask for another number of tokens or another window"
        )
    chosen = np.sort(np.random.default_rng(seed).choice(n_there, n_wanted, replace=False))
    return torch.from_numpy(tokens[: n_there * window].reshape(n_there, window)[chosen])


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Table of the rows over all text, in Markdown."""
    columns = ["what is done", "strength", "fidelity", "deferred", "executed", "perplexity", "95 %", "KL", "top-1", "nats / mass"]
    cells = []
    for row in (row for row in found if row["text"] == ALL):
        per_mass = row["nats_per_lost_mass"]
        cells.append(
            [
                row["series"],
                f"{row['strength']:g}",
                f"{row['fidelity_fresh']:.1%}",
                f"{row['deferred']:.1%}",
                f"{row['executed_fidelity_fresh']:.1%}",
                f"{row['change']:+.2%}",
                f"{row['change_low']:+.2%} .. {row['change_high']:+.2%}",
                f"{row['kl']:.4f}",
                f"{row['top1_agreement']:.1%}",
                "" if per_mass is None else f"{per_mass:.3f}",
            ]
        )
    return render(columns, cells, Format.MD, right=columns[1:])
