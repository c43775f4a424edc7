"""``from_trace``: where layers come from (labels, modules, ranges, a model), and which files are refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from build.models import Layers, Mlp, Several
from build.trace_files import trace_event, write
from build.traced_runs import X, annotated, names_of, settle, trace_in, training, two_steps, with_modules, with_ranges
from build.warnings import sentences
from torch import Tensor, nn

import torchprof
from torchprof.record import layers
from torchprof.run.run import Run

# The model, and the header


def test_source_lines_of_operators_are_no_modules(trace: Path) -> None:
    """Old versions of torch wrote source lines for with_stack=True, and no modules."""
    lines = {"Call_stack": "torch/nn/modules/module.py(1051): _call_impl;net.py(7): forward"}
    write(trace, {"traceEvents": [trace_event("Operator", "aten::mm", 5, 30, **lines)]})
    (warning,) = sentences(torchprof.from_trace(trace))
    assert "by an old version of torch, which writes the source lines" in warning


class Block(Layers):
    """A block of a small ResNet, with two linear layers, or with three."""

    def __init__(self) -> None:
        super().__init__(first=nn.Linear(4, 4), act=nn.ReLU(), second=nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x))) + x)


class Bottleneck(Block):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.third(self.act(self.second(self.act(self.first(x))))) + x)


class Residual(nn.Module):
    def __init__(self, block: type[Block], *counts: int) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.stages = nn.Sequential(*(nn.Sequential(*(block() for _ in range(count))) for count in counts))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


def test_layers_of_the_model_that_the_trace_does_not_call_give_a_warning(trace: Path) -> None:
    """Both models have the same class, and submodules of the same names, as ResNet-50 and ResNet-18."""
    traced, other = Residual(Block, 2, 2), Residual(Bottleneck, 3, 4)
    annotated(traced, lambda: traced(X), trace)
    never = {warning.code: warning.layers for warning in torchprof.from_trace(trace, other).warnings}["never_called"]
    assert {"Residual.stages.0.0.third", "Residual.stages.0.2"} <= {*never}
    assert not torchprof.from_trace(trace, Residual(Block, 2, 2)).warnings
    (foreign,) = torchprof.from_trace(trace, Residual(Block, 2)).warnings
    assert foreign.code == "labelled_in_trace_only" and foreign.layers[0] == "Residual.stages.1"


def test_another_model_than_that_of_the_module_events_is_refused(trace: Path) -> None:
    with_modules(traced := Residual(Block, 2, 2), training(traced, X), trace)
    with pytest.raises(torchprof.TorchprofError, match=r"only the classes of modules\. No forward of the model"):
        torchprof.from_trace(trace, Residual(Bottleneck, 3, 4))


@pytest.mark.parametrize("annotation", [True, False], ids=["annotate", "Profile"])
def test_the_model_is_accepted_if_only_a_selection_has_labels(annotation: bool, trace: Path) -> None:
    """Inside a selected module, a recording with ``paths`` labels only modules that are selected themselves."""
    model = Residual(Block, 2, 2)
    blocks = [f"stages.{stage}.{block}" for stage in "01" for block in "01"]
    paths = [path for block in blocks for path in (block, f"{block}.first")]

    def record(paths: list[str]) -> None:
        if annotation:
            with torch.profiler.profile() as theirs, torchprof.annotate(model, paths=paths):
                model(X)
            theirs.export_chrome_trace(str(trace))
        else:
            with torchprof.Profile(model, paths=paths) as ours:
                model(X)
            ours.export_chrome_trace(str(trace))

    record(paths)
    run = torchprof.from_trace(trace, model, paths=paths)
    calls = {node.layer.name.removeprefix("Residual."): node.calls for node in run.tree().walk() if node.calls}
    assert calls == dict.fromkeys(paths, 1)
    record(["stages", "stages.0.0", "stages.1.0", "stages.1.0.first"])
    assert torchprof.from_trace(trace, model).meta.model == ("Residual",)


def test_layers_without_a_class_are_no_models(trace: Path, tmp_path: Path) -> None:
    run = torchprof.from_trace(with_ranges(trace))
    assert run.meta.model == ()
    assert repr(run).startswith("<Run of a trace: 2 layers")
    run.export(tmp_path / "report.html")
    assert f"<title>{run.meta.program[0][1]} · torchprof</title>" in (tmp_path / "report.html").read_text(
        encoding="utf-8"
    )


def test_the_headline_names_the_kind_of_a_layer(trace: Path) -> None:
    """A label below the model has no class, but it is no range. A range is not called a part of the forward."""
    events = [
        trace_event("cpu_op", "torchprof:Net", 0.5, 100),
        trace_event("cpu_op", "torchprof:Net.a", 1, 60),
        trace_event("cpu_op", "torchprof:Net.a.b", 2, 40),
        trace_event("cpu_op", "aten::mm", 5, 2),
    ]
    text = torchprof.from_trace(write(trace, {"traceEvents": events})).report("headline")
    assert text.startswith("60% of the forward is in `a`, 40% in the layer `a.b`.")
    for one, name in zip(events, ("all", "a", "b")):
        one.update(cat="user_annotation", name=name)
    text = torchprof.from_trace(write(trace, {"traceEvents": events})).report("headline")
    assert "in the range `a.b`" in text
    assert "forward" not in text


@pytest.mark.parametrize(
    "header",
    [
        {"deviceProperties": 5},
        {"deviceProperties": ["A100", None, {"name": 7}, {"name": "A100", "totalGlobalMem": "80"}]},
        {"distributedInfo": "two ranks"},
        {"distributedInfo": {"rank": "0", "world_size": "2"}},
        {"distributedInfo": {"rank": -1, "world_size": 1.5}},
        {"distributedInfo": {"rank": None, "world_size": True}},
        {"baseTimeNanoseconds": "yesterday"},
        {"baseTimeNanoseconds": -5},
        {"baseTimeNanoseconds": 2**80},
        {"host_name": 5, "schemaVersion": None},
    ],
    ids=str,
)
def test_a_header_may_have_any_values(header: dict[str, Any], trace: Path, reloaded: Any) -> None:
    events = [
        trace_event("user_annotation", "forward", 0, 50),
        trace_event("cpu_op", "aten::mm", 10, 20, External_id=2),
    ]
    run = torchprof.from_trace(write(trace, {**header, "traceEvents": events}))
    assert run.meta.rank == 0
    assert run.tree("forward").total.cpu_ns == 50_000
    assert reloaded(run) == run


# Labels, modules, ranges


def test_layers_come_from_labels_else_from_modules_else_from_ranges(trace: Path) -> None:
    model = Mlp()
    step = settle(training(model, X))
    with_modules(model, step, trace)
    assert names_of(torchprof.from_trace(trace)) == ["Mlp", "Mlp.Linear_0", "Mlp.ReLU_0", "Mlp.Linear_1"]
    labelled = ["Mlp", "Mlp.fc1", "Mlp.act", "Mlp.fc2"]
    assert names_of(torchprof.from_trace(trace, model)) == labelled
    with torchprof.annotate(model):
        with_modules(model, step, trace)
    read = torchprof.from_trace(trace)
    assert names_of(read) == labelled
    assert [layer.kind for layer in read.layers] == ["Mlp", "Linear", "ReLU", "Linear"]
    assert names_of(torchprof.from_trace(with_ranges(trace))) == ["## forward ##", "## backward ##"]


def test_modules_have_the_same_work_as_labels(trace: Path) -> None:
    """The trace has modules and labels around the same operators: compare the calls of all operators by layer.
    Without labels, the modules are not needed if the model is given."""
    model = Mlp()
    step = settle(training(model, X))
    with torchprof.annotate(model):
        with_modules(model, step, trace)
    by_label = torchprof.from_trace(trace, model)
    whole = trace_in(trace)
    whole["traceEvents"] = [one for one in whole["traceEvents"] if not one["name"].startswith("torchprof:")]
    by_module = torchprof.from_trace(write(trace, whole), model)

    def work(run: Run) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for row in run.rows:
            if row.frames and row.frames[-1].kind == "op":
                found[row.layer and row.layer.name, row.phase, row.frames] += row.calls
        return found

    assert work(by_module) == work(by_label)
    assert [layer.params for layer in by_module.layers] == [0, 40, 0, 18]


def test_values_that_a_trace_does_not_have_are_unknown(trace: Path) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace, record_shapes=False, profile_memory=False)
    read = torchprof.from_trace(trace)
    for layer in read.layers:
        assert (layer.params, layer.trainable_params, layer.param_bytes, layer.buffers, layer.training) == (None,) * 5
    with_model = torchprof.from_trace(trace, model)
    assert [layer.params for layer in with_model.layers] == [0, 40, 0, 18]
    assert {layer.training for layer in with_model.layers} == {None}
    table = read.report("tree")
    assert "Params" not in table and "MACs" not in table


# Refused files and models


def test_a_model_of_other_operators_is_refused_for_a_trace_without_modules(trace: Path) -> None:
    with pytest.raises(torchprof.TorchprofError, match=r"names no layers.*record it inside `torchprof.annotate"):
        torchprof.from_trace(with_ranges(trace), nn.Conv2d(3, 4, 3))


def test_labels_of_another_model_are_refused(trace: Path) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace)
    with pytest.raises(torchprof.TorchprofError, match="other modules than those of Several: Mlp"):
        torchprof.from_trace(trace, Several())


def test_models_of_the_stages_of_a_pipeline_are_found(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one class are in the order of their stages, and a wrapped one is shown under its own class."""

    def models() -> list[nn.Module]:
        return [Mlp(), Several(), Mlp(), nn.DataParallel(Mlp())]

    recorded = models()
    stages = dict(zip(map(id, recorded), (5, 2, 1)))
    monkeypatch.setattr(layers, "stages_of_modules", lambda: {**stages, id(recorded[3]): 3, id(recorded[3].module): 3})
    live = annotated(recorded, lambda: [model(X) for model in recorded], trace)
    names = ["Mlp (stage 5)", "Several (stage 2)", "Mlp (stage 1)", "Mlp (stage 3)"]
    assert [root.name for root in live.roots] == names
    monkeypatch.undo()

    def described(run: Run) -> dict[str, tuple[str, int | None, int]]:
        nodes = [node for root in range(len(run.roots)) for node in run.tree(root=root).walk()]
        return {node.layer.name: (node.layer.kind, node.layer.params, node.calls) for node in nodes}

    given = models()
    run = torchprof.from_trace(trace, given)
    assert described(run) == described(live) and not sentences(run)
    assert [root.name for root in run.roots] == ["Mlp (stage 1)", "Several (stage 2)", "Mlp (stage 5)", "Mlp (stage 3)"]
    of_one = described(torchprof.from_trace(trace, given[1]))
    assert of_one and of_one.items() <= described(live).items()
    selected = torchprof.from_trace(trace, given, paths=["Mlp#2.fc1"])
    assert [name for name, (*_, calls) in described(selected).items() if calls] == ["Mlp (stage 5).fc1"]
    assert selected.meta.paths == (("Mlp (stage 5)", "fc1"),)
    with pytest.raises(
        torchprof.TorchprofError,
        match=r"Mlp: Mlp \(stage 1\), Several \(stage 2\), .* the model of each stage of this trace, in this order",
    ):
        torchprof.from_trace(trace, given[0])


def test_labels_that_the_model_lacks_give_a_warning(trace: Path) -> None:
    """The trace is of a longer model. The work of its other modules counts as self time of the layer around them."""
    longer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    step = settle(training(longer, X))
    annotated(longer, step, trace)
    (warning,) = sentences(torchprof.from_trace(trace, nn.Sequential(nn.Linear(4, 4))))
    assert warning.startswith("Labeled in the trace, but not in the model")
    assert ": Sequential.1, Sequential.2. " in warning
    assert not sentences(torchprof.from_trace(trace, longer))


def test_paths_need_a_model(trace: Path) -> None:
    with pytest.raises(torchprof.TorchprofError, match="also give from_trace the model"):
        torchprof.from_trace(with_ranges(trace), paths=["fc1"])
    with pytest.raises(torchprof.TorchprofError, match="No module"):
        torchprof.from_trace(trace, Mlp(), paths=["fc3"])


def test_an_empty_list_of_traces_is_refused() -> None:
    with pytest.raises(torchprof.TorchprofError, match="the list is empty"):
        torchprof.from_trace([])


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "trace.txt", two_steps(0))
    torchprof.from_trace(tmp_path / "trace.txt").save(tmp_path / "run.json")
    (tmp_path / "more.json").mkdir()
    with pytest.raises(torchprof.TorchprofError, match="is a folder without traces: their names end in"):
        torchprof.from_trace(tmp_path)


def test_a_folder_stands_for_the_traces_in_it(tmp_path: Path, cli: Any) -> None:
    files = [write(tmp_path / f"rank{rank}.pt.trace.json", two_steps(0, rank)) for rank in (1, 0)]
    run = torchprof.from_trace(files)
    run.save(tmp_path / "run.json.gz")
    (tmp_path / "notes.txt").write_text("none")
    assert torchprof.from_trace(tmp_path) == torchprof.from_trace([str(tmp_path)]) == run
    first = cli("show", str(tmp_path)).out.splitlines()[0]
    assert first.startswith(f"torchprof: {files[1]}, {files[0]}. Recorded")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bad_file_in_a_folder_is_left_out(processes: int, tmp_path: Path) -> None:
    good = write(tmp_path / "rank0.json", two_steps(0, 0))
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    run = torchprof.from_trace(tmp_path, processes=processes)
    assert run.rows == torchprof.from_trace(good).rows
    (warning,) = [str(one) for one in run.warnings if one.code == "trace_left_out"]
    assert warning.startswith("config.json is left out: config.json ") and str(tmp_path) not in warning
    with pytest.raises(torchprof.TorchprofError, match=r"config\.json"):  # one that was asked for
        torchprof.from_trace([good, tmp_path / "config.json"], processes=processes)
    good.unlink()
    with pytest.raises(torchprof.TorchprofError, match=r"config\.json"):
        torchprof.from_trace(tmp_path)


def test_a_trace_is_no_saved_run(trace: Path) -> None:
    with pytest.raises(torchprof.TorchprofError, match=r"is a trace, not a saved run: torchprof.from_trace\(path\)"):
        torchprof.load(with_ranges(trace))


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "chrome"}}],
        [
            {"ph": "B", "name": "draw", "cat": "gpu", "pid": 1, "tid": 1, "ts": 5},
            {"ph": "E", "pid": 1, "tid": 1, "ts": 9},
        ],
        [{"ph": "X", "name": "PaintLayer", "cat": "devtools.timeline", "pid": 1, "tid": 1, "ts": 5, "dur": 4}],
    ],
    ids=["none", "names", "pairs", "of a browser"],
)
def test_a_file_without_events_of_torch_is_refused(events: list[Any], trace: Path) -> None:
    with pytest.raises(torchprof.TorchprofError, match="holds no event of torch's profiler"):
        torchprof.from_trace(write(trace, {"traceEvents": events}))


def test_a_file_without_readable_events_is_refused_with_the_reason(trace: Path) -> None:
    broken = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5}
    with pytest.raises(torchprof.TorchprofError, match=r"that can be read.* 3 events of trace.json are missing"):
        torchprof.from_trace(write(trace, {"traceEvents": [broken] * 3}))


def test_a_file_that_was_cut_off_is_read_as_far_as_possible(trace: Path, cli: Any) -> None:
    model = Mlp()
    annotated(model, lambda: [model(X) for _ in range(20)], trace)
    text = trace.read_text()
    trace.write_text(text[: len(text) * 2 // 3])
    read = torchprof.from_trace(trace, model)
    assert 0 < read.tree("forward").calls < 20
    assert "is cut off" in cli("show", str(trace)).out
    (warning,) = [one for one in sentences(read) if "is cut off" in one]
    assert trace.name in warning
    assert warning in read.report("tree")


def test_unreadable_events_give_a_warning(trace: Path) -> None:
    model = Mlp()
    annotated(model, lambda: model(X), trace)
    whole = trace_in(trace)
    whole["traceEvents"] += [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5}] * 2
    read = torchprof.from_trace(write(trace, whole), model)
    assert "2 events of trace.json are missing" in sentences(read)[0]
