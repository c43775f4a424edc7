// The timeline: layers, labels and kernels over time, a line for each thread and phase, and each stream; with memory on the
// same axis. To drag over it shows a part of the time, of which the page then has the figures; to double-click shows all.

const SPAN_HEIGHT = 18;
const MEMORY_HEIGHT = 70;
const LEAST_NS = 100; // that can be shown
const ZOOM = 1.6;
const NARROW = 2; // pixels

/** @typedef {{ from: number, to: number }} Stretch A part of the time, in ns after the start. */

/**
 * @typedef {object} Track
 * @property {string} name
 * @property {number[]} spans Indices, by start.
 * @property {number} depth How many spans are nested at most.
 */

class TimelineView {
  // Calls page.select(node) on a click.
  /** @param {Run} run @param {PageData.Timeline} data @param {Page} page */
  constructor(run, data, page) {
    this.run = run;
    this.data = data;
    this.page = page;
    this.start = runningSums(data.start);
    this.depth = new Int32Array(this.start.length);
    this.tracks = this.#tracks();
    this.memory = run.data.memory.filter(({ source, levels }) => source === data.source && levels);
    const last = this.start.reduce((most, start, at) => Math.max(most, start + data.ns[at]), 0);
    this.end = Math.max(last, ...this.memory.map(({ levels }) => levels?.lastNs ?? 0), data.steps[data.steps.length - 1] ?? 0);
    /** @type {Stretch} */
    this.shown = { from: 0, to: this.end };
    this.wasDragged = false;
    /** @type {number[]} */
    this.drawn = []; // the spans of the elements
    /** @type {HTMLElement[]} */
    this.made = []; // these elements
    this.drawnFor = ""; // the part of the time, and the width
    this.axis = element("div", { class: "axis-line" });
    this.map = element("div", { class: "minimap", "aria-hidden": "true" });
    this.lines = element("div", { class: "tracks" });
    this.cross = element("div", { class: "step-mark cross", hidden: true }, element("span"));
    this.live = element("div", { class: "live" });
    /** @type {Interval | null} */
    this.interval = null; // what is shown, if it is not all
    this.box = element("div", { class: "timeline", tabindex: "0", role: "group", "aria-label": "Timeline: arrow keys move, plus and minus zoom, Escape shows all" }, this.map, this.axis, this.lines);
    this.status = element("p", { class: "status" });
    this.#listen();
  }

  // The spans of each track, and how deep each one is in the spans around it.
  #tracks() {
    const { tracks, track, ns } = this.data;
    /** @type {Track[]} */
    const found = tracks.map((name) => ({ name, spans: [], depth: 0 }));
    /** @type {number[][]} */
    const open = tracks.map(() => []); // the ends of the spans around
    for (let at = 0; at < this.start.length; at++) {
      const around = open[track[at]];
      while (around.length && around[around.length - 1] <= this.start[at]) around.pop();
      this.depth[at] = around.length;
      around.push(this.start[at] + ns[at]);
      const one = found[track[at]];
      one.spans.push(at);
      one.depth = Math.max(one.depth, around.length);
    }
    return found;
  }

  get isWhole() {
    return this.shown.from === 0 && this.shown.to === this.end;
  }

  get range() {
    return this.isWhole ? "" : `${this.shown.from}-${this.shown.to}`;
  }

  // The step that is shown, by its number from 0 on; -1: another part of the time.
  get step() {
    return this.data.steps.findIndex((ns, at) => ns === this.shown.from && this.data.steps[at + 1] === this.shown.to);
  }

  // The shown part in words: "step 2", "1.2ms to 3.4ms".
  get words() {
    return this.step < 0 ? `${formatTime(this.shown.from)} to ${formatTime(this.shown.to)}` : `step ${this.step + 1}`;
  }

  // The shown part of the time, as in the address: "1000-2500", "" for all.
  /** @param {string} text */
  set range(text) {
    const [from, to] = text.split("-").map(Number);
    this.#set(from >= 0 && to > from && from < this.end ? { from, to: Math.min(to, this.end) } : { from: 0, to: this.end });
  }

  // With some spans missing, figures stay those of the whole run.
  /** @param {Stretch} shown */
  #set({ from, to }) {
    this.shown = { from: Math.round(from), to: Math.round(to) };
    const { leftOut, dropped } = this.data;
    this.interval = this.isWhole || leftOut || dropped ? null : new Interval(this.run, this.data, this.start, this.shown);
    this.live.replaceChildren(...this.#live());
  }

  showAll() {
    this.#show(0, this.end);
  }

  // Shows one step, by its number from 0 on.
  /** @param {number} step */
  showStep(step) {
    this.#show(this.data.steps[step], this.data.steps[step + 1]);
  }

  /** @param {number} from @param {number} to */
  #show(from, to) {
    const length = Math.min(Math.max(to - from, LEAST_NS), this.end);
    const first = Math.min(Math.max(from, 0), this.end - length);
    this.#set({ from: first, to: first + length });
    this.page.draw();
  }

  /** @param {number} factor @param {number} at The time that stays where it is. */
  #zoom(factor, at) {
    const { from, to } = this.shown;
    this.#show(at - (at - from) / factor, at + (to - at) / factor);
  }

  #listen() {
    const { box, map, lines } = this;
    /** @param {MouseEvent} event @param {HTMLElement} of */
    const share = (event, of) => {
      const { left, width } = of.getBoundingClientRect();
      return Math.min(Math.max((event.clientX - left) / width, 0), 1);
    };
    /** @param {MouseEvent} event */
    const timeAt = (event) => this.shown.from + share(event, lines) * (this.shown.to - this.shown.from);
    const marked = element("div", { class: "marked", hidden: true });
    /** @type {{ x: number, ns: number } | null} */
    let began = null;
    lines.addEventListener("pointerdown", (event) => {
      this.wasDragged = false;
      if (event.button === 0) began = { x: event.clientX, ns: timeAt(event) };
    });
    lines.addEventListener("pointermove", (event) => {
      this.cross.hidden = false;
      this.cross.style.setProperty("--at", String(share(event, lines)));
      this.cross.replaceChildren(element("span", {}, formatTime(timeAt(event))));
    });
    window.addEventListener("pointermove", (event) => {
      if (!began || Math.abs(event.clientX - began.x) < 5) return;
      const { from, to } = this.shown;
      const ends = [began.ns, timeAt(event)].sort((one, other) => one - other).map((ns) => (ns - from) / (to - from));
      marked.hidden = false;
      marked.style.left = `${ends[0] * 100}%`;
      marked.style.width = `${(ends[1] - ends[0]) * 100}%`;
      lines.append(marked);
    });
    window.addEventListener("pointerup", (event) => {
      const { ns, x } = began ?? { ns: 0, x: event.clientX };
      const isDrag = began !== null && Math.abs(event.clientX - x) >= 5;
      began = null;
      marked.hidden = true;
      if (!isDrag) return;
      const [from, to] = [ns, timeAt(event)].sort((one, other) => one - other);
      this.wasDragged = true;
      this.#show(from, to);
    });
    window.addEventListener("pointercancel", () => { // as when a touch scrolls the page
      began = null;
      marked.hidden = true;
    });
    lines.addEventListener("click", (event) => {
      const step = closest(event, "[data-step]");
      if (step && !this.wasDragged) this.showStep(Number(step.dataset.step));
      const made = closest(event, ".span");
      if (made && !this.wasDragged) this.page.select(this.data.node[this.drawn[Number(made.dataset.span)]]);
    });
    lines.addEventListener("dblclick", () => this.showAll());
    lines.addEventListener("mouseover", (event) => {
      const made = closest(event, ".span");
      showTip(this.page.tip, made ? this.#about(this.drawn[Number(made.dataset.span)]) : [], event);
    });
    lines.addEventListener("mousemove", (event) => placeTip(this.page.tip, event));
    lines.addEventListener("mouseleave", () => { this.page.tip.hidden = this.cross.hidden = true; });
    box.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.page.quietly(() => this.#zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM, timeAt(event)));
    }, { passive: false });
    map.addEventListener("click", (event) => {
      const { from, to } = this.shown;
      const middle = share(event, map) * this.end;
      this.#show(middle - (to - from) / 2, middle + (to - from) / 2);
    });
    box.addEventListener("keydown", (event) => this.#key(event));
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { from, to } = this.shown;
    const [part, middle] = [(to - from) / 5, (from + to) / 2];
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowLeft: () => this.#show(from - part, to - part),
      ArrowRight: () => this.#show(from + part, to + part),
      "+": () => this.#zoom(ZOOM, middle),
      "-": () => this.#zoom(1 / ZOOM, middle),
      Escape: () => this.showAll(),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    this.page.quietly(keys[event.key]);
  }

  // What a span is, in lines.
  /** @param {number} at */
  #about(at) {
    const { node, name, names, phase, ns } = this.data;
    const { run } = this;
    const path = run.path(node[at]);
    const kind = run.isLayer(node[at]) ? run.kind(node[at], this.data.source) : "";
    const what = name[at] < 0 ? [path, kind] : [names[name[at]], `in ${path}`];
    const words = `${run.data.allPhases[phase[at]]}, ${formatTime(ns[at])}, from ${formatTime(this.start[at])}`;
    return [...what.filter((line) => line), words];
  }

  /** @param {number} selected @param {((node: number) => boolean) | null} isMatch */
  draw(selected, isMatch) {
    const width = this.lines.clientWidth || 900;
    const drawnFor = `${this.range} ${width}`;
    if (drawnFor !== this.drawnFor) this.#draw(width); // else the spans are as before
    this.drawnFor = drawnFor;
    this.made.forEach((made, number) => {
      const node = this.data.node[this.drawn[number]];
      made.classList.toggle("selected", node === selected);
      made.classList.toggle("match", Boolean(isMatch?.(node)));
      made.classList.toggle("dimmed", isMatch !== null && !isMatch(node));
    });
  }

  /** @param {number} width */
  #draw(width) {
    const { from, to } = this.shown;
    [this.drawn, this.made] = [[], []];
    this.cross.hidden = true; // until the mouse moves
    const tracks = this.tracks.map((track) => this.#track(track, width));
    this.lines.replaceChildren(...tracks, ...this.memory.map((one) => this.#memory(one, width)), ...this.#stepMarks(), this.cross);
    const marks = ticks(from, to, Math.max(Math.floor(width / 110), 2));
    /** @param {number} ns */
    const at = (ns) => (ns - from) / (to - from);
    this.axis.replaceChildren(...marks.map((ns) => element("span", { "--at": at(ns), class: (1 - at(ns)) * width < 40 ? "last" : null }, shortTime(ns))));
    this.map.replaceChildren(element("div", { class: "window", "--at": from / this.end, "--part": Math.max((to - from) / this.end, 0.002) }));
    const left = [this.data.leftOut && `The ${this.data.leftOut} shortest spans are not on this page.`, this.data.dropped && `The last ${this.data.dropped} spans were not recorded.`].filter((text) => text);
    if (left.length) left.push("So the figures of the page stay those of the whole run.");
    this.status.textContent = [`Shown: ${formatTime(to - from)}, from ${formatTime(from)} to ${formatTime(to)}.`, ...left].join(" ");
  }

  // The spans in Chrome's Trace Event Format, which https://ui.perfetto.dev opens.
  get trace() {
    const { data, run } = this;
    const events = data.tracks.map((name, tid) => ({ ph: "M", name: "thread_name", pid: 1, tid, ts: 0, dur: 0, args: { name } }));
    for (let at = 0; at < this.start.length; at++) {
      const name = data.name[at] < 0 ? run.path(data.node[at]) : data.names[data.name[at]];
      events.push({ ph: "X", name, pid: 1, tid: data.track[at], ts: this.start[at] / 1e3, dur: data.ns[at] / 1e3, args: { name: run.path(data.node[at]) } });
    }
    return JSON.stringify({ traceEvents: events });
  }

  // A track with the spans that are in sight. Of narrow ones, one is drawn for each two pixels.
  /** @param {Track} track @param {number} width */
  #track({ name, spans, depth }, width) {
    const { from, to } = this.shown;
    const { ns } = this.data;
    const scale = width / (to - from);
    const until = new Float64Array(depth).fill(-1);
    const made = [];
    for (const at of spans) {
      const [start, end] = [this.start[at], this.start[at] + ns[at]];
      if (end < from || start > to) continue;
      const left = (Math.max(start, from) - from) * scale;
      const wide = (Math.min(end, to) - from) * scale - left;
      const row = this.depth[at];
      if (wide < NARROW && left < until[row]) continue;
      until[row] = left + Math.max(wide, NARROW);
      made.push(this.#span(at, left, Math.max(wide, NARROW - 1), row, width));
    }
    const area = element("div", { class: "spans" }, ...made);
    area.style.height = `${depth * SPAN_HEIGHT}px`;
    return element("div", { class: "track" }, element("div", { class: "track-name" }, name), area);
  }

  /** @param {number} at @param {number} left @param {number} width @param {number} row @param {number} all The width of the tracks. */
  #span(at, left, width, row, all) {
    const { run } = this;
    const { node, name, names } = this.data;
    const text = name[at] < 0 ? run.name(node[at]) : names[name[at]];
    const made = element("div", { class: `block span ${name[at] < 0 ? colorOf(run, node[at], this.data.source) : "no-class"}`, "data-span": this.drawn.length });
    this.drawn.push(at);
    this.made.push(made);
    made.style.left = `${(left / all) * 100}%`; // paper may be narrower
    made.style.width = `max(${(width / all) * 100}% - ${width > 3 ? 1 : 0}px, 1px)`;
    made.style.top = `${row * SPAN_HEIGHT}px`;
    if (width > 24) {
      made.classList.add("named");
      made.append(element("bdi", {}, text));
    }
    return made;
  }

  #stepMarks() {
    const { from, to } = this.shown;
    const { steps } = this.data;
    return steps.flatMap((ns, number) => {
      if (ns < from || ns > to) return [];
      const label = number + 1 < steps.length ? [element("span", { "data-step": number, title: "Show this step only" }, `step ${number + 1}`)] : [];
      return [element("div", { class: "step-mark", "--at": (ns - from) / (to - from) }, ...label)];
    });
  }

  // Live memory as steps, on the axis of the spans.
  /** @param {PageData.Memory} memory @param {number} width */
  #memory(memory, width) {
    const { from, to } = this.shown;
    const { timesNs, nbytes: levels } = memory.levels ?? { timesNs: [], nbytes: [] };
    const [least, most] = [Math.min(0, ...levels), Math.max(1, ...levels)];
    /** @param {number} ns */
    const x = (ns) => Math.min(Math.max(((ns - from) / (to - from)) * width, 0), width);
    /** @param {number} nbytes */
    const y = (nbytes) => MEMORY_HEIGHT - 2 - ((nbytes - least) / (most - least)) * (MEMORY_HEIGHT - 4);
    const corners = timesNs.flatMap((ns, at) => {
      const end = at + 1 < timesNs.length ? timesNs[at + 1] : this.end;
      return end < from || ns > to ? [] : [ns, end].map((one) => `${x(one).toFixed(1)},${y(levels[at]).toFixed(1)}`);
    });
    const [first, last] = [x(Math.max(from, 0)), x(to)];
    const points = [`${first.toFixed(1)},${y(0).toFixed(1)}`, ...corners, `${last.toFixed(1)},${y(0).toFixed(1)}`].join(" ");
    const svg = drawing("svg", { viewBox: `0 0 ${width} ${MEMORY_HEIGHT}`, preserveAspectRatio: "none", width: "100%", height: MEMORY_HEIGHT, class: "memory-line", role: "img", "aria-label": `memory on ${memory.device}, up to ${formatBytes(most)} above the start` });
    if (corners.length) svg.append(drawing("polygon", { points }));
    return element("div", { class: "track" }, element("div", { class: "track-name" }, `memory on ${memory.device} above the start, up to ${formatBytes(most)}`), svg);
  }

  // What was live at the highest point of the shown part.
  #live() {
    const { interval, run, words } = this;
    const { kinds } = run.data;
    return this.memory.flatMap(({ device, moves }) => {
      if (!interval) return [];
      if (!moves) return [element("p", { class: "hint" }, `What was live on ${device} in ${words} is not on this page: there are too many allocations, or not all were recorded.`)];
      const { level, ns, rows, freed } = interval.peak(moves);
      const above = level > 0 ? `at most ${formatBytes(level)} above the start of the recording, ${formatTime(ns)} after it` : "never above the start of the recording";
      const text = `Memory on ${device} in ${words}: ${above}.${freed ? ` ${formatBytes(freed)} of what was live at the start had been freed by then.` : ""} Allocated since, and live then:`;
      /** @type {SheetColumn<typeof rows[number]>[]} */
      const columns = [
        { heading: "Layer", isText: true, value: ({ node }) => run.path(node), text: ({ node }) => run.path(node) },
        { heading: "Kind", isText: true, value: ({ kind }) => kinds[kind], text: ({ kind }) => kinds[kind] },
        { heading: "Memory", value: ({ nbytes }) => nbytes, text: ({ nbytes }) => formatBytes(nbytes), share: ({ nbytes }) => nbytes / (level + freed) },
      ];
      return [element("p", {}, text), sheet(columns, rows, { shown: 8, click: ({ node }) => () => this.page.show(node) })];
    });
  }
}

// Round times between two times.
/** @param {number} from @param {number} to @param {number} most */
function ticks(from, to, most) {
  const least = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= least) ?? power;
  const found = [];
  for (let ns = Math.ceil(from / step) * step; ns <= to; ns += step) found.push(ns);
  return found;
}

// A round time: "200ms", "1.5s".
/** @param {number} ns */
function shortTime(ns) {
  return formatTime(ns).replace(/\.?0+([a-z]+)$/, "$1");
}

// The lines of a tooltip at the pointer; none hide it.
/** @param {HTMLElement} tip @param {string[]} lines @param {MouseEvent} event */
function showTip(tip, lines, event) {
  tip.hidden = !lines.length;
  if (tip.hidden) return;
  tip.replaceChildren(...lines.map((line, at) => element("div", { class: at ? "" : "path" }, line)));
  placeTip(tip, event);
}

/** @param {HTMLElement} tip @param {MouseEvent} event */
function placeTip(tip, event) {
  if (tip.hidden) return;
  const { clientWidth, clientHeight } = document.documentElement;
  tip.style.left = `${Math.max(Math.min(event.clientX + 14, clientWidth - tip.offsetWidth - 8), 4)}px`;
  const below = event.clientY + 18;
  tip.style.top = `${below + tip.offsetHeight < clientHeight ? below : event.clientY - tip.offsetHeight - 10}px`;
}
