"""Run pytest in forks of this process, which has imported what takes long: a job a line as JSON, its exit code a line."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

LIBRARIES = (
    "numpy", "pandas", "scipy.optimize", "scipy.stats", "pyarrow.parquet", "pydantic", "yaml", "simpy", "typer", "rich.table",
    "jinja2", "matplotlib.pyplot", "cachetools", "safetensors",
)  # fmt: skip


def run(arguments: list[str], cpu_s: int, n_bytes: int) -> NoReturn:
    """Run pytest under limits, in silence, as this process."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
    signal.alarm(20 * cpu_s)  # for what waits and computes nothing
    code = 1
    try:
        import pytest

        code = int(pytest.main(arguments))
    finally:
        os._exit(code)


def main() -> None:
    """Serve until there are no more jobs."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        if (child := os.fork()) == 0:
            run(**job)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
