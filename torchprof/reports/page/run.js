// The run: its layers, and their figures, which torchprof/reports/page/layers.py reads from the table of the terminal; those of
// an interval are sums over the spans of the timeline (interval.js). A phase
// is its number, or ALL_PHASES; a source is its number, or -1 for all ranks together.

/** @typedef {number | string | null | undefined} Value null: unknown. undefined: blank. */
/** @typedef {"before" | "after" | "difference" | "ratio" | "verdict"} ChangePart */

/** @typedef {PageData.Column & { number: number }} FigureColumn */
/** @typedef {{ kind: "change", of: string, part: ChangePart, isSelf: boolean, key: string, heading: string, unit: Unit | "verdict" }} ChangeColumn */
/** @typedef {{ kind: "derived", of: "share" | "call" | "step", field: string, phase: number, key: string, heading: string, unit: Unit }} DerivedColumn */
/** @typedef {FigureColumn | ChangeColumn | DerivedColumn} Column */

/**
 * @typedef {object} Operator
 * @property {string} name
 * @property {string} full
 * @property {string} kind
 * @property {number} calls
 * @property {boolean} isPart
 * @property {Record<string, number>} own
 * @property {Record<string, number>} total
 */

const ALL_PHASES = -1;

/** @param {Column} column */
function isOfSelf(column) {
  return column.kind === "cost" && column.self;
}

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
    this.samples = new Samples(data.samples);
    this.peakNode = runningSums(data.peaks.node);
    /** @type {Map<string, unknown>} */
    this.cache = new Map();
    /** @type {Interval | null} */
    this.interval = null; // if set, times and calls are those in it, and what it does not have is unknown
    this.pairs = data.comparison ? data.comparison.pairs : []; // by node; empty if the page is no comparison
    /** @type {FigureColumn[]} */
    this.figures = data.columns.map((column, number) => ({ ...column, number }));
    // A comparison compares layers only, not the ranges in them.
    this.ranges = data.comparison ? [] : data.ranges.name;
    this.nodes = this.all + 1 + this.ranges.length;
    /** @type {Map<number, number[]>} */
    this.rangesOf = new Map();
    /** @type {Map<string, number>} */
    this.firstOperator = new Map(); // the first row of each layer in data.operators, by source and node
    this.ranges.forEach((_, at) => {
      const above = data.ranges.parent[at];
      this.rangesOf.set(above, [...(this.rangesOf.get(above) || []), this.all + 1 + at]);
    });
    this.operatorNode = runningSums(data.operators.node);
    for (let at = this.operatorNode.length - 1; at >= 0; at--) this.firstOperator.set(`${data.operators.source[at]} ${this.operatorNode[at]}`, at);
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

  // Whether there are figures of a measure in the interval.
  /** @param {PageData.Measure} measure */
  isShown({ field }) {
    return !this.interval || TIMES.includes(field);
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
    const known = measures.filter((measure) => this.isShown(measure) && this.isMeasured([measure.field], source));
    return known.find(({ field }) => field === mainField) ?? known.at(0) ?? null;
  }

  get hasOtherClasses() {
    const others = (/** @type {PageData.Take} */ take) => take.described.some((layer) => layer !== null && !this.data.classes.includes(layer.kind));
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
  #cached(key, make, cache = this.cache) {
    if (!cache.has(key)) cache.set(key, make());
    return /** @type {Made} */ (cache.get(key));
  }

  // The index of a source in the data: all sources together (-1) are the last.
  /** @param {number} source */
  #place(source) {
    return source < 0 ? this.data.figures.values.length - 1 : source;
  }

  // In a comparison of runs of different length, figures are for one call of the model, or for one step.
  /** @param {number} place */
  #scale(place) {
    return this.data.comparison?.per ? this.data.comparison.scale[place] : 1;
  }

  // The values of a column for all nodes, without bounds.
  /** @param {FigureColumn} column @param {number} source */
  #vector(column, source) {
    if (this.interval) return this.interval.vector(column);
    const { number } = column;
    const place = this.#place(source);
    const { values, vectors } = this.data.figures;
    const vector = vectors[values[place][number]];
    const scale = this.#scale(place);
    return scale === 1 ? vector : this.#cached(`scaled ${number} ${place}`, () => Float64Array.from(vector, (value) => value * scale));
  }

  // The column of a measure, given by its field of Cost.
  /** @param {string} field @param {number} phase @returns {FigureColumn | undefined} */
  #chart(field, phase, isSelf = false) {
    return this.#cached(`chart ${field} ${phase} ${isSelf}`, () => this.figures.find((one) => one.where === "chart" && one.kind === "cost" && one.field === field && one.phase === phase && one.self === isSelf));
  }

  // A measure of all nodes, for widths: total, or self. Without the measure all are 0.
  /** @param {string} field @param {number} phase @param {number} source @returns {PageData.Integers} */
  widths(field, phase, source, isSelf = false) {
    const column = this.#chart(field, phase, isSelf);
    return column ? this.#vector(column, source) : new Float64Array(this.nodes);
  }

  // The bound of each node's figure in one column and one source (-1: all sources): exact, lower bound, unknown, blank.
  /** @param {FigureColumn} column @param {number} source */
  bounds(column, source) {
    const ofRun = this.boundsOfRun(column, source);
    const { interval } = this;
    return interval ? this.#cached(`bounds ${column.number}`, () => interval.bounds(column, ofRun), interval.cache) : ofRun;
  }

  // The same of the whole run.
  /** @param {FigureColumn} column @param {number} source */
  boundsOfRun(column, source) {
    return this.#cached(`bounds ${column.number} ${source}`, () => this.#bounds(column, source));
  }

  /** @param {FigureColumn} column @param {number} source */
  #bounds(column, source) {
    const { bounds, boundVectors } = this.data.figures;
    const found = new Uint8Array(this.all + 1 + this.data.ranges.name.length);
    let at = 0;
    for (const [bound, nodes] of boundVectors[bounds[this.#place(source)][column.number]]) {
      found.fill(bound, at, at + nodes);
      at += nodes;
    }
    return found;
  }

  // Whether a node has a row. Work of no layer has one only if there is any; on a rank, only its own layers have one.
  /** @param {number} node @param {number} source */
  exists(node, source) {
    return this.bounds(this.figures[0], source)[node] !== BOUND.NO_ROW;
  }

  // A measure of a node with its bound, given by its field of Cost.
  /** @param {string} field @param {number} phase @param {number} source @param {number} node @returns {Figure} */
  figure(field, phase, source, node, isSelf = false) {
    const column = this.#chart(field, phase, isSelf);
    const bound = column ? this.bounds(column, source)[node] : BOUND.BLANK;
    return { value: column && bound < BOUND.UNKNOWN ? this.#vector(column, source)[node] : 0, bound: Math.min(bound, BOUND.BLANK) };
  }

  // The whole of which shares are, 0 if there are none: what is only a lower bound has no shares.
  /** @param {string} field @param {number} phase @param {number} source */
  whole(field, phase, source) {
    const { value, bound } = this.figure(field, phase, source, this.all);
    return bound === BOUND.EXACT ? value : 0;
  }

  /** @param {string[]} fields @param {number} source */
  isMeasured(fields, source) {
    const sources = source < 0 ? this.data.sources : [this.data.sources[source]];
    return fields.every((field) => sources.every((one) => one.measured.includes(field)));
  }

  // The figures of a column for all nodes: null where unknown, undefined where blank.
  /** @param {Column} column @param {number} source */
  values(column, source) {
    const of = "field" in column ? `${column.field} ${column.phase}` : "";
    return this.#cached(`values ${column.key} ${of} ${source}`, () => this.#values(column, source), this.interval?.cache);
  }

  /** @param {Column} column @param {number} source @returns {Value[]} */
  #values(column, source) {
    if (column.kind === "change") return this.#changes(column);
    if (column.kind === "derived") return this.#derived(column, source);
    const [figures, bounds] = [this.#figures(column, source), this.bounds(column, source)];
    /** @type {Value[]} */
    const found = new Array(bounds.length);
    for (let node = 0; node < bounds.length; node++) {
      found[node] = bounds[node] < BOUND.UNKNOWN ? figures[node] : bounds[node] === BOUND.UNKNOWN ? null : undefined;
    }
    return found;
  }

  /** @param {FigureColumn} column @param {number} source @returns {PageData.Integers} */
  #figures(column, source) {
    if (column.kind === "params") return this.take(source).params;
    if (this.interval && !this.interval.has(column)) return new Float64Array(this.nodes); // unknown
    if (column.kind !== "rate") return this.#vector(column, source);
    const [flops, ns] = ["flops", column.onDevice ? "device_ns" : "cpu_ns"].map((field) => this.widths(field, column.phase, source));
    return Float64Array.from(flops, (value, node) => (value / ns[node]) * 1e9);
  }

  // A measure in the chosen phases, total and self if they are not among the `others`, with what is made of it: its share
  // of the whole, and what it is for a call and a step.
  /** @param {PageData.Measure} measure @param {number} phase @param {number} source @param {string} words @param {Column[]} others @returns {Column[]} */
  columnsOf({ field, heading, unit }, phase, source, words, others) {
    const columns = [false, true].map((isSelf) => this.#chart(field, phase, isSelf));
    if (!columns[0]) return [];
    const sums = columns.flatMap((column, at) => {
      if (!column || others.some((one) => isOfSelf(one) === at > 0)) return [];
      return [{ ...column, key: at ? "chosen self" : "chosen", heading: `${at ? "Self " : ""}${heading}, ${words}` }];
    });
    /** @type {(of: DerivedColumn["of"], title: string, unit: Unit) => DerivedColumn} */
    const derived = (of, title, ofUnit) => ({ kind: "derived", of, field, phase, key: of, heading: title, unit: ofUnit });
    const perStep = this.#steps(source) ? [derived("step", "per step", unit)] : [];
    const perCall = this.interval ? [] : [derived("call", "per call", unit), ...perStep]; // it may have parts of calls
    return [...sums, derived("share", "%", "share"), ...perCall];
  }

  // The recorded steps, of all ranks if none is chosen; 0 if that is not known of each.
  /** @param {number} source */
  #steps(source) {
    const steps = source < 0 ? this.data.sources.map((one) => one.steps) : [this.data.sources[source].steps];
    return steps.includes(0) ? 0 : steps.reduce((sum, one) => sum + one, 0);
  }

  // Unknown where the measure, or what it is divided by, is unknown or a lower bound.
  /** @param {DerivedColumn} column @param {number} source @returns {Value[]} */
  #derived({ of, field, phase }, source) {
    const ofCalls = this.figures.find(({ kind }) => kind === "calls");
    const [calls, callBounds] = ofCalls ? [this.values(ofCalls, source), this.bounds(ofCalls, source)] : [[], []];
    const column = this.#chart(field, phase);
    const bounds = column ? this.bounds(column, source) : new Uint8Array(this.nodes).fill(BOUND.BLANK);
    const values = this.widths(field, phase, source);
    const whole = of === "share" ? this.whole(field, phase, source) || Infinity : this.#steps(source);
    /** @type {Value[]} */
    const found = new Array(this.nodes);
    for (let node = 0; node < this.nodes; node++) {
      const count = of === "call" ? calls[node] : whole;
      if (bounds[node] >= BOUND.BLANK || count === undefined || count === 0) continue;
      const isKnown = bounds[node] === BOUND.EXACT && count !== Infinity && !(of === "call" && callBounds[node] !== BOUND.EXACT);
      found[node] = isKnown && node !== this.before ? values[node] / Number(count) : null;
    }
    return found;
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
    return column.kind !== "change" && column.kind !== "derived" && this.bounds(column, source)[node] === BOUND.AT_LEAST;
  }

  /** @param {Column} column @param {number} node @param {number} source */
  value(column, node, source) {
    return this.values(column, source)[node];
  }

  /** @param {Column} column @param {number} node @param {number} source @returns {string} */
  text(column, node, source) {
    const value = this.value(column, node, source);
    if (typeof value === "string" || column.unit === "verdict") return String(value ?? "");
    if (column.kind === "derived") return value === undefined ? "" : value === null ? UNKNOWN : FORMATS[column.unit](value);
    if (column.kind !== "change") return formatFigure({ value: value ?? 0, bound: this.bounds(column, source)[node] }, column.unit);
    if (value === undefined) return "";
    if (value === null) {
      const least = this.#leastOf(column, node);
      return formatFigure({ value: least ?? 0, bound: least === null ? BOUND.UNKNOWN : BOUND.AT_LEAST }, column.unit);
    }
    const text = FORMATS[column.unit](value);
    return column.part === "difference" && value > 0 ? `+${text}` : text;
  }

  // What ran in a layer and in none below it: the difference. Empty if it is not known of all of these.
  /** @param {number} node @param {number} phase @param {number} source @returns {Operator[]} */
  ownOperators(node, phase, source) {
    const found = this.operators(node, phase, source).map((one) => ({ ...one, own: { ...one.own } }));
    const below = this.children[node].map((child) => this.operators(child, phase, source));
    if (below.length && (this.interval || (this.count > this.data.operators.layers && below.some((operators) => !operators.length)))) return [];
    const known = new Map(found.map((one) => [`${one.kind} ${one.name}`, one]));
    for (const { name, kind, own } of below.flat()) {
      const around = known.get(`${kind} ${name}`);
      if (around) for (const field of Object.keys(own)) around.own[field] -= own[field];
    }
    return found;
  }

  // What ran in a layer and in all layers below it: operators and labels, kernels ("kernel"), source lines ("python").
  /** @param {number} node @param {number} phase @param {number} source @returns {Operator[]} */
  operators(node, phase, source) {
    if (this.interval) return this.interval.operators(node, phase);
    const { operators } = this.data;
    const place = this.#place(source);
    const scale = this.#scale(place);
    const found = [];
    let at = this.firstOperator.get(`${place} ${node}`) ?? this.operatorNode.length;
    for (; this.operatorNode[at] === node && operators.source[at] === place; at++) {
      if (phase === ALL_PHASES ? !operators.isAll[at] : operators.phase[at] !== phase) continue;
      const [kind, name, full = name] = operators.names[operators.name[at]];
      const own = Object.fromEntries(Object.entries(operators.self).map(([field, values]) => [field, values[at] * scale]));
      const total = Object.fromEntries(Object.entries(operators.inside).map(([field, values]) => [field, own[field] + values[at] * scale]));
      found.push({ name, full, kind, calls: operators.calls[at] * scale, isPart: operators.isPart[at] === 1, own, total });
    }
    return found;
  }
}
