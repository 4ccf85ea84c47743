"""Prompts from a file, and the hashes that keep calibration and trace apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moesim.core.gate import JSON, decoded, lines
from moesim.recorder import RecordError

JSON_LINES = (".jsonl", ".ndjson")
MESSAGES = "messages"


@dataclass(frozen=True)
class PromptText:
    """A prompt as it stands in a file."""

    place: str  # file and line, for messages
    content: str | list[dict[str, str]]  # text, or the messages of a chat


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it."""

    place: str  # file and line, for messages
    tokens: tuple[int, ...]
    # text_sha256, tokens_sha256: of the text after the chat template, and of the tokens after they were cut
    text_sha256: str
    tokens_sha256: str


def file_sha256(path: str | Path) -> str:
    """sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokens_sha256(tokens: Iterable[int]) -> str:
    """sha256 of token ids as little-endian int64."""
    return hashlib.sha256(np.asarray(list(tokens), "<i8").tobytes()).hexdigest()


def read_prompts(
    path: str | Path, *, name: str = "prompt", whole_file: bool = False, limit: int | None = None
) -> list[PromptText]:
    """Read prompts from a text file (one a line, empty ones left out) or JSON Lines."""
    source = Path(path)
    lines_of_json = source.suffix.lower() in JSON_LINES
    if whole_file and lines_of_json:
        raise RecordError(f"{path}: expected a text file with --whole-file, got JSON Lines; leave the option out")
    found: list[PromptText] = []
    try:
        with open(source, "rb") as file:
            texts = [decoded(source, JSON)] if whole_file else (line.decode() for line in lines(file, JSON))
            for number, line in enumerate(texts, start=1):
                place = str(path) if whole_file else f"{path}:{number}"
                if line.strip():
                    text = line if whole_file else line.rstrip("\r\n")
                    found.append(PromptText(place, _from_json(line, place, name) if lines_of_json else text))
                if limit is not None and len(found) == limit:
                    break
    except FileNotFoundError:
        raise RecordError(f"{path}: expected a file of prompts, got nothing there; check the path") from None
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}; convert the file") from None
    except OSError as error:
        raise RecordError(f"{path}: expected a readable file of prompts, got: {error.strerror}") from None
    if not found:
        raise RecordError(f"{path}: expected at least one prompt, got an empty file")
    return found


def _from_json(line: str, place: str, name: str) -> str | list[dict[str, str]]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{place}: expected a JSON object, got: {error}") from None
    if not isinstance(entry, dict):
        raise RecordError(f"{place}: expected a JSON object, got {type(entry).__name__}")
    if name in entry:
        text = entry[name]
        if name == MESSAGES:
            return _messages(text, place)
        if not isinstance(text, str) or not text:
            raise RecordError(f"{place}: {name}: expected a text that is not empty, got {text!r}")
        return text
    if MESSAGES in entry:
        return _messages(entry[MESSAGES], place)
    raise RecordError(f"{place}: expected the field '{name}' or '{MESSAGES}', got {sorted(entry)}; name the field with --field")


def _messages(value: Any, place: str) -> list[dict[str, str]]:
    messages = value if isinstance(value, list) else []
    if not messages or not all(isinstance(m, dict) and _is_text(m.get("role")) and _is_text(m.get("content")) for m in messages):
        raise RecordError(f"{place}: {MESSAGES}: expected a list of objects with role and content, got {str(value)[:80]!r}")
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def tokenise(
    tokenizer: Any, texts: Sequence[PromptText], *, chat_template: bool = False, max_tokens: int | None = None
) -> list[Prompt]:
    """Turn prompts into tokens."""
    prompts = []
    for entry in texts:
        is_chat = isinstance(entry.content, list) or chat_template
        if is_chat:
            text = _rendered(tokenizer, entry)
        else:
            text = str(entry.content)
        # A template writes the special tokens itself.
        tokens = tuple(int(t) for t in tokenizer(text, add_special_tokens=not is_chat)["input_ids"])[:max_tokens]
        if not tokens:
            raise RecordError(f"{entry.place}: expected a prompt of at least one token, got none from {text[:40]!r}")
        prompts.append(Prompt(entry.place, tokens, hashlib.sha256(text.encode()).hexdigest(), tokens_sha256(tokens)))
    return prompts


def _rendered(tokenizer: Any, entry: PromptText) -> str:
    if not tokenizer.chat_template:
        raise RecordError(
            f"{entry.place}: expected a tokenizer with a chat template, got one without; use a chat model, or plain prompts"
        )
    content = entry.content
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def check_apart(prompts: Sequence[Prompt], calibration: Sequence[Prompt], listed: Sequence[dict[str, Any]], place: str) -> None:
    """Check that no prompt of a trace is one of its calibration."""
    others: dict[str, str] = {}
    for prompt in calibration:
        others |= dict.fromkeys((prompt.text_sha256, prompt.tokens_sha256), prompt.place)
    for number, request in enumerate(listed):
        hashes = [request[key] for key in ("text_sha256", "tokens_sha256") if key in request]
        if not hashes:
            raise RecordError(
                f"{place}: header.calibration_requests[{number}]: expected text_sha256 or tokens_sha256, got {sorted(request)}; "
                "without them nothing shows that the trace's requests are others: calibrate again"
            )
        others |= dict.fromkeys(hashes, f"{place}: calibration request {number}")
    for prompt in prompts:
        same = others.get(prompt.text_sha256) or others.get(prompt.tokens_sha256)
        if same is not None:
            raise RecordError(
                f"{prompt.place}: expected a prompt that is not among those of the calibration, got the one of {same}; "
                "calibrate with other requests"
            )
