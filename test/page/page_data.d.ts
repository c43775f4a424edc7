// The data of the page: the JSON in its element "data", which torchprof/reports/html.py and page/data.py write.
// test/reports/test_page_script.py checks what they write against these types.

interface PageData {
  title: string;
  version: string;
  headline: string;
  /** The script, its commit and the date: of the run, or of both runs of a comparison. */
  program: string[];
  ran: string[];
  /** The findings of the first screen: what was observed, what to change, and what that gained, as in `Finding`. */
  help: [string, string, [number, number, number] | null][];
  /** Of a run without such findings: what was looked for. */
  noHelp: string;
  questions: { time: string; why: string; fit: string; changed: string; waits: string; "": string };
  legend: [sign: string, meaning: string][];
  largest: [title: string, parts: PageData.ReportPart[]][];
  facts: [name: string, value: string][];
  findings: PageData.Finding[];
  moreFindings: number;
  /** The field of the measure of which the headline speaks. */
  mainField: string;
  comparison?: PageData.Comparison;
  /** The recorded phases. The number of a phase is its index in `allPhases`. */
  phases: string[];
  allPhases: string[];
  /** The names of the rows of work of no layer, in the order of their nodes. */
  names: string[];
  /** What memory is used for. */
  kinds: string[];
  sources: PageData.Source[];
  areRanks: boolean;
  /** The source of the straggler. */
  opensOn: number | null;
  ranks: PageData.Ranks | null;
  /** Sentences on what makes all times uncertain. */
  uncertain: string[];
  /** The other warnings. */
  warnings: string[];
  /** What the figures mean. */
  notes: string[];
  pipelines: PageData.Pipeline[];
  layers: { parent: PageData.Integers; name: string[] };
  takes: PageData.Take[];
  columns: PageData.Column[];
  ranges: { parent: number[]; name: string[] };
  /** `values` and `bounds`: the index of a vector, by source and column. If sources are ranks, the last one is all ranks
   * together. */
  figures: { values: number[][]; vectors: PageData.Integers[]; bounds: number[][]; boundVectors: [bound: number, nodes: number][][] };
  measures: PageData.Measure[];
  /** The classes that have a color of their own. */
  classes: string[];
  operators: PageData.Operators;
  reports: PageData.Reports;
  samples: PageData.Samples;
  calls: [source: number, node: number, every: number, ns: number[]][];
  /** The largest peak of memory in a call. `node` has differences, `device` indices in `devices`. */
  peaks: { source: PageData.Integers; node: PageData.Integers; phase: PageData.Integers; devices: string[]; device: PageData.Integers; nbytes: PageData.Integers };
  devices: PageData.Device[];
  memory: PageData.Memory[];
  /** An SVG of the parts of a step. */
  step: string | null;
  /** By source an SVG, null if it has no points; if sources are ranks, the last one is all ranks together. */
  rooflines: (string | null)[];
  timeline: PageData.Timeline | null;
}

declare namespace PageData {
  /** What ran when, by start, outer spans first. `start` has differences. `name`: index in `names`, -1 for a layer. */
  interface Timeline {
    source: number;
    tracks: string[];
    /** The number of the thread of each track, 0 on a device. */
    threads: number[];
    names: string[];
    steps: number[];
    start: Integers;
    ns: Integers;
    track: Integers;
    node: Integers;
    phase: Integers;
    name: Integers;
    leftOut: number;
    dropped: number;
  }

  /** A column of integers: an array of bytes in the page, a list in the test of these types. */
  type Integers = ArrayLike<number> & Iterable<number>;

  type Unit = "ns" | "bytes" | "count";

  /** A rank, if the page has one run; else a run. */
  interface Source {
    name: string;
    take: number;
    measured: string[];
    /** How many steps were recorded; 0 if no loop was. */
    steps: number;
  }

  /** `gain`, `finding` and `remedy` are sentences; names of code are between backticks. `layers`: paths. */
  interface Finding {
    gain: string;
    place: string;
    layers: string[];
    finding: string;
    remedy: string;
    /** The share of the recorded time that the remedy saves, and the interval of that; null if it was not tried. */
    measured: [number, number, number] | null;
  }

  /** The layers of one run. `of`: the index of each node in `described`; -1 for layers that the run does not have.
   * `params`: those of each node and all below it; -1 if unknown. */
  interface Take {
    described: Described[];
    of: Integers;
    params: Integers;
  }

  interface Described {
    kind: string;
    settings: string;
    params: number | null;
    dtypes: string;
    inputs: number[][];
    outputs: number[][];
    shapesVary: boolean;
    training: boolean | null;
    sharedWith: string[];
  }

  /** A paragraph or a table. */
  type ReportPart = string | ReportTable;

  /** `units`: of the figures of each column, "" for texts. The last rows, as many as `sums`, are of all others. */
  interface ReportTable {
    headings: string[];
    units: string[];
    isText: boolean[];
    rows: ReportRow[];
    sums: number;
  }

  /** `node`: that of the layer that the row is about. A cell is a text, or a figure: in the format of its unit, or with
   * its text. */
  type ReportRow = [cells: (string | number | [text: string, value: number | string | null])[], node: number | null];

  interface AnyColumn {
    heading: string;
    key: string;
    where: "tree" | "panel" | "chart";
  }

  interface CostColumn extends AnyColumn {
    kind: "cost";
    phase: number;
    self: boolean;
    unit: Unit;
    /** The field of `Cost` of its measure; of memory, that of the allocated bytes. */
    field: string;
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
    /** Its heading in the report of operators. */
    operators: string;
    field: string;
    unit: Unit;
    /** The field of `Cost` that counts what the measure lacks: where it is not 0, the measure is a lower bound. */
    lowerBoundIf: string | null;
  }

  /** What ran in each layer and all below it, by phase (-1: several), as columns; those of a layer are in a row.
   * `node` has differences. */
  interface Operators {
    /** So many of the largest layers have them. */
    layers: number;
    names: [kind: string, name: string, full?: string][];
    source: Integers;
    node: Integers;
    phase: Integers;
    name: Integers;
    calls: Integers;
    isPart: Integers;
    /** Of all phases, whether of one phase or not. */
    isAll: Integers;
    self: Record<string, Integers>;
    /** The total without the self. */
    inside: Record<string, Integers>;
  }

  /** `of`: by source, the indices in `contents` for each phase and for all phases, or only one index. */
  interface Reports {
    tabs: { title: string; of: (number | null)[][] }[];
    contents: ReportPart[][];
  }

  type SampleMeasure = "cpu_ns" | "step_cpu_ns" | "step_device_ns";

  /** Distributions of more than one value. `node` and the points of each have differences, `measure` has indices in
   * `measures`; `size` is the number of points. `below` and `above`: by how much the smallest and the largest value of
   * all are beyond the points. */
  interface Samples {
    source: Integers;
    node: Integers;
    phase: Integers;
    measures: SampleMeasure[];
    measure: Integers;
    count: Integers;
    below: Integers;
    above: Integers;
    median: Integers;
    first: Integers;
    size: Integers;
    points: Integers;
  }

  interface Ranks {
    /** Which ranks the figures of the page are of. */
    about: string;
    report: ReportPart[];
    unit: string;
    /** How many ranks are compared. */
    compared: number;
    /** SVGs of the own work of each rank by layer: in each of `phases`, if there are several, and in all. */
    maps: (string | null)[];
    /** If not all ranks are on the page: a table of the own work in one step over all ranks. */
    quantiles: ReportTable[];
  }

  /** Pipelines that do the same. `name`: that of their run, if there are several. */
  interface Pipeline {
    name: string;
    report: ReportPart[];
    /** An SVG of a step. */
    step: string | null;
  }

  interface Device {
    source: number;
    device: string;
    /** An SVG of how it used its time; null if nothing ran on it. */
    picture: string | null;
    report: ReportPart[];
  }

  interface Memory {
    source: number;
    device: string;
    report: ReportPart[];
    /** An SVG of memory over time. */
    picture: string | null;
    levels: Levels | null;
    moves: Moves | null;
    dropped: number;
  }

  /** Allocations, and frees with negative bytes, in the order of time; `time` has differences, `kind` indices in `kinds`. */
  interface Moves {
    time: Integers;
    nbytes: Integers;
    node: Integers;
    kind: Integers;
  }

  /** Live memory, as a step function: the bytes from each time on. */
  interface Levels {
    lastNs: number;
    timesNs: number[];
    nbytes: number[];
  }

  interface Comparison {
    /** By source: the factor that makes figures be for one call or one step. */
    scale: number[];
    /** Figures are for one call or one step; null: they are totals. */
    per: string | null;
    notes: string[];
    whole: string[];
    /** An SVG of the largest changes. */
    picture: string;
    layerChanges: [what: string, lines: string[]][];
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
