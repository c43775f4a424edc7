// Reads the data of the page: a line of JSON and the bytes of its columns of integers, deflated and in base64. See
// _packed in torchprof/reports/html.py.

/** @returns {Promise<PageData>} */
async function readData() {
  const packed = atob(document.getElementById("data")?.textContent ?? "");
  const deflated = new Uint8Array(packed.length);
  for (let at = 0; at < packed.length; at++) deflated[at] = packed.charCodeAt(at);
  const inflated = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(inflated).arrayBuffer());
  const end = bytes.indexOf(10); // the line break after the JSON
  const columns = bytes.subarray(end + 1);
  return JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)), (_, value) => (value?.column ? column(columns, value.column) : value));
}

// A column of integers: the lowest bytes of all values, then the next bytes, up to eight.
/** @param {Uint8Array} bytes @param {[first: number, count: number]} place */
function column(bytes, [first, count]) {
  const values = new Float64Array(count);
  /** @param {number} byte @param {number} at */
  const part = (byte, at) => bytes[first + byte * count + at];
  for (let at = 0; at < count; at++) {
    const low = part(0, at) | (part(1, at) << 8) | (part(2, at) << 16) | (part(3, at) << 24);
    const high = part(4, at) | (part(5, at) << 8) | (part(6, at) << 16) | (part(7, at) << 24);
    values[at] = high * 2 ** 32 + (low >>> 0);
  }
  return values;
}

// The values of a column of which the data has the differences, each to the value before it.
/** @param {PageData.Integers} differences */
function runningSums(differences, first = 0, end = differences.length) {
  const sums = new Float64Array(end - first);
  let sum = 0;
  for (let at = first; at < end; at++) sums[at - first] = sum += differences[at];
  return sums;
}

// The description of a layer in one run of the page: null if the run does not have the layer.
/** @param {PageData.Take} take @param {number} node */
function descriptionIn({ described, of }, node) {
  return of[node] < 0 ? null : described[of[node]];
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
    const ofSample = [...runningSums(points, this.end[at] - size[at], this.end[at])];
    return {
      source: source[at], phase: phase[at], measure: measures[measure[at]], count: count[at],
      least: ofSample[0] - below[at], median: median[at], most: ofSample[ofSample.length - 1] + above[at], first: first[at], points: ofSample,
    };
  }
}
