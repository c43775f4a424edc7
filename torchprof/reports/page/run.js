// The run: rows as columns, and every sum over them. The page knows no other figures.

class Run {
  constructor(told) {
    this.told = told;
    const count = told.layers.name.length;
    this.count = count;
    this.outside = count;
    this.notSelected = count + 1;
    this.all = count + 2;
    this.parent = Int32Array.from([...told.layers.parent.map((at) => (at < 0 ? this.all : at)), this.all, this.all, -1]);
    this.children = Array.from({ length: count + 3 }, () => []);
    for (let node = 0; node < count + 2; node++) this.children[this.parent[node]].push(node);
    this.end = new Int32Array(count + 3); // of the nodes below, which follow a node
    this.depth = new Int32Array(count + 3);
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
    this.end[this.all] = this.all;
    this.size = told.rows.node.length;
    this.zeros = new Float64Array(Math.max(this.size, count + 3));
    this.columns = {};
    for (const [name, values] of Object.entries(told.rows)) this.columns[name] = Float64Array.from(values);
    if (told.comparison && told.comparison.of) this.#scale(told.comparison.scale);
    this.#sort();
    this.#readChains();
    this.params = told.takes.map((take) => this.#totalParams(take));
    this.cache = new Map();
  }

  column(name) {
    return this.columns[name] || this.zeros;
  }

  // Where runs of different length are compared, all figures are for one call of the model, or for one step.
  #scale(scale) {
    const sources = this.column("source");
    for (const name of ["calls", ...this.told.fields]) {
      if (this.columns[name]) this.columns[name] = this.columns[name].map((value, at) => value * scale[sources[at]]);
    }
  }

  // Rows in the order of their nodes, so that those of a layer and all below it stand together.
  #sort() {
    const nodes = this.column("node");
    this.first = new Int32Array(this.count + 4);
    for (let at = 0; at < this.size; at++) this.first[nodes[at] + 1]++;
    for (let node = 0; node < this.count + 3; node++) this.first[node + 1] += this.first[node];
    const next = this.first.slice();
    this.sorted = new Int32Array(this.size);
    for (let at = 0; at < this.size; at++) this.sorted[next[nodes[at]]++] = at;
  }

  #readChains() {
    const frames = this.told.frames;
    this.chains = this.told.chains.map((chain) => {
      const last = chain.length ? frames[chain[chain.length - 1]][0] : "";
      const ops = last === "kernel" ? chain.slice(0, -1) : chain;
      return {
        own: chain.length === 0,
        kernel: last === "kernel" ? chain[chain.length - 1] : -1,
        python: last === "python" ? chain[chain.length - 1] : -1,
        ops: ops.length ? ops : [frames.length], // the number of what is no op: the time between ops
        distinct: ops.length ? [...new Set(ops)] : [frames.length],
      };
    });
  }

  // null where a layer cannot say; a layer that the run does not have takes no part.
  #totalParams({ params, kind }) {
    const totals = [...params];
    for (let node = this.count - 1; node >= 0; node--) {
      const above = this.parent[node];
      if (above < this.count && kind[node] !== null) totals[above] = totals[above] === null || totals[node] === null ? null : totals[above] + totals[node];
    }
    return totals;
  }

  // What the layers are in the run that is shown: null where it does not have them.
  take(source) {
    return this.told.takes[source < 0 ? 0 : this.told.sources[source].take];
  }

  // The class of a layer: in the run that is shown, else in one that has it.
  kind(node, source) {
    return this.take(source).kind[node] ?? this.told.takes.map(({ kind }) => kind[node]).find((kind) => kind !== null);
  }

  isLayer(node) {
    return node < this.count;
  }

  name(node) {
    return node < this.count ? this.told.layers.name[node] : node === this.all ? "everything" : this.told.names[node - this.count];
  }

  path(node) {
    const names = [];
    for (let at = node; at >= 0 && at !== this.all; at = this.parent[at]) names.push(this.name(at));
    return names.reverse().join(".") || this.name(node);
  }

  // The nodes from the top down to one.
  above(node) {
    const way = [];
    for (let at = node; at >= 0; at = this.parent[at]) way.push(at);
    return way.reverse();
  }

  #cached(key, make) {
    if (!this.cache.has(key)) this.cache.set(key, make());
    return this.cache.get(key);
  }

  // What each node took itself of a field of Cost, in a phase and a source (-1: all sources).
  own(field, phase, source) {
    return this.#cached(`own ${field} ${phase} ${source}`, () => {
      const sums = new Float64Array(this.count + 3);
      if (!this.columns[field]) return sums;
      const [nodes, values, phases, sources] = ["node", field, "phase", "source"].map((name) => this.column(name));
      for (let at = 0; at < this.size; at++) {
        if (phases[at] === phase && (source < 0 || sources[at] === source)) sums[nodes[at]] += values[at];
      }
      return sums;
    });
  }

  // The same with all that is below a node.
  total(field, phase, source) {
    return this.#cached(`total ${field} ${phase} ${source}`, () => this.#rollUp(this.own(field, phase, source)));
  }

  #rollUp(own) {
    const sums = own.slice();
    for (let node = this.count + 1; node >= 0; node--) sums[this.parent[node]] += sums[node];
    return sums;
  }

  ownIn(field, phases, source) {
    return this.#summed("own", field, phases, source);
  }

  totalIn(field, phases, source) {
    return this.#summed("total", field, phases, source);
  }

  #summed(what, field, phases, source) {
    if (phases.length === 1) return this[what](field, phases[0], source);
    return this.#cached(`${what} ${field} ${phases} ${source}`, () => {
      const sums = new Float64Array(this.count + 3);
      for (const phase of phases) this[what](field, phase, source).forEach((value, node) => (sums[node] += value));
      return sums;
    });
  }

  calls(phase, source) {
    return this.#cached(`calls ${phase} ${source}`, () => {
      const sums = new Float64Array(this.count + 3);
      const [nodes, calls, phases, sources, chains] = ["node", "calls", "phase", "source", "chain"].map((name) => this.column(name));
      for (let at = 0; at < this.size; at++) {
        if (this.chains[chains[at]].own && phases[at] === phase && (source < 0 || sources[at] === source)) sums[nodes[at]] += calls[at];
      }
      return sums;
    });
  }

  // Which layers were never called: what they would have cost, nobody knows.
  unknown(source) {
    return this.#cached(`unknown ${source}`, () => {
      const known = new Uint8Array(this.count + 3);
      for (const name of this.told.phases) {
        const phase = this.told.allPhases.indexOf(name);
        const calls = this.calls(phase, source);
        for (let node = 0; node < this.count; node++) if (calls[node]) known[node] = 1;
        for (const field of this.told.fields) {
          const totals = this.total(field, phase, source);
          for (let node = 0; node < this.count + 3; node++) if (totals[node]) known[node] = 1;
        }
      }
      return known.map((one) => 1 - one);
    });
  }

  isMeasured(fields, source) {
    const sources = source < 0 ? this.told.sources : [this.told.sources[source]];
    return fields.every((field) => sources.every((one) => one.measured.includes(field)));
  }

  // The figures of a column for all nodes: null where it is unknown, undefined where there is no such thing.
  values(column, source) {
    return this.#cached(`values ${column.key} ${source}`, () => this.#values(column, source));
  }

  #values(column, source) {
    if (column.kind === "change") return this.#changes(column);
    const found = this.#figures(column, source);
    const { kind, selected } = this.take(source);
    for (let node = 0; node < this.count; node++) {
      if (kind[node] === null) found[node] = null;
      else if (!selected[node]) found[node] = undefined;
    }
    return found;
  }

  #figures(column, source) {
    const found = new Array(this.count + 3);
    if (column.kind === "params") return this.params[source < 0 ? 0 : this.told.sources[source].take].slice();
    if (column.kind === "calls") {
      const calls = this.calls(0, source);
      const { compiled } = this.take(source);
      for (let node = 0; node < this.count; node++) found[node] = compiled[node] && !calls[node] ? null : calls[node];
      return found;
    }
    const sums = (field) => this[column.self ? "own" : "total"](field, column.phase, source);
    const time = column.onDevice ? "device_ns" : "cpu_ns";
    const fields = column.kind === "rate" ? [time, "flops"] : column.fields.map(([field]) => field);
    if (!this.isMeasured(fields, source)) return found.fill(null);
    const unknown = this.unknown(source);
    const doubt = column.doubt === null ? this.zeros : sums(column.doubt);
    const parts = fields.map(sums);
    for (let node = 0; node < this.count + 3; node++) {
      const doubtful = doubt[node] > 0;
      if (unknown[node] && node < this.count) {
        found[node] = null;
      } else if (column.kind === "rate") {
        const [ns, flops] = [parts[0][node], parts[1][node]];
        found[node] = ns > 0 && (flops || !doubtful) ? (flops / ns) * 1e9 : null;
      } else {
        let value = 0;
        for (let number = 0; number < parts.length; number++) value += column.fields[number][1] * parts[number][node];
        found[node] = doubtful && !value ? null : value;
      }
    }
    return found;
  }

  // One part of how a quantity changed: before, after, difference, ratio or verdict.
  #changes({ of, part }) {
    return this.told.comparison.pairs.map(({ changes, how }) => {
      if (!changes[of]) return undefined;
      const [before, after, difference, verdict] = changes[of];
      if (how === "moved away") return part === "before" ? before : undefined;
      if (how === "added" && part !== "after" && part !== "difference") return undefined;
      if (how === "removed" && part !== "before" && part !== "difference") return undefined;
      if (part === "ratio") return before > 0 && after !== null && after >= 0 ? after / before : null;
      return { before, after, difference, verdict }[part];
    });
  }

  value(column, node, source) {
    return this.values(column, source)[node];
  }

  text(column, node, source) {
    const value = this.value(column, node, source);
    if (value === undefined) return "";
    if (value === null) return UNKNOWN;
    const text = FORMATS[column.unit](value);
    if (column.kind === "change") return column.part === "difference" && value > 0 ? `+${text}` : text;
    const isLeast = column.doubt && this[column.self ? "own" : "total"](column.doubt, column.phase, source)[node] > 0;
    return isLeast ? AT_LEAST + text : text;
  }

  // Operators and labels in a node and all below it: calls, and self and total of every field.
  operators(node, phases, source) {
    return this.#cached(`operators ${node} ${phases} ${source}`, () => this.#operators(node, phases, source));
  }

  #operators(node, phases, source) {
    const fields = this.told.fields;
    const size = this.told.frames.length + 1;
    const calls = new Float64Array(size);
    const own = fields.map(() => new Float64Array(size));
    const total = fields.map(() => new Float64Array(size));
    const seen = new Uint8Array(size);
    const values = fields.map((field) => this.column(field));
    const [rowPhases, sources, chains, within, rowCalls, nodes] =
      ["phase", "source", "chain", "within", "calls", "node"].map((name) => this.column(name));
    const [low, high] = node === this.all ? [0, this.count + 3] : [node, this.end[node]];
    const inRange = (one) => one >= low && one < high;
    const inPhases = new Uint8Array(3);
    for (const phase of phases) inPhases[phase] = 1;
    const add = (at, keys) => {
      for (const key of keys) {
        seen[key] = 1;
        for (let number = 0; number < values.length; number++) total[number][key] += values[number][at];
      }
    };
    const addOwn = (at, chain) => {
      const key = chain.ops[chain.ops.length - 1];
      for (let number = 0; number < values.length; number++) own[number][key] += values[number][at];
      if (!chain.own && chain.kernel < 0) calls[key] += rowCalls[at];
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
      const sums = (of) => Object.fromEntries(fields.map((field, number) => [field, of[number][key]]));
      found.push({ name, kind, calls: calls[key], own: sums(own), total: sums(total) });
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
  launched(what, node, phases, source) {
    const [low, high] = node === this.all ? [0, this.count + 3] : [node, this.end[node]];
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
