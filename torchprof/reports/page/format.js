// Numbers as text, with the same result as the functions of torchprof/run/formats.py.

const UNKNOWN = "–";
const AT_LEAST = "≥ ";

// Whether a figure is exact, a lower bound, unknown or blank: the numbers of `Bound` in torchprof/run/formats.py. NO_ROW:
// the table has no such row.
const BOUND = { EXACT: 0, AT_LEAST: 1, UNKNOWN: 2, BLANK: 3, NO_ROW: 4 };

/** @typedef {{ value: number, bound: number }} Figure A number with its bound. */

// The bound of a sum. A sum that is not complete is a lower bound, or unknown if it is 0.
/** @param {number} value @param {boolean} isComplete */
function boundOfSum(value, isComplete) {
  return isComplete ? BOUND.EXACT : value ? BOUND.AT_LEAST : BOUND.UNKNOWN;
}

// The sum of figures. What is blank adds nothing; what is unknown makes the sum a lower bound.
/** @param {Figure[]} figures @returns {Figure} */
function sumOf(figures) {
  const shown = figures.filter(({ bound }) => bound < BOUND.BLANK);
  if (!shown.length) return { value: 0, bound: BOUND.BLANK };
  const value = shown.reduce((sum, figure) => sum + (figure.bound < BOUND.UNKNOWN ? figure.value : 0), 0);
  return { value, bound: boundOfSum(value, shown.every(({ bound }) => bound === BOUND.EXACT)) };
}

// A figure as a cell, with its unit.
/** @param {Figure} figure @param {Unit} unit */
function formatFigure({ value, bound }, unit) {
  if (bound >= BOUND.BLANK) return "";
  return bound === BOUND.UNKNOWN ? UNKNOWN : (bound === BOUND.AT_LEAST ? AT_LEAST : "") + FORMATS[unit](value);
}

/** @param {number} value @param {number} digits */
function fixed(value, digits) {
  // Python rounds a tie to the even digit, toFixed away from zero. Only a multiple of 2^-(digits + 1) can be a tie.
  if (Math.abs(value * 2 ** (digits + 1)) % 2 === 1) {
    const low = Math.floor(value * 10 ** digits);
    return ((low % 2 === 0 ? low : low + 1) / 10 ** digits).toFixed(digits);
  }
  return value.toFixed(digits);
}

/** @param {number} ns */
function formatTime(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return fixed(ns / 1e9, 3) + "s";
  if (size >= 1e6) return fixed(ns / 1e6, 3) + "ms";
  return fixed(ns / 1e3, 3) + "us";
}

/** @type {[unit: string, size: number][]} */
const BYTE_UNITS = [["GB", 2 ** 30], ["MB", 2 ** 20], ["KB", 2 ** 10]];
/** @type {[unit: string, size: number][]} */
const COUNT_UNITS = [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["K", 1e3]];

/** @param {number} bytes */
function formatBytes(bytes) {
  const nbytes = Number(fixed(bytes, 0)); // a mean over calls may have a fraction
  for (const [unit, size] of BYTE_UNITS) {
    if (Math.abs(nbytes) >= size) return fixed(nbytes / size, 2) + " " + unit;
  }
  return nbytes + " B";
}

/** @param {number} number */
function formatCount(number) {
  for (const [unit, size] of COUNT_UNITS) {
    if (Math.abs(number) >= size * 0.999995) return fixed(number / size, 2) + " " + unit;
  }
  return Number.isInteger(number) ? String(number) : fixed(number, 2);
}

/** @typedef {PageData.Unit | "calls" | "ratio" | "share"} Unit */

/** @type {Record<Unit, (value: number) => string>} */
const FORMATS = {
  ns: formatTime,
  bytes: formatBytes,
  count: formatCount,
  calls: formatCalls,
  ratio: (ratio) => `${fixed(ratio, 2)}×`,
  share: formatShare,
};

// The median of numbers in ascending order.
/** @param {number[]} numbers */
function medianOf(numbers) {
  const middle = (numbers.length - 1) / 2;
  return (numbers[Math.floor(middle)] + numbers[Math.ceil(middle)]) / 2;
}

/** @param {number} calls */
function formatCalls(calls) {
  return Number.isInteger(calls) ? String(calls) : fixed(calls, 2);
}

/** @param {number} share */
function formatShare(share) {
  return fixed(share * 100, 1) + "%";
}

/** @param {number[][]} shapes */
function formatShapes(shapes) {
  return shapes.map((shape) => "[" + shape.map((size) => (size < 0 ? "?" : size)).join(", ") + "]").join(", ");
}
