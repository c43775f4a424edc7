"""What the drop-ins for flops-profiler and for DeepSpeed share: the call of the model, the recording, the figures."""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from build.models import Checkpointed, Deep, Half, Holder, Layers, Mlp, Tied, Work
from build.snapshots import untouched_models
from torch import Tensor, nn

import torchprof
from torchprof import TorchprofError
from torchprof.integrations import deepspeed, flops_profiler
from torchprof.integrations.deepspeed import ProfileMethods, top_lines, tree_lines
from torchprof.integrations.flops_profiler import FlopsProfiler, lines_by_depth
from torchprof.integrations.recorded_model import LayerFigures, ModelRecording, positions


def by_flops_profiler(model: Any, *sizes: int, **options: Any) -> Any:
    """The multiply-accumulates of one call on a batch of one."""
    return flops_profiler.get_model_profile(model, (1, *sizes), print_profile=False, **options)[1]


def by_deepspeed(model: Any, *sizes: int, **options: Any) -> Any:
    quiet = {"print_profile": False, "print_aggregated_profile": False, "as_strings": False}
    return deepspeed.get_model_profile(model, sizes, **quiet, **options)[0]


both_calls = pytest.mark.parametrize("macs_of", [by_flops_profiler, by_deepspeed])
both = pytest.mark.parametrize("kind", [FlopsProfiler, ProfileMethods])


def recorded(kind: type[ModelRecording], model: nn.Module, *args: Any) -> ModelRecording:
    """A recording of one call, or of none without arguments."""
    recording = kind(model)
    recording.start_profile()
    if args:
        model(*args)
    recording.stop_profile()
    return recording


def by_path(recording: ModelRecording) -> dict[str, LayerFigures]:
    """The figures of each module, by its path in the model without the root."""
    figures = recording.figures()
    return {".".join(position.path[1:]): figures.at(position) for position in positions(recording.model)}


untouched = pytest.fixture(untouched_models)


# The call of the model


class Watched(nn.Module):
    """Notes its modes, whether gradients are recorded, and its input; its call number ``fails_at`` raises."""

    def __init__(self, seen: list[Any], dtype: torch.dtype = torch.float32, fails_at: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=dtype))
        self.frozen = nn.Dropout().eval()
        self.note = seen.append
        self.fails = lambda: len(seen) == fails_at

    def train(self, mode: bool = True) -> Watched:
        raise AssertionError("a model may do more in train() and eval() than change its mode")

    def forward(self, x: Tensor) -> Tensor:
        modes = [module.training for module in self.modules()]
        self.note((modes, torch.is_grad_enabled(), tuple(x.shape), x.dtype, x.device.type))
        if self.fails():
            raise ValueError("enough")
        return self.frozen(x * self.scale)


@both_calls
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_the_call_is_in_eval_mode_with_the_models_dtype_and_device(macs_of: Any, dtype: torch.dtype) -> None:
    seen: list[Any] = []
    model = Watched(seen, dtype)
    macs_of(model, 4, warm_up=2)
    with torch.no_grad():
        macs_of(model.to("meta"), 4, warm_up=0)
    of_one = ([False, False], True, (1, 4), dtype, "cpu")
    assert seen == [of_one] * 3 + [([False, False], False, (1, 4), dtype, "meta")]
    assert [module.training for module in model.modules()] == [True, False]


@both_calls
@pytest.mark.parametrize("warm_up", [1, 2], ids=["in the profiled call", "while warming up"])
def test_an_error_of_the_model_passes_through_and_the_model_is_restored(
    macs_of: Any, warm_up: int, untouched: Any
) -> None:
    seen: list[Any] = []
    with pytest.raises(ValueError, match="enough"):
        macs_of(untouched(Watched(seen, fails_at=2)), 4, warm_up=warm_up)
    assert len(seen) == 2


@both_calls
@pytest.mark.parametrize(
    ("ignored", "words"),
    [
        ("ReLU", "'ReLU' cannot be ignored: give classes"),
        (["ReLU"], "'ReLU' cannot be ignored"),
        ([int], "<class 'int'> cannot be ignored"),
        ([nn.ReLU()], r"ReLU\(\) cannot be ignored"),
    ],
)
def test_what_cannot_be_ignored_raises(macs_of: Any, ignored: Any, words: str, untouched: Any) -> None:
    with pytest.raises(TorchprofError, match=words):
        macs_of(untouched(Mlp()), 4, ignore_modules=ignored)


@both_calls
def test_anything_but_a_module_raises(macs_of: Any) -> None:
    with pytest.raises(TorchprofError, match=r"torch\.nn\.Module, not 5"):
        macs_of(5, 4)
    with pytest.raises(TorchprofError, match=r"Make one first: Mlp\(\.\.\.\)"):
        macs_of(Mlp, 4)


@both_calls
@pytest.mark.filterwarnings("ignore")
def test_uncountable_work_is_unknown_and_never_zero(macs_of: Any) -> None:
    packed = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear})
    assert macs_of(packed, 8) is None
    assert by_path(recorded(FlopsProfiler, nn.Sequential(nn.Linear(8, 8), packed), torch.rand(1, 8)))[""].uncounted
    assert macs_of(nn.Sequential(nn.Linear(8, 8), packed), 8) == 64


# The recording


@both
def test_figures_can_be_read_from_the_start_to_the_end(kind: type[ModelRecording], untouched: Any) -> None:
    model, x = untouched(Mlp()), torch.rand(3, 4)
    recording = kind(model)
    with pytest.raises(TorchprofError, match="There are no figures"):
        recording.figures()
    recording.start_profile([nn.ReLU])
    model(x)
    recording.reset_profile()
    model(x)
    assert recording.started
    assert recording.figures().whole.macs == 144  # one call; reading stops the recording
    model(x)
    recording.stop_profile()
    assert recording.figures().whole.macs == 144
    assert "relu" not in recording.figures().whole.functionals
    recording.start_profile()
    model(x)
    recording.start_profile()
    model(x)
    model(x)
    assert recording.figures().whole.macs == 288
    for _ in range(2):
        recording.end_profile()
        assert not recording.started
        with pytest.raises(TorchprofError, match="There are no figures"):
            recording.figures()


def test_no_function_of_torch_is_replaced_while_profiling() -> None:
    places: list[tuple[Any, str]] = [(F, name) for name in vars(F)] + [(torch, "matmul"), (torch.Tensor, "matmul")]
    before = {(id(place), name): getattr(place, name) for place, name in places}
    recording = FlopsProfiler(Mlp())
    recording.start_profile()
    try:
        assert {(id(place), name): getattr(place, name) for place, name in places} == before
    finally:
        recording.end_profile()


# The figures


POOLINGS = {
    f"{name}_pool{dims}d": getattr(nn, f"{kind}{dims}d")(2)
    for name, kind in (
        *(("avg", "AvgPool"), ("max", "MaxPool")),
        *(("adaptive_avg", "AdaptiveAvgPool"), ("adaptive_max", "AdaptiveMaxPool")),
    )
    for dims in (1, 2, 3)
}
ACTIVATIONS = {
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(),
    "elu": nn.ELU(),
    "prelu": nn.PReLU(),
    "softmax": nn.Softmax(-1),
}


@both
@pytest.mark.parametrize("name", [*POOLINGS, *ACTIVATIONS])
def test_poolings_and_activations_count_one_for_each_element_of_the_input(name: str, kind: Any) -> None:
    x = torch.rand(2, 3, *[4] * int(name[-2])) if name in POOLINGS else torch.rand(2, 3, 4)
    module = POOLINGS.get(name) or ACTIVATIONS[name]
    functionals = recorded(kind, module, x).figures().whole.functionals
    assert {name: (counted.work, counted.macs) for name, counted in functionals.items()} == {name: (x.numel(), 0)}


@both
def test_other_forms_of_an_operator_count_the_same(kind: type[ModelRecording]) -> None:
    x = torch.rand(2, 3, 4, 4)
    for module in (nn.ReLU(inplace=True), nn.LeakyReLU(inplace=True), nn.MaxPool2d(2, return_indices=True)):
        assert recorded(kind, module, x).figures().whole.work == x.numel()


@both
@pytest.mark.parametrize(
    "module",
    [nn.Tanh(), nn.Sigmoid(), nn.SELU(), nn.CELU(), nn.RReLU().eval(), nn.LogSoftmax(-1), nn.Dropout(), nn.Flatten()],
    ids=lambda module: type(module).__name__,
)
def test_what_the_tools_do_not_count_counts_0(kind: type[ModelRecording], module: nn.Module) -> None:
    whole = recorded(kind, nn.Sequential(module), torch.rand(2, 3, 4) + 1).figures().whole
    assert (whole.work, whole.macs) == (0, 0)
    if kind is FlopsProfiler:
        assert not whole.functionals


@both
def test_sums_and_products_do_not_count(kind: type[ModelRecording]) -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.add(x * 2 + x, x)

    assert recorded(kind, Sums(), torch.rand(2, 3)).figures().whole.work == 0


@both
def test_a_module_that_was_not_called_is_unknown_and_not_zero(kind: type[ModelRecording]) -> None:
    model = Half()
    recording = recorded(kind, model, torch.rand(1, 4))
    unused = by_path(recording)["unused"]
    assert (unused.work, unused.macs, unused.seconds, unused.functional_seconds) == (None,) * 4
    assert any(sentence.startswith("Never called: ") for sentence in recording.figures().sentences())
    whole = recorded(kind, model).figures().whole
    assert (whole.work, whole.macs, whole.seconds) == (None,) * 3


@both
def test_the_calls_of_a_shared_module_count_at_the_place_of_the_call(kind: type[ModelRecording]) -> None:
    recording = recorded(kind, Tied(), torch.rand(1, 4))
    inner = [figures.macs for path, figures in by_path(recording).items() if path.endswith("inner")]
    assert (inner, recording.figures().whole.macs) == ([16, 32], 48)
    assert recording.figures().params == 20
    deepest = recording.figures().by_class(recording.figures().deepest)
    assert [(name, own.macs, params) for name, own, params in deepest] == [("Linear", 48, 20)]


@both
def test_recomputed_and_backward_work_does_not_count_as_forward(kind: type[ModelRecording]) -> None:
    model = Checkpointed(use_reentrant=False)
    recording = kind(model)
    recording.start_profile()
    model(torch.rand(3, 4)).sum().backward()
    assert recording.figures().whole.macs == 3 * 3 * 16  # without the fourth, which was in backward
    backward, tree = recording.figures().backward(), recording.figures().run.tree
    assert backward.work == sum(tree(phase).total.flops for phase in ("backward", "recompute")) > 0
    assert backward.ns == sum(tree(phase).total.cpu_ns for phase in ("backward", "recompute")) > 0


@both
def test_a_tensor_without_a_shape_is_not_counted_as_zero(kind: type[ModelRecording]) -> None:
    nested = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)])
    recording = recorded(kind, nn.ReLU(), nested)
    whole = recording.figures().whole
    assert whole.work is None and whole.seconds
    sentence = "Not counted: relu (1 call on tensors whose shapes are not known)."
    assert sentence in recording.figures().sentences()


@both
def test_parameters_of_a_lazy_layer_are_unknown_until_it_is_called(kind: type[ModelRecording]) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    assert recorded(kind, model).figures().params is None
    assert recorded(kind, model, torch.rand(1, 3)).figures().params == 16 + 10


class Outer(Layers):
    """Has a child with the attribute name that wrappers use, and work of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) @ x.new_ones(4, 4)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_a_wrapper_has_the_figures_of_the_module_inside(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(Outer(module=Holder(nn.Linear(4, 4, bias=False))))
    model(torch.rand(2, 4))  # compiles
    own, *below = by_path(recorded(FlopsProfiler, model, torch.rand(2, 4))).values()
    assert (own.macs, below[0].macs) == (64, 64)
    assert [figures.macs for figures in below[1:]] in ([32, 32], [None, None])  # compiled code has no layers


@both
def test_a_module_that_was_added_during_the_recording_is_unknown(kind: type[ModelRecording]) -> None:
    class Grows(Layers):
        def forward(self, x: Tensor) -> Tensor:
            self.late = nn.Sequential(nn.Linear(4, 4))
            return self.late(self.fc(x))

    macs = {
        path: own.macs for path, own in by_path(recorded(kind, Grows(fc=nn.Linear(4, 4)), torch.rand(1, 4))).items()
    }
    assert macs == {"": 32, "fc": 16, "late": None, "late.0": None}  # the root's own work has that of the new module


def test_the_time_of_nested_operators_is_counted_once() -> None:
    model: nn.Module = Work(128, 30)
    for _ in range(6):
        model = Holder(model)
    x = torch.rand(128, 128)
    model(x)
    before = time.perf_counter()
    seconds = recorded(FlopsProfiler, model, x).figures().whole.seconds
    assert seconds is not None and 0 < seconds <= time.perf_counter() - before


def test_a_model_deeper_than_the_recursion_limit_is_printed() -> None:
    model: nn.Module = Deep(None)
    for _ in range(1200):
        model = Deep(model)
    figures = recorded(ProfileMethods, model).figures()
    assert [*top_lines(figures, -1, 3)][1] == "Top 1 modules in params at depth 1200 are {'Deep': '0'}"
    assert [*lines_by_depth(figures, 0, 1)][2] == "    params      - {'Deep': '0'}"


def test_a_module_that_contains_its_ancestor_is_printed_once() -> None:
    model: Any = Holder(nn.Sequential(nn.Linear(4, 4)))
    model.inner[0].add_module("up", model)
    text = "\n".join(tree_lines(recorded(ProfileMethods, model, torch.rand(1, 4)).figures()))
    assert (text.count("(0): Linear("), text.count("Holder(")) == (1, 1)


class OnDevice(torchprof.Profile):
    """A profile whose run has 1 µs of device time in each row."""

    @property
    def run(self) -> torchprof.Run:
        run = super().run
        columns = {**run.rows.columns, "device_ns": array("q", [1000] * len(run.rows))}
        meta = dataclasses.replace(run.meta, measured=(*run.meta.measured, "device_ns"), device="cuda")
        return dataclasses.replace(run, metas=(meta,), rows=dataclasses.replace(run.rows, columns=columns))


@both
def test_the_time_is_that_of_the_device_if_it_was_recorded(
    kind: type[ModelRecording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchprof.integrations.recorded_model.Profile", OnDevice)
    figures = recorded(kind, Mlp(), torch.rand(3, 4)).figures()
    rows = [row for row in figures.run.rows if row.phase == "forward" and row.layer is not None]
    inside = [row for row in rows if any(frame.name in ("aten::linear", "aten::relu") for frame in row.frames)]
    assert 0 < len(inside) < len(rows)
    assert figures.device == "cuda"
    assert figures.whole.seconds == pytest.approx(len(rows) * 1e-6)
    assert figures.whole.functional_seconds == pytest.approx(len(inside) * 1e-6)
