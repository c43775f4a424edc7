// A small table that is sorted by a click on a heading, and cut until more is asked for.

// columns: { heading, value(row): number or string, text(row): string, isText, share(row) }; rows: any.
function sheet(columns, rows, { sortedBy = -1, shown = 12, onrow = null, isDescending = true } = {}) {
  let by = sortedBy;
  let descending = isDescending;
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
      const order = (one) => { const found = value(one); return found === null || found === undefined ? -Infinity : found; };
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
      return element("tr", onrow ? { class: "clickable", tabindex: "0", onclick: () => onrow(row), onkeydown: (event) => event.key === "Enter" && onrow(row) } : {}, ...cells);
    });
    table.replaceChildren(element("thead", {}, element("tr", {}, ...headings)), element("tbody", {}, ...body));
    const hidden = listed.length - limit;
    more.hidden = hidden <= 0;
    more.textContent = `${hidden} more`;
  }

  function sort(number) {
    descending = by === number ? !descending : !columns[number].isText;
    by = number;
    draw();
  }

  const more = element("button", { type: "button", class: "more", onclick: () => { limit += 200; draw(); } });
  draw();
  return element("div", {}, box, more);
}
