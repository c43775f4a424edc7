// An interval of the timeline: the times and calls in it, from the spans, and the memory that was live in it.

const TIMES = ["cpu_ns", "device_ns"]; // the measures that spans have

class Interval {
  // `start`: that of each span.
  /** @param {Run} run @param {PageData.Timeline} data @param {ArrayLike<number>} start @param {Stretch} stretch */
  constructor(run, data, start, { from, to }) {
    this.run = run;
    this.data = data;
    /** @type {ArrayLike<number>} */
    this.start = start;
    /** @type {number} */
    this.from = from;
    /** @type {number} */
    this.to = to;
    /** @type {Map<string, unknown>} */
    this.cache = new Map(); // of figures
    this.self = this.#selfOfSpans();
    this.outside = this.#withoutSpans();
    this.calls = new Float64Array(run.nodes);
    /** @type {Float64Array[][]} */
    this.sums = TIMES.map(() => run.data.allPhases.map(() => new Float64Array(run.nodes))); // of self, by measure and phase
    const forward = run.data.allPhases.indexOf("forward");
    for (let at = 0; at < start.length; at++) {
      const [node, phase] = [data.node[at], data.phase[at]];
      this.sums[this.#isKernel(at) ? 1 : 0][phase][node] += this.self[at];
      if (data.name[at] < 0 && phase === forward && this.#begins(at)) this.calls[node] += 1;
    }
    const calls = run.figures.find(({ kind }) => kind === "calls") ?? run.figures[0];
    this.ofRun = run.boundsOfRun(calls, data.source); // the bounds of the calls in the whole run
    this.isAroundUnknown = new Uint8Array(run.nodes);
    for (let node = 0; node < run.count; node++) if (this.#isWithoutSpans(node)) this.isAroundUnknown[run.parent[node]] = 1;
    const { names } = run.data.operators;
    this.kinds = new Map(names.filter(([kind]) => ["label", "region"].includes(kind)).map(([kind, name]) => [name, kind]));
    const named = Array.from(this.self.keys()).filter((at) => data.name[at] >= 0 && this.#inside(start[at], this.#end(at)) > 0);
    this.named = named.sort((one, other) => data.node[one] - data.node[other]); // labels and kernels
  }

  /** @param {number} at */
  #end(at) {
    return this.start[at] + this.data.ns[at];
  }

  /** @param {number} at */
  #isKernel(at) {
    return !this.data.threads[this.data.track[at]];
  }

  /** @param {number} at */
  #begins(at) {
    return this.start[at] >= this.from && this.start[at] < this.to;
  }

  // How much of a time is in the interval.
  /** @param {number} start @param {number} end */
  #inside(start, end) {
    return Math.max(Math.min(end, this.to) - Math.max(start, this.from), 0);
  }

  // The time of each span in the interval, without that of the spans in it.
  #selfOfSpans() {
    const self = new Float64Array(this.start.length);
    /** @type {number[][]} */
    const around = []; // by thread
    for (let at = 0; at < self.length; at++) {
      self[at] = this.#inside(this.start[at], this.#end(at));
      if (this.#isKernel(at)) continue;
      const spans = around[this.data.threads[this.data.track[at]]] ??= [];
      while (spans.length && this.#end(spans[spans.length - 1]) <= this.start[at]) spans.pop();
      if (spans.length) self[spans[spans.length - 1]] -= self[at];
      spans.push(at);
    }
    return self;
  }

  // The time in which the first thread has no span, to the end of the last span or step of a thread: work of no layer.
  // Other threads, as that of backward on a device, may have nothing to do then.
  #withoutSpans() {
    const { threads, track, steps } = this.data;
    let [first, until, sum, end] = [0, 0, 0, steps[steps.length - 1] ?? 0];
    for (let at = 0; at < this.start.length; at++) {
      const thread = threads[track[at]];
      if (!thread) continue;
      first ||= thread;
      end = Math.max(end, this.#end(at));
      if (thread !== first) continue;
      sum += this.#inside(until, this.start[at]);
      until = Math.max(until, this.#end(at));
    }
    return first ? sum + this.#inside(until, end) : 0;
  }

  // A time of all nodes: total, or self. Where it is unknown it is 0.
  /** @param {string} field @param {number} phase @param {boolean} isSelf @returns {Float64Array} */
  times(field, phase, isSelf) {
    const key = `times ${field} ${phase} ${isSelf}`;
    const known = this.cache.get(key);
    if (known instanceof Float64Array) return known;
    const { run } = this;
    const sums = new Float64Array(run.nodes);
    const phases = this.sums[TIMES.indexOf(field)];
    for (const of of phase === ALL_PHASES ? phases : [phases[phase]]) of.forEach((ns, node) => { sums[node] += ns; });
    if (field === "cpu_ns") sums[run.outside] += this.outside;
    if (!this.#knowsAll(field, phase)) sums.fill(0, run.outside, run.all);
    if (!isSelf) for (let node = run.outside + 1; node >= 0; node--) sums[run.parent[node]] += sums[node];
    else if (field === "cpu_ns") this.isAroundUnknown.forEach((isUnknown, node) => { if (isUnknown) sums[node] = 0; });
    this.cache.set(key, sums);
    return sums;
  }

  // Whether it is known what work of no layer took. On a thread, it is not known which of it was backward, and layers that
  // were not selected, or that are in compiled code, have no spans; on a device, it is not known which kernels were
  // launched before the recording.
  /** @param {string} field @param {number} phase */
  #knowsAll(field, phase) {
    const { run, ofRun } = this;
    const isThere = (/** @type {number} */ node) => ofRun[node] !== BOUND.NO_ROW;
    if (field === "device_ns") return !isThere(run.before);
    return !isThere(run.notSelected) && !this.isAroundUnknown[run.all] && (phase === ALL_PHASES || run.data.phases.length === 1);
  }

  // Whether a layer may have calls without spans: in compiled code.
  /** @param {number} node */
  #isWithoutSpans(node) {
    return this.ofRun[node] === BOUND.AT_LEAST || this.ofRun[node] === BOUND.UNKNOWN;
  }

  // Whether the spans have the figure.
  /** @param {Column} column */
  has(column) {
    return column.kind === "calls" || (column.kind === "cost" && TIMES.includes(column.field));
  }

  /** @param {FigureColumn} column */
  vector(column) {
    return column.kind === "cost" ? this.times(column.field, column.phase, column.self) : this.calls;
  }

  // The bounds of a column, from those in the whole run.
  /** @param {FigureColumn} column @param {Uint8Array} bounds */
  bounds(column, bounds) {
    const { run } = this;
    const vector = this.has(column) ? this.vector(column) : null;
    // Calls on threads that were not recorded have no spans; then the time of the layer is not exact, either.
    const forward = column.kind === "calls" ? run.figures.find((one) => one.where === "chart" && one.kind === "cost" && one.field === "cpu_ns" && one.phase === 0 && !one.self) : undefined;
    const times = forward ? run.boundsOfRun(forward, this.data.source) : bounds;
    return bounds.map((bound, node) => {
      if (run.isRange(node)) return BOUND.NO_ROW;
      if (column.kind === "params" || bound >= BOUND.UNKNOWN) return bound;
      return vector && !this.#isUnknown(column, node) ? boundOfSum(vector[node], bound === BOUND.EXACT && times[node] !== BOUND.AT_LEAST) : BOUND.UNKNOWN;
    });
  }

  /** @param {FigureColumn} column @param {number} node */
  #isUnknown(column, node) {
    if (column.kind !== "cost") return false;
    if (!this.run.isLayer(node)) return !this.#knowsAll(column.field, column.phase);
    return column.field === "cpu_ns" && (this.#isWithoutSpans(node) || (column.self && this.isAroundUnknown[node] === 1));
  }

  // The labels and the kernels of a layer and all below it: of operators there are no spans.
  /** @param {number} node @param {number} phase @returns {Operator[]} */
  operators(node, phase) {
    const { data, run } = this;
    /** @type {Map<string, Operator>} */
    const found = new Map();
    const end = Math.max(run.end[node], node + 1);
    for (let number = this.#firstOf(node); data.node[this.named[number]] < end; number++) {
      const at = this.named[number];
      if (phase !== ALL_PHASES && phase !== data.phase[at]) continue;
      if (this.#isKernel(at) && !run.isLayer(node) && !this.#knowsAll("device_ns", phase)) continue;
      const ns = this.#inside(this.start[at], this.#end(at));
      const name = data.names[data.name[at]];
      const kind = this.#isKernel(at) ? "kernel" : this.kinds.get(name) ?? "other";
      const key = `${kind} ${name}`;
      const sum = found.get(key) ?? { name, full: name, kind, calls: 0, isPart: false, own: { cpu_ns: 0, device_ns: 0 }, total: { cpu_ns: 0, device_ns: 0 } };
      const field = kind === "kernel" ? "device_ns" : "cpu_ns";
      if (this.#begins(at)) sum.calls += 1;
      sum.own[field] += this.self[at];
      sum.total[field] += ns;
      found.set(key, sum);
    }
    return [...found.values()];
  }

  // The index in `named` of the first span of a node or a later one.
  /** @param {number} node */
  #firstOf(node) {
    let [low, high] = [0, this.named.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.data.node[this.named[middle]] < node) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // When the most memory was live, how much above the start of the recording, and what that was: the largest first.
  /** @param {PageData.Moves} moves */
  peak({ time, nbytes, node, kind }) {
    const times = runningSums(time);
    let [level, at] = [0, 0];
    for (; at < times.length && times[at] < this.from; at++) level += nbytes[at];
    let highest = { level, ns: this.from, end: at };
    for (; at < times.length && times[at] <= this.to; at++) {
      level += nbytes[at];
      if (level > highest.level) highest = { level, ns: times[at], end: at + 1 };
    }
    /** @type {Map<string, { node: number, kind: number, nbytes: number }>} */
    const live = new Map();
    for (let move = 0; move < highest.end; move++) {
      const key = `${node[move]} ${kind[move]}`;
      const sum = live.get(key) ?? { node: node[move], kind: kind[move], nbytes: 0 };
      sum.nbytes += nbytes[move];
      live.set(key, sum);
    }
    const rows = [...live.values()].filter((row) => row.nbytes > 0).sort((one, other) => other.nbytes - one.nbytes);
    const freed = rows.reduce((sum, row) => sum + row.nbytes, 0) - highest.level; // of what was live at the start
    return { ...highest, rows, freed };
  }
}
