// A small table. A click on a heading sorts it; only the first rows are shown until the user asks for more.

/**
 * @template Row
 * @typedef {object} SheetColumn
 * @property {string} heading
 * @property {(row: Row) => number | string | null} value The sort key.
 * @property {(row: Row) => string} text
 * @property {boolean} [isText]
 * @property {(row: Row) => number} [share] The length of the bar, at most 1.
 */

/**
 * @template Row
 * @param {SheetColumn<Row>[]} columns
 * @param {Row[]} rows
 * @param {{ sortedBy?: number, shown?: number, onrow?: (row: Row) => void }} options
 */
function sheet(columns, rows, { sortedBy = -1, shown = 12, onrow } = {}) {
  let by = sortedBy;
  let descending = true;
  let limit = shown;
  const table = element("table", { class: "sheet" });
  const box = element("div", { class: "scrolling" }, table);

  function draw() {
    keepingFocus(table, fill);
  }

  function fill() {
    const listed = [...rows];
    if (by >= 0) {
      const { value } = columns[by];
      const sign = descending ? -1 : 1;
      /** @param {Row} row */
      const order = (row) => value(row) ?? -Infinity;
      listed.sort((one, other) => (order(one) < order(other) ? -sign : order(one) > order(other) ? sign : 0));
    }
    const headings = columns.map((column, number) =>
      element("th", { scope: "col", class: column.isText ? "text" : "", "aria-sort": by !== number ? "none" : descending ? "descending" : "ascending" },
        element("button", { type: "button", onclick: () => sort(number) }, column.heading)));
    const body = listed.slice(0, limit).map((row) => {
      const cells = columns.map((column) => {
        const text = column.text(row);
        const share = column.share ? column.share(row) : 0;
        const attributes = { class: column.isText ? "text" : "number", "--share": share > 0 ? Math.min(share, 1) : 0 };
        return element("td", attributes, ...(column.isText ? [text] : figure(text)));
      });
      if (!onrow) return element("tr", {}, ...cells);
      const line = element("tr", { class: "clickable", tabindex: "0", onclick: () => onrow(row) }, ...cells);
      line.addEventListener("keydown", (event) => { if (event.key === "Enter") onrow(row); });
      return line;
    });
    table.replaceChildren(element("thead", {}, element("tr", {}, ...headings)), element("tbody", {}, ...body));
    const hidden = listed.length - limit;
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
  draw();
  return element("div", {}, box, more);
}
