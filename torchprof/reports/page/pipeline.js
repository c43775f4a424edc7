// Pipelines: their report, and a step as a picture: a line for each rank, with its actions over time.

/** @type {Record<PageData.ActionKind, string>} */
const ACTIONS = { F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights" };
const PICTURE_WIDTH = 780; // pixels, at least: numbers that do not fit are not written
const DIGIT_WIDTH = 8;

/** @param {PageData.Pipeline} pipeline @param {(node: number) => void} onlayer */
function pipelineSection({ name, report, step }, onlayer) {
  const [sentences, ...tables] = reportParts(report, onlayer);
  return element("div", { class: "pipeline" }, name ? element("h4", {}, name) : null, sentences, step ? stepPicture(step) : null, ...tables);
}

/** @param {PageData.PipelineStep} step */
function stepPicture({ about, ns, ranks, kinds, actions }) {
  const { line, stage, what, microbatch, waitedNs, tookNs } = actions;
  const stages = ranks.map((_, at) => [...new Set(Array.from(stage).filter((_, number) => line[number] === at))].sort((one, other) => one - other));
  /** @type {HTMLElement[][]} */
  const blocks = ranks.map(() => []);
  const ends = ranks.map(() => 0);
  /** @param {number} at @param {string} kind @param {number} took @param {string} title @param {number} lighter */
  const place = (at, kind, took, title, lighter, text = "") => {
    const fits = (took / ns) * PICTURE_WIDTH > DIGIT_WIDTH * text.length;
    blocks[at].push(element("span", { class: `action action-${kind}`, title, "--start": ends[at] / ns, "--part": took / ns, "--lighter": lighter }, fits ? text : ""));
    ends[at] += took;
  };
  for (let number = 0; number < line.length; number++) {
    const [at, kind, waited, took] = [line[number], kinds[what[number]], waitedNs[number], tookNs[number]];
    const title = `${ACTIONS[kind]} of microbatch ${microbatch[number]} in stage ${stage[number]}, rank ${ranks[at]}: ${formatTime(took)}`;
    if (waited > 0) place(at, "waiting", waited, `rank ${ranks[at]} waits for ${formatTime(waited)}`, 0);
    const lighter = stages[at].indexOf(stage[number]) / Math.max(stages[at].length - 1, 1);
    place(at, kind, took, waited > 0 ? `${title}, after waiting for ${formatTime(waited)}` : title, lighter, String(microbatch[number]));
  }
  const lines = ranks.flatMap((rank, at) => {
    const name = `rank ${rank}, ${stages[at].length > 1 ? "stages" : "stage"} ${stages[at].join(", ")}`;
    return [element("span", { class: "who" }, name), element("div", { class: "actions" }, ...blocks[at])];
  });
  const axis = [element("span"), element("div", { class: "axis" }, element("span", {}, "0"), element("span", {}, formatTime(ns)))];
  const used = kinds.filter((_, number) => Array.from(what).includes(number));
  const legend = [...used.map((kind) => [kind, ACTIONS[kind]]), ["waiting", "waiting"]];
  const later = stages.some((own) => own.length > 1) ? " Lighter: the later stages of a rank." : "";
  return element("figure", {},
    element("div", { class: "step", role: "img", "aria-label": "the actions of a step over time" }, ...lines, ...axis),
    element("figcaption", {}, ...legend.map(([kind, text]) => element("span", { class: `legend action-${kind}` }, text))),
    element("figcaption", { class: "hint" }, about + later));
}
