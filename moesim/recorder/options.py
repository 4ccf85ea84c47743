"""Options of a recording, and what they say about each other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moesim.recorder.errors import RecordError
from moesim.recorder.loading import LoadOptions
from moesim.recorder.predictors.quantise import KINDS
from moesim.recorder.predictors.shadow import Alignment

_SHADOW = re.compile(r"(?P<kind>\w+?)(:T(?P<token>\d+):KV(?P<kv>\d+))?")


@dataclass(frozen=True)
class RecordOptions:
    """What to record, as asked for on the command line.

    Attributes
    ----------
    load : LoadOptions
        Which model, and how.
    prompts, out : Path
        File to read, file to write.
    name : str or None
        Of the model in the trace; None: the last part of the model's path or name.
    """

    load: LoadOptions
    prompts: Path
    out: Path
    name: str | None = None
    prompt_field: str = "prompt"
    whole_file: bool = False
    chat_template: bool = False
    limit: int | None = None
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 1
    scores: bool | None = None
    lookahead: int = 3
    signal_requests: int | None = None
    input_requests: int | None = 0
    embeddings: bool = False
    calibrate: Path | None = None
    calibration: Path | None = None
    shadows: tuple[str, ...] = ()
    overwrite: bool = False
    progress: bool = True
    warn: Callable[[str], None] = field(default=lambda text: None)

    def check(self) -> None:
        """Check what options say about each other.

        Raises
        ------
        RecordError
            With the first conflict.
        """
        self.load.check()
        if len({read_shadow(text) for text in self.shadows}) != len(self.shadows):
            raise RecordError(f"--shadow: expected each once, got {', '.join(self.shadows)}")
        if self.calibrate is not None and self.calibration is not None:
            raise RecordError("--calibrate and --calibration: expected one of them, got both")
        if self.temperature < 0 or not np.isfinite(self.temperature):
            raise RecordError(f"--temperature: expected 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise RecordError(f"--top-p: expected a share above 0, at most 1, got {self.top_p}")
        if self.top_p < 1 and self.temperature == 0:
            raise RecordError("--top-p: expected a --temperature above 0 with it, got greedy decoding")
        self._check_streaming()
        if self.out.suffix != ".safetensors":
            raise RecordError(f"{self.out}: expected a name that ends in .safetensors")
        if self.out.is_dir():
            raise RecordError(f"{self.out}: expected a file to write, got a folder")

    def _check_streaming(self) -> None:
        """With --stream-layers nothing is generated, and texts go through a layer one at a time."""
        others = {
            "--load-in-4bit": self.load.bits == 4,
            "--load-in-8bit": self.load.bits == 8,
            "--temperature": self.temperature != 0,
            "--seed": self.seed != 0,
            "--ignore-eos": self.ignore_eos,
            "--batch-size": self.batch_size != 1,
            "--shadow": bool(self.shadows),
            "--calibrate": self.calibrate is not None,
        }
        given = next((option for option, is_given in others.items() if is_given), None)
        if self.load.stream_layers and given is not None:
            raise RecordError(f"{given}: expected none with --stream-layers, which generates nothing; leave one of them out")


def read_shadow(text: str) -> tuple[str, Alignment]:
    """Read a shadow's name, such as ``int8``, ``nf4:T1:KV4`` or ``int8:T0:KV0`` (never aligned)."""
    found = _SHADOW.fullmatch(text)
    if found is None or found["kind"] not in KINDS:
        raise RecordError(f"--shadow: expected one of {', '.join(KINDS)}, with or without :T1:KV1, got '{text}'")
    return found["kind"], Alignment(int(found["token"] or 1), int(found["kv"] or 1))


def request_seed(seed: int, stream: int, number: int) -> int:
    """Seed of one request's sampling, whatever else is in its batch."""
    return int(np.random.SeedSequence([seed, stream, number]).generate_state(1, np.uint64)[0] >> np.uint64(1))
