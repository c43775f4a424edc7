"""The summary report: layers with shapes, and each figure of the model against its definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build.hand_made import op, row, run_of
from build.models import Layers, Mlp, Several, Tied, profiled
from torch import nn

import torchprof
from examples.models import LeNet5
from torchprof.run.formats import format_count, short_time
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.meta import Peak
from torchprof.run.run import Run
from torchprof.run.words import Frame, FrameKind


def figures(run: Run, root: int = 0) -> dict[str, str]:
    """The lines below the name of a model."""
    block = run.report("summary").split("\n\n")[1 + root].splitlines()
    assert block[0] == run.roots[root].name
    return dict(line.strip().split("  ", 1) for line in block[1:])


def stripped(run: Run, root: int = 0) -> dict[str, str]:
    return {name: value.strip() for name, value in figures(run, root).items()}


def cells(run: Run, **options: Any) -> list[list[str]]:
    table = run.report("summary", **options).split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split(" | ")] for line in table if not set(line) <= set("-| ")]


def test_the_table_of_layers() -> None:
    prof = profiled(LeNet5(), torch.rand(2, 1, 32, 32), with_flops=True)
    table = cells(prof.run)
    assert table[0] == ["Module", "Type", "Depth", "Input shape", "Output shape", "Params", "MACs"]
    assert table[1] == ["LeNet5", "LeNet5", "0", "[2, 1, 32, 32]", "[2, 10]", "61.71 K", "833.04 K"]
    assert table[3] == ["│├── 0", "Conv2d", "2", "[2, 1, 32, 32]", "[2, 6, 28, 28]", "156", "235.20 K"]
    assert [row[0] for row in cells(prof.run, depth=1)[1:]] == ["LeNet5", "├── features", "└── classifier"]
    assert "<table>" in prof.run.report("summary", tablefmt="html")


def test_the_figures_of_a_model() -> None:
    model = LeNet5().eval()
    x = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        model(x)
        with torchprof.Profile(model, with_flops=True, profile_memory=True) as prof:
            model(x)
            model(x)
    found = stripped(prof.run)
    assert found["Params"] == found["Trainable params"] == "61.71 K"
    assert found["Model size"] == f"{61_706 * 4 / 1024:.2f} KB (float32 {61_706 * 4 / 1024:.2f} KB)"
    assert found["Buffers"] == "0 B"
    assert found["MACs"] == "833.04 K"  # 2 · 416,520, for one of the two calls
    total = prof.run.tree("forward").total
    assert found["FLOPs"] == f"{total.flops / 2 / 1e6:.2f} M"
    wall_ns = prof.run.meta.wall_ns
    per_s = 2 * 2 / wall_ns * 1e9  # below 100 on a slow machine
    shown = f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
    assert found["Throughput"] == f"{shown} samples/s over {short_time(wall_ns)}"
    assert found["FLOP/s (mean)"] == str(format_count(total.flops / total.cpu_ns * 1e9))
    # Outputs of the layers without children: 2 of 4,704, 1,176; of 1,600, 400; of 120; 120; 84; 84 and 10 numbers.
    numbers = 2 * (2 * 4_704 + 1_176 + 2 * 1_600 + 400 + 2 * 120 + 2 * 84 + 10)
    assert found["Activations"] == f"{numbers * 4 / 1024:.2f} KB"
    (memory,) = prof.run.memory
    assert memory.device == "cpu"
    assert found["Peak memory above start"] == f"{memory.peak_bytes / 1024:.2f} KB on cpu"


def test_figures_that_were_not_recorded_are_unknown() -> None:
    found = stripped(profiled(Mlp(), torch.rand(3, 4)).run)
    assert found["MACs"] == found["FLOPs"] == found["FLOP/s (mean)"] == found["% of peak (forward)"] == "–"
    assert found["Peak memory above start"] == "–"
    assert found["Throughput"] != "–"
    found = stripped(torchprof.flops(Mlp(), torch.rand(3, 4)))
    assert found["Latency (median)"] == found["Throughput"] == found["FLOP/s (mean)"] == "–"
    assert found["MACs"] == "144"
    assert found["Backward FLOPs"] != "–"


def test_a_layer_that_was_never_called() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)})
    with torchprof.Profile(model, with_flops=True) as prof:
        model["used"](torch.rand(2, 4))
    rows = {row[0]: row for row in cells(prof.run)}
    assert rows["└── idle"][3:] == ["", "", "20", "–"]
    assert stripped(prof.run)["MACs"] == "–"  # there was no call of the model


def test_shared_and_repeated_layers() -> None:
    prof = profiled(Tied(), torch.rand(2, 4), with_flops=True)
    assert stripped(prof.run)["Params"] == "20"
    prof = profiled(Several(), torch.rand(2, 4), with_flops=True)
    assert stripped(prof.run)["Activations"] == f"{(3 + 1) * 2 * 4 * 4} B"


def test_types_of_parameters_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.BatchNorm1d(4))
    model[1].weight.requires_grad_(False)
    run = torchprof.flops(nn.Sequential(nn.BatchNorm1d(4)), torch.rand(2, 4))
    with torchprof.Profile(model, with_flops=True) as prof:
        pass
    found = stripped(prof.run)
    assert found["Params"] == "28"
    assert found["Trainable params"] == "24"
    assert found["Model size"] == "72 B (bfloat16 40 B, float32 32 B)"
    assert found["Buffers"] == f"{4 * 4 + 4 * 4 + 8} B"
    assert stripped(run)["Buffers"] == f"{4 * 4 + 4 * 4 + 8} B"


def test_lazy_parameters_are_unknown() -> None:
    with torchprof.Profile(nn.Sequential(nn.LazyLinear(4)), with_flops=True) as prof:
        pass
    found = stripped(prof.run)
    assert found["Params"] == found["Trainable params"] == found["Model size"] == "–"


def made(**meta: Any) -> Run:
    """A layer with two calls of 2 ms and 4 ms, with 8 MACs and 20 FLOPs in total, on any device."""
    layer = Layer(("Net",), "Net", 3, 3, 12, (("float32", 12),), input_shapes=((5, 2),), output_shapes=((5, 1),))
    work = {"cpu_ns": 6_000_000, "device_ns": 1_000_000, "macs": 8, "flops": 20, **meta.pop("work", {})}
    rows = [row(0, calls=2), row(0, op("x", (5, 2), (2, 1)), calls=2, **work)]
    samples = {SampleKey(0, "forward", 0, "cpu", "cpu_ns"): Spread.of([(0, 2_000_000), (1, 4_000_000)])}
    fields = {"requested": ("cpu_ns", "macs", "flops", "uncounted"), **meta}
    fields.setdefault("measured", fields["requested"])
    fields.setdefault("wall_ns", 8_000_000)
    return replace(run_of(rows, layers=[layer], **fields), samples=samples)


PEAKS = (
    Peak("cpu", "float32", 1, 1.0, 1.0),
    Peak("cpu", "bfloat16", 4, 2.0, 1.0),
    Peak("cpu", "float32", 4, 10_000.0, 1.0),
    Peak("cuda:0", "float32", 0, 50_000.0, 1.0),
)


def test_figures_by_hand(golden: Callable[..., None]) -> None:
    """4 MACs and 10 FLOPs in a call of 3 ms (median): 10 samples in 8 ms, 20 FLOPs in 6 ms, a third of the last peak of
    the CPU for float32. The profiler does not wait for a device: the latency of a call is unknown, the busy time of the
    device is known, 20 FLOPs in 1 ms. With calls that were not counted, all but 0 are lower bounds."""
    fields = ("cpu_ns", "device_ns", "macs", "flops", "uncounted")
    cuda: dict[str, Any] = {"device": "cuda", "requested": fields, "peaks": PEAKS}
    runs = {
        "on the CPU": made(peaks=PEAKS),
        "without a peak": made(),
        "on a device": made(**cuda),
        "on a device that was not measured": made(**cuda, measured=("cpu_ns", "macs", "flops", "uncounted")),
        "not all counted": made(work={"uncounted": 1}, peaks=PEAKS),
        "nothing counted": made(work={"uncounted": 1, "macs": 0, "flops": 0}),
    }
    golden({title: "\n".join(map(": ".join, stripped(run).items())) for title, run in runs.items()})


# Calls on several shapes


def of_batches(model: nn.Module, *sizes: int, **options: Any) -> Run:
    """A run with a call for each size, on a batch of so many rows of 64 numbers."""
    with torch.no_grad(), torchprof.Profile(model, **options) as prof:
        for size in sizes:
            model(torch.rand(size, 64))
    return prof.run


def is_rate_of(found: dict[str, str], samples: int, run: Run) -> bool:
    return found["Throughput"].startswith(f"{samples / run.meta.wall_ns * 1e9:,.0f} samples/s over ")


@pytest.mark.parametrize("options", [{"with_flops": True}, {"with_flops": True, "record_shapes": True}])
def test_figures_over_calls_of_different_shapes_are_marked(options: dict[str, bool]) -> None:
    """128 rows once and 1 row 49 times, 4,096 MACs per row: the mean per call is (128 + 49) · 4,096 / 50."""
    run = of_batches(nn.Linear(64, 64), 128, *[1] * 49, **options)
    (row,) = cells(run)[1:]
    assert row[3:5] == ["first [128, 64]", "first [128, 64]"]
    assert row[6] == f"mean {format_count(177 * 4096 / 50)}" == "mean 14.50 K"
    found = stripped(run)
    assert found["MACs"] == row[6]
    assert found["Throughput"] == "–"
    assert found["Latency (median)"].endswith(" (over calls of different shapes)")
    assert 'Shapes vary over calls: "first"' in run.report("summary")
    assert "This start-up" not in run.report("summary")


def test_figures_over_calls_of_one_shape_are_not_marked() -> None:
    run = of_batches(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), *[3] * 4, with_flops=True)
    assert [row[3:5] for row in cells(run)[1:]] == [["[3, 64]", "[3, 64]"]] * 3
    assert cells(run)[1][6] == str(format_count(3 * 4096))
    assert is_rate_of(stripped(run), 3 * 4, run)
    assert '"first"' not in run.report("summary") and '"mean"' not in run.report("summary")


def test_a_layer_called_on_two_shapes_in_each_call_of_the_model_has_constant_work() -> None:
    class Net(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.act(x)[:1])

    run = of_batches(Net(act=nn.ReLU()), 4, 4, record_shapes=True, with_flops=True)
    model, act = cells(run)[1:]
    assert (model[3], act[3]) == ("[4, 64]", "first [4, 64]")
    assert (model[6], act[6]) == ("0", "0")
    assert is_rate_of(stripped(run), 4 * 2, run)


def test_the_batch_of_all_calls_is_known_without_recorded_shapes() -> None:
    run = of_batches(nn.Linear(64, 64), 4, 4)
    assert is_rate_of(stripped(run), 4 * 2, run)
    assert stripped(of_batches(nn.Linear(64, 64), 4, 4, 3))["Throughput"] == "–"
    run = made()
    assert stripped(run)["Throughput"] != "–"
    rows = replace(run.rows, frames=((), (Frame(FrameKind.OP, "x"),)))
    assert stripped(replace(run, rows=rows))["Throughput"] == "–"  # unknown in a run without that information


def test_a_note_names_measures_that_were_not_requested() -> None:
    model = nn.Linear(64, 64)
    assert "Not recorded: MACs and FLOPs (with_flops=True, --flops) and memory (prof" in of_batches(model, 1).report(
        "summary"
    )
    assert "Not recorded" not in of_batches(model, 1, with_flops=True, profile_memory=True).report("summary")
    assert "Not recorded" not in torchprof.flops(model, torch.rand(1, 64)).report("summary")


def test_two_models() -> None:
    first, second = Mlp(), Mlp()
    with torchprof.Profile([first, second], with_flops=True) as prof:
        second(torch.rand(1, 4))
    assert stripped(prof.run, 0)["MACs"] == "–"
    assert stripped(prof.run, 1)["MACs"] == "48"


def test_the_command_line_shows_the_summary(tmp_path: Path, cli: Any) -> None:

    path = tmp_path / "run.json"
    said = cli("flops examples/models.py:LeNet5 --input 1,1,32,32 --summary -o", str(path))
    assert "\n  MACs                     416.52 K\n" in said.out
    assert json.loads(path.read_text())["schema"] == 4
    assert "Backward" not in cli("show", str(path), "--summary", "--depth", "0").out


def summed(*sizes: int) -> str:
    return f"{4 * sum(sizes)} B"


def test_activations_are_of_the_innermost_layers_that_were_called() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)  # does not call its projection layer
    x = torch.rand(2, 3, 4)
    prof = profiled(attention, x, x, x, with_flops=True)
    assert stripped(prof.run)["Activations"] == summed(2 * 3 * 4, 2 * 3 * 3)
    encoder = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 1)).eval()
    with torch.no_grad(), torchprof.Profile(encoder, with_flops=True) as prof:
        encoder(x)  # the fused path calls no layers
    assert stripped(prof.run)["Activations"] == summed(2 * 3 * 4, 2 * 3)


def test_activations_of_calls_on_several_shapes_are_unknown() -> None:
    class Cuts(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.fc(x)[:1])

    prof = profiled(Cuts(fc=nn.Linear(4, 4)), torch.rand(100, 4), with_flops=True)
    assert stripped(prof.run)["Activations"] == "–"
    with torchprof.Profile(Several()) as prof:  # without shapes it is unknown whether they were the same
        prof(torch.rand(2, 4))
    assert stripped(prof.run)["Activations"] == "–"


def test_activations_of_a_run_of_selected_layers_are_unknown() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    found = stripped(profiled(model, torch.rand(2, 4), with_flops=True, paths=["2"]).run)
    unknown = ["MACs", "FLOPs", "Latency (median)", "Throughput", "FLOP/s (mean)", "% of peak (forward)", "Activations"]
    assert {found[name] for name in unknown} == {"–"}


def test_an_input_without_a_batch_has_no_throughput() -> None:
    with torchprof.Profile(nn.Linear(64, 8)) as prof:
        prof(torch.rand(64))
    assert stripped(prof.run)["Throughput"] == "–"


def test_the_peak_is_that_of_the_type_of_most_macs() -> None:
    model, x = nn.Linear(64, 64), torch.rand(8, 64)
    with torch.autocast("cpu", torch.bfloat16), torchprof.Profile(model, with_flops=True) as prof:
        model(x)
    peaks = (Peak("cpu", "float32", 2, 1e12, 1.0), Peak("cpu", "bfloat16", 2, 2e12, 1.0))
    run = replace(prof.run, metas=(replace(prof.run.meta, peaks=peaks),))
    assert "(bfloat16 product on cpu, 2 threads)" in stripped(run)["% of peak (forward)"]
    assert stripped(replace(run, metas=(replace(run.meta, peaks=peaks[:1]),)))["% of peak (forward)"] == "–"


def test_activations_of_layers_whose_operators_record_no_shapes() -> None:
    """An embedding records no shapes: over several calls its activations are known only if nothing else varied."""

    class Looks(Layers):
        def forward(self, *tokens: torch.Tensor) -> torch.Tensor:
            return self.fc(sum(self.table(each).mean(0, keepdim=True) for each in tokens))

    model = Looks(table=nn.Embedding(10, 4), fc=nn.Linear(4, 2))
    three, five = (torch.zeros(length, dtype=torch.long) for length in (3, 5))
    with torchprof.Profile(model, with_flops=True) as prof:
        prof(three)
        prof(three)
    assert stripped(prof.run)["Activations"] == summed(3 * 4, 2)
    prof = profiled(model, three, five, with_flops=True)
    assert stripped(prof.run)["Activations"] == "–"
    with torchprof.Profile(model, with_flops=True) as prof:
        prof(three)
        prof(five)
    assert stripped(prof.run)["Activations"] == "–"


@pytest.mark.filterwarnings("ignore")
def test_packed_parameters_are_unknown_unless_the_module_tells_them() -> None:
    linear = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear})
    found = stripped(profiled(linear, torch.rand(2, 8), with_flops=True).run)
    assert (found["Params"], found["Trainable params"], found["MACs"]) == ("72", "0", "–")
    recurrent = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LSTM(8, 8)), {nn.LSTM})
    found = stripped(profiled(recurrent, torch.rand(2, 1, 8), with_flops=True).run)
    assert found["Params"] == found["Trainable params"] == found["Model size"] == found["MACs"] == "–"
