// The time of each device: a bar of its parts (computing, communicating, copying, idle), and a table of its streams.

const DEVICE_PARTS = ["computing", "overlapped communication", "exposed communication", "copying only", "idle"];

/** @param {Run} run @param {PageData.Device} device */
function deviceSection(run, device) {
  const { sources } = run.data;
  const { spanNs, busyNs, communicationNs, parts } = device;
  /** @param {number} ns @param {number} whole */
  const withShare = (ns, whole) => formatTime(ns) + (whole > 0 ? ` (${formatShare(ns / whole)})` : "");
  const sentences = [`Busy for ${withShare(busyNs, spanNs)} of the ${formatTime(spanNs)} from its first work to its last.`];
  if (communicationNs > 0) {
    const [, overlap, exposed] = parts;
    sentences.push(`Communication: ${formatTime(communicationNs)}, ${withShare(overlap, communicationNs)} overlapped with computing, ${withShare(exposed, communicationNs)} exposed.`);
  }
  const drawn = parts.map((ns, part) => ({ ns, part, text: `${DEVICE_PARTS[part]} ${withShare(ns, spanNs)}` })).filter(({ ns }) => ns > 0);
  const bar = element("div", { class: "bar", role: "img", "aria-label": drawn.map(({ text }) => text).join(", ") },
    ...drawn.map(({ ns, part, text }) => element("span", { class: `work-${part}`, title: text, "--part": ns / spanNs })));
  const legend = drawn.map(({ part, text }) => element("span", { class: `legend work-${part}` }, text));
  /** @param {string} heading @param {2 | 3 | 4 | 5} at @returns {SheetColumn<PageData.Stream>} */
  const time = (heading, at) => ({ heading, value: (row) => row[at], text: (row) => formatTime(row[at]), share: (row) => row[at] / spanNs });
  /** @type {SheetColumn<PageData.Stream>[]} */
  const columns = [
    { heading: "Stream", isText: true, value: (row) => row[0], text: (row) => String(row[0]) },
    { heading: "Kernels", value: (row) => row[1], text: (row) => String(row[1]) },
    time("Busy", 2),
    time("Computing", 3),
    time("Communication", 4),
    time("Copying", 5),
  ];
  return element("div", { class: "device" },
    element("h4", {}, sources.length > 1 ? `${device.device}, ${sources[device.source].name}` : device.device),
    element("p", {}, sentences.join(" ")),
    element("figure", {}, bar, element("figcaption", {}, ...legend)),
    sheet(columns, device.streams, { sortedBy: 2 }));
}
