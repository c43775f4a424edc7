// The sections of the page around its chart and its table of layers: the header, what changed, memory, devices, ranks.

/** @param {Page} page */
function headerSection(page) {
  const facts = data.facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  const warnings = data.comparison ? data.comparison.notes : data.warnings;
  /** @type {HTMLElement[]} */
  const parts = [
    element("div", { class: "title" }, element("h1", {}, data.title), element("button", { type: "button", class: "theme", title: "Light or dark", "aria-label": "Light or dark", onclick: () => switchTheme() }, "◐")),
    ...[...data.program, ...data.ran].map((line) => element("p", { class: "ran" }, line)),
    element("p", { class: "headline" }, ...withCode(data.headline)),
  ];
  if (data.help.length && !data.comparison) {
    const items = data.help.map(([cause, remedy, measured]) => element("li", {}, ...withCode(cause), " → ", ...withCode(remedy), ...(measured ? [barsOfTrial(measured)] : [])));
    parts.push(element("div", { class: "help" }, element("b", {}, "What would help"), element("ol", {}, ...items)));
  }
  if (data.noHelp && !data.comparison) parts.push(element("p", { class: "help" }, ...withCode(data.noHelp)));
  if (data.step) {
    parts.push(chart(data.step, (step) => {
      page.timeline?.showStep(step);
      page.controls.scrollIntoView({ block: "nearest" });
    }));
  }
  if (!data.comparison) {
    parts.push(...data.uncertain.map((sentence) => element("p", { class: "warning" }, sentence)));
    parts.push(...data.notes.map((sentence) => element("p", { class: "hint" }, sentence)));
  }
  if (data.ranks) parts.push(element("p", { class: "hint" }, data.ranks.about));
  if (warnings.length) parts.push(element("details", { class: "warnings", open: warnings.length <= 3 }, element("summary", {}, "Warnings"), element("ul", {}, ...warnings.map((sentence) => element("li", {}, sentence)))));
  parts.push(element("details", { class: "about" }, element("summary", {}, "Environment"), element("dl", { class: "facts" }, ...facts)));
  return element("header", {}, ...parts);
}

// What changed from one run to another.
function changesSection() {
  /** @type {HTMLElement[]} */
  const parts = [];
  if (data.comparison && data.comparison.whole.length) parts.push(element("p", {}, data.comparison.whole.join(" ")));
  if (data.comparison) parts.push(chart(data.comparison.picture, () => {}));
  if (data.comparison && data.comparison.layerChanges.length) {
    const items = data.comparison.layerChanges.map(([what, lines]) => element("li", {}, element("b", {}, what), ` ${lines.join(" · ")}`));
    parts.push(element("details", { open: items.length <= 4 }, element("summary", {}, "Layers that changed"), element("ul", {}, ...items)));
  }
  return parts;
}

// What ran when. Of a run without it, how to record it.
/** @param {Page} page */
function timelineSection(page) {
  if (data.comparison || data.sources.length > 1 && !page.timeline) return [];
  if (!page.run.count && !page.timeline) return []; // layers are missing, too
  const hint = "To see what ran when, record with Profile(..., with_timeline=True), or read a trace with --timeline.";
  const { timeline } = page;
  const title = `${data.title}: timeline`;
  const inside = timeline ? [timeline.box, timeline.status, timeline.live, saveButtons(title, () => pictureOfBlocks(timeline.box, title, timeline.status.textContent ?? "", page.legend)),
    element("button", { type: "button", class: "trace", onclick: () => download(`${data.title}.trace.json`, new Blob([timeline.trace])) }, "Save trace for Perfetto")] : [element("p", { class: "hint" }, hint)];
  const of = data.timeline && data.sources.length > 1 ? ` of ${data.sources[data.timeline.source].name}` : "";
  return [element("section", { id: "timeline" }, element("h3", {}, `Timeline${of}`), ...inside)];
}

// The largest places of a run.
/** @param {Page} page */
function largestSection(page) {
  const parts = data.largest.flatMap(([title, report]) => [element("h3", {}, title), ...reportParts(report, (node) => page.show(node))]);
  return data.comparison ? [] : [element("section", { class: "largest" }, ...parts)];
}

// The findings, all with their details: of a comparison, those after.
function findingsSection() {
  if (!data.findings.length) return [];
  const items = data.findings.map((finding) => element("li", {}, ...textOfFinding(finding)));
  const count = items.length === 1 ? "1 finding" : `${items.length} findings`;
  const more = data.moreFindings ? `, ${data.moreFindings} more in run.report("advice")` : "";
  const title = element("summary", {}, count, data.comparison ? " in the run after" : "", more);
  return [element("details", { class: "findings", open: Boolean(data.comparison) && items.length <= 3 }, title, element("ul", {}, ...items))];
}

// The time of a device: a bar of its parts, and a table of its streams.
/** @param {PageData.Device} device */
function deviceSection({ device, source, picture, report }) {
  return element("div", { class: "device" },
    element("h4", {}, data.sources.length > 1 ? `${device}, ${data.sources[source].name}` : device),
    picture && chart(picture, () => {}),
    ...reportParts(report, () => {}));
}

function devicesSection() {
  if (!data.devices.length) return [];
  return [element("section", { id: "devices" }, element("h3", {}, "Devices"), ...data.devices.map(deviceSection))];
}

// Live memory over time and what was live at the peak.
/** @param {Run} run @param {PageData.Memory} memory @param {(node: number) => void} onlayer */
function memorySection(run, memory, onlayer) {
  const { sources } = run.data;
  const where = sources.length > 1 ? `${memory.device}, ${sources[memory.source].name}` : memory.device;
  const hint = sources.length > 1 ? "Memory over time was not recorded, or is only on the page of this rank or run alone." : "To see memory over time, record with Profile(..., profile_memory=True, with_timeline=True).";
  return element("div", { class: "memory" },
    element("h4", {}, where),
    ...reportParts(memory.report, onlayer),
    memory.picture ? chart(memory.picture, onlayer) : element("p", { class: "hint" }, hint),
    memory.picture && memory.dropped ? element("p", { class: "warning" }, `The chart does not show the last ${memory.dropped} allocations and frees.`) : null);
}

/** @param {Page} page */
function memoriesSection(page) {
  if (!data.memory.length) return [];
  return [element("section", { id: "memory" }, element("h2", {}, data.questions.fit), element("h3", {}, "Memory"), ...[...data.memory].sort((one, other) => (data.comparison ? other.source - one.source : 0)).map((one) => memorySection(page.run, one, (node) => page.show(node))))];
}

/** @param {Page} page */
function waitsSection(page) {
  const parts = [];
  if (data.pipelines.length) parts.push(element("section", { id: "pipelines" }, element("h3", {}, "Pipelines"), ...data.pipelines.map((one) => pipelineSection(page, one))));
  if (data.ranks) parts.push(element("section", { id: "ranks" }, element("h3", {}, "Ranks"), ...reportParts(data.ranks.report, () => {}), page.ranksBox, ...quantilesOf(page, data.ranks)));
  return parts.length ? [element("h2", {}, data.questions.waits), ...parts] : [];
}

// The report of a pipeline, with a step as a picture after its sentences.
/** @param {Page} page @param {PageData.Pipeline} pipeline */
function pipelineSection(page, { name, report, step }) {
  const onlayer = (/** @type {number} */ node) => page.show(node);
  const [sentences, ...tables] = reportParts(report, onlayer);
  return element("div", { class: "pipeline" }, name ? element("h4", {}, name) : null, sentences, step ? chart(step, onlayer) : null, ...tables);
}

// The own work in each layer over all ranks of a job of which the page has some.
/** @param {Page} page @param {PageData.Ranks} ranks */
function quantilesOf(page, { quantiles, compared, unit }) {
  const text = `Own work${unit} of the layers with all layers below them: quantiles over all ${compared} ranks, or those that have the layer. First come the layers whose slowest rank is furthest above the mean.`;
  return quantiles.length ? [element("p", { class: "hint" }, text), ...reportParts(quantiles, (node) => page.show(node))] : [];
}
