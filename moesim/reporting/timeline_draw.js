// How lanes and slices are read and drawn; `view` holds what is shown: from, to, step, chosen slice, palette.
function timelineDrawing(data, labels, view) {
  "use strict";
  const FIELDS = data.fields.length;
  const LANE = 20; // px, with the gap below it
  const GAP = 3;
  const FONT = '11px system-ui, "Segoe UI", Roboto, Arial, sans-serif';
  const PALETTES = {
    light: { paper: "#ffffff", ink: "#000000", soft: "#59636e", lane: "#eef1f4", frame: "#c9d1d9", even: "#d5dbe1", odd: "#bcc5ce" },
    dark: { paper: "#14181c", ink: "#f2f4f6", soft: "#a3adb7", lane: "#20272e", frame: "#4a545f", even: "#3a444e", odd: "#505c68" },
  };

  function unpack(lane) {
    const n = lane.slices.length / FIELDS;
    const starts = new Float64Array(n);
    const ends = new Float64Array(n);
    const causes = new Uint16Array(n);
    let at = 0;
    for (let i = 0; i < n; i++) {
      const k = i * FIELDS;
      starts[i] = at + lane.slices[k];
      ends[i] = at = starts[i] + lane.slices[k + 1];
      causes[i] = lane.slices[k + 3];
    }
    return { ...lane, n, starts, ends, causes };
  }
  const field = (lane, i, name) => lane.slices[i * FIELDS + data.fields.indexOf(name)];
  const causeOf = (lane, i) => data.causes[lane.causes[i]];
  const isNeutral = (cause) => cause[0] === "step" || cause[0] === "layer";

  // The first slice that ends after a time.
  function firstAfter(lane, time) {
    let low = 0;
    let high = lane.n;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.ends[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // Black stands for ink, which is light on dark paper.
  const fillOf = (fill) => (fill === "#000000" ? view.palette.ink : fill);
  const textOf = (cause) => (cause[2] === "#000000" ? view.palette.paper : cause[3]);

  function prepare(canvas, height) {
    const width = canvas.clientWidth;
    const density = Math.min(devicePixelRatio || 1, 3);
    if (canvas.width !== Math.round(width * density) || canvas.height !== Math.round(height * density)) {
      canvas.width = Math.round(width * density);
      canvas.height = Math.round(height * density);
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(density, 0, 0, density, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = FONT;
    pen.textBaseline = "middle";
    return [pen, width];
  }

  function ticks(width) {
    const wanted = (view.to - view.from) / Math.max(2, width / 90);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
    const found = [];
    for (let k = Math.ceil(view.from / every); k * every <= view.to; k++) found.push(k * every);
    return [found, every];
  }
  const UNITS = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];
  const unitOf = (ns) => UNITS.find(([, size]) => ns >= size) || UNITS[3];
  function time(ns) {
    const [name, size] = unitOf(Math.abs(ns));
    return `${Number((ns / size).toPrecision(5))} ${name}`;
  }

  function drawRuler(canvas, unit) {
    const [pen, width] = prepare(canvas, 20);
    const [found, every] = ticks(width);
    const [name, size] = unitOf(every * 10);
    const digits = Math.max(0, Math.ceil(-Math.log10(every / size) - 1e-9));
    unit.textContent = view.step === null ? name : `${name} from ${labels.get(view.step)}`;
    pen.fillStyle = view.palette.soft;
    pen.textAlign = "center";
    for (const tick of found) {
      const x = ((tick - view.from) / (view.to - view.from)) * width;
      pen.fillRect(x, 15, 1, 5);
      if (x > 14 && x < width - 14) pen.fillText((tick / size).toFixed(digits), x, 8);
    }
  }

  function drawRun(run) {
    const [pen, width] = prepare(run.canvas, run.lanes.length * LANE);
    const scale = width / (view.to - view.from);
    const from = view.from + run.origin;
    run.scale = scale;
    let drawn = 0;
    if (run.missing) {
      pen.fillStyle = view.palette.soft;
      pen.fillText(`has no ${labels.get(view.step)}`, 8, LANE / 2);
      run.canvas.dataset.drawn = "0";
      return;
    }
    run.lanes.forEach((lane, row) => {
      pen.fillStyle = view.palette.lane;
      pen.fillRect(0, row * LANE, width, LANE - GAP);
    });
    pen.fillStyle = view.palette.frame;
    for (const tick of ticks(width)[0]) pen.fillRect((tick - view.from) * scale, 0, 0.5, run.lanes.length * LANE);
    run.lanes.forEach((lane, row) => {
      drawn += drawLane(pen, lane, row * LANE, from, scale, width);
    });
    if (view.chosen && view.chosen.run === run) drawChosen(pen, run, from, scale);
    run.canvas.dataset.drawn = String(drawn);
  }

  function drawLane(pen, lane, y, from, scale, width) {
    const height = LANE - GAP;
    const until = from + width / scale;
    const inPixel = new Float64Array(data.causes.length);
    let pixel = -1;
    let last = 0;
    const flush = () => {
      if (pixel < 0) return;
      let most = last;
      let sum = 0;
      for (let c = 0; c < inPixel.length; c++) {
        sum += inPixel[c];
        if (inPixel[c] > inPixel[most]) most = c;
      }
      const cause = data.causes[most];
      pen.globalAlpha = 0.2 + 0.8 * Math.min(1, sum);
      pen.fillStyle = isNeutral(cause) ? view.palette.odd : fillOf(cause[2]);
      pen.fillRect(pixel, y, 1, height);
      pen.globalAlpha = 1;
      inPixel.fill(0);
      pixel = -1;
    };
    let count = 0;
    for (let i = firstAfter(lane, from); i < lane.n && lane.starts[i] < until; i++) {
      count++;
      const begin = (lane.starts[i] - from) * scale;
      const end = (lane.ends[i] - from) * scale;
      if (end - begin < 1) {
        if (pixel !== Math.floor(begin)) flush();
        pixel = Math.max(0, Math.floor(begin));
        last = lane.causes[i];
        inPixel[last] += end - begin;
        continue;
      }
      flush();
      const left = Math.max(begin, -2);
      const wide = Math.min(end, width + 2) - left;
      const cause = causeOf(lane, i);
      const neutral = isNeutral(cause);
      pen.fillStyle = neutral ? (i % 2 ? view.palette.odd : view.palette.even) : fillOf(cause[2]);
      pen.fillRect(left, y, wide > 4 ? wide - 0.5 : wide, height);
      if (wide > 24) write(pen, lane, i, left, wide, y + height / 2 + 0.5, neutral ? view.palette.ink : textOf(cause));
    }
    flush();
    return count;
  }

  // The whole name if there is room for it, else the expert or the layer alone.
  function write(pen, lane, i, left, wide, y, colour) {
    const expert = field(lane, i, "expert");
    const layer = field(lane, i, "layer");
    const name = data.names[field(lane, i, "name")];
    const texts = [name, ...(expert >= 0 ? [`${layer}/${expert}`, `E${expert}`] : []), ...(layer >= 0 && expert < 0 ? [`L${layer}`] : [])];
    const text = texts.find((one) => pen.measureText(one).width < wide - 6);
    if (!text) return;
    pen.fillStyle = colour;
    pen.textAlign = "left";
    pen.fillText(text, Math.max(left, 0) + 3, y);
  }

  // Outline of the chosen slice, and the arrow from a fetch to the run that first used the copy.
  function drawChosen(pen, run, from, scale) {
    const { lane, i } = view.chosen;
    const row = run.lanes.indexOf(lane);
    const x = (lane.starts[i] - from) * scale;
    pen.strokeStyle = view.palette.ink;
    pen.lineWidth = 2;
    pen.strokeRect(x, row * LANE + 1, Math.max((lane.ends[i] - lane.starts[i]) * scale, 2), LANE - GAP - 2);
    pen.lineWidth = 1.5;
    for (let k = 0; k < run.arrows.length; k += 4) {
      const [a, i1, b, i2] = run.arrows.slice(k, k + 4);
      if (!((a === row && i1 === i) || (b === row && i2 === i))) continue;
      const [x1, y1] = [(run.lanes[a].ends[i1] - from) * scale, a * LANE + LANE / 2];
      const [x2, y2] = [(run.lanes[b].starts[i2] - from) * scale, b * LANE + LANE / 2];
      pen.beginPath();
      pen.moveTo(x1, y1);
      pen.lineTo(x2, y2);
      pen.stroke();
      pen.beginPath();
      pen.arc(x2, y2, 3.5, 0, 7);
      pen.fillStyle = view.palette.ink;
      pen.fill();
    }
  }

  return { LANE, PALETTES, unpack, field, causeOf, isNeutral, firstAfter, fillOf, time, drawRuler, drawRun };
}
