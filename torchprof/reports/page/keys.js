// The keyboard.

const KEYS = [
  ["/", "search layers"], ["Enter, Shift+Enter", "in the search: the next match, the one before"],
  ["← →", "in the icicle: the layer before, after"], ["↑ ↓", "in the icicle: the layer above, the largest one below"],
  ["↑ ↓ Home End", "in the table: the line before, after, the first, the last"], ["→ ←", "in the table: open, or go in; close, or go out"],
  ["Enter", "zoom in"], ["Backspace, Escape", "zoom out, all the way"], ["Space", "in the table: open or close a line"],
  ["← → + − Escape", "in the timeline: move, zoom, show all"], ["?", "this list"],
];

// The list of all keys.
function keysDialog() {
  /** @type {HTMLDialogElement} */
  const dialog = element("dialog", { class: "keys", "aria-label": "Keys" },
    element("b", {}, "Keys"),
    element("dl", { class: "facts" }, ...KEYS.flatMap(([key, does]) => [element("dt", {}, key), element("dd", {}, does)])),
    element("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  return dialog;
}

// What a key does, wherever the focus is.
/** @param {Page} page @param {KeyboardEvent} event */
function onKey(page, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const inField = closest(event, "input, select, textarea");
  if (event.key === "?" && !inField) {
    page.keys.showModal();
    return;
  }
  if (event.key === "/" && !inField) {
    event.preventDefault();
    page.searchBox.focus();
    return;
  }
  if (inField === page.searchBox && event.key === "Enter") nextMatch(page, event.shiftKey ? -1 : 1);
  if (inField === page.searchBox && event.key === "Escape") {
    page.searchBox.value = "";
    page.find();
    page.searchBox.blur();
  }
  if (event.target !== document.body && !closest(event, ".icicle, .treetable")) return;
  if (closest(event, "button")) return;
  const ofTable = closest(event, ".treetable") ? page.table.moved(event.key) : undefined;
  const moved = ofTable === undefined ? neighbor(page, event.key) : ofTable;
  if (moved === undefined) return;
  event.preventDefault();
  if (moved !== null) page.quietly(() => page.select(moved));
}

// The layer that a key selects: null if there is none in that direction, undefined for keys without a meaning.
/** @param {Page} page @param {string} key */
function neighbor(page, key) {
  const { run, selected } = page;
  const widths = page.measure ? run.widths(page.measure.field, page.phaseNumber, page.source) : null;
  const siblings = selected === page.top ? [selected] : run.children[run.parent[selected]];
  const at = siblings.indexOf(selected);
  if (key === "ArrowRight") return siblings[at + 1] ?? null;
  if (key === "ArrowLeft") return siblings[at - 1] ?? null;
  if (key === "ArrowUp") return selected === page.top ? null : run.parent[selected];
  if (key === "ArrowDown") {
    const below = run.children[selected];
    return below.length ? below.reduce((most, one) => (widths && widths[one] > widths[most] ? one : most)) : null;
  }
  if (key === "Enter") {
    page.zoom(selected);
    return null;
  }
  if (key === "Escape" || key === "Backspace") {
    page.zoom(page.root === page.top || key === "Escape" ? page.top : run.parent[page.root]);
    return null;
  }
  return undefined;
}

// The match after the selected layer, or (-1) the one before it.
/** @param {Page} page @param {1 | -1} direction */
function nextMatch(page, direction) {
  const { isMatch, run, selected } = page;
  if (!isMatch) return;
  const matches = Array.from({ length: run.count }, (_, node) => node).filter(isMatch);
  const after = matches.filter((node) => (node - selected) * direction > 0);
  const next = (after.length ? after : matches).at(direction > 0 ? 0 : -1);
  if (next !== undefined) page.select(next);
}
