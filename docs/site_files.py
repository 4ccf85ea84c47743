"""Brings pages from outside of docs/ into the site, and turns links between files of the repository into links of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?((?:\s[^)]*)?\))")


def site_path(path: str) -> str:
    """Say where a file of the repository stands in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def linked(path: str) -> list[str]:
    """Name the files of the repository that a page links to."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1])) for match in LINK.findall(text)]


def pages() -> dict[str, str]:
    """Give all files of the site that lie outside of docs/, by their place in the site."""
    found, todo = {}, ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
    seen = set(todo)
    while todo:
        path = todo.pop()
        if not path.startswith("docs/"):
            found[site_path(path)] = path
        for target in linked(path) if path.endswith(".md") else []:
            if target not in seen and (ROOT / target).is_file():
                seen.add(target)
                todo.append(target)
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside."""
    for place, path in pages().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links for the site; a page that a hook has made has none."""
    if page.file.abs_src_path is None:
        return markdown
    here = Path(page.file.abs_src_path).resolve().relative_to(ROOT).as_posix()

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[2]))
        if not (ROOT / target).is_file():
            return match[0]
        place = posixpath.relpath(site_path(target), posixpath.dirname(site_path(here)) or ".")
        return f"{match[1]}{place}{match[3] or ''}{match[4]}"

    return LINK.sub(moved, markdown)
