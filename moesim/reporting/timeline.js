// The timeline: one canvas for each policy under a common ruler. Each draw touches only what is visible.
(() => {
  "use strict";
  const source = document.getElementById("tl-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const root = document.getElementById("tl");
  root.hidden = false;
  const LEAST = 200; // ns across the canvas
  const media = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  const view = { from: 0, to: 1, step: null, chosen: null, palette: null }; // ns after each run's origin; chosen: {run, lane, i}
  const labels = new Map(); // of steps, by number
  for (const run of data.runs) for (const one of run.steps) if (!labels.has(one[2])) labels.set(one[2], one[3]);
  const drawing = timelineDrawing(data, labels, view);
  const { LANE, field, causeOf, isNeutral, firstAfter, time } = drawing;

  // ---- data ----------------------------------------------------------------------------------------------------------
  const runs = data.runs.map((run) => ({ ...run, lanes: run.lanes.map(drawing.unpack), end: 0, origin: 0, visible: true }));
  let longest = 0;
  let earliest = Infinity;
  for (const run of runs) {
    run.begin = Math.min(...run.lanes.filter((lane) => lane.n).map((lane) => lane.starts[0]));
    run.end = Math.max(...run.lanes.filter((lane) => lane.n).map((lane) => lane.ends[lane.n - 1]));
    longest = Math.max(longest, run.end);
    earliest = Math.min(earliest, run.begin);
  }

  // ---- view: ns after each run's origin ------------------------------------------------------------------------------

  function bounds() {
    const low = Math.min(...runs.map((run) => run.begin - run.origin));
    const high = Math.max(...runs.map((run) => run.end - run.origin));
    const margin = 0.05 * (high - low);
    return [low - margin, high + margin];
  }

  function look(from, to) {
    const [low, high] = bounds();
    const span = Math.min(Math.max(to - from, LEAST), high - low);
    const middle = (from + to) / 2;
    const start = Math.min(Math.max(middle - span / 2, low), high - span);
    view.from = start;
    view.to = start + span;
    redraw();
  }
  const zoom = (factor, at = (view.from + view.to) / 2) => look(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const pan = (share) => look(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

  // Line all runs up at the begin of a step; null: at the begin of the run.
  function goto(step) {
    let span = 0;
    for (const run of runs) {
      const found = step === null ? null : run.steps.find((one) => one[2] === step);
      run.missing = step !== null && !found;
      run.origin = found ? found[0] : 0;
      if (found) span = Math.max(span, found[1] - found[0]);
    }
    view.step = step;
    for (const [key, button] of buttons) button.setAttribute("aria-pressed", String(key === step));
    if (step === null) look(earliest, longest);
    else look(-0.02 * span, 1.02 * span);
  }

  // ---- page ----------------------------------------------------------------------------------------------------------
  function make(tag, text = "", props = {}) {
    const made = document.createElement(tag);
    if (text) made.textContent = text;
    return Object.assign(made, props);
  }
  function button(text, label, act) {
    const made = make("button", text, { type: "button", title: label, onclick: act });
    made.setAttribute("aria-label", label);
    return made;
  }
  const tools = make("div", "", { className: "tools" });
  tools.append(
    button("+", "Zoom in", () => zoom(0.5)),
    button("−", "Zoom out", () => zoom(2)),
    button("◂", "Earlier", () => pan(-0.4)),
    button("▸", "Later", () => pan(0.4)),
  );
  const steps = make("div", "", { className: "steps" });
  steps.setAttribute("role", "group");
  steps.setAttribute("aria-label", "Jump to a step");
  const numbers = [...labels.keys()].sort((a, b) => a - b);
  const buttons = new Map([[null, button("all", "Show everything from the begin", () => goto(null))]]);
  for (const number of numbers) buttons.set(number, button(labels.get(number), `Line up at ${labels.get(number)}`, () => goto(number)));
  steps.append(make("span", "Jump to: "), ...buttons.values());
  const legend = make("ul", "", { className: "legend" });
  for (const cause of data.causes) {
    if (isNeutral(cause)) continue;
    const item = make("li");
    const box = make("i");
    box.dataset.fill = cause[2];
    item.append(box, cause[1]);
    legend.append(item);
  }
  const help = make(
    "p",
    "Wheel or pinch: zoom (over the names of the lanes the wheel scrolls the page). Drag: move. Rest on a slice, or tap it, for what it is. " +
      "Keys, when a timeline has the focus: + − zoom, ← → move, 0 all, Page Up and Page Down step, , and . slice before and after, ↑ ↓ lane, Esc none. " +
      "A step lines the policies up at its begin. Where slices are narrower than a pixel, its colour is that of the cause with most time, paler the more of it is idle.",
    { className: "small", id: "tl-help" },
  );
  const said = make("p", "", { className: "sr" });
  said.setAttribute("aria-live", "polite");
  const ruler = make("div", "", { className: "ruler" });
  const unit = make("span");
  const rulerCanvas = make("canvas");
  rulerCanvas.setAttribute("aria-hidden", "true");
  ruler.append(unit, rulerCanvas);
  root.append(tools, steps, legend, ruler);
  const tip = make("div", "", { className: "tip", hidden: true });
  tip.setAttribute("role", "tooltip");
  for (const run of runs) {
    run.box = make("div", "", { className: "run" });
    const names = make("ul");
    for (const lane of run.lanes) {
      const name = make("li", lane.name, { title: lane.name });
      name.style.lineHeight = name.style.height = `${LANE}px`;
      names.append(name);
    }
    run.canvas = make("canvas", "", { tabIndex: 0 });
    run.canvas.setAttribute("role", "application");
    run.canvas.setAttribute("aria-label", `Timeline of ${run.name || "the run"}`);
    run.canvas.setAttribute("aria-describedby", "tl-help");
    run.box.append(make("h3", run.name), names, run.canvas);
    root.append(run.box);
    listen(run);
  }
  root.append(help, said);
  document.body.append(tip);

  // ---- drawing -------------------------------------------------------------------------------------------------------
  let asked = false;
  function redraw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(draw);
  }
  function draw() {
    asked = false;
    view.palette = media.matches && !printing ? drawing.PALETTES.dark : drawing.PALETTES.light;
    for (const box of legend.querySelectorAll("i")) box.style.background = drawing.fillOf(box.dataset.fill);
    drawing.drawRuler(rulerCanvas, unit);
    for (const run of runs) if (run.visible || printing) drawing.drawRun(run);
    place();
  }

  // ---- what a slice is -----------------------------------------------------------------------------------------------
  function linesOf(run, lane, i) {
    const cause = causeOf(lane, i);
    const [layer, expert, step, amount, waited] = ["layer", "expert", "step", "amount", "waited"].map((name) => field(lane, i, name));
    const lines = [];
    if (!isNeutral(cause)) lines.push(cause[1]);
    const where = [];
    if (layer >= 0) where.push(`layer ${layer}`);
    if (expert >= 0) where.push(`expert ${expert}`);
    if (step >= 0) where.push(labels.get(step) || `step ${step}`);
    if (where.length && cause[0] !== "step") lines.push(where.join(", "));
    lines.push(`${time(lane.ends[i] - lane.starts[i])} from ${time(lane.starts[i] - run.origin)} on`);
    if (amount >= 0) lines.push(lane.unit === "bytes" ? `${Number((amount / 1e6).toPrecision(4))} MB` : `${amount} ${amount === 1 ? lane.unit.replace(/s$/, "") : lane.unit}`);
    if (waited > 0) lines.push(`asked for ${time(waited)} earlier`);
    return lines;
  }

  function choose(found, speak = false) {
    if (found && view.chosen && found.lane === view.chosen.lane && found.i === view.chosen.i) {
      view.chosen = found;
      place();
      return;
    }
    view.chosen = found;
    tip.hidden = !found;
    if (found) {
      const { run, lane, i } = found;
      const cause = causeOf(lane, i);
      const lines = linesOf(run, lane, i);
      const title = `${data.names[field(lane, i, "name")]} on ${lane.name}`;
      tip.textContent = "";
      tip.append(make("b", title));
      for (const line of lines) {
        const element = make("span");
        if (line === cause[1]) element.append(Object.assign(make("i"), { style: `background:${drawing.fillOf(cause[2])}` }));
        element.append(line);
        tip.append(element);
      }
      if (speak) said.textContent = `${title}: ${lines.join("; ")}`;
    }
    redraw();
  }

  // Beside the pointer, or below the slice if it was chosen by keyboard; always inside the window.
  function place() {
    if (tip.hidden || !view.chosen) return;
    let { x, y } = view.chosen;
    if (x === undefined) {
      const box = view.chosen.run.canvas.getBoundingClientRect();
      const at = (view.chosen.lane.starts[view.chosen.i] - view.chosen.run.origin - view.from) * view.chosen.run.scale;
      x = box.left + Math.min(Math.max(at, 0), box.width);
      y = box.top + (view.chosen.run.lanes.indexOf(view.chosen.lane) + 1) * LANE;
    }
    const size = tip.getBoundingClientRect();
    const left = x + 14 + size.width > innerWidth ? x - size.width - 10 : x + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, y + 14 + size.height > innerHeight ? y - size.height - 10 : y + 14)}px`;
  }

  function sliceAt(run, event) {
    const box = run.canvas.getBoundingClientRect();
    const lane = run.lanes[Math.floor((event.clientY - box.top) / LANE)];
    if (!lane || run.missing) return null;
    const at = view.from + run.origin + (event.clientX - box.left) / run.scale;
    const near = 2 / run.scale;
    const i = firstAfter(lane, at);
    const place = { x: event.clientX, y: event.clientY };
    if (i < lane.n && lane.starts[i] <= at) return { run, lane, i, ...place };
    const distance = (k) => (k < 0 || k >= lane.n ? Infinity : Math.min(Math.abs(lane.starts[k] - at), Math.abs(lane.ends[k] - at)));
    const nearest = distance(i) < distance(i - 1) ? i : i - 1;
    return distance(nearest) <= near ? { run, lane, i: nearest, ...place } : null;
  }

  // ---- pointer, wheel and keys ---------------------------------------------------------------------------------------
  function listen(run) {
    const canvas = run.canvas;
    const pointers = new Map();
    let moved = false;
    const timeAt = (x) => view.from + (x - canvas.getBoundingClientRect().left) / run.scale;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const size = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
      const [dx, dy] = event.shiftKey && !event.deltaX ? [event.deltaY, 0] : [event.deltaX, event.deltaY];
      if (Math.abs(dx) > Math.abs(dy)) pan((dx * size) / canvas.clientWidth);
      else zoom(Math.exp(Math.max(-1, Math.min(1, dy * size * 0.002))), timeAt(event.clientX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, event);
      moved = false;
      canvas.classList.add("drag");
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) {
        choose(sliceAt(run, event));
        return;
      }
      const others = [...pointers.values()].filter((one) => one.pointerId !== event.pointerId);
      if (others.length) {
        const still = others[0].clientX;
        const [was, is] = [Math.abs(before.clientX - still), Math.abs(event.clientX - still)];
        if (was > 4 && is > 4) zoom(was / is, timeAt(still));
      } else {
        pan((before.clientX - event.clientX) / canvas.clientWidth);
      }
      if (Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY) > 0) moved = true;
      pointers.set(event.pointerId, event);
      if (moved) choose(null);
    });
    const release = (event) => {
      pointers.delete(event.pointerId);
      canvas.classList.remove("drag");
      if (event.type === "pointerup" && !moved) choose(sliceAt(run, event), true);
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => choose(null));
    canvas.addEventListener("blur", () => choose(null));
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const act = keys(run)[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
  }

  function keys(run) {
    const turn = (by) => {
      if (!numbers.length) return;
      const at = view.step === null ? (by > 0 ? -1 : numbers.length) : numbers.indexOf(view.step);
      goto(numbers[Math.min(Math.max(at + by, 0), numbers.length - 1)]);
    };
    return {
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), Home: () => look(bounds()[0], bounds()[0] + view.to - view.from),
      End: () => look(bounds()[1] - (view.to - view.from), bounds()[1]),
      0: () => goto(null), PageDown: () => turn(1), PageUp: () => turn(-1),
      ".": () => walk(run, 1, 0), ",": () => walk(run, -1, 0), ArrowDown: () => walk(run, 0, 1), ArrowUp: () => walk(run, 0, -1),
      Escape: () => choose(null),
    };
  }

  // Choose the next slice of the lane, or the one at the same time in the next lane that has any.
  function walk(run, by, lanes) {
    const now = view.chosen && view.chosen.run === run ? view.chosen : null;
    let row = now ? run.lanes.indexOf(now.lane) : run.lanes.findIndex((one) => one.n);
    if (now && lanes) {
      let next = row + lanes;
      while (run.lanes[next] && !run.lanes[next].n) next += lanes;
      if (run.lanes[next]) row = next;
    }
    const lane = run.lanes[row];
    const at = now ? now.lane.starts[now.i] : Math.max(view.from + run.origin, run.begin);
    const i = now && now.lane === lane ? now.i + by : firstAfter(lane, at);
    const found = { run, lane, i: Math.min(Math.max(i, 0), lane.n - 1) };
    const [begin, end] = [lane.starts[found.i] - run.origin, lane.ends[found.i] - run.origin];
    choose(found, true);
    if (begin < view.from || end > view.to) {
      const half = Math.max(view.to - view.from, (end - begin) * 1.2) / 2;
      look((begin + end) / 2 - half, (begin + end) / 2 + half);
    }
  }

  // ---- when to draw --------------------------------------------------------------------------------------------------
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) runs.find((run) => run.canvas === entry.target).visible = entry.isIntersecting;
    redraw();
  }, { rootMargin: "200px" });
  for (const run of runs) watcher.observe(run.canvas);
  new ResizeObserver(redraw).observe(rulerCanvas);
  media.addEventListener("change", redraw);
  const print = (now) => () => {
    printing = now;
    draw();
  };
  addEventListener("beforeprint", print(true));
  addEventListener("afterprint", print(false));
  goto(null);
})();
