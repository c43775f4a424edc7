// The panel of the selected layer: its description, figures, operators, kernels and calls, and its figures by rank or run.

/**
 * @typedef {object} PanelDrawing
 * @property {number} node
 * @property {number} phase
 * @property {number} source
 * @property {PageData.Measure | null} measure
 */

class LayerPanel {
  /** @param {HTMLElement} box @param {Run} run */
  constructor(box, run) {
    this.box = box;
    this.run = run;
    this.node = -1;
  }

  /** @param {PanelDrawing} drawing */
  draw({ node, phase, source, measure }) {
    const { run } = this;
    const { comparison } = run.data;
    this.box.replaceChildren(
      element("h3", {}, run.path(node)),
      ...(run.isLayer(node) ? this.#facts(node, source) : []),
      ...(run.interval ? [] : this.#findings(node)),
      ...(comparison ? this.#changes(node, comparison.quantities) : this.#figures(node, source)),
      ...this.#operators(node, run.operators(node, phase, source), run.interval ? timeOfThreads(run) : measure, source),
      ...(run.interval ? [element("p", { class: "hint" }, "To see operators, single calls and memory of the layer, show all of the time.")] : [...this.#calls(node, source), ...this.#sources(node, phase, measure)]));
    if (node !== this.node) this.box.scrollTop = 0;
    this.node = node;
  }

  /** @param {number} node @param {number} source */
  #facts(node, source) {
    const { run } = this;
    const layer = run.description(node, source);
    if (layer === null) return [element("p", {}, "This run does not have this layer.")];
    const facts = [["class", layer.settings ? `${layer.kind}(${layer.settings})` : layer.kind || UNKNOWN]];
    const params = run.take(source).params[node];
    const own = layer.params;
    const text = params < 0 ? UNKNOWN : formatCount(params) + (own !== null && own !== params ? `, ${formatCount(own)} self` : "");
    facts.push(["parameters", layer.dtypes ? `${text} (${layer.dtypes})` : text]);
    const ofCall = layer.shapesVary ? ", first call" : "";
    const { inputs, outputs } = layer;
    if (inputs.length) facts.push([`input${ofCall}`, formatShapes(inputs)]);
    if (outputs.length) facts.push([`output${ofCall}`, formatShapes(outputs)]);
    facts.push(["mode", layer.training === null ? UNKNOWN : layer.training ? "training" : "evaluation"]);
    const others = layer.sharedWith;
    if (others.length) facts.push(["shared with", others.join(", ")]);
    return [element("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]))];
  }

  /** @param {number} node */
  #findings(node) {
    const path = this.run.path(node);
    const found = this.run.data.findings.filter(({ layers }) => layers.includes(path));
    return found.map((finding) => element("p", { class: "finding" }, ...textOfFinding(finding)));
  }

  /** @param {number} node @param {number} source */
  #figures(node, source) {
    const { run } = this;
    const { allPhases, phases } = run.data;
    // Two lines for each measure, total and self, with a column for each phase.
    /** @type {Map<string, Map<string, FigureColumn>>} */
    const lines = new Map();
    for (const column of run.figures) {
      if (column.where === "chart" || column.kind === "params" || run.text(column, node, source) === "") continue;
      if (run.interval && !run.interval.has(column)) continue;
      const phase = "phase" in column ? column.phase : 0;
      const lead = phase > 0 ? `${capitalized(allPhases[phase])} ` : "";
      const title = column.heading.slice(lead.length).replace(/^Self /, "").replace(/ total$/, " time");
      /** @type {Map<string, FigureColumn>} */
      const line = lines.get(title) ?? new Map();
      lines.set(title, line.set(`${phase} ${column.kind === "cost" && column.self ? "self" : "total"}`, column));
    }
    const numbers = phases.map((phase) => allPhases.indexOf(phase));
    const headings = phases.length > 1 ? phases.map((phase) => element("th", { scope: "col" }, phase)) : [];
    const body = [...lines].flatMap(([title, line]) => ["total", "self"].flatMap((part) => {
      const columns = numbers.map((phase) => line.get(`${phase} ${part}`));
      const cells = columns.map((column) => element("td", { class: "number", "data-key": column ? column.key : null }, ...(column ? figure(run.text(column, node, source)) : [""])));
      return columns.some((column) => column) ? [element("tr", { class: part }, element("th", { scope: "row" }, part === "self" ? part : title), ...cells)] : [];
    }));
    for (const [device, most] of run.interval ? [] : this.#peaks(node, source)) {
      const cells = numbers.map((phase) => {
        const nbytes = most.get(phase);
        return element("td", { class: "number" }, ...(nbytes === undefined ? [""] : figure(formatBytes(nbytes))));
      });
      body.push(element("tr", {}, element("th", { scope: "row" }, `Peak on ${device}`), ...cells));
    }
    return [element("div", { class: "scrolling" }, element("table", { class: "figures" }, element("thead", {}, element("tr", {}, element("td", {}), ...headings)), element("tbody", {}, ...body)))];
  }

  // The memory peak of one call above its start, layers below included: by device, then by phase. The largest over the calls.
  /** @param {number} node @param {number} source */
  #peaks(node, source) {
    /** @type {Map<string, Map<number, number>>} */
    const found = new Map();
    const { peakNode } = this.run;
    const { source: sources, phase, devices, device, nbytes } = this.run.data.peaks;
    for (let at = peakNode.indexOf(node); at >= 0; at = peakNode.indexOf(node, at + 1)) {
      if (source >= 0 && sources[at] !== source) continue;
      /** @type {Map<number, number>} */
      const most = found.get(devices[device[at]]) ?? new Map();
      found.set(devices[device[at]], most.set(phase[at], Math.max(nbytes[at], most.get(phase[at]) ?? 0)));
    }
    return found;
  }

  // In a comparison: how the layer is matched, and each figure before and after.
  /** @param {number} node @param {PageData.Quantity[]} quantities */
  #changes(node, quantities) {
    const pair = this.run.pairs.at(node);
    if (!pair) return [];
    /** @type {HTMLElement[]} */
    const parts = [];
    if (["added", "removed"].includes(pair.how)) parts.push(element("p", {}, `This layer was ${pair.how}.`));
    if (["moved", "renamed"].includes(pair.how)) parts.push(element("p", {}, `This layer was ${pair.how}. Before: ${pair.was}.`));
    if (pair.how === "moved away") parts.push(element("p", {}, `This layer was moved. After: ${pair.is}.`));
    for (const [what, before, after] of pair.differs) parts.push(element("p", {}, `${what}: ${before} before, ${after} after`));
    /** @type {ChangePart[]} */
    const shown = ["before", "after", "ratio", "verdict"];
    const headings = [element("td"), ...shown.map((heading) => element("th", { scope: "col" }, heading))];
    /** @param {PageData.Quantity} quantity */
    const isSomething = ({ key }) => pair.changes[key] && (pair.changes[key][0] !== 0 || pair.changes[key][1] !== 0);
    const body = quantities.filter(isSomething).map((quantity) => {
      const cells = shown.map((part) => {
        const column = changeColumn(quantity, part);
        return element("td", { class: part === "verdict" ? "" : "number", "data-key": column.key }, ...figure(this.run.text(column, node, 0), column));
      });
      return element("tr", {}, element("th", { scope: "row" }, quantity.heading), ...cells);
    });
    const table = element("table", { class: "figures" }, element("thead", {}, element("tr", {}, ...headings)), element("tbody", {}, ...body));
    return [...parts, element("div", { class: "scrolling" }, table)];
  }

  // The operators, the kernels, and the source lines between operators.
  /** @param {number} node @param {Operator[]} rows @param {PageData.Measure | null} measure @param {number} source */
  #operators(node, rows, measure, source) {
    const { layers } = this.run.data.operators;
    if (!rows.length && this.run.isLayer(node) && this.run.count > layers && !this.run.interval) {
      const how = `run.report("ops", layer=${JSON.stringify(this.run.path(node))})`;
      return [element("p", { class: "hint" }, `This page has the operators of the ${layers} largest layers. Those of this layer: `, element("code", {}, how))];
    }
    /** @param {string} kind */
    const of = (kind) => rows.filter((row) => row.kind === kind);
    const ofCalls = this.run.figures.find((column) => column.kind === "calls");
    const isSelected = !this.run.isLayer(node) || !ofCalls || this.run.bounds(ofCalls, source)[node] !== BOUND.BLANK;
    const within = isSelected ? "" : " of the selected layers in it";
    const [kernels, lines] = [of("kernel"), of("python")];
    const operators = rows.filter((row) => !["kernel", "python"].includes(row.kind));
    const whole = kernels.reduce((sum, { own }) => sum + own.device_ns, 0);
    /** @param {string} heading @returns {SheetColumn<Operator>} */
    const name = (heading) => ({ heading, isText: true, value: (row) => row.name, text: (row) => row.name });
    /** @param {string} heading @returns {SheetColumn<Operator>} */
    const calls = (heading) => ({ heading, value: (row) => row.calls, text: (row) => formatCalls(row.calls) });
    /** @type {SheetColumn<Operator>} */
    const time = { heading: "Time", value: (row) => row.own.device_ns, text: (row) => formatTime(row.own.device_ns), share: (row) => row.own.device_ns / whole };
    const parts = [];
    if (operators.length) parts.push(element("h4", {}, this.run.interval ? "Labels" : `Operators${within}`), operatorSheet(this.run, operators, measure, source));
    if (kernels.length) parts.push(element("h4", {}, "Kernels"), sheet([{ ...name("Kernel"), title: (row) => row.full }, time, calls("Calls")], kernels, { sortedBy: 1, shown: 8 }));
    if (lines.length) parts.push(element("h4", {}, "Source lines between operators"), sheet([name("Source line"), calls("Samples")], lines, { sortedBy: 1, shown: 5 }));
    return parts;
  }

  // The distribution of the durations of calls and of steps.
  /** @param {number} node @param {number} source */
  #calls(node, source) {
    const { run } = this;
    const titles = { cpu_ns: "One forward call", step_cpu_ns: "One step", step_device_ns: "One step, on the device" };
    return run.samples.of(node, source).flatMap(({ source: of, phase, measure, count, least, median, most, first, points }) => {
      const title = [titles[measure], ...(measure === "cpu_ns" ? [] : [run.data.allPhases[phase]]), ...(source < 0 && run.data.sources.length > 1 ? [run.data.sources[of].name] : [])];
      const text = `${count} times, ${formatTime(least)} to ${formatTime(most)}, median ${formatTime(median)}, first ${formatTime(first)}`;
      return [element("h4", {}, title.join(", ")), element("p", { class: "calls" }, text), ...(measure === "cpu_ns" ? this.#overTime(node, of) : []), curve(points)];
    });
  }

  // The durations of the calls in the order of time. Needs the timeline.
  /** @param {number} node @param {number} source */
  #overTime(node, source) {
    const found = this.run.data.calls.find((course) => course[0] === source && course[1] === node);
    if (!found) return [];
    const [, , every, values] = found;
    const most = Math.max(...values) || 1;
    const [width, height] = [220, 44];
    const step = width / values.length;
    const bars = values.map((ns, at) => {
      const tall = Math.max((ns / most) * (height - 2), 0.5);
      const title = drawing("title", {}, `call ${at * every + 1}: ${formatTime(ns)}`);
      return drawing("rect", { x: (at * step).toFixed(2), y: (height - tall).toFixed(2), width: Math.max(step - 1, 0.6).toFixed(2), height: tall.toFixed(2) }, title);
    });
    const note = every > 1 ? `, every ${every}th of the last cycle` : "";
    return [drawing("svg", { viewBox: `0 0 ${width} ${height}`, class: "curve", role: "img", "aria-label": `from the first call to the last${note}` }, ...bars)];
  }

  // The chosen measure on every rank, or in every run of the page.
  /** @param {number} node @param {number} phase @param {PageData.Measure | null} measure */
  #sources(node, phase, measure) {
    const { run } = this;
    const { sources } = run.data;
    if (sources.length < 2 || !measure) return [];
    const rows = sources.map(({ name }, source) => {
      const found = run.figure(measure.field, phase, source, node);
      return { name, figure: found, value: found.bound < BOUND.UNKNOWN ? found.value : null };
    });
    const known = rows.map((row) => row.value).filter((value) => value !== null).sort((one, other) => one - other);
    if (!known.length) return [];
    const format = FORMATS[measure.unit];
    const most = known[known.length - 1];
    /** @type {SheetColumn<typeof rows[number]>[]} */
    const columns = [
      { heading: run.data.areRanks ? "Rank" : "Run", isText: true, value: (row) => row.name, text: (row) => row.name },
      { heading: measure.heading, value: (row) => row.value, text: (row) => formatFigure(row.figure, measure.unit), share: (row) => (row.value ?? 0) / most },
    ];
    const text = `${format(known[0])} to ${format(most)}, median ${format(Math.round(medianOf(known)))}`;
    return [element("h4", {}, run.data.areRanks ? "By rank" : "By run"), element("p", { class: "calls" }, text), sheet(columns, rows, { shown: 16 })];
  }
}

// The measure of labels in an interval: it is not known which kernels they launched.
/** @param {Run} run */
function timeOfThreads(run) {
  return run.data.measures.find(({ field }) => field === "cpu_ns") ?? null;
}

/** @type {ChangePart[]} */
const CHANGES = ["before", "after", "difference", "ratio", "verdict"];

// A column of the table of layers that shows one part of the change of a quantity.
/** @param {PageData.Quantity} quantity @param {ChangePart} part @returns {ChangeColumn} */
function changeColumn({ key, heading, unit, self }, part) {
  const shown = part === "ratio" || part === "verdict" ? part : unit;
  return { kind: "change", of: key, part, isSelf: self, key: `${key} ${part}`, heading: `${heading}, ${part}`, unit: shown };
}

/** @param {string} text */
function capitalized(text) {
  return text[0].toUpperCase() + text.slice(1);
}

// The name of a range as in the other reports; the name of an operator is not changed.
/** @param {Operator} operator */
function rangeInWords({ kind, name }) {
  if (kind === "label") return `${name} (label)`;
  if (kind === "region" && name !== "compiling") return `(region ${name})`;
  if (kind === "profiler" || kind === "start-up") return `(${kind}: ${name})`;
  return ["region", "kernels", "gc", "wait"].includes(kind) ? `(${name})` : name;
}

// The operators with the chosen measure.
/** @param {Run} run @param {Operator[]} rows @param {PageData.Measure | null} measure @param {number} source */
function operatorSheet(run, rows, measure, source) {
  /** @type {SheetColumn<Operator>[]} */
  const columns = [
    { heading: run.interval ? "Label" : "Operator", isText: true, value: (row) => row.name, text: (row) => rangeInWords(row) },
    { heading: "Calls", value: (row) => row.calls, text: (row) => (row.calls ? formatCalls(row.calls) : "") },
  ];
  if (measure) {
    const { heading, field, unit, lowerBoundIf } = measure;
    const whole = rows.reduce((sum, row) => sum + Math.max(row.own[field], 0), 0);
    const isKnown = run.isMeasured([field], source);
    /** @param {Operator} row @param {Record<string, number>} sums */
    const text = (row, sums) => {
      const value = sums[field];
      if (unit === "count" && row.isPart && !value) return ""; // the figure of the operator around it includes this
      return formatFigure({ value, bound: isKnown ? boundOfSum(value, lowerBoundIf === null || !sums[lowerBoundIf]) : BOUND.UNKNOWN }, unit);
    };
    columns.push({ heading: `Self ${heading}`, value: (row) => row.own[field], text: (row) => text(row, row.own), share: (row) => row.own[field] / whole });
    if (unit === "ns") columns.push({ heading, value: (row) => row.total[field], text: (row) => text(row, row.total) });
  }
  return sheet(columns, rows, { sortedBy: measure ? 2 : 0, shown: 10 });
}

// A line chart of values in ascending order, from left to right.
/** @param {number[]} points */
function curve(points) {
  const [width, height] = [220, 44];
  const most = points[points.length - 1] || 1;
  const places = points.map((value, at) => `${((at / Math.max(points.length - 1, 1)) * width).toFixed(1)},${(height - 2 - (value / most) * (height - 4)).toFixed(1)}`);
  return drawing("svg", { viewBox: `0 0 ${width} ${height}`, class: "curve", role: "img", "aria-label": "from the fastest to the slowest" },
    drawing("polyline", { points: places.join(" ") }));
}
