// The run: rows as columns, and every sum over them. How far a figure is known, and the rows of labels and of compiled
// regions, come from torchprof/reports/page_cells.py, with the terminal's own table.

/** @typedef {number | string | null | undefined} Value Null where it is unknown, undefined where there is none. */
/** @typedef {"before" | "after" | "difference" | "ratio" | "verdict"} ChangePart */

/** @typedef {PageData.Column & { number: number }} FigureColumn */
/** @typedef {{ kind: "change", of: string, part: ChangePart, key: string, heading: string, unit: Unit | "verdict" }} ChangeColumn */
/** @typedef {FigureColumn | ChangeColumn} Column */

/**
 * @typedef {object} Operator
 * @property {string} name
 * @property {string} kind
 * @property {number} calls
 * @property {boolean} isPart
 * @property {Record<string, number>} own
 * @property {Record<string, number>} total
 */

/** @typedef {{ name: string, calls: number, ns: number }} Launched */

/**
 * @typedef {object} Chain What ran in what, down to one operator, kernel or source line.
 * @property {boolean} own
 * @property {number} kernel
 * @property {number} python
 * @property {number[]} ops
 * @property {number[]} distinct
 */

class Run {
  /** @param {PageData} told */
  constructor(told) {
    this.told = told;
    const count = told.layers.name.length;
    this.count = count;
    this.outside = count;
    this.notSelected = count + 1;
    this.before = count + 2; // launched before the recording: no part of everything
    /** @type {number} */
    this.all = count + 3;
    this.parent = Int32Array.from([...told.layers.parent.map((at) => (at < 0 ? this.all : at)), this.all, this.all, -1, -1]);
    /** @type {number[][]} */
    this.children = Array.from({ length: count + 4 }, () => []);
    for (let node = 0; node < count + 2; node++) this.children[this.parent[node]].push(node);
    this.end = new Int32Array(count + 4); // of the nodes below, which follow a node
    this.depth = new Int32Array(count + 4);
    for (let node = count - 1; node >= 0; node--) {
      this.end[node] = Math.max(this.end[node], node + 1);
      const above = this.parent[node];
      if (above < count) this.end[above] = Math.max(this.end[above], this.end[node]);
    }
    for (let node = 0; node < count; node++) {
      this.depth[node] = this.parent[node] < count ? this.depth[this.parent[node]] + 1 : 0;
    }
    this.end[this.outside] = this.outside + 1;
    this.end[this.notSelected] = this.notSelected + 1;
    this.end[this.before] = this.before + 1;
    this.end[this.all] = this.before;
    this.size = told.rows.node.length;
    this.zeros = new Float64Array(Math.max(this.size, count + 4));
    /** @type {Record<string, Float64Array>} */
    this.columns = {};
    for (const [name, values] of Object.entries(told.rows)) this.columns[name] = Float64Array.from(values);
    if (told.comparison && told.comparison.of) this.#scale(told.comparison.scale);
    this.first = new Int32Array(count + 5);
    this.sorted = new Int32Array(this.size);
    this.#sort();
    this.chains = told.chains.map((chain) => this.#readChain(chain));
    this.params = told.takes.map((take) => this.#totalParams(take));
    /** @type {Map<string, unknown>} */
    this.cache = new Map();
    this.pairs = told.comparison ? told.comparison.pairs : []; // by node, of two runs that are compared
    /** @type {FigureColumn[]} */
    this.figures = told.columns.map((column, number) => ({ ...column, number }));
    // Of two runs that are compared, layers are, not what ran in them.
    this.ranges = told.comparison ? [] : told.ranges.name;
    this.nodes = this.all + 1 + this.ranges.length;
    /** @type {Map<number, number[]>} */
    this.rangesOf = new Map();
    this.ranges.forEach((_, at) => {
      const above = told.ranges.parent[at];
      this.rangesOf.set(above, [...(this.rangesOf.get(above) || []), this.all + 1 + at]);
    });
  }

  /** @param {string} name */
  column(name) {
    return this.columns[name] || this.zeros;
  }

  // Where runs of different length are compared, all figures are for one call of the model, or for one step.
  /** @param {number[]} scale */
  #scale(scale) {
    const sources = this.column("source");
    for (const name of ["calls", "parts", ...this.told.fields]) {
      if (this.columns[name]) this.columns[name] = this.columns[name].map((value, at) => value * scale[sources[at]]);
    }
  }

  // Rows in the order of their nodes, so that those of a layer and all below it stand together.
  #sort() {
    const nodes = this.column("node");
    for (let at = 0; at < this.size; at++) this.first[nodes[at] + 1]++;
    for (let node = 0; node < this.count + 4; node++) this.first[node + 1] += this.first[node];
    const next = this.first.slice();
    for (let at = 0; at < this.size; at++) this.sorted[next[nodes[at]]++] = at;
  }

  /** @param {number[]} chain @returns {Chain} */
  #readChain(chain) {
    const { frames } = this.told;
    const last = chain.length ? frames[chain[chain.length - 1]][0] : "";
    const ops = last === "kernel" ? chain.slice(0, -1) : chain;
    return {
      own: chain.length === 0,
      kernel: last === "kernel" ? chain[chain.length - 1] : -1,
      python: last === "python" ? chain[chain.length - 1] : -1,
      ops: ops.length ? ops : [frames.length], // the number of what is no op: the time between ops
      distinct: ops.length ? [...new Set(ops)] : [frames.length],
    };
  }

  // null where a layer cannot say; a layer that the run does not have takes no part.
  /** @param {PageData.Take} take */
  #totalParams({ params, kind }) {
    const totals = [...params];
    for (let node = this.count - 1; node >= 0; node--) {
      const above = this.parent[node];
      const [sum, below] = [totals[above], totals[node]];
      if (above < this.count && kind[node] !== null) totals[above] = sum === null || below === null ? null : sum + below;
    }
    return totals;
  }

  // What the layers are in the run that is shown: null where it does not have them.
  /** @param {number} source */
  take(source) {
    return this.told.takes[source < 0 ? 0 : this.told.sources[source].take];
  }

  // The class of a layer: in the run that is shown, else in one that has it.
  /** @param {number} node @param {number} source @returns {string} */
  kind(node, source) {
    return this.take(source).kind[node] ?? this.told.takes.map(({ kind }) => kind[node]).find((kind) => kind !== null) ?? "";
  }

  /** @param {number} node */
  isLayer(node) {
    return node < this.count;
  }

  /** @param {number} node */
  isRange(node) {
    return node > this.all;
  }

  // The layer, or what is none, that a label, a region or a part of it stands in; any other node itself.
  /** @param {number} node */
  layerOf(node) {
    let at = node;
    while (this.isRange(at)) at = this.parentOf(at);
    return at;
  }

  // What stands below a node in the table: first what ran in it, then the layers.
  /** @param {number} node @param {number} source */
  below(node, source) {
    const ranges = this.rangesOf.get(node);
    const children = this.isRange(node) ? [] : this.children[node];
    return ranges ? [...ranges.filter((one) => this.exists(one, source)), ...children] : children;
  }

  /** @param {number} node @returns {string} */
  name(node) {
    if (this.isRange(node)) return this.ranges[node - this.all - 1];
    return node < this.count ? this.told.layers.name[node] : node === this.all ? "everything" : this.told.names[node - this.count];
  }

  /** @param {number} node @returns {string} */
  path(node) {
    if (this.isRange(node)) return `${this.path(this.parentOf(node))}, ${this.name(node)}`;
    const names = [];
    for (let at = node; at >= 0 && at !== this.all; at = this.parent[at]) names.push(this.name(at));
    return names.reverse().join(".") || this.name(node);
  }

  // The nodes from the top down to one.
  /** @param {number} node */
  above(node) {
    const way = [];
    for (let at = node; at >= 0; at = this.parentOf(at)) way.push(at);
    return way.reverse();
  }

  /** @param {number} node */
  parentOf(node) {
    return this.isRange(node) ? this.told.ranges.parent[node - this.all - 1] : this.parent[node];
  }

  // At which level of the table a node stands.
  /** @param {number} node @returns {number} */
  depthOf(node) {
    return this.isRange(node) ? this.depthOf(this.parentOf(node)) + 1 : this.depth[node];
  }

  /** @template Made @param {string} key @param {() => Made} make */
  #cached(key, make) {
    if (!this.cache.has(key)) this.cache.set(key, make());
    return /** @type {Made} */ (this.cache.get(key));
  }

  // What each node took itself of a field of Cost, in a phase and a source (-1: all sources).
  /** @param {string} field @param {number} phase @param {number} source */
  own(field, phase, source) {
    return this.#cached(`own ${field} ${phase} ${source}`, () => {
      const sums = new Float64Array(this.count + 4);
      if (!this.columns[field]) return sums;
      const [nodes, values, phases, sources] = ["node", field, "phase", "source"].map((name) => this.column(name));
      for (let at = 0; at < this.size; at++) {
        if (phases[at] === phase && (source < 0 || sources[at] === source)) sums[nodes[at]] += values[at];
      }
      return sums;
    });
  }

  // The same with all that is below a node.
  /** @param {string} field @param {number} phase @param {number} source */
  total(field, phase, source) {
    return this.#cached(`total ${field} ${phase} ${source}`, () => this.#rollUp(this.own(field, phase, source)));
  }

  /** @param {Float64Array} own */
  #rollUp(own) {
    const sums = own.slice();
    for (let node = this.count + 1; node >= 0; node--) sums[this.parent[node]] += sums[node];
    return sums;
  }

  /** @param {string} field @param {number[]} phases @param {number} source */
  ownIn(field, phases, source) {
    return this.#summed("own", field, phases, source);
  }

  /** @param {string} field @param {number[]} phases @param {number} source */
  totalIn(field, phases, source) {
    return this.#summed("total", field, phases, source);
  }

  /** @param {"own" | "total"} what @param {string} field @param {number[]} phases @param {number} source */
  #summed(what, field, phases, source) {
    if (phases.length === 1) return this[what](field, phases[0], source);
    return this.#cached(`${what} ${field} ${phases} ${source}`, () => {
      const sums = new Float64Array(this.count + 4);
      for (const phase of phases) this[what](field, phase, source).forEach((value, node) => (sums[node] += value));
      return sums;
    });
  }

  /** @param {number} phase @param {number} source */
  calls(phase, source) {
    return this.#cached(`calls ${phase} ${source}`, () => {
      const sums = new Float64Array(this.count + 4);
      const [nodes, calls, phases, sources, chains] = ["node", "calls", "phase", "source", "chain"].map((name) => this.column(name));
      for (let at = 0; at < this.size; at++) {
        if (this.chains[chains[at]].own && phases[at] === phase && (source < 0 || sources[at] === source)) sums[nodes[at]] += calls[at];
      }
      return sums;
    });
  }

  // Where a source stands in what is by source and not from rows: all of them (-1) are the last.
  /** @param {number} source */
  #place(source) {
    return source < 0 ? this.told.bounds.of.length - 1 : source;
  }

  // How far the figure of each node is known, in a column and a source (-1: all sources).
  /** @param {FigureColumn} column @param {number} source */
  bounds(column, source) {
    return this.#cached(`bounds ${column.number} ${source}`, () => {
      const { of, vectors } = this.told.bounds;
      const found = new Uint8Array(this.all + 1 + this.told.ranges.name.length);
      let at = 0;
      for (const [bound, nodes] of vectors[of[this.#place(source)][column.number]]) {
        found.fill(bound, at, at + nodes);
        at += nodes;
      }
      return found;
    });
  }

  // Whether there is a row of a node: work of no layer has one where there is any.
  /** @param {number} node @param {number} source */
  exists(node, source) {
    return this.bounds(this.figures[0], source)[node] !== BOUND.NO_ROW;
  }

  // A field of Cost of a node, summed over phases, with how far that is known.
  /** @param {string} field @param {number[]} phases @param {number} source @param {number} node @returns {Figure} */
  sum(field, phases, source, node, isSelf = false) {
    const bounds = phases.map((phase) => {
      const column = this.figures.find((one) => one.kind === "cost" && one.phase === phase && one.self === isSelf && one.fields.some(([name]) => name === field));
      return column ? this.bounds(column, source)[node] : BOUND.BLANK;
    });
    const value = (isSelf ? this.ownIn(field, phases, source) : this.totalIn(field, phases, source))[node];
    const known = bounds.filter((bound) => bound < BOUND.BLANK);
    if (!known.length || known.every((bound) => bound === BOUND.UNKNOWN)) return { value: 0, bound: known.length ? BOUND.UNKNOWN : BOUND.BLANK };
    return { value, bound: boundOfSum(value, known.every((bound) => bound === BOUND.EXACT)) };
  }

  /** @param {string[]} fields @param {number} source */
  isMeasured(fields, source) {
    const sources = source < 0 ? this.told.sources : [this.told.sources[source]];
    return fields.every((field) => sources.every((one) => one.measured.includes(field)));
  }

  // The figures of a column for all nodes: null where it is unknown, undefined where there is no such thing.
  /** @param {Column} column @param {number} source */
  values(column, source) {
    return this.#cached(`values ${column.key} ${source}`, () => this.#values(column, source));
  }

  /** @param {Column} column @param {number} source @returns {Value[]} */
  #values(column, source) {
    if (column.kind === "change") return this.#changes(column);
    const bounds = this.bounds(column, source);
    const found = [...this.#figures(column, source), ...this.told.ranges.values[this.#place(source)][column.number]];
    return found.map((value, node) => (bounds[node] >= BOUND.BLANK ? undefined : bounds[node] === BOUND.UNKNOWN ? null : value));
  }

  /** @param {FigureColumn} column @param {number} source @returns {Iterable<number | null>} */
  #figures(column, source) {
    /** @type {number[]} */
    const found = new Array(this.count + 4).fill(0);
    if (column.kind === "params") return found.map((_, node) => this.params[source < 0 ? 0 : this.told.sources[source].take][node]);
    if (column.kind === "calls") return this.calls(0, source);
    if (column.kind === "rate") {
      const [flops, ns] = ["flops", column.onDevice ? "device_ns" : "cpu_ns"].map((field) => this.total(field, column.phase, source));
      return found.map((_, node) => (flops[node] / ns[node]) * 1e9);
    }
    const parts = column.fields.map(([field, sign]) => ({ values: this[column.self ? "own" : "total"](field, column.phase, source), sign }));
    return found.map((_, node) => parts.reduce((value, { values, sign }) => value + sign * values[node], 0));
  }

  // One part of how a quantity changed: before, after, difference, ratio or verdict.
  /** @param {ChangeColumn} column */
  #changes({ of, part }) {
    return this.pairs.map(({ changes, how }) => {
      if (!changes[of]) return undefined;
      const [before, after, difference, verdict] = changes[of];
      if (how === "moved away") return part === "before" ? before : undefined;
      if (how === "added" && part !== "after" && part !== "difference") return undefined;
      if (how === "removed" && part !== "before" && part !== "difference") return undefined;
      if (part === "ratio") return before !== null && before > 0 && after !== null && after >= 0 ? after / before : null;
      return { before, after, difference, verdict }[part];
    });
  }

  // What is known at least of what a quantity was or is, null where nothing is.
  /** @param {ChangeColumn} column @param {number} node */
  #leastOf({ of, part }, node) {
    const [before, after] = this.pairs[node].changes[of][4];
    return part === "before" ? before : part === "after" ? after : null;
  }

  /** @param {Column} column @param {number} node @param {number} source */
  isAtLeast(column, node, source) {
    return column.kind !== "change" && this.bounds(column, source)[node] === BOUND.AT_LEAST;
  }

  /** @param {Column} column @param {number} node @param {number} source */
  value(column, node, source) {
    return this.values(column, source)[node];
  }

  /** @param {Column} column @param {number} node @param {number} source @returns {string} */
  text(column, node, source) {
    const value = this.value(column, node, source);
    if (typeof value === "string" || column.unit === "verdict") return String(value ?? "");
    if (column.kind !== "change") return formatFigure({ value: value ?? 0, bound: this.bounds(column, source)[node] }, column.unit);
    if (value === undefined) return "";
    if (value === null) {
      const least = this.#leastOf(column, node);
      return formatFigure({ value: least ?? 0, bound: least === null ? BOUND.UNKNOWN : BOUND.AT_LEAST }, column.unit);
    }
    const text = FORMATS[column.unit](value);
    return column.part === "difference" && value > 0 ? `+${text}` : text;
  }

  // Operators and labels in a node and all below it: calls, and self and total of every field.
  /** @param {number} node @param {number[]} phases @param {number} source */
  operators(node, phases, source) {
    return this.#cached(`operators ${node} ${phases} ${source}`, () => this.#operators(node, phases, source));
  }

  /** @param {number} node @param {number[]} phases @param {number} source @returns {Operator[]} */
  #operators(node, phases, source) {
    const fields = this.told.fields;
    const size = this.told.frames.length + 1;
    const calls = new Float64Array(size);
    const parts = new Float64Array(size); // calls inside an operator that is counted with all that it calls
    const own = fields.map(() => new Float64Array(size));
    const total = fields.map(() => new Float64Array(size));
    const seen = new Uint8Array(size);
    const values = fields.map((field) => this.column(field));
    const [rowPhases, sources, chains, within, rowCalls, rowParts, nodes] =
      ["phase", "source", "chain", "within", "calls", "parts", "node"].map((name) => this.column(name));
    const [low, high] = node === this.all ? [0, this.before] : [node, this.end[node]];
    /** @param {number} one */
    const inRange = (one) => one >= low && one < high;
    const inPhases = new Uint8Array(3);
    for (const phase of phases) inPhases[phase] = 1;
    /** @param {number} at @param {Iterable<number>} keys */
    const add = (at, keys) => {
      for (const key of keys) {
        seen[key] = 1;
        for (let number = 0; number < values.length; number++) total[number][key] += values[number][at];
      }
    };
    /** @param {number} at @param {Chain} chain */
    const addOwn = (at, chain) => {
      const key = chain.ops[chain.ops.length - 1];
      for (let number = 0; number < values.length; number++) own[number][key] += values[number][at];
      if (chain.own || chain.kernel >= 0) return;
      calls[key] += rowCalls[at];
      parts[key] += rowParts[at];
    };
    for (let place = this.first[low]; place < this.first[high]; place++) {
      const at = this.sorted[place];
      const chain = this.chains[chains[at]];
      if (within[at] || chain.python >= 0 || !inPhases[rowPhases[at]] || (source >= 0 && sources[at] !== source)) continue;
      add(at, chain.distinct);
      addOwn(at, chain);
    }
    // What an op calls back into another layer counts for that op, too, wherever it is.
    for (const at of this.#rowsWithin()) {
      const chain = this.chains[chains[at]];
      if (chain.python >= 0 || (source >= 0 && sources[at] !== source)) continue;
      const keys = new Set();
      for (const [where, phase, around] of this.told.within[within[at]]) {
        if (!inRange(where)) continue;
        for (const frame of this.told.chains[around]) {
          if (inPhases[this.told.frames[frame][0] === "label" ? rowPhases[at] : phase]) keys.add(frame);
        }
      }
      const here = inRange(nodes[at]) && inPhases[rowPhases[at]];
      if (here) chain.distinct.forEach((key) => keys.add(key));
      add(at, keys);
      if (here) addOwn(at, chain);
    }
    const found = [];
    for (let key = 0; key < size; key++) {
      if (!seen[key]) continue;
      const [kind, name] = this.told.frames[key] || ["op", "(between ops)"];
      /** @param {Float64Array[]} of */
      const sums = (of) => Object.fromEntries(fields.map((field, number) => [field, of[number][key]]));
      found.push({ name, kind, calls: calls[key], isPart: calls[key] > 0 && calls[key] === parts[key], own: sums(own), total: sums(total) });
    }
    return found;
  }

  #rowsWithin() {
    return this.#cached("rows within", () => {
      const within = this.column("within");
      const found = [];
      for (let at = 0; at < this.size; at++) if (within[at]) found.push(at);
      return found;
    });
  }

  // The device's work (kernel), or the source lines at which Python was seen (python), in a node and all below it.
  /**
   * @param {"kernel" | "python"} what
   * @param {number} node
   * @param {number[]} phases
   * @param {number} source
   * @returns {Launched[]}
   */
  launched(what, node, phases, source) {
    const [low, high] = node === this.all ? [0, this.before] : [node, this.end[node]];
    const [rowPhases, sources, chains, calls, ns] = ["phase", "source", "chain", "calls", "device_ns"].map((name) => this.column(name));
    const found = new Map();
    for (let place = this.first[low]; place < this.first[high]; place++) {
      const at = this.sorted[place];
      const frame = this.chains[chains[at]][what];
      if (frame < 0 || !phases.includes(rowPhases[at]) || (source >= 0 && sources[at] !== source)) continue;
      const sums = found.get(frame) || { name: this.told.frames[frame][1], calls: 0, ns: 0 };
      sums.calls += calls[at];
      sums.ns += ns[at];
      found.set(frame, sums);
    }
    return [...found.values()];
  }
}
