// SPDX-License-Identifier: Apache-2.0
//
// A page of timelines: everything that a reader sees and moves. `pages.py` wrote the data; nothing else is loaded.
//
//   1 Actions     their text, and what the vocabulary says of them
//   2 The rules   a port of schedules/checking, for orders of the same actions: the first violation, and where
//   3 Playing     a port of schedules/playing/engine: when each action runs in an order
//   4 Panels      one timeline: causes, transfers, memory, the critical path, and its edits
//   5 Drawing     the canvas; rows of narrow actions are drawn as pixels, so that 100,000 of them stay smooth
//   6 The reader  pointer, keys, search, export, and the view in the address
//
// Invariant: names that users chose are only ever set as text, never as HTML.
"use strict";

// --------------------------------------------------------------------------------------------------------- 1 Actions

const DATA = JSON.parse(document.getElementById("data").textContent);
const KINDS = DATA.kinds;
const COLLECTIVES = new Set(["UNSHARD", "RESHARD", "REDUCE_GRAD"]);
const ROUNDING = 1e-9;

/** Return the action that a text such as 3F0 or 3F0.2 names. */
function parse(text, rank) {
  const [, s, kind, i, part] = /^(\d+)([A-Z_]+?)(\d+)(?:\.(\d+))?$/.exec(text);
  return { text, kind, s: Number(s), i: Number(i), part: part === undefined ? null : Number(part), rank };
}

const isOpener = (a) => a.kind === "OVERLAP_F";
const isBackward = (a) => a !== undefined && KINDS[a.kind].crosses === "B";

// ------------------------------------------------------------------------------------------------------- 2 The rules

class Violation extends Error {
  constructor(rule, rank, position, action, problem) {
    super(problem);
    Object.assign(this, { rule, rank, position, action });
  }
}

/** The progress of one stage on one rank; the attributes are those of schedules.checking.progress.Work. */
class Work {
  constructor(plan, rank, stage) {
    const mine = plan.routes.map((homes, route) => [homes, route]).filter(([homes]) => homes[stage] === rank);
    [this.first, this.stride] = mine.length === plan.routes.length ? [0, 1] : [mine[0][1], plan.routes.length];
    this.slices = plan.slices;
    this.count = Math.ceil((plan.microbatches - this.first) / this.stride) * plan.slices;
    this.replicated = this.stride > 1;
    this.tied = plan.tied.includes(stage);
    Object.assign(this, { lives: new Map(), finished: new Set(), prefix: 0, began: new Map() });
    Object.assign(this, { versions: 0, applied: -1, gatherings: 0, summed: false, reduced: false, gathered: false });
    if (plan.uses) this.stash = this.makeStash(plan.uses);
  }

  makeStash(uses) {
    const needed = new Map();
    for (let unit = 0; unit < this.count; unit++) {
      const version = uses[this.microbatch(unit)];
      needed.set(version, (needed.get(version) ?? 0) + 1);
    }
    return { needed, old: new Set(), newest: 0 };
  }

  unit(a) { return Math.floor(a.i / this.stride) * this.slices + (a.part ?? 0); }
  microbatch(unit) { return this.first + Math.floor(unit / this.slices) * this.stride; }
  gathering(count) { return this.first + count * this.stride; }
  get last() { return this.microbatch(this.count - 1); }

  finish(unit) {
    this.lives.delete(unit);
    this.finished.add(unit);
    while (this.finished.has(this.prefix)) this.prefix++;
  }

  /** Return the first microbatch with only some slices forwarded, or null. */
  firstPartial() {
    const begun = new Set([...this.lives.keys()].map((unit) => Math.floor(unit / this.slices)));
    for (const i of [...begun].sort((a, b) => a - b)) {
      for (let unit = i * this.slices; unit < (i + 1) * this.slices; unit++) {
        if (!this.lives.has(unit) && !this.finished.has(unit)) return this.microbatch(i * this.slices);
      }
    }
    return null;
  }
}

/** The rules on one rank: `step` takes its actions in order, `end` comes after the last. Both throw a Violation. */
class Judge {
  constructor(plan, rank) {
    const stages = new Set(plan.routes.flatMap((homes) => homes.map((r, s) => (r === rank ? s : -1)))).values();
    this.works = new Map([...stages].filter((s) => s >= 0).map((s) => [s, new Work(plan, rank, s)]));
    Object.assign(this, { plan, rank, opener: null, gathers: false, passed: new Map(), held: 0 });
    this.unit = (plan.slices * plan.stages) / plan.ranks;
    this.limit = plan.memory === null ? Infinity : (plan.memory[rank] ?? Infinity) * this.unit + ROUNDING;
  }

  step(position, a) {
    const work = this.works.get(a.s);
    const fail = (rule, problem) => { throw new Violation(rule, this.rank, position, a.text, problem); };
    this.requireLife(a, work, fail);
    if (this.opener !== null && (!isBackward(a) || (a.s === this.opener.s && a.i === this.opener.i))) {
      fail("fused", `cannot overlap with ${this.opener.text}`);
    }
    this.opener = isOpener(a) ? a : null;
    this.requireCollected(a, work, fail);
    this.requireUpdated(a, work, fail);
    if (this.plan.slices > 1) this.requireSliced(a, fail);
    this.held += this.plan.backward ? KINDS[a.kind].holds : 0;
    if (this.held > this.limit) {
      fail("within_memory", `needs memory for activations of ${number(this.held / this.unit)} microbatches, more than ` +
        `the limit of ${this.plan.memory[this.rank]}`);
    }
  }

  end(length) {
    if (this.opener === null) return;
    throw new Violation("fused", this.rank, length, null, `nothing overlaps with ${this.opener.text}`);
  }

  requireLife(a, work, fail) {
    const word = KINDS[a.kind];
    if (!word.after) return;
    const after = this.plan.backward ? word.after : "done", unit = work.unit(a);
    let state = work.lives.get(unit) ?? "";
    if (state !== word.before || (!state && work.finished.has(unit))) {
      if (work.finished.has(unit)) state = "done";
      const name = (kind) => `${a.s}${kind}${a.i}${a.part === null ? "" : `.${a.part}`}`;
      const ages = ["", "kept", "forward", "halved", "done"], makers = { kept: "C", forward: "F", halved: "I" };
      if (state === "kept" && word.before === "forward") fail("forward_before_backward", `comes before ${name("R")}`);
      if (ages.indexOf(state) < ages.indexOf(word.before)) {
        fail("forward_before_backward", `comes before ${name(makers[word.before])}`);
      }
      fail("forward_before_backward", "has already run, or its backward has");
    }
    if (after === "done") work.finish(unit);
    else work.lives.set(unit, after);
  }

  requireCollected(a, work, fail) {
    const unfinished = () => `comes before the backward of microbatch ${work.microbatch(work.prefix)}`;
    if (a.kind === "G") {
      if (work.finished.size < work.count) fail("summed", unfinished());
      work.summed = true;
    } else if (a.kind === "REDUCE_GRAD") {
      if (work.finished.size < work.count) fail("reduced", unfinished());
      if (work.replicated && !work.summed) fail("reduced", "comes before the gradients of the replicas are summed");
      if (work.versions) fail("reduced", "comes after an update with a gradient that was not reduced");
      work.reduced = true;
    } else if (a.kind === "UNSHARD") {
      if (work.gathered) fail("gathered", "gathers weights that are gathered already");
      if (!work.gatherings && (work.lives.size || work.finished.size)) {
        fail("gathered", `comes after a pass through stage ${a.s}, which read weights that were not gathered`);
      }
      if (a.i !== work.gathering(work.gatherings)) fail("gathered", "is not numbered in order");
      work.gathered = this.gathers = true;
      work.gatherings++;
    } else if (a.kind === "RESHARD") {
      if (!work.gathered) fail("gathered", "frees weights that are not gathered");
      if (a.i !== work.gathering(work.gatherings - 1)) fail("gathered", "is not the end of that gathering");
      work.gathered = false;
    } else if (this.gathers && KINDS[a.kind].reads) {
      if (work.gatherings && !work.gathered) fail("gathered", "reads weights that are not gathered");
    } else if (this.gathers && a.kind === "U") {
      if (work.gathered) fail("gathered", "updates the shards while the weights are gathered");
    }
  }

  requireUpdated(a, work, fail) {
    const stash = work.stash, uses = this.plan.uses;
    if (a.kind === "U") {
      this.recordUpdate(a, work, fail);
    } else if (stash && KINDS[a.kind].after) {
      const version = uses[a.i];
      if (version > stash.newest) fail("updated", `uses version ${version} of the weights, which is not made yet`);
      if (KINDS[a.kind].after === "done") {
        stash.needed.set(version, stash.needed.get(version) - 1);
        if (!stash.needed.get(version)) stash.old.delete(version);
      }
    }
  }

  recordUpdate(a, work, fail) {
    if (work.prefix < work.count && work.microbatch(work.prefix) <= a.i) {
      fail("updated", `comes before the backward of microbatch ${work.microbatch(work.prefix)}`);
    }
    if (a.i <= work.applied) fail("updated", `an earlier update applied microbatch ${work.applied}`);
    if (work.replicated && !work.summed) fail("updated", "comes before the gradients of the replicas are summed");
    if ((work.replicated || work.tied || work.reduced) && a.i !== work.last) {
      fail("updated", `updates before microbatch ${work.last}, when the gradient is complete`);
    }
    const parted = work.firstPartial();
    if (parted !== null) fail("updated", `comes between the slices of microbatch ${parted}`);
    work.versions++;
    work.applied = a.i;
    const kept = work.stash ? this.keepDeclared(work.stash) : this.keepBegun(work);
    const limit = this.plan.versions[this.rank] ?? Infinity;
    if (kept > limit) fail("updated", `would make ${kept} versions of the weights to keep, more than ${limit}`);
  }

  keepDeclared(stash) {
    if (stash.needed.get(stash.newest)) stash.old.add(stash.newest);
    stash.newest++;
    return stash.old.size + 1;
  }

  keepBegun(work) {
    work.began = new Map([...work.lives.keys()].map((unit) => [unit, work.began.get(unit) ?? work.versions - 1]));
    return new Set([work.versions, ...work.began.values()]).size;
  }

  requireSliced(a, fail) {
    const way = KINDS[a.kind].crosses, k = this.plan.slices, key = (what) => `${what},${a.s},${a.i}`;
    if (!way) return;
    const done = this.passed.get(key(way)) ?? 0, forwards = this.passed.get(key("F")) ?? 0;
    const expected = way === "F" ? done : k - 1 - done;
    if (a.part !== expected || (way === "B" && forwards < k)) {
      const first = way === "B" && forwards < k ? `F${a.i}.${forwards}` : `${way}${a.i}.${expected}`;
      fail("sliced", `comes before ${a.s}${first}`);
    }
    this.passed.set(key(way), done + 1);
    if (way === "B" && a.part === 0) ["F", "B"].forEach((what) => this.passed.delete(key(what)));
  }
}

// --------------------------------------------------------------------------------------------------------- 3 Playing

/** Return what each kind of action takes and gives, by stage and route: schedules.playing.dependencies.wires. */
function wire(plan) {
  const R = plan.routes.length, taken = new Map(), given = new Map();
  const add = (map, key, value) => (map.has(key) ? map.get(key).push(value) : map.set(key, [value]));
  for (const [what, source, target, route, producer, consumer, delay, count, maker] of plan.edges) {
    const one = { what, source, producer, consumer, count, arrived: new Map(), wanted: null, seen: 0, latest: 0 };
    const on = (stage, rank) => [...Array(R).keys()].filter((n) => plan.routes[n][stage] === rank);
    const plain = what !== "G", same = source === target;
    const takers = plain ? [[what, route]] : same ? [["G", on(target, consumer)[0]]]
      : on(target, consumer).map((n) => ["U", n]);
    const givers = plain ? [[what, route]] : on(source, producer).map((n) => [maker, n]);
    for (const [word, n] of takers) add(taken, `${word},${target},${n}`, one);
    for (const [word, n] of givers) add(given, `${word},${source},${n}`, [one, delay]);
  }
  const table = {};
  for (const [kind, word] of Object.entries(KINDS)) {
    table[kind] = [];
    for (let s = 0; s < plan.stages; s++) {
      for (let n = 0; n < R; n++) {
        const key = `${word.crosses || kind},${s},${n}`, ends = `done,${s},${n}`;
        const gives = [...(given.get(key) ?? []), ...((word.after === "done" && given.get(ends)) || [])];
        table[kind].push({ takes: taken.get(key) ?? [], gives });
      }
    }
  }
  return table;
}

const arrival = (one, unit) => (one.count ? (one.seen === one.count ? one.latest : undefined) : one.arrived.get(unit));

/**
 * Play the rows of all ranks; return the starts and ends of their actions. `times` has what each takes, by text.
 * If `judged`, throw a Violation for the first that breaks a rule, or for a deadlock. Otherwise play on as far as it
 * goes, and put what is left behind it.
 */
function play(plan, rows, times, judged) {
  const R = plan.routes.length, table = wire(plan), ready = rows.map((_, rank) => rank).reverse();
  const judges = judged ? rows.map((_, rank) => new Judge(plan, rank)) : null;
  const read = rows.map(() => 0), over = rows.map(() => false);
  const advance = (rank) => {
    const k = read[rank];
    if (k === rows[rank].length) {
      if (judges && !over[rank]) judges[rank].end(k);
      over[rank] = true;
      return null;
    }
    if (judges) judges[rank].step(k, rows[rank][k]);
    return read[rank]++;
  };
  const heads = rows.map((_, rank) => advance(rank)), partners = rows.map(() => null), waits = rows.map(() => null);
  const clock = rows.map(() => 0), free = rows.map(() => 0), gates = rows.map(() => new Map());
  const starts = rows.map((row) => Array(row.length)), ends = rows.map((row) => Array(row.length));

  const deliver = (gives, unit, now) => {
    for (const [one, delay] of gives) {
      if (one.count) {
        one.seen++;
        one.latest = Math.max(one.latest, now + delay);
        if (one.seen === one.count && one.wanted !== null) one.wanted = unit;
      } else {
        one.arrived.set(unit, now + delay);
      }
      if (one.wanted === unit) {
        one.wanted = null;
        ready.push(one.consumer);
      }
    }
  };
  const unitOf = (a) => (a.part === null ? a.i : a.i * plan.slices + a.part);
  const wireOf = (a) => table[a.kind][a.s * R + (a.i % R)];
  // Return when the inputs of an action are there, or infinity: then its rank waits.
  const latest = (rank, a) => {
    const unit = unitOf(a), gate = KINDS[a.kind].reads ? "UNSHARD" : a.kind === "U" ? "REDUCE_GRAD" : "";
    let found = gates[rank].get(`${gate},${a.s}`) ?? 0;
    for (const one of wireOf(a).takes) {
      const time = arrival(one, unit);
      if (time === undefined) {
        one.wanted = unit;
        waits[rank] = one;
        return Infinity;
      }
      found = Math.max(found, time);
    }
    return found;
  };

  while (ready.length) {
    const rank = ready.pop(), row = rows[rank];
    let k = heads[rank], now = clock[rank], pending = null;
    while (k !== null) {
      const a = row[k], { takes, gives } = wireOf(a), unit = unitOf(a), time = times.get(a.text);
      if (COLLECTIVES.has(a.kind)) {  // beside the other actions, one after the other
        starts[rank][k] = a.kind === "RESHARD" ? now : Math.max(now, free[rank]);
        ends[rank][k] = a.kind === "RESHARD" ? now : (free[rank] = starts[rank][k] + time);
        gates[rank].set(`${a.kind},${a.s}`, ends[rank][k]);
        deliver(gives, unit, ends[rank][k]);
        k = advance(rank);
        continue;
      }
      let start = now, fused = false;
      if (isOpener(a)) {  // a pair starts as one
        partners[rank] ??= advance(rank);
        fused = partners[rank] !== null && isBackward(row[partners[rank]]);
        if (fused) start = Math.max(start, latest(rank, row[partners[rank]]));
        if (start === Infinity) break;
      }
      start = Math.max(start, latest(rank, a));
      if (start === Infinity) break;
      for (const one of takes) one.arrived.delete(unit);
      starts[rank][k] = start;
      ends[rank][k] = now = start + time;
      if (fused) {
        pending = [gives, unit];
      } else {
        deliver(gives, unit, now);
        if (pending) deliver(...pending, now);
        pending = null;
      }
      k = partners[rank] ?? advance(rank);
      partners[rank] = null;
    }
    heads[rank] = k;
    clock[rank] = now;
  }
  const rest = rows.map((row, rank) => [heads[rank], partners[rank]].filter((k) => k !== null));
  if (judges && heads.some((k) => k !== null)) explainDeadlock(plan, rows, rest, waits, advance);
  rows.forEach((row, rank) => appendRest(row, rest[rank][0] ?? row.length, times, starts[rank], ends[rank], clock[rank]));
  return { starts, ends };
}

/** Give the actions from `k` on, which never run, times one after the other. */
function appendRest(row, k, times, starts, ends, now) {
  for (; k < row.length; k++) {
    starts[k] = now;
    ends[k] = now += times.get(row[k].text);
    row[k].stuck = true;
  }
}

/** Throw the Violation of a play that is stuck: follow the waits to what is never made, or to a cycle. */
function explainDeadlock(plan, rows, rest, waits, advance) {
  rows.forEach((_, rank) => {
    for (let k = advance(rank); k !== null; k = advance(rank)) rest[rank].push(k);
  });
  const unitOf = (a) => (a.part === null ? a.i : a.i * plan.slices + a.part);
  const makes = (a, one) => a.s === one.source && (one.what === "G" ? KINDS[a.kind].after === "done"
    : KINDS[a.kind].crosses === one.what && unitOf(a) === one.wanted);
  const name = (one) => (one.what === "G" ? `all backwards of stage ${one.source}` : `${one.source}${one.what}` +
    (plan.slices === 1 ? one.wanted : `${Math.floor(one.wanted / plan.slices)}.${one.wanted % plan.slices}`));
  let rank = rest.findIndex((some) => some.length), problem = "";
  for (const seen = []; !problem;) {
    seen.push(rank);
    const one = waits[rank], maker = one.producer, made = rest[maker].some((k) => makes(rows[maker][k], one));
    if (maker === rank || !made) {
      problem = `needs ${name(one)}, which ${made ? "this rank runs only later" : `rank ${maker} never runs`}`;
    } else if (seen.includes(maker)) {
      const cycle = seen.slice(seen.indexOf(maker));
      const each = cycle.map((r) => `rank ${r} at ${rows[r][rest[r][0]].text} needs ${name(waits[r])}`);
      rank = cycle[0];
      problem = `the ranks wait for each other: ${each.join(", ")}`;
    } else {
      rank = maker;
    }
  }
  const position = rows[rank].length - rest[rank].length;
  throw new Violation("ordered", rank, position, rows[rank][position].text, problem);
}

// ---------------------------------------------------------------------------------------------------------- 4 Panels

/** One timeline, in its own order or in an edited one. */
class Panel {
  constructor(plan) {
    this.plan = plan;
    this.base = plan.rows.map((row, rank) => (row ? row.split(" ") : []).map((text) => parse(text, rank)));
    this.original = { starts: plan.starts, ends: plan.ends };
    this.times = new Map();
    this.base.forEach((row, rank) => row.forEach((a, k) => this.times.set(a.text, plan.ends[rank][k] - plan.starts[rank][k])));
    this.several = this.base.some((row) => row.some((a) => a.s !== row[0].s));
    this.waited = this.readWaits();
    this.reorder([]);
  }

  /** Return the waits of a measured timeline, by what was awaited. */
  readWaits() {
    const found = new Map();
    this.plan.waits.forEach((row, rank) => row.forEach(([text, start, end]) => {
      const [, target, what, unit, source] = /^(\d+)RECV_([FBG])([\d.]+)<(\d+)$/.exec(text) ?? [];
      if (what) found.set(`${rank} ${what}${source}>${target} ${unit}`, [start, end]);
    }));
    return found;
  }

  /** Put the actions in the order after `moves`, each `[rank, from, to]`; judge and play it. */
  reorder(moves) {
    this.rows = this.base.map((row) => [...row]);
    for (const [rank, from, to] of moves) {
      if (this.rows[rank]?.[from]) this.rows[rank].splice(to, 0, ...this.rows[rank].splice(from, 1));
    }
    this.base.forEach((row) => row.forEach((a) => { a.stuck = false; }));
    this.violation = null;
    let found = this.original;
    if (moves.length) {
      try {
        found = play(this.plan, this.rows, this.times, true);
      } catch (error) {
        if (!(error instanceof Violation)) throw error;
        this.violation = error;
        found = play(this.plan, this.rows, this.times, false);
      }
    }
    this.place(found);
  }

  /** Give the actions these times, and find what follows from them. */
  place({ starts, ends }) {
    this.rows.forEach((row, rank) => row.forEach((a, k) => {
      Object.assign(a, { k, start: starts[rank][k], end: ends[rank][k], prev: null, next: null, fusedWith: null });
    }));
    const every = this.rows.flat();
    this.begin = every.reduce((least, a) => Math.min(least, a.start), Infinity);
    this.end = every.reduce((most, a) => Math.max(most, a.end), -Infinity);
    if (!every.length) this.begin = this.end = 0;
    this.byText = new Map(every.map((a) => [a.text, a]));
    const byStart = (a, b) => a.start - b.start || a.k - b.k;
    this.lanes = this.rows.map((row) => row.filter((a) => !COLLECTIVES.has(a.kind)).sort(byStart));
    this.besides = this.rows.map((row) => row.filter((a) => COLLECTIVES.has(a.kind)).sort(byStart));
    this.hasBesides = this.besides.some((row) => row.length);
    for (const row of this.lanes) {
      row.forEach((a, k) => {
        a.prev = row[k - 1] ?? null;
        a.next = row[k + 1] ?? null;
        if (isOpener(a) && isBackward(row[k + 1])) a.fusedWith = row[k + 1];
      });
    }
    this.findCauses();
    this.critical = this.chain(every.reduce((last, a) => (last === null || a.end > last.end ? a : last), null));
    this.onPath = new Set(this.critical);
    this.memory = this.rows.map((row, rank) => this.findMemory(row, rank));
    this.peak = Math.max(0, ...this.memory.map((one) => one.peak));
    const busy = this.lanes.map((row) => row.reduce((sum, a) => sum + a.end - a.start, 0));
    this.makespan = this.end - this.begin;
    this.bubble = this.makespan ? 1 - busy.reduce((sum, one) => sum + one, 0) / busy.length / this.makespan : 0;
  }

  /** Find for each action what it waited for: `cause`, when that was ready (`sent`), and when it was here. */
  findCauses() {
    const plan = this.plan, R = plan.routes.length, into = new Map(), sums = new Map(), made = new Map();
    for (const [what, source, target, route, producer, consumer, delay, , maker] of plan.edges) {
      const key = what === "G" ? `${source === target ? "G" : "U"},${target},${consumer}` : `${what},${target},${route}`;
      const edge = { what, source, target, producer, delay, maker: what === "G" ? maker : what };
      if (into.has(key)) into.get(key).push(edge);
      else into.set(key, [edge]);
    }
    const unitOf = (a) => a.i * plan.slices + (a.part ?? 0), wide = plan.microbatches * plan.slices;
    const number = (s, unit) => s * wide + unit;
    for (const a of this.rows.flat()) {
      const word = KINDS[a.kind];
      a.sentAt = isOpener(a) && a.fusedWith ? a.fusedWith.end : a.end;
      if (word.crosses) {
        if (!made.has(word.crosses)) made.set(word.crosses, new Map());
        made.get(word.crosses).set(number(a.s, unitOf(a)), a);
      }
      for (const what of word.after === "done" ? ["done"] : word.after ? [] : [a.kind]) {
        const key = `${what},${a.s},${a.rank}`, last = sums.get(key);
        if (!last || last.end < a.end) sums.set(key, a);
      }
    }
    const inputs = (a) => {
      const word = KINDS[a.kind], gradients = a.kind === "G" || a.kind === "U";
      if (!word.crosses && !gradients) return [];
      const edges = into.get(gradients ? `${a.kind},${a.s},${a.rank}` : `${word.crosses},${a.s},${a.i % R}`) ?? [];
      return edges.map((edge) => {
        const maker = edge.what === "G" ? sums.get(`${edge.maker},${edge.source},${edge.producer}`)
          : made.get(edge.what)?.get(number(edge.source, unitOf(a)));
        return maker && maker.rank !== a.rank ? { ...edge, by: maker, target: a.s } : null;
      }).filter((one) => one);
    };
    this.transfers = this.rows.map(() => []);
    this.rows.forEach((row, rank) => {
      const gates = new Map();
      let before = null, beside = null;
      for (const a of row) {
        const found = [], collective = COLLECTIVES.has(a.kind);
        for (const one of [a, ...(a.fusedWith ? [a.fusedWith] : [])].flatMap(inputs)) {
          found.push(this.arrive(a, one));
        }
        const gate = KINDS[a.kind].reads ? gates.get(`UNSHARD,${a.s}`) : a.kind === "U" && gates.get(`REDUCE_GRAD,${a.s}`);
        if (gate) found.push({ by: gate, what: gate.kind, sent: gate.end, here: gate.end });
        let previous = collective ? before : a.prev;
        if (collective && beside && beside.end >= (before?.end ?? -Infinity)) previous = beside;
        a.cause = previous && { by: previous, what: "", sent: previous.end, here: previous.end };
        for (const one of found) {
          const late = a.cause === null || one.here > a.cause.here + ROUNDING * Math.abs(one.here);
          if (late) a.cause = one;
        }
        if (collective) {
          gates.set(`${a.kind},${a.s}`, a);
          if (a.kind !== "RESHARD") beside = a;
        } else {
          before = a;
        }
      }
      this.transfers[rank].sort((x, y) => x.sent - y.sent);
    });
  }

  /** Return when an input arrived at the rank of `a`, and note its transfer. */
  arrive(a, { by, what, delay, source, target }) {
    const unit = what === "G" ? `${by.i}` : by.text.replace(/^\d+[A-Z_]+/, "");
    const wait = this.plan.measured ? this.waited.get(`${a.rank} ${what}${source}>${target} ${unit}`) : null;
    const sent = by.sentAt, here = this.plan.measured ? (wait ? wait[1] : Math.min(sent, a.start)) : sent + delay;
    const one = { by, to: a, what, sent: Math.min(sent, here), here };
    if (here > one.sent) this.transfers[a.rank].push(one);
    return one;
  }

  /** Return the actions that made `a` end when it did, from the first to `a`. */
  chain(a, most = Infinity) {
    const found = [], seen = new Set();
    for (; a && !seen.has(a) && found.length < most; a = a.cause?.by) {
      if (a.fusedWith && a.fusedWith !== found.at(-1)) found.push(a.fusedWith);  // a pair ends as one
      seen.add(a);
      found.push(a);
    }
    return found.reverse();
  }

  /** Return the memory of a rank over time, in steps, and the moment of its peak. */
  findMemory(row, rank) {
    const growth = this.plan.growth, changes = [];
    for (const a of row) {
      const grown = growth[a.kind]?.[a.s] ?? 0;
      if (grown) changes.push([grown > 0 ? a.start : a.end, grown]);
    }
    changes.sort((x, y) => x[0] - y[0]);
    const times = [], levels = [];
    let level = this.plan.weights[rank], peak = level, at = this.begin;
    for (const [time, grown] of changes) {
      level += grown;
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
    let k = 0;
    for (const other of this.rows[a.rank]) {
      if (other === a) continue;
      if ((other.start + other.end) / 2 > time) break;
      k++;
    }
    return k;
  }
}

/** Return a number as a reader wants it: four digits, and with a unit, its prefix. */
function number(value, unit = "") {
  if (!unit || !value) return `${Number(value.toPrecision(unit ? 4 : 6))}${unit && ` ${unit}`}`;
  const power = Math.max(-3, Math.min(4, Math.floor(Math.log10(Math.abs(value)) / 3 + 1e-9)));
  return `${Number((value / 1000 ** power).toPrecision(4))} ${["n", "µ", "m", "", "k", "M", "G", "T"][power + 3]}${unit}`;
}

// --------------------------------------------------------------------------------------------------------- 5 Drawing

const LEFT = 62, RIGHT = 64, TITLE = 24, AXIS = 22;  // pixels, as are all sizes here
const PLAIN = 11, NARROW = 5, INK = "#202020", IDLE = "#f1f1f1", HELD = "#c9c2d8", FLIGHT = "#b08d57";
const FONT = '"DejaVu Sans Mono", ui-monospace, Menlo, Consolas, monospace';
const PAYLOAD = { F: "value", B: "cotangent", G: "gradient" };
const canvas = document.querySelector("canvas"), ctx = canvas.getContext("2d", { alpha: false });
const panels = DATA.panels.map((plan) => new Panel(plan));
const view = { from: 0, to: 1, y: 0, row: 0, color: "kind", path: false, transfers: true, memory: true, edit: false,
  query: "", at: null, moves: [] };
const hover = { hit: null, drag: null };
const colors = new Map();

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
  if (view.color === "change") return colorOfChange(panel, a);
  const held = (panel.held ??= panel.base.map((row) => [...new Set(row.map((one) => one.s))].sort((x, y) => x - y)))[a.rank];
  const key = `${view.color} ${a.kind} ${a.s} ${held.length}`, known = (panel.shades ??= new Map());
  if (!known.has(key)) {
    const light = held.indexOf(a.s) / Math.max(1, held.length - 1);
    const stages = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb"];  // Paul Tol, bright
    const dim = { F: 0.45, B: 0, I: 0.15, W: 0.65 }[KINDS[a.kind].letter] ?? 0.3;
    known.set(key, view.color === "kind" ? mix(KINDS[a.kind].color, "#ffffff", light / 2)
      : mix(stages[a.s % stages.length], "#ffffff", dim));
  }
  return known.get(key);
}

/** Return the same work in the other timeline: the action of that name, or the other way to run its backward. */
function twinOf(panel, a) {
  const other = panels[panel === panels[0] ? 1 : 0]?.byText, name = (kind) => a.text.replace(/[A-Z_]+/, kind);
  return other?.get(a.text) ?? other?.get(name({ B: "I", I: "B", F: "OVERLAP_F", OVERLAP_F: "F" }[a.kind] ?? "")) ?? null;
}

/** Return how much later an action starts than in the other timeline, null if it is not there. */
function changeOf(panel, a) {
  const twin = twinOf(panel, a);
  return twin && a.start - panel.begin - (twin.start - panels[panel === panels[0] ? 1 : 0].begin);
}

function colorOfChange(panel, a) {
  const change = changeOf(panel, a);
  if (change === null) return "#999999";
  const share = Math.min(1, Math.abs(change) / (0.15 * panel.makespan || 1)) ** 0.6;
  return mix("#e8e8e8", change > 0 ? "#d95f02" : "#1f78b4", Math.abs(change) < 1e-6 * panel.makespan ? 0 : share);
}

/** Return whether an action runs on another rank, or after another action, than in the other timeline. */
function isMoved(panel, a) {
  const twin = twinOf(panel, a);
  return twin !== null && (twin.rank !== a.rank || twin.prev?.text !== a.prev?.text);
}

const timeScale = () => (size.width - LEFT - RIGHT) / (view.to - view.from);
const xOf = (panel, time) => LEFT + (time - panel.begin - view.from) * timeScale();
const timeAt = (panel, x) => (x - LEFT) / timeScale() + view.from + panel.begin;
const size = { width: 0, height: 0, ratio: 1 };

const gap = () => (view.row < 8 ? 0 : view.row < 16 ? 1 : Math.min(10, view.row * 0.12));

/** Return the heights of the lanes of a row: actions, collectives, transfers, memory. */
function lanesOf(panel) {
  const room = view.row - gap(), moving = view.transfers && panel.plan.ranks > 1 && room >= 18;
  const held = view.memory && room >= 26 && (panel.peak > 0);
  const flight = moving ? Math.min(12, room * 0.18) : 0, memory = held ? Math.min(40, room * 0.32) : 0;
  const left = Math.max(2, room - flight - memory), beside = panel.hasBesides && left >= 8 ? left * 0.35 : 0;
  return { work: left - beside, beside, flight, memory };
}

const heightOf = (panel) => TITLE + panel.plan.ranks * view.row + 8;
const contentHeight = () => panels.reduce((sum, panel) => sum + heightOf(panel), 0) + 4;
const topOf = (panel) => AXIS - view.y + panels.slice(0, panels.indexOf(panel)).reduce((sum, one) => sum + heightOf(one), 0);
const yOf = (panel, rank) => topOf(panel) + TITLE + rank * view.row;

/** Return the numbers of the first action that ends after `from`, and of the first that starts at or after `to`. */
function visible(row, from, to) {
  const first = (test) => {
    let low = 0, high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (test(row[middle])) high = middle;
      else low = middle + 1;
    }
    return low;
  };
  return [first((a) => a.end >= from), first((a) => a.start > to)];
}

function draw() {
  ctx.setTransform(size.ratio, 0, 0, size.ratio, 0, 0);
  ctx.fillStyle = "#ffffff";
  ctx.fillRect(0, 0, size.width, size.height);
  for (const panel of panels) drawPanel(panel);
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
  drawBound(panel);
  if (view.path) drawChain(panel, panel.critical, DATA.marked, lanes);
  drawMarks(panel, lanes);
  ctx.restore();
  for (let rank = first; rank <= last; rank++) drawMargins(panel, rank, yOf(panel, rank), lanes);
  write(summarize(panel), 8, topOf(panel) + 16, "bold 12px system-ui, sans-serif");
}

function write(words, x, y, font, style = INK, align = "left") {
  Object.assign(ctx, { font, fillStyle: style, textAlign: align });
  ctx.fillText(words, x, y);
}

function box(x, y, wide, high, color) {
  ctx.fillStyle = color;
  ctx.fillRect(x, y, wide, high);
}

function drawRank(panel, rank, y, lanes) {
  const from = timeAt(panel, LEFT), to = timeAt(panel, size.width - RIGHT);
  const left = Math.max(LEFT, xOf(panel, panel.begin)), right = Math.min(size.width - RIGHT, xOf(panel, panel.end));
  if (right <= left) return;
  for (const [row, top, high] of [[panel.lanes[rank], y, lanes.work], [panel.besides[rank], y + lanes.work, lanes.beside]]) {
    if (!high) continue;
    const [one, end] = visible(row, from, to);
    const narrow = end - one > (right - left) / NARROW;
    if (narrow) drawPixels(panel, row, one, end, top, high, left, right);
    else drawBoxes(panel, row, one, end, top, high, left, right);
  }
  if (lanes.flight) drawTransfers(panel, rank, y + lanes.work + lanes.beside, lanes.flight, from, to);
  if (lanes.memory) drawMemory(panel, rank, y + view.row - gap() - lanes.memory, lanes.memory, left, right, from, to);
}

/** Draw narrow actions as one line of pixels, each the mean of what it covers, stretched to the height of the row. */
function drawPixels(panel, row, one, end, y, high, left, right) {
  const wide = Math.max(1, Math.round((right - left) * size.ratio)), line = new ImageData(wide, 1);
  const sums = new Float32Array(4 * wide), scale = timeScale() * size.ratio;
  const zero = panel.begin + view.from + (left - LEFT) / timeScale();
  const spread = (from, to, [red, green, blue]) => {
    const start = Math.max(0, (from - zero) * scale), stop = Math.min(wide, (to - zero) * scale);
    for (let x = Math.floor(start); x < stop; x++) {
      const share = Math.min(x + 1, stop) - Math.max(x, start), k = 4 * x;
      sums[k] += share * red;
      sums[k + 1] += share * green;
      sums[k + 2] += share * blue;
      sums[k + 3] += share;
    }
  };
  for (let k = one; k < end; k++) {
    const a = row[k];
    if (view.transfers && a.cause?.what && a.prev) spread(a.prev.end, a.start, channels(DATA.wait));
    spread(a.start, a.end, channels(colorOf(panel, a)));
  }
  const idle = channels(IDLE);
  for (let k = 0; k < 4 * wide; k++) {
    const rest = Math.max(0, 1 - sums[k | 3]);
    line.data[k] = (k & 3) === 3 ? 255 : (sums[k] + rest * idle[k & 3]) / Math.max(1, sums[k | 3]);
  }
  const place = drawPixels.place ??= document.createElement("canvas");
  if (place.width < wide) [place.width, place.height] = [wide, 1];
  place.getContext("2d").putImageData(line, 0, 0);
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(place, 0, 0, wide, 1, left, y, right - left, high);
}

function drawBoxes(panel, row, one, end, y, high, left, right) {
  const scale = timeScale(), font = Math.min(PLAIN, high * 0.75), letters = font * 0.61;
  box(left, y, right - left, high, IDLE);
  for (let k = one; k < end; k++) {
    const a = row[k], x = xOf(panel, a.start), wide = (a.end - a.start) * scale;
    if (view.transfers) drawWait(panel, a, y, high);
    box(x, y, Math.max(wide - (wide > 3 ? 1 : 0), 1.5), high, colorOf(panel, a));
    if (view.color === "change" && isMoved(panel, a)) box(x, y + high - 3, Math.max(wide - 1, 1.5), 3, INK);
    if (font < 7 || wide < letters) continue;
    const label = panel.label(a), shown = label.length * letters <= wide ? label : `${a.i}`;
    if (shown.length * letters <= wide) write(shown, x + (wide - 1) / 2, y + high / 2 + font * 0.36, `${font}px ${FONT}`,
      INK, "center");
  }
}

/** Draw why a rank was idle before an action: light while what it waits for was not made, dark in its transfer. */
function drawWait(panel, a, y, high) {
  const from = a.prev ? a.prev.end : panel.begin;
  if (!a.cause?.what || a.start - from < ROUNDING) return;
  const sent = Math.max(from, a.cause.sent), here = Math.max(sent, Math.min(a.cause.here, a.start));
  const [x0, x1, x2] = [from, sent, here].map((time) => xOf(panel, time));
  if (x1 > x0) box(x0, y + high * 0.3, x1 - x0, high * 0.4, DATA.wait);
  if (x2 > x1) box(x1, y + high * 0.3, x2 - x1, high * 0.4, FLIGHT);
}

/** Draw what travels to a rank: values above, cotangents below. */
function drawTransfers(panel, rank, y, high, from, to) {
  const half = high / 2 - 0.5, shades = { F: KINDS.F.color, B: KINDS.B.color, G: KINDS.G.color };
  for (const one of panel.transfers[rank]) {
    if (one.here < from) continue;
    if (one.sent > to) break;
    const x = xOf(panel, one.sent), top = one.what === "F" ? y + 1 : y + 1 + half;
    box(x, top, Math.max(1, xOf(panel, one.here) - x), half - 0.5, shades[one.what]);
  }
}

function scaleOfMemory(panel) {
  const caps = panel.plan.caps.filter((cap) => cap !== null && cap <= 2 * panel.peak);
  return Math.max(panel.peak, ...caps) || 1;
}

function drawMemory(panel, rank, y, high, left, right, from, to) {
  const { times, levels, peak, at } = panel.memory[rank], most = scaleOfMemory(panel);
  const level = (value) => y + high * (1 - Math.max(0, value) / most), weights = level(panel.plan.weights[rank]);
  ctx.fillStyle = HELD;
  ctx.beginPath();
  ctx.moveTo(left, y + high);
  let k = 0;
  for (; k + 1 < times.length && times[k + 1] < from;) k++;
  let now = weights, lastX = left;
  for (; k < times.length && times[k] <= to; k++) {
    const x = Math.max(left, xOf(panel, times[k]));
    if (x > lastX) {
      ctx.lineTo(lastX, now);
      ctx.lineTo(x, now);
      now = level(levels[k]);
      lastX = x;
    } else {
      now = Math.min(now, level(levels[k]));
      if (x === left) now = level(levels[k]);
    }
  }
  ctx.lineTo(lastX, now);
  ctx.lineTo(right, now);
  ctx.lineTo(right, y + high);
  ctx.fill();
  const cap = panel.plan.caps[rank];
  if (cap !== null && cap <= 2 * panel.peak) {
    for (let x = left; x < right; x += 8) box(x, level(cap) - 0.5, 5, 1, peak > cap + ROUNDING ? "#d00000" : "#7a6f99");
  }
  const x = xOf(panel, at);
  if (x >= left && x <= right && peak > 0) box(x - 1.5, level(peak), 3, Math.max(3, high * 0.2), "#5b4b8a");
}

function drawMargins(panel, rank, y, lanes) {
  const every = Math.ceil(11 / view.row);
  if (y < AXIS - 6 || rank % every) return;
  const high = Math.max(10, Math.min(view.row, lanes.work || view.row));
  write(`rank ${rank}`, LEFT - 6, y + high / 2 + 4, `11px ${FONT}`, INK, "right");
  const { peak } = panel.memory[rank], cap = panel.plan.caps[rank], over = cap !== null && peak > cap + ROUNDING;
  if (lanes.memory && peak > 0) write(number(peak, panel.plan.size), size.width - RIGHT + 4, y + view.row - gap() - 2,
    `10px ${FONT}`, over ? "#d00000" : "#5b4b8a");
}

function drawBound(panel) {
  if (!panel.plan.bound) return;
  const x = xOf(panel, panel.begin + panel.plan.bound.time), y = topOf(panel) + TITLE;
  ctx.fillStyle = "#00674a";
  for (let top = y - 4; top < y + panel.plan.ranks * view.row; top += 6) ctx.fillRect(x - 0.75, top, 1.5, 4);
}

/** Frame the actions of a chain, and join those that follow one another. */
function drawChain(panel, chain, color, lanes) {
  const middle = (a) => yOf(panel, a.rank) + (COLLECTIVES.has(a.kind) ? lanes.work + lanes.beside / 2 : lanes.work / 2);
  ctx.strokeStyle = color;
  ctx.lineWidth = 1.5;
  ctx.beginPath();
  chain.forEach((a, k) => {
    const x = xOf(panel, a.start), end = xOf(panel, a.end);
    if (k) ctx.lineTo(x, middle(a));
    else ctx.moveTo(x, middle(a));
    if (end - x < 4) ctx.lineTo(end, middle(a));
    else ctx.moveTo(end, middle(a));
  });
  ctx.stroke();
  for (const a of chain) frame(panel, a, color, lanes, 1.5);
}

function frame(panel, a, color, lanes, width) {
  const beside = COLLECTIVES.has(a.kind), x = xOf(panel, a.start), wide = xOf(panel, a.end) - x;
  const y = yOf(panel, a.rank) + (beside ? lanes.work : 0), high = beside ? lanes.beside : lanes.work;
  if (x > size.width || x + wide < LEFT || wide < 3) return;
  ctx.strokeStyle = color;
  ctx.lineWidth = width;
  ctx.strokeRect(x + width / 2, y + width / 2, Math.max(1, wide - 1 - width), Math.max(1, high - width));
}

/** Draw what the reader points at and has found: its causes, the search, what is dragged, and a violation. */
function drawMarks(panel, lanes) {
  for (const a of found().get(panel) ?? []) frame(panel, a, "#000000", lanes, 2.5);
  const wrong = panel.violation?.action && panel.byText.get(panel.violation.action);
  if (wrong) frame(panel, wrong, "#b00020", lanes, 3);
  const { hit, drag } = hover, pointed = hit?.a ?? null;
  if (pointed && hit.panel === panel && !drag) {
    if (!view.path) drawChain(panel, panel.chain(pointed, 12), "#444444", lanes);
    frame(panel, pointed, "#000000", lanes, 2);
  }
  if (drag?.panel === panel) {
    const y = yOf(panel, drag.a.rank), wide = Math.max(4, xOf(panel, drag.a.end) - xOf(panel, drag.a.start));
    ctx.globalAlpha = 0.75;
    box(drag.x - wide / 2, y - 3, wide, lanes.work, colorOf(panel, drag.a));
    ctx.globalAlpha = 1;
    const row = panel.rows[drag.a.rank].filter((a) => a !== drag.a), next = row[drag.to], last = row[drag.to - 1];
    box(xOf(panel, next ? next.start : last ? last.end : panel.begin) - 1.5, y - 4, 3, lanes.work + 8, "#000000");
  }
}

function drawAxis() {
  const unit = panels[0]?.plan.time ?? "", step = stepOf(90 / timeScale());
  box(0, 0, size.width, AXIS, "#ffffff");
  box(LEFT, AXIS - 1, size.width - LEFT - RIGHT, 1, "#808080");
  for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) {
    const x = LEFT + (k * step - view.from) * timeScale();
    box(x, AXIS - 5, 1, 4, "#808080");
    write(number(k * step, unit), x, AXIS - 8, `10px ${FONT}`, "#606060", "center");
  }
}

/** Return the round number that is at least `least`: 1, 2 or 5 times a power of ten. */
function stepOf(least) {
  const ten = 10 ** Math.floor(Math.log10(least));
  return ten * [1, 2, 5, 10].find((factor) => factor * ten >= least * (1 - ROUNDING));
}

/** Return the line above a timeline. */
function summarize(panel) {
  const { plan } = panel, first = panels[0];
  if (panel.violation) return `${plan.name}: not correct, see below`;
  const words = [`takes ${number(panel.makespan, plan.time)}`];
  if (panel !== first && first.makespan) {
    words[0] += ` (${percent(panel.makespan / first.makespan - 1)})`;
  }
  words.push(`bubble ${(100 * panel.bubble).toFixed(1)} %`, `peak ${number(panel.peak, plan.size)}`);
  const cap = Math.min(...plan.caps.map((one) => one ?? Infinity));
  if (cap < Infinity) words[2] += ` of ${number(cap, plan.size)}`;
  if (plan.bound) words.push(`bound ${number(plan.bound.time, plan.time)}, ${percent(panel.makespan / plan.bound.time - 1)}`);
  if (panel !== first) words.push(`${panel.rows.flat().filter((a) => isMoved(panel, a)).length} actions moved`);
  return `${plan.name}: ${words.join(", ")}`;
}

const percent = (share) => `${share < 0 ? "−" : "+"}${Math.abs(100 * share).toFixed(1)} %`;

// ------------------------------------------------------------------------------------------------------ 6 The reader

const element = (id) => document.getElementById(id);
const longest = () => Math.max(1e-12, ...panels.flatMap((panel) => [panel.makespan, panel.plan.bound?.time ?? 0]));
const SWITCHES = ["path", "transfers", "memory", "edit"];

function redraw() {
  if (redraw.asked) return;
  redraw.asked = requestAnimationFrame(() => {
    redraw.asked = 0;
    draw();
  });
}

/** Show all of every timeline: the rows as high as fits, the times as wide as fits. */
function fit() {
  const rows = panels.reduce((sum, panel) => sum + panel.plan.ranks, 0), room = size.height - AXIS - 4;
  view.row = Math.max(5, Math.min(84, (room - panels.length * (TITLE + 8)) / Math.max(1, rows)));
  Object.assign(view, { from: 0, to: longest() * 1.005, y: 0 });
}

function clampView() {
  const most = longest(), wide = Math.min(view.to - view.from, most * 1.5);
  view.from = Math.max(-0.25 * wide, Math.min(view.from, most - 0.1 * wide));
  view.to = view.from + wide;
  view.y = Math.max(0, Math.min(view.y, contentHeight() - (size.height - AXIS)));
}

function move(pixels, rows) {
  const by = pixels / timeScale();
  Object.assign(view, { from: view.from - by, to: view.to - by, y: view.y - rows });
  changed();
}

/** Make everything `factor` times as wide; the time at `x` stays where it is. */
function zoom(factor, x = LEFT + (size.width - LEFT - RIGHT) / 2) {
  const fixed = (x - LEFT) / timeScale() + view.from, wide = (view.to - view.from) / factor;
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

function changed() {
  clampView();
  redraw();
  clearTimeout(changed.timer);
  changed.timer = setTimeout(writeAddress, 150);
}

/** Keep the view in the address, so that a link shows the same. */
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
  const words = new URLSearchParams(location.hash.slice(1));
  const numbers = (name) => (words.get(name) ?? "").split(",").map(Number);
  const [from, to] = numbers("t"), [y, row] = numbers("y");
  if (to > from && row > 0) Object.assign(view, { from, to, y, row });
  if (words.has("show")) {
    const shown = words.get("show").split(" ");
    for (const name of SWITCHES) view[name] = shown.includes(name);
    const color = shown.find((name) => [...element("color").options].some((one) => one.value === name));
    view.color = color ?? "kind";
  }
  view.query = words.get("find") ?? "";
  view.moves = (words.get("moves") ?? "").split(" ").filter((one) => /^\d+(\.\d+){3}$/.test(one))
    .map((one) => one.split(".").map(Number)).filter(([p]) => panels[p] && !panels[p].plan.measured);
  panels.forEach(applyMoves);
  showControls();
}

function applyMoves(panel, p) {
  const mine = view.moves.filter(([one]) => one === p).map(([, ...rest]) => rest);
  if (mine.length || panel.moved) panel.reorder(mine);
  panel.moved = mine.length;
}

/** Move the action at place `from` of a rank's row to `to`, and say what comes of it. */
function edit(p, rank, from, to) {
  view.moves.push([p, rank, from, to]);
  applyMoves(panels[p], p);
  showVerdict(panels[p]);
  changed();
}

function undo() {
  const last = view.moves.pop();
  if (!last) return;
  applyMoves(panels[last[0]], last[0]);
  showVerdict(panels[last[0]]);
  changed();
}

function showVerdict(panel) {
  const place = element("verdict"), wrong = panel.violation;
  place.className = wrong ? "wrong" : "right";
  const before = panel.plan.ends.flat().reduce((most, one) => Math.max(most, one), 0) -
    panel.plan.starts.flat().reduce((least, one) => Math.min(least, one), Infinity);
  place.textContent = wrong
    ? `${panel.plan.name}: rank ${wrong.rank}, position ${wrong.position}, ${wrong.action ?? "end"}: ${wrong.message} ` +
      `[rule: ${wrong.rule}]`
    : `${panel.plan.name}: correct; takes ${number(panel.makespan, panel.plan.time)}, ` +
      `${percent(panel.makespan / before - 1)} against the order before the edits`;
}

function showControls() {
  for (const name of SWITCHES) element(name).checked = view[name];
  element("color").value = view.color;
  element("query").value = view.query;
  element("tools").hidden = !view.edit;
  canvas.style.cursor = view.edit ? "crosshair" : "grab";
  showLegend();
  redraw();
}

function showLegend() {
  const used = new Set(panels.flatMap((panel) => panel.base.flat().map((a) => a.kind))), place = element("legend");
  const entries = Object.entries(KINDS).filter(([kind]) => used.has(kind) && view.color === "kind")
    .map(([, look]) => [look.color, look.letter, look.name]);
  if (view.color === "stage") entries.push(["#4477aa", "", "one hue per stage, dark backwards"]);
  if (view.color === "change") {
    entries.push(["#1f78b4", "", "earlier than in the other"], ["#e8e8e8", "", "as early"], ["#d95f02", "", "later"],
      [INK, "", "below: after another action"]);
  }
  if (panels.some((panel) => panel.several) && view.color === "kind") entries.push(["", "", "lighter: a later stage of the rank"]);
  if (view.transfers) entries.push([DATA.wait, "", "waits for the work of another rank"], [FLIGHT, "", "waits for a transfer"]);
  if (view.memory) entries.push([HELD, "", "memory held; the mark is its peak, the line its cap"]);
  if (view.path) entries.push([DATA.marked, "", "critical path"]);
  if (panels.some((panel) => panel.plan.bound)) entries.push(["#00674a", "", "dashed: no order takes less"]);
  place.replaceChildren(...entries.map(([color, letter, words]) => {
    const entry = document.createElement("span"), sample = document.createElement("i");
    sample.style.background = color;
    sample.textContent = letter;
    entry.append(...(color ? [sample] : []), words);
    return entry;
  }));
}

/** Return the actions of each panel that the query names: 2F17 that one, F17 those of all stages, i17 a microbatch. */
function found() {
  const query = view.query.trim().toUpperCase();
  if (found.query === query && found.of === view.moves.length) return found.known;
  Object.assign(found, { query, of: view.moves.length, known: new Map() });
  const words = /^(\d*)([A-Z_]*)(\d*)(?:\.(\d+))?$/.exec(query);
  if (!query || !words) return found.known;
  const [, s, kind, i, part] = words, fits = (a) => (s === "" || a.s === Number(s)) && (i === "" || a.i === Number(i)) &&
    (kind === a.kind || kind === KINDS[a.kind].letter || (kind === "I" && s === "" && i !== "")) &&
    (part === undefined || a.part === Number(part));
  for (const panel of panels) {
    const some = panel.rows.flat().filter(fits);
    if (some.length) found.known.set(panel, some);
  }
  return found.known;
}

/** Go to the next action that was found. */
function search() {
  const every = [...found()].flatMap(([panel, some]) => some.map((a) => ({ panel, a })));
  search.turn = search.query === view.query ? (search.turn + 1) % Math.max(1, every.length) : 0;
  search.query = view.query;
  const hit = every[search.turn];
  element("verdict").className = hit ? "" : "wrong";
  element("verdict").textContent = hit ? `${search.turn + 1} of ${every.length}: ${describe(hit.panel, hit.a)[0]}` :
    view.query && `nothing is called ${view.query}`;
  if (hit) goTo(hit);
}

function goTo({ panel, a }) {
  const wide = Math.max(12 * (a.end - a.start), 1e-6 * longest()), middle = (a.start + a.end) / 2 - panel.begin;
  const shown = Math.min(view.to - view.from, Math.max(wide, (view.to - view.from) * 1e-9));
  Object.assign(view, { from: middle - shown / 2, to: middle + shown / 2 });
  if (view.row < 14) view.row = 22;
  view.y += yOf(panel, a.rank) - size.height / 2;
  hover.hit = { panel, a };
  changed();
}

/** Return what is at a place of the canvas: a panel with an action, or with a transfer. */
function hitAt(x, y) {
  if (x < LEFT || x > size.width - RIGHT || y < AXIS) return null;
  for (const panel of panels) {
    const rank = Math.floor((y - yOf(panel, 0)) / view.row);
    if (rank < 0 || rank >= panel.plan.ranks) continue;
    const lanes = lanesOf(panel), below = y - yOf(panel, rank), time = timeAt(panel, x), slack = 2 / timeScale();
    if (below < lanes.work + lanes.beside) {
      const row = below < lanes.work ? panel.lanes[rank] : panel.besides[rank];
      const [one] = visible(row, time, time), [near] = visible(row, time - slack, time);
      const a = [row[one], row[near]].find((some) => some && some.start <= time + slack);
      return a ? { panel, a } : { panel, gap: row[one] ?? null, rank };
    }
    if (below < lanes.work + lanes.beside + lanes.flight) {
      const transfer = panel.transfers[rank].find((one) => one.sent <= time + slack && one.here >= time - slack);
      return transfer ? { panel, transfer } : null;
    }
    return { panel, rank, time };
  }
  return null;
}

/** Return the lines about an action: what it is, when it runs, why it did not begin earlier. */
function describe(panel, a) {
  const show = (time) => number(time, panel.plan.time), when = (time) => show(time - panel.begin);
  const part = a.part === null ? "" : `, slice ${a.part}`;
  const lines = [`${a.text} on rank ${a.rank}: ${KINDS[a.kind].name}, stage ${a.s}, microbatch ${a.i}${part}`,
    `${when(a.start)} to ${when(a.end)}, takes ${show(a.end - a.start)}`];
  const change = panels.length > 1 ? changeOf(panel, a) : null;
  if (change !== null) {
    const twin = twinOf(panel, a), { name } = panels[panel === panels[0] ? 1 : 0].plan;
    lines.push(`${name}: ${twin.text} starts at ${when(a.start - change)} on rank ${twin.rank}, takes ` +
      `${show(twin.end - twin.start)}${isMoved(panel, a) ? `, after ${twin.prev?.text ?? "nothing"}` : ""}`);
  }
  return [...lines, ...explain(panel, a)];
}

/** Return the chain of causes of an action, a line for each. */
function explain(panel, a) {
  const show = (time) => number(time, panel.plan.time), lines = [], ready = a.prev ? a.prev.end : panel.begin;
  const gap = a.start - ready, cause = a.cause;
  if (!cause) return lines;
  if (gap > ROUNDING * Math.abs(a.start)) {
    if (cause.what) {
      const late = Math.max(0, Math.min(cause.sent, a.start) - ready), flight = Math.max(0, cause.here - Math.max(cause.sent, ready));
      const what = PAYLOAD[cause.what] ? `the ${PAYLOAD[cause.what]} of ${cause.by.text} from rank ${cause.by.rank}` : cause.by.text;
      const rest = gap - late - flight > ROUNDING * Math.abs(a.start) ? `, and ${show(gap - late - flight)} besides` : "";
      lines.push(`idle ${show(gap)} before it: waits for ${what}: ${show(late)} until it is made, ${show(flight)} in ` +
        `transfer${rest}`);
    } else {
      lines.push(`idle ${show(gap)} before it, and nothing that it waits for`);
    }
  }
  const causes = panel.chain(a, 7).reverse();
  causes.slice(0, 6).forEach((one, k) => {
    const why = one.cause;
    if (!why) return;
    const last = k === 5 && causes.length > 6 ? ", and so on" : "";
    lines.push(why.what ? `${one.text} waits for ${why.by.text} of rank ${why.by.rank}${last}`
      : `${one.text} follows ${why.by.text}${last}`);
  });
  if (panel.onPath.has(a)) lines.push("on the critical path");
  return lines;
}

function describeHit(hit) {
  const { panel, a, gap, transfer, rank, time } = hit, show = (value) => number(value, panel.plan.time);
  if (a) return describe(panel, a);
  if (transfer) {
    const { by, to, what, sent, here } = transfer;
    return [`${PAYLOAD[what]} of ${by.text}: rank ${by.rank} to rank ${to.rank}, for ${to.text}`,
      `${show(sent - panel.begin)} to ${show(here - panel.begin)}, takes ${show(here - sent)}`];
  }
  if (time !== undefined) {
    const { times, levels, peak, at } = panel.memory[rank], cap = panel.plan.caps[rank], before = times.findLastIndex((one) => one <= time);
    const held = before < 0 ? panel.plan.weights[rank] : levels[before];
    return [`rank ${rank} holds ${number(held, panel.plan.size)} at ${show(time - panel.begin)}`,
      `peak ${number(peak, panel.plan.size)} at ${show(at - panel.begin)}` + (cap === null ? "" : `, may hold ${number(cap, panel.plan.size)}`)];
  }
  return gap ? [`rank ${rank} is idle`, ...explain(panel, gap)] : [`rank ${rank} is idle: it has nothing left to do`];
}

function showTip(x, y) {
  const tip = element("tip");
  tip.style.display = hover.hit && !hover.drag ? "block" : "none";
  if (!hover.hit || hover.drag) return;
  tip.textContent = describeHit(hover.hit).join("\n");
  const { offsetWidth: wide, offsetHeight: high } = tip;
  tip.style.left = `${Math.max(4, Math.min(x + 14, size.width - wide - 4))}px`;
  tip.style.top = `${y + 18 + high > size.height ? Math.max(2, y - high - 12) : y + 18}px`;
}

const pairs = (line) => line.replace(/(\d+)OVERLAP_(F[\d.]+),(\d+[BI][\d.]+)/g, "($1$2;$3)OVERLAP_F_B");

/** Return the table of a panel's order, which `schedules.files.read_csv` reads. */
function writeTable(panel) {
  const lines = panel.rows.map((row) => pairs(row.map((a) => a.text).join(",")));
  if (!panel.plan.chain) lines.push(["graph", panel.plan.graph].filter((word) => word).join(","));
  return `${lines.join("\n")}\n`;
}

/** Return a panel's order as a Python module. */
function writePython(panel) {
  const { plan } = panel, { placement, graph } = plan.call, truth = (value) => (value ? "True" : "False");
  const rows = panel.rows.map((row) => `    "${row.map((a) => a.text).join(" ")}",\n`).join("");
  const uses = plan.uses ? `(${plan.uses.map((one) => `${one}, `).join("")})` : "None";
  return `# The order of ${JSON.stringify(plan.name)}, from its page.\n` +
    `from schedules import ${plan.chain ? "" : "Graph, "}Placement, from_rows, parse\n\nROWS = (\n${rows})\n` +
    `edited = from_rows(\n    tuple(tuple(map(parse, row.split())) for row in ROWS),\n    ${placement},\n` +
    `    microbatches=${plan.microbatches},\n    slices=${plan.slices},\n    backward=${truth(plan.backward)},\n` +
    `    graph=${plan.chain ? "None" : graph},\n    versions=${uses},\n)\n`;
}

/** Return the panel that was edited last, or else the first that can be. */
function edited() {
  const last = view.moves.at(-1);
  return last ? panels[last[0]] : panels.find((panel) => !panel.plan.measured) ?? panels[0];
}

function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function listen() {
  const at = (event) => [event.offsetX, event.offsetY];
  canvas.addEventListener("pointerdown", (event) => {
    const [x, y] = at(event), hit = hitAt(x, y);
    canvas.setPointerCapture(event.pointerId);
    const held = view.edit && hit?.a && !hit.panel.plan.measured;
    hover.drag = held ? { panel: hit.panel, a: hit.a, x, to: hit.a.k } : { pan: true };
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = at(event), drag = hover.drag;
    if (drag?.pan) {
      move(event.movementX, event.movementY);
    } else if (drag) {
      Object.assign(drag, { x, to: drag.panel.placeAt(drag.a, timeAt(drag.panel, x)) });
      redraw();
    } else {
      hover.hit = hitAt(x, y);
      redraw();
    }
    showTip(x, y);
  });
  canvas.addEventListener("pointerup", () => {
    const { panel, a, to } = hover.drag ?? {};
    hover.drag = null;
    if (panel && to !== a.k) edit(panels.indexOf(panel), a.rank, a.k, to);
    redraw();
  });
  canvas.addEventListener("pointerleave", () => {
    hover.hit = null;
    showTip(0, 0);
    redraw();
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [x, y] = at(event), factor = 1.0015 ** -event.deltaY;
    if (event.shiftKey) zoomRows(1.0015 ** -(event.deltaY || event.deltaX), y);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(-event.deltaX, 0);
    else zoom(factor, x);
  }, { passive: false });
  const keys = { "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), ArrowLeft: () => move(80, 0),
    ArrowRight: () => move(-80, 0), ArrowUp: () => move(0, 60), ArrowDown: () => move(0, -60),
    0: () => (fit(), changed()), "/": () => element("query").focus() };
  document.addEventListener("keydown", (event) => {
    if (event.key === "z" && (event.ctrlKey || event.metaKey)) undo();
    else if (event.target.tagName !== "INPUT" && !event.ctrlKey && keys[event.key]) keys[event.key]();
    else return;
    event.preventDefault();
  });
  for (const name of [...SWITCHES, "color"]) {
    element(name).addEventListener("change", (event) => {
      view[name] = name === "color" ? event.target.value : event.target.checked;
      showControls();
      changed();
    });
  }
  element("query").addEventListener("input", (event) => {
    view.query = event.target.value;
    changed();
  });
  element("query").addEventListener("keydown", (event) => event.key === "Enter" && search());
  const actions = { in: () => zoom(1.5), out: () => zoom(1 / 1.5), fit: keys[0], undo,
    csv: () => download("schedule.csv", writeTable(edited())), python: () => download("schedule.py", writePython(edited())) };
  for (const [id, act] of Object.entries(actions)) element(id).addEventListener("click", act);
  addEventListener("hashchange", readAddress);
  new ResizeObserver(resize).observe(canvas);
}

function resize() {
  const first = !size.width;
  Object.assign(size, { width: canvas.clientWidth, height: canvas.clientHeight, ratio: devicePixelRatio || 1 });
  canvas.width = size.width * size.ratio;
  canvas.height = size.height * size.ratio;
  if (first && !view.row) fit();
  draw();
}

function begin() {
  document.querySelector("h1").textContent = DATA.title;
  if (panels.length > 1) element("color").add(new Option("difference", "change"));
  if (panels.every((panel) => panel.plan.measured)) element("edit").disabled = true;
  readAddress();
  listen();
  resize();
}

begin();
