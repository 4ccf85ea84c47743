"""What a wheel must not hold, and what the Makefile must watch: both were wrong without a sign of it."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "moesim/engine/native"


def test_an_extension_module_built_in_the_checkout_stays_out_of_wheels() -> None:
    """It is of one Python and one platform. What git ignores is left out, unless a list of what to include brings it in."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert "include" not in settings.get("sdist", {})
    for name in ("_native.cpython-311-x86_64-linux-gnu.so", "_native.cp311-win_amd64.pyd"):
        assert any(fnmatch(name, pattern) for pattern in ignored)


def test_the_makefile_watches_every_native_source() -> None:
    (patterns,) = re.findall(r"^NATIVE := \S+ \$\(wildcard (.*)\)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    watched = {path for pattern in patterns.split() for path in ROOT.glob(pattern)}
    assert watched == {path for path in NATIVE.rglob("*") if path.suffix in (".cpp", ".hpp", ".h", ".c", ".cc")} != set()


def test_wheels_of_cibuildwheel_have_the_native_engine() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    for place in (settings, settings["macos"], settings["linux"]):
        assert place.get("environment", settings["environment"])["MOESIM_NATIVE"] == "1"
    assert "--engine native" in settings["test-command"]
