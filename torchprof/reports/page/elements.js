// Makes elements and drawings of the document. Texts are never read as markup.

// Attributes of an element. null and false are left out, functions ("onclick") become listeners, "--name" is a CSS
// property.
/** @typedef {Record<string, string | number | boolean | null | (() => void)>} Attributes */

// An element with attributes and children. Strings become text, never markup.
/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} attributes
 * @param {(string | Node | null)[]} inside
 */
function element(tag, attributes = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) made.style.setProperty(name, String(value));
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...inside.filter((one) => one !== null));
  return made;
}

/**
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string | number>} attributes
 * @param {(string | Node)[]} inside
 */
function drawing(tag, attributes = {}, ...inside) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...inside);
  return made;
}

// A sentence as text and `code` elements: names are between backticks in it.
/** @param {string} text */
function withCode(text) {
  return text.split("`").map((part, number) => (number % 2 ? element("code", {}, part) : part));
}

// A finding: its gain, where it is, what was observed, and what to change.
/** @param {PageData.Finding} finding @returns {(Node | string)[]} */
function textOfFinding({ gain, place, finding, remedy, measured }) {
  const text = [element("b", {}, gain), `${place}: `, ...withCode(finding), element("br"), ...withCode(remedy)];
  return measured ? [...text, barsOfTrial(measured)] : text;
}

// The recorded time as it is, and with the remedy that was tried: below it, the interval in which its end is.
/** @param {[number, number, number]} measured */
function barsOfTrial([gain, low, high]) {
  const whole = Math.max(1, 1 - low);
  const [asItIs, after, least, most] = [1, 1 - gain, 1 - high, 1 - low].map((time) => time / whole);
  const said = `as it is 100%, with the remedy ${formatShare(1 - gain)} (${formatShare(1 - high)}–${formatShare(1 - low)})`;
  return element("span", { class: "trial", role: "img", "aria-label": said, title: said },
    element("span", {}, "as it is"), element("span", { class: "time", "--part": asItIs }),
    element("span", {}, "with it"), element("span", { class: "time", "--part": after }, element("span", { class: "interval", "--start": least / after, "--part": (most - least) / after })));
}

// The legend of the signs in tables.
/** @param {PageData["legend"]} legend */
function signs(legend) {
  return element("p", { class: "hint signs" }, ...legend.map(([sign, meaning]) => element("span", {}, element("b", {}, sign), ` ${meaning}`)));
}

// A figure with its unit in a span of its own, so that the units of a column are aligned.
/** @param {string} text @param {{ unit: string } | null} column */
function figure(text, column = null) {
  if (column !== null && column.unit === "verdict") return [text];
  const unit = /( ?[A-Za-z]+|×)$/.exec(text);
  if (!unit) return [text, element("span", { class: "unit" })];
  return [text.slice(0, unit.index), element("span", { class: "unit" }, unit[0])];
}

// The innermost element that matches a selector, from the target of an event outward.
/** @param {Event} event @param {string} selector @returns {HTMLElement | null} */
function closest(event, selector) {
  return event.target instanceof Element ? event.target.closest(selector) : null;
}

// Redraws the content of a box, and keeps the keyboard focus.
/** @param {Element} box @param {() => void} draw */
function keepingFocus(box, draw) {
  /** @returns {NodeListOf<HTMLElement>} */
  const focusable = () => box.querySelectorAll("button, select, input");
  const at = [...focusable()].findIndex((one) => one === document.activeElement);
  draw();
  if (at >= 0) focusable()[at]?.focus();
}
