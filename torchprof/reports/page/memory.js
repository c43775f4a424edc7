// Memory over time, its peak, and what was live at the peak.

/** @param {Run} run @param {PageData.Memory} memory @param {(node: number) => void} onlayer */
function memorySection(run, memory, onlayer) {
  const { kinds, sources } = run.data;
  const where = sources.length > 1 ? `${memory.device}, ${sources[memory.source].name}` : memory.device;
  const hint = sources.length > 1 ? "Memory over time was not recorded, or is only on the page of this rank or run alone." : "To see memory over time, record with Profile(..., profile_memory=True, with_timeline=True).";
  return element("div", { class: "memory" },
    element("h4", {}, where),
    ...reportParts(memory.report, onlayer),
    memory.course ? memoryChart(memory, memory.course, [...kinds, "unknown"]) : element("p", { class: "hint" }, hint),
    memory.course && memory.dropped ? element("p", { class: "warning" }, `The chart does not show the last ${memory.dropped} allocations and frees.`) : null);
}

// Live memory over time as a stacked step chart, by kind. Time is divided into equal intervals; each is drawn with its maximum
// and its last level. Memory that was allocated before the start and freed since is negative: the stack begins there, so its
// upper edge is always the sum.
/** @param {PageData.Memory} memory @param {PageData.Course} course @param {string[]} kinds */
function memoryChart({ peakBytes, peakNs }, course, kinds) {
  const [width, height, left, below] = [900, 220, 70, 20];
  const { timesNs, heights, lastNs } = course;
  const used = kinds.map((_, number) => number).filter((number) => heights.some((one) => one[number] > 0));
  /** @param {number[]} one */
  const freed = (one) => one.reduce((sum, value) => sum + Math.min(value, 0), 0);
  const stacks = heights.map((one) => used.reduce((sums, number) => [...sums, sums[sums.length - 1] + Math.max(one[number], 0)], [freed(one)]));
  const most = Math.max(peakBytes, 1);
  const least = Math.min(...stacks.map(([bottom]) => bottom));
  /** @param {number} ns */
  const x = (ns) => left + (ns / Math.max(lastNs, 1)) * (width - left - 4);
  /** @param {number} nbytes */
  const y = (nbytes) => height - below - ((nbytes - least) / (most - least)) * (height - below - 8);
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": "memory over time" });
  const marks = least < -most / 8 ? [least, 0, most] : [0, Math.round(most / 2), most];
  for (const nbytes of marks) {
    svg.append(drawing("line", { x1: left, x2: width, y1: y(nbytes), y2: y(nbytes), class: "grid" }));
    svg.append(drawing("text", { x: left - 6, y: y(nbytes) + 4, "text-anchor": "end" }, formatBytes(nbytes)));
  }
  // Both ends of each step. A step is at least one pixel wide, so that a short peak is visible.
  /** @param {number} level */
  const edge = (level) => timesNs.flatMap((ns, at) => {
    const [from, to] = [x(ns), x(at + 1 < timesNs.length ? timesNs[at + 1] : lastNs)];
    return [from, Math.max(to, from + 1)].map((end) => `${end.toFixed(1)},${y(stacks[at][level]).toFixed(1)}`);
  });
  used.forEach((kind, level) => {
    svg.append(drawing("polygon", { points: [...edge(level + 1), ...edge(level).reverse()].join(" "), class: `kind-${kind}` }));
  });
  const at = x(Math.min(peakNs, lastNs));
  svg.append(drawing("line", { x1: at, x2: at, y1: 4, y2: height - below, class: "peak" }));
  svg.append(drawing("text", { x: at > width - 120 ? at - 5 : at + 5, y: 14, "text-anchor": at > width - 120 ? "end" : "start", class: "peak" }, `peak ${formatBytes(peakBytes)}`));
  svg.append(drawing("line", { x1: left, x2: width, y1: y(0), y2: y(0), class: "start" }));
  svg.append(drawing("text", { x: left, y: height - 4 }, "start"), drawing("text", { x: width - 4, y: height - 4, "text-anchor": "end" }, formatTime(lastNs)));
  const legend = used.map((kind) => element("span", { class: `legend kind-${kind}` }, kinds[kind]));
  return element("figure", {}, svg, element("figcaption", {}, ...legend));
}
