// What the page is made of: elements, drawings, and texts in them that are never markup.

// An element with attributes, and with texts (never markup) and other elements in it.
function element(tag, attributes = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) made.style.setProperty(name, value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...inside.filter((one) => one !== null));
  return made;
}

function drawing(tag, attributes = {}, ...inside) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...inside);
  return made;
}

// A sentence in which names stand between backticks.
function withCode(text) {
  return text.split("`").map((part, number) => (number % 2 ? element("code", {}, part) : part));
}

// A figure with its unit in a span of its own, so that units stand in line under each other.
function figure(text, column = null) {
  if (column !== null && column.unit === "verdict") return [text];
  const unit = /( ?[A-Za-z]+|×)$/.exec(text);
  if (!unit) return [text, element("span", { class: "unit" })];
  return [text.slice(0, unit.index), element("span", { class: "unit" }, unit[0])];
}

// Draws what is in a box anew, and leaves the keyboard where it was.
function keepingFocus(box, draw) {
  const focusable = "button, select, input";
  const at = [...box.querySelectorAll(focusable)].indexOf(document.activeElement);
  draw();
  if (at >= 0) box.querySelectorAll(focusable)[at]?.focus();
}
