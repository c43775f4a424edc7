// The run: rows as columns, and every sum over them. Whether a figure is exact, a lower bound or unknown, and the figures of
// labels and compiled regions, come from torchprof/reports/page/layers.py, which reads the table of the terminal.

/** @typedef {number | string | null | undefined} Value null: unknown. undefined: blank. */
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
 * @typedef {object} Chain Nested frames, outermost first, down to one operator, kernel or source line.
 * @property {boolean} own
 * @property {number} kernel
 * @property {number} python
 * @property {number[]} ops
 * @property {number[]} distinct
 */

const MOST_CLASSES = 7; // as many colors can be told apart

class Run {
  /** @param {PageData} data */
  constructor(data) {
    this.data = data;
    const count = data.layers.name.length;
    this.count = count;
    this.outside = count;
    this.notSelected = count + 1;
    this.before = count + 2; // work launched before the recording: it is in no total
    /** @type {number} */
    this.all = count + 3;
    this.parent = Int32Array.from([...Array.from(data.layers.parent, (at) => (at < 0 ? this.all : at)), this.all, this.all, -1, -1]);
    /** @type {number[][]} */
    this.children = Array.from({ length: count + 4 }, () => []);
    for (let node = 0; node < count + 2; node++) this.children[this.parent[node]].push(node);
    this.end = new Int32Array(count + 4); // the nodes below a node are those from it up to here
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
    this.size = data.rows.node.length;
    this.zeros = new Float64Array(Math.max(this.size, count + 4));
    /** @type {Record<string, Float64Array>} */
    this.columns = {};
    for (const [name, values] of Object.entries(data.rows)) this.columns[name] = name === "node" ? runningSums(values) : Float64Array.from(values);
    this.samples = new Samples(data.samples);
    this.peakNode = runningSums(data.peaks.node);
    if (data.comparison && data.comparison.per) this.#scale(data.comparison.scale);
    const { within } = this.columns;
    this.rowsWithin = within ? [...within.keys()].filter((at) => within[at]) : [];
    this.first = new Int32Array(count + 5);
    this.sorted = new Int32Array(this.size);
    this.#sort();
    this.chains = data.chains.map((chain) => this.#readChain(chain));
    /** @type {Map<string, unknown>} */
    this.cache = new Map();
    this.pairs = data.comparison ? data.comparison.pairs : []; // by node; empty if the page is no comparison
    /** @type {FigureColumn[]} */
    this.figures = data.columns.map((column, number) => ({ ...column, number }));
    // A comparison compares layers only, not the ranges in them.
    this.ranges = data.comparison ? [] : data.ranges.name;
    this.nodes = this.all + 1 + this.ranges.length;
    /** @type {Map<number, number[]>} */
    this.rangesOf = new Map();
    this.ranges.forEach((_, at) => {
      const above = data.ranges.parent[at];
      this.rangesOf.set(above, [...(this.rangesOf.get(above) || []), this.all + 1 + at]);
    });
  }

  /** @param {string} name */
  column(name) {
    return this.columns[name] || this.zeros;
  }

  // In a comparison of runs of different length, all figures are for one call of the model, or for one step.
  /** @param {number[]} scale */
  #scale(scale) {
    const sources = this.column("source");
    for (const name of ["calls", "parts", ...this.data.fields]) {
      if (this.columns[name]) this.columns[name] = this.columns[name].map((value, at) => value * scale[sources[at]]);
    }
  }

  // Sorts rows by their nodes, so that the rows of a layer and of all layers below it are contiguous.
  #sort() {
    const nodes = this.column("node");
    for (let at = 0; at < this.size; at++) this.first[nodes[at] + 1]++;
    for (let node = 0; node < this.count + 4; node++) this.first[node + 1] += this.first[node];
    const next = this.first.slice();
    for (let at = 0; at < this.size; at++) this.sorted[next[nodes[at]]++] = at;
  }

  /** @param {number[]} chain @returns {Chain} */
  #readChain(chain) {
    const { frames } = this.data;
    const last = chain.length ? frames[chain[chain.length - 1]][0] : "";
    const ops = last === "kernel" ? chain.slice(0, -1) : chain;
    return {
      own: chain.length === 0,
      kernel: last === "kernel" ? chain[chain.length - 1] : -1,
      python: last === "python" ? chain[chain.length - 1] : -1,
      ops: ops.length ? ops : [frames.length], // the number that stands for (between ops)
      distinct: ops.length ? [...new Set(ops)] : [frames.length],
    };
  }

  // The run that a source is of.
  /** @param {number} source */
  take(source) {
    return this.data.takes[source < 0 ? 0 : this.data.sources[source].take];
  }

  // The description of a layer in the shown run: null if the run does not have the layer.
  /** @param {number} node @param {number} source */
  description(node, source) {
    return descriptionIn(this.take(source), node);
  }

  // The class of a layer: in the shown run, else in any run that has the layer.
  /** @param {number} node @param {number} source @returns {string} */
  kind(node, source) {
    const found = this.description(node, source) ?? this.data.takes.map((take) => descriptionIn(take, node)).find((one) => one !== null);
    return found?.kind ?? "";
  }

  // The layer, or the work of no layer, with a path; undefined if there is none.
  /** @param {string} path @returns {number | undefined} */
  nodeOf(path) {
    for (let node = 0; node <= this.all; node++) if (this.path(node) === path) return node;
    return undefined;
  }

  // The measure of which the headline speaks; another one if the shown run does not have it, as another run on the page.
  /** @param {number} source @returns {PageData.Measure | null} */
  mainMeasure(source) {
    const { measures, mainField } = this.data;
    const isMain = (/** @type {PageData.Measure} */ { field }) => field === mainField && this.isMeasured([field], source);
    return measures.find(isMain) ?? measures.find(({ field }) => this.isMeasured([field], source)) ?? null;
  }

  // The classes with a color of their own: those of most of the time, without any measure those of most layers.
  get classes() {
    return this.#cached("classes", () => {
      const measure = this.mainMeasure(0);
      const own = measure ? this.own(measure.field, [0, 1, 2], -1) : new Float64Array(this.count + 4).fill(1);
      /** @type {Map<string, number>} */
      const sums = new Map();
      for (let node = 0; node < this.count; node++) sums.set(this.kind(node, 0), (sums.get(this.kind(node, 0)) ?? 0) + Math.max(own[node], 0));
      sums.delete("");
      return [...sums].sort((one, other) => other[1] - one[1]).slice(0, MOST_CLASSES).map(([kind]) => kind);
    });
  }

  get hasOtherClasses() {
    const others = (/** @type {PageData.Take} */ take) => take.described.some((layer) => layer !== null && !this.classes.includes(layer.kind));
    return this.#cached("has other classes", () => this.data.takes.some(others));
  }

  // A number for each node of the run of a source: that of two layers is the same if they, and all below them by name,
  // have the same classes, settings and parameters.
  /** @param {number} source */
  shapes(source) {
    const take = this.take(source);
    return this.#cached(`shapes ${this.data.takes.indexOf(take)}`, () => {
      /** @type {Map<string, number>} */
      const known = new Map();
      const shapes = new Int32Array(this.count + 4);
      for (let node = this.count - 1; node >= 0; node--) {
        const below = this.children[node].map((child) => `${this.name(child)} ${shapes[child]}`);
        const layer = descriptionIn(take, node);
        const text = layer === null ? `no layer ${node}` : `${layer.kind}(${layer.settings}) ${take.params[node]} (${below.join(",")})`;
        shapes[node] = known.get(text) ?? known.size + 1;
        known.set(text, shapes[node]);
      }
      return shapes;
    });
  }

  /** @param {number} node */
  isLayer(node) {
    return node < this.count;
  }

  /** @param {number} node */
  isRange(node) {
    return node > this.all;
  }

  // The layer, or the row of work of no layer, that a range is in; any other node is returned as it is.
  /** @param {number} node */
  layerOf(node) {
    let at = node;
    while (this.isRange(at)) at = this.parentOf(at);
    return at;
  }

  // The rows below a node in the table: first its ranges, then its layers.
  /** @param {number} node @param {number} source */
  below(node, source) {
    const nodes = [...(this.rangesOf.get(node) ?? []), ...(this.isRange(node) ? [] : this.children[node])];
    return nodes.filter((one) => this.exists(one, source));
  }

  /** @param {number} node @returns {string} */
  name(node) {
    if (this.isRange(node)) return this.ranges[node - this.all - 1];
    return node < this.count ? this.data.layers.name[node] : node === this.all ? "everything" : this.data.names[node - this.count];
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
    return this.isRange(node) ? this.data.ranges.parent[node - this.all - 1] : this.parent[node];
  }

  // The level of a node in the table.
  /** @param {number} node @returns {number} */
  depthOf(node) {
    return this.isRange(node) ? this.depthOf(this.parentOf(node)) + 1 : this.depth[node];
  }

  /** @template Made @param {string} key @param {() => Made} make */
  #cached(key, make) {
    if (!this.cache.has(key)) this.cache.set(key, make());
    return /** @type {Made} */ (this.cache.get(key));
  }

  // The self of each node: a field of Cost, or "calls", summed over phases, in one source (-1: all sources).
  /** @param {string} field @param {number[]} phases @param {number} source */
  own(field, phases, source) {
    return this.#cached(`own ${field} ${phases} ${source}`, () => {
      const sums = new Float64Array(this.count + 4);
      if (!this.columns[field]) return sums;
      const [nodes, values, rowPhases, sources, chains] = ["node", field, "phase", "source", "chain"].map((name) => this.column(name));
      for (let at = 0; at < this.size; at++) {
        if (!phases.includes(rowPhases[at]) || (source >= 0 && sources[at] !== source)) continue;
        if (field !== "calls" || this.chains[chains[at]].own) sums[nodes[at]] += values[at]; // not the calls of operators
      }
      return sums;
    });
  }

  // The total of each node: its self and the totals of its children.
  /** @param {string} field @param {number[]} phases @param {number} source */
  total(field, phases, source) {
    return this.#cached(`total ${field} ${phases} ${source}`, () => {
      const sums = this.own(field, phases, source).slice();
      for (let node = this.count + 1; node >= 0; node--) sums[this.parent[node]] += sums[node];
      return sums;
    });
  }

  // The index of a source in `bounds` and `ranges`: all sources together (-1) are the last.
  /** @param {number} source */
  #place(source) {
    return source < 0 ? this.data.bounds.of.length - 1 : source;
  }

  // The bound of each node's figure in one column and one source (-1: all sources): exact, lower bound, unknown, blank.
  /** @param {FigureColumn} column @param {number} source */
  bounds(column, source) {
    return this.#cached(`bounds ${column.number} ${source}`, () => {
      const { of, vectors } = this.data.bounds;
      const found = new Uint8Array(this.all + 1 + this.data.ranges.name.length);
      let at = 0;
      for (const [bound, nodes] of vectors[of[this.#place(source)][column.number]]) {
        found.fill(bound, at, at + nodes);
        at += nodes;
      }
      return found;
    });
  }

  // Whether a node has a row. Work of no layer has one only if there is any; on a rank, only its own layers have one.
  /** @param {number} node @param {number} source */
  exists(node, source) {
    return this.bounds(this.figures[0], source)[node] !== BOUND.NO_ROW;
  }

  // A field of Cost of a node, summed over phases, with its bound.
  /** @param {string} field @param {number[]} phases @param {number} source @param {number} node @returns {Figure} */
  sum(field, phases, source, node, isSelf = false) {
    const bounds = phases.map((phase) => {
      const column = this.figures.find((one) => one.kind === "cost" && one.phase === phase && one.self === isSelf && one.fields.some(([name]) => name === field));
      return column ? this.bounds(column, source)[node] : BOUND.BLANK;
    });
    const value = this[isSelf ? "own" : "total"](field, phases, source)[node];
    const known = bounds.filter((bound) => bound < BOUND.BLANK);
    if (!known.length || known.every((bound) => bound === BOUND.UNKNOWN)) return { value: 0, bound: known.length ? BOUND.UNKNOWN : BOUND.BLANK };
    return { value, bound: boundOfSum(value, known.every((bound) => bound === BOUND.EXACT)) };
  }

  /** @param {string[]} fields @param {number} source */
  isMeasured(fields, source) {
    const sources = source < 0 ? this.data.sources : [this.data.sources[source]];
    return fields.every((field) => sources.every((one) => one.measured.includes(field)));
  }

  // The figures of a column for all nodes: null where unknown, undefined where blank.
  /** @param {Column} column @param {number} source */
  values(column, source) {
    return this.#cached(`values ${column.key} ${source}`, () => this.#values(column, source));
  }

  /** @param {Column} column @param {number} source @returns {Value[]} */
  #values(column, source) {
    if (column.kind === "change") return this.#changes(column);
    const bounds = this.bounds(column, source);
    const found = [...this.#figures(column, source), ...this.data.ranges.values[this.#place(source)][column.number]];
    return found.map((value, node) => (bounds[node] >= BOUND.BLANK ? undefined : bounds[node] === BOUND.UNKNOWN ? null : value));
  }

  /** @param {FigureColumn} column @param {number} source @returns {Iterable<number>} */
  #figures(column, source) {
    /** @type {number[]} */
    const found = new Array(this.count + 4).fill(0);
    if (column.kind === "params") return found.map((_, node) => this.take(source).params[node]);
    if (column.kind === "calls") return this.own("calls", [0], source);
    if (column.kind === "rate") {
      const [flops, ns] = ["flops", column.onDevice ? "device_ns" : "cpu_ns"].map((field) => this.total(field, [column.phase], source));
      return found.map((_, node) => (flops[node] / ns[node]) * 1e9);
    }
    const parts = column.fields.map(([field, sign]) => ({ values: this[column.self ? "own" : "total"](field, [column.phase], source), sign }));
    return found.map((_, node) => parts.reduce((value, { values, sign }) => value + sign * values[node], 0));
  }

  // One part of the change of a quantity, by node: before, after, difference, ratio or verdict.
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

  // The lower bound of a quantity before or after, null if there is none.
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
    const fields = this.data.fields;
    const size = this.data.frames.length + 1;
    const calls = new Float64Array(size);
    const parts = new Float64Array(size); // calls inside an operator that is counted as a whole
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
    for (const at of this.sorted.subarray(this.first[low], this.first[high])) {
      const chain = this.chains[chains[at]];
      if (within[at] || chain.python >= 0 || !inPhases[rowPhases[at]] || (source >= 0 && sources[at] !== source)) continue;
      add(at, chain.distinct);
      addOwn(at, chain);
    }
    // Rows that ran inside an op of another layer count for the total of that op, too.
    for (const at of this.rowsWithin) {
      const chain = this.chains[chains[at]];
      if (chain.python >= 0 || (source >= 0 && sources[at] !== source)) continue;
      const keys = new Set();
      for (const [where, phase, around] of this.data.within[within[at]]) {
        if (!inRange(where)) continue;
        for (const frame of this.data.chains[around]) {
          if (inPhases[this.data.frames[frame][0] === "label" ? rowPhases[at] : phase]) keys.add(frame);
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
      const [kind, name] = this.data.frames[key] || ["op", "(between ops)"];
      /** @param {Float64Array[]} of */
      const sums = (of) => Object.fromEntries(fields.map((field, number) => [field, of[number][key]]));
      found.push({ name, kind, calls: calls[key], isPart: calls[key] > 0 && calls[key] === parts[key], own: sums(own), total: sums(total) });
    }
    return found;
  }

  // Kernels ("kernel"), or the source lines that the sampling thread saw ("python"), in a node and all below it.
  /** @param {"kernel" | "python"} what @param {number} node @param {number[]} phases @param {number} source @returns {Launched[]} */
  launched(what, node, phases, source) {
    const [low, high] = node === this.all ? [0, this.before] : [node, this.end[node]];
    const [rowPhases, sources, chains, calls, ns] = ["phase", "source", "chain", "calls", "device_ns"].map((name) => this.column(name));
    const found = new Map();
    for (const at of this.sorted.subarray(this.first[low], this.first[high])) {
      const frame = this.chains[chains[at]][what];
      if (frame < 0 || !phases.includes(rowPhases[at]) || (source >= 0 && sources[at] !== source)) continue;
      const sums = found.get(frame) || { name: this.data.frames[frame][1], calls: 0, ns: 0 };
      sums.calls += calls[at];
      sums.ns += ns[at];
      found.set(frame, sums);
    }
    return [...found.values()];
  }
}
