// Numbers as text, to the letter as torchprof/cost.py writes them.

const UNKNOWN = "–";
const AT_LEAST = "≥ ";

// How far a figure is known, as torchprof/cost.py numbers it; of a table, there may be no such row, too.
const BOUND = { EXACT: 0, AT_LEAST: 1, UNKNOWN: 2, BLANK: 3, NO_ROW: 4 };

// How far a sum is known that lacks something, or does not.
function boundOfSum(value, isComplete) {
  return isComplete ? BOUND.EXACT : value ? BOUND.AT_LEAST : BOUND.UNKNOWN;
}

// A figure as a cell: { value, bound }, with its unit.
function formatFigure({ value, bound }, unit) {
  if (bound >= BOUND.BLANK) return "";
  return bound === BOUND.UNKNOWN ? UNKNOWN : (bound === BOUND.AT_LEAST ? AT_LEAST : "") + FORMATS[unit](value);
}

function fixed(value, digits) {
  // Python rounds a tie to the even digit, toFixed away from zero. Only a multiple of 2^-(digits + 1) can be a tie.
  if (Math.abs(value * 2 ** (digits + 1)) % 2 === 1) {
    const low = Math.floor(value * 10 ** digits);
    return ((low % 2 === 0 ? low : low + 1) / 10 ** digits).toFixed(digits);
  }
  return value.toFixed(digits);
}

function formatTime(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return fixed(ns / 1e9, 3) + "s";
  if (size >= 1e6) return fixed(ns / 1e6, 3) + "ms";
  return fixed(ns / 1e3, 3) + "us";
}

function formatBytes(bytes) {
  const nbytes = Number(fixed(bytes, 0)); // the mean over calls need not be whole
  for (const [unit, size] of [["GB", 2 ** 30], ["MB", 2 ** 20], ["KB", 2 ** 10]]) {
    if (Math.abs(nbytes) >= size) return fixed(nbytes / size, 2) + " " + unit;
  }
  return nbytes + " B";
}

function formatCount(number) {
  for (const [unit, size] of [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["K", 1e3]]) {
    if (Math.abs(number) >= size * 0.999995) return fixed(number / size, 2) + " " + unit;
  }
  return Number.isInteger(number) ? String(number) : fixed(number, 2);
}

const FORMATS = {
  ns: formatTime,
  bytes: formatBytes,
  count: formatCount,
  calls: formatCalls,
  ratio: (ratio) => `${fixed(ratio, 2)}×`,
  verdict: String,
};

function formatCalls(calls) {
  return Number.isInteger(calls) ? String(calls) : fixed(calls, 2);
}

function formatShare(share) {
  return fixed(share * 100, 1) + "%";
}

function formatShapes(shapes) {
  return shapes.map((shape) => "[" + shape.map((size) => (size < 0 ? "?" : size)).join(", ") + "]").join(", ");
}
