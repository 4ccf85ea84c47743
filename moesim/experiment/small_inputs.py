"""The small inputs of an experiment, which its result keeps, so that it is read where they are not; traces are too large."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from moesim.core.manifest import read_verified
from moesim.errors import ConfigError, InputError
from moesim.model import ModelSpec

INPUTS: Final = "inputs.json"


@dataclass(frozen=True)
class SmallInputs:
    """Models, and the content of files, by what the experiment knows them by."""

    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)  # of machines and of parameters of synthetic routing, as they stand

    def to_bytes(self) -> bytes:
        """Write them; the same inputs give the same bytes."""
        models = {key: asdict(model) for key, model in self.models.items()}
        return (json.dumps({"models": models, "files": self.texts}, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> SmallInputs:
        """Read them from a result folder; none from one of a version that did not keep them."""
        path = folder / INPUTS
        try:
            found: Any = json.loads(read_verified(path))
            texts = {str(key): _text(value) for key, value in found["files"].items()}
            return cls({str(key): _model(fields) for key, fields in found["models"].items()}, texts)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, InputError) as error:
            said = " ".join(str(error).split())
            raise ConfigError(f"{path}: expected the inputs of a result, got: {said}; run the experiment again") from None


def _model(fields: Mapping[str, Any]) -> ModelSpec:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return ModelSpec(**values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"no text of a file, but {value!r}"[:80])
    return value
