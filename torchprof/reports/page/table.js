// The tree table, with the columns of the terminal's table. Only the visible rows are in the document.

const LINE_HEIGHT = 26;
const SPARE_LINES = 12;
const OPEN_AT_FIRST = 80;
const PRINTED_COLUMNS = 7; // in the width of letter paper in landscape

/**
 * @typedef {object} TableDrawing
 * @property {Column[]} columns
 * @property {number} source
 * @property {number} selected
 * @property {((node: number) => boolean) | null} isMatch
 */

// The place of a column in the terminal's table.
/** @param {Column} column */
function placeOf(column) {
  return column.kind === "change" ? 0 : isOfTerminal(column) ? column.number : -1;
}

// Whether the terminal's table has the column, too.
/** @param {Column} column @returns {column is Exclude<Column, DerivedColumn>} */
function isOfTerminal(column) {
  return column.kind !== "derived" && !column.key.startsWith("chosen");
}

class TreeTable {
  // Calls page.select(node) on a click.
  /** @param {HTMLElement} box @param {Run} run @param {Page} page */
  constructor(box, run, page) {
    this.run = run;
    this.page = page;
    this.open = new Uint8Array(run.nodes);
    this.#openAtFirst();
    this.key = ""; // of the column that sorts the table
    this.descending = true;
    this.isFlat = Boolean(run.data.comparison);
    this.isPrinted = false;
    /** @type {number[]} */
    this.lines = [];
    /** @type {Column[]} */
    this.columns = [];
    /** @type {Column[]} */
    this.sorting = []; // those that sort the lines
    /** @type {number[]} */
    this.wholes = []; // for each column, the figure of a full bar
    this.source = -1;
    this.selected = -1;
    /** @type {((node: number) => boolean) | null} */
    this.isMatch = null;
    this.head = element("div", { class: "line head", role: "row", "aria-rowindex": 1 });
    this.body = element("div", { class: "lines", role: "rowgroup" });
    this.box = element("div", { class: "treetable", role: "treegrid", "aria-label": "Layers", tabindex: "0" }, this.head, this.body);
    this.papers = element("div", { class: "papers" });
    this.note = element("p", { class: "hint" }); // by what the lines are sorted, if no heading says it
    box.replaceChildren(this.note, this.box, this.papers);
    this.box.addEventListener("scroll", () => this.#drawLines());
    this.body.addEventListener("click", (event) => this.#click(event));
  }

  // The column that sorts the table, for the address: "" for the model's order, else its key, with "-" if the smallest
  // figure is first.
  get order() {
    return this.key && (this.descending ? this.key : `-${this.key}`);
  }

  set order(order) {
    this.descending = !order.startsWith("-");
    this.key = order.replace(/^-/, "");
  }

  // The index of that column; null if it is not shown.
  get by() {
    const at = this.key ? this.columns.findIndex(({ key }) => key === this.key) : -1;
    return at < 0 ? null : at;
  }

  // Opens as many levels as give at most OPEN_AT_FIRST rows.
  #openAtFirst() {
    const { run } = this;
    /** @type {number[]} */
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

  /** @param {TableDrawing} drawing */
  draw({ columns, source, selected, isMatch }) {
    this.source = source;
    this.selected = selected;
    this.isMatch = isMatch;
    this.columns = columns;
    this.sorting = this.by === null ? this.isFlat ? this.#orderOfFlat() : [] : [columns[this.by]];
    this.#list();
    this.note.textContent = this.sorting.length > 1 ? `The largest first, up or down: the sum of ${this.sorting.map(({ heading }) => heading).join(" and ")}.` : "";
    this.#show(columns);
  }

  // The widths of the columns: on paper no more than their figures need.
  #size() {
    const shown = this.lines.slice(0, MOST_PRINTED);
    /** @param {Column} column */
    const needed = (column) => Math.max(...shown.map((node) => this.run.text(column, node, this.source).length), 4) + 5; // with room for a unit
    const widths = this.columns.map((column) => (this.isPrinted ? needed(column) : Math.max(Math.ceil(column.heading.length / 2) + 5, 13)));
    this.box.style.setProperty("--columns", widths.map((width) => `${width}ch`).join(" "));
    this.box.style.setProperty("--letters", String(widths.reduce((sum, width) => sum + width, 0)));
  }

  // The figure of a full bar: the largest figure of any layer.
  /** @param {Column} column */
  #whole(column) {
    const values = this.run.values(column, this.source);
    let most = 0;
    for (let node = 0; node < this.run.count + 2; node++) {
      const value = values[node];
      if (typeof value === "number" && value > most) most = value;
    }
    return most;
  }

  // By the sum of some columns; unknown figures are the smallest. Of differences, by how much it is, up or down.
  /** @param {number[]} nodes @param {Column[]} columns Those that the reader chose. */
  #sorted(nodes, columns = this.by === null ? [] : [this.columns[this.by]]) {
    if (!columns.length) return nodes;
    const values = columns.map((column) => this.run.values(column, this.source));
    const sign = this.descending ? -1 : 1;
    const areDifferences = columns.every((column) => column.kind === "change" && column.part === "difference");
    /** @param {number} node */
    const order = (node) => {
      const known = values.map((of) => of[node]).filter((value) => value !== null && value !== undefined);
      if (!known.length) return -Infinity;
      if (!areDifferences) return known[0];
      return Math.abs(known.reduce((/** @type {number} */ sum, value) => sum + Number(value), 0));
    };
    const keys = new Map(nodes.map((node) => [node, order(node)]));
    const key = (/** @type {number} */ node) => keys.get(node) ?? -Infinity;
    return [...nodes].sort((one, other) => (key(one) < key(other) ? -sign : key(one) > key(other) ? sign : 0));
  }

  #list() {
    const { run, isMatch, source } = this;
    const tops = [...run.children[run.all], run.before].filter((node) => run.exists(node, source));
    if (this.isFlat) {
      const all = [];
      for (let node = 0; node < run.nodes; node++) if (node !== run.all && run.exists(node, source) && (!isMatch || isMatch(node))) all.push(node);
      this.lines = this.by === null ? this.#sorted(all, this.#orderOfFlat()) : this.#sorted(all);
      return;
    }
    const leads = isMatch ? this.#leadsToMatch(isMatch) : null;
    const lines = [];
    const waiting = this.#sorted(tops).reverse();
    for (let node = waiting.pop(); node !== undefined; node = waiting.pop()) {
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

  // The columns that sort the flat list if the reader chose none: the chosen measure; in a comparison the differences, of
  // self if the table has them, since those of totals are the same again in all layers above.
  #orderOfFlat() {
    const { columns } = this;
    if (!this.run.data.comparison) return columns.filter((column) => column.kind === "cost" && !column.self).slice(0, 1);
    const differences = columns.filter((column) => column.kind === "change" && column.part === "difference");
    const ofSelf = differences.filter((column) => column.kind === "change" && column.isSelf);
    return ofSelf.length ? ofSelf : differences;
  }

  // By node: 1 if the node matches, 2 if any node below matches.
  /** @param {(node: number) => boolean} isMatch */
  #leadsToMatch(isMatch) {
    const { run } = this;
    const leads = new Uint8Array(run.nodes);
    for (let node = run.nodes - 1; node >= 0; node--) {
      if (node === run.all) continue;
      if (!leads[node] && isMatch(node)) leads[node] = 1;
      if (leads[node]) leads[run.parentOf(node)] = 2;
    }
    return leads;
  }

  #drawHead() {
    const headings = this.columns.map((column, number) => {
      const order = this.sorting.length > 1 || !this.sorting.includes(column) ? "none" : this.descending ? "descending" : "ascending";
      const button = element("button", { type: "button", onclick: () => this.#sortBy(number) }, column.heading);
      return element("span", { class: "cell", role: "columnheader", "aria-sort": order, "data-at": placeOf(column) }, button);
    });
    keepingFocus(this.head, () => this.head.replaceChildren(element("span", { class: "cell name", role: "columnheader" }, "Module"), ...headings));
  }

  // Largest first, then smallest first, then in the model's order.
  /** @param {number} number */
  #sortBy(number) {
    if (this.by !== number) [this.key, this.descending] = [this.columns[number].key, true];
    else if (this.descending) this.descending = false;
    else [this.key, this.descending] = ["", true];
    this.page.drawTable();
  }

  #drawLines() {
    const first = this.isPrinted ? 0 : Math.max(Math.floor(this.box.scrollTop / LINE_HEIGHT) - SPARE_LINES, 0);
    const count = this.isPrinted ? MOST_PRINTED : Math.ceil((this.box.clientHeight || 600) / LINE_HEIGHT) + 2 * SPARE_LINES;
    this.body.style.height = `${this.lines.length * LINE_HEIGHT}px`;
    this.body.replaceChildren(...this.lines.slice(first, first + count).map((node, number) => this.#line(node, first + number)));
    this.box.setAttribute("aria-rowcount", String(this.lines.length + 1));
    if (this.body.querySelector(".selected")) this.box.setAttribute("aria-activedescendant", `line-${this.selected}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  /** @param {number} node @param {number} at */
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
      const isPart = column.kind !== "change" && node !== run.before && typeof value === "number" && value > 0;
      const share = isPart && this.wholes[number] > 0 ? Math.min(value / this.wholes[number], 1) : 0;
      return element("span", { class: isOfTerminal(column) ? "cell number" : "cell number derived", role: "gridcell", "data-at": placeOf(column), "--share": share }, ...figure(run.text(column, node, this.source), column));
    });
    /** @type {Attributes} */
    const attributes = { id: `line-${node}`, class: node === this.selected ? "line selected" : run.isRange(node) ? "line range" : "line", role: "row", "aria-selected": node === this.selected ? "true" : "false", "data-node": node, "aria-rowindex": at + 2, "aria-level": depth + 1 };
    if (below && !this.isFlat) attributes["aria-expanded"] = this.open[node] ? "true" : "false";
    const made = element("div", attributes, name, ...cells);
    made.style.top = `${at * LINE_HEIGHT}px`;
    return made;
  }

  // In a comparison: whether the layer was moved, renamed, added or removed.
  /** @param {number} node */
  #how(node) {
    const pair = this.run.pairs.at(node);
    return pair && pair.how !== "same" ? element("span", { class: "how" }, pair.how) : null;
  }

  /** @param {MouseEvent} event */
  #click(event) {
    const line = closest(event, ".line");
    if (!line) return;
    const node = Number(line.dataset.node);
    if (closest(event, ".toggle") && this.run.below(node, this.source).length) this.toggle(node);
    else this.page.select(this.run.layerOf(node));
  }

  /** @param {number} node */
  toggle(node) {
    this.open[node] = 1 - this.open[node];
    this.page.drawTable();
  }

  // The keys of a tree grid in the ARIA practices. The layer that a key selects; null if it selects none, undefined for
  // other keys.
  /** @param {string} key */
  moved(key) {
    const { run, selected } = this;
    const layers = this.lines.filter((node) => !run.isRange(node));
    const at = layers.indexOf(selected);
    const canOpen = !this.isFlat && run.below(selected, this.source).length > 0;
    if ((key === " " || key === (this.open[selected] ? "ArrowLeft" : "ArrowRight")) && canOpen) {
      this.toggle(selected);
      return null;
    }
    /** @type {Record<string, number | undefined>} */
    const next = {
      ArrowDown: layers[at + 1], ArrowUp: layers[at - 1], Home: layers[0], End: layers[layers.length - 1],
      ArrowRight: canOpen ? layers[at + 1] : undefined, ArrowLeft: layers.find((node) => node === run.parentOf(selected)),
    };
    return key === " " || key in next ? next[key] ?? null : undefined;
  }

  // All levels, or the model alone.
  /** @param {boolean} isOpen */
  openAll(isOpen) {
    this.open.fill(isOpen ? 1 : 0);
    this.page.drawTable();
  }

  /** @param {boolean} isFlat */
  showFlat(isFlat) {
    this.isFlat = isFlat;
    this.page.drawTable();
  }

  // On paper all lines are there, and all columns: in tables below each other, each as wide as the paper.
  /** @param {boolean} isPrinted */
  print(isPrinted) {
    const { columns } = this;
    this.isPrinted = isPrinted;
    this.papers.replaceChildren();
    for (let first = 0; isPrinted && first < columns.length; first += PRINTED_COLUMNS) {
      this.#show(columns.slice(first, first + PRINTED_COLUMNS));
      const paper = element("div", { class: "paper" }, this.head.cloneNode(true), this.body.cloneNode(true));
      for (const line of paper.querySelectorAll("[id]")) line.removeAttribute("id");
      paper.style.setProperty("--columns", this.box.style.getPropertyValue("--columns"));
      this.papers.append(paper);
    }
    this.#show(columns);
  }

  /** @param {Column[]} columns */
  #show(columns) {
    this.columns = columns;
    this.wholes = columns.map((column) => this.#whole(column));
    this.#size();
    this.#drawHead();
    this.#drawLines();
  }

  // Opens all layers above a layer.
  /** @param {number} node */
  reveal(node) {
    for (const above of this.run.above(node).slice(1, -1)) this.open[above] = 1;
  }

  // Scrolls a layer into sight.
  /** @param {number} node */
  scrollTo(node) {
    const at = this.lines.indexOf(node);
    if (at < 0) return;
    const top = at * LINE_HEIGHT;
    if (top < this.box.scrollTop || top + 2 * LINE_HEIGHT > this.box.scrollTop + this.box.clientHeight) {
      this.box.scrollTop = Math.max(top - this.box.clientHeight / 3, 0);
      this.#drawLines();
    }
  }

  // The heading of the layers in what is copied: it says of which part of the time the figures are.
  get #module() {
    return this.run.interval ? `Module, ${this.page.timeline?.words}` : "Module";
  }

  // The listed lines as a table for a pull request, with figures as they are written in the table.
  markdown() {
    /** @param {string[]} cells */
    const line = (cells) => `| ${cells.map((cell) => cell.replace(/[\\|]/g, "\\$&").replace(/\s+/g, " ")).join(" | ")} |`;
    const rows = this.lines.map((node) => line([this.run.path(node), ...this.columns.map((column) => this.run.text(column, node, this.source))]));
    return [line([this.#module, ...this.columns.map(({ heading }) => heading)]), `|---|${"---:|".repeat(this.columns.length)}`, ...rows].join("\n") + "\n";
  }

  // The listed lines as CSV, with plain numbers: ns, bytes, counts. Unknown figures are empty; the last column names the
  // columns whose figure in the line is a lower bound.
  csv() {
    /** @param {string} text */
    const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const columns = this.columns.filter(isOfTerminal).sort((one, other) => placeOf(one) - placeOf(other));
    const headings = columns.map(({ heading, unit }) => heading + (["ns", "bytes"].includes(unit) ? ` (${unit})` : ""));
    const lines = this.lines.map((node) => [
      this.run.path(node).replace(/^[=+\-@\t\r\n＝＋－＠']/, "'$&"), // a spreadsheet would read a formula; see exports.py
      ...columns.map((column) => {
        const value = this.run.value(column, node, this.source);
        return value === null || value === undefined ? "" : String(value);
      }),
      columns.filter((column) => this.run.isAtLeast(column, node, this.source)).map(({ heading }) => heading).join(", "),
    ]);
    return [[this.#module, ...headings, "Lower bounds"], ...lines].map((line) => line.map(quoted).join(",")).join("\n") + "\n";
  }
}
