"""What is identified of each paper's platform: free constants, blocks of rows that are left out together, readings that count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moesim.core.gate import YAML, read_text
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError
from moesim.studies.papers.published import Published

NAME = "_identify.yaml"


class Plan(BaseModel):
    """What is identified of a paper's platform; see ``experiments/papers/_identify.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    paper: str = ""
    hardware: str
    start: dict[str, Any] = Field(default_factory=dict)
    free: list[str] = Field(default_factory=list)
    more: dict[str, list[str]] = Field(default_factory=dict)
    bits: dict[str, list[float]] = Field(default_factory=dict)
    decode_tokens: int | None = Field(default=None, ge=1)
    lengths: dict[str, int] = Field(default_factory=dict)
    spread: float = Field(default=0.1, gt=0)
    readings: list[str] = Field(default_factory=list)
    blocks: list[str] = Field(min_length=2)
    told_by: str | None = None

    def block_of(self, row: Published) -> str | None:
        """Find the block of a row: a figure, or a figure and what its setting, quantity or runs are; None if it takes no part."""
        if row.source != "runs" or row.kind not in ("value", "speedup", "gain"):
            return None
        told = (row.quantity, row.setting, row.system, row.kind, *row.where.split(";"))
        for block in self.blocks:
            figure, _, parts = block.partition(":")
            if row.figure == figure and all(part in told for part in parts.split(";") if part):
                return block
        return None

    def counts(self, row: Published) -> bool:
        """Say whether a row may tell constants: of a number that can be read in several ways, only in a reading that is named."""
        return not row.reading or row.reading in self.readings

    def telling(self, out: str) -> list[str]:
        """List the blocks that tell the constants which answer a block; for ``""`` the block that tells alone, or all."""
        return [self.told_by] if self.told_by else [block for block in self.blocks if block != out]


def read_plans(folder: Path) -> dict[str, Plan]:
    """Read what is identified of which paper; `Plan.paper` is always given. Raises `ConfigError`."""
    path = folder / NAME
    raw = read_yaml_value(read_text(path, YAML, "what is identified of papers"), str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected papers with what is identified of them, got {type(raw).__name__}")
    found = {}
    for name, plan in raw.items():
        try:
            found[name] = Plan.model_validate({"paper": name, **plan})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (name, *first["loc"])))
            raise ConfigError(f"{path}: {where}: {first['msg'].lower()}, got {first['input']!r}; correct it") from None
    return found
