"""Operators of a run: their figures against torch's averages and lists of the same session; the reports of
operators."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from build.architectures import ARCHITECTURES
from build.golden import drawn
from build.hand_made import cells, headings, kernel, label, line, names, op, python_line, row, run_of
from build.libraries import RELEASE, usable_transformers
from build.models import Checkpointed, DoublesInside, Mlp, PackedLstm, Recursive, Several, Tied, WritesToViews, profiled
from build.nonempty import at_least_one
from build.phases import in_column_of
from build.places import ROOT
from build.torchs_list import torchs_list
from build.warnings import run_warnings
from torch import nn
from torch.profiler import record_function

import torchprof
from torchprof import Profile, TorchprofError
from torchprof.analyze.operators import Operator, layers_of_operator, operators
from torchprof.analyze.ops import operator_name
from torchprof.attribute.events import PREFIX
from torchprof.run.measures import Cost
from torchprof.run.operators import Sums
from torchprof.run.rows import Around
from torchprof.run.words import AUTOGRAD_ENGINE, BETWEEN_OPS, NOT_SELECTED, OUTSIDE, PHASES

pytestmark = pytest.mark.usefixtures("garbage_is_not_collected")
NODE_PREFIX = "autograd::engine::evaluate_function: "
FORWARD, BACKWARD, RECOMPUTE = PHASES


# The reference: torch's list of the same events


class Labelled(nn.Module):
    """A model with labels: around a layer, inside another label, twice in one call, and around a single op."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with record_function("outer: around a layer"):
            x = self.fc(x) + 1
            with record_function("inner"):
                x = torch.relu(self.last(x))
        with record_function("inner"):
            return x * 2


def bert() -> tuple[nn.Module, tuple[Any, ...]]:
    transformers = usable_transformers()
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=20
    )
    return transformers.BertModel(config), (torch.randint(20, (2, 7)),)


def architecture(name: str) -> Callable[[], tuple[nn.Module, tuple[Any, ...]]]:
    return lambda: (ARCHITECTURES[name].make(), ARCHITECTURES[name].inputs())


def small(make: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, tuple[Any, ...]]]:
    return lambda: (make(), (torch.rand(3, 4),))


ARCHITECTURE_NAMES = (
    "AlexNet, ResNet, EfficientNet, U-Net, tied words, mixture of experts, GPT, ViT, attention with weights, "
    "encoder and decoder, LSTM, translator"
)
MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    **{name: architecture(name) for name in ARCHITECTURE_NAMES.split(", ")},
    "BERT of transformers": bert,
    "several calls": small(Several),
    "a recursive module": small(Recursive),
    "a module at two paths": small(Tied),
    "labels": small(Labelled),
    "reentrant checkpoints": small(lambda: Checkpointed(True)),
    "other checkpoints": small(lambda: Checkpointed(False)),
    "a function of the user's": small(DoublesInside),
    "writes to views": small(WritesToViews),
    "a packed lstm": lambda: (PackedLstm(), (torch.rand(2, 5, 3), torch.tensor([5, 3]))),
}


def step(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Forward, and backward from the sum of all outputs that need a gradient."""
    outputs = model(*inputs)
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, torch.Tensor):
        outputs = [outputs]
    total = sum(one.sum() for one in outputs if isinstance(one, torch.Tensor) and one.is_floating_point())  # type: ignore[misc]
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()


@functools.cache
def recorded(name: str, **options: Any) -> Profile:
    """A training step of a model, with its memory."""
    model, inputs = MODELS[name]()
    inputs = tuple(one.requires_grad_() if one.is_floating_point() else one for one in inputs)
    with Profile(model, profile_memory=True, **options) as prof:
        step(model, inputs)
    return prof


Key = tuple[Any, ...]


def theirs(prof: Profile, key_of: Callable[[Any], Key]) -> dict[Key, Sums]:
    """The figures of each operator and label in torch's list: self, calls, and the total of outermost occurrences.

    An op directly inside an op of the same name is part of that call and of its group.
    """
    found: dict[Key, Sums] = {}

    def head(event: Any) -> Any:
        while event.cpu_parent is not None and event.cpu_parent.name == event.name and event.name[:6] == "aten::":
            event = event.cpu_parent
        return event

    for event in torchs_list(prof):
        if event.name.startswith(PREFIX) or event.name == "[memory]":
            continue
        key = key_of(head(event))
        sums = found.setdefault(key, Sums())
        sums.calls += head(event) is event
        memory = event.self_cpu_memory_usage
        sums.self += Cost(cpu_ns=round(event.self_cpu_time_total * 1000), cpu_allocated=memory)
        outer, is_outermost = event.cpu_parent, True
        while outer is not None:
            is_outermost = is_outermost and (outer.name.startswith(PREFIX) or key_of(head(outer)) != key)
            outer = outer.cpu_parent
        if is_outermost:
            sums.total += Cost(cpu_ns=round(event.cpu_time_total * 1000), cpu_allocated=event.cpu_memory_usage)
    return found


# Older torch compares the times of memory events and ops as floats with a resolution of a quarter of a microsecond.
# Seen in 2.4, 2.6 and 2.9.
MEMORY_IS_EXACT = RELEASE >= (2, 11)


def net(cost: Cost) -> tuple[int, int]:
    """Time, and net memory as torch reports it."""
    return cost.cpu_ns, (cost.cpu_allocated - cost.cpu_freed) * MEMORY_IS_EXACT


def figures(found: dict[Key, Sums]) -> dict[Key, Any]:
    return {key: (sums.calls, net(sums.self), net(sums.total)) for key, sums in found.items()}


def ours(found: dict[Operator, Sums], key_of: Callable[[Operator], Key]) -> dict[Key, Any]:
    """Our figures without the time in which no operator ran; operators that torch gives the same key are summed."""
    added: dict[Key, Sums] = {}
    for operator, sums in found.items():
        if operator.name not in (BETWEEN_OPS, AUTOGRAD_ENGINE):
            known = added.setdefault(key_of(operator), Sums())
            known.calls += sums.calls
            known.self += sums.self
            known.total += sums.total
    return figures(added)


@pytest.mark.parametrize("name", MODELS)
def test_operators_are_those_of_torchs_list(name: str) -> None:
    """Self and total CPU time to the ns, self and total memory to the byte, and calls, of each operator and label."""
    prof = recorded(name)
    truth = figures(theirs(prof, lambda event: (event.name,)))
    assert len(truth) > 5
    assert ours(operators(prof.run), lambda operator: (operator.name,)) == truth


def has_no_signature(event: Any) -> bool:
    """Whether it is an autograd node or a label: we record neither shapes nor source lines of these."""
    return event.name.startswith(NODE_PREFIX) or event.scope in (1, 7)


@pytest.mark.parametrize("name", ["AlexNet", "ResNet", "GPT", "LSTM", "translator", "BERT of transformers", "labels"])
def test_operators_by_input_shape_are_torchs(name: str) -> None:
    """The same, for each combination of shapes. torch writes [] for scalars, None, lists and tensors of one number."""
    prof = recorded(name, record_shapes=True)
    names = {event.name for event in torchs_list(prof) if has_no_signature(event)}
    truth = theirs(
        prof,
        lambda event: (event.name, () if event.name in names else tuple(tuple(s) for s in event.input_shapes if s)),
    )

    def key(operator: Operator) -> Key:
        return operator.name, tuple(s for s in operator.shapes if s and not any(isinstance(size, tuple) for size in s))

    found = operators(prof.run, group_by_input_shape=True)
    assert len(found) > len(operators(prof.run))
    assert ours(found, key) == figures(truth)
    assert sum(len(key[1]) > 0 for key in truth) > 5


NO_SOURCE = ("<", "nn.Module: ", "torch/nn/modules/module.py(", "torchprof/record/")


def is_python(event: Any) -> bool:
    """Whether it is a Python function, which ``with_stack`` adds to torch's list. torch 2.4 does not mark them."""
    return event.name.startswith(("<", "nn.Module: ")) or ".py(" in event.name


def calls_by_stack(prof: Profile, depth: int) -> Counter[Key]:
    """torch's calls of each op by name and its innermost source lines."""
    counted: Counter[Key] = Counter()
    for event in torchs_list(prof):
        parent = event.cpu_parent
        while parent is not None and is_python(parent):
            parent = parent.cpu_parent
        if (
            not event.name.startswith((PREFIX, "["))
            and not is_python(event)
            and not has_no_signature(event)
            and not (parent is not None and parent.name == event.name)
        ):
            lines = [line for line in event.stack if not line.startswith(NO_SOURCE)]
            counted[event.name, tuple(lines[:depth])] += 1
    return counted


def our_calls_by_stack(prof: Profile, depth: int) -> Counter[Key]:
    return Counter(
        {
            (operator.name, operator.stack): sums.calls
            for operator, sums in operators(prof.run, group_by_stack_n=depth).items()
            if operator.name != BETWEEN_OPS and operator.kind == "op"
        }
    )


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", ["AlexNet", "GPT", "translator", "BERT of transformers"])
def test_operators_by_source_line_are_torchs(name: str, depth: int) -> None:
    """Calls by name and the innermost lines, in forward."""
    model, inputs = MODELS[name]()
    prof = profiled(model, *inputs, with_stack=True)
    truth = calls_by_stack(prof, depth)
    assert our_calls_by_stack(prof, depth) == truth
    assert len({lines for _, lines in truth}) > 3


def test_source_lines_of_backward_are_those_of_forward() -> None:
    """As in torch's tables: the lines of the forward that caused backward work, not the line that called backward."""
    prof = recorded("AlexNet", with_stack=True)
    built_in = "<built-in"  # left out, because it is no source line
    truth = {
        next(line for line in event.stack if not line.startswith(built_in))
        for event in torchs_list(prof)
        if event.name == "aten::mm"
    }
    found = operators(prof.run, phase=BACKWARD, group_by_stack_n=1)
    ours = {line for operator in found if operator.name == "aten::mm" for line in operator.stack}
    assert ours == truth
    assert all("linear.py" in line for line in at_least_one(ours))


def test_an_operator_can_be_given_by_its_name_in_the_table() -> None:
    """Also the marked name of a label, and a name without its middle."""
    model = Mlp()
    with torchprof.Profile(model) as prof, record_function("mine"):
        model(torch.rand(3, 4)).sum().backward()
    long = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    for shown, name in (("mine (label)", "mine"), (operator_name(Operator(long)), long)):
        assert shown != name
        assert prof.run.report("ops", op=shown) == prof.run.report("ops", op=name)


def test_a_label_around_a_step_has_the_work_of_each_phase() -> None:
    """Both phases together have the duration of its ranges, as in torch's list."""
    model = Mlp()
    with torchprof.Profile(model) as prof:
        for _ in range(2):
            with record_function("train step"):
                model(torch.rand(3, 4)).sum().backward()
    (theirs,) = (event for event in prof.key_averages() if event.key == "train step")
    in_phase = {
        phase: sums.total.cpu_ns
        for phase in (FORWARD, BACKWARD)
        for operator, sums in operators(prof.run, phase=phase).items()
        if operator.name == "train step"
    }
    assert sum(in_phase.values()) / 1000 == pytest.approx(theirs.cpu_time_total, abs=0.001)
    assert in_phase[BACKWARD] == prof.run.tree(BACKWARD).total.cpu_ns + prof.run.no_layer(BACKWARD).cpu_ns
    everything = {operator.name: sums.total.cpu_ns for operator, sums in operators(prof.run).items()}
    assert everything["train step"] == sum(in_phase.values())


# Laws: sums that must be equal


def sum_of(found: dict[Operator, Sums]) -> Cost:
    return sum((sums.self for sums in found.values()), Cost())


@pytest.mark.parametrize("name", ["GPT", "labels", "reentrant checkpoints", "other checkpoints", "a recursive module"])
def test_self_of_all_operators_is_the_sum_of_all_rows(name: str) -> None:
    """Σ self = Σ rows: of the run, of each phase, and of each layer with all below it."""
    run = recorded(name, with_flops=True).run
    whole = sum((row.cost for row in run.rows), Cost())
    assert sum_of(operators(run)) == whole
    for phase in PHASES:
        rows = sum((row.cost for row in run.rows if in_column_of(row.phase) == phase), Cost())
        assert sum_of(operators(run, phase=phase)) == rows
        for node in run.tree(phase).walk():
            assert sum_of(operators(run, phase=phase, layer=node.layer.path)) == node.total
            assert sum_of(operators(run, phase=phase, layer=node.layer.name)) == node.total
    assert {row.phase for row in run.rows} >= {FORWARD, BACKWARD}


@pytest.mark.parametrize("name", ["GPT", "labels", "reentrant checkpoints", "a recursive module"])
def test_the_layers_of_an_operator_add_up_to_it(name: str) -> None:
    """Σ self and Σ calls over its layers are the operator's, in each phase; Σ total where none is inside another."""
    run = recorded(name).run
    for phase in (None, *run.phases()):
        for operator, sums in at_least_one(operators(run, phase=phase).items()):
            layers = layers_of_operator(run, operator.name, phase=phase).values()
            assert sum((layer.self for layer in layers), Cost()) == sums.self
            assert sum(layer.calls for layer in layers) == sums.calls
            totals = sum(layer.total.cpu_ns for layer in layers)
            assert totals >= sums.total.cpu_ns
            if operator.name == "aten::addmm":
                assert totals == sums.total.cpu_ns


def test_the_layers_of_an_operator_agree_with_the_operators_of_the_layers() -> None:
    """The same figures as ``Run.ops``, which other tests check layer by layer."""
    run = recorded("GPT").run
    for phase in (FORWARD, BACKWARD):
        truth: dict[str, dict[str, Any]] = {}
        for path, ops in run.ops(phase).items():
            for one in ops:
                truth.setdefault(one.name, {})[".".join(path)] = (one.calls, one.self, one.total)
        for name, layers in truth.items():
            found = layers_of_operator(run, name, phase=phase)
            assert {layer: (sums.calls, sums.self, sums.total) for layer, sums in found.items()} == layers
        assert len(truth) > 5


# Tables of hand-made runs

STEP = [
    row(0, calls=1, cpu_ns=1_000),
    row(0, op("aten::add"), calls=2, cpu_ns=4_000),
    row(1, calls=1, cpu_ns=500),
    row(1, op("aten::linear"), calls=1, cpu_ns=2_500),
    row(1, op("aten::linear"), op("aten::addmm"), calls=1, cpu_ns=20_000),
    row(1, op("AddmmBackward0"), phase=BACKWARD, cpu_ns=2_000),
    row(1, op("AddmmBackward0"), op("aten::mm"), phase=BACKWARD, calls=2, cpu_ns=10_000),
    row(OUTSIDE, op("aten::sum"), cpu_ns=10_000),
]


def test_the_table_of_operators(golden: Callable[..., None]) -> None:
    """Self, total, average; shares of all recorded 50 us, of all rows, hidden or not; largest self first."""
    run = run_of(STEP, warnings=run_warnings("Beware."))
    options = [{}, {"top": 2}, {"top": 3, "sort_by": "operator"}, {"layer": "a", "phase": "backward"}]
    golden(*(drawn(run, "ops", **each) for each in options))


@pytest.mark.parametrize(
    ("layer", "phase", "expected"),
    [
        *((layer, None, "addmm mm linear AddmmBackward0 between") for layer in ("a", "Net.a", ("Net", "a"), "*.a")),
        ("b", None, "relu tanh"),
        ("b.*", None, "relu"),
        ("Net", None, "addmm mm add linear AddmmBackward0 between relu tanh"),  # "aten::sum" is in no layer
        ("a", "backward", "mm AddmmBackward0"),
        (None, "forward", "addmm sum add linear between relu tanh"),
    ],
)
def test_only_selected_layers_and_one_phase(layer: Any, phase: str | None, expected: str) -> None:
    """A path with and without the root, a pattern, a tuple: these layers and all below."""
    run = run_of([*STEP, row(3, op("aten::relu"), cpu_ns=7), row(2, op("aten::tanh"), cpu_ns=5)])
    shown = names(run.report("ops", layer=layer, phase=phase))
    assert [name.removeprefix("aten::").replace(BETWEEN_OPS, "between") for name in shown] == expected.split()


def test_a_layer_called_inside_an_op_or_a_label_is_in_its_total() -> None:
    """Once; and only if the layer of the op or label is selected."""
    within = (Around(0, FORWARD, (label("mine"), op("Wrap"))),)
    recomputed = (*within, Around(1, BACKWARD, (op("Node"),)))
    run = run_of(
        [
            row(0, label("mine"), calls=2, cpu_ns=10),
            row(0, label("mine"), op("Wrap"), cpu_ns=20),
            row(1, within=within, cpu_ns=5),
            row(1, op("aten::relu"), within=within, cpu_ns=40),
            row(3, op("Wrap"), phase=RECOMPUTE, within=recomputed, cpu_ns=80),
        ]
    )
    found = {operator: (sums.calls, sums.self.cpu_ns, sums.total.cpu_ns) for operator, sums in operators(run).items()}
    assert found == {
        Operator("mine", "label"): (2, 10, 155),
        Operator("Wrap"): (2, 100, 145),
        Operator(BETWEEN_OPS): (0, 5, 5),
        Operator("aten::relu"): (1, 40, 40),
        Operator("Node"): (0, 0, 80),
    }
    inner = {operator.name: sums.total.cpu_ns for operator, sums in operators(run, layer="a").items()}
    assert inner == {BETWEEN_OPS: 5, "aten::relu": 40, "Node": 80}
    assert names(run.report("ops"))[:4] == ["Wrap", "aten::relu", "mine (label)", "(between ops)"]
    assert line(run.report("ops", op="Wrap"), "Net")["CPU total"] == "0.145us (100.0%)"
    assert line(run.report("ops", op="Wrap"), "Net.b.0")["CPU total"] == "0.080us (55.2%)"


def test_samples_of_python_are_no_operators() -> None:
    run = run_of([*STEP, row(1, python_line("a.py(1): f"), calls=7)])
    assert run.report("ops") == run_of(STEP).report("ops")


ON_DEVICE = {"device": "cuda", "requested": ("cpu_ns", "device_ns"), "measured": ("cpu_ns", "device_ns")}
DEVICE_STEP = [
    row(1, op("aten::linear"), op("aten::addmm"), cpu_ns=20_000),
    row(1, op("aten::linear"), op("aten::addmm"), kernel("gemm"), device="cuda:0", calls=3, device_ns=1_000),
    row(1, op("aten::relu"), cpu_ns=10_000),
    row(1, op("aten::relu"), kernel("clamp"), device="cuda:0", device_ns=3_000),
    row(OUTSIDE, kernel("who?"), device="cuda:0", device_ns=4_000),
]


def test_time_of_the_device_counts_for_the_op_that_launched_it(golden: Callable[..., None]) -> None:
    """The largest self time of the device is first; kernels do not count as calls of their op."""
    golden(run_of(DEVICE_STEP, **ON_DEVICE).report("ops"))


def test_a_device_that_was_not_measured_is_unknown(golden: Callable[..., None]) -> None:
    """Rows are then sorted by CPU time."""
    run = run_of(DEVICE_STEP[:3:2], device="cuda", requested=("cpu_ns", "device_ns"), measured=("cpu_ns",))
    golden(run.report("ops"))
    with pytest.raises(TorchprofError, match="was not measured"):
        run.report("ops", sort_by="cuda_time_total")


COUNTED = {"requested": ("cpu_ns", "macs", "flops", "uncounted"), "measured": ("cpu_ns", "macs", "flops", "uncounted")}


def test_flops_are_in_the_row_of_the_op_that_has_the_formula() -> None:
    """Blank for ops inside it, 0 if there is no arithmetic, a lower bound if calls inside were not counted."""
    run = run_of(
        [
            row(1, op("aten::conv2d"), cpu_ns=1, macs=500, flops=1_000),
            row(1, op("aten::conv2d"), op("aten::convolution"), cpu_ns=2),
            row(1, op("aten::conv2d"), op("aten::convolution"), op("aten::empty"), cpu_ns=3),
            row(1, op("aten::view"), cpu_ns=4),
            row(1, op("Mine"), cpu_ns=5),
            row(1, op("Mine"), op("aten::mm"), cpu_ns=6, macs=10, flops=20),
            row(1, op("Mine"), op("aten::strange"), cpu_ns=7, uncounted=1),
            row(1, op("aten::empty"), phase=BACKWARD, cpu_ns=8),
        ],
        **COUNTED,
    )
    table = run.report("ops")
    assert {name: (line(table, name)["MACs"], line(table, name)["FLOPs"]) for name in names(table)} == {
        "aten::conv2d": ("500", "1.00 K"),
        "aten::convolution": ("", ""),
        "aten::empty": ("0", "0"),  # not all of its calls were nested
        "aten::view": ("0", "0"),
        "Mine": ("≥ 10", "≥ 20"),
        "aten::mm": ("10", "20"),
        "aten::strange": ("–", "–"),
    }
    assert {operator.name: sums.parts for operator, sums in operators(run).items() if sums.parts} == {
        "aten::convolution": 1,
        "aten::empty": 1,
    }
    assert names(run.report("ops", sort_by="flops"))[0] == "aten::conv2d"
    assert line(run.report("ops", op="aten::convolution"), "Net.a")["MACs"] == ""


def test_without_times_the_largest_count_comes_first(golden: Callable[..., None]) -> None:
    counts = ("macs", "flops", "uncounted")
    golden(run_of([row(1, op("a"), macs=1), row(1, op("b"), macs=2)], requested=counts, measured=counts).report("ops"))


MEMORY = {"requested": ("cpu_ns", "cpu_allocated", "cpu_freed"), "measured": ("cpu_ns", "cpu_allocated", "cpu_freed")}


def test_sorting_takes_headings_keys_and_torchs_names() -> None:
    """Figures from the largest, names from A to Z."""
    run = run_of(
        [
            row(1, op("few"), op("inner"), calls=1, cpu_ns=40, cpu_allocated=8),
            row(1, op("few"), calls=1, cpu_ns=10, cpu_allocated=1),
            row(1, op("many"), calls=9, cpu_ns=45, cpu_allocated=9, cpu_freed=7),
        ],
        **MEMORY,
    )
    orders = {
        "few many inner": ["CPU total", "cpu_total", "cpu_time_total"],
        "many inner few": [None, "Self CPU total", "self_cpu_total", "self_cpu_time_total"],
        "many few inner": ["Calls", "calls", "count"],
        "few inner many": ["Operator", "operator", "CPU avg", "cpu_avg", "cpu_time", "CPU Mem", "cpu_memory_usage"],
        "inner many few": ["Self CPU Mem", "self_cpu_mem", "self_cpu_memory_usage"],
    }
    for order, keys in orders.items():
        for key in keys:
            assert names(run.report("ops", sort_by=key)) == order.split(), key
    device = run_of(DEVICE_STEP, **ON_DEVICE)
    for key in ("CUDA total", "cuda_total", "cuda_time_total", "device_time_total"):
        order = ["(between ops)", "aten::relu", "aten::linear", "aten::addmm"]
        assert names(device.report("ops", sort_by=key)) == order
    for key in ("CUDA avg", "cuda_avg", "cuda_time", "device_time"):
        assert names(device.report("ops", sort_by=key))[0] == "aten::relu"
    for key in ("self_cuda_time_total", "self_device_time_total", "self_cuda_total"):
        assert names(device.report("ops", sort_by=key)) == names(device.report("ops"))


SHAPED = {"flags": (("record_shapes", True), ("with_stack", True))}


def test_the_text_of_shapes(golden: Callable[..., None]) -> None:
    """Shapes of tensors; lists and long rows are cut; torch 2.4 does not record shapes of lists."""
    cat = op("aten::cat", ((2, 3), (2, 3)), (), dtypes=["TensorList", "Scalar"])
    many = op("aten::_foreach_add_", tuple((size,) for size in range(1, 9)), dtypes=["TensorList"])
    wide = op("aten::lstm", *[(2, size) for size in range(9)])
    run = run_of(
        [
            row(1, op("aten::add", (2, 3), (), (), dtypes=["float", "float", "Scalar"]), cpu_ns=9),
            row(1, op("aten::add", (2, 3), (4,), (), dtypes=["float", "float", "Scalar"]), cpu_ns=8),
            row(1, op("aten::add", (2, 3), (4,), None, dtypes=["float", "float", ""]), cpu_ns=7),
            row(1, cat, cpu_ns=6),
            row(1, op("aten::stack", None, dtypes=["TensorList"]), cpu_ns=5),
            row(1, many, cpu_ns=4),
            row(1, wide, cpu_ns=3),
            row(1, op("aten::nested", (2, -1, 3)), cpu_ns=2),
            row(1, op("Node"), cpu_ns=1),
        ],
        **SHAPED,
    )
    golden(drawn(run, "ops", group_by_input_shape=True), drawn(run, "ops"))


def test_source_lines_are_on_lines_of_their_own(golden: Callable[..., None]) -> None:
    """Innermost first, at most n; the figures are on the first line."""
    lines = ["net.py(3): forward", "loop.py(9): step", "loop.py(1): main"]
    run = run_of(
        [
            row(1, op("aten::add", stack=lines), cpu_ns=2_000),
            row(1, op("aten::add", stack=[lines[0], "loop.py(7): test", "loop.py(1): main"]), cpu_ns=1_000),
            row(1, op("aten::mul"), cpu_ns=500),
        ],
        **SHAPED,
    )
    golden(
        drawn(run, "ops", group_by_stack_n=2),
        drawn(run, "ops", group_by_stack_n=1),
        drawn(run, "ops", group_by_stack_n=1, group_by_input_shape=True),
    )


def test_long_names_are_cut_in_the_middle() -> None:
    run = run_of([row(1, label("start " + 50 * "long " + "end"), cpu_ns=1), row(1, op(60 * "n"), cpu_ns=2)])
    full, (cut, *_) = names(run.report("ops"))[0], names(run.report("ops"))[1].split(" (label)")
    assert full == 60 * "n"
    assert len(cut) == 60
    assert re.fullmatch(r"start long .*….* end", cut)


# The layers of an operator


def test_the_table_of_the_layers_of_an_operator(golden: Callable[..., None]) -> None:
    """The largest total first; shares are of the operator; only layers that call it directly are listed."""
    run = run_of(
        [
            *STEP,
            row(3, op("aten::linear"), calls=3, cpu_ns=500),
            row(3, op("aten::linear"), op("aten::addmm"), calls=3, cpu_ns=27_000),
            row(OUTSIDE, op("aten::linear"), phase=BACKWARD, cpu_ns=1_000),
            row(NOT_SELECTED, op("aten::linear"), phase=BACKWARD, cpu_ns=999),
        ],
        warnings=run_warnings("Beware."),
    )
    options = [{}, {"phase": "forward"}, {"sort_by": "self_cpu_time_total", "top": 1}, {"sort_by": "module"}]
    golden(*(drawn(run, "ops", op="aten::linear", **each) for each in options), drawn(run, "ops", op=BETWEEN_OPS))


def test_a_layer_that_was_not_selected_is_refused() -> None:
    """Its work is shown elsewhere, so an empty table would be wrong. Layers above and below it may have rows."""
    run = run_of(STEP, paths=(("Net", "a"),))
    assert "aten::addmm" in names(run.report("ops", layer="a"))
    assert "aten::addmm" in names(run.report("ops", layer="Net"))
    with pytest.raises(TorchprofError, match=r"'b' was not selected .*Choose from Net\.a\."):
        run.report("ops", layer="b")


def test_errors_name_the_missing_option_also_after_saving(reloaded: Any) -> None:
    """With the options, before and after saving."""
    model = Mlp()
    prof = profiled(model, with_flops=True)
    with pytest.raises(TorchprofError, match="record_shapes=True"):
        prof.run.report("ops", group_by_input_shape=True)  # it has some shapes, not all
    prof = profiled(model, record_shapes=True, with_stack=True)
    table = prof.run.report("ops", group_by_input_shape=True, group_by_stack_n=2)
    assert any("[8], [3, 4], [4, 8]" in cell for one in cells(table) for cell in one)
    assert "linear.py" in table
    assert reloaded(prof.run).report("ops", group_by_input_shape=True, group_by_stack_n=2) == table


def test_the_blocks_of_the_docs_print_the_headings_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every code block of docs/operators.md runs, and prints a table with the headings that the page shows."""
    root = ROOT
    monkeypatch.syspath_prepend(str(root))
    page = (root / "docs" / "operators.md").read_text(encoding="utf-8")
    space: dict[str, object] = {}
    printed, compared = "", 0
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block, "operators.md", "exec"), space)
            printed = out.getvalue()
        elif "cuda:0" not in block:
            assert headings(printed) == headings(block)
            assert len(list(filter(None, names(printed)))) == len(list(filter(None, names(block))))
            compared += 1
    assert compared == 6
