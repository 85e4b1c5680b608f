// SPDX-License-Identifier: Apache-2.0
//
// A page of timelines: everything that a reader sees and moves. `pages.py` wrote the data; nothing else is loaded.
//
//   1 Panels      one timeline: causes, transfers, memory, the critical path, and its edits
//   2 Drawing     the canvas; rows of narrow actions are drawn as pixels, so that 100,000 of them stay smooth
//   3 The reader  pointer, keys, search, export, and the view in the address
//
// Invariant: names that users chose are only ever set as text, never as HTML.

// ---------------------------------------------------------------------------------------------------------- 1 Panels

/** One timeline, in its own order or in an edited one. */
class Panel {
  constructor(plan) {
    this.plan = plan;
    this.base = plan.rows.map((row, rank) => (row ? row.split(" ") : []).map((text) => parse(text, rank)));
    const lasts = (r, k) => plan.ends[r][k] - plan.starts[r][k];
    this.times = new Map(this.base.flatMap((row, r) => row.map((a, k) => [a.text, lasts(r, k)])));
    this.held = this.base.map((row) => [...new Set(row.map((a) => a.s))].sort((x, y) => x - y));
    this.several = this.held.some((some) => some.length > 1);
    const every = this.base.flat(), most = (lengths) => lengths.reduce((one, other) => Math.max(one, other), 0);
    this.longest = [most(every.map((a) => this.label(a).length)), most(every.map((a) => `${a.i}`.length))];
    this.wired = wire(plan);
    this.shades = new Map();
    this.waited = new Map();  // the waits of a measured timeline, by what was awaited
    plan.waits.forEach((row, rank) => row.forEach(([text, ...ends]) => {
      const [, target, what, unit, source] = /^(\d+)RECV_([FBG])([\d.]+)<(\d+)$/.exec(text) ?? [];
      if (what) this.waited.set(`${rank} ${what}${source}>${target} ${unit}`, ends);
    }));
    this.reorder([]);
    this.first = this.makespan;
  }

  /** Put the actions in the order after `moves`, each `[rank, from, to]`; judge and play it. */
  reorder(moves) {
    this.rows = this.base.map((row) => [...row]);
    for (const [rank, from, to] of moves) {
      if (this.rows[rank]?.[from]) this.rows[rank].splice(to, 0, ...this.rows[rank].splice(from, 1));
    }
    this.base.forEach((row) => row.forEach((a) => { a.stuck = false; }));
    [this.moved, this.violation] = [moves.length, null];
    if (!moves.length) return this.place(this.plan);
    try {
      this.place(play(this.plan, this.rows, this.times, true));
    } catch (error) {
      if (!(error instanceof Violation)) throw error;
      this.violation = error;
      this.place(play(this.plan, this.rows, this.times, false));
    }
  }

  /** Return what comes of moving an action to another place in its row: a Violation, or the makespan. */
  preview(a, to) {
    const rows = this.rows.map((row) => [...row]);
    rows[a.rank].splice(to, 0, ...rows[a.rank].splice(a.k, 1));
    try {
      const { starts, ends } = play(this.plan, rows, this.times, true);
      return Math.max(...ends.flat()) - Math.min(...starts.flat());
    } catch (error) {
      if (!(error instanceof Violation)) throw error;
      return error;
    }
  }

  /** Give the actions these times, and find what follows from them. */
  place({ starts, ends }) {
    this.rows.forEach((row, r) => row.forEach((a, k) => Object.assign(a, { k, start: starts[r][k], end: ends[r][k] })));
    const every = this.rows.flat(), sorted = (beside) => this.rows.map((row) => row.filter((a) =>
      COLLECTIVES.has(a.kind) === beside).sort((a, b) => a.start - b.start || a.k - b.k));
    this.begin = every.reduce((least, a) => Math.min(least, a.start), every.length ? Infinity : 0);
    this.end = every.reduce((most, a) => Math.max(most, a.end), this.begin);
    this.makespan = this.end - this.begin;
    this.byText = new Map(every.map((a) => [a.text, a]));
    [this.lanes, this.besides] = [sorted(false), sorted(true)];
    for (const row of this.lanes) {
      row.forEach((a, k) => {
        a.prev = row[k - 1] ?? null;
        a.fusedWith = isOpener(a) && isBackward(row[k + 1]) ? row[k + 1] : null;
      });
    }
    this.findCauses();
    this.critical = this.chain(every.reduce((last, a) => (last === null || a.end > last.end ? a : last), null));
    this.onPath = new Set(this.critical);
    this.memory = this.rows.map((row, rank) => this.findMemory(row, rank));
    this.peak = Math.max(0, ...this.memory.map((one) => one.peak));
    const busy = this.lanes.flat().reduce((sum, a) => sum + a.end - a.start, 0);
    this.bubble = this.makespan ? 1 - busy / this.rows.length / this.makespan : 0;
  }

  /** Find for each action what it waited for: `cause`, with when that was `sent`, and when it was `here`. */
  findCauses() {
    const made = new Map(), unit = (a) => (KINDS[a.kind].after ? unitOf(this.plan, a) : "");
    const keep = (what, a, last) => {
      const key = `${what},${a.s},${last ? a.rank : unit(a)}`, known = made.get(key);
      if (!last || !known || known.end < a.end) made.set(key, a);
    };
    for (const a of this.rows.flat()) {
      const { crosses, after } = KINDS[a.kind];
      if (crosses) keep(crosses, a, false);
      if (after === "done" || !after) keep(after || a.kind, a, true);
    }
    this.transfers = this.rows.map(() => []);
    for (const row of this.rows) {
      const gates = new Map();
      let before = null, beside = null;
      for (const a of row) {
        const found = [], collective = COLLECTIVES.has(a.kind);
        for (const user of a.fusedWith ? [a, a.fusedWith] : [a]) {
          for (const one of this.wired(user).takes) {
            const by = made.get(`${one.maker || one.what},${one.source},${one.count ? one.producer : unit(user)}`);
            if (by && by.rank !== a.rank) found.push(this.arrive(a, by, one));
          }
        }
        const gate = gates.get((KINDS[a.kind].reads ? "UNSHARD" : a.kind === "U" ? "REDUCE_GRAD" : "") + a.s);
        if (gate) found.push({ by: gate, what: gate.kind, sent: gate.end, here: gate.end });
        const by = !collective ? a.prev : beside && beside.end >= (before?.end ?? -Infinity) ? beside : before;
        a.cause = by && { by, what: "", sent: by.end, here: by.end };
        for (const one of found) {
          if (a.cause === null || one.here > a.cause.here + ROUNDING * Math.abs(one.here)) a.cause = one;
        }
        if (collective) gates.set(a.kind + a.s, a);
        else before = a;
        if (collective && a.kind !== "RESHARD") beside = a;
      }
    }
    for (const row of this.transfers) row.sort((x, y) => x.sent - y.sent);
  }

  /** Return when an input arrived at the rank of `a`, and note its transfer. */
  arrive(a, by, { what, delay, source, target }) {
    const unit = what === "G" ? by.i : by.text.replace(/^\d+[A-Z_]+/, ""), measured = this.plan.measured;
    const wait = measured && this.waited.get(`${a.rank} ${what}${source}>${target} ${unit}`);
    const made = by.fusedWith?.end ?? by.end;
    const here = !measured ? made + delay : wait ? wait[1] : Math.min(made, a.start);
    const one = { by, to: a, what, sent: Math.min(made, here), here };
    if (here > one.sent) this.transfers[a.rank].push(one);
    return one;
  }

  /** Return the actions that made `a` end when it did, from the first to `a`. */
  chain(a, most = Infinity) {
    const found = new Set();
    for (; a && !found.has(a) && found.size < most; a = a.cause?.by) {
      if (a.fusedWith) found.add(a.fusedWith);  // a pair ends as one
      found.add(a);
    }
    return [...found].reverse();
  }

  /** Return the memory of a rank over time, in steps, and the moment of its peak. */
  findMemory(row, rank) {
    const grown = (a) => this.plan.growth[a.kind]?.[a.s] ?? 0, times = [], levels = [];
    const changes = row.map((a) => [grown(a) > 0 ? a.start : a.end, grown(a)]).filter(([, by]) => by);
    let level = this.plan.weights[rank], peak = level, at = this.begin;
    for (const [time, by] of changes.sort((x, y) => x[0] - y[0])) {
      level += by;
      if (level > peak + ROUNDING) [peak, at] = [level, time];
      times.push(time);
      levels.push(level);
    }
    return { times, levels, peak, at };
  }

  /** Return the label of an action: F3, or 1F3 if ranks hold several stages. */
  label(a) { return `${this.several ? a.s : ""}${KINDS[a.kind].letter}${a.i}${a.part === null ? "" : `.${a.part}`}`; }

  /** Return where in its row an action would be put that is dropped at `time`. */
  placeAt(a, time) {
    const others = this.rows[a.rank].filter((other) => other !== a);
    const k = others.findIndex((other) => (other.start + other.end) / 2 > time);
    return k < 0 ? others.length : k;
  }

  /** Return the other timeline, with which this one is compared. */
  get other() { return panels[this === panels[0] ? 1 : 0]; }

  /** Return the same work in the other timeline: the action of that name, or the other way to run its backward. */
  twin(a) {
    const known = this.other?.byText, name = { B: "I", I: "B", F: "OVERLAP_F", OVERLAP_F: "F" }[a.kind] ?? a.kind;
    return known?.get(a.text) ?? known?.get(a.text.replace(/[A-Z_]+/, name)) ?? null;
  }

  /** Return how much later an action starts than in the other timeline, null if it is not there. */
  change(a) {
    const twin = this.twin(a);
    return twin && a.start - this.begin - (twin.start - this.other.begin);
  }

  /** Return whether an action runs on another rank, or after another action, than in the other timeline. */
  isMoved(a) {
    const twin = this.twin(a);
    return twin !== null && (twin.rank !== a.rank || twin.prev?.text !== a.prev?.text);
  }
}

/** Return a number as a reader wants it: six digits, or with a unit, four and a prefix. */
function number(value, unit = "") {
  if (!unit || !value) return `${Number(value.toPrecision(6))}${unit && ` ${unit}`}`;
  const power = Math.max(-3, Math.min(4, Math.floor(Math.log10(Math.abs(value)) / 3 + 1e-9)));
  return `${Number((value / 1000 ** power).toPrecision(4))} ${"nµm kMGT"[power + 3].trim()}${unit}`;
}

function percent(share) {
  const tenths = Math.round(1000 * share);
  return `${tenths < 0 ? "−" : "+"}${(Math.abs(tenths) / 10).toFixed(1)} %`;
}

// --------------------------------------------------------------------------------------------------------- 2 Drawing

const LEFT = 62, RIGHT = 64, TITLE = 24, AXIS = 22, NARROW = 5;  // pixels, as are all sizes here
const INK = "#202020", IDLE = "#f1f1f1", HELD = "#c9c2d8", PEAK = "#5b4b8a", FLIGHT = "#b08d57", WRONG = "#b00020";
const BOUND = "#00674a", EARLIER = "#1f78b4", LATER = "#d95f02", SAME = "#e8e8e8";
const MONO = '"DejaVu Sans Mono", monospace';
const STAGES = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb"];  // Paul Tol, bright
const STYLES = [0, 1].flatMap((form) => [11, 9, 7.5].map((font) => [form, font]));  // whole labels, or microbatches
const PAYLOAD = { F: "value", B: "cotangent", G: "gradient" };
const canvas = document.querySelector("canvas"), ctx = canvas.getContext("2d", { alpha: false });
const panels = DATA.panels.map((plan) => new Panel(plan)), colors = new Map(), hover = { hit: null, drag: null };
const size = { width: 0, height: 0, ratio: 1 }, strip = document.createElement("canvas");
const view = { from: 0, to: 1, y: 0, row: 0, color: "kind", path: false, transfers: true, memory: true, edit: false,
  query: "", moves: [] };

/** Return the red, green and blue of a color. */
function channels(color) {
  if (!colors.has(color)) colors.set(color, [1, 3, 5].map((k) => parseInt(color.slice(k, k + 2), 16)));
  return colors.get(color);
}

function mix(color, other, share) {
  const mixed = channels(color).map((one, k) => Math.round(one + (channels(other)[k] - one) * share));
  return `#${mixed.map((one) => one.toString(16).padStart(2, "0")).join("")}`;
}

/** Return the color of an action: of its kind, lighter for later stages of the rank; of its stage; or of its delay. */
function colorOf(panel, a) {
  if (a.stuck) return "#dddddd";
  if (view.color === "change") {
    const change = panel.change(a), late = Math.abs(change), all = panel.makespan || 1;
    if (change === null) return "#999999";
    return mix(SAME, change > 0 ? LATER : EARLIER, late < 1e-6 * all ? 0 : Math.min(1, late / (0.15 * all)) ** 0.6);
  }
  const held = panel.held[a.rank], key = `${view.color} ${a.kind} ${a.s} ${held[0]}`;
  if (!panel.shades.has(key)) {
    const light = held.indexOf(a.s) / Math.max(1, held.length - 1) / 2, dim = isBackward(a) ? 0 : 0.45;
    const [color, share] = view.color === "kind" ? [KINDS[a.kind].color, light] : [STAGES[a.s % STAGES.length], dim];
    panel.shades.set(key, mix(color, "#ffffff", share));
  }
  return panel.shades.get(key);
}

const scale = () => (size.width - LEFT - RIGHT) / (view.to - view.from);
const xOf = (panel, time) => LEFT + (time - panel.begin - view.from) * scale();
const timeAt = (panel, x) => (x - LEFT) / scale() + view.from + panel.begin;
const gap = () => (view.row < 8 ? 0 : view.row < 16 ? 1 : Math.min(10, view.row * 0.12));
const heightOf = (panel) => TITLE + panel.plan.ranks * view.row + 8;
const sumOf = (some) => some.reduce((sum, panel) => sum + heightOf(panel), 0);
const topOf = (panel) => AXIS - view.y + sumOf(panels.slice(0, panels.indexOf(panel)));
const yOf = (panel, rank) => topOf(panel) + TITLE + rank * view.row;

/** Return the heights of the lanes of a row: actions, collectives, transfers, memory. */
function lanesOf(panel) {
  const room = view.row - gap(), moving = view.transfers && panel.plan.ranks > 1 && room >= 18;
  const flight = moving ? Math.min(12, room * 0.18) : 0;
  const memory = view.memory && room >= 26 && panel.peak > 0 ? Math.min(40, room * 0.32) : 0;
  const left = Math.max(2, room - flight - memory);
  const beside = left >= 8 && panel.besides.some((row) => row.length) ? left * 0.35 : 0;
  return { work: left - beside, beside, flight, memory };
}

/** Return the numbers of the first action that ends at or after `from`, and of the first that starts after `to`. */
function visible(row, from, to) {
  return [(a) => a.end >= from, (a) => a.start > to].map((test) => {
    let low = 0, high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (test(row[middle])) high = middle;
      else low = middle + 1;
    }
    return low;
  });
}

function write(words, x, y, font, style = INK, align = "left") {
  Object.assign(ctx, { font, fillStyle: style, textAlign: align });
  ctx.fillText(words, x, y);
}

function box(x, y, wide, high, color) {
  ctx.fillStyle = color;
  ctx.fillRect(x, y, wide, high);
}

function draw() {
  ctx.setTransform(size.ratio, 0, 0, size.ratio, 0, 0);
  box(0, 0, size.width, size.height, "#ffffff");
  panels.forEach(drawPanel);
  drawAxis();
}

function drawPanel(panel) {
  const lanes = lanesOf(panel), first = Math.max(0, Math.floor((AXIS - yOf(panel, 0)) / view.row));
  const last = Math.min(panel.plan.ranks - 1, Math.ceil((size.height - yOf(panel, 0)) / view.row));
  ctx.save();
  ctx.beginPath();
  ctx.rect(LEFT, AXIS, size.width - LEFT - RIGHT, size.height);
  ctx.clip();
  for (let rank = first; rank <= last; rank++) drawRank(panel, rank, yOf(panel, rank), lanes);
  const x = xOf(panel, panel.begin + (panel.plan.bound?.time ?? -Infinity)), end = yOf(panel, panel.plan.ranks);
  for (let y = yOf(panel, 0) - 4; panel.plan.bound && y < end; y += 6) box(x - 0.75, y, 1.5, 4, BOUND);
  if (view.path) drawChain(panel, panel.critical, DATA.marked, lanes);
  drawMarks(panel, lanes);
  ctx.restore();
  for (let rank = first; rank <= last; rank++) {
    const y = yOf(panel, rank), { peak } = panel.memory[rank], cap = panel.plan.caps[rank] ?? Infinity;
    if (y < AXIS - 6 || rank % Math.ceil(11 / view.row)) continue;
    write(`rank ${rank}`, LEFT - 6, y + Math.max(10, lanes.work) / 2 + 4, `11px ${MONO}`, INK, "right");
    if (lanes.memory && peak > 0) write(number(peak, panel.plan.size), size.width - RIGHT + 4, y + view.row - gap() - 2,
      `10px ${MONO}`, peak > cap + ROUNDING ? WRONG : PEAK);
  }
  write(summarize(panel), 8, topOf(panel) + 16, "bold 12px system-ui, sans-serif");
}

function drawRank(panel, rank, y, lanes) {
  const from = timeAt(panel, LEFT), to = timeAt(panel, size.width - RIGHT);
  const left = Math.max(LEFT, xOf(panel, panel.begin)), right = Math.min(size.width - RIGHT, xOf(panel, panel.end));
  if (right <= left) return;
  for (const [row, top, high] of [[panel.lanes, y, lanes.work], [panel.besides, y + lanes.work, lanes.beside]]) {
    const shown = row[rank].slice(...visible(row[rank], from, to));
    if (high) (shown.length > (right - left) / NARROW ? drawPixels : drawBoxes)(panel, shown, top, high, left, right);
  }
  const half = lanes.flight / 2 - 0.5, below = y + lanes.work + lanes.beside + 1;
  for (const one of lanes.flight ? panel.transfers[rank] : []) {  // values above, cotangents below
    if (one.here < from) continue;
    if (one.sent > to) break;
    const x = xOf(panel, one.sent), wide = Math.max(1, xOf(panel, one.here) - x);
    box(x, below + (one.what === "F" ? 0 : half), wide, half - 0.5, KINDS[one.what].color);
  }
  if (lanes.memory) drawMemory(panel, rank, y + view.row - gap() - lanes.memory, lanes.memory, left, right);
}

/** Draw narrow actions as one line of pixels, each the mean of what it covers, stretched to the height of the row. */
function drawPixels(panel, row, y, high, left, right) {
  const wide = Math.max(1, Math.round((right - left) * size.ratio)), dense = scale() * size.ratio;
  const line = new ImageData(wide, 1), idle = channels(IDLE), sums = new Float32Array(4 * wide);
  const zero = timeAt(panel, left);
  const spread = (from, to, color) => {
    const start = Math.max(0, (from - zero) * dense), stop = Math.min(wide, (to - zero) * dense);
    const [r, g, b] = channels(color);
    for (let x = Math.floor(start); x < stop; x++) {
      const share = Math.min(x + 1, stop) - Math.max(x, start), k = 4 * x;
      sums[k] += share * r;
      sums[k + 1] += share * g;
      sums[k + 2] += share * b;
      sums[k + 3] += share;
    }
  };
  for (const a of row) {
    if (view.transfers && a.cause?.what && a.prev) spread(a.prev.end, a.start, DATA.wait);
    spread(a.start, a.end, colorOf(panel, a));
  }
  for (let k = 0; k < 4 * wide; k++) {
    const rest = Math.max(0, 1 - sums[k | 3]);
    line.data[k] = (k & 3) === 3 ? 255 : (sums[k] + rest * idle[k & 3]) / Math.max(1, sums[k | 3]);
  }
  if (strip.width < wide) [strip.width, strip.height] = [wide, 1];
  strip.getContext("2d").putImageData(line, 0, 0);
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(strip, 0, 0, wide, 1, left, y, right - left, high);
}

function drawBoxes(panel, row, y, high, left, right) {
  box(left, y, right - left, high, IDLE);
  for (const a of row) {
    const x = xOf(panel, a.start), wide = xOf(panel, a.end) - x, from = a.prev ? a.prev.end : panel.begin;
    if (view.transfers && a.cause?.what && a.start - from > ROUNDING) {  // light until it is made, dark in its transfer
      const sent = Math.max(from, a.cause.sent), here = Math.max(sent, Math.min(a.cause.here, a.start));
      box(xOf(panel, from), y + high * 0.3, (sent - from) * scale(), high * 0.4, DATA.wait);
      box(xOf(panel, sent), y + high * 0.3, (here - sent) * scale(), high * 0.4, FLIGHT);
    }
    box(x, y, Math.max(wide - (wide > 3 ? 1 : 0), 1.5), high, colorOf(panel, a));
    if (view.color === "change" && panel.isMoved(a)) box(x, y + high - 3, Math.max(wide - 1, 1.5), 3, INK);
    const fits = ([form, font]) => panel.longest[form] * font * 0.61 <= wide && font <= high * 0.75;
    const [form, font] = STYLES.find(fits) ?? [], label = form ? `${a.i}` : panel.label(a);  // alike in cells of a size
    if (font) write(label, x + (wide - 1) / 2, y + high / 2 + font * 0.36, `${font}px ${MONO}`, INK, "center");
  }
}

function drawMemory(panel, rank, y, high, left, right) {
  const { times, levels, peak, at } = panel.memory[rank], cap = panel.plan.caps[rank] ?? Infinity;
  const caps = panel.plan.caps.filter((one) => one !== null && one <= 2 * panel.peak);
  const most = Math.max(panel.peak, ...caps), level = (value) => y + high * (1 - Math.max(0, value) / most);
  const place = (time) => Math.max(left, xOf(panel, time));
  ctx.fillStyle = HELD;
  ctx.beginPath();
  ctx.moveTo(left, y + high);
  let x = left, now = level(panel.plan.weights[rank]);
  for (let k = 0; k < times.length && place(times[k]) < right; k++) {
    const next = place(times[k]);
    if (next - x >= 0.5 || next === left) {  // steps nearer than that are drawn as the highest of them
      ctx.lineTo(x, now);
      ctx.lineTo(next, now);
      [x, now] = [next, level(levels[k])];
    } else {
      now = Math.min(now, level(levels[k]));
    }
  }
  for (const [to, height] of [[x, now], [right, now], [right, y + high]]) ctx.lineTo(to, height);
  ctx.fill();
  for (let to = left; cap <= 2 * panel.peak && to < right; to += 8) {
    box(to, level(cap) - 0.5, 5, 1, peak > cap + ROUNDING ? WRONG : PEAK);
  }
  if (peak > 0 && xOf(panel, at) >= left) box(xOf(panel, at) - 1.5, level(peak), 3, Math.max(3, high * 0.2), PEAK);
}

/** Frame the actions of a chain, and join those that follow one another. */
function drawChain(panel, chain, color, lanes) {
  const middle = (a) => yOf(panel, a.rank) + (COLLECTIVES.has(a.kind) ? lanes.work + lanes.beside / 2 : lanes.work / 2);
  Object.assign(ctx, { strokeStyle: color, lineWidth: 1.5 });
  ctx.beginPath();
  chain.forEach((a, k) => {
    const x = xOf(panel, a.start), end = xOf(panel, a.end);
    ctx[k ? "lineTo" : "moveTo"](x, middle(a));
    ctx[end - x < 4 ? "lineTo" : "moveTo"](end, middle(a));
  });
  ctx.stroke();
  for (const a of chain) frame(panel, a, color, lanes, 1.5);
}

function frame(panel, a, color, lanes, width) {
  const beside = COLLECTIVES.has(a.kind), x = xOf(panel, a.start), wide = xOf(panel, a.end) - x;
  const y = yOf(panel, a.rank) + (beside ? lanes.work : 0), high = beside ? lanes.beside : lanes.work;
  if (x > size.width || x + wide < LEFT || wide < 3) return;
  Object.assign(ctx, { strokeStyle: color, lineWidth: width });
  ctx.strokeRect(x + width / 2, y + width / 2, Math.max(1, wide - 1 - width), Math.max(1, high - width));
}

/** Draw what the reader points at and has found: its causes, the search, what is dragged, and a violation. */
function drawMarks(panel, lanes) {
  const { hit, drag } = hover, wrong = panel.byText.get(panel.violation?.action);
  for (const a of found().get(panel) ?? []) frame(panel, a, "#000000", lanes, 2.5);
  if (wrong) frame(panel, wrong, WRONG, lanes, 3);
  if (hit?.a && hit.panel === panel && !drag) {
    if (!view.path) drawChain(panel, panel.chain(hit.a, 12), "#444444", lanes);
    frame(panel, hit.a, "#000000", lanes, 2);
  }
  if (drag?.panel !== panel) return;
  const y = yOf(panel, drag.a.rank), wide = Math.max(4, (drag.a.end - drag.a.start) * scale());
  const others = panel.rows[drag.a.rank].filter((a) => a !== drag.a);
  const next = others[drag.to]?.start ?? others.at(-1)?.end;
  box(drag.x - wide / 2, y - 3, wide, lanes.work, `${colorOf(panel, drag.a)}c0`);
  box(xOf(panel, next ?? panel.begin) - 1.5, y - 4, 3, lanes.work + 8, "#000000");
}

function drawAxis() {
  const least = 90 / scale(), ten = 10 ** Math.floor(Math.log10(least));
  const step = ten * [1, 2, 5, 10].find((factor) => factor * ten >= least * (1 - ROUNDING));
  box(0, 0, size.width, AXIS, "#ffffff");
  box(LEFT, AXIS - 1, size.width - LEFT - RIGHT, 1, "#808080");
  for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) {
    const x = LEFT + (k * step - view.from) * scale();
    box(x, AXIS - 5, 1, 4, "#808080");
    write(number(k * step, panels[0]?.plan.time), x, AXIS - 8, `10px ${MONO}`, "#606060", "center");
  }
}

/** Return the line above a timeline. */
function summarize(panel) {
  const { plan, makespan, peak } = panel, first = panels[0], cap = Math.min(...plan.caps.map((one) => one ?? Infinity));
  if (panel.violation) return `${plan.name}: not correct, see below`;
  const change = panel !== first && first.makespan ? ` (${percent(makespan / first.makespan - 1)})` : "";
  const words = [`takes ${number(makespan, plan.time)}${change}`, `bubble ${(100 * panel.bubble).toFixed(1)} %`];
  words.push(`peak ${number(peak, plan.size)}${cap < Infinity ? ` of ${number(cap, plan.size)}` : ""}`);
  if (plan.bound) words.push(`bound ${number(plan.bound.time, plan.time)}, ${percent(makespan / plan.bound.time - 1)}`);
  panel.count ??= panel === first ? 0 : panel.rows.flat().filter((a) => panel.isMoved(a)).length;
  if (panel !== first) words.push(`${panel.count} actions moved`);
  return `${plan.name}: ${words.join(", ")}`;
}

// ------------------------------------------------------------------------------------------------------ 3 The reader

const MOST_PREVIEWED = 20000;  // actions; with more, the verdict comes when the pointer is released
const SWITCHES = ["path", "transfers", "memory", "edit"], element = (id) => document.getElementById(id);
const longest = () => Math.max(1e-12, ...panels.flatMap((panel) => [panel.makespan, panel.plan.bound?.time ?? 0]));

/** Show all of every timeline: the rows as high as fits, the times as wide as fits. */
function fit() {
  const rows = panels.reduce((sum, panel) => sum + panel.plan.ranks, 0);
  view.row = Math.max(5, Math.min(84, (size.height - AXIS - 4 - panels.length * (TITLE + 8)) / Math.max(1, rows)));
  Object.assign(view, { from: 0, to: longest() * 1.005, y: 0 });
  fit.made = [view.from, view.to, view.y, view.row];
}

/** Draw the view after a change, and keep it in the address, so that a link shows the same. */
function changed() {
  const most = longest(), wide = Math.min(view.to - view.from, most * 1.5);
  view.from = Math.max(-0.25 * wide, Math.min(view.from, most - 0.1 * wide));
  view.to = view.from + wide;
  view.y = Math.max(0, Math.min(view.y, sumOf(panels) + 4 - (size.height - AXIS)));
  redraw();
  clearTimeout(changed.timer);
  changed.timer = setTimeout(writeAddress, 150);
}

function redraw() {
  cancelAnimationFrame(redraw.asked);
  redraw.asked = requestAnimationFrame(draw);
}

function move(pixels, rows) {
  const by = pixels / scale();
  Object.assign(view, { from: view.from - by, to: view.to - by, y: view.y - rows });
  changed();
}

/** Make everything `factor` times as wide; the time at `x` stays where it is. */
function zoom(factor, x = (LEFT + size.width - RIGHT) / 2) {
  const fixed = (x - LEFT) / scale() + view.from, wide = (view.to - view.from) / factor;
  if (wide < longest() * 1e-6) return;
  view.from = fixed - (fixed - view.from) / factor;
  view.to = view.from + wide;
  changed();
}

function zoomRows(factor, y) {
  const row = Math.max(4, Math.min(120, view.row * factor));
  view.y = (view.y + y - AXIS) * (row / view.row) - (y - AXIS);
  view.row = row;
  changed();
}

function writeAddress() {
  const short = (value) => Number(value.toPrecision(7)), words = new URLSearchParams();
  words.set("t", `${short(view.from)},${short(view.to)}`);
  words.set("y", `${Math.round(view.y)},${short(view.row)}`);
  words.set("show", [...SWITCHES.filter((name) => view[name]), view.color].join(" "));
  if (view.query) words.set("find", view.query);
  if (view.moves.length) words.set("moves", view.moves.map((one) => one.join(".")).join(" "));
  history.replaceState(null, "", `#${words}`);
}

function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1)), word = (name) => words.get(name) ?? "";
  const [from, to, y, row] = ["t", "y"].flatMap((name) => word(name).split(",").map(Number));
  if (to > from && row > 0) Object.assign(view, { from, to, y, row });
  if (words.has("show")) {
    const shown = word("show").split(" "), known = [...element("color").options].map((one) => one.value);
    for (const name of SWITCHES) view[name] = shown.includes(name);
    view.color = shown.find((name) => known.includes(name)) ?? "kind";
  }
  view.query = word("find");
  const moves = word("moves").split(" ").filter((one) => /^\d+(\.\d+){3}$/.test(one));
  view.moves = moves.map((one) => one.split(".").map(Number)).filter(([p]) => panels[p]?.plan.measured === false);
  panels.forEach(applyMoves);
  showControls();
}

function applyMoves(panel, p) {
  const mine = view.moves.filter(([one]) => one === p).map(([, ...rest]) => rest);
  if (mine.length || panel.moved) panel.reorder(mine);
  for (const one of panels) one.count = null;
}

/** Move the action at place `from` of a rank's row to `to`, and say what comes of it. */
function edit(p, rank, from, to) {
  view.moves.push([p, rank, from, to]);
  showVerdict(p);
}

function undo() {
  const last = view.moves.pop();
  if (last) showVerdict(last[0]);
}

function showVerdict(p) {
  applyMoves(panels[p], p);
  judge(panels[p], panels[p].violation ?? panels[p].makespan);
  changed();
}

/** Say what holds of an order of a panel: `found` is a Violation, or its makespan. */
function judge({ plan, first }, found) {
  const { rank, position, action, message, rule } = found;
  const where = `rank ${rank}, position ${position}, ${action ?? "end"}`;
  if (rule) return say("wrong", `${plan.name}: ${where}: ${message} [rule: ${rule}]`);
  const change = `${percent(found / first - 1)} against the order before the edits`;
  say("right", `${plan.name}: correct; takes ${number(found, plan.time)}, ${change}`);
}

function say(kind, words) {
  Object.assign(element("verdict"), { className: kind, textContent: words });
}

function showControls() {
  for (const name of SWITCHES) element(name).checked = view[name];
  element("color").value = view.color;
  element("query").value = view.query;
  element("tools").hidden = !view.edit;
  canvas.style.cursor = view.edit ? "crosshair" : "grab";
  const used = new Set(panels.flatMap((panel) => panel.base.flat().map((a) => a.kind)));
  const legend = {
    kind: Object.entries(KINDS).filter(([kind]) => used.has(kind)).map(([, one]) => [one.color, one.name, one.letter]),
    stage: [[STAGES[0], "one hue per stage, dark backwards"]],
    change: [[EARLIER, "earlier than in the other"], [SAME, "at the same time"], [LATER, "later"],
      [INK, "bar below: after a different action"]],
  }[view.color];
  const add = (shown, ...entry) => shown && legend.push(entry);
  add(view.color === "kind" && panels.some((panel) => panel.several), "#ffffff", "lighter: a later stage of the rank");
  add(view.transfers, DATA.wait, "waits for the work of another rank");
  add(view.transfers, FLIGHT, "waits for a transfer");
  add(view.memory, HELD, "memory held; the mark is its peak, the line its cap");
  add(view.path, DATA.marked, "critical path");
  add(panels.some((panel) => panel.plan.bound), BOUND, "dashed: the lower bound");
  element("legend").replaceChildren(...legend.map(([color, words, letter = ""]) => {
    const entry = document.createElement("span"), sample = document.createElement("i");
    sample.style.background = color;
    sample.textContent = letter;
    entry.append(sample, words);
    return entry;
  }));
  changed();
}

/** Return the actions of each panel that the query names: 2F17 that one, F17 those of all stages, 17 a microbatch. */
function found() {
  const query = view.query.trim().toUpperCase(), key = `${query} ${view.moves.length}`;
  if (found.key === key) return found.known;
  Object.assign(found, { key, known: new Map() });
  const [, s, kind, i, part] = /^(?:(\d*)([A-Z_]+))?(\d*)(?:\.(\d+))?$/.exec(query) ?? [];
  const fits = (a) => (!s || a.s === Number(s)) && (!i || a.i === Number(i)) && (!part || a.part === Number(part)) &&
    (!kind || kind === a.kind || kind === KINDS[a.kind].letter);
  for (const panel of query && i !== undefined ? panels : []) found.known.set(panel, panel.rows.flat().filter(fits));
  return found.known;
}

/** Go to the next action that was found. */
function search() {
  const every = [...found()].flatMap(([panel, some]) => some.map((a) => ({ panel, a })));
  search.turn = search.query === view.query ? (search.turn + 1) % Math.max(1, every.length) : 0;
  search.query = view.query;
  const hit = every[search.turn], { panel, a } = hit ?? {};
  if (!hit) return say("wrong", view.query && `nothing is called ${view.query}`);
  say("", `${search.turn + 1} of ${every.length}: ${describe(panel, a)[0]}`);
  const shown = Math.min(view.to - view.from, Math.max(12 * (a.end - a.start), 1e-6 * longest()));
  const from = (a.start + a.end - shown) / 2 - panel.begin;
  Object.assign(view, { from, to: from + shown, row: view.row < 14 ? 22 : view.row });
  view.y += yOf(panel, a.rank) - size.height / 2;
  hover.hit = hit;
  changed();
}

/** Return what is at a place of the canvas: a panel with an action, a gap, a transfer, or a moment of its memory. */
function hitAt(x, y) {
  if (x < LEFT || x > size.width - RIGHT || y < AXIS) return null;
  for (const panel of panels) {
    const rank = Math.floor((y - yOf(panel, 0)) / view.row), lanes = lanesOf(panel), slack = 2 / scale();
    if (rank < 0 || rank >= panel.plan.ranks) continue;
    const below = y - yOf(panel, rank), time = timeAt(panel, x);
    const row = (below < lanes.work ? panel.lanes : panel.besides)[rank];
    if (below < lanes.work + lanes.beside) {
      const near = [time, time - slack].map((from) => row[visible(row, from, from)[0]]);
      const a = near.find((one) => one && one.start <= time + slack);
      return a ? { panel, a } : { panel, rank, gap: near[0] ?? null };
    }
    if (below > lanes.work + lanes.beside + lanes.flight) return { panel, rank, time };
    const transfer = panel.transfers[rank].find((one) => one.sent <= time + slack && one.here >= time - slack);
    return transfer ? { panel, transfer } : null;
  }
  return null;
}

/** Return the lines about an action: what it is, when it runs, why it did not begin earlier. */
function describe(panel, a) {
  const show = (time) => number(time, panel.plan.time), when = (time) => show(time - panel.begin);
  const part = a.part === null ? "" : `, slice ${a.part}`, twin = panel.twin(a);
  const lines = [`${a.text} on rank ${a.rank}: ${KINDS[a.kind].name}, stage ${a.s}, microbatch ${a.i}${part}`,
    `${when(a.start)} to ${when(a.end)}, takes ${show(a.end - a.start)}`];
  if (panel.plan.uses && KINDS[a.kind].crosses) lines.push(`uses version ${panel.plan.uses[a.i]} of the weights`);
  if (twin) {
    const after = panel.isMoved(a) ? `, after ${twin.prev?.text ?? "nothing"}` : "";
    const from = when(a.start - panel.change(a));
    lines.push(`${panel.other.plan.name}: ${twin.text} starts at ${from} on rank ${twin.rank}, takes ` +
      `${show(twin.end - twin.start)}${after}`);
  }
  return [...lines, ...explain(panel, a)];
}

/** Return why an action did not begin earlier, and the chain of causes, a line for each. */
function explain(panel, a) {
  const show = (time) => number(time, panel.plan.time), ready = a.prev ? a.prev.end : panel.begin, { cause } = a;
  if (!cause) return [];
  const idle = a.start - ready, least = ROUNDING * Math.abs(a.start), lines = [], { by, what } = cause;
  const late = Math.max(0, Math.min(cause.sent, a.start) - ready);
  const flight = Math.max(0, cause.here - Math.max(cause.sent, ready)), rest = idle - late - flight;
  if (idle > least && !what) lines.push(`idle ${show(idle)} before it, without waiting for anything`);
  if (idle > least && what) {
    const awaited = PAYLOAD[what] ? `the ${PAYLOAD[what]} of ${by.text} from rank ${by.rank}` : by.text;
    lines.push(`idle ${show(idle)} before it: waits for ${awaited}: ${show(late)} until it is made, ` +
      `${show(flight)} in transfer${rest > least ? `, and ${show(rest)} for other reasons` : ""}`);
  }
  panel.chain(a, 7).reverse().slice(0, 6).forEach((one, k) => {
    const why = one.cause, more = k === 5 && why?.by.cause ? ", and so on" : "";
    if (why?.what) lines.push(`${one.text} waits for ${why.by.text} of rank ${why.by.rank}${more}`);
    else if (why) lines.push(`${one.text} follows ${why.by.text}${more}`);
  });
  return panel.onPath.has(a) ? [...lines, "on the critical path"] : lines;
}

function describeHit({ panel, a, gap: next, transfer, rank, time }) {
  const show = (value) => number(value, panel.plan.time), hold = (value) => number(value, panel.plan.size);
  if (a) return describe(panel, a);
  if (transfer) {
    const { by, to, what, sent, here } = transfer;
    return [`${PAYLOAD[what]} of ${by.text}: rank ${by.rank} to rank ${to.rank}, for ${to.text}`,
      `${show(sent - panel.begin)} to ${show(here - panel.begin)}, takes ${show(here - sent)}`];
  }
  if (time === undefined && !next) return [`rank ${rank} has finished`];
  if (time === undefined) return [`rank ${rank} is idle`, ...explain(panel, next)];
  const { times, levels, peak, at } = panel.memory[rank], cap = panel.plan.caps[rank];
  const held = levels[times.findLastIndex((one) => one <= time)] ?? panel.plan.weights[rank];
  return [`rank ${rank} holds ${hold(held)} at ${show(time - panel.begin)}`,
    `peak ${hold(peak)} at ${show(at - panel.begin)}${cap === null ? "" : `, limit ${hold(cap)}`}`];
}

function showTip(x, y) {
  const tip = element("tip"), shown = hover.hit && !hover.drag;
  tip.style.display = shown ? "block" : "none";
  if (!shown) return;
  tip.textContent = describeHit(hover.hit).join("\n");
  const { offsetWidth: wide, offsetHeight: high } = tip;
  tip.style.left = `${Math.max(4, Math.min(x + 14, size.width - wide - 4))}px`;
  tip.style.top = `${y + 18 + high > size.height ? Math.max(2, y - high - 12) : y + 18}px`;
}

/** Return the table of a panel's order, which `schedules.files.read_csv` reads. */
function writeTable({ plan, rows }) {
  const pairs = (line) => line.replace(/(\d+)OVERLAP_(F[\d.]+),(\d+[BI][\d.]+)/g, "($1$2;$3)OVERLAP_F_B");
  const lines = rows.map((row) => pairs(row.map((a) => a.text).join(",")));
  if (!plan.chain) lines.push(["graph", plan.graph].filter((word) => word).join(","));
  return `${lines.join("\n")}\n`;
}

/** Return a panel's order as a Python module. */
function writePython({ plan, rows }) {
  const each = rows.map((row) => `    "${row.map((a) => a.text).join(" ")}",\n`).join("");
  const uses = plan.uses ? `(${plan.uses.map((one) => `${one}, `).join("")})` : "None";
  return `# The order of ${JSON.stringify(plan.name)}, from its page.
from schedules import ${plan.chain ? "" : "Graph, "}Placement, from_rows, parse

ROWS = (
${each})
edited = from_rows(
    tuple(tuple(map(parse, row.split())) for row in ROWS),
    ${plan.call.placement},
    microbatches=${plan.microbatches},
    slices=${plan.slices},
    backward=${plan.backward ? "True" : "False"},
    graph=${plan.chain ? "None" : plan.call.graph},
    versions=${uses},
)
`;
}

/** Save the order that was edited last, or else the first that can be, as a file. */
function download(name, form) {
  const last = view.moves.at(-1), link = document.createElement("a");
  const text = form(last ? panels[last[0]] : panels.find((panel) => !panel.plan.measured) ?? panels[0]);
  link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Follow the pointer, and say what dropping the action there would come to, if that takes no time to find. */
function dragTo(drag, x) {
  const { panel, a, to: before } = drag, to = panel.placeAt(a, timeAt(panel, x));
  Object.assign(drag, { x, to });
  if (to !== before && panel.times.size <= MOST_PREVIEWED) judge(panel, panel.preview(a, to));
}

function listen() {
  const act = {
    pointerdown(x, y, event) {
      const hit = hitAt(x, y), held = view.edit && hit?.a && !hit.panel.plan.measured;
      canvas.setPointerCapture(event.pointerId);
      hover.drag = held ? { panel: hit.panel, a: hit.a, x, to: hit.a.k } : { pan: true };
    },
    pointermove(x, y, event) {
      const { drag } = hover;
      if (drag?.pan) move(event.movementX, event.movementY);
      else if (drag) dragTo(drag, x);
      else hover.hit = hitAt(x, y);
    },
    pointerup() {
      const { panel, a, to } = hover.drag ?? {};
      hover.drag = null;
      if (panel && to !== a.k) edit(panels.indexOf(panel), a.rank, a.k, to);
    },
    pointerleave() { hover.hit = null; },
    wheel(x, y, event) {
      event.preventDefault();
      if (event.shiftKey) zoomRows(1.0015 ** -(event.deltaY || event.deltaX), y);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(-event.deltaX, 0);
      else zoom(1.0015 ** -event.deltaY, x);
    },
  };
  for (const [kind, run] of Object.entries(act)) {
    canvas.addEventListener(kind, (event) => {
      run(event.offsetX, event.offsetY, event);
      showTip(event.offsetX, event.offsetY);
      redraw();
    });
  }
  const all = () => (fit(), changed());
  const keys = { "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), ArrowLeft: () => move(80, 0),
    ArrowRight: () => move(-80, 0), ArrowUp: () => move(0, 60), ArrowDown: () => move(0, -60), 0: all,
    "/": () => element("query").focus() };
  document.addEventListener("keydown", (event) => {
    if (event.key === "z" && (event.ctrlKey || event.metaKey)) undo();
    else if (!/INPUT|SELECT/.test(event.target.tagName) && !event.ctrlKey && keys[event.key]) keys[event.key]();
    else return;
    event.preventDefault();
  });
  const clicks = { in: keys["+"], out: keys["-"], fit: all, undo, csv: () => download("schedule.csv", writeTable),
    python: () => download("schedule.py", writePython) };
  for (const [id, run] of Object.entries(clicks)) element(id).addEventListener("click", run);
  for (const name of [...SWITCHES, "color"]) {
    element(name).addEventListener("change", ({ target }) => {
      view[name] = name === "color" ? target.value : target.checked;
      showControls();
    });
  }
  element("query").addEventListener("input", ({ target }) => {
    view.query = target.value;
    changed();
  });
  element("query").addEventListener("keydown", (event) => event.key === "Enter" && search());
  addEventListener("hashchange", readAddress);
  new ResizeObserver(resize).observe(canvas);
}

function resize() {
  Object.assign(size, { width: canvas.clientWidth, height: canvas.clientHeight, ratio: devicePixelRatio || 1 });
  [canvas.width, canvas.height] = [size.width * size.ratio, size.height * size.ratio];
  if (!view.row || [view.from, view.to, view.y, view.row].every((one, k) => one === fit.made?.[k])) fit();
  draw();
}

document.querySelector("h1").textContent = DATA.title;
if (panels.length > 1) element("color").add(new Option("difference", "change"));
if (panels.every((panel) => panel.plan.measured)) element("edit").disabled = true;
resize();
readAddress();
listen();
