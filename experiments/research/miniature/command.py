"""Train a miniature Mixture-of-Experts model and record its routing, on a CPU and without any download.

Usage::

    python experiments/research/train_miniature.py qwen3

The miniature has the routing shape of the model it is named after (layers, experts, top-k) and a small
fraction of its width. Its routing is real and learned; its weights are small, so costs must come from the
full model's spec.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from miniature import corpus as corpora
from miniature import training
from miniature.recorded import check_corpus, record_miniature
from miniature.shapes import SHAPES, VOCABULARY, new_model
from miniature.training import TrainingPlan, mean_loss
from moesim.core.files import OutputFolder
from moesim.core.text import say
from moesim.errors import InputError
from moesim.trace.format import is_trace

_COMMAND = "miniature"
_CHECKPOINT = ("config.json", "tokenizer.json", "training.json", "model.safetensors")

#: Tokens of each kind of text on which the held-out losses are computed; the same for the model and for the bigram.
HELD_OUT_TOKENS = 50_000


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python experiments/research/train_miniature.py``."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except InputError as error:
        say(f"error: {error}")
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    shape = SHAPES[options.model]
    checkpoint = Path(options.checkpoint or f"build/{shape.name}")
    out = Path(options.out or f"traces/{shape.name}.safetensors")
    if out.exists() and not is_trace(out):
        raise InputError(f"{out}: expected nothing there, or a trace, got another file; choose another --out")
    if options.train_further or not _is_trained(checkpoint):
        OutputFolder(checkpoint, _COMMAND, owned=False).check_free(_CHECKPOINT)
        torch.set_num_threads(options.threads)
        _train(options, checkpoint)
    if options.train_only:
        return
    torch.set_num_threads(1)  # one token at a time: threads cost more than they give, and one adds up in one order
    trace = record_miniature(*load_checkpoint(checkpoint), shape, seed=options.seed)
    trace.write(out, packed=True)
    print(f"{out}: {trace.n_rows} rows of {trace.n_requests} requests, {out.stat().st_size / 1e6:.1f} MB")


def load_checkpoint(folder: Path) -> tuple[PreTrainedModel, Tokenizer, dict[str, Any]]:
    """Read what `save_checkpoint` wrote: model, tokenizer and the facts of the training."""
    facts: dict[str, Any] = json.loads((folder / "training.json").read_text())
    model = new_model(AutoConfig.from_pretrained(folder))
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise ValueError(f"{folder}/model.safetensors: missing {missing}, unexpected {unexpected}; train again")
    model.tie_weights()
    model.train(False)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json")), facts


def save_checkpoint(folder: Path, model: PreTrainedModel, tokenizer: Tokenizer, facts: dict[str, Any]) -> None:
    """Save what `load_checkpoint` reads; the weights go last, so that a folder that has them is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.to_json_file(str(folder / "config.json"), use_diff=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, str(folder / "model.safetensors"))
    OutputFolder(folder, _COMMAND, owned=False).note(_CHECKPOINT)


def _is_trained(checkpoint: Path) -> bool:
    return (checkpoint / "model.safetensors").exists()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python experiments/research/train_miniature.py",
        description="Train a miniature MoE model on Python's standard library and record its routing.",
    )
    parser.add_argument("model", choices=sorted(SHAPES), help="whose routing shape to take")
    parser.add_argument("--out", help="trace to write (default: traces/ and the miniature's name)")
    parser.add_argument("--steps", type=int, default=TrainingPlan.steps, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="end the training after this long even if steps are left")
    parser.add_argument("--threads", type=int, default=2, help="threads of one worker (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each, if more than one")
    parser.add_argument(
        "--checkpoint",
        help="folder of the trained model; if it holds one, it is only recorded (default: build/ and the miniature's name)",
    )
    parser.add_argument("--hidden", type=int, help="width of the model (default: the miniature's, 128)")
    parser.add_argument("--expert-width", type=int, help="width of an expert (default: the miniature's)")
    default = TrainingPlan.batch_tokens
    parser.add_argument("--batch-tokens", type=int, default=default, help="tokens a step (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where to train: cpu or cuda (default: %(default)s)")
    parser.add_argument("--train-further", action="store_true", help="train what the checkpoint holds for --steps more")
    parser.add_argument("--train-only", action="store_true", help="train and save the checkpoint, record nothing")
    return parser


def _train(options: argparse.Namespace, checkpoint: Path) -> None:
    """Train (further), compare with the bigram, and save model, tokenizer and facts."""
    corpus = corpora.read_corpus(corpora.standard_library(), options.seed)
    stages: list[dict[str, Any]] = []
    shape = SHAPES[options.model]
    start: PreTrainedConfig | PreTrainedModel = shape.config(
        options.hidden or shape.hidden, options.expert_width or shape.expert_width
    )
    if _is_trained(checkpoint):
        start, tokenizer, before = load_checkpoint(checkpoint)
        stages = before["stages"]
        check_corpus(corpus, before)
    else:
        tokenizer = corpora.train_tokenizer(corpus, VOCABULARY)
    tokens = {name: corpora.encode_texts(tokenizer, corpus.texts(name)) for name in corpora.SETS}
    print(", ".join(f"{name}: {len(row)} tokens" for name, row in tokens.items()))
    held_out = {
        kind: corpora.encode_texts(tokenizer, list(corpus.documents["prompts"][kind].values()))[:HELD_OUT_TOKENS]
        for kind in corpora.KINDS
    }
    bigram = {kind: corpora.bigram_loss(tokens["train"], row, VOCABULARY) for kind, row in held_out.items()}
    print("bigram, held-out, nats a token:", bigram, flush=True)
    # Each stage draws its own batches; long sequences come late in the first one, all through later ones.
    plan = TrainingPlan(steps=options.steps, seed=options.seed + 1000 * len(stages), minutes=options.minutes)
    plan = replace(plan, workers=options.workers, batch_tokens=options.batch_tokens, device=options.device)
    plan = replace(plan, long_from=0.0) if stages else plan
    model, stage = training.train(start, tokens["train"], plan, _Report(plan))
    facts = {
        "seed": options.seed,
        "stages": [*stages, stage],
        "parameters": sum(p.numel() for p in model.parameters()),
        "held_out_loss": {kind: round(mean_loss(model, row, 256, len(row)), 4) for kind, row in held_out.items()},
        "held_out_loss_1152": {kind: round(mean_loss(model, row, 1152, len(row)), 4) for kind, row in held_out.items()},
        "held_out_loss_bigram": {kind: round(loss, 4) for kind, loss in bigram.items()},
        "chance_loss": round(float(np.log(VOCABULARY)), 4),
        "corpus_sha256": corpus.sha256,
        "corpus_tokens": {name: len(row) for name, row in tokens.items()},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(facts, indent=1))
    save_checkpoint(checkpoint, model, tokenizer, facts)


class _Report:
    """Progress bar on a terminal, a line every 20 steps elsewhere."""

    def __init__(self, plan: TrainingPlan) -> None:
        self._steps = plan.steps
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} loss {task.fields[loss]:.3f} {task.fields[speed]:.0f} tokens/s"),
            TimeRemainingColumn(),
            disable=not sys.stdout.isatty(),
        )
        self._task = self._bar.add_task("training", total=plan.steps, loss=float("nan"), speed=0.0)
        self._smooth = float("nan")

    def __call__(self, progress: training.Progress) -> None:
        is_first = self._smooth != self._smooth
        self._smooth = progress.loss if is_first else 0.95 * self._smooth + 0.05 * progress.loss
        if is_first:
            self._bar.start()
        self._bar.update(self._task, completed=progress.step, loss=self._smooth, speed=progress.tokens_per_s)
        if self._bar.disable and progress.step % 20 == 0:
            print(
                f"step {progress.step}/{self._steps} ({progress.fraction:.0%}) loss {self._smooth:.3f} "
                f"busiest/uniform {progress.imbalance:.2f} {progress.tokens_per_s:.0f} tokens/s",
                flush=True,
            )
        if progress.step == self._steps:
            self._bar.stop()
