// The largest places, and the legend of the signs in tables.

// A table for each measure. A click on a row shows its layer.
/** @param {Run} run @param {PageData.Largest} largest @param {(node: number) => void} onlayer */
function largestPlaces(run, { sentences, tables }, onlayer) {
  const parts = sentences.map((sentence) => element("p", {}, sentence));
  for (const { heading, unit, rows, hidden } of tables) {
    /** @param {string} title @param {"layer" | "kind" | "phase" | "work"} name @returns {SheetColumn<PageData.LargestPart>} */
    const text = (title, name) => ({ heading: title, isText: true, value: (row) => row[name], text: (row) => row[name] });
    /** @type {SheetColumn<PageData.LargestPart>[]} */
    const columns = [
      { heading: "Share", value: (row) => row.share, text: (row) => formatShare(row.share), share: (row) => row.share },
      { heading, value: (row) => row.amount, text: (row) => FORMATS[unit](row.amount) },
      text("Layer", "layer"),
      text("Type", "kind"),
      text("Phase", "phase"),
      text("In", "work"),
    ];
    parts.push(sheet(columns, rows, { sortedBy: 0, onrow: (row) => onlayer(nodeAt(run, row.path)) }));
    if (hidden) parts.push(element("p", { class: "hint" }, hidden));
  }
  return element("div", { class: "largest" }, ...parts);
}

// The node at a path of names, from the top down.
/** @param {Run} run @param {string[]} path */
function nodeAt(run, path) {
  return path.reduce((above, name) => run.children[above].find((node) => run.name(node) === name) ?? above, run.all);
}

/** @param {PageData["legend"]} legend */
function signs(legend) {
  return element("p", { class: "hint signs" }, ...legend.map(([sign, meaning]) => element("span", {}, element("b", {}, sign), ` ${meaning}`)));
}
