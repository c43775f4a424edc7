// Reports: paragraphs, and small tables. A click on a heading sorts it; only the first rows are shown until the user asks for more.

/**
 * @template Row
 * @typedef {object} SheetColumn
 * @property {string} heading
 * @property {(row: Row) => number | string | null} value The sort key.
 * @property {(row: Row) => string} text
 * @property {boolean} [isText]
 * @property {(row: Row) => string} [title] What is shown under the mouse.
 * @property {(row: Row) => number} [share] The length of the bar, at most 1.
 */

/**
 * @template Row
 * @param {SheetColumn<Row>[]} columns
 * @param {Row[]} rows
 * @param {{ sortedBy?: number, shown?: number, sums?: number, click?: (row: Row) => (() => void) | null }} options
 * `sums`: so many of the last rows are of all others, and stay the last. `click`: what a click on a row does.
 */
function sheet(columns, rows, { sortedBy = -1, shown = 12, sums = 0, click = () => null } = {}) {
  let by = sortedBy;
  let descending = true;
  let limit = shown;
  let most = 0; // rows on paper
  const table = element("table", { class: "sheet" });
  const box = element("div", { class: "scrolling" }, table);

  function draw() {
    keepingFocus(table, fill);
  }

  function fill() {
    const listed = rows.slice(0, rows.length - sums);
    if (by >= 0) {
      const { value } = columns[by];
      const sign = descending ? -1 : 1;
      /** @param {Row} row */
      const order = (row) => value(row) ?? -Infinity;
      listed.sort((one, other) => sign * compared(order(one), order(other)));
    }
    const headings = columns.map((column, number) =>
      element("th", { scope: "col", class: column.isText ? "text" : "", "aria-sort": by !== number ? "none" : descending ? "descending" : "ascending" },
        element("button", { type: "button", onclick: () => sort(number) }, column.heading)));
    const body = [...listed.slice(0, Math.max(limit, most)), ...rows.slice(rows.length - sums)].map((row) => {
      const cells = columns.map((column) => {
        const text = column.text(row);
        const share = column.share ? column.share(row) : 0;
        const attributes = { title: column.title?.(row) ?? null, class: column.isText ? "text" : "number", "--share": share > 0 ? Math.min(share, 1) : 0 };
        return element("td", attributes, ...(column.isText ? [text] : figure(text)));
      });
      const clicked = click(row);
      if (!clicked) return element("tr", {}, ...cells);
      const line = element("tr", { class: "clickable", tabindex: "0", onclick: clicked }, ...cells);
      line.addEventListener("keydown", (event) => { if (event.key === "Enter") clicked(); });
      return line;
    });
    table.replaceChildren(element("thead", {}, element("tr", {}, ...headings)), element("tbody", {}, ...body));
    const hidden = listed.length - Math.max(limit, most);
    more.hidden = hidden <= 0;
    more.textContent = `${hidden} more`;
  }

  /** @param {number} number */
  function sort(number) {
    descending = by === number ? !descending : !columns[number].isText;
    by = number;
    draw();
  }

  const more = element("button", { type: "button", class: "more", onclick: () => { limit += 200; draw(); } });
  more.addEventListener("print", (event) => {
    most = /** @type {CustomEvent} */ (event).detail ? MOST_PRINTED : 0;
    draw();
  });
  draw();
  return element("div", {}, box, more);
}

// Shows the hidden rows of all tables below the panel, or hides them again: on paper there is nothing to click.
/** @param {boolean} isPrinted */
function printRows(isPrinted) {
  for (const more of document.querySelectorAll(".split ~ * button.more")) more.dispatchEvent(new CustomEvent("print", { detail: isPrinted }));
}

const PHONE = 560; // pixels
const MOST_PRINTED = 5_000; // rows of a table
const WITH_NUMBERS = new Intl.Collator("en", { numeric: true }); // "layers.9" is before "layers.10"

/** @param {number | string} one @param {number | string} other */
function compared(one, other) {
  if (typeof one === "string" && typeof other === "string") return WITH_NUMBERS.compare(one, other);
  return one < other ? -1 : one > other ? 1 : 0;
}

// A report: its tables and the paragraphs between them. Those below the first table explain it. `sortedBy`: headings; the
// first one that a table has sorts it.
/** @param {PageData.ReportPart[]} parts @param {(node: number) => void} onlayer @param {string[]} sortedBy */
function reportParts(parts, onlayer, sortedBy = []) {
  const table = parts.findIndex((part) => typeof part !== "string");
  return parts.map((part, at) => {
    if (typeof part !== "string") return reportTable(part, onlayer, sortedBy);
    return element("p", { class: table >= 0 && at > table ? "hint" : null }, ...withCode(part));
  });
}

// A table of a report. A click on a row shows its layer. The bar of a share is as long as that; bars of times compare them with
// the longest of the table, if no column has shares.
/** @param {PageData.ReportTable} table @param {(node: number) => void} onlayer @param {string[]} sortedBy */
function reportTable({ headings, units, isText, rows, sums }, onlayer, sortedBy) {
  /** @param {PageData.ReportRow} row @param {number} at */
  const valueOf = ([cells], at) => {
    const cell = cells[at];
    return typeof cell === "number" ? cell : typeof cell !== "string" ? cell[1] : isText[at] ? cell : null;
  };
  /** @param {PageData.ReportRow} row @param {number} at */
  const textOf = ([cells], at) => {
    const cell = cells[at];
    return typeof cell === "number" ? FORMATS[/** @type {Unit} */ (units[at])](cell) : typeof cell === "string" ? cell : cell[0];
  };
  const longest = Math.max(...units.flatMap((unit, at) => (unit === "ns" ? rows.map((row) => Number(valueOf(row, at))) : [])));
  /** @type {Record<string, number>} */
  const wholes = units.includes("share") ? { share: 1 } : { ns: longest };
  /** @type {SheetColumn<PageData.ReportRow>[]} */
  const columns = headings.map((heading, at) => ({
    heading, isText: isText[at],
    value: (row) => valueOf(row, at),
    text: (row) => textOf(row, at),
    share: (row) => Number(valueOf(row, at)) / (wholes[units[at]] ?? Infinity),
  }));
  // On a phone, what a row is about comes first.
  const first = window.innerWidth < PHONE ? isText.indexOf(true) : -1;
  if (first > 0) columns.unshift(...columns.splice(first, 1));
  const by = columns.findIndex(({ heading }) => heading === sortedBy.find((one) => headings.includes(one)));
  return sheet(columns, rows, { sortedBy: by, sums, click: ([, node]) => (node === null ? null : () => onlayer(node)) });
}
