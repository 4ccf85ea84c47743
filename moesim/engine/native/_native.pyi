from types import ModuleType
from typing import Any

from moesim.engine.setup import Placed
from moesim.engine.state import State
from moesim.policy import View
from moesim.records import Records

metrics: ModuleType

class Engine:
    def connect(self, twin: State) -> View: ...
    def run(self, records: Records, copies: list[Placed], composed: dict[str, Any] | None) -> None: ...
    def close(self) -> None: ...
