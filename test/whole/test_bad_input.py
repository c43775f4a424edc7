"""Bad input to every public function: the error says what was wrong, and the model is unchanged."""

from __future__ import annotations

import copy
import gzip
import io
import json
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from build.all_kinds import KINDS
from build.golden import message
from build.models import Layers, profiled
from build.snapshots import snapshot
from build.warnings import run_warnings
from torch import nn

import torchprof
from torchprof import Profile, TorchprofError, load
from torchprof.reports import known
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.meta import Meta, Peak
from torchprof.run.rows import Around, Rows
from torchprof.run.run import Run
from torchprof.run.timeline import DeviceTime, Held, Lane, Memory, Pipeline, Spans, StageAction, StreamTime, Timeline
from torchprof.run.words import OUTSIDE, Frame, FrameKind, Signature


class Net(Layers):
    def __init__(self) -> None:
        super().__init__(features=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()), head=nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A model that must be unchanged at the end of the test, and can be profiled then."""
    made = Net().eval()
    before = snapshot(made, values=True)
    yield made
    assert snapshot(made, values=True) == before
    prof = profiled(made, torch.rand(2, 3))
    assert {node.calls for node in prof.run.tree().walk()} == {1}


@pytest.fixture
def prof() -> Profile:
    model = Net().eval()
    x = torch.rand(2, 3)
    return profiled(model, x)


def refused(call: Callable[[], Any], *words: str, error: type[BaseException] = TorchprofError) -> None:
    """The call raises this error with these words, and without a chained error."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    assert len(text) < 2000


def enter(*args: Any, **options: Any) -> None:
    with Profile(*args, **options):
        pytest.fail("the block must not run")


# Profile


def test_anything_but_a_model_raises(golden: Callable[..., None]) -> None:
    several = [None, 5, "resnet18", Net, {"net": 1}, [], (), [nn.ReLU(), 5], [[nn.ReLU()]]]
    golden({f"Profile({given})": message(lambda given=given: enter(given)) for given in several})
    for given in (lambda x: x, torch.sin, torch.rand(2)):
        refused(lambda given=given: enter(given), "torch.nn.Module")


def test_a_missing_model_raises_typeerror() -> None:
    refused(lambda: Profile(), "model", error=TypeError)  # type: ignore[call-arg]


def test_a_compiled_function_raises() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    refused(lambda: enter(compiled), "compiled function", "module")


def test_unknown_and_superfluous_arguments_raise_typeerror(model) -> None:
    refused(lambda: enter(model, use_gpu=True), "use_gpu", error=TypeError)
    refused(lambda: enter(model, True, False, False, None, "cuda"), "positional", error=TypeError)


def test_wrong_options_of_a_profile_raise(model, golden: Callable[..., None]) -> None:
    devices = ["cuad", "gpu", "cuda:0", "", 1, True, torch.device("cuda"), []]
    warmups = [-1, 1.5, "2", None, [1], True]
    paths = [
        *(5, 3.5, [5], [None], [()], [("Net", 0)], [("Net", ("features",))], [nn.ReLU()], nn.ReLU(), [b"features"], ""),
        *([""], ["features..0"], ["."], ["features.**"], ["heads"], [("Net", "features", "7")]),
        *(["features", "fetures.0"], ["net.features"], ("Net", "features", "0")),
    ]
    golden(
        {
            f"{option}={value!r}": message(enter, model, **{option: value})
            for option, values in (("use_device", devices), ("warmup", warmups), ("paths", paths))
            for value in values
        }
    )


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_two_contradicting_devices_raise(model, device) -> None:
    refused(lambda: enter(model, use_cuda=True, use_device=device), "use_cuda", repr(device), "give only one")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_the_same_device_given_twice_is_accepted(model) -> None:
    prof = profiled(model, torch.rand(2, 3), use_cuda=True, use_device="cuda")
    assert prof.run.meta.device == "cuda"


def test_after_an_error_on_entry_the_profile_counts_as_not_entered(model) -> None:
    prof = Profile(model, paths=["nonsense"])
    refused(prof.__enter__, "nonsense")
    assert (prof.entered, prof.exited, prof.traces, prof.raw()) == (False, False, (), None)
    assert str(prof) == "<unfinished torchprof.profile>"


def test_leaving_a_profile_that_was_not_entered_does_nothing(model) -> None:
    prof = Profile(model)
    assert not prof.__exit__(None, None, None)
    assert prof.raw() is None
    with prof:
        model(torch.rand(2, 3))
    first = str(prof)
    assert not prof.__exit__(None, None, None)
    assert str(prof) == first


def test_a_disabled_profile_checks_and_does_nothing() -> None:
    with Profile(5, enabled=False, paths=7, use_device="nonsense") as prof:  # type: ignore[arg-type]
        pass
    assert prof.raw() is None


def test_reading_results_too_early_or_of_a_disabled_profile_raises(model) -> None:
    prof = Profile(model)
    refused(lambda: prof.run, "not ended")
    refused(lambda: prof.key_averages(), "not ended")
    off = Profile(model, enabled=False)
    refused(lambda: off.run, "enabled=False")


def test_unknown_names_of_the_package_raise_attributeerror() -> None:
    refused(lambda: torchprof.Profiler, "torchprof", "Profiler", error=AttributeError)


# display


WRONG_OF_TREE = [
    *({"depth": -1}, {"depth": 1.5}, {"depth": "2"}, {"top": -3}, {"top": 2.0}, {"top": "all"}),
    *({"sort_by": "cpu_totl"}, {"sort_by": "cuda_total"}, {"sort_by": "backward_cpu_total"}, {"sort_by": "Module"}),
    *({"sort_by": ""}, {"sort_by": 3}, {"sort_by": ["cpu_total"]}),
]


def test_wrong_options_of_display_raise(prof, golden: Callable[..., None]) -> None:
    before = str(prof)
    options = [*WRONG_OF_TREE, {"file": "table.txt"}, {"file": Path("table.txt")}, {"file": 3}]
    golden({str(each): message(prof.display, **each) for each in options})
    for wrong, words in (("githb", ["'githb'", "'github'"]), (5, ["5"]), (["github"], ["github"])):
        refused(lambda wrong=wrong: prof.display(tablefmt=wrong), *words)
    assert str(prof) == before


def test_a_binary_or_closed_file_raises(prof) -> None:
    refused(lambda: prof.display(file=io.BytesIO()), error=(TorchprofError, TypeError))  # type: ignore[arg-type]
    closed = io.StringIO()
    closed.close()
    refused(lambda: prof.display(file=closed), "closed", error=ValueError)


def test_unknown_options_of_display_raise_typeerror(prof) -> None:
    refused(lambda: prof.display(colour=True), "colour", error=TypeError)
    refused(lambda: prof.display(False, 2), "positional", error=TypeError)


# Run


def test_wrong_options_of_tree_raise(prof, golden: Callable[..., None]) -> None:
    phases = [{"phase": phase} for phase in ("forwards", "Backward", "", 0, ["forward"])]
    roots = [{"root": root} for root in (1, -1, "Net", None, 0.5)]
    golden({str(each): message(prof.run.tree, **each) for each in (*phases, *roots)})


def test_unknown_phases_raise(prof) -> None:
    refused(lambda: prof.run.ops("forwards"), "'forwards'", "'forward'")
    refused(lambda: prof.run.no_layer("forwards"), "'forwards'", "'forward'")


WRONG_OF_REPORTS: list[tuple[str, str, list[dict[str, Any]]]] = [
    ("training", "trees", [{}]),
    ("training", "", [{}]),
    ("training", "tree", [{"dept": 2}, {"run": 2}, {"depth": -2}]),
    ("training", "overview", [{"rows": -1}, {"places": -1}, {"width": -1}]),
    ("training", "notebook", [{"depth": -1}]),
    ("training", "summary", [{"depth": -1}]),
    ("training", "types", [{"sort_by": "nothing"}, {"phase": "sideways"}, {"top": -1}]),
    ("training", "top", [{"limit": -1}, {"top": -1}]),
    ("training", "python", [{"limit": -1}, {"lines": 1.5}]),
    ("training", "ops", [{"layer": "c"}, {"layer": "a.*"}, {"layer": 3}, {"phase": "backwards"}, {"sort_by": "cpu"}]),
    ("training", "ops", [{"sort_by": ["calls"]}, {"sort_by": "cuda_time_total"}, {"top": -1}, {"top": 2.5}]),
    ("training", "ops", [{"group_by_stack_n": -1}, {"group_by_stack_n": 3}, {"group_by_input_shape": True}]),
    ("training", "ops", [{"group_by_input_shapes": True}, {"op": "mm"}, {"op": "aten::mm", "phase": "backward"}]),
    ("training", "ops", [{"op": 3}, {"op": "aten::mm", "phase": "all"}, {"op": "aten::mm", "sort_by": "operator"}]),
    ("training", "ops", [{"op": "aten::mm", "layer": "a", "group_by_stack_n": 1}]),
    ("training", "steps", [{}]),
    ("training", "chrome-trace", [{}]),
    ("training", "memory", [{}]),
    ("memory", "memory", [{"phase": "backwards"}, {"sort_by": "size"}, {"depth": -1}, {"top": "all"}, {"lines": 3}]),
    ("eager", "kernels", [{}]),
    ("device_not_recorded", "kernels", [{}]),
    ("on_a_device", "kernels", [{"layer": "c"}, {"phase": "fore"}, {"sort_by": "cpu_total"}, {"top": -3}, {"op": "x"}]),
    ("on_a_device", "device", [{}]),
    ("ranks", "ranks", [{"sort_by": "speed"}, {"top": -1}, {"depth": "all"}, {"sort_by": "waiting"}]),
    ("pipelined", "pipeline", [{"top": -1}]),
    ("pipelined", "steps", [{"depth": -1}, {"top": "all"}]),
]


def test_wrong_options_of_reports_raise(golden: Callable[..., None]) -> None:
    golden(
        {
            f"{kind}: {report} {each or ''}".strip(): message(KINDS[kind]().report, report, **each)
            for kind, report, options in WRONG_OF_REPORTS
            for each in options
        }
    )
    refused(lambda: KINDS["eager"]().report(5), "5", "'tree'")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "reports"),
    [
        ("training", "tree ops top python summary types"),
        ("on_a_device", "kernels"),
        ("compiled_fused", "compiled calls"),
        ("ranks", "ranks"),
        ("pipelined", "steps pipeline"),
    ],
)
def test_an_unknown_format_of_tables_raises(kind: str, reports: str) -> None:
    for report in reports.split():
        refused(lambda report=report: KINDS[kind]().report(report, tablefmt="nice"), "no format 'nice'")


def test_unknown_indices_of_rows_raise(prof) -> None:
    rows = prof.run.rows
    refused(lambda: rows[len(rows)], error=IndexError)
    refused(lambda: rows["x"], error=TypeError)  # type: ignore[index]
    assert rows[-1] == list(rows)[-1]


def test_paths_where_nothing_can_be_saved_raise(prof, tmp_path) -> None:
    refused(lambda: prof.run.save(tmp_path / "no" / "such" / "folder.json"), "folder.json", "does not exist")
    refused(lambda: prof.run.export(tmp_path / "no" / "such" / "run.csv"), "run.csv", "does not exist")
    refused(lambda: prof.run.save(tmp_path), error=IsADirectoryError)
    refused(lambda: prof.run.save(None), error=TypeError)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


# load


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    """The JSON document of a run made by hand, with some of everything: two layers, three rows, one sample, the memory
    and the time of one device, two steps of a timeline, and two of a pipeline."""
    shapes = {"input_shapes": ((1, 2),), "output_shapes": ((1, 3),), "output_bytes": 12}
    linear = Layer(("Net", "a"), "Linear", 6, 6, 24, (("float32", 24),), shared_with=(("Net", "b"),), **shapes)
    layers = (Layer(("Net",), "Net"), linear)
    columns = {name: array("q", [0, 0, 0]) for name in Rows.COLUMNS}
    columns["layer"] = array("q", [0, 1, OUTSIDE])
    columns["phase"] = array("q", [0, 1, 0])
    columns["within"] = array("q", [0, 1, 0])
    columns["frames"] = array("q", [0, 1, 1])
    columns["calls"] = array("q", [1, 1, 1])
    columns["cpu_ns"] = array("q", [10, 20, 30])
    signature = Signature(((4, 3), (), None), ("float", "Scalar", "TensorList"), (None, 1.5, (1, 2)), ("a.py(3): f",))
    within = ((), (Around(0, "forward", (Frame(FrameKind.LABEL, "mine"),)),))
    rows = Rows(layers, ((), (Frame(FrameKind.OP, "aten::mm", signature),)), ("cpu",), columns, within)
    samples = {SampleKey(0, "forward", 0, "cpu", "cpu_ns"): Spread.of([(0, 10)])}
    held = (Held(1, "forward", "activations", 64, 1), Held(OUTSIDE, "forward", "unknown", 8, 0))
    memory = Memory("cpu", 0, 72, 5, held, (("parameters", 24),), (("reserved", 0, 2048),))
    lanes = (Lane("cpu", 1), Lane("cuda:0", 1))
    spans = Spans(lanes, ("mine",), {name: array("q", [0, 0]) for name in Spans.COLUMNS}, (0, 5))
    timeline = Timeline(("cpu",), {name: array("q", [0, 0]) for name in Timeline.COLUMNS}, 0, spans)
    meta = Meta(
        ("Net",),
        paths=(("Net", "a"),),
        busy_ns=(("cuda:0", 3),),
        peaks=(Peak("cpu", "float32", 2, 1e9, 1e9),),
        warnings=run_warnings("Doubt."),
        versions=(("torch", "2.13.0"),),
        flags=(("use_cuda", True),),
    )
    action = StageAction(0, "F", 1, (3, 4), (0, 1))
    streams = (StreamTime(7, 4, 6_500, 6_000, 0, 1_000), StreamTime(20, 1, 6_000, 0, 6_000, 0))
    device = DeviceTime("cuda:0", 0, 10_000, 9_000, 6_000, 6_000, 1_500, 3_500, streams)
    pipeline = Pipeline("cpu", 0, "ScheduleGPipe", 2, (0, 1), ((0, 0),), 2, (5, 6), (action,))
    run = Run((meta,), layers, rows, samples, (memory,), timeline, pipelines=(pipeline,), device_times=(device,))
    return json.loads(_text(run))


def _text(run: Run) -> str:
    with tempfile.TemporaryDirectory() as folder:
        run.save(Path(folder) / "run.json")
        return (Path(folder) / "run.json").read_text(encoding="utf-8")


def test_a_valid_file_is_loaded(saved, tmp_path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(saved), encoding="utf-8")
    run = load(file)
    assert [node.self.cpu_ns for node in run.tree().walk()] == [10, 20]
    assert run.memory[0].held[0].kind == "activations"
    assert len(run.timeline) == 2 and isinstance(run.timeline.spans.lanes[0], Lane)
    assert isinstance(run.device_times[0].streams[0], StreamTime)
    assert load(str(file)) == run
    run.save(tmp_path / "again.json.gz")
    assert load(tmp_path / "again.json.gz") == run


def test_missing_files_raise_pythons_own_errors(tmp_path) -> None:
    refused(lambda: load(tmp_path / "nowhere.json"), "nowhere.json", error=FileNotFoundError)
    refused(lambda: load(tmp_path), error=IsADirectoryError)
    refused(lambda: load(None), error=TypeError)  # type: ignore[arg-type]
    refused(lambda: load(5), error=TypeError)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["JSON"]),
        (b"   \n", ["JSON"]),
        (b"not json at all", ["JSON"]),
        (b'{"format": "torchprof-run", "schema": 1', ["JSON"]),
        (b"\xff\xfe\x00\x01", ["JSON"]),
        (b"\x1f\x8b", ["JSON"]),
        (b"\x1f\x8b not gzip", ["JSON"]),
        (gzip.compress(b"{}", mtime=0)[:-9], ["JSON"]),
        (gzip.compress(b'{"format": "torchprof-run"}' * 9, mtime=0)[:12] + b"\x00" * 30, ["JSON"]),
        (gzip.compress(b"not json", mtime=0), ["JSON"]),
        (gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20, ["JSON"]),
        (b"[" * 100_000, ["JSON"]),
        (b"null", ["not a saved run", "save"]),
        (b"[]", ["not a saved run", "save"]),
        (b"3", ["not a saved run", "save"]),
        (b'"torchprof-run"', ["not a saved run", "save"]),
        (b"{}", ["not a saved run", "save"]),
        (b'{"traceEvents": []}', ["not a saved run", "save"]),
        (b'{"format": "something else", "schema": 1}', ["not a saved run", "save"]),
        (b'{"format": "torchprof-run"}', ["schema", "None"]),
        (b'{"format": "torchprof-run", "schema": "1"}', ["schema"]),
        (b'{"format": "torchprof-run", "schema": 999}', ["schema", "999", "newer torchprof"]),
        (b'{"format": "torchprof-run", "schema": 1}', ["damaged"]),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_files_that_are_not_saved_runs_raise(content, words, tmp_path) -> None:
    file = tmp_path / "given.json"
    file.write_bytes(content)
    refused(lambda: load(file), "given.json", *words)


GONE = object()


def _set(document: dict[str, Any], where: str, value: Any) -> None:
    """Set or delete one part of the document, given by its path: ``rows.layer.0``."""
    *steps, last = [int(step) if step.isdigit() else step for step in where.split(".")]
    here: Any = document
    for step in steps:
        here = here[step]
    if value is GONE:
        del here[last]
    else:
        here[last] = value


DAMAGES: dict[str, list[Any]] = {
    "rows": [GONE, []],
    **{f"rows.layer.{at}": [value] for at, value in ((0, 2), (1, -3), (2, 99))},
    "rows.layer": [GONE],
    **{
        f"rows.{name}": [value, -1, 99]
        for name, value in (("phase.0", 3), ("frames.1", 2), ("device.0", 1), ("within.1", 2))
    },
    "rows.rank.0": [3, -1],
    "rows.calls.0": [-1],
    "rows.cpu_ns": [GONE, [1, 2], "abc"],
    "rows.cpu_ns.0": [1.5, "1", None, 2**80],
    "layers": [GONE, 3, []],
    "layers.0": [GONE],  # the child has no parent
    "layers.1": [["Net", "a"]],
    "layers.1.path": [GONE, [], "Net.a", ["Net", 3], ["Other", "a"], ["Net"]],
    "frames": [GONE],
    "frames.1": [[["op"]], ["op"], 3],
    "frames.1.0": [["op", "aten::mm"]],
    "frames.1.0.0": [3, "no such kind"],
    "frames.1.0.1": [None],
    "frames.1.0.2": [-1, 2, True],
    "signatures": [GONE, []],
    "signatures.0": [[[[4, 3]]]],
    "signatures.0.1": [None],
    "signatures.0.1.0": [3],
    "signatures.0.2.1": [{}],
    "signatures.0.3": ["a.py(3): f"],
    "within": [GONE, [], [[]]],
    "within.1": [3],
    "within.1.0": [[]],
    "within.1.0.0": [2, -3, 0.5, "0"],
    "within.1.0.1": ["sideways", 0],
    "within.1.0.2": [[["label"]], "mine"],
    "within.1.0.2.0.2": [2],
    "devices": [GONE, [], 3],
    "metas": [GONE, [], 3],
    "metas.0": [GONE],
    "metas.0.model": [GONE],
    "metas.0.warnings": [[1], [-1], ["0"], 0],
    "stored_warnings.0": ["x", {}, {"code": 1}, {"code": "x", "facts": []}],
    "stored_warnings.0.layers": [[99], [-1], [True]],
    **{f"{where}.colour": ["red"] for where in ("layers.1", "metas.0", "samples.0", "memory.0", "device_times.0")},
    "samples": [GONE, 3],
    "samples.0.layer": [99, GONE],
    "samples.0.phase": ["sideways"],
    "samples.0.rank": [1],
    "samples.0.count": [GONE, 0],
    "samples.0.first": ["10"],
    "samples.0.sample": [[]],
    "samples.0.sample.0": [1.5],
    "samples.0.hashes": [GONE, [], [1, 2]],
    "samples.0.hashes.0": ["1", 2**63],
    "memory": [GONE, 3],
    "memory.0": [[]],
    "memory.0.device": [GONE, 3],
    "memory.0.rank": [1],
    "memory.0.peak_bytes": ["72"],
    "memory.0.peak_ns": [None],
    "memory.0.held": [None],
    "memory.0.held.0": [[1, "forward", "activations", 64]],
    "memory.0.held.0.0": [2, -3, 0.5],
    "memory.0.held.0.1": ["sideways"],
    "memory.0.held.0.2": ["furniture"],
    "memory.0.held.0.3": ["64"],
    "memory.0.held.0.4": [None],
    "memory.0.before": [[["parameters"]]],
    "memory.0.allocator": [[["reserved", 0]]],
    "memory.0.allocator.0.1": ["0"],
    "timeline": [GONE, []],
    "timeline.devices": [GONE, []],
    "timeline.devices.0": [3],
    "timeline.dropped": [GONE, 1.5],
    "timeline.time_ns": [GONE],
    "timeline.nbytes": [[1]],
    "timeline.nbytes.0": [0.5],
    **{
        f"timeline.{name}.0": values
        for name, values in {"device": [1, -1], "layer": [2, -3], "phase": [3, -1], "kind": [8, -2]}.items()
    },
    "timeline.spans": [GONE, []],
    **{f"timeline.spans.{name}": [GONE] for name in ("lanes", "names", "steps", "dropped", *Spans.COLUMNS)},
    **{f"timeline.spans.{name}.0": [None, 1.5, "1", 2**70] for name in Spans.COLUMNS},
    **{
        f"timeline.spans.{name}.1": [low, 99]
        for name, low in (("lane", -1), ("layer", -3), ("phase", -1), ("name", -2))
    },
    "timeline.spans.end_ns.1": [-1],
    "timeline.spans.start_ns.1": [2**62],
    "timeline.spans.start_ns": [[1]],
    "timeline.spans.steps": [[3, 2], ["1"]],
    "timeline.spans.dropped": ["1"],
    "timeline.spans.lanes": [[["cpu"]]],
    "timeline.spans.lanes.0.1": ["1"],
    "timeline.spans.names": [[3]],
    "unfinished": [None],
    "pipelines": [None],
    "pipelines.0": [3, {}],
    "pipelines.0.rank": [3, None],
    "pipelines.0.step_ns": [[], [1, 2, 3], [1.5], 7],  # it has two steps
    "pipelines.0.roots.0": [[0], [0, 99], [0, -3]],
    "pipelines.0.actions.0": [[0, "F", 0, [1, 2]]],
    "pipelines.0.actions.0.0": [1, None],  # it has stage 0 alone
    "pipelines.0.actions.0.1": ["X", "", 0],
    "pipelines.0.actions.0.3": [[], [1], [1, 2, 3], [1, None]],
    "device_times.0.busy_ns": [10_001, -1, 5_999],  # more than the span; less than a part
    "device_times.0.span_ns": [1.5],
    "device_times.0.overlap_ns": [6_001, -1],
    "device_times.0.copy_ns": [499],  # less than the busy time without computing and communication
    "device_times.0.streams": [[[7, 1, 1, 1, 0]], [[7, 1, 1, -1, 0, 0]], None],
    "device_times.0.rank": [1],
    "device_times.0.device": [0],
}


@pytest.mark.parametrize(
    ("where", "value"),
    [(where, value) for where, values in DAMAGES.items() for value in values],
    ids=lambda value: "gone" if value is GONE else repr(value)[:30],
)
def test_damaged_files_raise(saved, where, value, tmp_path) -> None:
    document = copy.deepcopy(saved)
    _set(document, where, value)
    file = tmp_path / "given.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    index_of_a_row = where.startswith("rows.") and type(value) is int and value < 100
    refused(lambda: load(file), "given.json", "damaged", *where.split(".")[1:2] * index_of_a_row)


def _places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all parts of a document, nested ones included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, part in inner:
        yield (*way, step)
        yield from _places(part, (*way, step))


def test_if_any_part_of_a_file_is_replaced_it_is_refused_or_its_reports_work(saved, tmp_path) -> None:
    """Each part of a file in turn is deleted, and replaced by values of every type."""
    file = tmp_path / "given.json"
    text = json.dumps(saved)
    file.write_text(text, encoding="utf-8")
    sound = load(file)
    assert sound.report("tree")
    refusals = 0
    for way in _places(saved):
        for value in (GONE, None, "x", 1.5, [3]):
            here = document = json.loads(text)  # a copy
            for step in way[:-1]:
                here = here[step]
            if value is GONE:
                del here[way[-1]]
            else:
                here[way[-1]] = value
            file.write_text(json.dumps(document), encoding="utf-8")
            try:
                run = load(file)
            except TorchprofError:
                refusals += 1
                continue
            for report in known():
                try:
                    run.report(report)
                except TorchprofError as error:
                    assert "damaged" not in str(error)
            run.save(tmp_path / "again.json")
    assert refusals > 1_000


def test_very_deeply_nested_lists_raise(saved, tmp_path) -> None:
    deep: list[Any] = []
    for _ in range(600):
        deep = [deep]
    document = copy.deepcopy(saved)
    document["signatures"][0][0] = deep
    file = tmp_path / "given.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    refused(lambda: load(file), "given.json", "damaged")


def test_a_truncated_file_raises(saved, tmp_path) -> None:
    text = json.dumps(saved)
    file = tmp_path / "given.json"
    for length in range(0, len(text) - 1, 97):
        file.write_text(text[:length], encoding="utf-8")
        refused(lambda: load(file), "given.json")
    packed = gzip.compress(text.encode())
    for length in range(0, len(packed) - 1, 37):
        file.write_bytes(packed[:length])
        refused(lambda: load(file), "given.json")


def test_options_that_torchprof_1_4_0_did_not_have_cannot_be_set(model: nn.Module) -> None:
    prof = Profile(model, with_flops=True)
    for name, value in Profile.__init__.__kwdefaults__.items():
        with pytest.raises(TorchprofError, match=rf"{name}.*write Profile\(model, {name}="):
            setattr(prof, name, value)
    assert prof.with_flops
    prof.paths, prof.use_cuda, prof.profile_memory, prof.enabled = ["head"], False, True, False
    with prof:
        model(torch.rand(2, 3))
    assert not prof.entered
    prof.enabled = True
    with prof:
        model(torch.rand(2, 3))
    assert [trace.path for trace in prof.traces if trace.leaf] and "cpu_allocated" in prof.run.meta.measured
    assert {row.layer.name for row in prof.run.rows if row.layer} == {"Net.head"}
