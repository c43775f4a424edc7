// The ranks of a job: a heat map of own work by layer and rank, and its quantiles over many ranks.

const MOST_LAYERS = 24;
const MOST_COLUMNS = 64; // with more ranks, neighbors share a column
const WRITTEN_COLUMNS = 12; // with up to so many columns, cells show their figures
const DEEPEST = Math.log2(1.5); // the ratio to the median from which on the color does not get deeper

// The own work of each rank relative to the median over the ranks that have the layer, for the layers that differ most.
/** @param {Run} run @param {PageData.Ranks} compared @param {number[]} phases @param {(node: number) => void} onlayer */
function ranksMap(run, { ranks, work, unit }, phases, onlayer) {
  /** @type {Map<string, { node: number | null, values: (number | null)[] }>} */
  const layers = new Map();
  for (const [name, node, phase, values] of work) {
    if (!phases.includes(phase)) continue;
    const sums = layers.get(name)?.values;
    layers.set(name, { node, values: !sums ? values : sums.map((sum, at) => {
      const value = values[at];
      return value === null ? sum : (sum ?? 0) + value;
    }) });
  }
  /** @param {(number | null)[]} values */
  const aboveMean = (values) => {
    const known = values.filter((value) => value !== null);
    return Math.max(...known) - known.reduce((sum, value) => sum + value, 0) / known.length;
  };
  const rows = [...layers].map(([name, { node, values }], place) => ({ name, node, values, place, aboveMean: aboveMean(values) }));
  const shown = rows.sort((one, other) => other.aboveMean - one.aboveMean).slice(0, MOST_LAYERS).sort((one, other) => one.place - other.place);
  if (!shown.length) return element("p", { class: "hint" }, "Times of single layers were not recorded by rank.");
  const together = Math.ceil(ranks.length / MOST_COLUMNS);
  /** @type {[first: number, end: number][]} */
  const columns = [];
  for (let first = 0; first < ranks.length; first += together) columns.push([first, Math.min(first + together, ranks.length)]);
  const isWritten = columns.length <= WRITTEN_COLUMNS;
  const every = columns.length > 2 * WRITTEN_COLUMNS ? 8 : 1;
  const headings = columns.map(([first], at) => element("th", { scope: "col", class: "number" }, at % every ? "" : String(ranks[first])));
  const body = shown.map((layer) => {
    const { name, node, values } = layer;
    const known = values.filter((value) => value !== null).sort((one, other) => one - other);
    const median = medianOf(known);
    const cells = columns.map((column) => ranksCell(layer, median, ranks, column, isWritten));
    return element("tr", {},
      element("th", { scope: "row" }, node === null ? name : element("button", { type: "button", onclick: () => onlayer(node) }, name)),
      element("td", { class: "number" }, ...figure(formatTime(median))),
      ...cells);
  });
  const head = element("tr", {}, element("th", { scope: "col" }, "Layer"), element("th", { scope: "col" }, "Median"), ...headings);
  const table = element("table", { class: isWritten ? "heat written" : "heat" }, element("thead", {}, head), element("tbody", {}, ...body));
  const legend = [["less", "less than the median"], ["same", "the median"], ["more", "more than the median; full color from 1.5×"]];
  const scale = element("span", { class: "scale" }, "0.67×", element("span", { class: "shades", role: "img", "aria-label": "from blue, less, to orange, more" }), "1.5×");
  if (shown.some(({ values }) => values.includes(null))) legend.push(["unknown", "layer not on this rank"]);
  const names = phases.map((phase) => run.data.allPhases[phase]).join(" and ");
  const each = together > 1 ? `One column for up to ${together} ranks: the one with the most` : "One column per rank:";
  const text = `${each} own work${unit}, ${names}, relative to the median of the ranks. Layers that differ most.`;
  return element("figure", {},
    element("figcaption", {}, text),
    element("div", { class: "scrolling" }, table),
    element("figcaption", {}, scale, ...legend.map(([kind, name]) => element("span", { class: `legend ${kind}` }, name))));
}

// The own work in each layer over all ranks of a job of which the page has some: quantiles, and the slowest rank.
/** @param {Run} run @param {PageData.Ranks} compared @param {number[]} phases @param {(node: number) => void} onlayer */
function ranksQuantiles(run, { ranks, quantiles, unit }, phases, onlayer) {
  const names = phases.map((phase) => run.data.allPhases[phase]);
  const tables = quantiles.map((table) => ({ ...table, rows: table.rows.filter(([[, phase]]) => names.includes(String(phase))) }));
  const text = `Own work${unit} of the layers with all layers below them: quantiles over all ${ranks.length} ranks, or those that have the layer. First come the layers whose slowest rank is furthest above the mean.`;
  return element("figure", { hidden: !tables.some(({ rows }) => rows.length) }, element("figcaption", {}, text), ...reportParts(tables, onlayer));
}

// The cell of a layer for some ranks that share a column: the one with the most work.
/** @param {{ name: string, values: (number | null)[] }} layer @param {number} median @param {number[]} ranks @param {[first: number, end: number]} column @param {boolean} isWritten */
function ranksCell({ name, values }, median, ranks, [first, end], isWritten) {
  let at = -1;
  /** @type {number | null} */
  let value = null;
  for (let number = first; number < end; number++) {
    const one = values[number];
    if (one !== null && (value === null || one > value)) [at, value] = [number, one];
  }
  if (value === null) return element("td", { "data-change": "unknown", title: `${name} is not on rank ${ranks[first]}${end > first + 1 ? ` to ${ranks[end - 1]}` : ""}` });
  const ratio = median > 0 ? value / median : null;
  const strength = value === median ? 0 : ratio ? Math.min(Math.abs(Math.log2(ratio)) / DEEPEST, 1) : 1;
  const times = ratio === null ? "" : `, ${FORMATS.ratio(ratio)} the median ${formatTime(median)}`;
  const attributes = {
    "data-change": value === median ? "same" : value > median ? "more" : "less",
    class: strength > 0.55 ? "hot" : "",
    "--heat": strength,
    title: `${name}, rank ${ranks[at]}: ${formatTime(value)}${times}`,
  };
  return element("td", attributes, isWritten ? (ratio === null ? formatTime(value) : fixed(ratio, 2)) : "");
}
