"""The drop-in for flops-profiler: its functions, its figures calculated by hand, its page line by line."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from build.libraries import usable_transformers
from build.models import Functional, Layers, Mlp, Raises, Recursive, Tied
from build.snapshots import snapshot
from torch import Tensor, nn

import torchprof
from torchprof.integrations.conventions import duration_text, rate_text
from torchprof.integrations.flops_profiler import FlopsProfiler, get_model_profile

UNKNOWN = "–"


def lenet5() -> nn.Module:
    """LeNet-5 for images of 32 x 32."""
    return nn.Sequential(
        nn.Sequential(
            *(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(16, 120, 5), nn.Tanh()),
        ),
        nn.Flatten(),
        nn.Sequential(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)),
    )


class Calls(Layers):
    """Calls a function in its forward."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__(function=function)

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


class Generates(Layers):
    """Has a method that calls the model three times, and a method with a keyword argument."""

    def __init__(self) -> None:
        super().__init__(fc=nn.Linear(4, 4, bias=False))

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x = self.fc(x)
        return x

    def generate(self, x: Tensor) -> Tensor:
        return self(self(self(x)))


def totals(model: nn.Module, *args: Any, **options: Any) -> tuple[Any, Any, Any]:
    """(flops, MACs, parameters) of one call."""
    return get_model_profile(model, args=args, print_profile=False, warm_up=0, **options)


@pytest.fixture
def page_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Profile one call of a model and return what was printed."""

    def page(model: nn.Module, *args: Any, **options: Any) -> str:
        capsys.readouterr()
        get_model_profile(model, args=args, warm_up=0, **options)
        return capsys.readouterr().out

    return page


def parts(page: str) -> tuple[list[str], list[str], list[str]]:
    """The lines of a page: its summary, its aggregated profile, and the repr of the model."""
    lines = page.splitlines()
    aggregated = next(at for at, line in enumerate(lines) if "Aggregated Profile per Device" in line)
    detailed = next(at for at, line in enumerate(lines) if "Detailed Profile per Device" in line)
    note = next(at for at, line in enumerate(lines) if line.startswith("3. "))
    return lines[:aggregated], lines[aggregated + 1 : detailed - 1], lines[note + 2 : -1]


def figures(line: str) -> tuple[dict[str, str], dict[str, dict[str, str]], str]:
    """The figures of the module in a line of the detailed profile."""
    found = re.search(
        r"module = (\{.*?\}), functionals = (\{.*\}), functionals_duration = ([\d.]+(?: us| ms| s)?|–),", line
    )
    assert found, line
    return ast.literal_eval(found[1]), ast.literal_eval(found[2]), found[3]


def functionals(page: str) -> dict[str, tuple[str, str]]:
    """For each functional of the whole model: flops and MACs, as printed."""
    line = next(line for line in parts(page)[2] if "module = " in line)
    return {name: (counted["flops"], counted["macs"]) for name, counted in figures(line)[1].items()}


# The calls


def test_the_signatures_are_those_of_flops_profiler() -> None:
    def shape(function: Any) -> list[tuple[str, Any]]:
        return [(name, one.default) for name, one in inspect.signature(function).parameters.items()][:13]

    required = inspect.Parameter.empty
    assert shape(get_model_profile) == [
        ("model", required),
        ("input_shape", None),
        ("args", []),
        ("kwargs", {}),
        ("print_profile", True),
        ("detailed", True),
        ("module_depth", -1),
        ("top_modules", 10),
        ("warm_up", 3),
        ("as_string", False),
        ("output_file", None),
        ("ignore_modules", None),
        ("func_name", "forward"),
    ]
    assert shape(FlopsProfiler) == [("model", required), ("ds_engine", None), ("recompute_fwd_factor", 0.0)]
    assert shape(FlopsProfiler.start_profile)[1:] == [("ignore_list", None)]
    assert shape(FlopsProfiler.print_model_profile)[1:] == [
        ("profile_step", 1),
        ("module_depth", -1),
        ("top_modules", 1),
        ("detailed", True),
        ("output_file", None),
    ]
    assert shape(FlopsProfiler.print_model_aggregated_profile)[1:] == [("module_depth", -1), ("top_modules", 1)]
    for name in ("flops", "macs", "params", "duration", "functional_duration"):
        assert shape(getattr(FlopsProfiler, f"get_total_{name}"))[1:] == [("as_string", False)]
    for name in ("stop_profile", "reset_profile", "end_profile"):
        assert shape(getattr(FlopsProfiler, name))[1:] == []


def test_lenet_5_has_the_figures_calculated_by_hand(page_of: Callable[..., str]) -> None:
    # MACs: outputs · window. Flops: twice that, the bias of convolutions, and 1 for each input of pooling.
    convolutions = [(6 * 28 * 28, 25), (16 * 10 * 10, 6 * 25), (120, 16 * 25)]
    macs = sum(outputs * window for outputs, window in convolutions) + 120 * 84 + 84 * 10
    flops = 2 * macs + sum(outputs for outputs, _ in convolutions) + 6 * 28 * 28 + 16 * 10 * 10
    assert (flops, macs) == (845768, 416520)
    model = lenet5()
    assert get_model_profile(model, (1, 1, 32, 32), print_profile=False) == (flops, macs, 61706)
    assert get_model_profile(model, (1, 1, 32, 32), print_profile=False, as_string=True) == (
        "845.77 K",
        "416.52 KMACs",
        "61.71 k",
    )
    page = page_of(model, torch.rand(1, 1, 32, 32))
    assert functionals(page) == {
        "conv2d": ("817.62 K", "405.6 KMACs"),
        "avg_pool2d": ("6.3 K", "0 MACs"),
        "linear": ("21.84 K", "10.92 KMACs"),
    }
    module, ran, _ = figures(next(line for line in page.splitlines() if "(3): Conv2d" in line))
    assert (module["param"], module["params%"]) == ("2.42 k", "3.92%")  # 6·16·25 + 16 of 61,706
    assert (module["flops"], module["flops%"]) == ("481.6 K", "56.94%")  # 2·16·100·150 + 1,600 of 845,768
    assert (module["macs"], module["macs%"]) == ("240.0 KMACs", "57.62%")
    assert ran["conv2d"]["flops"] == "481.6 K"
    assert figures(next(line for line in page.splitlines() if "(1): Tanh" in line))[1:] == ({}, "0.0")


X = torch.rand(2, 4, 6)
BY_FUNCTIONAL: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], int, int]] = {
    # name: the function that calls it, its input, flops, MACs
    "linear": (lambda x, w: F.linear(x, w), (X, torch.rand(3, 6)), 288, 144),
    "matmul": (lambda x: x @ x.mT, (X,), 384, 192),
    "mm": (lambda x: torch.mm(x[0], x[0].T), (X,), 192, 96),
    "bmm": (lambda x: torch.bmm(x, x.mT), (X,), 384, 192),
    "mv": (lambda x: torch.mv(x[0], x[0, 0]), (X,), 48, 24),
    "addmm": (lambda b, x: torch.addmm(b, x[0], x[0].T), (torch.rand(4), X), 192 + 4, 96),
    "baddbmm": (lambda b, x: torch.baddbmm(b, x, x.mT), (torch.rand(4), X), 384 + 4, 192),
    "einsum": (lambda x: torch.einsum("bij,bkj->bik", x, x), (X,), 384, 192),
    "bilinear": (lambda x, w: F.bilinear(x[0], x[1], w), (X, torch.rand(3, 6, 6)), 2 * 504, 4 * 3 * (36 + 6)),
    "scaled_dot_product_attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (X,), 768, 384),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b), (X, torch.rand(3, 4, 2), torch.rand(3)), 480 + 30, 240),
    "conv2d": (lambda x, w: F.conv2d(x[:, None], w, padding="same"), (X, torch.rand(3, 1, 3, 3)), 2592, 1296),
    "conv_transpose1d": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2),
        (X, torch.rand(4, 3, 2), torch.rand(3)),
        2 * 2 * 6 * 4 * 3 * 2 + 2 * 3 * 12,
        2 * 6 * 4 * 3 * 2,
    ),
    "relu6": (F.relu6, (X,), 48, 0),
    "silu": (F.silu, (X,), 48, 0),
    "gelu": (F.gelu, (X,), 48, 0),
    "layer_norm": (lambda x, w: F.layer_norm(x, (6,), w), (X, torch.rand(6)), 5 * 48, 0),
    "group_norm": (lambda x: F.group_norm(x, 2), (X,), 4 * 48, 0),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), (X, torch.rand(4)), 5 * 48, 0),
    "batch_norm": (lambda x, m: F.batch_norm(x, m, m), (X, torch.ones(4)), 48, 0),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"), (X,), 96, 0),
    "embedding": (lambda i, w: F.embedding(i, w), (torch.ones(3, dtype=torch.long), torch.rand(4, 4)), 0, 0),
}


@pytest.mark.parametrize("name", BY_FUNCTIONAL)
def test_a_functional_has_the_figures_calculated_by_hand(name: str, page_of: Callable[..., str]) -> None:
    function, args, flops, macs = BY_FUNCTIONAL[name]
    model = Calls(function)
    args = tuple(arg.clone() for arg in args)
    assert totals(model, *args) == (flops, macs, 0)
    assert list(functionals(page_of(model, *args))) == [name]


@pytest.mark.parametrize(
    ("training", "affine", "each"), [(True, True, 5), (True, False, 4), (False, True, 2), (False, False, 1)]
)
def test_a_batch_norm_counts_more_in_training(training: bool, affine: bool, each: int) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, affine=affine), nn.InstanceNorm1d(4)).train(training)
    prof = FlopsProfiler(model)
    prof.start_profile()
    model(X)
    prof.stop_profile()
    assert prof.get_total_flops() == each * X.numel() + 4 * X.numel()
    prof.end_profile()


def test_interpolation_counts_its_result_and_nearest_counts_0() -> None:
    image = torch.rand(1, 2, 4, 4)
    assert totals(Calls(lambda x: F.interpolate(x, size=(6, 8), mode="bilinear")), image) == (2 * 6 * 8, 0, 0)
    assert totals(Calls(lambda x: F.interpolate(x, scale_factor=2, mode="nearest")), image) == (0, 0, 0)


def test_a_single_number_is_one_element() -> None:
    assert totals(Calls(F.relu), torch.tensor(1.0)) == (1, 0, 0)


def test_an_operator_unknown_to_the_tool_counts_its_multiply_accumulates(page_of: Callable[..., str]) -> None:
    page = page_of(Calls(lambda x: torch.dot(x[0, 0], x[0, 1])), X)
    assert functionals(page) == {"dot": ("12", "6 MACs")}


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (Mlp, (2, 4)),
    "functions": (Functional, (2, 4)),
    "recursive": (Recursive, (2, 4)),
    "shared": (Tied, (2, 4)),
    "lenet": (lenet5, (2, 1, 32, 32)),
    "lstm": (lambda: nn.LSTM(8, 16, 2, bidirectional=True), (5, 3, 8)),
    "gru": (lambda: nn.GRU(8, 16, batch_first=True), (5, 3, 8)),
    "rnn": (lambda: nn.RNN(8, 16, nonlinearity="relu"), (5, 3, 8)),
    "lstm cell": (lambda: nn.LSTMCell(8, 16), (3, 8)),
    "gru cell": (lambda: nn.GRUCell(8, 16), (3, 8)),
    "rnn cell": (lambda: nn.RNNCell(8, 16), (3, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (1, 4, 8, 8)),
    "same": (lambda: nn.Conv2d(3, 4, 3, padding="same", dilation=2), (1, 3, 8, 8)),
    "unbatched": (lambda: nn.Conv2d(3, 4, 3), (3, 8, 8)),
    "upsampled": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 4, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
    "no parameters": (nn.ReLU, (2, 3)),
    "nothing": (nn.Sequential, (2, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_macs_equal_those_of_torchprof_without_errors(name: str, page_of: Callable[..., str]) -> None:
    make, shape = MODELS[name]
    model, x = make().eval(), torch.rand(shape)
    with torchprof.Profile(model, with_flops=True) as prof:
        model(x)
    total = prof.run.tree("forward").total
    before = snapshot(model, values=True)
    first = get_model_profile(model, shape, print_profile=False)
    assert first[1] == total.macs
    assert 2 * total.macs <= first[0] <= total.flops
    assert first[2] == sum(param.numel() for param in model.parameters())
    page = page_of(model, x)
    assert stripped(parts(page)[2]) == repr(model).splitlines()
    assert totals(model, x) == first  # nothing counts twice
    assert snapshot(model, values=True) == before


def test_recurrent_layers_count_two_for_each_multiply_accumulate(page_of: Callable[..., str]) -> None:
    # For each of 12 tokens: weights 4·16·(8 + 16), biases 2·4·16, and gates, 13 for each of 16 units.
    macs = 12 * 64 * 24
    page = page_of(nn.LSTM(8, 16), torch.rand(4, 3, 8))
    assert totals(nn.LSTM(8, 16), torch.rand(4, 3, 8))[:2] == (2 * macs + 12 * (128 + 13 * 16), macs)
    assert list(functionals(page)) == ["lstm"]


def test_the_fused_encoder_layer_counts_the_same_macs() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with torch.no_grad():
        fused = totals(layer, torch.rand(2, 5, 16))
    # Four projections, two of the attention, two of the MLP.
    assert fused[1] == 2 * 5 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 2 * 5 * 5 * 16
    assert fused[1] == totals(layer, torch.rand(2, 5, 16))[1]


# The page


def test_the_page_has_three_parts_with_their_labels(page_of: Callable[..., str]) -> None:
    model = Mlp()
    lines = page_of(model, torch.rand(3, 4), top_modules=2).splitlines()
    labels = [
        "",
        "-------------------------- Flops Profiler --------------------------",
        "Profile Summary at step 0:",
        "Notations:",
        "params per device:                                            58",
        "params of model = params per device * mp_size:                58",
        "fwd MACs per device:                                          144 MACs",
        "fwd flops per device:                                         312",
        "fwd flops of model = fwd flops per device * mp_size:          312",
        "fwd latency:                                                  ",
        "fwd FLOPS per device = fwd flops per device / fwd latency:    ",
        "Flops are counted as flops-profiler counts them",
        "----------------------------- Aggregated Profile per Device -----------------------------",
        "Top 2 modules in terms of params, flops, MACs or duration at different model depths:",
        "depth 0:",
        "    params      - {'Mlp': '58'}",
        "    flops       - {'Mlp': '312'}",
        "    MACs        - {'Mlp': '144 MACs'}",
        "    fwd latency - {'Mlp': '",
        "depth 1:",
        "    params      - {'Linear': '58', 'ReLU': '0'}",
        "    flops       - {'Linear': '288', 'ReLU': '24'}",
        "    MACs        - {'Linear': '144 MACs', 'ReLU': '0 MACs'}",
        "    fwd latency - {'",
        "------------------------------ Detailed Profile per Device ------------------------------",
        "Each module profile is listed after its name in the following order:",
        "Note: 1. ",
        "Mlp(",
        "  module = {",
        "  (fc1): Linear(module = {",
        "  (act): ReLU(module = {",
        "  (fc2): Linear(module = {",
        ")",
        "------------------------------------------------------------------------------",
    ]
    found = iter(lines)
    for label in labels:
        assert any(line.startswith(label) for line in found), label
    assert next(found, None) is None  # the last label is the last line
    assert lines[0] == ""


def test_one_line_has_the_count_by_torchprofs_own_convention(page_of: Callable[..., str]) -> None:
    model, x = Mlp(), torch.rand(3, 4)
    with torchprof.Profile(model, with_flops=True) as prof:
        model(x)
    own = prof.run.tree("forward").total.flops
    assert own == 312 + 3 * (8 + 2)  # the biases
    line = next(line for line in page_of(model, x).splitlines() if "torchprof's own convention" in line)
    assert line.endswith(f"fwd: {own}.")


def test_a_module_has_the_tools_keys_in_the_tools_order(page_of: Callable[..., str]) -> None:
    line = next(line for line in page_of(Mlp(), torch.rand(3, 4)).splitlines() if "(fc1)" in line)
    module, ran, lasted = figures(line)
    assert list(module) == ["param", "flops", "macs", "duration", "FLOPS", "params%", "flops%", "macs%", "duration%"]
    assert list(ran) == ["linear"]
    assert list(ran["linear"]) == [
        "flops",
        "macs",
        "duration",
        "FLOPS",
        "flops%",
        "macs%",
        "duration%/allfuncs",
        "duration%/e2e",
    ]
    assert (module["flops%"], module["macs%"], module["params%"]) == ("61.54%", "66.67%", "68.97%")
    assert ran["linear"]["duration"] == lasted
    assert line.endswith(f"functionals_duration = {lasted}, in_features=4, out_features=8, bias=True)")


def stripped(lines: list[str]) -> list[str]:
    """The lines of a detailed profile without the figures: this is the model's repr."""
    left = []
    for line in lines:
        start, end = line.find("module = {"), line.rfind("functionals_duration = ")
        if start >= 0:
            after = line[end:].split(",", 1)[1].removeprefix(" ")
            line = line[:start] + after
        left.append(line)
    return [line for line in left if line.strip()]


@pytest.mark.parametrize(
    ("flops", "seconds", "rate", "duration"),
    [
        (0, 1e-6, "0.0 FLOPS", "1.0 us"),
        (0, 0, "0.0 FLOPS", "0.0"),
        (5, 0, UNKNOWN, "0.0"),
        (5, None, UNKNOWN, UNKNOWN),
        (1, 3, "0.33 FLOPS", "3 s"),
        (2_500, 1.0, "2.5 KFLOPS", "1.0 s"),
        (22_363_000, 0.0122, "1.83 GFLOPS", "12.2 ms"),
        (491_520, 18.36e-6, "26.77 GFLOPS", "18.36 us"),
        (5 * 10**18, 1.0, "5000000.0 TFLOPS", "1.0 s"),
    ],
)
def test_rates_and_durations_have_the_format_of_flops_profiler(
    flops: int, seconds: float | None, rate: str, duration: str
) -> None:
    assert (rate_text(flops, seconds), duration_text(seconds)) == (rate, duration)


def test_every_depth_is_printed_and_a_larger_depth_is_capped(page_of: Callable[..., str]) -> None:
    model, x = lenet5(), torch.rand(1, 1, 32, 32)

    def depths(depth: int) -> list[str]:
        return [line for line in page_of(model, x, module_depth=depth).splitlines() if line.startswith("depth ")]

    assert depths(-1) == depths(2) == depths(99) == ["depth 0:", "depth 1:", "depth 2:"]
    assert depths(1) == ["depth 0:", "depth 1:"]
    assert depths(0) == ["depth 0:"]


def test_top_modules_lists_the_largest_first(page_of: Callable[..., str]) -> None:
    aggregated = parts(page_of(lenet5(), torch.rand(1, 1, 32, 32), top_modules=2))[1]
    at = aggregated.index("depth 2:")
    assert aggregated[at + 1 : at + 4] == [
        "    params      - {'Conv2d': '50.69 k', 'Linear': '11.01 k'}",
        "    flops       - {'Conv2d': '817.62 K', 'Linear': '21.84 K'}",
        "    MACs        - {'Conv2d': '405.6 KMACs', 'Linear': '10.92 KMACs'}",
    ]


def test_without_detailed_the_page_ends_after_the_aggregated_profile(page_of: Callable[..., str]) -> None:
    page = page_of(Mlp(), torch.rand(3, 4), detailed=False)
    assert "Detailed" not in page
    assert "module = " not in page
    assert page.splitlines()[-1] == "-" * 78


def test_with_output_file_the_page_goes_to_the_file_and_not_to_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x, target = Mlp(), torch.rand(2, 4), tmp_path / "page.txt"
    target.write_text("what was there before, and is longer than a page\n" * 200)
    get_model_profile(model, args=[x], output_file=str(target))
    assert capsys.readouterr() == ("", "")
    text = target.read_text(encoding="utf-8")
    assert text.endswith("-\n")
    lines = text.splitlines()
    assert "Profile Summary at step 3:" in lines
    assert lines[-1] == "-" * 78
    assert not any("what was there" in line for line in lines)


def test_a_file_that_cannot_be_written_is_an_error_before_the_model_runs(tmp_path: Path) -> None:
    model = Raises()
    with pytest.raises(torchprof.TorchprofError, match=r"missing.*no such folder"):
        get_model_profile(model, args=[torch.rand(2, 4)], output_file=tmp_path / "missing" / "page.txt")
    assert model.calls == 0
    with pytest.raises(torchprof.TorchprofError, match="cannot be written"):
        get_model_profile(Mlp(), args=[torch.rand(2, 4)], output_file=tmp_path)
    assert not (tmp_path / "missing").exists()


# Start, stop, end


@pytest.fixture
def stopped() -> Iterator[FlopsProfiler]:
    """A profiler of one call of Mlp with three rows, stopped."""
    model = Mlp()
    prof = FlopsProfiler(model)
    prof.start_profile()
    model(torch.rand(3, 4))
    prof.stop_profile()
    yield prof
    prof.end_profile()


def test_the_totals_as_numbers_and_as_strings(stopped: FlopsProfiler) -> None:
    assert (stopped.get_total_flops(), stopped.get_total_flops(as_string=True)) == (312, "312")
    assert (stopped.get_total_macs(), stopped.get_total_macs(as_string=True)) == (144, "144 MACs")
    assert (stopped.get_total_params(), stopped.get_total_params(as_string=True)) == (58, "58")
    seconds = stopped.get_total_duration()
    within = stopped.get_total_functional_duration()
    assert 0 < within < seconds
    assert stopped.get_total_duration(as_string=True) == duration_text(seconds)
    assert stopped.get_total_functional_duration(as_string=True) == duration_text(within)


def test_the_aggregated_profile_can_be_printed_alone(
    stopped: FlopsProfiler, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped.print_model_profile(profile_step=7, top_modules=3)
    page = capsys.readouterr().out
    assert "Profile Summary at step 7:" in page.splitlines()
    stopped.print_model_aggregated_profile(module_depth=1, top_modules=3)
    assert capsys.readouterr().out.splitlines() == parts(page)[1]


# The call of the model


def test_func_name_and_mode_both_select_the_method() -> None:
    model, x = Generates(), torch.rand(2, 4)
    one = totals(model, x)
    assert one == (64, 32, 16)
    assert totals(model, x, func_name="generate") == (192, 96, 16)
    assert totals(model, x, mode="generate") == (192, 96, 16)
    assert totals(model, x, mode="generate", func_name="generate") == (192, 96, 16)
    assert totals(model, x, mode="forward") == one
    with pytest.raises(torchprof.TorchprofError, match="two names of one thing"):
        totals(model, x, mode="generate", func_name="sample")
    with pytest.raises(torchprof.TorchprofError, match="has no method 'sample'"):
        totals(model, x, func_name="sample")


def test_positional_and_keyword_arguments_are_passed() -> None:
    model, x = Generates(), torch.rand(2, 4)
    assert totals(model, x, kwargs={"times": 2})[1] == 64
    assert totals(model, x, kwargs=None)[1] == 32
    assert get_model_profile(model, args=None, kwargs={"x": x}, print_profile=False)[1] == 32
    assert get_model_profile(model, (2, 4), None, None, False)[1] == 32
    assert get_model_profile(model, torch.Size((2, 4)), kwargs={"times": 3}, print_profile=False)[1] == 96


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "give input_shape, args or kwargs"),
        ({"args": torch.rand(2, 4)}, "args is a list"),
        ({"args": [1], "kwargs": [1]}, "kwargs is a dict"),
        ({"input_shape": ()}, "input_shape is a tuple of sizes"),
        ({"input_shape": 4}, "input_shape is a tuple of sizes"),
        ({"input_shape": (2, "4")}, "input_shape is a tuple of sizes"),
        ({"input_shape": (2, 4), "warm_up": -1}, "warm_up=-1 should be"),
        ({"input_shape": (2, 4), "module_depth": -2}, "module_depth=.* should be"),
        ({"input_shape": (2, 4), "module_depth": None}, "module_depth=.* should be"),
        ({"input_shape": (2, 4), "top_modules": 0}, "top_modules=0 should be"),
        ({"input_shape": (2, 4), "output_file": 7}, "output_file is the name of a file"),
    ],
)
def test_bad_arguments_raise(options: dict[str, Any], what: str) -> None:
    with pytest.raises(torchprof.TorchprofError, match=what):
        get_model_profile(Mlp(), **options)


def test_ignored_modules_are_not_counted(page_of: Callable[..., str]) -> None:
    model, x = nn.Sequential(Mlp(), nn.Linear(2, 3, bias=False)), torch.rand(3, 4)
    assert totals(model, x)[:2] == (312 + 36, 144 + 18)
    assert totals(model, x, ignore_modules=[nn.ReLU])[:2] == (288 + 36, 144 + 18)
    assert totals(model, x, ignore_modules=[Mlp])[:2] == (36, 18)
    assert totals(model, x, ignore_modules=(model[0].fc2,))[:2] == (312 - 96 + 36, 144 - 48 + 18)
    page = page_of(model, x, ignore_modules=[Mlp])
    module, ran, _ = figures(next(line for line in page.splitlines() if "(fc1)" in line))
    assert (module["flops"], ran, module["param"]) == (UNKNOWN, {}, "40")
    assert totals(model, x)[:2] == (312 + 36, 144 + 18)


# Modules with several paths, wrappers, modules that are added or removed


def test_tied_weights_count_in_each_module_that_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    class Tying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens))

    model = Tying()
    prof = FlopsProfiler(model)
    prof.start_profile()
    model(torch.zeros(1, 2, dtype=torch.long))
    prof.stop_profile()
    assert prof.get_total_params() == 40
    prof.print_model_profile()
    assert capsys.readouterr().out.count("'param': '40'") == 3
    prof.end_profile()


def test_a_compiled_model_is_shown_inside_its_wrapper(page_of: Callable[..., str]) -> None:
    model = torch.compile(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), backend="eager")
    model(torch.rand(2, 4))  # compiles
    page = page_of(model, torch.rand(2, 4))
    assert stripped(parts(page)[2]) == repr(model).splitlines()
    assert totals(model, torch.rand(2, 4))[:2] == (48, 24)
    inlined, ran, lasted = figures(next(line for line in page.splitlines() if "(0): Linear" in line))
    assert (inlined["param"], inlined["flops"], inlined["duration%"]) == ("15", UNKNOWN, UNKNOWN)
    assert (ran, lasted) == ({}, UNKNOWN)
    assert f"    flops       - {{'Linear': '{UNKNOWN}', 'Tanh': '{UNKNOWN}'}}" in parts(page)[1]


def test_a_scripted_model_is_profiled(page_of: Callable[..., str]) -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 3)))
    page = page_of(model, torch.rand(2, 4))
    assert stripped(parts(page)[2]) == repr(model).splitlines()
    assert functionals(page) == {"linear": ("48", "24 MACs")}
    inner, _, _ = figures(next(line for line in page.splitlines() if "(0)" in line))
    assert (inner["param"], inner["flops"], inner["macs"], inner["FLOPS"]) == ("15", UNKNOWN, UNKNOWN, UNKNOWN)


def test_warnings_are_under_the_profiles(page_of: Callable[..., str]) -> None:
    class Unused(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(self.left(x))

    sentences = parts(page_of(Unused(left=nn.Linear(4, 4), right=nn.Linear(4, 4)), torch.rand(2, 4)))[0]
    assert any(line.startswith("Never called: Unused.right") for line in sentences)
    assert any(line.startswith("Not counted: aten::special_bessel_j0 (1 call") for line in sentences)
    own = next(line for line in sentences if "torchprof's own convention" in line)
    assert own.endswith("fwd: ≥ 72.")  # 2·32 and the bias


# The summary


def summary_of(
    ds_engine: Any, capsys: pytest.CaptureFixture[str], step: bool = False, **options: Any
) -> dict[str, str]:
    """The figures of the summary, by label, for a call of a model on three rows, or for a training step."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prof = FlopsProfiler(model, ds_engine, **options)
    prof.start_profile([model[2]] if step else None)
    loss = model(torch.rand(3, 4)).sum()
    if step:
        loss.backward()
        optimizer.step()
    prof.stop_profile()
    prof.print_model_profile(detailed=False)
    prof.end_profile()
    lines = capsys.readouterr().out.splitlines()
    return {match[1]: match[2] for line in lines if (match := re.fullmatch(r"(.+): {2,}(\S.*)", line))}


def test_a_training_step_inside_the_profile_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = summary_of(None, capsys, step=True, recompute_fwd_factor=1.0)
    # The gradient of the first weight, and 1 for each element of the ReLU: the second layer is ignored.
    assert found["bwd flops per device"] == str(2 * 3 * 4 * 8 + 24)
    labels = list(found)
    assert labels[labels.index("fwd latency") :] == [
        "fwd latency",
        "fwd FLOPS per device = fwd flops per device / fwd latency",
        "bwd flops per device",
        "bwd latency",
        "bwd FLOPS per device = bwd flops per device / bwd latency",
        "fwd+bwd FLOPS per device = fwd+bwd flops per device / (fwd+bwd latency)",
        "step latency",
        "iter latency",
        "FLOPS per device = fwd+bwd flops per device / iter latency",
    ]


def engine(**changes: Any) -> SimpleNamespace:
    """The attributes of a DeepSpeed engine that are read: 10 ms forward, 20 ms backward, 5 ms step."""

    class Timers:
        def __call__(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(elapsed=lambda reset: {"fwd": 10.0, "bwd": 20.0, "step": 5.0}[name])

        def has_timer(self, name: str) -> bool:
            return name in ("fwd", "bwd", "step")

    attributes: dict[str, Any] = {
        "world_size": 8,
        "dp_world_size": 4,
        "mp_world_size": 2,
        "train_micro_batch_size_per_gpu": lambda: 16,
        "wall_clock_breakdown": lambda: True,
        "timers": Timers(),
    }
    return SimpleNamespace(**{**attributes, **changes})


def test_the_summary_has_the_sizes_and_times_of_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    found = summary_of(engine(), capsys, recompute_fwd_factor=0.5)
    assert found == {
        "world size": "8",
        "data parallel size": "4",
        "model parallel size": "2",
        "batch size per device": "16",
        "params per device": "48",
        "params of model = params per device * mp_size": "96",
        "fwd MACs per device": "144 MACs",
        "fwd flops per device": "312",
        "fwd flops of model = fwd flops per device * mp_size": "624",
        "fwd latency": "10.0 ms",
        "fwd FLOPS per device = fwd flops per device / fwd latency": "31.2 KFLOPS",
        "bwd latency": "20.0 ms",
        "bwd FLOPS per device = 2.5 * fwd flops per device / bwd latency": "39.0 KFLOPS",
        "fwd+bwd FLOPS per device = 3.5 * fwd flops per device / (fwd+bwd latency)": "36.4 KFLOPS",
        "step latency": "5.0 ms",
        "iter latency": "35.0 ms",
        "FLOPS per device = 3.5 * fwd flops per device / iter latency": "31.2 KFLOPS",
        "samples/second": "3657.14",
    }


def test_an_engine_may_have_no_timers_or_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    found = summary_of(engine(wall_clock_breakdown=lambda: False), capsys)
    assert "bwd latency" not in found and found["world size"] == "8"
    units = SimpleNamespace(get_model_parallel_world_size=lambda: 2, get_data_parallel_world_size=lambda: 3)
    found = summary_of(SimpleNamespace(mpu=units), capsys)
    assert (found["model parallel size"], found["data parallel size"]) == ("2", "3")
    assert found["params of model = params per device * mp_size"] == "96"
    assert "world size" not in found and "batch size per device" not in found
    assert "world size" not in summary_of(object(), capsys)
    with pytest.raises(torchprof.TorchprofError, match="recompute_fwd_factor is the share"):
        FlopsProfiler(Mlp(), recompute_fwd_factor=-1.0)


def test_the_number_of_processes_comes_from_torch_distributed(world_of_one: None, page_of: Callable[..., str]) -> None:
    model = nn.parallel.DistributedDataParallel(Mlp())
    page = page_of(model, torch.rand(3, 4))
    assert [line.split() for line in parts(page)[0] if " size:" in line] == [
        ["world", "size:", "1"],
        ["data", "parallel", "size:", "1"],
    ]
    assert stripped(parts(page)[2]) == repr(model).splitlines()
    assert totals(model, torch.rand(3, 4)) == (312, 144, 58)


# Last, since importing transformers makes the start of each later profile slower.

BERT_AGGREGATED = """
depth 1:
    params      - {'BertEncoder': '85.05 M', 'BertEmbeddings': '23.84 M', 'BertPooler': '590.59 k'}
    flops       - {'BertEncoder': '22.37 G', 'BertPooler': '1.18 M', 'BertEmbeddings': '491.52 K'}
    MACs        - {'BertEncoder': '11.17 GMACs', 'BertPooler': '589.82 KMACs', 'BertEmbeddings': '0 MACs'}
depth 2:
    params      - {'ModuleList': '85.05 M', 'Embedding': '23.84 M', 'Linear': '590.59 k', 'LayerNorm': '1.54 k', \
'Dropout': '0', 'Tanh': '0'}
    flops       - {'ModuleList': '22.37 G', 'Linear': '1.18 M', 'LayerNorm': '491.52 K', 'Embedding': '0', \
'Dropout': '0', 'Tanh': '0'}
    MACs        - {'ModuleList': '11.17 GMACs', 'Linear': '589.82 KMACs', 'Embedding': '0 MACs', 'LayerNorm': \
'0 MACs', 'Dropout': '0 MACs', 'Tanh': '0 MACs'}
depth 4:
    params      - {'BertAttention': '28.37 M', 'BertIntermediate': '28.35 M', 'BertOutput': '28.34 M'}
    flops       - {'BertAttention': '7.86 G', 'BertOutput': '7.25 G', 'BertIntermediate': '7.25 G'}
    MACs        - {'BertAttention': '3.93 GMACs', 'BertIntermediate': '3.62 GMACs', 'BertOutput': '3.62 GMACs'}
"""


def test_bert_base_has_the_figures_of_the_tools_page(capsys: pytest.CaptureFixture[str]) -> None:
    """On the meta device, which computes nothing. The tool's page has 22.36 G: it lacks the GELU, 12 · 128 · 3072."""
    transformers = usable_transformers()
    with torch.device("meta"):
        model = transformers.BertModel._from_config(transformers.BertConfig(), attn_implementation="eager")
    tokens = torch.zeros(1, 128, dtype=torch.long, device="meta")
    macs = 11_174_215_680
    of_norms, of_softmax, of_gelu = 5 * 25 * 128 * 768, 12 * 12 * 128 * 128, 12 * 128 * 3072
    flops = 2 * macs + of_norms + of_softmax + of_gelu
    assert get_model_profile(model, kwargs={"input_ids": tokens}) == (flops, macs, 109_482_240)
    page = capsys.readouterr().out
    summary, aggregated, _ = parts(page)
    assert "params per device:                                            109.48 M" in summary
    assert "fwd MACs per device:                                          11.17 GMACs" in summary
    assert "fwd flops of model = fwd flops per device * mp_size:          22.37 G" in summary
    assert functionals(page) == {
        "embedding": ("0", "0 MACs"),
        "layer_norm": ("12.29 M", "0 MACs"),
        "linear": ("21.74 G", "10.87 GMACs"),
        "matmul": ("603.98 M", "301.99 MMACs"),
        "softmax": ("2.36 M", "0 MACs"),
        "gelu": ("4.72 M", "0 MACs"),
    }
    assert [line for line in BERT_AGGREGATED.splitlines() if line and line not in aggregated] == []
    assert "depth 6:" in aggregated  # the deepest: Linear in BertSelfAttention
    query = next(line for line in page.splitlines() if "(query): Linear" in line)
    assert figures(query)[0]["flops"] == "150.99 M"
    assert query.endswith(", in_features=768, out_features=768, bias=True)")


@pytest.mark.filterwarnings("ignore")
def test_uncountable_work_is_unknown_and_never_zero(capsys: pytest.CaptureFixture[str]) -> None:
    packed = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear})
    assert get_model_profile(packed, (2, 8), print_profile=False)[:2] == (None, None)
    assert get_model_profile(packed, (2, 8), as_string=True)[:2] == ("–", "–")
    page = capsys.readouterr().out
    assert "flops       - {'Sequential': '–'}" in page
    assert "'flops': '–', 'macs': '–'" in page
    assert "quantized::linear_dynamic" in page
    partly = nn.Sequential(nn.Linear(8, 8), packed)
    assert get_model_profile(partly, (2, 8), print_profile=False, as_string=True)[:2] == ("≥ 256", "≥ 128 MACs")
    get_model_profile(partly, (2, 8), detailed=False)
    assert "flops       - {'Sequential': '≥ 256'}" in capsys.readouterr().out


def test_work_outside_of_forwards_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    class Encodes(Layers):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) @ self.fc(x).T

    get_model_profile(Encodes(fc=nn.Linear(4, 4, bias=False)), (2, 4), func_name="encode")
    assert "not among these figures: 16 MACs, 32 flops." in capsys.readouterr().out
