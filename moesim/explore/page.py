"""The page: what is chosen on the left, its answer first, and behind tabs what explains it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from importlib import resources
from typing import Any, Final

from nicegui import ui

from moesim.core.units import digits
from moesim.errors import CapacityError, MoesimError
from moesim.explore import answers, drawing
from moesim.explore.answers import Answer
from moesim.explore.question import (
    ANSWERS,
    CONTEXTS,
    LLAMA_CPP,
    PROMPTS,
    Question,
    bits_of,
    command_of,
    llama_of,
    python_of,
    yaml_of,
)
from moesim.explore.results import FIGURES, Opened
from moesim.explore.worker import Asking, Line
from moesim.hardware import hardware_names
from moesim.hardware.engines import MACHINE, OWN, engine_profiles
from moesim.hardware.parts import Cpu, Gpu, parts_of
from moesim.model.load import model_names
from moesim.policies.registry import policy_names
from moesim.studies.advice.llama_cpp import Point
from moesim.studies.identify.observations import QUANTS

LOG: Final = logging.getLogger("moesim.explore")
TABS: Final = {
    "time": "What takes the time", "curve": "--n-cpu-moe", "policies": "Policies", "upgrades": "Upgrades",
    "copy": "Command, YAML, Python", "results": "Results",
}  # fmt: skip
_COMPARED: Final = (LLAMA_CPP, "kt-expert", "fiddler", "hybrimoe-code", "lru")
_PARTS, _PROFILE = "Parts", "Profile"
_TYPED: Final = "(event) => { event.target.typed = true }"
_ENTERED: Final = "(event) => { event.target.typed = false; emit(event.target.value) }"
_LEFT: Final = "(event) => { if (event.target.typed && !event.relatedTarget?.closest('.q-menu')) emit(event.target.value) }"
_REST_S: Final = 0.1  # without another choice, after which the open tab follows: it takes the thread that the next answer needs


class Page:
    """One visitor's page."""

    def __init__(self, folder: str | None) -> None:
        self.question = Question()
        self.answer: Answer | None = None
        self.too_large = False  # whether there is no answer as the model does not fit
        self.opened: Opened | None = None
        self._first, self._more = Line(), Line()  # the speed, and what stands behind the open tab
        self._drawn: tuple[Question, str] | None = None  # what the open tab shows
        self._points: list[Point] = []  # of the curve
        self.places: list[int] = []  # of the runs that are filtered
        ui.context.client.on_delete(self._leave)
        ui.add_css(resources.files("moesim.explore").joinpath("page.css").read_text(encoding="utf-8"))
        ui.colors(primary="#0b5f9e")
        with ui.element("header").classes("top"):
            ui.element("h1").add_slot("default", "moesim explore")
            ui.element("p").add_slot("default", "How fast does a Mixture-of-Experts model run on a machine that it does not fit?")
        with ui.element("main").classes("page"):
            with ui.element("section").classes("card answer").props('aria-label="Answer"'):
                self._make_answer()
            with ui.element("section").classes("card controls").props('aria-label="Question"'):
                self._make_controls()
            with ui.element("section").classes("card parts").props('aria-label="Details"'):
                self._make_tabs("time" if folder is None else "results")
        if folder is not None:
            self.path.value = folder
            ui.timer(0, self.open, once=True)
        ui.timer(0, self.refresh, once=True)

    def _leave(self) -> None:
        """End what nobody will see."""
        self._first.cancel()
        self._more.cancel()

    # The question

    def _make_controls(self) -> None:
        asked = self.question
        _heading("Model")
        self._select("Model", model_names(), "model", new=True)
        self.bits = self._select("Bits per weight", list(QUANTS), "bits", new=True)
        _heading("Machine")
        self.kind = ui.toggle([_PARTS, _PROFILE], value=_PARTS, on_change=self._machine).props("no-caps dense spread")
        with ui.column().classes("w-full gap-1") as self.of_parts:
            self._select("GPU", [one.name for one in parts_of(Gpu)], "gpu", new=True)
            self._select("CPU", [one.name for one in parts_of(Cpu)], "cpu", new=True)
            self._text("RAM", "ram", "all channels filled")
            self._text("PCIe", "pcie", "what card and processor allow")
        self.profile = self._select("Profile of a machine", hardware_names(), "profile")
        self.profile.set_visibility(False)
        _heading("System")
        self._select("Engine or policy", [LLAMA_CPP, *policy_names()], "system")
        engines = [OWN, MACHINE, *(one.name for one in engine_profiles())]
        self._select("Costs of which engine", list(dict.fromkeys(engines)), "engine")
        self.number = _Slider("--n-cpu-moe", range(49), 0, lambda number: self.change(n_cpu_moe=number))
        with ui.row().classes("w-full"):
            self.best = ui.button("best that fits", on_click=lambda: self.change(n_cpu_moe=None)).props("flat dense no-caps")
        self.cache = _Slider(
            "Experts cached on the GPU", [None, *(n / 20 for n in range(1, 21))], 0, lambda share: self.change(cache=share),
            lambda share: "all that fit" if share is None else f"{100 * share:.0f} %",
        )  # fmt: skip
        _heading("Use")
        tokens = "{:,} tokens".format
        _Slider("Context", CONTEXTS, CONTEXTS.index(asked.context), lambda n: self.change(context=n), tokens)
        _Slider("Users at once", range(1, 17), 0, lambda n: self.change(users=n), at_end=True)
        _Slider("Prompt", PROMPTS, PROMPTS.index(asked.prompt), lambda n: self.change(prompt=n), tokens, at_end=True)
        _Slider("Answer", ANSWERS, ANSWERS.index(asked.answer), lambda n: self.change(answer=n), tokens, at_end=True)

    def _select(self, label: str, options: Sequence[str], name: str, *, new: bool = False) -> ui.select:
        """Make a list to type into; a new one takes a text that it lacks, too: with Enter, and when it is left."""
        value = getattr(self.question, name)
        known = list(dict.fromkeys([*([value] if value else []), *options]))

        def take(event: Any) -> None:
            text = str(event.args or "").strip()
            if text and text != chosen.value:
                chosen.set_options(list(dict.fromkeys([*known, text])), value=text)
                chosen.run_method("updateInputValue", text, True)  # an open list would keep the older name in its field

        with ui.element("div").classes("w-full") as around:
            chosen = ui.select(
                known, value=value or None, label=label, with_input=True,
                on_change=lambda event: self.change(**{name: event.value or ""}),
            )  # fmt: skip
        chosen.props('outlined dense options-dense input-debounce="0"').classes("w-full")
        if new:  # Enter and Tab of the list itself choose what it marks, which is not what was typed
            chosen.props("disable-tab-selection").on("keydown.enter", take, js_handler=_ENTERED)
            around.on("input", js_handler=_TYPED).on("focusout", take, js_handler=_LEFT)
        return chosen

    def _text(self, label: str, name: str, left_out: str) -> None:
        ui.input(
            label, value=getattr(self.question, name), placeholder=left_out,
            on_change=lambda event: self.change(**{name: event.value or ""}),
        ).props('outlined dense debounce="300" stack-label').classes("w-full")  # fmt: skip

    async def _machine(self) -> None:
        of_parts = self.kind.value == _PARTS
        self.of_parts.set_visibility(of_parts)
        self.profile.set_visibility(not of_parts)
        if of_parts:
            await self.change(profile="")
        elif self.profile.value:
            await self.change(profile=self.profile.value)

    async def change(self, **changes: Any) -> None:
        """Ask anew with other choices."""
        asked = replace(self.question, **changes)
        if any(name in changes for name in ("model", "gpu", "profile")):
            asked = replace(asked, n_cpu_moe=None)
        if "model" in changes:
            asked = replace(asked, bits=bits_of(asked))
        if asked != self.question:
            self.question = asked
            self.bits.value = asked.bits or None
            await self.refresh()

    # The answer

    def _make_answer(self) -> None:
        self.shown = _html().props('aria-live="polite"')
        self.ticker = ui.label().classes("ticker").props('aria-hidden="true"')  # on a phone, while controls are in view
        self.busy = _Busy()

    async def refresh(self) -> None:
        """Answer the question, then what stands behind the open tab."""
        self._more.cancel()
        began, question = time.perf_counter(), self.question
        self.busy.show("simulating")
        if not await self._first.ask(partial(_one, question), self._show):
            return
        self.busy.hide()
        LOG.info("answer in %.0f ms: %s", 1000 * (time.perf_counter() - began), question)
        await asyncio.sleep(_REST_S)
        if question == self.question:
            await self.refresh_tab()

    def _show(self, found: Answer | MoesimError) -> None:
        self.answer = found if isinstance(found, Answer) else None
        self.too_large = isinstance(found, CapacityError)
        self.shown.content = _answered(found, self.question) if isinstance(found, Answer) else _misfit(_in_words(found))
        decode = found.decode if isinstance(found, Answer) else None
        self.ticker.text = "does not run" if decode is None else f"{digits(decode.value, 3)} tokens/s"
        of_llama = self.question.system == LLAMA_CPP
        self.number.set_visibility(of_llama and not self.too_large)  # no number of the model before, where none fits
        self.best.set_visibility(of_llama and not self.too_large)
        self.cache.set_visibility(not of_llama)
        place = found.run.place if isinstance(found, Answer) else None
        if place is not None and self.question.n_cpu_moe is None:  # else it stands where a person moves it
            llama = llama_of(self.question)
            self.number.become(range(llama.first, llama.last + 1), None if place.whole else place.number)
        self._show_copies()
        if self.answer is None:
            self._clear_tabs()

    # What explains it

    def _make_tabs(self, first: str) -> None:
        with ui.tabs(on_change=self.refresh_tab).props("no-caps align=left outside-arrows mobile-arrows") as self.tabs:
            for name, title in TABS.items():
                ui.tab(name, title)
        with ui.tab_panels(self.tabs, value=first).classes("w-full"):
            with ui.tab_panel("time"):
                self.times = _html()
            with ui.tab_panel("curve"):
                _line(
                    "llama.cpp's decode speed and its interval of 90 %. Left of the cliff it does not fit with the whole context."
                )
                self.curve = ui.echart({}).classes("w-full").style("height: 340px").props('aria-label="speed by --n-cpu-moe"')
            with ui.tab_panel("policies"):
                _line("Each has the costs of its own engine. To compare decisions alone, choose an engine for all.")
                self.systems = ui.select(
                    [LLAMA_CPP, *policy_names()], value=list(_COMPARED), multiple=True, label="Engines and policies",
                    on_change=self.refresh_tab,
                ).props("outlined dense use-chips").classes("w-full")  # fmt: skip
                self.compared = _html()
            with ui.tab_panel("upgrades"):
                _line("llama.cpp's best setting after one change of the machine, with a full context.")
                self.wish = (
                    ui.input("What if", placeholder="such as: gpu rtx 4090, or ram 2x32 ddr4-3600; several apart by a semicolon")
                    .props("outlined dense stack-label")
                    .classes("w-full")
                    .on("keydown.enter", lambda: self.refresh_tab(anew=True))
                )
                self.upgraded = _html()
            with ui.tab_panel("copy"):
                self.copies = {name: _Copy(name, language) for name, language in _LANGUAGES.items()}
            with ui.tab_panel("results"):
                self._make_results()
        self.tab_busy = _Busy()

    async def refresh_tab(self, *_: object, anew: bool = False) -> None:
        """Compute what the open tab shows, unless it shows it."""
        name, question = str(self.tabs.value), self.question
        kept = replace(question, n_cpu_moe=None, system=LLAMA_CPP, cache=None) if name in ("curve", "upgrades") else question
        if name == "curve" and self._drawn == (kept, name):
            return self._mark()
        known = self.answer is not None or (name == "upgrades" and self.too_large)
        if not known or (self._drawn == (kept, name) and not anew and name != "policies"):
            return None
        self._drawn = None
        shows: Mapping[str, Callable[[], tuple[Callable[[Asking], Iterator[Any]], Callable[[Any], None]]]] = {
            "time": lambda: (partial(_pictures, self.answer), self._show_times),
            "curve": lambda: (partial(answers.curve, question), self._show_curve),
            "policies": lambda: (partial(answers.side_by_side, question, self.systems.value), self._compared([])),
            "upgrades": lambda: (partial(answers.upgrades, question, self._wishes()), self._upgraded([])),
        }
        if name not in shows:
            return None
        make, show = shows[name]()
        self.tab_busy.show("computing")
        try:
            if not await self._more.ask(make, show):
                return None
        except MoesimError as error:
            ui.notify(str(error), type="negative", multi_line=True, close_button=True)
        self.tab_busy.hide()
        self._drawn = (kept, name)
        return None

    def _clear_tabs(self) -> None:
        """Show nothing of an older question."""
        self._drawn, self._points = None, []
        self.times.content = self.compared.content = self.upgraded.content = ""
        self.curve.options.clear()
        self.curve.update()
        self.tab_busy.hide()

    def _show_times(self, pictures: Sequence[tuple[str, str]]) -> None:
        self.times.content = "".join((f"<h3>{escape(title)}</h3>" if title else "") + svg for title, svg in pictures)

    def _show_curve(self, found: tuple[float, list[Any]]) -> None:
        self.tab_busy.share(found[0])
        self._points = found[1]
        self._mark()

    def _mark(self) -> None:
        place = self.answer.run.place if self.answer else None
        chosen = None if place is None or place.whole else place.number
        self.curve.options.clear()
        self.curve.options.update(drawing.curve(self._points, chosen))
        self.curve.update()

    def _compared(self, rows: list[Any]) -> Callable[[Any], None]:
        def show(found: tuple[float, str, Answer | str]) -> None:
            share, system, one = found
            self.tab_busy.share(share)
            rows.append((system, None, None, one) if isinstance(one, str) else (system, one.decode, one.prompt, one.what))
            self.compared.content = drawing.speeds(rows)

        return show

    def _wishes(self) -> list[str]:
        return [text.strip() for text in (self.wish.value or "").split(";") if text.strip()]

    def _upgraded(self, rows: list[Any]) -> Callable[[Any], None]:
        def show(found: tuple[float, answers.Upgrade]) -> None:
            share, one = found
            self.tab_busy.share(share)
            rows.append((one.name, one.decode, one.prompt, one.what))
            self.upgraded.content = drawing.speeds(rows)

        return show

    def _show_copies(self) -> None:
        run = self.answer.run if self.answer else None
        texts = ["", "", ""] if run is None else [command_of(self.question, run), yaml_of(run), python_of(run)]
        for copy, text in zip(self.copies.values(), texts, strict=True):
            copy.show(text)

    # Results that are there

    def _make_results(self) -> None:
        with ui.row().classes("w-full items-center no-wrap"):
            self.path = ui.input("Folder of a result", placeholder="as of moesim run --out").props("outlined dense stack-label")
            self.path.classes("grow").on("keydown.enter", self.open)
            ui.button("Open", on_click=self.open).props("no-caps unelevated")
        with ui.column().classes("w-full") as self.of_results:
            self.filter = ui.input("Filter", placeholder="such as: batch 8, or lru", on_change=self.refilter)
            self.filter.props('outlined dense clearable debounce="200" stack-label').classes("w-full")
            self.count = ui.label().props('role="status"')
            self.table = ui.table(rows=[], columns=[], row_key="run", pagination=25).classes("w-full").props("flat dense")
            self.figure_kind = ui.select(["", *FIGURES], value="", label="Figure of these runs", on_change=self.redraw)
            self.figure_kind.props("outlined dense").classes("w-64")
            self.figure = _html().classes("figure")
        self.of_results.set_visibility(False)

    async def open(self) -> None:
        """Open the folder that was named."""
        try:
            self.opened = Opened(str(self.path.value or "").strip())
        except MoesimError as error:
            ui.notify(str(error), type="negative", multi_line=True, close_button=True)
            return
        self.table.columns = self.opened.columns
        self.of_results.set_visibility(True)
        await self.refilter()

    async def refilter(self) -> None:
        """Show the runs that the filter means."""
        if self.opened is None:
            return
        self.places = self.opened.found(self.filter.value or "")
        self.table.rows = self.opened.rows(self.places)
        self.count.text = f"{len(self.places)} of {len(self.opened.result.rows)} runs"
        await self.redraw()

    async def redraw(self) -> None:
        """Draw the runs of the table."""
        kind, opened, places = self.figure_kind.value, self.opened, self.places
        self.figure.content = ""
        if opened is None or not kind or not places:
            return
        self.tab_busy.show("drawing")
        try:
            if not await self._more.ask(lambda _: iter([opened.figure(kind, places)]), self._show_figures):
                return
        except MoesimError as error:
            ui.notify(str(error), type="warning", multi_line=True, close_button=True)
        self.tab_busy.hide()

    def _show_figures(self, images: Sequence[tuple[str, str]]) -> None:
        self.figure.content = "".join(f'<img src="{data}" alt="{escape(words)}"><p>{escape(words)}</p>' for data, words in images)


class _Slider:
    """A slider over a list of values, with its name and the value in words: the browser's own, which keys move, too."""

    def __init__(
        self, name: str, values: Sequence[Any], at: int, chosen: Callable[[Any], Any], words: Callable[[Any], str] = str, *,
        at_end: bool = False,
    ) -> None:  # fmt: skip
        self._values, self._at, self._chosen, self._words = list(values), at, chosen, words
        self._at_end = at_end  # whether to ask only when it is let go, as what it changes takes longer
        with ui.column().classes("w-full gap-0") as self._all:
            with ui.element("div").classes("slider-name w-full"):
                ui.element("span").add_slot("default", escape(name))
                self._value = ui.label()
            self._input = ui.element("input").classes("w-full").props(f'type="range" min="0" aria-label="{escape(name)}"')
            number = "(event) => emit(Number(event.target.value))"
            self._input.on("input", self._moved, js_handler=number, throttle=0.05).on("change", self._let_go, js_handler=number)
        self.become(values, self._values[at])

    def set_visibility(self, visible: bool) -> None:
        self._all.set_visibility(visible)

    def become(self, values: Sequence[Any], value: Any) -> None:
        """Take other values, one of which is chosen; None of whole numbers: none is."""
        self._values = list(values)
        self._at = self._values.index(value) if value in self._values else 0
        words = self._words(value) if value in self._values else "whole layers on the CPU"
        self._value.text = words
        self._input.props(f'max="{len(self._values) - 1}" value="{self._at}" aria-valuetext="{escape(words)}"')

    async def _moved(self, event: Any) -> None:
        self._at = int(event.args)
        self._value.text = self._words(self._values[self._at])
        if not self._at_end:
            await self._chosen(self._values[self._at])

    async def _let_go(self, event: Any) -> None:
        self.become(self._values, self._values[int(event.args)])
        await self._chosen(self._values[self._at])


class _Busy:
    """A spinner with words, and a bar once it is known how much is done; its place stays, so that nothing below moves."""

    def __init__(self) -> None:
        with ui.element("div").classes("busy").props('role="status"') as self._all:
            ui.spinner(size="sm")
            self._words = ui.label()
            self._bar = ui.linear_progress(0, show_value=False).classes("grow").props('aria-label="share that is done"')
        self.hide()

    def show(self, words: str) -> None:
        self._words.text = words
        self._bar.value = 0
        self._all.classes(remove="idle")

    def share(self, share: float) -> None:
        self._bar.value = share

    def hide(self) -> None:
        self._all.classes("idle")


_LANGUAGES: Final[dict[str, Any]] = {"Command": "bash", "YAML": "yaml", "Python": "python"}
_ABOUT: Final = {
    "Command": "In a shell, after the YAML was saved as explore.yaml; then the same question to the advice, and what it types.",
    "YAML": "moesim run explore.yaml gives the number on the screen.",
    "Python": "The same from Python.",
}


class _Copy:
    """A text to copy."""

    def __init__(self, name: str, language: str) -> None:
        self._text = ""
        with ui.row().classes("w-full items-center justify-between"):
            ui.element("h3").add_slot("default", name)
            ui.button(f"Copy {name}", on_click=lambda: ui.clipboard.write(self._text)).props("flat dense no-caps")
        _line(_ABOUT[name])
        self._code = ui.code("", language=language)

    def show(self, text: str) -> None:
        self._text = self._code.content = text


def _html() -> ui.html:
    return ui.html("", sanitize=False).classes("w-full")  # all that it shows was escaped by `drawing` or here


def _heading(words: str) -> None:
    ui.element("h2").add_slot("default", words)


def _line(words: str) -> None:
    ui.element("p").add_slot("default", escape(words))


def _one(question: Question, asking: Asking) -> Iterator[Answer | MoesimError]:
    """Yield the answer, or why there is none."""
    try:
        yield answers.speed(question, asking)
    except MoesimError as error:
        yield error


def _in_words(error: MoesimError) -> str:
    return re.sub(r"^recommend: (--\w+: )?", "", str(error))  # verb and option, which the page does not have


def _pictures(answer: Answer | None, _: Asking) -> Iterator[list[tuple[str, str]]]:
    yield [] if answer is None or answer.outcome is None else drawing.timeline(answer.outcome)


def _misfit(words: str) -> str:
    first, *rest = re.split("[:;] ", words, maxsplit=1)
    return f'<p class="misfit">{escape(first[:1].upper() + first[1:])}<small>{escape("".join(rest))}</small></p>'


def _answered(found: Answer, question: Question) -> str:
    """Write the answer, the largest number first."""
    if found.decode is None or found.prompt is None:
        return _misfit(f"It does not run: {found.misfit}")
    many = f" of {question.users} users" if question.users > 1 else ""
    where = found.what or f"{question.system}, engine costs: {question.engine}"
    first, rest = ("".join(f"<li>{escape(note)}</li>" for note in some if note) for some in (found.notes[:2], found.notes[2:]))
    return (
        f'<div class="speed"><div><div class="big"><span data-speed>{digits(found.decode.value, 3)}</span>'
        f"<small>tokens/s{many}</small></div><p>decoding after a prompt of {question.prompt:,}, with room for "
        f"{question.context:,} tokens; a real machine: "
        f"{drawing.between(found.decode)} (90 %)</p></div>"
        f'<div><div class="next">{digits(found.prompt.value, 3)}<small>tokens/s</small></div>'
        f"<p>prompt, {drawing.between(found.prompt)}; first token after {digits(found.first_token_s, 2)} s</p></div></div>"
        f'<p class="where">{escape(where[:1].upper() + where[1:])}</p>{drawing.shares(found.limits)}'
        f'{drawing.memory(found.memory)}<ul class="notes">{first}</ul>'
        f'<details class="notes"><summary>notes of the run</summary><ul class="notes">{rest}</ul></details>'
    )
