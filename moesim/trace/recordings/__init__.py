"""Public routing of real models, what it lacks, and the command that makes a trace of it.

Entries of `recordings.yaml` say what the publisher states, or what was counted in the file.
"""

from __future__ import annotations

from importlib import resources
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StringConstraints, model_validator

from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, unknown_name

Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Lack = Literal["tokens", "weights", "scores", "prompt routing", "prompt texts"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Shape(_Part):
    """Of the routing."""

    layers: PositiveInt  # with experts
    experts: PositiveInt
    top_k: PositiveInt


class Size(_Part):
    """How much was recorded; a prompt without routing has no tokens here."""

    requests: PositiveInt
    prompt_tokens: Annotated[int, Field(ge=0)]
    decode_tokens: Annotated[int, Field(ge=0)]


class Entry(_Part):
    """A public recording; None: not stated."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,13}$")]
    # routing: the experts of each token; counts: how often experts were used; figures: statistics only
    kind: Literal["routing", "counts", "figures"]
    models: list[Text]  # empty: not stated
    repository: Text | None
    revision: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{7,40}$")] | None
    licence: Text | None
    files: Text | None
    bytes: PositiveInt | None  # of the file
    shape: Shape | None
    size: Size | None
    lacks: Annotated[list[Lack], Field(min_length=1)]  # `tokens` stands for all of them
    note: Text
    format: Text | None  # of `moesim trace import`
    command: Text | None  # makes a trace: of the recording, or of what there is instead

    @model_validator(mode="after")
    def _check(self) -> Self:
        routed = self.kind == "routing"
        imports = self.command is not None and self.command.startswith("moesim trace import ")
        if not routed == imports == (self.format is not None) == (self.size is not None) == ("tokens" not in self.lacks):
            raise ValueError("routing has a format, a size, tokens and a command that imports it; all else has none of these")
        if routed and None in (self.repository, self.revision, self.licence, self.files, self.shape):
            raise ValueError("routing has a repository, a revision, a licence, files and a shape")
        if len(set(self.lacks)) < len(self.lacks):
            raise ValueError("each lack is named once")
        return self


def recordings() -> dict[str, Entry]:
    """Read all entries, by name."""
    text = resources.files(__name__).joinpath("recordings.yaml").read_text(encoding="utf-8")
    entries = [Entry.model_validate(raw) for raw in read_yaml_value(text, "recordings.yaml")]
    return {entry.name: entry for entry in entries}


def find_entry(name: str) -> Entry:
    """Find an entry by its name."""
    known = recordings()
    if name not in known:
        raise ConfigError(unknown_name("recording", name, known))
    return known[name]
