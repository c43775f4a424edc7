// The page: its parts, and what is chosen in its controls.

/** @type {PageData} */
let data;

const HINT_OF_INTERVAL = "Icicle, layers and panel: sums over the spans of the timeline in this part of the last cycle; calls that begin in it. All else is of the whole run. Work outside all layers: all time of the first thread that is in no layer, and the labels and waits of other threads; its phases are unknown. In backward, the time of autograd's engine between two layers is self of the module that has both.";
const CHANGED = ["slower", "faster", "more", "less"]; // verdicts
const STEPS = ["measure", "phase", "source", "zoom", "select", "time", "table"];

// The name of a measure in the address: "cpu", "device", "flops".
/** @param {PageData.Measure} measure */
function nameOfMeasure({ field }) {
  return field.replace(/_ns$/, "");
}

// The name of a source in the address; its number, if a source before it has the same name.
/** @param {number} source */
function nameOfSource(source) {
  const { name } = data.sources[source];
  return data.sources.findIndex((one) => one.name === name) === source ? name : String(source);
}

class Page {
  crumbs = element("nav", { class: "crumbs", "aria-label": "Parent layers" });
  status = element("p", { class: "status" });
  rooflineBox = element("section", { id: "roofline" });
  why = element("section", { id: "why" }, element("h2", {}, data.questions.why), ...findingsSection(), this.rooflineBox);
  ranksBox = element("div");
  searchBox = element("input", { type: "search", placeholder: "Search layers ( / )", "aria-label": "Search layers", oninput: () => this.find() });
  found = element("span", { class: "found", role: "status" });
  controls = element("div", { class: "controls chosen" });
  tip = element("div", { class: "tip", hidden: true });
  caption = element("p", { class: "caption" });
  hint = element("p", { class: "hint" }, HINT_OF_INTERVAL);
  legend = element("p", { class: "classes" });
  flatBox = element("input", { type: "checkbox", class: "flat" });
  /** @type {Map<HTMLElement, string>} */
  drawnFor = new Map();
  keys = keysDialog();

  constructor() {
    this.run = new Run(data);
    const { run } = this;
    this.phase = "all";
    this.chosenSource = this.firstSource;
    this.chosenMeasure = run.mainMeasure(this.source);
    this.top = run.children[run.all].filter((node) => run.isLayer(node)).length === 1 && this.#nothingOutside() ? 0 : run.all;
    this.root = this.top;
    this.selected = this.#first;
    this.search = "";
    this.showOwn = !run.count; // without layers, the operators are what there is to see
    this.byOwnTime = false;
    this.isQuiet = false;
    followTheme();
    const tableBox = element("div");
    this.icicle = new Icicle(element("div", { class: "icicle", tabindex: "0", role: "group", "aria-label": "Icicle chart of the layers: the width is the share of the total" }), run, this);
    this.table = new TreeTable(tableBox, run, this);
    this.reports = new ReportTabs(this, data.reports);
    this.timeline = data.timeline ? new TimelineView(run, data.timeline, this) : null;
    this.panel = new LayerPanel(element("aside", { class: "panel", "aria-label": "The selected layer" }), run);
    this.#build(tableBox);
    this.atFirst = this.#chosen();
    this.address = new Address((choices) => this.#choose(choices));
    this.#choose(this.address.choices);
    if (history.state) this.address.scroll();
  }

  // What is chosen, as words for the address.
  /** @returns {Choices} */
  #chosen() {
    const { run, table, chosenMeasure: measure, chosenSource: source } = this;
    const flags = [this.showOwn === run.count > 0 && "self", this.byOwnTime && "time", !this.icicle.groups && "ungrouped", table.isFlat && "flat"];
    return {
      measure: measure ? nameOfMeasure(measure) : "",
      phase: this.phase,
      source: source < 0 ? "all" : nameOfSource(source),
      zoom: run.path(this.root),
      select: run.path(this.selected),
      sort: table.order,
      time: this.timeline?.range ?? "",
      table: this.reports.chosen,
      show: flags.filter((flag) => flag).join("."),
      search: this.search,
    };
  }

  // What the address does not name is as at first.
  /** @param {Choices} choices */
  #choose(choices) {
    const { run } = this;
    const { measure, phase, source, zoom, select, sort, time, table, show, search } = { ...this.atFirst, ...choices };
    this.chosenMeasure = data.measures.find((one) => nameOfMeasure(one) === measure) ?? this.chosenMeasure;
    this.phase = phase === "all" || data.phases.includes(phase) ? phase : "all";
    const number = data.sources.findIndex((_, at) => nameOfSource(at) === source);
    this.chosenSource = number >= 0 ? number : source === "all" && data.areRanks ? -1 : this.firstSource;
    this.root = (zoom === this.atFirst.zoom ? undefined : run.nodeOf(zoom)) ?? this.top;
    this.selected = (select === this.atFirst.select ? undefined : run.nodeOf(select)) ?? this.#first;
    const flags = show.split(".");
    this.showOwn = flags.includes("self") === run.count > 0;
    this.byOwnTime = flags.includes("time");
    this.icicle.groups = !flags.includes("ungrouped");
    this.table.isFlat = flags.includes("flat");
    this.table.order = sort;
    if (this.timeline) this.timeline.range = time;
    this.reports.choose(table);
    this.search = this.searchBox.value = search;
    this.table.reveal(this.selected);
    this.quietly(() => this.draw());
    if (select !== this.atFirst.select) this.table.scrollTo(this.selected);
  }

  // Does something that is no step of its own for Back: what is chosen then replaces the last step in the address.
  /** @param {() => void} change */
  quietly(change) {
    this.isQuiet = true;
    try {
      change();
    } finally {
      this.isQuiet = false;
    }
  }

  // Writes what is chosen into the address. Back undoes a click, but not a search, the order of the table, or a key.
  #write() {
    const chosen = this.#chosen();
    const others = Object.entries(chosen).filter(([name, value]) => value !== this.atFirst[name]);
    const { choices } = this.address;
    const isStep = !this.isQuiet && STEPS.some((name) => (choices[name] ?? this.atFirst[name]) !== chosen[name]);
    this.address.write(Object.fromEntries(others), isStep);
  }

  // The source that is shown at first: the straggler, else all ranks.
  get firstSource() {
    return data.opensOn ?? (data.areRanks && data.sources.length > 1 ? -1 : 0);
  }

  // The node that is selected at first: the model; without layers, the work outside of them.
  get #first() {
    const { run } = this;
    return run.count ? 0 : run.exists(run.outside, this.source) ? run.outside : run.all;
  }

  #nothingOutside() {
    const { run } = this;
    return data.sources.every((_, source) => !run.exists(run.outside, source) && !run.exists(run.notSelected, source));
  }

  // The chosen rank or run; in an interval, that of the timeline.
  get source() {
    return this.run.interval && data.timeline ? data.timeline.source : this.chosenSource;
  }

  // The chosen measure; in an interval of the timeline, a time.
  /** @returns {PageData.Measure | null} */
  get measure() {
    const { chosenMeasure, run } = this;
    return chosenMeasure && run.isShown(chosenMeasure) ? chosenMeasure : run.mainMeasure(this.source);
  }

  get phases() {
    return (this.phase === "all" ? data.phases : [this.phase]).map((name) => data.allPhases.indexOf(name));
  }

  get phaseWords() {
    return data.phases.length === 2 ? "both" : "all phases";
  }

  // The number of the chosen phase, or ALL_PHASES.
  get phaseNumber() {
    return this.phase === "all" ? ALL_PHASES : data.allPhases.indexOf(this.phase);
  }

  /** @param {HTMLElement} tableBox */
  #build(tableBox) {
    document.body.append(
      headerSection(this),
      element("main", {},
        element("h2", {}, data.comparison ? data.questions.changed : data.questions.time),
        ...changesSection(),
        this.controls,
        element("div", { class: "split" },
          element("div", { class: "chart-of-layers" }, this.crumbs, this.icicle.box, this.caption, this.hint, this.status, this.legend,
            saveButtons(`${data.title}: layers`, () => pictureOfBlocks(this.icicle.box, `${data.title}: layers`, this.caption.textContent ?? "", this.legend))),
          this.panel.box,
          element("section", { id: "layers" }, element("h3", {}, "Layers"), this.#tableTools(), tableBox, signs(data.legend))),
        ...timelineSection(this),
        ...largestSection(this),
        this.reports.box,
        ...devicesSection(),
        this.why,
        ...memoriesSection(this),
        ...waitsSection(this)),
      this.tip,
      element("footer", {}, `Made by torchprof ${data.version}. Everything on this page is in this file.`));
    document.body.append(this.keys);
    document.addEventListener("keydown", (event) => onKey(this, event));
    for (const [when, isPrinted] of /** @type {[string, boolean][]} */ ([["beforeprint", true], ["afterprint", false]])) {
      window.addEventListener(when, () => {
        document.documentElement.dataset.theme = isPrinted ? "light" : currentTheme();
        this.table.print(isPrinted);
        printRows(isPrinted);
      });
    }
    let waiting = 0;
    window.addEventListener("resize", () => {
      cancelAnimationFrame(waiting);
      waiting = requestAnimationFrame(() => this.draw());
    });
  }

  /**
   * @template Chosen
   * @param {string} label
   * @param {[value: Chosen, text: string][]} choices
   * @param {Chosen} chosen
   * @param {(value: Chosen) => void} choose
   */
  #choice(label, choices, chosen, choose) {
    const buttons = choices.map(([value, text]) => element("button", { type: "button", "aria-pressed": value === chosen ? "true" : "false", onclick: () => { choose(value); this.draw(); } }, text));
    return element("div", { class: "choice", role: "group", "aria-label": label }, ...buttons);
  }

  // What the colors mean.
  #drawLegend() {
    const changes = [["less", "less than before"], ["same", "the same, or within noise"], ["more", "more than before"], ["unknown", "unknown"]];
    if (!data.comparison && this.byOwnTime) {
      this.legend.replaceChildren("The darker, the larger the self of the layer.");
      return;
    }
    const classes = data.classes.map((name, at) => [`class-${at}`, name]);
    const names = data.comparison ? changes : [...classes, ...(this.run.hasOtherClasses ? [[OTHER_CLASSES, "other"]] : [])];
    this.legend.replaceChildren(...names.map(([kind, name]) => element("span", { class: `legend ${kind}` }, name)));
  }

  #drawControls() {
    /** @type {HTMLElement[]} */
    const parts = [];
    const measures = data.measures.filter((one) => this.run.isShown(one));
    if (measures.length > 1) parts.push(this.#choice("Width", measures.map((one) => [one, one.heading]), this.measure, (one) => { this.chosenMeasure = one; }));
    if (data.phases.length > 1) {
      /** @type {[string, string][]} */
      const choices = data.phases.map((name) => [name, name]);
      choices.push(["all", this.phaseWords]);
      parts.push(this.#choice("Phase", choices, this.phase, (name) => { this.phase = name; }));
    }
    if (data.sources.length > 1) {
      const sources = data.sources.map(({ name }, at) => ({ name, at }));
      const isAll = !data.ranks || data.ranks.compared === sources.length;
      if (data.areRanks) sources.unshift({ name: isAll ? "all ranks" : `these ${sources.length} ranks`, at: -1 });
      const options = sources.map(({ name, at }) => element("option", { value: at, selected: at === this.source }, name));
      const select = element("select", { class: "source" }, ...options);
      select.addEventListener("change", () => {
        this.chosenSource = Number(select.value);
        if (this.timeline) this.timeline.range = "";
        this.draw();
      });
      parts.push(element("label", {}, data.areRanks ? "Rank " : "Run ", select));
    }
    if (this.run.interval) parts.push(element("button", { type: "button", class: "interval", "aria-label": `Only ${this.timeline?.words}. Show all of the time`, onclick: () => this.timeline?.showAll() }, `${this.timeline?.words} ×`));
    parts.push(this.#box("own", "self and operators as blocks", this.showOwn, (isOn) => { this.showOwn = isOn; }));
    if (!data.comparison) parts.push(this.#box("time", "color by self", this.byOwnTime, (isOn) => { this.byOwnTime = isOn; }));
    if (this.icicle.hasGroups) parts.push(this.#box("grouped", "group equal layers", this.icicle.groups, (isOn) => { this.icicle.groups = isOn; }));
    parts.push(this.searchBox, this.found);
    keepingFocus(this.controls, () => this.controls.replaceChildren(...parts));
  }

  /** @param {string} name @param {string} label @param {boolean} isOn @param {(isOn: boolean) => void} choose */
  #box(name, label, isOn, choose) {
    const box = element("input", { type: "checkbox", class: name, checked: isOn });
    box.addEventListener("change", () => { choose(box.checked); this.draw(); });
    return element("label", {}, box, ` ${label}`);
  }

  #tableTools() {
    const copied = element("span", { class: "found", role: "status" });
    const flat = this.flatBox;
    flat.addEventListener("change", () => this.table.showFlat(flat.checked));
    return element("div", { class: "controls" },
      element("button", { type: "button", onclick: () => this.table.openAll(true) }, "Open all"),
      element("button", { type: "button", onclick: () => this.table.openAll(false) }, "Close all"),
      element("label", {}, flat, " as a flat list"),
      element("button", { type: "button", class: "copy", onclick: () => this.#copy(this.table.csv(), copied) }, "Copy as CSV"),
      element("button", { type: "button", onclick: () => this.#copy(this.table.markdown(), copied) }, "Copy as Markdown"),
      element("button", { type: "button", onclick: () => this.#copy(location.href, copied, "the address of this view") }, "Copy link"),
      copied);
  }

  /** @param {string} text @param {HTMLElement} copied */
  #copy(text, copied, what = `${this.table.lines.length} rows`) {
    // In a frame the clipboard API may be forbidden; execCommand copies the selected text there, too.
    const area = element("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    copied.textContent = done ? `Copied: ${what}.` : "This browser does not let the page copy. Use run.export(\"table.csv\").";
  }

  /** @returns {((node: number) => boolean) | null} */
  get isMatch() {
    const text = this.search.toLowerCase();
    if (!text) return null;
    const { run } = this;
    /** @param {string} name */
    const isIn = (name) => name.toLowerCase().includes(text);
    /** @param {number} node */
    const isMatch = (node) => (run.isRange(node) ? isIn(run.name(node)) : run.isLayer(node) && (isIn(run.path(node)) || isIn(run.kind(node, this.source))));
    const matches = Uint8Array.from({ length: run.nodes }, (_, node) => Number(isMatch(node)));
    return (node) => matches[node] === 1;
  }

  find() {
    this.search = this.searchBox.value.trim();
    this.draw();
  }

  // How many layers match, and their share of the whole. The share of a match inside another match counts once.
  /** @param {((node: number) => boolean) | null} isMatch */
  #drawFound(isMatch) {
    const { run, measure } = this;
    if (!isMatch) {
      this.found.textContent = "";
      return;
    }
    let [count, at, sum] = [0, 0, 0];
    const totals = measure ? run.widths(measure.field, this.phaseNumber, this.source) : null;
    let until = -1;
    for (let node = 0; node < run.count; node++) {
      if (!isMatch(node)) continue;
      count += 1;
      if (node === this.selected) at = count;
      if (node >= until) {
        until = run.end[node];
        if (totals) sum += totals[node];
      }
    }
    const whole = measure ? run.whole(measure.field, this.phaseNumber, this.source) : 0;
    const isKnown = measure !== null && !this.run.interval;
    const share = isKnown && whole > 0 ? `, ${formatShare(sum / whole)} of ${measure.field === "cpu_ns" ? "the time" : measure.heading}` : "";
    this.found.textContent = `${at ? `${at} of ` : ""}${count} ${count === 1 ? "layer" : "layers"}${count ? share : ""}`;
  }

  draw() {
    const { run, timeline } = this;
    run.interval = timeline?.interval ?? null;
    const { phaseNumber: phase, source, measure, isMatch } = this;
    this.#drawControls();
    this.#drawFound(isMatch);
    const field = measure ? measure.field : "";
    const [own, widths] = [true, false].map((isSelf) => run.widths(field, phase, source, isSelf));
    this.icicle.draw({ root: this.root, selected: this.selected, widths, own, hasShares: run.whole(field, phase, source) > 0, showOwn: this.showOwn, operators: (node) => run.ownOperators(node, phase, source), field, byOwnTime: this.byOwnTime, isMatch, change: this.change });
    this.#drawCaption(widths);
    this.#drawLegend();
    timeline?.draw(this.selected, isMatch);
    for (const bar of document.querySelectorAll("header [data-link]")) bar.classList.toggle("chosen", bar.getAttribute("data-link") === String(timeline?.step));
    this.panel.draw({ node: this.selected, phase, source, measure });
    this.reports.draw(source, data.phases.indexOf(this.phase), measure);
    this.#drawRoofline();
    this.#drawRanks();
    this.#drawCrumbs();
    this.hover([]);
    this.tip.hidden = true; // its figures were of the choice before
    this.drawTable(isMatch);
  }

  // Draws the reports alone, for another tab.
  drawReports() {
    this.reports.draw(this.source, data.phases.indexOf(this.phase), this.measure);
    this.#write();
  }

  // Draws the table alone: for its order, and for lines that open and close.
  drawTable(isMatch = this.isMatch) {
    this.flatBox.checked = this.table.isFlat;
    this.table.draw({ columns: this.columns, source: this.source, selected: this.selected, isMatch });
    this.#write();
  }

  // What the widths in the icicle are.
  /** @param {PageData.Integers} widths */
  #drawCaption(widths) {
    const { run, measure, phases } = this;
    const names = phases.map((phase) => data.allPhases[phase]);
    const whole = measure && widths[this.root] > 0 ? `; the whole is ${formatFigure(run.figure(measure.field, this.phaseNumber, this.source, this.root), measure.unit)}` : "";
    const where = data.sources.length > 1 && this.source >= 0 ? `, ${data.sources[this.source].name}` : "";
    const when = run.interval ? `, in ${this.timeline?.words} of the timeline` : "";
    this.caption.textContent = measure ? `Width: ${measure.heading}${data.phases.length > 1 ? `, ${names.join(", ")}` : ""}${where}${when}${whole}.` : "";
    this.hint.hidden = !run.interval;
  }

  // The columns of the table of layers: those of the terminal's table, first those of the chosen measure and phases; in a
  // comparison, the changes of these.
  /** @returns {Column[]} */
  get columns() {
    const { measure, phases } = this;
    if (!data.comparison) {
      const all = this.run.figures.filter((column) => column.where === "tree");
      /** @param {FigureColumn} column */
      const isChosen = (column) => column.kind === "cost" && measure !== null && phases.includes(column.phase) && column.field === measure.field;
      if (this.run.interval) all.splice(0, all.length, ...all.filter((column) => column.kind === "params" || this.run.interval?.has(column)));
      const chosen = all.filter(isChosen);
      const words = phases.length > 1 ? this.phaseWords : data.allPhases[phases[0]];
      const lead = phases.length > 1 ? [] : [...chosen].sort((one, other) => Number(isOfSelf(one)) - Number(isOfSelf(other)));
      const made = measure ? this.run.columnsOf(measure, this.phaseNumber, this.source, words, lead) : [];
      const rest = [...chosen, ...all.filter((column) => !isChosen(column))];
      return [...lead, ...made, ...rest.filter((column) => !lead.includes(column))];
    }
    return this.#quantities(data.comparison).flatMap((quantity) => CHANGES.map((part) => changeColumn(quantity, part)));
  }

  // The compared quantities of the chosen measure and the chosen phases, totals first; in the flat list, which is sorted by
  // differences of self, these are first.
  /** @param {PageData.Comparison} comparison */
  #quantities({ quantities }) {
    const chosen = quantities.filter(({ field, phase }) => this.measure && field === this.measure.field && this.phases.includes(phase));
    return chosen.sort((one, other) => (this.table.isFlat ? -1 : 1) * (Number(one.self) - Number(other.self)));
  }

  // In a comparison: how a layer changed, for the colors. Computed from the figures of the table.
  /** @returns {((node: number) => NodeChange) | null} */
  get change() {
    const { pairs } = this.run;
    if (!data.comparison || !this.measure) return null;
    const totals = this.#quantities(data.comparison).filter((quantity) => !quantity.self);
    /** @type {Record<string, string>} */
    const kinds = { added: "added", removed: "less", "moved away": "less" };
    return (node) => {
      const pair = pairs.at(node);
      const changes = totals.map(({ key }) => pair?.changes[key]).filter((change) => change !== undefined);
      if (!pair || !changes.length) return { kind: "same", strength: 0 };
      if (kinds[pair.how]) return { kind: kinds[pair.how], strength: 1 };
      const beyond = changes.filter(([, , , verdict]) => CHANGED.includes(verdict));
      if (!beyond.length) {
        const isSame = changes.every(([, , difference, verdict]) => difference === 0 || verdict === "within noise");
        return { kind: isSame ? "same" : "unknown", strength: 0 };
      }
      const before = beyond.reduce((sum, [was]) => sum + (was ?? 0), 0);
      const after = beyond.reduce((sum, [, is]) => sum + (is ?? 0), 0);
      if (before === after) return { kind: "same", strength: 0 };
      const strength = before > 0 && after > 0 ? Math.min(Math.abs(Math.log2(after / before)), 1) : 1;
      return { kind: after > before ? "more" : "less", strength };
    };
  }

  // Fills a box, only if the choices that it depends on have changed.
  /** @param {HTMLElement} box @param {string} choices @param {() => HTMLElement[]} make */
  #fill(box, choices, make) {
    if (this.drawnFor.get(box) !== choices) box.replaceChildren(...make());
    this.drawnFor.set(box, choices);
  }

  #drawRoofline() {
    const drawn = data.sources.map(({ name }, at) => ({ name, svg: data.rooflines[at] })).reverse(); // before, then after
    const shown = (data.comparison ? drawn : [{ name: "", svg: data.rooflines.at(this.source) ?? null }]).filter(({ svg }) => svg);
    this.#fill(this.rooflineBox, String(this.source), () => shown.flatMap(({ name, svg }) => [element("h3", {}, `Roofline${name && `, ${name}`}`), chart(svg ?? "", (node) => this.show(node))]));
    this.why.hidden = !shown.length && !data.findings.length;
  }

  // Compares all ranks, whichever rank is chosen.
  #drawRanks() {
    const { ranks } = data;
    const map = ranks?.maps.at(ranks.maps.length > 1 ? data.phases.indexOf(this.phase) : 0);
    if (ranks) this.#fill(this.ranksBox, this.phase, () => [map ? chart(map, (node) => this.show(node)) : element("p", { class: "hint" }, "Times of single layers were not recorded by rank.")]);
  }

  #drawCrumbs() {
    const { run } = this;
    const way = run.above(this.root).filter((node) => node !== run.all || this.top === run.all);
    const links = way.map((node) => element("button", { type: "button", "data-node": node, onclick: () => this.zoom(node) }, run.name(node)));
    this.crumbs.replaceChildren(...links);
  }

  // The line under the icicle: the figures of the layers under the mouse, else of the selected one.
  /** @param {number[]} nodes */
  hover(nodes) {
    const { run, measure } = this;
    const shown = nodes.length ? nodes : [this.selected];
    if (!measure) return;
    const total = this.#figureOf(shown);
    const self = total.bound < BOUND.UNKNOWN ? `, self ${formatFigure(this.#figureOf(shown, true), measure.unit)}` : "";
    const text = total.bound >= BOUND.BLANK ? "not selected" : `${measure.heading} ${this.#withShare(total)}${self}`;
    this.status.textContent = `${pathOf(run, shown)}: ${text}`;
  }

  // The chosen figure of a layer, or its sum over several: those that were not selected, or are not there, add nothing.
  /** @param {number[]} nodes @returns {Figure} */
  #figureOf(nodes, isSelf = false) {
    const { run, measure, phaseNumber, source } = this;
    if (!measure) return { value: 0, bound: BOUND.BLANK };
    return sumOf(nodes.map((node) => run.figure(measure.field, phaseNumber, source, node, isSelf)));
  }

  /** @param {Figure} figure */
  #withShare(figure) {
    const { run, measure, phaseNumber, source } = this;
    if (!measure) return "";
    const whole = run.whole(measure.field, phaseNumber, source);
    const share = whole > 0 && figure.bound < BOUND.UNKNOWN ? `, ${formatShare(figure.value / whole)} of the total` : "";
    return `${formatFigure(figure, measure.unit)}${share}`;
  }

  // What a block of the icicle is, in lines: of one layer, or of equal ones.
  /** @param {number[]} nodes */
  about(nodes, isSelf = false) {
    const { run, measure, source } = this;
    const [node] = nodes;
    const lines = [pathOf(run, nodes), run.isLayer(node) ? run.kind(node, source) : ""].filter((line) => line);
    if (!measure) return lines;
    const figure = this.#figureOf(nodes, isSelf);
    if (figure.bound >= BOUND.BLANK) return [...lines, "not selected"];
    lines.push(`${isSelf ? "self " : ""}${measure.heading} ${this.#withShare(figure)}`);
    if (data.comparison) return [...lines, ...this.#changesOf(node, isSelf)];
    if (nodes.length > 1) {
      const known = nodes.map((one) => this.#figureOf([one], isSelf)).filter(({ bound }) => bound < BOUND.UNKNOWN);
      known.sort((one, other) => one.value - other.value);
      if (known.length) lines.push(`each ${formatFigure(known[0], measure.unit)} to ${formatFigure(known[known.length - 1], measure.unit)}`);
    } else if (!isSelf && run.children[node].length) lines.push(`self ${formatFigure(this.#figureOf(nodes, true), measure.unit)}`);
    const column = run.figures.find(({ kind }) => kind === "calls");
    if (!column || !run.isLayer(node)) return lines;
    const calls = sumOf(nodes.map((one) => ({ value: Number(run.value(column, one, source) ?? 0), bound: run.bounds(column, source)[one] })));
    if (calls.bound >= BOUND.UNKNOWN || !calls.value) return lines;
    const isKnown = calls.bound === BOUND.EXACT && figure.bound === BOUND.EXACT && calls.value > 1 && !run.interval; // it may have parts of calls
    const each = isKnown ? `, ${formatFigure({ value: figure.value / calls.value, bound: BOUND.EXACT }, measure.unit)} a call` : "";
    return [...lines, `${formatFigure(calls, "calls")} ${calls.value === 1 ? "call" : "calls"}${each}`];
  }

  // How a layer changed in the chosen measure and phases, in lines: "CPU total: 1ms → 2ms, 2.00×, slower".
  /** @param {number} node @param {boolean} isSelf */
  #changesOf(node, isSelf) {
    const quantities = data.comparison ? this.#quantities(data.comparison).filter((one) => one.self === isSelf) : [];
    return quantities.flatMap((one) => {
      const [before, after, , ratio, verdict] = CHANGES.map((part) => this.run.text(changeColumn(one, part), node, this.source));
      const figures = before && after ? `${before} → ${after}` : before || after; // an added layer has none before
      return figures ? [`${one.heading}: ${[figures, ratio, verdict || this.run.pairs[node].how].filter((text) => text).join(", ")}`] : [];
    });
  }

  // What an operator in the icicle is, in lines.
  /** @param {number[]} nodes @param {Operator} operator */
  aboutOperator(nodes, operator) {
    const { run, measure } = this;
    if (!measure) return [];
    const figure = { value: operator.own[measure.field], bound: measure.lowerBoundIf && operator.own[measure.lowerBoundIf] ? BOUND.AT_LEAST : BOUND.EXACT };
    return [rangeInWords(operator), `in ${pathOf(run, nodes)}`, `self ${measure.heading} ${this.#withShare(figure)}`];
  }

  /** @param {number} node */
  zoom(node) {
    this.root = node;
    this.selected = node;
    this.table.reveal(node);
    this.draw();
    this.table.scrollTo(node);
  }

  // Selects a layer, and zooms out if the layer is not in the icicle.
  /** @param {number} node */
  select(node) {
    const { run } = this;
    if (!run.above(node).includes(this.root)) this.root = this.top;
    this.selected = node;
    this.table.reveal(node);
    this.draw();
    this.table.scrollTo(node);
  }

  // Selects a layer, and scrolls to its panel: for links further down the page.
  /** @param {number} node */
  show(node) {
    this.select(node);
    this.panel.box.scrollIntoView({ block: "nearest" });
  }

}

readData().then(
  (read) => {
    data = read;
    new Page();
  },
  (error) => document.body.append(`This page needs a browser of May 2023 or later, which can decompress its data. ${error}`),
);
