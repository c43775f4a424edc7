// The icicle chart: the width of a block is the layer's share of the shown whole; the blocks of its children are below it.

const ROW_HEIGHT = 26;
const TALL_ROW = 42; // if there are few rows
const BOX_HEIGHT = 420;
const MOST_ROWS = 60;
const LEAST_WIDTH = 2; // pixels; smaller neighbors are drawn as one block

/**
 * @typedef {object} IcicleDrawing
 * @property {number} root
 * @property {number} selected
 * @property {Float64Array} widths A figure of each node.
 * @property {Float64Array} own The same, self only: for the colors.
 * @property {boolean} showOwn
 * @property {((node: number) => boolean) | null} isMatch
 * @property {((node: number) => NodeChange) | null} change Only in a comparison.
 */

/** @typedef {{ kind: string, strength: number }} NodeChange How a node changed. */

/**
 * @typedef {object} Block
 * @property {number} node
 * @property {number} left
 * @property {number} part
 * @property {number} row
 * @property {number} hidden The number of layers that are in this block and not drawn themselves.
 * @property {boolean} [isRest]
 * @property {boolean} [isOwn]
 */

class Icicle {
  // Calls page.zoom(node) on a click and page.hover(node) under the mouse.
  /** @param {HTMLElement} box @param {Run} run @param {Page} page */
  constructor(box, run, page) {
    this.box = box;
    this.run = run;
    this.rowHeight = ROW_HEIGHT;
    box.addEventListener("click", (event) => {
      const block = closest(event, ".block");
      if (block) page.zoom(Number(block.dataset.node));
    });
    box.addEventListener("mouseover", (event) => {
      const block = closest(event, ".block");
      page.hover(block ? Number(block.dataset.node) : -1);
    });
    box.addEventListener("mouseleave", () => page.hover(-1));
  }

  /** @param {IcicleDrawing} drawing */
  draw({ root, selected, widths, own, showOwn, isMatch, change }) {
    const { run } = this;
    const width = this.box.clientWidth || 800;
    const whole = widths[root];
    /** @type {Block[]} */
    const blocks = [];
    let rows = 1;
    let hottest = 0;
    const [low, high] = root === run.all ? [0, run.count + 2] : [root, run.end[root]];
    for (let node = low; node < high; node++) hottest = Math.max(hottest, own[node]);
    /** @type {[node: number, left: number, part: number, row: number][]} */
    const waiting = whole > 0 ? [[root, 0, 1, 0]] : [];
    for (let next = waiting.pop(); next; next = waiting.pop()) {
      const [node, left, part, row] = next;
      rows = Math.max(rows, row + 1);
      blocks.push({ node, left, part, row, hidden: 0 });
      if (row + 1 >= MOST_ROWS) {
        if (run.children[node].length) blocks[blocks.length - 1].hidden = run.end[node] - node - 1;
        continue;
      }
      let at = left;
      /** @type {Block | null} */
      let small = null;
      /** @param {number} child @param {number} share */
      const place = (child, share) => {
        if (share * width >= LEAST_WIDTH) {
          small = null;
          waiting.push([child, at, share, row + 1]);
        } else if (share > 0) {
          if (small === null) {
            small = { node, left: at, part: 0, row: row + 1, hidden: 0, isRest: true };
            blocks.push(small);
          }
          small.part += share;
          small.hidden += 1;
          rows = Math.max(rows, row + 2);
        }
        at += share;
      };
      for (const child of run.children[node]) place(child, Math.max(widths[child], 0) / whole);
      if (showOwn && run.children[node].some((child) => widths[child] > 0) && own[node] > 0) {
        const share = own[node] / whole;
        if (share * width >= LEAST_WIDTH) blocks.push({ node, left: at, part: share, row: row + 1, hidden: 0, isOwn: true });
        rows = Math.max(rows, row + 2);
      }
    }
    this.rowHeight = Math.max(ROW_HEIGHT, Math.min(TALL_ROW, Math.floor(BOX_HEIGHT / rows)));
    this.box.style.height = `${Math.min(rows * this.rowHeight, BOX_HEIGHT)}px`;
    this.box.style.setProperty("--row", `${this.rowHeight}px`);
    this.box.replaceChildren(...blocks.map((block) => this.#block(block, { width, hottest, own, selected, isMatch, change })));
    if (!blocks.length) this.box.append(element("p", { class: "empty" }, "Nothing was recorded for this choice."));
  }

  /** @param {Block} block @param {Omit<IcicleDrawing, "root" | "widths" | "showOwn"> & { width: number, hottest: number }} drawing */
  #block({ node, left, part, row, hidden, isRest, isOwn }, { width, hottest, own, selected, isMatch, change }) {
    const name = isRest ? `${hidden} smaller` : isOwn ? `${this.run.name(node)} (self)` : this.run.name(node);
    const classes = ["block"];
    if (isRest) classes.push("rest");
    if (isOwn) classes.push("own");
    if (!isRest && node === selected) classes.push("selected");
    if (!isRest && isMatch) classes.push(isMatch(node) ? "match" : "dimmed");
    const made = element("div", { class: classes.join(" "), "data-node": node });
    const heat = isRest || !hottest ? 0 : Math.sqrt(Math.max(own[node], 0) / hottest);
    const style = made.style;
    style.left = `${left * 100}%`;
    style.width = `calc(${part * 100}% - 1px)`;
    style.top = `${row * this.rowHeight}px`;
    if (change && !isRest) {
      const { kind, strength } = change(node);
      made.dataset.change = kind;
      style.setProperty("--heat", String(strength));
      if (strength > 0.55) made.classList.add("hot");
    } else {
      style.setProperty("--heat", String(heat));
      if (heat > 0.55) made.classList.add("hot");
    }
    if (part * width > 28) {
      made.classList.add("named");
      made.textContent = hidden && !isRest ? `${name} … ${hidden} below` : name;
    }
    return made;
  }
}
