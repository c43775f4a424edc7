// An interval of the timeline: the times of layers and what was live in it, from the spans and the allocations in it.

const TIMES = ["cpu_ns", "device_ns"]; // the measures that spans have

/** @typedef {{ around: number[], until: number, phase: number, isFirst: boolean }} Line The spans around a time of a thread, and where they end. */

class Interval {
  // `start`: that of each span. `end`: that of the timeline.
  /** @param {Run} run @param {PageData.Timeline} data @param {ArrayLike<number>} start @param {Stretch} stretch @param {number} end */
  constructor(run, data, start, { from, to }, end) {
    this.run = run;
    this.data = data;
    this.start = start;
    this.from = from;
    this.to = to;
    this.isComplete = !data.dropped || to <= start[start.length - 1];
    /** @type {Map<string, Float64Array>} */
    this.sums = new Map(); // of self, by measure and phase; the others when they are needed
    this.calls = new Float64Array(run.nodes);
    this.#sum(end);
  }

  /** @param {string} field @param {number} phase @param {number} node @param {number} ns */
  #add(field, phase, node, ns) {
    const key = `${field} ${phase} true`;
    const sums = this.sums.get(key) ?? new Float64Array(this.run.nodes);
    sums[node] += ns;
    this.sums.set(key, sums);
  }

  // How much of a time is in the interval.
  /** @param {number} start @param {number} end */
  #inside(start, end) {
    return Math.max(Math.min(end, this.to) - Math.max(start, this.from), 0);
  }

  // The self of each span: of it, without the spans in it. The time of the first thread without a span is work of no layer:
  // of backward between two spans of backward. Other threads, as that of backward on a device, have nothing to do then.
  /** @param {number} end */
  #sum(end) {
    const { threads, track, ns, node, phase, name } = this.data;
    const forward = this.run.data.allPhases.indexOf("forward");
    const backward = this.run.data.allPhases.indexOf("backward");
    /** @type {Map<number, Line>} */
    const lines = new Map();
    for (let at = 0; at < this.start.length; at++) {
      const start = this.start[at];
      const inside = this.#inside(start, start + ns[at]);
      const thread = threads[track[at]];
      if (!thread) {
        this.#add("device_ns", phase[at], node[at], inside);
        continue;
      }
      const line = lines.get(thread) ?? { around: [], until: 0, phase: forward, isFirst: !lines.size };
      lines.set(thread, line);
      const { around } = line;
      while (around.length && this.#end(around[around.length - 1]) <= start) around.pop();
      const outer = around.at(-1);
      if (outer !== undefined) {
        this.#add("cpu_ns", phase[outer], node[outer], -inside);
      } else if (line.isFirst) {
        const isBackward = line.phase !== forward && phase[at] !== forward;
        this.#add("cpu_ns", isBackward ? backward : forward, this.run.outside, this.#inside(line.until, start));
        line.phase = phase[at];
      }
      this.#add("cpu_ns", phase[at], node[at], inside);
      line.until = Math.max(line.until, start + ns[at]);
      around.push(at);
      if (name[at] < 0 && phase[at] === forward && start >= this.from && start < this.to) this.calls[node[at]] += 1;
    }
    const [first] = lines.values();
    if (first) this.#add("cpu_ns", forward, this.run.outside, this.#inside(first.until, end));
  }

  /** @param {number} at */
  #end(at) {
    return this.start[at] + this.data.ns[at];
  }

  // A time of all nodes: total, or self.
  /** @param {string} field @param {number} phase @param {boolean} isSelf @returns {Float64Array} */
  times(field, phase, isSelf) {
    const key = `${field} ${phase} ${isSelf}`;
    const known = this.sums.get(key);
    if (known) return known;
    const { run } = this;
    const sums = new Float64Array(run.nodes);
    if (phase === ALL_PHASES) {
      run.data.allPhases.forEach((_, one) => this.times(field, one, isSelf).forEach((ns, node) => { sums[node] += ns; }));
    } else if (!isSelf) {
      sums.set(this.times(field, phase, true));
      for (let node = run.outside + 1; node >= 0; node--) sums[run.parent[node]] += sums[node];
    }
    this.sums.set(key, sums);
    return sums;
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
    const vector = this.has(column) ? this.vector(column) : null;
    return bounds.map((bound, node) => {
      if (this.run.isRange(node)) return BOUND.NO_ROW;
      if (column.kind === "params" || bound >= BOUND.UNKNOWN) return bound;
      return vector ? boundOfSum(vector[node], this.isComplete) : BOUND.UNKNOWN;
    });
  }

  // The labels and the kernels of a layer and all below it: of operators there are no spans.
  /** @param {number} node @param {number} phase @returns {Operator[]} */
  operators(node, phase) {
    const { data, run } = this;
    /** @type {Map<string, Operator>} */
    const found = new Map();
    for (let at = 0; at < this.start.length; at++) {
      const isIn = data.node[at] >= node && data.node[at] < Math.max(run.end[node], node + 1);
      const ns = this.#inside(this.start[at], this.#end(at));
      if (!isIn || data.name[at] < 0 || !ns || (phase !== ALL_PHASES && phase !== data.phase[at])) continue;
      const name = data.names[data.name[at]];
      const isKernel = !data.threads[data.track[at]];
      const key = `${isKernel} ${name}`;
      const sum = found.get(key) ?? { name, kind: isKernel ? "kernel" : "label", calls: 0, isPart: false, own: { cpu_ns: 0, device_ns: 0 }, total: { cpu_ns: 0, device_ns: 0 } };
      const field = isKernel ? "device_ns" : "cpu_ns";
      sum.calls += 1;
      sum.own[field] += ns;
      sum.total[field] += ns;
      found.set(key, sum);
    }
    return [...found.values()];
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
    const rows = [...live.values()].filter((row) => row.nbytes).sort((one, other) => other.nbytes - one.nbytes);
    return { ...highest, rows };
  }
}
