// The roofline: achieved FLOP/s of each innermost layer over its arithmetic intensity (FLOP/byte), and the measured peaks.

/** @typedef {{ node: number, perByte: number, perSecond: number, ns: number }} Point */

/** @param {Run} run @param {number} source @param {(node: number) => void} onlayer */
function rooflineSection(run, source, onlayer) {
  const time = run.isMeasured(["device_ns"], source) ? "device_ns" : "cpu_ns";
  if (!run.isMeasured(["flops", time], source)) return null;
  const [flops, ns] = ["flops", time].map((field) => run.widths(field, 0, source));
  /** @param {number} node */
  const isExact = (node) => ["flops", time].every((field) => run.figure(field, 0, source, node).bound === BOUND.EXACT);
  const column = run.figures.find(({ kind }) => kind === "calls");
  const calls = column ? run.values(column, source) : [];
  /** @type {Point[]} */
  const points = [];
  for (let node = 0; node < run.count; node++) {
    const bytes = run.description(node, source)?.traffic;
    if (run.children[node].length || !bytes || !(Number(calls[node]) > 0) || !(flops[node] > 0) || !(ns[node] > 0) || !isExact(node)) continue;
    points.push({ node, perByte: flops[node] / Number(calls[node]) / bytes, perSecond: (flops[node] / ns[node]) * 1e9, ns: ns[node] });
  }
  if (!points.length) return null;
  const device = time === "cpu_ns" ? "cpu" : null;
  const roofs = run.data.roofs.filter(([name]) => (device === null) !== (name === "cpu"));
  /** @type {HTMLElement[]} */
  const parts = [element("figure", {}, rooflineChart(run, points, roofs, onlayer))];
  const text = "Forward only. Left of the ridge: memory-bound. Right of it: compute-bound. Bytes are the minimum of a call: parameters, inputs and outputs, each once. Larger points took more time.";
  parts.push(element("p", { class: "hint" }, roofs.length ? text : `${text} The roof (the peak of this machine) was not measured: call torchprof.peak() before the profile.`));
  return element("div", {}, ...parts);
}

/** @param {Run} run @param {Point[]} points @param {PageData.Roof[]} roofs @param {(node: number) => void} onlayer */
function rooflineChart(run, points, roofs, onlayer) {
  const [width, height, left, below] = [900, 300, 80, 34];
  const xs = points.map((one) => one.perByte);
  const ys = points.map((one) => one.perSecond).concat(roofs.map((roof) => roof[3]));
  /** @param {number[]} values @param {(value: number) => number} round @param {(...values: number[]) => number} by */
  const decade = (values, round, by) => round(Math.log10(by(...values)));
  const [x0, x1] = [decade(xs, Math.floor, Math.min), Math.max(decade(xs, Math.ceil, Math.max), decade(xs, Math.floor, Math.min) + 1)];
  const [y0, y1] = [decade(ys, Math.floor, Math.min), Math.max(decade(ys, Math.ceil, Math.max), decade(ys, Math.floor, Math.min) + 1)];
  /** @param {number} value */
  const x = (value) => left + ((Math.log10(value) - x0) / (x1 - x0)) * (width - left - 10);
  /** @param {number} value */
  const y = (value) => height - below - ((Math.log10(value) - y0) / (y1 - y0)) * (height - below - 10);
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart roofline", role: "img", "aria-label": "Roofline" });
  for (let power = y0; power <= y1; power++) {
    svg.append(drawing("line", { x1: left, x2: width - 10, y1: y(10 ** power), y2: y(10 ** power), class: "grid" }));
    svg.append(drawing("text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, formatCount(10 ** power)));
  }
  for (let power = x0; power <= x1; power++) {
    svg.append(drawing("line", { x1: x(10 ** power), x2: x(10 ** power), y1: 10, y2: height - below, class: "grid" }));
    svg.append(drawing("text", { x: x(10 ** power), y: height - below + 14, "text-anchor": "middle" }, String(Number((10 ** power).toPrecision(1)))));
  }
  svg.append(drawing("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, "Arithmetic intensity (FLOP/byte)"));
  svg.append(drawing("text", { x: 12, y: height / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${height / 2})` }, "FLOP/s"));
  for (const [device, dtype, , flops, bytes] of roofs) {
    const knee = flops / bytes;
    /** @param {number} value */
    const at = (value) => `${x(value).toFixed(1)},${y(Math.min(flops, value * bytes)).toFixed(1)}`;
    const from = Math.max(10 ** x0, 10 ** y0 / bytes);
    const places = [from, Math.min(Math.max(knee, from), 10 ** x1), 10 ** x1].map(at).join(" ");
    svg.append(drawing("polyline", { points: places, class: "roof" }));
    svg.append(drawing("text", { x: width - 12, y: y(flops) - 5, "text-anchor": "end", class: "roof" }, `${formatCount(flops)} FLOP/s, ${dtype} on ${device}`));
  }
  const most = Math.max(...points.map((one) => one.ns));
  const labels = [...svg.querySelectorAll("text.roof")];
  for (const { node, perByte, perSecond, ns } of [...points].sort((one, other) => other.ns - one.ns)) {
    const size = 3 + 9 * Math.sqrt(ns / most);
    const title = `${run.path(node)}: ${formatCount(perSecond)} FLOP/s, ${fixed(perByte, 2)} FLOP/byte, ${formatTime(ns)}`;
    const point = drawing("circle", { cx: x(perByte).toFixed(1), cy: y(perSecond).toFixed(1), r: size.toFixed(1), "data-node": node, tabindex: "0" }, drawing("title", {}, title));
    point.addEventListener("click", () => onlayer(node));
    point.addEventListener("keydown", (event) => { if (event.key === "Enter") onlayer(node); });
    svg.append(point);
  }
  svg.append(...labels); // over the points
  return svg;
}
