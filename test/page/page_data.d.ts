// What the page reads from its element "told": JSON that torchprof/reports/html.py, page_data.py, page_cells.py and
// compare_html.py write. test/test_page_data.py holds what they write against these types.

interface PageData {
  title: string;
  version: string;
  headline: string;
  facts: [name: string, value: string][];
  advice: [layer: string, finding: string, gain: string, remedy: string][];
  moreAdvice: number;
  comparison?: PageData.Comparison;
  /** The phases that were recorded; those of numbers are `allPhases`. */
  phases: string[];
  allPhases: string[];
  /** What work of no layer is called, in the order of its nodes. */
  names: string[];
  kinds: string[];
  sources: PageData.Source[];
  areRanks: boolean;
  ranks: PageData.Ranks | null;
  doubts: string[];
  layers: { parent: number[]; name: string[] };
  takes: PageData.Take[];
  columns: PageData.Column[];
  /** `values` by source and column; where single ranks are shown, the last source is all of them. */
  ranges: { parent: number[]; name: string[]; values: number[][][] };
  /** `of` by source and column: the number of a vector. */
  bounds: { of: number[][]; vectors: [bound: number, nodes: number][][] };
  measures: PageData.Measure[];
  fields: string[];
  frames: [kind: string, name: string][];
  chains: number[][];
  within: [node: number, phase: number, chain: number][][];
  rows: { node: number[]; chain: number[]; [column: string]: number[] };
  samples: PageData.Sample[];
  calls: [source: number, node: number, every: number, ns: number[]][];
  peaks: [source: number, node: number, phase: number, device: string, nbytes: number][];
  devices: PageData.Device[];
  memory: PageData.Memory[];
  roofs: PageData.Roof[];
}

declare namespace PageData {
  type Unit = "ns" | "bytes" | "count";

  /** A rank of the only take, or a take. */
  interface Source {
    name: string;
    take: number;
    measured: string[];
  }

  /** What layers are in one run, by node; null where it does not have them. */
  interface Take {
    kind: (string | null)[];
    settings: (string | null)[];
    params: (number | null)[];
    dtypes: (string | null)[];
    inputs: (number[][] | null)[];
    outputs: (number[][] | null)[];
    shapesVary: (boolean | null)[];
    training: (boolean | null)[];
    compiled: (boolean | null)[];
    selected: (boolean | null)[];
    sharedWith: (string[] | null)[];
    traffic: (number | null)[];
  }

  interface AnyColumn {
    heading: string;
    key: string;
    where: "tree" | "panel" | "line";
  }

  interface CostColumn extends AnyColumn {
    kind: "cost";
    phase: number;
    self: boolean;
    unit: Unit;
    fields: [field: string, sign: number][];
  }

  interface RateColumn extends AnyColumn {
    kind: "rate";
    phase: number;
    onDevice: boolean;
    unit: "count";
  }

  interface ParamsColumn extends AnyColumn {
    kind: "params";
    unit: "count";
  }

  interface CallsColumn extends AnyColumn {
    kind: "calls";
    unit: "calls";
  }

  type Column = CostColumn | RateColumn | ParamsColumn | CallsColumn;

  interface Measure {
    heading: string;
    field: string;
    unit: Unit;
    doubt: string | null;
  }

  type Sample = [
    source: number, node: number, phase: number, measure: "cpu_ns" | "step_cpu_ns" | "step_device_ns",
    count: number, sum: number, least: number, median: number, most95: number, most: number, first: number, points: number[],
  ];

  type Times = [times: number, of: number] | null;

  interface Ranks {
    sentences: string[];
    unit: string;
    ranks: number[];
    lines: [
      work: number | null, slowest: Times, waiting: number | null, waitsLonger: boolean, last: Times, steps: number, typical: number | null,
    ][];
    /** In one step, in ns, of each rank. */
    work: [node: number, phase: number, ns: (number | null)[]][];
  }

  interface Device {
    source: number;
    device: string;
    spanNs: number;
    busyNs: number;
    communicationNs: number;
    /** They add up to the span. */
    parts: [computing: number, overlap: number, exposed: number, copying: number, idle: number];
    streams: Stream[];
  }

  type Stream = [stream: number, kernels: number, busy: number, computing: number, communication: number, copying: number];

  interface Memory {
    source: number;
    device: string;
    peakBytes: number;
    peakNs: number;
    held: [node: number, phase: number, kind: string, nbytes: number, blocks: number][];
    before: [kind: string, nbytes: number][] | null;
    course: Course | null;
    dropped: number;
  }

  /** Memory over time: from each of the times on there is so much, by kind, the last of them unknown. */
  interface Course {
    lastNs: number;
    timesNs: number[];
    heights: number[][];
  }

  type Roof = [device: string, dtype: string, threads: number, flopsPerS: number, bytesPerS: number];

  interface Comparison {
    /** By source: what to multiply with, where the figures are for one call or one step. */
    scale: number[];
    of: string | null;
    notes: string[];
    whole: string[];
    told: [what: string, lines: string[]][];
    quantities: Quantity[];
    /** By node. */
    pairs: Pair[];
  }

  interface Quantity {
    key: string;
    heading: string;
    unit: Unit;
    phase: number;
    self: boolean;
    field: string;
  }

  interface Pair {
    how: string;
    was?: string | null;
    is?: string | null;
    differs: [what: string, before: string, after: string][];
    changes: Record<string, Change>;
  }

  type Change = [
    before: number | null, after: number | null, difference: number | null, verdict: string,
    atLeast: [before: number | null, after: number | null],
  ];
}
