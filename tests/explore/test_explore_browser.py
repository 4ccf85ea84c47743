"""The page of ``moesim explore`` in a headless browser: what a person does with it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import yaml

import moesim
from tests.browsers import browser as browser  # the fixture
from tests.waiting import HANG_S, wait_until

pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
pytest.importorskip("nicegui", reason="needs NiceGUI: pip install nicegui")

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explore") / "result"
    moesim.compare(
        ["lru", "fiddler"], trace="mini-mixtral", batch=[1, 8], cache=0.25, prompt=4, decode=2, out=folder, jobs=1, progress=False
    )
    return folder


@pytest.fixture(scope="module")
def server(result: Path) -> Iterator[str]:
    """The address of a server, which Ctrl-C ends without a traceback."""
    command = [sys.executable, "-m", "moesim", "explore", str(result), "--port", "0", "--no-browser"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", first)
        assert found is not None, first + process.stderr.read()
        yield found[0]
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() in ("", "moesim: interrupted\n")
        assert process.wait() in (0, 130)


class Visit:
    """A person's visit, and everything that a page should not do."""

    def __init__(self, browser: Any, server: str, size: dict[str, int]) -> None:
        self.wrong: list[str] = []
        self.context = browser.new_context(viewport=size, permissions=["clipboard-read", "clipboard-write"])
        self.context.set_default_timeout(1000 * HANG_S)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.wrong.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("request", lambda request: self._requested(request.url, server))
        self.page.goto(server)
        self.speed_after("")

    def _requested(self, url: str, server: str) -> None:
        if not url.startswith((server, server.replace("http", "ws"), "data:", "blob:")):
            self.wrong.append(f"request: {url}")

    def speed_after(self, before: str) -> str:
        """Wait for another speed than the one before."""
        wait_until(lambda: self.shown() not in ("", before), f"a speed other than {before}")
        return self.shown()

    def copied(self, button: str) -> str:
        """Press a button that copies, and wait for what it copies."""
        self.page.evaluate("navigator.clipboard.writeText('')")
        self.page.get_by_role("button", name=button).click()
        wait_until(lambda: self.page.evaluate("navigator.clipboard.readText()") != "", f"something that {button} copied")
        return str(self.page.evaluate("navigator.clipboard.readText()"))

    def shown(self) -> str:
        """Return the speed on the page; empty while there is none."""
        found = self.page.locator("[data-speed]").all_inner_texts()
        return str(found[0]) if found else ""

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()

    def choose(self, label: str, text: str) -> None:
        """Type to filter, and take the first."""
        field = self.page.get_by_label(label, exact=True)
        field.click()
        field.fill(text)
        self.page.get_by_role("option", name=text, exact=True).click()

    def end(self) -> None:
        self.context.close()
        assert self.wrong == []


@pytest.fixture
def visit(browser: Any, server: str) -> Iterator[Visit]:
    one = Visit(browser, server, DESKTOP)
    yield one
    one.end()


PLACES_OF_TABS = """() => {
    window.places = []
    const look = () => {
        const y = Math.round(document.querySelector('[role=tab]').getBoundingClientRect().y + window.scrollY)
        if (!window.places.includes(y)) window.places.push(y)
        requestAnimationFrame(look)
    }
    look()
}"""
"""Collects where the tabs have been since."""


def test_a_person_chooses_a_model_and_moves_a_slider(visit: Visit):
    first = visit.shown()
    visit.choose("Model", "gpt-oss-20b")
    second = visit.speed_after(first)
    visit.page.evaluate(PLACES_OF_TABS)
    slider = visit.page.get_by_role("slider", name="--n-cpu-moe")
    slider.focus()
    visit.page.keyboard.press("End")
    assert float(visit.speed_after(second)) < float(second)
    assert len(visit.page.evaluate("window.places")) == 1, "a click on what moved would be lost"
    assert "All experts on the CPU" in visit.page.locator(".answer").inner_text()


@pytest.mark.parametrize("key", ["Enter", "Tab"])
def test_a_model_that_is_typed_is_taken(visit: Visit, key: str):
    first = visit.shown()
    for text in ("gpt-oss-20b", "gpt-oss-21b"):
        visit.page.get_by_label("Model", exact=True).fill(text)
        visit.page.keyboard.press(key)
        if text == "gpt-oss-20b":
            visit.speed_after(first)
            assert visit.page.get_by_label("Bits per weight", exact=True).input_value() == "MXFP4"
    hint = visit.page.locator(".misfit", has_text="Unknown model 'gpt-oss-21b'")
    assert "did you mean 'gpt-oss-20b'?" in hint.inner_text()
    assert visit.page.get_by_label("Model", exact=True).input_value() == "gpt-oss-21b"


def test_a_wrong_text_leaves_no_older_numbers(visit: Visit):
    visit.tab("What takes the time")
    visit.page.locator(".lane").first.wait_for()
    visit.page.get_by_label("RAM", exact=True).fill("64GBB")
    visit.page.locator(".misfit", has_text="got '64GBB'").wait_for()
    visit.page.locator(".lane").first.wait_for(state="detached")
    assert visit.shown() == ""
    assert visit.page.locator(".bar").count() == 0


def test_what_is_copied_gives_the_number_on_the_screen(visit: Visit, tmp_path: Path):
    shown = visit.speed_after("")
    visit.tab("Command, YAML, Python")
    file = tmp_path / "explore.yaml"
    file.write_text(visit.copied("Copy YAML"), encoding="utf-8")
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["policies"][0]["name"] == "llama-cpp"
    (row,) = moesim.run(file, progress=False).rows
    assert f"{row['decode_tokens_per_s']:.3g}" == f"{float(shown):.3g}"
    values: dict[str, Any] = {}
    exec(visit.copied("Copy Python"), values)
    assert values["result"].rows[0]["decode_tokens_per_s"] == row["decode_tokens_per_s"]


def test_what_does_not_fit_says_why_and_another_setting_brings_the_speed_back(visit: Visit):
    before = visit.shown()
    visit.page.get_by_role("slider", name="--n-cpu-moe").focus()
    visit.page.keyboard.press("Home")
    visit.page.get_by_text("loading would fail").wait_for()
    visit.page.get_by_role("button", name="best that fits").click()
    assert visit.speed_after("") == before


def test_tabs_show_timeline_curve_and_upgrades(visit: Visit):
    visit.tab("What takes the time")
    visit.page.locator(".lane svg rect").first.wait_for()
    visit.tab("--n-cpu-moe")
    visit.page.locator("canvas").wait_for()
    visit.tab("Upgrades")
    visit.page.get_by_label("What if").fill("gpu rtx 3090")
    visit.page.keyboard.press("Enter")
    visit.page.get_by_role("rowheader", name="gpu rtx 3090").wait_for()


def test_upgrades_show_which_makes_a_model_fit(visit: Visit):
    visit.page.get_by_label("RAM", exact=True).fill("32GB")
    visit.tab("Upgrades")
    visit.choose("Model", "gpt-oss-120b")
    visit.page.locator(".misfit", has_text="it fits with 64 GiB of RAM").wait_for()
    slider = visit.page.locator("[aria-label='--n-cpu-moe'][type=range]")
    slider.wait_for(state="hidden")
    visit.page.get_by_role("row", name=re.compile("64 GiB of RAM.*--n-cpu-moe")).wait_for()
    visit.page.get_by_role("row", name=re.compile("a second GPU of this kind.*does not fit")).wait_for()
    visit.page.get_by_label("RAM", exact=True).fill("64GB")
    slider.wait_for()
    assert slider.input_value() == "32"  # 25 of the model before


def test_a_folder_of_results_is_filtered_sorted_and_drawn(visit: Visit):
    rows = visit.page.locator(".q-table tbody tr")
    visit.page.get_by_text("4 of 4 runs").wait_for()
    visit.page.get_by_label("Filter").fill("batch 8 lru")
    visit.page.get_by_text("1 of 4 runs").wait_for()
    assert rows.count() == 1 and "lru" in rows.inner_text()
    visit.page.get_by_label("Filter").fill("batch 8")
    visit.page.get_by_text("2 of 4 runs").wait_for()
    visit.page.get_by_role("columnheader", name="decode, tokens/s").click()
    visit.page.get_by_label("Figure of these runs").click()
    visit.page.get_by_role("option", name="speedup").click()
    assert "Speed-up over lru" in str(visit.page.locator(".figure img").get_attribute("alt"))


def test_a_keyboard_is_enough(visit: Visit):
    page, before = visit.page, visit.shown()
    named = "(e => e.getAttribute('aria-label') || e.labels?.[0]?.innerText || e.innerText || '')(document.activeElement)"
    names: list[str] = []
    while "Context" not in names:
        assert len(names) < 60, names
        page.keyboard.press("Tab")
        names.append(page.evaluate(named))
    assert {"Model", "GPU", "CPU", "RAM", "PCIe", "Engine or policy", "--n-cpu-moe", "best that fits"} <= set(names)
    page.keyboard.press("ArrowRight")
    assert float(visit.speed_after(before)) < float(before)


def test_every_input_has_a_name(visit: Visit):
    unnamed = visit.page.evaluate(
        """() => [...document.querySelectorAll('input, textarea, [role=slider], button')].filter(one => one.offsetParent
            && !(one.getAttribute('aria-label') || one.labels?.length || one.innerText.trim())).map(one => one.outerHTML)"""
    )
    assert unnamed == []


# The ratio of luminances of text and what is behind it, as WCAG 2 defines it, of every text in sight.
CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const c = rgb(getComputedStyle(one).backgroundColor);
      if (c.length < 4 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const own = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  return [...document.querySelectorAll('body *')]
    .filter((one) => one.offsetParent && own(one) && !one.closest('i, script, style'))
    .map((one) => [light(rgb(getComputedStyle(one).color)), light(behind(one)), one.textContent.trim().slice(0, 40)])
    .filter(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5).map((one) => one[2]);
}"""


def test_texts_have_contrast(visit: Visit):
    visit.tab("What takes the time")
    visit.page.locator(".lane svg").first.wait_for()
    assert visit.page.evaluate(CONTRAST) == []


def test_a_phone_shows_the_answer_first_and_nothing_aside(browser: Any, server: str):
    visit = Visit(browser, server, PHONE)
    page = visit.page
    assert page.locator("[data-speed]").bounding_box()["y"] < PHONE["height"] / 3
    for name in ("Results", "Upgrades", "What takes the time"):
        visit.tab(name)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    visit.end()


def test_it_is_served_on_this_machine_alone_and_under_its_own_name(server: str):
    port = int(server.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):  # another address of this machine, where one of all addresses would answer
        socket.create_connection(("127.0.0.2", port), timeout=HANG_S)
    for host, status in (("127.0.0.1", 200), ("example.org", 400)):
        connection = HTTPConnection("127.0.0.1", port, timeout=HANG_S)
        connection.request("GET", "/", headers={"Host": host})
        assert connection.getresponse().status == status
        connection.close()
