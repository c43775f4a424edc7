// The icicle chart: the width of a block is the layer's share of the shown whole; the blocks of its children are below it.
// Three or more layers in a row that are equal and take about as long are one block, as twelve blocks of a transformer.

const ROW_HEIGHT = 26;
const TALL_ROW = 42; // if there are few rows
const BOX_HEIGHT = 420;
const MOST_ROWS = 60;
const LEAST_WIDTH = 2; // pixels; smaller neighbors are drawn as one block
const FEWEST_EQUAL = 3;
const ALIKE = 1.5; // times: the largest of equal layers, the smallest
const READABLE = 8; // pixels: children of the whole chart that are wider are drawn one by one
const LETTER = 6.9; // pixels, on average
const OTHER_CLASSES = "class-7"; // the color of classes without one of their own, as in torchprof/reports/charts.py

/**
 * @typedef {object} IcicleDrawing
 * @property {number} root
 * @property {number} selected
 * @property {PageData.Integers} widths A figure of each node.
 * @property {PageData.Integers} own The same, self only: for the colors.
 * @property {boolean} hasShares Whether shares of the whole are known.
 * @property {boolean} showOwn Also draws what is in a layer and in none below it: its operators, or its self where they are not known.
 * @property {(node: number) => Operator[]} operators What ran in a node, and in none below it.
 * @property {string} field The measure of the widths.
 * @property {boolean} byOwnTime Colors are those of the self of a layer, else of its class.
 * @property {((node: number) => boolean) | null} isMatch
 * @property {((node: number) => NodeChange) | null} change Only in a comparison.
 */

/** @typedef {{ kind: string, strength: number }} NodeChange How a node changed. */

/**
 * @typedef {object} Block
 * @property {number[]} nodes Several, if it stands for equal layers.
 * @property {number} left
 * @property {number} part
 * @property {number} row
 * @property {number} hidden The number of layers that are in this block and not drawn themselves.
 * @property {number[]} [siblings] The first node of each of the layers that are one block here.
 * @property {number} [grouped] The layer in which they are; also of a block below.
 * @property {boolean} [isRest]
 * @property {boolean} [isOwn]
 * @property {Operator} [operator] One that ran in the layer itself.
 */

/** @typedef {{ nodes: number[], siblings: number[], sum: number }} Group Equal layers, with the sum of their figures. */

// The CSS class of the color of a layer's class.
/** @param {Run} run @param {number} node @param {number} source */
function colorOf(run, node, source) {
  if (!run.isLayer(node)) return "no-class";
  const at = run.data.classes.indexOf(run.kind(node, source));
  return at < 0 ? OTHER_CLASSES : `class-${at}`;
}

// The operators of several layers, each once, the largest first: kernels and source lines are none.
/** @param {Operator[]} operators @param {string} field */
function merged(operators, field) {
  /** @type {Map<string, Operator>} */
  const found = new Map();
  for (const operator of operators.filter(({ kind }) => !["kernel", "python"].includes(kind))) {
    const key = `${operator.kind} ${operator.name}`;
    const sum = (found.get(key)?.own[field] ?? 0) + operator.own[field];
    found.set(key, { ...operator, own: { ...operator.own, [field]: sum } });
  }
  return [...found.values()].sort((one, other) => other.own[field] - one.own[field]);
}

// The largest of some numbers.
/** @param {number[]} numbers */
function largest(numbers) {
  return numbers.reduce((most, one) => Math.max(most, one), -Infinity);
}

// The path of a layer, or that of the first of several equal ones.
/** @param {Run} run @param {number[]} nodes */
function pathOf(run, nodes) {
  return `${run.path(nodes[0])}${nodes.length > 1 ? ` and ${nodes.length - 1} like it` : ""}`;
}

class Icicle {
  // Calls page.zoom(node) on a click, and page.hover(node) under the mouse.
  /** @param {HTMLElement} box @param {Run} run @param {Page} page */
  constructor(box, run, page) {
    this.box = box;
    this.run = run;
    this.page = page;
    this.rowHeight = ROW_HEIGHT;
    this.root = -1;
    this.groups = true; // equal layers in a row are one block
    const shapes = run.shapes(0);
    this.hasGroups = !run.data.comparison && run.children.some((children) => children.some((node, at) => at > 1 && run.isLayer(node) && shapes[node] === shapes[children[at - 1]] && shapes[node] === shapes[children[at - 2]]));
    /** @type {Block[]} */
    this.blocks = [];
    /** @type {Map<string, HTMLElement>} */
    this.elements = new Map();
    this.empty = element("p", { class: "empty" }, "Nothing was recorded for this choice.");
    box.append(this.empty);
    box.addEventListener("click", (event) => this.#click(this.#blockAt(event)));
    box.addEventListener("mouseover", (event) => {
      const block = this.#blockAt(event);
      showTip(page.tip, this.#about(block), event);
      page.hover(block?.nodes ?? []);
    });
    box.addEventListener("mousemove", (event) => placeTip(page.tip, event));
    box.addEventListener("mouseleave", () => {
      page.tip.hidden = true;
      page.hover([]);
    });
  }

  /** @param {Event} event */
  #blockAt(event) {
    const made = closest(event, ".block");
    return made ? this.blocks[Number(made.dataset.block)] : null;
  }

  /** @param {Block | null} block */
  #click(block) {
    if (block) this.page.zoom(this.#opens(block) ?? block.nodes[0]);
  }

  // The layer in which the layers of a block are drawn one by one after a zoom; undefined if the block is one layer, or
  // if they are too many for that.
  /** @param {Block} block */
  #opens({ grouped }) {
    return grouped === this.root ? undefined : grouped;
  }

  // What a block is, in lines.
  /** @param {Block | null} block */
  #about(block) {
    if (!block) return [];
    if (block.operator) return this.page.aboutOperator(block.nodes, block.operator);
    if (block.isRest) return [`${block.hidden} smaller ${block.hidden === 1 ? "layer" : "layers"} in ${pathOf(this.run, block.nodes)}`];
    const lines = this.page.about(block.nodes, block.isOwn);
    return this.#opens(block) === undefined ? lines : [...lines, "Click to see each of them."];
  }

  // The children of a layer, or of equal ones at once. Neighbors that are equal, and whose figures differ by less than
  // `ALIKE`, are one group: so a layer that takes longer than its equals, and one that did not run, is on its own.
  /** @param {number[][]} children @param {PageData.Integers} widths @param {boolean} isOne Each is a group of its own. @returns {Group[]} */
  #groups(children, widths, isOne) {
    const { run } = this;
    const shapes = run.shapes(this.page.source);
    const [of] = children;
    const sums = of.map((_, at) => children.reduce((sum, one) => sum + Math.max(widths[one[at]], 0), 0));
    /** @type {Group[]} */
    const groups = [];
    for (let at = 0; at < of.length;) {
      let end = at + 1;
      let [least, most] = [sums[at], sums[at]];
      while (!isOne && end < of.length && run.isLayer(of[end]) && shapes[of[end]] === shapes[of[at]]) {
        [least, most] = [Math.min(least, sums[end]), Math.max(most, sums[end])];
        if (!(least > 0 && most <= ALIKE * least)) break;
        end++;
      }
      if (end - at < FEWEST_EQUAL) end = at + 1;
      const sum = sums.slice(at, end).reduce((one, other) => one + other, 0);
      groups.push({ nodes: children.flatMap((one) => one.slice(at, end)), siblings: of.slice(at, end), sum });
      at = end;
    }
    return groups;
  }

  /** @param {IcicleDrawing} drawing */
  draw({ root, selected, widths, own, hasShares, showOwn, operators: operatorsOf, field, byOwnTime, isMatch, change }) {
    const { run } = this;
    this.root = root;
    const width = this.box.clientWidth || 800;
    const whole = widths[root];
    const total = widths[run.all];
    /** @type {Block[]} */
    const blocks = [];
    let rows = 1;
    let hottest = 0;
    const [low, high] = root === run.all ? [0, run.count + 2] : [root, run.end[root]];
    for (let node = low; node < high; node++) hottest = Math.max(hottest, own[node]);
    /** @param {number[]} nodes @param {PageData.Integers} figures */
    const sum = (nodes, figures) => nodes.reduce((all, node) => all + Math.max(figures[node], 0), 0);
    /** @type {Block[]} */
    const waiting = whole > 0 ? [{ nodes: [root], left: 0, part: 1, row: 0, hidden: 0 }] : [];
    for (let next = waiting.pop(); next; next = waiting.pop()) {
      const block = next;
      const { nodes, left, row } = block;
      const [node] = nodes;
      rows = Math.max(rows, row + 1);
      blocks.push(block);
      if (row + 1 >= MOST_ROWS) {
        if (run.children[node].length) block.hidden = nodes.length * (run.end[node] - node - 1);
        continue;
      }
      let at = left;
      /** @type {Block | null} */
      let small = null;
      /** @param {Group} group */
      const place = ({ nodes: inside, siblings, sum: figure }) => {
        const share = figure / whole;
        if (share * width >= LEAST_WIDTH) {
          small = null;
          const grouped = block.grouped ?? (siblings.length > 1 ? node : undefined);
          waiting.push({ nodes: inside, left: at, part: share, row: row + 1, hidden: 0, siblings, grouped });
        } else if (share > 0) {
          if (small === null) {
            small = { nodes, left: at, part: 0, row: row + 1, hidden: 0, isRest: true };
            blocks.push(small);
          }
          small.part += share;
          small.hidden += inside.length;
          rows = Math.max(rows, row + 2);
        }
        at += share;
      };
      const inside = nodes.map((one) => run.children[one]);
      const haveRoom = node === root && (block.part * width) / inside[0].length >= READABLE;
      const groups = this.#groups(inside, widths, !this.groups || change !== null || haveRoom);
      groups.forEach(place);
      const operators = showOwn && node !== run.all ? merged(nodes.flatMap(operatorsOf), field) : [];
      if (showOwn && !operators.length && groups.some((group) => group.sum > 0) && sum(nodes, own) > 0) {
        const share = sum(nodes, own) / whole;
        if (share * width >= LEAST_WIDTH) blocks.push({ ...block, left: at, part: share, row: row + 1, isOwn: true });
        rows = Math.max(rows, row + 2);
      }
      for (const operator of operators) {
        const share = operator.own[field] / whole;
        if (share * width >= LEAST_WIDTH) {
          blocks.push({ nodes, left: at, part: share, row: row + 1, hidden: 0, operator });
          rows = Math.max(rows, row + 2);
        }
        at += Math.max(share, 0);
      }
    }
    this.rowHeight = Math.max(ROW_HEIGHT, Math.min(TALL_ROW, Math.floor(BOX_HEIGHT / rows)));
    this.box.style.height = `${Math.min(rows * this.rowHeight, BOX_HEIGHT)}px`;
    this.box.style.setProperty("--row", `${this.rowHeight}px`);
    this.blocks = blocks;
    this.#place(blocks.map((block, number) => {
      const { nodes, isRest } = block;
      const one = this.#block(block, width, hasShares ? nodes.map((node) => widths[node] / total) : []);
      one.dataset.block = String(number);
      if (block.operator) return one;
      if (!isRest && nodes.includes(selected)) one.classList.add("selected");
      if (!isRest && isMatch) one.classList.add(nodes.some(isMatch) ? "match" : "dimmed");
      if (!isRest) this.#color(one, nodes, { byOwnTime, heat: hottest ? Math.sqrt(largest(nodes.map((node) => own[node])) / hottest) : 0, change });
      return one;
    }));
    this.empty.hidden = blocks.length > 0;
  }

  // Shows these blocks. What was shown before keeps its element, which moves to its new place.
  /** @param {HTMLElement[]} blocks */
  #place(blocks) {
    /** @type {Map<string, HTMLElement>} */
    const elements = new Map();
    blocks.forEach((block, at) => {
      const { row, isRest, isOwn, operator } = this.blocks[at];
      let key = `${block.dataset.node} ${isRest || isOwn || operator ? `${row} ${operator?.name}` : ""}`;
      while (elements.has(key)) key += "+";
      const shown = this.elements.get(key) ?? block;
      if (shown === block) this.box.append(block);
      else {
        for (const { name, value } of block.attributes) shown.setAttribute(name, value);
        shown.replaceChildren(...block.childNodes);
      }
      elements.set(key, shown);
    });
    for (const [key, shown] of this.elements) if (!elements.has(key)) shown.remove();
    this.elements = elements;
  }

  /** @param {HTMLElement} made @param {number[]} nodes @param {{ byOwnTime: boolean, heat: number, change: IcicleDrawing["change"] }} drawing */
  #color(made, [node], { byOwnTime, heat, change }) {
    const { run } = this;
    if (change) {
      const { kind, strength } = change(node);
      made.dataset.change = kind;
      made.style.setProperty("--heat", String(strength));
      if (strength > 0.55) made.classList.add("hot");
    } else if (byOwnTime) {
      made.style.setProperty("--heat", String(heat));
      if (heat > 0.55) made.classList.add("hot");
    } else {
      made.classList.add(colorOf(run, node, this.page.source));
    }
  }

  // A block, with as much of its name, its class and its share of all as it has room for.
  /** @param {Block} block @param {number} width @param {number[]} shares Of each of its nodes. */
  #block({ nodes, left, part, row, hidden, siblings, isRest, isOwn, operator }, width, shares) {
    const { run } = this;
    const [node] = nodes;
    const made = element("div", { class: isRest ? "block rest" : isOwn ? "block own" : operator ? "block operator" : "block", "data-node": node });
    made.style.left = `${left * 100}%`;
    made.style.width = `calc(${part * 100}% - 1px)`;
    made.style.top = `${row * this.rowHeight}px`;
    const room = (part * width - 10) / LETTER; // letters
    if (part * width <= 28) return made;
    made.classList.add("named");
    if (operator) {
      made.append(element("bdi", {}, rangeInWords(operator).replace(/^aten::/, "")));
      return made;
    }
    const last = siblings && siblings.length > 1 ? `–${run.name(siblings[siblings.length - 1])}` : "";
    const name = isRest ? `${hidden} smaller` : `${run.name(node)}${last}${isOwn ? " (self)" : ""}`;
    made.append(element("bdi", {}, hidden && !isRest ? `${name} … ${hidden} below` : name));
    if (isRest || isOwn) return made;
    const kind = run.kind(node, this.page.source);
    if (!shares.length) {
      if (kind && room > name.length + kind.length + 1) made.append(element("span", { class: "kind" }, kind));
      return made;
    }
    const [least, most] = [-largest(shares.map((share) => -share)), largest(shares)].map(formatShare);
    const percent = nodes.length > 1 ? `${nodes.length} × ${least === most ? most : `${least.slice(0, -1)}–${most}`}` : most;
    if (room > name.length + percent.length + 1) made.append(element("span", { class: "share" }, percent));
    if (kind && room > name.length + percent.length + kind.length + 2) made.querySelector("bdi")?.after(element("span", { class: "kind" }, kind));
    return made;
  }
}
