// The tree table: the columns of the terminal's. Only the rows in sight are in the document, whatever their number.

const LINE_HEIGHT = 26;
const SPARE_LINES = 12;
const OPEN_AT_FIRST = 80;

class TreeTable {
  // page.select(node) is called back.
  constructor(box, run, page) {
    this.run = run;
    this.page = page;
    this.open = new Uint8Array(run.nodes);
    this.#openAtFirst();
    this.by = null;
    this.descending = true;
    this.isFlat = false;
    this.lines = [];
    this.head = element("div", { class: "line head", role: "row", "aria-rowindex": 1 });
    this.body = element("div", { class: "lines", role: "rowgroup" });
    this.box = element("div", { class: "treetable", role: "treegrid", "aria-label": "Layers", tabindex: "0" }, this.head, this.body);
    box.replaceChildren(this.box);
    this.box.addEventListener("scroll", () => this.#drawLines());
    this.body.addEventListener("click", (event) => this.#click(event));
  }

  // As many levels as make a table that can be read at once.
  #openAtFirst() {
    const { run } = this;
    const counts = [];
    for (let node = 0; node < run.count; node++) counts[run.depth[node]] = (counts[run.depth[node]] || 0) + 1;
    let rows = 0;
    let deepest = 0;
    counts.forEach((count, depth) => {
      rows += count;
      if (rows <= OPEN_AT_FIRST) deepest = depth;
    });
    this.open.fill(1);
    for (let node = 0; node < run.count; node++) if (run.children[node].length && run.depth[node] >= deepest) this.open[node] = 0;
  }

  draw({ columns, source, selected, isMatch }) {
    if (this.by !== null && !columns.includes(this.columns[this.by])) this.by = columns.findIndex(({ key }) => key === this.columns[this.by].key);
    if (this.by < 0) this.by = null;
    this.columns = columns;
    const widths = columns.map((column) => Math.max(column.heading.length + 3, 13));
    this.box.style.setProperty("--columns", widths.map((width) => `${width}ch`).join(" "));
    this.box.style.setProperty("--figures", `${widths.reduce((sum, width) => sum + width, 0)}ch`);
    this.source = source;
    this.selected = selected;
    this.isMatch = isMatch;
    this.#list();
    this.#drawHead();
    this.wholes = this.columns.map((column) => this.#whole(column));
    this.#drawLines();
  }

  // What a full bar stands for: the largest figure of any layer.
  #whole(column) {
    const values = this.run.values(column, this.source);
    let most = 0;
    for (let node = 0; node < this.run.count + 2; node++) if (values[node] > most) most = values[node];
    return most;
  }

  #sorted(nodes) {
    if (this.by === null) return nodes;
    const column = this.columns[this.by];
    const values = this.run.values(column, this.source);
    const sign = this.descending ? -1 : 1;
    const size = column.part === "difference" ? Math.abs : (value) => value; // the largest change, whichever way
    const order = (node) => size(values[node] ?? -Infinity);
    return [...nodes].sort((one, other) => (order(one) < order(other) ? -sign : order(one) > order(other) ? sign : 0));
  }

  #list() {
    const { run, isMatch, source } = this;
    const tops = [...run.children[run.all], run.before].filter((node) => run.exists(node, source));
    if (this.isFlat) {
      const all = [];
      for (let node = 0; node < run.nodes; node++) if (node !== run.all && run.exists(node, source) && (!isMatch || isMatch(node))) all.push(node);
      this.lines = this.#sorted(all);
      return;
    }
    const leads = isMatch ? this.#leadsToMatch() : null;
    const lines = [];
    const waiting = this.#sorted(tops).reverse();
    while (waiting.length) {
      const node = waiting.pop();
      if (leads && !leads[node]) continue;
      lines.push(node);
      if (this.open[node] || (leads && leads[node] === 2)) {
        const below = run.below(node, source);
        const ranges = below.filter((one) => run.isRange(one));
        const inOrder = [...this.#sorted(ranges), ...this.#sorted(below.slice(ranges.length))];
        for (let at = inOrder.length - 1; at >= 0; at--) waiting.push(inOrder[at]);
      }
    }
    this.lines = lines;
  }

  // 1: matches, 2: something below does.
  #leadsToMatch() {
    const { run } = this;
    const leads = new Uint8Array(run.nodes);
    for (let node = run.nodes - 1; node >= 0; node--) {
      if (node === run.all) continue;
      if (!leads[node] && this.isMatch(node)) leads[node] = 1;
      if (leads[node]) leads[run.parentOf(node)] = 2;
    }
    return leads;
  }

  #drawHead() {
    const headings = this.columns.map((column, number) => {
      const order = this.by !== number ? "none" : this.descending ? "descending" : "ascending";
      return element("button", { type: "button", class: "cell", role: "columnheader", "aria-sort": order, onclick: () => this.#sortBy(number) }, column.heading);
    });
    keepingFocus(this.head, () => this.head.replaceChildren(element("span", { class: "cell name", role: "columnheader" }, "Module"), ...headings));
  }

  // Largest first, then smallest first, then in the model's order.
  #sortBy(number) {
    if (this.by !== number) [this.by, this.descending] = [number, true];
    else if (this.descending) this.descending = false;
    else this.by = null;
    this.page.draw();
  }

  #drawLines() {
    const first = Math.max(Math.floor(this.box.scrollTop / LINE_HEIGHT) - SPARE_LINES, 0);
    const count = Math.ceil((this.box.clientHeight || 600) / LINE_HEIGHT) + 2 * SPARE_LINES;
    this.body.style.height = `${this.lines.length * LINE_HEIGHT}px`;
    this.body.replaceChildren(...this.lines.slice(first, first + count).map((node, number) => this.#line(node, first + number)));
    this.box.setAttribute("aria-rowcount", this.lines.length + 1);
  }

  #line(node, at) {
    const { run } = this;
    const below = run.below(node, this.source).length;
    const depth = this.isFlat ? 0 : run.depthOf(node);
    const toggle = below && !this.isFlat ? element("span", { class: "toggle", "aria-hidden": "true" }, this.open[node] ? "▾" : "▸") : element("span", { class: "toggle" });
    const kind = run.isLayer(node) ? element("span", { class: "kind" }, run.kind(node, this.source)) : null;
    const name = element("span", { class: "cell name", role: "rowheader", "--depth": depth, title: run.path(node) },
      toggle, element("span", {}, this.isFlat ? run.path(node) : run.name(node)), kind, this.#how(node));
    const cells = this.columns.map((column, number) => {
      const value = run.value(column, node, this.source);
      const share = column.kind !== "change" && node !== this.run.before && value > 0 && this.wholes[number] > 0 ? Math.min(value / this.wholes[number], 1) : 0;
      return element("span", { class: "cell number", role: "gridcell", "--share": share }, ...figure(run.text(column, node, this.source), column));
    });
    const attributes = { class: node === this.selected ? "line selected" : run.isRange(node) ? "line range" : "line", role: "row", "data-node": node, "aria-rowindex": at + 2, "aria-level": depth + 1 };
    if (below && !this.isFlat) attributes["aria-expanded"] = this.open[node] ? "true" : "false";
    const made = element("div", attributes, name, ...cells);
    made.style.top = `${at * LINE_HEIGHT}px`;
    return made;
  }

  // Where two runs are compared: that it is not the layer that it was.
  #how(node) {
    const pair = this.run.told.comparison?.pairs[node];
    return pair && pair.how !== "same" ? element("span", { class: "how" }, pair.how) : null;
  }

  #click(event) {
    const line = event.target.closest(".line");
    if (!line) return;
    const node = Number(line.dataset.node);
    if (event.target.closest(".toggle") && this.run.below(node, this.source).length) this.toggle(node);
    else this.page.select(this.run.layerOf(node));
  }

  toggle(node) {
    this.open[node] = 1 - this.open[node];
    this.page.draw();
  }

  // All levels, or the model alone.
  openAll(isOpen) {
    this.open.fill(isOpen ? 1 : 0);
    this.page.draw();
  }

  showFlat(isFlat) {
    this.isFlat = isFlat;
    this.page.draw();
  }

  // Scrolls a layer into sight, and opens what is above it.
  reveal(node) {
    for (const above of this.run.above(node).slice(1, -1)) this.open[above] = 1;
  }

  scrollTo(node) {
    const at = this.lines.indexOf(node);
    if (at < 0) return;
    const top = at * LINE_HEIGHT;
    if (top < this.box.scrollTop || top + 2 * LINE_HEIGHT > this.box.scrollTop + this.box.clientHeight) {
      this.box.scrollTop = Math.max(top - this.box.clientHeight / 3, 0);
      this.#drawLines();
    }
  }

  // The lines listed now, with plain figures: ns, bytes and pieces; what is unknown is left empty, and the last column
  // names those of the line that are lower bounds.
  csv() {
    const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const headings = this.columns.map(({ heading, kind, unit }) => heading + (["ns", "bytes"].includes(unit) ? ` (${unit})` : ""));
    const lines = this.lines.map((node) => [
      this.run.path(node),
      ...this.columns.map((column) => {
        const value = this.run.value(column, node, this.source);
        return value === null || value === undefined ? "" : String(value);
      }),
      this.columns.filter((column) => this.run.isAtLeast(column, node, this.source)).map(({ heading }) => heading).join(", "),
    ]);
    return [["Module", ...headings, "Lower bounds"], ...lines].map((line) => line.map(quoted).join(",")).join("\n") + "\n";
  }
}
