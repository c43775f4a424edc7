"""The drop-in for the early DeepSpeed profiler: its page, its convention, its configuration."""

from __future__ import annotations

import copy
import json
import pickle
import re
from array import array
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build.models import Half, Holder, Layers, Mlp
from build.places import ROOT
from build.snapshots import untouched_models
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torchprof import Profile, TorchprofError
from torchprof.integrations.conventions import (
    DEEPSPEED,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from torchprof.integrations.deepspeed import (
    add_profile_methods,
    counting_sentences,
    from_config,
    get_model_profile,
    top_lines,
    tree_lines,
)
from torchprof.integrations.recorded_model import ModelFigures
from torchprof.record import session_columns as raw_events

# The page of the original tool, without all that depends on a clock.
PAGE = """\
LeNet5(
  61.71 k, 100.000% Params, 429.248 KMac, 100.000% MACs, <time>, 100.00% time, <rate> TFLOPS,
  (feature_extractor): Sequential(
    50.69 k, 82.151% Params, 418.328 KMac, 97.456% MACs, <time>, <share> time, <rate> TFLOPS,
    (0): Conv2d(156, 0.253% Params, 122.304 KMac, 28.493% MACs, <time>, <share> time, <rate> TFLOPS, \
1, 6, kernel_size=(5, 5), stride=(1, 1))
    (1): Tanh(0, 0.000% Params, 0 Mac, 0.000% MACs, <time>, <share> time, <rate> TFLOPS, )
    (2): AvgPool2d(0, 0.000% Params, 4.704 KMac, 1.096% MACs, <time>, <share> time, <rate> TFLOPS, \
kernel_size=2, stride=2, padding=0)
    (3): Conv2d(2.42 k, 3.915% Params, 241.6 KMac, 56.284% MACs, <time>, <share> time, <rate> TFLOPS, \
6, 16, kernel_size=(5, 5), stride=(1, 1))
    (4): Tanh(0, 0.000% Params, 0 Mac, 0.000% MACs, <time>, <share> time, <rate> TFLOPS, )
    (5): AvgPool2d(0, 0.000% Params, 1.6 KMac, 0.373% MACs, <time>, <share> time, <rate> TFLOPS, \
kernel_size=2, stride=2, padding=0)
    (6): Conv2d(48.12 k, 77.983% Params, 48.12 KMac, 11.210% MACs, <time>, <share> time, <rate> TFLOPS, \
16, 120, kernel_size=(5, 5), stride=(1, 1))
    (7): Tanh(0, 0.000% Params, 0 Mac, 0.000% MACs, <time>, <share> time, <rate> TFLOPS, )
  )
  (classifier): Sequential(
    11.01 k, 17.849% Params, 10.92 KMac, 2.544% MACs, <time>, <share> time, <rate> TFLOPS,
    (0): Linear(10.16 k, 16.472% Params, 10.08 KMac, 2.348% MACs, <time>, <share> time, <rate> TFLOPS, \
in_features=120, out_features=84, bias=True)
    (1): Tanh(0, 0.000% Params, 0 Mac, 0.000% MACs, <time>, <share> time, <rate> TFLOPS, )
    (2): Linear(850, 1.377% Params, 840 Mac, 0.196% MACs, <time>, <share> time, <rate> TFLOPS, \
in_features=84, out_features=10, bias=True)
  )
)
Top 3 modules in flops at depth 2 are {'Conv2d': '412.02 KMac', 'Linear': '10.92 KMac', 'AvgPool2d': '6.3 KMac'}
Top 3 modules in params at depth 2 are {'Conv2d': '50.69 k', 'Linear': '11.01 k', 'Tanh': '0'}
"""


class LeNet5(nn.Module):
    """The model on the tool's page."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_extractor = nn.Sequential(
            *(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(16, 120, 5), nn.Tanh()),
        )
        self.classifier = nn.Sequential(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.feature_extractor(x).flatten(1))


def masked(line: str) -> str:
    """A line without its times and time shares; the model's share of 100.00% stays."""
    line = re.sub(r"[\d.]+ (?:s|ms|us), ([\d.]+%) time, [\d.]+ TFLOPS", r"<time>, \1 time, <rate> TFLOPS", line)
    return re.sub(r"<time>, (?!100\.00)[\d.]+%", "<time>, <share>", line)


def macs_of(model: nn.Module, *sizes: int, **options: Any) -> Any:
    """The multiply-adds of one example, without printing."""
    quiet: dict[str, Any] = {
        "print_profile": False,
        "print_aggregated_profile": False,
        "as_strings": False,
        "warm_up": 0,
    }
    return get_model_profile(model, sizes, **{**quiet, **options})[0]


def recorded(model: nn.Module, call: Callable[[], Any] = lambda: None) -> ModelFigures:
    """The figures of what ``call`` runs of the model."""
    with Profile(model, with_flops=True) as profile:
        call()
    return ModelFigures(profile.run, model, DEEPSPEED)


def tree(model_figures: ModelFigures) -> str:
    return "\n".join(tree_lines(model_figures))


def figures(page: str) -> dict[str, tuple[str, str, str]]:
    """The texts of parameters, multiply-adds and time of each module, by its name. Names must be unique."""
    found = {}
    name = "root"
    for line in page.splitlines():
        head = re.match(r" *\((\w+)\): ", line)
        name = head[1] if head else name
        values = re.search(r"([^(\s][^(,]*), [^ ]+ Params, ([^,]+), [^ ]+ MACs, ([^,]+), ", line)
        if values:
            found[name] = values[1], values[2], values[3]
    return found


untouched = pytest.fixture(untouched_models)


# The page


def test_the_page_equals_that_of_the_tool(capsys: pytest.CaptureFixture[str], untouched: Any) -> None:
    macs, params = get_model_profile(untouched(LeNet5()), (1, 32, 32), warm_up=1)
    print("{:<30}  {:<8}".format("Number of multiply-adds: ", macs))
    print("{:<30}  {:<8}".format("Number of parameters: ", params))
    lines = capsys.readouterr().out.splitlines()
    expected = PAGE.splitlines()
    assert [masked(line) for line in lines[: len(expected)]] == expected
    after = lines[len(expected) :]
    assert re.fullmatch(r"Top 3 modules in time at depth 2 are \{('\w+': '[\d.]+ (s|ms|us)'(, )?){3}\}", after[0])
    assert "torchprof itself counts 416.52 K MACs" in after[1]
    assert after[-2:] == ["Number of multiply-adds:        429.25 KMac", "Number of parameters:           61.71 k "]


def test_as_strings_false_returns_numbers_and_the_notes_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert get_model_profile(LeNet5(), (1, 32, 32), warm_up=0, as_strings=False) == (429_248, 61_706)
    assert capsys.readouterr().out.count("by this tool's convention") == 1


@pytest.mark.parametrize(("tree", "top"), [(True, False), (False, True), (False, False)])
def test_each_part_of_the_page_can_be_switched_off(capsys: pytest.CaptureFixture[str], tree: bool, top: bool) -> None:
    get_model_profile(Mlp(), (4,), print_profile=tree, print_aggregated_profile=top, warm_up=0)
    printed = capsys.readouterr().out
    assert ("Mlp(\n" in printed, "Top 2 modules" in printed) == (tree, top)
    assert ("by this tool's convention" in printed) == (tree or top)


def test_the_rate_follows_from_time_and_multiply_adds() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Sequential(nn.Linear(512, 1024), nn.ReLU()))
    page = recorded(model, lambda: model(torch.rand(1024, 512)))
    total = page.whole.seconds
    assert total
    lines = [line for line in tree(page).splitlines() if "TFLOPS" in line]
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    seconds = []
    for line in lines:
        macs, mac_unit, _, time, unit, share, rate = re.search(
            r"([\d.]+) (\w*)Mac, ([\d.]+)% MACs, ([\d.]+) (s|ms|us), ([\d.]+)% time, ([\d.]+) TFLOPS", line
        ).groups()  # type: ignore[union-attr]
        seconds.append(float(time) * scale[unit])
        done = float(macs) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[mac_unit]
        assert float(rate) == pytest.approx(2 * done / seconds[-1] / 1e12, abs=0.001)
        assert float(share) == pytest.approx(100 * seconds[-1] / total, abs=0.02)
    root, first, block, second, relu = seconds
    assert root == pytest.approx(total, rel=1e-3)
    assert first + block <= root * 1.001
    assert second + relu <= block * 1.001


def test_every_child_has_a_line_at_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    class Wordy(nn.Module):
        def extra_repr(self) -> str:
            return "first\nsecond"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), Holder(Wordy()))
    model[1].register_module("nothing", None)
    model.forward = lambda x: model[1](model[0][1](model[0][0](x)))  # type: ignore[method-assign]
    get_model_profile(model, (4,), warm_up=0, print_aggregated_profile=False)
    lines = [re.sub(r"[\d.]+ (us|ms|s), .*? TFLOPS", "…", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[: lines.index(")") + 1] == [
        "Sequential(",
        "  40, 100.000% Params, 32 Mac, 100.000% MACs, …,",
        "  (0): ModuleList(",
        "    40, 100.000% Params, 32 Mac, 100.000% MACs, …,",
        "    (0): Linear(20, 50.000% Params, 16 Mac, 50.000% MACs, …, in_features=4, out_features=4, bias=True)",
        "    (1): Linear(20, 50.000% Params, 16 Mac, 50.000% MACs, …, in_features=4, out_features=4, bias=True)",
        "  )",
        "  (1): Holder(",
        "    0, 0.000% Params, 0 Mac, 0.000% MACs, …,",
        "    (inner): Wordy(",
        "      0, 0.000% Params, 0 Mac, 0.000% MACs, …, first",
        "      second",
        "    )",
        "    (nothing): None",
        "  )",
        ")",
    ]


@pytest.mark.parametrize(
    ("depth", "shown", "kinds"),
    [(-1, 2, ["Conv2d", "Linear", "AvgPool2d"]), (99, 2, ["Conv2d", "Linear", "AvgPool2d"]), (1, 1, ["Sequential"])],
)
def test_the_depth_ends_at_the_innermost_modules(
    capsys: pytest.CaptureFixture[str], depth: int, shown: int, kinds: list[str]
) -> None:
    get_model_profile(LeNet5(), (1, 32, 32), print_profile=False, depth=depth, warm_up=0)
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"Top {len(kinds)} modules in flops at depth {shown} are ")
    assert re.findall(r"'(\w+)':", line) == kinds


def test_depth_0_is_the_model_and_a_large_top_num_shows_all_classes(capsys: pytest.CaptureFixture[str]) -> None:
    get_model_profile(LeNet5(), (1, 32, 32), print_profile=False, depth=0, top_num=50, warm_up=0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Top 1 modules in flops at depth 0 are {'LeNet5': '429.25 KMac'}"
    assert lines[1] == "Top 1 modules in params at depth 0 are {'LeNet5': '61.71 k'}"
    get_model_profile(LeNet5(), (1, 32, 32), print_profile=False, top_num=50, warm_up=0)
    assert re.findall(r"Top 4 modules in \w+ at depth 2", capsys.readouterr().out) == [
        f"Top 4 modules in {what} at depth 2" for what in ("flops", "params", "time")
    ]


# The convention: every number calculated by hand

TOKENS, WIDTH, HIDDEN = 6, 8, 16
ELEMENTS = 2 * 4 * 10 * 10  # of an image [2, 4, 10, 10], without the batch
VOLUME = (2, 4, 10, 10)


@pytest.mark.parametrize(
    ("module", "sizes", "macs"),
    [
        (nn.Conv2d(4, 6, 3), (4, 10, 10), 6 * 8 * 8 * (4 * 9 + 1)),
        (nn.Conv2d(4, 6, 3, bias=False), (4, 10, 10), 6 * 8 * 8 * 4 * 9),
        (nn.Conv2d(4, 8, 3, groups=4, stride=2, padding=1), (4, 10, 10), 8 * 5 * 5 * (9 + 1)),
        (nn.Conv2d(4, 6, 3, padding="same", dilation=2), (4, 10, 10), 6 * 10 * 10 * (4 * 9 + 1)),
        (nn.Conv1d(4, 6, 3), (4, 10), 6 * 8 * (4 * 3 + 1)),
        (nn.Conv3d(2, 3, 2), (2, 4, 10, 10), 3 * 3 * 9 * 9 * (2 * 8 + 1)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 10, 10), 10 * 10 * 4 * 6 * 9 + 6 * 21 * 21),
        (nn.ConvTranspose1d(4, 6, 3, bias=False), (4, 10), 10 * 4 * 6 * 3),
        (nn.ConvTranspose3d(2, 3, 2), (2, 4, 10, 10), 4 * 10 * 10 * 2 * 3 * 8 + 3 * 5 * 11 * 11),
        (nn.Linear(10, 7), (4, 10), 4 * 10 * 7),
        (nn.Linear(10, 7, bias=False), (4, 10), 4 * 10 * 7),
        (nn.ReLU6(), VOLUME, ELEMENTS),
        (nn.BatchNorm1d(4), (4, 10), 2 * 4 * 10),
        (nn.BatchNorm2d(4), VOLUME[1:], 2 * 4 * 10 * 10),
        (nn.BatchNorm3d(2, affine=False), VOLUME, 2 * ELEMENTS),
        (nn.GELU(), VOLUME, 0),
        (nn.LayerNorm(10), VOLUME, 0),
        (nn.GroupNorm(2, 4), VOLUME[1:], 0),
        (nn.InstanceNorm2d(4), VOLUME[1:], 0),
        (nn.Upsample(scale_factor=2), VOLUME[1:], 0),
    ],
    ids=lambda value: repr(value) if isinstance(value, nn.Module) else "",
)
def test_one_module_counts_as_the_tool_did(module: nn.Module, sizes: tuple[int, ...], macs: int) -> None:
    assert macs_of(module, *sizes) == macs


@pytest.mark.parametrize(
    ("module", "sizes", "per_token"),
    [
        (nn.LSTM(WIDTH, HIDDEN), (TOKENS, WIDTH), 4 * HIDDEN * (WIDTH + HIDDEN) + 8 * HIDDEN + 10 * HIDDEN),
        (nn.LSTM(WIDTH, HIDDEN, bias=False), (TOKENS, WIDTH), 4 * HIDDEN * (WIDTH + HIDDEN) + 10 * HIDDEN),
        (nn.GRU(WIDTH, HIDDEN), (TOKENS, WIDTH), 3 * HIDDEN * (WIDTH + HIDDEN) + 6 * HIDDEN + 7 * HIDDEN),
        (nn.RNN(WIDTH, HIDDEN), (TOKENS, WIDTH), HIDDEN * (WIDTH + HIDDEN) + 2 * HIDDEN + HIDDEN),
        (nn.RNN(WIDTH, HIDDEN, nonlinearity="relu"), (TOKENS, WIDTH), HIDDEN * (WIDTH + HIDDEN) + 3 * HIDDEN),
        (
            nn.GRU(WIDTH, HIDDEN, num_layers=2, bidirectional=True),
            (TOKENS, WIDTH),
            2 * 3 * HIDDEN * (WIDTH + HIDDEN) + 2 * 3 * HIDDEN * (2 * HIDDEN + HIDDEN) + 4 * (6 + 7) * HIDDEN,
        ),
        (nn.LSTMCell(WIDTH, HIDDEN), (WIDTH,), 4 * HIDDEN * (WIDTH + HIDDEN) + 8 * HIDDEN + 10 * HIDDEN),
        (nn.GRUCell(WIDTH, HIDDEN, bias=False), (WIDTH,), 3 * HIDDEN * (WIDTH + HIDDEN) + 7 * HIDDEN),
        (nn.RNNCell(WIDTH, HIDDEN), (WIDTH,), HIDDEN * (WIDTH + HIDDEN) + 3 * HIDDEN),
    ],
    ids=lambda value: repr(value) if isinstance(value, nn.Module) else "",
)
def test_a_recurrent_module_counts_weights_biases_and_gates_for_each_token(
    module: nn.Module, sizes: tuple[int, ...], per_token: int
) -> None:
    assert macs_of(module, *sizes) == per_token * (TOKENS if len(sizes) == 2 else 1)


def test_without_the_shapes_of_lists_recurrent_layers_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_events, "_shapes_of_lists", None)
    assert macs_of(nn.LSTM(WIDTH, HIDDEN), TOKENS, WIDTH) is None
    assert macs_of(nn.GRU(WIDTH, HIDDEN), TOKENS, WIDTH) is None
    assert macs_of(nn.GRUCell(WIDTH, HIDDEN), WIDTH) == 3 * HIDDEN * (WIDTH + HIDDEN) + (6 + 7) * HIDDEN


def test_a_packed_batch_counts_its_tokens_without_padding() -> None:
    model = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(torch.rand(3, 5, WIDTH), torch.tensor([5, 3, 1]), batch_first=True)
    of_a_token = 4 * HIDDEN * (WIDTH + HIDDEN) + 18 * HIDDEN
    assert recorded(model, lambda: model(packed)).whole.work == (5 + 3 + 1) * of_a_token


@pytest.mark.parametrize("gradients", [True, False])
def test_fused_attention_counts_as_its_parts(gradients: bool) -> None:
    """In eval mode without gradients, torch runs one fused operator; the count is the same."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, batch_first=True)
    smooth = nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, batch_first=True, activation="gelu")
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def thrice(sizes: Any) -> dict[str, torch.Tensor]:
        x = torch.rand(1, TOKENS, WIDTH)
        return {"query": x, "key": x, "value": x}

    of_linear = TOKENS * 4 * WIDTH * WIDTH
    with torch.set_grad_enabled(gradients):
        assert macs_of(layer, TOKENS, WIDTH) == of_linear + 2 * TOKENS * WIDTH * HIDDEN + TOKENS * HIDDEN
        assert macs_of(smooth, TOKENS, WIDTH) == of_linear + 2 * TOKENS * WIDTH * HIDDEN
        assert macs_of(attention, input_constructor=thrice) == of_linear + 2 * TOKENS * TOKENS


def test_functions_count_in_the_module_that_calls_them(capsys: pytest.CaptureFixture[str]) -> None:
    class Several(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = functional.linear(functional.relu(self.fc(x)), self.weight)
            with sdpa_kernel(SDPBackend.MATH):  # it contains a softmax
                x = functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
            return functional.softmax(x @ x.transpose(-1, -2), -1)

    get_model_profile(Several(weight=nn.Parameter(torch.rand(6, 8)), fc=nn.Linear(8, 8)), (5, 8), warm_up=0)
    shown = figures(capsys.readouterr().out)
    assert shown["fc"][1] == "320 Mac"  # 5 · 8 · 8
    assert shown["root"][1] == "625 Mac"  # and 5 · 8 · 6 of linear, 5 · 8 of relu, 5 · 5 of softmax; no products of x


def test_a_network_counts_as_in_torchs_counter_plus_biases_and_activations() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 7, stride=2, padding=3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(16, 32, 3, groups=4), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    with FlopCounterMode(display=False) as counter:
        model.eval()(torch.rand(1, 3, 64, 64))
    first, second = 16 * 32 * 32, 32 * 14 * 14  # elements after the convolutions
    extras = first + second + 2 * first + first + first + second + second
    assert macs_of(model, 3, 64, 64) == counter.get_total_flops() // 2 + extras


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_or_traced_network_counts_the_same() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)).eval()
    elements = 8 * 6 * 6
    macs = elements * (27 + 1) + 2 * elements + elements + elements * 2
    assert macs_of(model, 3, 8, 8) == macs
    assert macs_of(torch.jit.script(model), 3, 8, 8, warm_up=3) == macs
    assert macs_of(torch.jit.trace(model, torch.rand(1, 3, 8, 8)), 3, 8, 8, warm_up=3) == macs


# Unknown figures


def test_a_module_that_was_not_called_is_unknown_and_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    get_model_profile(Half(), (4,), warm_up=0)
    printed = capsys.readouterr().out
    shown = figures(printed)
    assert shown["used"][:2] == ("20", "16 Mac")
    assert shown["unused"] == ("20", "–", "–")
    assert shown["root"][:2] == ("40", "16 Mac")
    assert "(unused): Linear(20, 50.000% Params, –, – MACs, –, – time, – TFLOPS, in_features=4" in printed
    assert "Never called: Half.unused" in printed


def test_unknown_figures_are_listed_last() -> None:
    model = nn.ModuleList([nn.Conv2d(1, 1, 1), nn.Tanh(), nn.Linear(4, 4)])
    flops, params, time = top_lines(recorded(model, lambda: model[1](model[2](torch.rand(1, 4)))), -1, 3)
    assert flops.endswith("{'Linear': '16 Mac', 'Tanh': '0 Mac', 'Conv2d': '–'}")
    assert params.endswith("{'Linear': '20', 'Conv2d': '2', 'Tanh': '0'}")
    assert time.endswith("'Conv2d': '–'}")


def test_a_model_that_was_never_called_has_only_parameters() -> None:
    page = recorded(Mlp())
    assert page.whole.work is None
    assert page.whole.seconds is None
    assert page.params == 58
    assert flops_to_string(page.whole.work) == duration_to_string(page.whole.seconds) == "–"
    lines = [*tree_lines(page), *top_lines(page, -1, 3), *counting_sentences(page)]
    assert lines[1] == "  58, 100.000% Params, –, – MACs, –, – time, – TFLOPS,"
    assert any("torchprof itself counts – MACs and – FLOPs" in line for line in lines)
    assert "Top 2 modules in flops at depth 1 are {'Linear': '–', 'ReLU': '–'}" in lines


def test_a_model_without_parameters_can_be_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert get_model_profile(nn.Sequential(nn.ReLU()), (3, 5), warm_up=0) == ("15 Mac", "0")
    printed = capsys.readouterr().out
    assert "(0): ReLU(0, 0.000% Params, 15 Mac, 100.000% MACs, " in printed
    assert get_model_profile(nn.Tanh(), (3,), warm_up=0) == ("0 Mac", "0")
    assert "Tanh(0, 0.000% Params, 0 Mac, 0.000% MACs, " in capsys.readouterr().out


def test_uncounted_calls_make_a_figure_a_lower_bound_or_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    class Graph(nn.Module):
        """Runs what a profile shows of a graph that torch.compile made."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function("## Call CompiledFxGraph abc ##"):
                return torch.tanh(x)

    get_model_profile(nn.Sequential(nn.Linear(4, 4), Graph()), (4,), warm_up=0, print_aggregated_profile=False)
    shown = figures(capsys.readouterr().out)
    assert shown["0"][1] == "16 Mac"
    assert shown["1"][1] == "–"
    assert shown["root"][1] == "≥ 16 Mac"


# Wrappers


# Inputs, modes and the state afterwards


def test_inputs_come_from_a_constructor(capsys: pytest.CaptureFixture[str], untouched: Any) -> None:
    class Pair(Layers):
        def forward(self, tokens: torch.Tensor, *, scale: float) -> torch.Tensor:
            return self.fc(self.embed(tokens)) * scale

    asked = []

    def constructor(length: int) -> dict[str, Any]:
        asked.append(length)
        return {"tokens": torch.zeros(3, length, dtype=torch.long), "scale": 2.0}

    pair = untouched(Pair(embed=nn.Embedding(10, 4), fc=nn.Linear(4, 2)))
    macs, _ = get_model_profile(pair, 7, input_constructor=constructor, warm_up=2, as_strings=False)
    assert (macs, asked) == (3 * 7 * 8, [7, 7, 7])
    assert "(embed): Embedding(40, 80.000% Params, 0 Mac," in capsys.readouterr().out


def test_only_ignored_modules_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    model = LeNet5()
    macs, params = get_model_profile(
        model, (1, 32, 32), warm_up=0, as_strings=False, ignore_modules=[nn.Conv2d, nn.Sequential]
    )
    assert (macs, params) == (4704 + 1600 + 10_920, 61_706)
    lines = capsys.readouterr().out.splitlines()
    (first,) = (line for line in lines if "(0): Conv2d" in line)
    assert first.startswith("    (0): Conv2d(156, 0.253% Params, –, – MACs, ")
    assert "– time" not in first  # its time is part of the model's
    assert [line for line in lines if "50.69 k, 82.151% Params, 6.304 KMac, 36.600% MACs, " in line]
    assert macs_of(model, 1, 32, 32) == 429_248


# The methods


def test_the_loop_in_the_tools_documentation_runs(capsys: pytest.CaptureFixture[str], untouched: Any) -> None:
    model: Any = add_profile_methods(untouched(Mlp()))
    assert add_profile_methods(model) is model
    totals = []
    for step in range(4):
        if step == 2:
            model.start_profile()
        loss = model(torch.rand(2, 4)).sum()
        if step == 2:
            totals.append((model.get_total_flops(), model.get_total_params()))
            assert 0 < model.get_total_duration() == model.compute_total_duration() < 60
            model.print_model_profile()
            model.print_model_aggregated_profile(depth=-1, top_num=3)
            model.stop_profile()
            totals.append((model.compute_total_flops(), model.compute_total_params()))
        loss.backward()
        model.zero_grad()
    model.end_profile()  # takes the methods off again
    assert totals == [(112, 58)] * 2
    printed = capsys.readouterr().out
    assert printed.count("Mlp(\n") == printed.count("Top 2 modules in time at depth 1") == 1
    assert "Never called" not in printed


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_methods_of_its_own_and_no_figures(copied: Callable[[Any], Any]) -> None:
    model: Any = add_profile_methods(Mlp())
    model.start_profile()
    twin = copied(model)
    model(torch.rand(2, 4))
    assert model.get_total_flops() == 112
    with pytest.raises(TorchprofError, match="There are no figures"):
        twin.get_total_flops()
    model.end_profile()
    twin.start_profile()
    twin(torch.rand(4, 4))
    assert twin.get_total_flops() == 224
    assert not hasattr(model, "get_total_flops")
    twin.end_profile()


def test_an_attribute_of_the_model_is_not_replaced(untouched: Any) -> None:
    model: Any = Mlp()
    model.get_total_flops = lambda: 5
    with pytest.raises(TorchprofError, match="attribute of its own by the name 'get_total_flops'"):
        add_profile_methods(untouched(model))
    other: Any = add_profile_methods(Mlp())
    with pytest.raises(TorchprofError, match="depth=-3"):
        other.print_model_aggregated_profile(depth=-3)


# Text


@pytest.mark.parametrize(
    ("macs", "text"),
    [
        (0, "0 Mac"),
        (840, "840 Mac"),
        (999, "999 Mac"),
        (1000, "1.0 KMac"),
        (429_248, "429.25 KMac"),
        (10**6, "1.0 MMac"),
        (714_188_480, "714.19 MMac"),
        (10**9, "1.0 GMac"),
        (11_174_215_680_000, "11174.22 GMac"),
        (None, "–"),
    ],
)
def test_multiply_adds_as_text(macs: int | None, text: str) -> None:
    assert macs_to_string(macs) == flops_to_string(macs) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (macs_to_string(429_248, precision=3), "429.248 KMac"),
        (macs_to_string(429_248, "MMac", 1), "0.4 MMac"),
        (macs_to_string(429_248, units="Mac"), "429248 Mac"),
        (macs_to_string(5, units="GMac"), "0.0 GMac"),
        (flops_to_string(715e6, units="TFLOPS", precision=3), "0.001 TFLOPS"),
        (flops_to_string(0, units="TFLOPS"), "0.0 TFLOPS"),
        (flops_to_string(34_300_000_000_000, "TFLOPS", 3), "34.3 TFLOPS"),
        (flops_to_string(1500, "KFLOPS"), "1.5 KFLOPS"),
        (params_to_string(0), "0"),
        (params_to_string(850), "850"),
        (params_to_string(999), "999"),
        (params_to_string(1000), "1.0 k"),
        (params_to_string(61_706), "61.71 k"),
        (params_to_string(61_706, precision=3), "61.706 k"),
        (params_to_string(61_706, "K"), "61.71 K"),
        (params_to_string(61_706, ""), "61706"),
        (params_to_string(109_482_240), "109.48 M"),
        (params_to_string(None), "–"),
        (duration_to_string(0.000984669, precision=3), "984.669 us"),
        (duration_to_string(0.001201, precision=3), "1.201 ms"),
        (duration_to_string(0.00021863, precision=3), "218.63 us"),
        (duration_to_string(0.001), "1.0 ms"),
        (duration_to_string(1), "1 s"),
        (duration_to_string(75.346), "75.35 s"),
        (duration_to_string(1e-9, precision=3), "0.001 us"),
        (duration_to_string(0), "0.0 us"),
        (duration_to_string(0.5, "us"), "500000.0 us"),
        (number_to_string(999), "999"),
        (number_to_string(61_706), "61.71 K"),
        (number_to_string(22_360_000_000), "22.36 G"),
        (number_to_string(1_500_000, "M", 0), "2.0 M"),
        (number_to_string(2.5), "2.5"),
    ],
)
def test_figures_as_text(text: str, expected: str) -> None:
    assert text == expected


def test_unknown_units_and_values_that_are_not_numbers_raise() -> None:
    for convert in (macs_to_string, flops_to_string, params_to_string, duration_to_string, number_to_string):
        with pytest.raises(TorchprofError, match=r"'furlong'.*Choose from '\w+'"):
            convert(5, "furlong")
        with pytest.raises(TorchprofError, match="'5' is not a number"):
            convert("5")  # type: ignore[arg-type]
    with pytest.raises(TorchprofError, match="Did you mean 'KMac'"):
        macs_to_string(5, "KMAC")


# Bad arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"input_res": ()}, ["input_res", "(3, 224, 224)"]),
        ({"input_res": 4}, ["input_res is a tuple", "not 4"]),
        ({"input_res": None}, ["not None"]),
        ({"input_res": (4, -1)}, ["(4, -1)"]),
        ({"input_res": (True,)}, ["(True,)"]),
        ({"input_res": (4.0,)}, ["(4.0,)"]),
        ({"input_res": torch.rand(1, 4)}, ["not tensor"]),
        ({"depth": -2}, ["depth=-2", "-1"]),
        ({"depth": 1.5}, ["depth=1.5"]),
        ({"top_num": 0}, ["top_num=0", "from 1"]),
        ({"warm_up": -1}, ["warm_up=-1", "from 0"]),
        ({"warm_up": True}, ["warm_up=True"]),
        ({"input_constructor": 5}, ["input_constructor=5", "function"]),
        ({"input_constructor": lambda sizes: torch.rand(1, 4)}, ["returned a Tensor", "dict"]),
        ({"input_constructor": lambda sizes: {0: 1}}, ["returned a dict", "keyword"]),
    ],
)
def test_the_error_for_bad_arguments_says_what_to_do(
    capsys: pytest.CaptureFixture[str], untouched: Any, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(TorchprofError) as caught:
        get_model_profile(untouched(Mlp()), **{"input_res": (4,), **options})
    for word in words:
        assert word in str(caught.value)
    assert capsys.readouterr().out == ""


# The configuration

RECENT: dict[str, Any] = {
    "flops_profiler": {
        "enabled": True,
        "profile_step": 3,
        "module_depth": -1,
        "top_modules": 1,
        "detailed": True,
        "output_file": None,
    }
}
EARLY: dict[str, Any] = {"pytorch_profiler": True, "profile_step": 3, "profile_depth": -1, "profile_top_num": 1}
OTHERS: dict[str, Any] = {
    "train_batch_size": 8,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "wall_clock_breakdown": False,
    "gradient_clipping": 1.0,
}


def train(config: Any, model: nn.Module, capsys: pytest.CaptureFixture[str], steps: int = 5) -> list[str]:
    """Run a training loop with a configuration. Returns what each step printed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profiler = from_config(config)
    printed = []
    for _ in range(steps):
        with profiler.step(model):
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        printed.append(capsys.readouterr().out)
    return printed


@pytest.mark.parametrize("config", [EARLY, RECENT], ids=["early", "recent"])
@pytest.mark.parametrize("as_file", [False, True])
def test_a_configuration_profiles_one_step(
    config: dict[str, Any], as_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], untouched: Any
) -> None:
    given: Any = {**OTHERS, **config}
    if as_file:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(given), encoding="utf-8")
        given = str(file)
    before = copy.deepcopy(given)
    printed = train(given, untouched(Mlp()), capsys)
    assert given == before
    assert [bool(text) for text in printed] == [False, False, True, False, False]
    assert "(fc1): Linear(" in printed[2]


def test_the_older_keys_print_the_older_page(capsys: pytest.CaptureFixture[str]) -> None:
    text = train(EARLY, Mlp(), capsys)[2]
    lines = text.splitlines()
    assert lines[:2][0] == "Mlp("
    assert lines[1].startswith("  58, 100.000% Params, 112 Mac, 100.000% MACs, ")
    assert "Top 1 modules in flops at depth 1 are {'Linear': '96 Mac'}" in lines
    text = train({**EARLY, "profile_depth": 0, "profile_top_num": 3}, Mlp(), capsys)[2]
    assert "Top 1 modules in params at depth 0 are {'Mlp': '58'}" in text


def test_the_newer_keys_print_the_newer_page_to_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.txt"
    section = {**RECENT["flops_profiler"], "output_file": str(file), "detailed": False, "recompute_fwd_factor": 1.0}
    assert "".join(train({"flops_profiler": section}, Mlp(), capsys)) == ""
    page = file.read_text(encoding="utf-8")
    assert "step 3" in page
    assert "module = {" not in page
    train({"flops_profiler": {**section, "detailed": True}}, Mlp(), capsys)
    assert "module = {" in file.read_text(encoding="utf-8")


def test_the_newer_keys_are_passed_to_the_profiler() -> None:
    profiler = from_config({"flops_profiler": {"module_depth": 2, "top_modules": 4, "recompute_fwd_factor": 0.5}})
    assert profiler.make(Mlp()).recompute_fwd_factor == 0.5
    assert profiler.options == {
        "profile_step": 1,
        "module_depth": 2,
        "top_modules": 4,
        "detailed": True,
        "output_file": None,
    }


@pytest.mark.parametrize(
    "config",
    [
        {},
        OTHERS,
        {"flops_profiler": {}},
        {"flops_profiler": {**RECENT["flops_profiler"], "enabled": False}},
        {**EARLY, "pytorch_profiler": False},
    ],
    ids=["empty", "others", "section", "recent", "early"],
)
def test_without_enabled_nothing_is_profiled(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchprof.integrations.recorded_model.Profile", None)
    profiler = from_config(config)
    assert not profiler.enabled
    assert isinstance(profiler.step(Mlp()), nullcontext)
    assert train(config, Mlp(), capsys) == [""] * 5


def test_one_of_the_two_sections_may_be_off(capsys: pytest.CaptureFixture[str]) -> None:
    off = {"flops_profiler": {**RECENT["flops_profiler"], "enabled": False}}
    assert "Top 1 modules in time" in train({**EARLY, **off}, Mlp(), capsys)[2]
    printed = train({**EARLY, **RECENT, "pytorch_profiler": False}, Mlp(), capsys)[2]
    assert printed and "Top 1 modules in time" not in printed


@pytest.mark.parametrize("config", [EARLY, RECENT], ids=["early", "recent"])
def test_an_error_in_a_step_passes_through(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str], untouched: Any
) -> None:
    model = untouched(Mlp())
    profiler = from_config(config)
    for step in range(1, 5):
        with pytest.raises(KeyError, match="mine") if step == 3 else nullcontext(), profiler.step(model):
            model(torch.rand(2, 4)).sum().backward()
            if step == 3:
                raise KeyError("mine")
    assert (profiler.steps, capsys.readouterr().out) == (4, "")
    model.zero_grad()


@pytest.mark.parametrize("config", [EARLY, RECENT], ids=["early", "recent"])
def test_only_rank_0_is_profiled(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert train(config, Mlp(), capsys) == [""] * 5


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"flops_profiler": {"enabled": True, "profile_steps": 5}}, ["'profile_steps'", "'profile_step'", "mean"]),
        ({"flops_profiler": {"enable": True}}, ["'enable'", "Did you mean 'enabled'"]),
        ({"flops_profiler": {"enabled": True, "colour": 5}}, ["'colour'", "'module_depth'", "'output_file'"]),
        ({"flops_profiler": {"enabled": False, "colour": 5}}, ["'colour'"]),
        ({"flops_profiler": {"enabled": "yes"}}, ['"enabled"', "'yes'", "true or false"]),
        ({"flops_profiler": {"enabled": 1}}, ['"enabled"', "true or false"]),
        ({"flops_profiler": {"profile_step": 0}}, ['"profile_step"', "from 1 on"]),
        ({"flops_profiler": {"profile_step": 5.0}}, ['"profile_step"', "5.0"]),
        ({"flops_profiler": {"profile_step": True}}, ['"profile_step"', "True"]),
        ({"flops_profiler": {"module_depth": -2}}, ['"module_depth"', "from -1 on"]),
        ({"flops_profiler": {"top_modules": 0}}, ['"top_modules"', "from 1 on"]),
        ({"flops_profiler": {"detailed": None}}, ['"detailed"', "true or false"]),
        ({"flops_profiler": {"output_file": 5}}, ['"output_file"', "path"]),
        ({"flops_profiler": {"output_file": ""}}, ['"output_file"', "path"]),
        ({"flops_profiler": {"recompute_fwd_factor": -1}}, ['"recompute_fwd_factor"', "from 0 on"]),
        ({"flops_profiler": True}, ['"flops_profiler" is True', "object"]),
        ({"flops_profiler": [1]}, ["object"]),
        ({**EARLY, "pytorch_profiler": "on"}, ['"pytorch_profiler"', "true or false"]),
        ({**EARLY, "profile_step": "5"}, ['"profile_step"', "'5'"]),
        ({**EARLY, "profile_depth": -5}, ['"profile_depth"', "from -1 on"]),
        ({**EARLY, "profile_top_num": 0}, ['"profile_top_num"', "from 1 on"]),
        ({"pytorch_profiller": True}, ["'pytorch_profiller'", "Did you mean 'pytorch_profiler'"]),
        ({**EARLY, "profile_steps": 5}, ["'profile_steps'", "Did you mean 'profile_step'"]),
        ({**EARLY, "profile_topnum": 5}, ["'profile_topnum'", "Did you mean 'profile_top_num'"]),
        ({"flop_profiler": {"enabled": True}}, ["'flop_profiler'", "Did you mean 'flops_profiler'"]),
        ({"pytorch_proflier": True}, ["'pytorch_proflier'", "Did you mean 'pytorch_profiler'"]),
        ({"memory_profile": True}, ["unknown key 'memory_profile'", "'flops_profiler'"]),
        ({"profile_step": 5}, ["'profile_step' without", '"pytorch_profiler": true']),
        ({**EARLY, **RECENT}, ["both on"]),
        ([], ["dict", "[]"]),
        (None, ["dict", "None"]),
        (5, ["dict", "5"]),
    ],
)
def test_the_error_for_a_bad_configuration_says_what_is_wrong(config: Any, words: list[str]) -> None:
    with pytest.raises(TorchprofError) as caught:
        from_config(config)
    for word in words:
        assert word in str(caught.value)


def test_the_error_for_a_bad_file_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(TorchprofError, match=r"missing\.json' cannot be read: No such file"):
        from_config(tmp_path / "missing.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"flops_profiler": ', encoding="utf-8")
    with pytest.raises(TorchprofError, match=r"broken\.json' is not JSON: .*line 1"):
        from_config(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TorchprofError, match=r"broken\.json' is not JSON"):
        from_config(broken)
    broken.write_text("[1]", encoding="utf-8")
    with pytest.raises(TorchprofError, match=r"not \[1\]"):
        from_config(broken)
    with pytest.raises(TorchprofError, match="cannot be read"):
        from_config(tmp_path)


def test_a_step_needs_a_model() -> None:
    with pytest.raises(TorchprofError, match=r"torch\.nn\.Module, not None"):
        from_config(EARLY).step(None)  # type: ignore[arg-type]


# The documentation


def test_the_python_blocks_of_the_documentation_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = (ROOT / "docs" / "coming-from-deepspeed.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```json\n(.*?)^```$", document, re.MULTILINE | re.DOTALL):
        from_config(json.loads(block))
        (here / "ds_config.json").write_text(block, encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    model = LeNet5()
    space: dict[str, Any] = {
        "model": model,
        "loader": [torch.rand(2, 1, 32, 32)] * 6,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    for block in blocks:
        exec(compile(block, "coming-from-deepspeed.md", "exec"), space)
    assert len(blocks) == 3
    assert "429.25 KMac" in capsys.readouterr().out


def test_the_device_time_is_shown_if_it_was_recorded() -> None:
    model = Mlp()
    with Profile(model, with_flops=True) as prof:
        model(torch.rand(2, 4))
    run = prof.run
    took = {"Mlp.fc1": 4_000, "Mlp.fc2": 16_000}
    device_ns = [took.get(row.layer.name, 0) if row.layer is not None and not row.frames else 0 for row in run.rows]
    rows = replace(run.rows, columns={**run.rows.columns, "device_ns": array("q", device_ns)})
    meta = replace(run.meta, device="cuda", measured=("cpu_ns", "device_ns", "macs", "flops"))
    page = ModelFigures(replace(run, metas=(meta,), rows=rows), model, DEEPSPEED)
    printed = "\n".join([*tree_lines(page), *top_lines(page, -1, 3), *counting_sentences(page)])
    assert "100.000% MACs, 20.0 us, 100.00% time, 0.0 TFLOPS,\n" in printed
    assert "(fc1): Linear(40, 68.966% Params, 64 Mac, 57.143% MACs, 4.0 us, 20.00% time, 0.0 TFLOPS, " in printed
    assert "(act): ReLU(0, 0.000% Params, 16 Mac, 14.286% MACs, 0.0 us, 0.00% time, – TFLOPS, )" in printed
    assert "Top 2 modules in time at depth 1 are {'Linear': '20.0 us', 'ReLU': '0.0 us'}" in printed
    assert "Time is that of the work on the cuda device." in printed
