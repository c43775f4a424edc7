// The time of each device: a bar of its parts (computing, communicating, copying, idle), and a table of its streams.

const DEVICE_PARTS = ["computing", "overlapped communication", "exposed communication", "copying only", "idle"];

/** @param {Run} run @param {PageData.Device} device */
function deviceSection(run, device) {
  const { sources } = run.data;
  const { spanNs, parts } = device;
  const drawn = parts.map((ns, part) => ({ ns, part, text: `${DEVICE_PARTS[part]} ${formatTime(ns)} (${formatShare(ns / spanNs)})` })).filter(({ ns }) => ns > 0);
  const bar = element("div", { class: "bar", role: "img", "aria-label": drawn.map(({ text }) => text).join(", ") },
    ...drawn.map(({ ns, part, text }) => element("span", { class: `work-${part}`, title: text, "--part": ns / spanNs })));
  const legend = drawn.map(({ part, text }) => element("span", { class: `legend work-${part}` }, text));
  return element("div", { class: "device" },
    element("h4", {}, sources.length > 1 ? `${device.device}, ${sources[device.source].name}` : device.device),
    element("figure", {}, bar, element("figcaption", {}, ...legend)),
    ...reportParts(device.report, () => {}));
}
