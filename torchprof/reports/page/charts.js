// Pictures: those that Python drew as SVG (torchprof/reports/over_time.py, roofline.py, icicle.py), and how pictures of the page are saved as files.

const SAVED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-weight", "text-anchor", "paint-order"];
const LINE = 16; // of text in a saved picture
const PIXELS = 2; // of a saved PNG for each of the picture

/** @type {Record<string, (value: number) => string>} */
const WRITTEN = { ns: formatTime, bytes: formatBytes, rate: (value) => `${formatCount(value)} FLOP/s`, intensity: (value) => `${fixed(value, 2)} FLOP/byte` };

// Shows the values of both axes at the mouse.
/** @param {SVGElement} made */
function crosshair(made) {
  const plot = made.querySelector(".plot");
  if (!(plot instanceof SVGRectElement)) return;
  const [lines, text] = [drawing("path"), drawing("text", { class: "name" })];
  const cross = drawing("g", { class: "cross" }, lines, text);
  const [left, top, width, height] = ["x", "y", "width", "height"].map((name) => Number(plot.getAttribute(name)));
  const scales = (plot.dataset.scales ?? "").split(" ").map(Number); // least, most, whether they are powers of ten; of x, of y
  const units = (plot.dataset.units ?? "").split(" ");
  made.addEventListener("pointerleave", () => cross.remove());
  made.addEventListener("pointermove", (event) => {
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM()?.inverse());
    const shares = [(x - left) / width, 1 - (y - top) / height];
    if (shares.every((share) => share >= 0 && share <= 1)) plot.parentNode?.append(cross);
    else cross.remove();
    const words = shares.map((share, at) => {
      const [least, most, isLog] = scales.slice(3 * at);
      const value = least + share * (most - least);
      return WRITTEN[units[at]](isLog ? 10 ** value : value);
    });
    lines.setAttribute("d", `M${x} ${top}v${height}M${left} ${y}h${width}`);
    text.textContent = words.join(", ");
    for (const [name, value] of Object.entries({ x: x + (shares[0] < 0.8 ? 6 : -6), y: y - 6, "text-anchor": shares[0] < 0.8 ? "start" : "end" })) text.setAttribute(name, String(value));
  });
}

// A picture from its markup, in which Python escaped all texts. A click on what has a link calls `onclick` with its number: of
// a layer, or of a step. All links are one stop of the Tab key; arrows go from one to the next.
/** @param {string} markup @param {(node: number) => void} onclick */
function chart(markup, onclick) {
  const made = document.importNode(new DOMParser().parseFromString(markup, "image/svg+xml").documentElement, true);
  const links = /** @type {NodeListOf<SVGElement>} */ (made.querySelectorAll("[data-link]"));
  if (links.length) made.setAttribute("role", "group");
  links.forEach((part, at) => {
    part.setAttribute("role", "button");
    part.setAttribute("tabindex", at ? "-1" : "0");
    const show = () => onclick(Number(part.dataset.link));
    part.addEventListener("click", show);
    part.addEventListener("keydown", (event) => {
      if (event.key === "Enter") show();
      const next = links[at + ({ ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key] ?? links.length)];
      if (!next) return;
      event.preventDefault();
      event.stopPropagation();
      for (const one of links) one.setAttribute("tabindex", one === next ? "0" : "-1");
      next.focus();
    });
  });
  crosshair(/** @type {SVGElement} */ (/** @type {unknown} */ (made)));
  const title = made.querySelector(".title")?.textContent ?? "picture";
  return element("figure", {}, made, saveButtons(title, () => selfContained(/** @type {SVGElement} */ (/** @type {unknown} */ (made)))));
}

// Saves a picture as a file. `make` draws it as it is now.
/** @param {string} title @param {() => SVGElement} make */
function saveButtons(title, make) {
  const name = title.replace(/[^\w.-]+/g, "-").toLowerCase();
  const text = () => new XMLSerializer().serializeToString(make());
  return element("span", { class: "save" },
    element("button", { type: "button", "aria-label": `Save as SVG: ${title}`, onclick: () => download(`${name}.svg`, new Blob([text()], { type: "image/svg+xml" })) }, "Save as SVG"),
    element("button", { type: "button", "aria-label": `Save as PNG: ${title}`, onclick: () => { asPng(text()).then((blob) => { if (blob) download(`${name}.png`, blob); }); } }, "PNG"));
}

/** @param {string} name @param {Blob} blob */
function download(name, blob) {
  const url = URL.createObjectURL(blob);
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** @param {string} svg @returns {Promise<Blob | null>} */
async function asPng(svg) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = element("canvas", { width: image.width * PIXELS, height: image.height * PIXELS });
  canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => { canvas.toBlob(resolve); });
}

// A picture with its colors as they are on the page, since a file has no style sheet.
/** @param {SVGElement} svg */
function selfContained(svg) {
  const made = /** @type {SVGElement} */ (svg.cloneNode(true));
  const copies = made.querySelectorAll("*");
  svg.querySelectorAll("*").forEach((part, at) => {
    const style = getComputedStyle(part);
    for (const name of SAVED) copies[at].setAttribute(name, style.getPropertyValue(name));
  });
  const [left, top, width, height] = (svg.getAttribute("viewBox") ?? "0 0 0 0").split(" ");
  made.setAttribute("width", width);
  made.setAttribute("height", height);
  made.prepend(drawing("rect", { x: left, y: top, width, height, fill: getComputedStyle(document.body).backgroundColor }));
  return made;
}

// A chart of blocks, as the icicle and the timeline, as a picture with its title, what it shows and its legend.
/** @param {HTMLElement} box @param {string} title @param {string} caption @param {HTMLElement} legend */
function pictureOfBlocks(box, title, caption, legend) {
  const frame = box.getBoundingClientRect();
  const [ink, margin, head] = [getComputedStyle(document.body).color, 16, 16 + 2.5 * LINE];
  const signs = [...legend.querySelectorAll("span")];
  const [width, height] = [frame.width + 2 * margin, head + box.scrollHeight + 2 * LINE + margin];
  const svg = drawing("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${height}`, width, height, "font-family": "system-ui, sans-serif", "font-size": 11 });
  svg.append(drawing("rect", { width, height, fill: getComputedStyle(document.body).backgroundColor }));
  svg.append(drawing("text", { x: margin, y: margin + 10, fill: ink, "font-size": 14, "font-weight": 600 }, title));
  svg.append(drawing("text", { x: margin, y: margin + 10 + LINE, fill: ink }, caption));
  for (const part of box.querySelectorAll(".block, .track-name, .axis-line span, .step-mark:not([hidden]), .step-mark:not([hidden]) span, .memory-line polygon")) {
    const { left, top, width: wide, height: tall } = part.getBoundingClientRect();
    const [x, y] = [left - frame.left + margin, top - frame.top + box.scrollTop + head];
    if (part instanceof SVGGraphicsElement) {
      const shift = part.ownerSVGElement?.getBoundingClientRect() ?? frame;
      const moved = drawing("polygon", { points: part.getAttribute("points") ?? "", fill: getComputedStyle(part).fill, "fill-opacity": 0.6 });
      moved.setAttribute("transform", `translate(${shift.left - frame.left + margin} ${shift.top - frame.top + box.scrollTop + head})`);
      svg.append(moved);
      continue;
    }
    const style = getComputedStyle(part);
    if (part.classList.contains("step-mark")) {
      svg.append(drawing("line", { x1: x, x2: x, y1: y, y2: y + tall, stroke: style.borderLeftColor, "stroke-dasharray": "3 3" }));
      continue;
    }
    if (part.classList.contains("block")) svg.append(drawing("rect", { x, y, width: wide, height: tall, rx: 2, fill: style.backgroundColor }));
    const letters = Math.floor((wide - 8) / LETTER);
    const words = part.classList.contains("block") ? [...part.children].map((one) => one.textContent).join("  ") : part.textContent ?? "";
    const shown = words.length <= letters || !part.classList.contains("block") ? words : letters > 2 ? `${words.slice(0, letters - 1)}…` : "";
    if (shown) svg.append(drawing("text", { x: x + 4, y: y + tall / 2 + 4, fill: style.color }, shown));
  }
  let x = margin;
  for (const sign of signs) {
    const y = height - margin;
    svg.append(drawing("rect", { x, y: y - 9, width: 11, height: 11, fill: getComputedStyle(sign, "::before").backgroundColor }));
    svg.append(drawing("text", { x: x + 15, y, fill: ink }, sign.textContent ?? ""));
    x += 30 + (sign.textContent ?? "").length * LETTER;
  }
  return svg;
}
