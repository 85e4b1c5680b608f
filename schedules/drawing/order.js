// SPDX-License-Identifier: Apache-2.0
//
// An order of actions: does it obey the rules, and when does each action run? Runs in the page, before `page.js`.
//
//   1 Actions     their text, and what the vocabulary says of them
//   2 The rules   a port of schedules/checking, for orders of the same actions: the first violation, and where
//   3 Playing     a port of schedules/playing/engine: when each action runs in an order
//
// Invariant: a test holds verdict, rank, position, action and times equal to those of `check` and `simulate`.
"use strict";

// --------------------------------------------------------------------------------------------------------- 1 Actions

const DATA = JSON.parse(document.getElementById("data").textContent), KINDS = DATA.kinds;
const COLLECTIVES = new Set(["UNSHARD", "RESHARD", "REDUCE_GRAD"]), ROUNDING = 1e-9;
const isOpener = (a) => a.kind === "OVERLAP_F";
const isBackward = (a) => a !== undefined && KINDS[a.kind].crosses === "B";

/** Return the action that a text such as 3F0 or 3F0.2 names. */
function parse(text, rank) {
  const [, s, kind, i, part] = /^(\d+)([A-Z_]+?)(\d+)(?:\.(\d+))?$/.exec(text);
  return { text, kind, s: Number(s), i: Number(i), part: part === undefined ? null : Number(part), rank };
}

/** Return the numbers of the routes on which a rank holds a stage. */
const routesOf = (plan, stage, rank) => [...plan.routes.keys()].filter((n) => plan.routes[n][stage] === rank);
/** Return the unit of an action: a microbatch, or a slice of one, or of what has no slices, its number. */
const unitOf = (plan, a) => (a.part === null ? a.i : a.i * plan.slices + a.part);

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
    [this.mine, this.routes, this.slices] = [routesOf(plan, stage, rank), plan.routes.length, plan.slices];
    const counts = this.mine.map((route) => Math.ceil((plan.microbatches - route) / this.routes) * plan.slices);
    this.count = counts.reduce((sum, count) => sum + count, 0);
    Object.assign(this, { replicated: this.mine.length < this.routes, lives: new Map(),
      finished: new Set(), prefix: 0, began: new Map(), versions: 0, applied: -1, gatherings: 0, summed: false,
      reduced: false, gathered: false });
    if (!plan.uses) return;
    this.stash = { needed: new Map(), old: new Set(), newest: 0 };
    for (let unit = 0; unit < this.count; unit++) {
      const version = plan.uses[this.microbatch(unit)];
      this.stash.needed.set(version, (this.stash.needed.get(version) ?? 0) + 1);
    }
  }

  unit(a) {
    const turn = Math.floor(a.i / this.routes) * this.mine.length;
    return (turn + this.mine.indexOf(a.i % this.routes)) * this.slices + (a.part ?? 0);
  }
  microbatch(unit) { return this.gathering(Math.floor(unit / this.slices)); }
  gathering(count) {
    return Math.floor(count / this.mine.length) * this.routes + this.mine[count % this.mine.length];
  }

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
        if (!this.lives.has(unit) && !this.finished.has(unit)) return this.microbatch(unit);
      }
    }
    return null;
  }
}

/** The rules on one rank: `step` takes its actions in order, `end` comes after the last. Both throw a Violation. */
class Judge {
  constructor(plan, rank) {
    Object.assign(this, { plan, rank, works: new Map(), opener: null, gathers: false, passed: new Map(), held: 0 });
    for (let s = 0; s < plan.stages; s++) {
      if (routesOf(plan, s, rank).length) this.works.set(s, new Work(plan, rank, s));
    }
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
      const needed = `needs memory for activations of ${number(this.held / this.unit)} microbatches`;
      fail("within_memory", `${needed}, more than the limit of ${this.plan.memory[this.rank]}`);
    }
  }

  end(length) {
    if (this.opener === null) return;
    throw new Violation("fused", this.rank, length, null, `nothing overlaps with ${this.opener.text}`);
  }

  requireLife(a, work, reject) {
    const word = KINDS[a.kind], unit = work.unit(a), fail = (problem) => reject("forward_before_backward", problem);
    if (!word.after) return;
    const state = work.finished.has(unit) ? "done" : (work.lives.get(unit) ?? "");
    if (state !== word.before) {
      const name = (kind) => `${a.s}${kind}${a.i}${a.part === null ? "" : `.${a.part}`}`;
      const ages = ["", "kept", "forward", "halved", "done"], makers = { kept: "C", forward: "F", halved: "I" };
      if (state === "kept" && word.before === "forward") fail(`comes before ${name("R")}`);
      if (ages.indexOf(state) < ages.indexOf(word.before)) fail(`comes before ${name(makers[word.before])}`);
      fail("has already run, or its backward has");
    }
    if (word.after === "done" || !this.plan.backward) work.finish(unit);
    else work.lives.set(unit, word.after);
  }

  requireCollected(a, work, fail) {
    const last = { G: "summed", REDUCE_GRAD: "reduced" }[a.kind];
    if (last) {
      const reduces = last === "reduced", first = work.microbatch(work.prefix);
      if (work.finished.size < work.count) fail(last, `comes before the backward of microbatch ${first}`);
      if (reduces && work.replicated && !work.summed) fail(last, "comes before the replicas' gradients are summed");
      if (reduces && work.versions) fail(last, "comes after an update with a gradient that was not reduced");
      work[last] = true;
    } else if (a.kind === "UNSHARD") {
      if (work.gathered) fail("gathered", "gathers weights that are gathered already");
      if (!work.gatherings && (work.lives.size || work.finished.size)) {
        fail("gathered", `comes after a pass through stage ${a.s}, which read weights that were not gathered`);
      }
      if (a.i !== work.gathering(work.gatherings++)) fail("gathered", "is not numbered in order");
      work.gathered = this.gathers = true;
    } else if (a.kind === "RESHARD") {
      if (!work.gathered) fail("gathered", "frees weights that are not gathered");
      if (a.i !== work.gathering(work.gatherings - 1)) fail("gathered", "is not the end of that gathering");
      work.gathered = false;
    } else if (this.gathers) {
      const bare = work.gatherings && !work.gathered;
      if (KINDS[a.kind].reads && bare) fail("gathered", "reads weights that are not gathered");
      if (a.kind === "U" && work.gathered) fail("gathered", "updates the shards while the weights are gathered");
    }
  }

  requireUpdated(a, work, fail) {
    const { stash } = work, version = this.plan.uses?.[a.i];
    if (a.kind === "U") {
      this.recordUpdate(a, work, fail);
    } else if (stash && KINDS[a.kind].after) {
      if (version > stash.newest) fail("updated", `uses version ${version} of the weights, which is not made yet`);
      if (KINDS[a.kind].after !== "done") return;
      stash.needed.set(version, stash.needed.get(version) - 1);
      if (!stash.needed.get(version)) stash.old.delete(version);
    }
  }

  recordUpdate(a, work, reject) {
    const { stash } = work, parted = work.firstPartial(), fail = (problem) => reject("updated", problem);
    if (work.prefix < work.count && work.microbatch(work.prefix) <= a.i) {
      fail(`comes before the backward of microbatch ${work.microbatch(work.prefix)}`);
    }
    if (a.i <= work.applied) fail(`an earlier update applied microbatch ${work.applied}`);
    if (work.replicated && !work.summed) fail("comes before the gradients of the replicas are summed");
    if (parted !== null) fail(`comes between the slices of microbatch ${parted}`);
    work.versions++;
    work.applied = a.i;
    if (stash) {
      if (stash.needed.get(stash.newest)) stash.old.add(stash.newest);
      stash.newest++;
    } else {
      work.began = new Map([...work.lives.keys()].map((unit) => [unit, work.began.get(unit) ?? work.versions - 1]));
    }
    const kept = stash ? stash.old.size + 1 : new Set([work.versions, ...work.began.values()]).size;
    const limit = this.plan.versions[this.rank] ?? Infinity;
    if (kept > limit) fail(`would make ${kept} versions of the weights to keep, more than ${limit}`);
  }

  requireSliced(a, fail) {
    const way = KINDS[a.kind].crosses, k = this.plan.slices, key = (what) => `${what},${a.s},${a.i}`;
    if (!way) return;
    const done = this.passed.get(key(way)) ?? 0, forwards = this.passed.get(key("F")) ?? 0;
    const expected = way === "F" ? done : k - 1 - done, early = way === "B" && forwards < k;
    if (a.part !== expected || early) {
      fail("sliced", `comes before ${a.s}${early ? `F${a.i}.${forwards}` : `${way}${a.i}.${expected}`}`);
    }
    this.passed.set(key(way), done + 1);
    if (way === "B" && a.part === 0) ["F", "B"].forEach((what) => this.passed.delete(key(what)));
  }
}

// --------------------------------------------------------------------------------------------------------- 3 Playing

/** Return what each kind of action takes and gives, by stage and route: schedules.playing.dependencies.wires. */
function wire(plan) {
  const R = plan.routes.length, taken = new Map(), given = new Map(), table = {};
  const add = (map, key, one) => (map.has(key) ? map.get(key).push(one) : map.set(key, [one]));
  for (const [what, source, target, route, producer, consumer, delay, count, maker] of plan.edges) {
    const one = { what, source, target, producer, consumer, delay, count, maker, arrived: new Map(), wanted: null,
      seen: 0, latest: 0 };
    const user = source === target ? "G" : "U";
    const users = what !== "G" ? [[what, route]] : routesOf(plan, target, consumer).map((n) => [user, n]);
    const makers = what !== "G" ? [[what, route]] : routesOf(plan, source, producer).map((n) => [maker, n]);
    for (const [word, n] of users) add(taken, `${word},${target},${n}`, one);
    for (const [word, n] of makers) add(given, `${word},${source},${n}`, one);
  }
  for (const [kind, word] of Object.entries(KINDS)) {
    table[kind] = [];
    for (let s = 0; s < plan.stages; s++) {
      for (let n = 0; n < R; n++) {
        const key = `${word.crosses || kind},${s},${n}`, last = word.after === "done" && given.get(`done,${s},${n}`);
        table[kind].push({ takes: taken.get(key) ?? [], gives: [...(given.get(key) ?? []), ...(last || [])] });
      }
    }
  }
  return (a) => table[a.kind][a.s * R + (a.i % R)];
}

/**
 * Play the rows of all ranks; return the starts and ends of their actions. `times` has what each takes, by text.
 * If `judged`, throw a Violation for the first that breaks a rule, or for a deadlock. Otherwise play on as far as it
 * goes, and put what is left behind it.
 */
function play(plan, rows, times, judged) {
  const wired = wire(plan), ready = rows.map((_, rank) => rank).reverse(), each = (value) => rows.map(() => value);
  const judges = judged ? rows.map((_, rank) => new Judge(plan, rank)) : null, read = each(0), over = each(false);
  const advance = (rank) => {
    const k = read[rank];
    if (k < rows[rank].length) {
      judges?.[rank].step(k, rows[rank][k]);
      return read[rank]++;
    }
    if (!over[rank]) judges?.[rank].end(k);
    over[rank] = true;
    return null;
  };
  const heads = rows.map((_, rank) => advance(rank)), partners = each(null), waits = each(null);
  const clock = each(0), free = each(0), gates = rows.map(() => new Map());
  const [starts, ends] = [0, 1].map(() => rows.map((row) => Array(row.length)));
  const deliver = (gives, unit, now) => {
    for (const one of gives) {
      if (one.count) {
        one.latest = Math.max(one.latest, now + one.delay);
        if (++one.seen === one.count && one.wanted !== null) one.wanted = unit;
      } else {
        one.arrived.set(unit, now + one.delay);
      }
      if (one.wanted !== unit) continue;
      one.wanted = null;
      ready.push(one.consumer);
    }
  };
  // Return when the inputs of an action are there, or infinity: then its rank waits.
  const latest = (rank, a) => {
    const unit = unitOf(plan, a), gate = KINDS[a.kind].reads ? "UNSHARD" : "REDUCE_GRAD";
    let found = gates[rank].size && (gate === "UNSHARD" || a.kind === "U") ? (gates[rank].get(gate + a.s) ?? 0) : 0;
    for (const one of wired(a).takes) {
      const time = !one.count ? one.arrived.get(unit) : one.seen === one.count ? one.latest : undefined;
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
      const a = row[k], { takes, gives } = wired(a), unit = unitOf(plan, a), time = times.get(a.text);
      if (COLLECTIVES.has(a.kind)) {  // beside the other actions, one after the other
        starts[rank][k] = a.kind === "RESHARD" ? now : Math.max(now, free[rank]);
        ends[rank][k] = a.kind === "RESHARD" ? now : (free[rank] = starts[rank][k] + time);
        gates[rank].set(a.kind + a.s, ends[rank][k]);
        deliver(gives, unit, ends[rank][k]);
        k = advance(rank);
        continue;
      }
      let start = now, fused = false;
      if (isOpener(a)) {  // a pair starts as one
        partners[rank] ??= advance(rank);
        fused = partners[rank] !== null && isBackward(row[partners[rank]]);
        if (fused) start = Math.max(start, latest(rank, row[partners[rank]]));
      }
      if (start < Infinity) start = Math.max(start, latest(rank, a));
      if (start === Infinity) break;
      for (const one of takes) one.arrived.delete(unit);
      starts[rank][k] = start;
      ends[rank][k] = now = start + time;
      if (fused) {
        pending = [gives, unit];  // its outputs leave when the pair ends
      } else {
        deliver(gives, unit, now);
        if (pending) deliver(...pending, now);
        pending = null;
      }
      k = partners[rank] ?? advance(rank);
      partners[rank] = null;
    }
    [heads[rank], clock[rank]] = [k, now];
  }
  const rest = rows.map((_, rank) => [heads[rank], partners[rank]].filter((k) => k !== null));
  if (judges && rest.some((some) => some.length)) explainDeadlock(plan, rows, rest, waits, advance);
  rows.forEach((row, rank) => {
    for (let k = rest[rank][0] ?? row.length; k < row.length; k++) {  // what never runs, one after the other
      [starts[rank][k], row[k].stuck] = [clock[rank], true];
      ends[rank][k] = clock[rank] += times.get(row[k].text);
    }
  });
  return { starts, ends };
}

/** Throw the Violation of a play that is stuck: follow the waits to what is never made, or to a cycle. */
function explainDeadlock(plan, rows, rest, waits, advance) {
  rows.forEach((_, rank) => {
    for (let k = advance(rank); k !== null; k = advance(rank)) rest[rank].push(k);
  });
  const makes = (a, one) => a.s === one.source && (one.what === "G" ? KINDS[a.kind].after === "done"
    : KINDS[a.kind].crosses === one.what && unitOf(plan, a) === one.wanted);
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
      [rank, problem] = [cycle[0], `the ranks wait for each other: ${each.join(", ")}`];
    } else {
      rank = maker;
    }
  }
  const position = rows[rank].length - rest[rank].length;
  throw new Violation("ordered", rank, position, rows[rank][position].text, problem);
}
