// Reads the data of the page: JSON that is deflated and written in base64, with some columns as differences.

/** @returns {Promise<PageData>} */
async function readData() {
  const packed = atob(document.getElementById("data")?.textContent ?? "");
  const bytes = new Uint8Array(packed.length);
  for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(inflated).text());
}

// The values of a column of which the data has the differences, each to the value before it.
/** @param {number[]} differences */
function runningSums(differences) {
  const sums = new Float64Array(differences.length);
  let sum = 0;
  for (let at = 0; at < sums.length; at++) sums[at] = sum += differences[at];
  return sums;
}

/**
 * @typedef {object} Sample The distribution of the durations of calls or steps.
 * @property {number} source
 * @property {number} phase
 * @property {PageData.SampleMeasure} measure
 * @property {number} count
 * @property {number} least
 * @property {number} median
 * @property {number} most
 * @property {number} first
 * @property {number[]} points Up to 24 values, in ascending order.
 */

class Samples {
  /** @param {PageData.Samples} columns */
  constructor(columns) {
    this.columns = columns;
    this.node = runningSums(columns.node);
    this.end = runningSums(columns.size); // of the points of each sample
  }

  // The samples of a layer (source -1: of all sources).
  /** @param {number} node @param {number} source */
  of(node, source) {
    const found = [];
    for (let at = this.node.indexOf(node); at >= 0; at = this.node.indexOf(node, at + 1)) {
      if (source < 0 || this.columns.source[at] === source) found.push(this.#sample(at));
    }
    return found;
  }

  /** @param {number} at @returns {Sample} */
  #sample(at) {
    const { source, phase, measures, measure, count, below, above, median, first, size, points } = this.columns;
    const ofSample = [...runningSums(points.slice(this.end[at] - size[at], this.end[at]))];
    return {
      source: source[at], phase: phase[at], measure: measures[measure[at]], count: count[at],
      least: ofSample[0] - below[at], median: median[at], most: ofSample[ofSample.length - 1] + above[at], first: first[at], points: ofSample,
    };
  }
}
