"""The report in a headless browser: what only a browser can tell.

It needs Playwright and a browser: the one that MOESIM_BROWSER names, else one on the path, else Playwright's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesim.reporting import read_folder, report_page
from tests.browsers import browser as browser  # the fixture
from tests.report.report_kit import POLICIES, events_of, failed, rows_of, write_folder
from tests.waiting import HANG_S, wait_until

pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")

N_RUNS = 250
N_FAILED = 2
COLOURS = {"GPU experts": (0x56, 0xB4, 0xE9), "demand fetch": (0xD5, 0x5E, 0x00)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of 250 runs, the last two of which failed, with three policies in the timeline."""
    place = tmp_path_factory.mktemp("browser")
    rows = rows_of(N_RUNS - N_FAILED)
    rows += [failed(len(rows) + i, "prescope", "no <memory>", batch_size=999) for i in range(N_FAILED)]
    written = place / "report.html"
    written.write_text(report_page(read_folder(write_folder(place / "result", rows, events_of(per_step=40)))), encoding="utf-8")
    return written


class Watched:
    """Opens pages, and notes everything that a page should not do."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.wrong: list[str] = []

    def open(self, file: Path, **options: Any) -> Any:
        context = self.browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(1000 * HANG_S)
        page = context.new_page()
        page.on("console", lambda message: self.wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("request", lambda request: self._requested(request.url, file))
        page.goto(file.as_uri())
        return page

    def _requested(self, url: str, file: Path) -> None:
        if not url.startswith("data:") and url.partition("#")[0] != file.as_uri():
            self.wrong.append(f"request: {url}")


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    watch = Watched(browser)
    yield watch
    for context in browser.contexts:
        context.close()
    assert watch.wrong == []


def visible_rows(page: Any) -> Any:
    return page.locator("#runs tbody tr:visible")


def column(page: Any, heading: str) -> list[str]:
    headings = [text.strip() for text in page.locator("#runs thead th").all_inner_texts()]
    at = headings.index(heading)
    found: list[str] = page.evaluate(
        "at => [...document.querySelectorAll('#runs tbody tr:not([hidden])')].map(row => row.cells[at]?.textContent ?? '')", at
    )
    return found


def settled(page: Any) -> None:
    """Wait until what was asked for has been drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def to_timeline(page: Any) -> Any:
    page.evaluate("document.getElementById('timeline').scrollIntoView()")
    canvas = page.locator(".run canvas").first
    wait_until(lambda: drawn(canvas) > 0, "a drawing")  # the page's security policy keeps Playwright from waiting in the page
    return canvas


def pixels(canvas: Any) -> dict[tuple[int, int, int], int]:
    """Count the pixels of a canvas by colour."""
    flat: list[int] = canvas.evaluate(
        """one => {
          const pen = new OffscreenCanvas(one.width, one.height).getContext('2d', { willReadFrequently: true });
          pen.drawImage(one, 0, 0);
          return [...new Uint32Array(pen.getImageData(0, 0, one.width, one.height).data.buffer)];
        }"""
    )
    found: dict[tuple[int, int, int], int] = {}
    for value in flat:
        colour = (value & 255, value >> 8 & 255, value >> 16 & 255)
        found[colour] = found.get(colour, 0) + 1
    return found


def drawn(canvas: Any) -> int:
    settled(canvas.page)
    return int(canvas.get_attribute("data-drawn") or 0)


def test_rows_are_there_and_paged(watched: Watched, file: Path):
    page = watched.open(file)
    assert page.locator("#runs tbody tr").count() == N_RUNS
    assert visible_rows(page).count() == 100
    assert page.locator("#results [role=status]").inner_text() == "runs 1 to 100 of 250"
    page.get_by_role("button", name="next").click()
    page.get_by_role("button", name="next").click()
    assert visible_rows(page).count() == 50
    assert page.get_by_role("button", name="next").is_disabled()
    assert column(page, "policy")[-1] == "prescope"


def test_sorting_both_ways_with_failed_runs_last(watched: Watched, file: Path):
    page = watched.open(file)
    speed = page.get_by_role("button", name="decode tok/s")
    before = column(page, "decode tok/s")
    speed.click()
    rising = [float(text) for text in column(page, "decode tok/s")]
    assert rising == sorted(rising)
    assert [str(value) for value in rising] != before
    assert page.locator("th[aria-sort=ascending]").inner_text().strip() == "decode tok/s"
    speed.click()
    falling = [float(text) for text in column(page, "decode tok/s")]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > rising[0]
    page.get_by_role("button", name="next").click()
    page.get_by_role("button", name="next").click()
    assert column(page, "policy")[-2:] == ["prescope"] * N_FAILED


def test_a_long_table_of_notes_is_filtered_and_sorted_and_a_short_one_of_inputs_sorted(watched: Watched, tmp_path: Path):
    rows = rows_of(7)
    for number, row in enumerate(rows):
        row["notes"] = f"note {number}"
    written = tmp_path / "report.html"
    written.write_text(report_page(read_folder(write_folder(tmp_path / "result", rows))), encoding="utf-8")
    page = watched.open(written)
    notes = page.locator("#notes tbody tr:visible")
    page.locator("#notes thead button").first.dblclick()
    assert notes.first.inner_text().startswith("note 6")
    page.get_by_label("Filter the notes by words").fill("NOTE 3")
    assert notes.count() == 1 and notes.inner_text().startswith("note 3")
    assert page.locator("#notes [role=status]").inner_text() == "1 note (7 in all)"
    assert page.locator("#what").get_by_role("searchbox").count() == 0
    page.locator("#what thead button").first.click()
    assert page.locator("#what th[aria-sort=ascending]").count() == 1


def test_filter(watched: Watched, file: Path):
    page = watched.open(file)
    box = page.get_by_role("searchbox")
    box.fill("PRESCOPE memory")
    assert visible_rows(page).count() == N_FAILED
    assert page.locator("#results [role=status]").inner_text() == "2 runs (250 in all)"
    assert "failed: no <memory>" in visible_rows(page).first.inner_text()
    box.fill("lru prescope")
    assert visible_rows(page).count() == 0
    box.fill("")
    assert visible_rows(page).count() == 100


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_the_filter_finds_what_a_person_types(watched: Watched, file: Path, size: tuple[int, int]):
    page = watched.open(file, viewport={"width": size[0], "height": size[1]})
    box = page.get_by_role("searchbox")
    for typed, found in (("batch 8", ["lru", "dali", "daop"]), ("dali batch 8", ["dali"]), ("batch_size=80 lru", ["lru"])):
        box.fill(typed)
        assert [name.split()[0] for name in column(page, "policy")] == found, typed
    box.fill("dali")
    assert page.locator("#results [role=status]").inner_text() == "83 runs (250 in all)"
    box.fill("failed")
    assert visible_rows(page).count() == N_FAILED


def test_the_filter_and_the_order_need_a_keyboard_alone(watched: Watched, file: Path):
    page = watched.open(file)
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.type") == "search":
            break
    page.keyboard.type("lru batch 8")
    assert visible_rows(page).count() == 1
    page.keyboard.press("Control+A")
    page.keyboard.type("dali")
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "decode tok/s":
            break
    page.keyboard.press("Enter")
    page.keyboard.press("Space")
    falling = [float(text) for text in column(page, "decode tok/s")]
    assert falling == sorted(falling, reverse=True) and falling[0] > falling[-1]


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_the_answer_and_its_figure_come_first_and_hashes_last(watched: Watched, file: Path, size: tuple[int, int]):
    page = watched.open(file, viewport={"width": size[0], "height": size[1]})
    order = page.evaluate(
        "[...document.querySelectorAll('h1, .sentence, img, #runs, #tl, code')].map(one => one.id || one.tagName)"
    )
    assert list(dict.fromkeys(order)) == ["H1", "P", "IMG", "runs", "tl", "CODE"]
    sentence = page.locator(".sentence")
    assert sentence.inner_text().startswith("dali decodes fastest in ")
    box = sentence.bounding_box()
    assert box["y"] + box["height"] < size[1]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("n", [0, 1])
def test_one_run_or_one_that_failed_needs_no_script_error(watched: Watched, tmp_path: Path, n: int):
    rows = rows_of(1) if n else [failed(0, "lru", "no memory")]
    written = tmp_path / "report.html"
    written.write_text(report_page(read_folder(write_folder(tmp_path / "result", rows))), encoding="utf-8")
    page = watched.open(written)
    assert page.locator(".sentence").inner_text() == ("lru decodes 10 tokens/s." if n else "The run failed: no memory.")
    assert page.locator("#results [role=status]").inner_text() == "1 run"


def test_timeline_draws_in_the_colours_of_the_causes(watched: Watched, file: Path):
    page = watched.open(file)
    canvas = to_timeline(page)
    assert page.locator(".run h3").all_inner_texts() == list(POLICIES)
    found = pixels(canvas)
    page.get_by_role("button", name="Line up at decode 1").click()
    settled(page)
    closer = pixels(canvas)
    for colour in COLOURS.values():
        assert closer.get(colour, 0) > 500, closer
    assert found != closer


def test_wheel_zooms_and_less_is_drawn(watched: Watched, file: Path):
    page = watched.open(file)
    canvas = to_timeline(page)
    all_slices, before = drawn(canvas), pixels(canvas)
    assert all_slices == 3 + 3 * 3 * 40
    box = canvas.bounding_box()
    top = page.evaluate("scrollY")
    page.mouse.move(box["x"] + 50, box["y"] + 30)
    for _ in range(8):
        page.mouse.wheel(0, -400)
    wait_until(lambda: drawn(canvas) < all_slices / 4, "a closer view")
    assert pixels(canvas) != before
    assert page.evaluate("scrollY") == top  # the page stays where it is
    few = drawn(canvas)
    other = page.locator(".run canvas").nth(1)
    assert drawn(other) < all_slices / 4  # all runs zoom together
    for _ in range(20):
        page.get_by_role("button", name="Zoom out").click()
    assert drawn(canvas) == all_slices > few


def test_resting_on_a_slice_says_what_it_is(watched: Watched, file: Path):
    page = watched.open(file)
    canvas = to_timeline(page)
    page.get_by_role("button", name="Line up at decode 1").click()
    settled(page)
    box = canvas.bounding_box()
    scale = box["width"] / (1.04 * 3000)  # a step takes lru 1000, dali 2000 and daop 3000 us, and the longest fits
    in_third_run_of_gpu = 0.02 * 3000 + (2 + 0.7) * 25
    page.mouse.move(box["x"] + in_third_run_of_gpu * scale, box["y"] + 2 * 20 + 8)
    tip = page.get_by_role("tooltip")
    text = tip.inner_text()
    assert text.splitlines() == [
        "L2/E2 on gpu0", "GPU experts", "layer 2, expert 2, decode 1", "10 µs from 62.5 µs on", "3 rows",
        "asked for 12.5 µs earlier",
    ]  # fmt: skip
    page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_keys(watched: Watched, file: Path):
    page = watched.open(file)
    canvas = to_timeline(page)
    everything = drawn(canvas)
    canvas.focus()
    page.keyboard.press("PageDown")
    assert page.locator("button[aria-pressed=true]").inner_text() == "prefill 0"
    page.keyboard.press("PageDown")
    assert page.locator("button[aria-pressed=true]").inner_text() == "decode 1"
    some = drawn(canvas)
    page.keyboard.press("+")
    assert drawn(canvas) < some < everything
    before = pixels(canvas)
    page.keyboard.press("ArrowRight")
    settled(page)
    assert pixels(canvas) != before
    page.keyboard.press("0")
    assert drawn(canvas) == everything
    page.keyboard.press(".")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "."):
        page.keyboard.press(key)
    said = page.locator("[aria-live]").inner_text()
    assert said.startswith("demand L")
    assert "demand fetch" in said
    assert "88.08 MB" in said
    assert page.get_by_role("tooltip").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("tooltip").is_visible()


def test_without_javascript_everything_but_the_timeline_is_there(watched: Watched, file: Path):
    page = watched.open(file, java_script_enabled=False)
    assert visible_rows(page).count() == N_RUNS
    assert page.locator("img").first.is_visible()
    assert "drawn by JavaScript" in page.locator("#timeline").inner_text()
    assert page.locator("canvas").count() == 0
