"""Layers for a trace that has none: the labels of a recording are taken away, found again, and compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from build.architectures import ARCHITECTURES
from build.models import Checkpointed
from build.places import ROOT, TRACES
from build.snapshots import snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchprof
from examples.large_models import Llama, ResNet50
from examples.models import Bert
from torchprof import Run, TorchprofError
from torchprof.cli import main
from torchprof.run.words import BACKWARD, FORWARD


def recorded(folder: Path, model: nn.Module, step: Callable[[], Any], steps: int = 2, **options: Any) -> Path:
    """The trace of some steps, with labels."""
    with torchprof.Profile(model, **options) as prof:
        for _ in range(steps):
            step()
    prof.export_chrome_trace(folder / "labelled.json")
    return folder / "labelled.json"


def without_labels(trace: Path) -> Path:
    """The same trace without torchprof's ranges."""
    data = json.loads(trace.read_text(encoding="utf-8"))
    data["traceEvents"] = [one for one in data["traceEvents"] if not str(one.get("name")).startswith("torchprof:")]
    stripped = trace.with_name("stripped.json")
    stripped.write_text(json.dumps(data), encoding="utf-8")
    return stripped


def op_times(run: Run) -> Counter[tuple[Any, ...]]:
    """The time of operators by layer, phase and the operators around them."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in run.rows:
        frames = tuple(frame.name for frame in row.frames if frame.kind == "op")
        if frames:
            found[row.layer.name if row.layer else "", row.phase, frames] += row.cost.cpu_ns
    return found


def compared(trace: Path, model: nn.Module, inputs: Any, **options: Any) -> tuple[float, Run]:
    """The share of the layers' time that was found again. Asserts that none is at a wrong layer."""
    labelled = torchprof.from_trace(trace, model)
    aligned = torchprof.from_trace(without_labels(trace), model, inputs=inputs, **options)
    wanted, found = op_times(labelled), op_times(aligned)
    wrong = {key: ns - wanted[key] for key, ns in found.items() if key[0] and ns > wanted[key]}
    assert wrong == {}
    assert sum(found.values()) == sum(wanted.values())
    in_layers = sum(ns for key, ns in wanted.items() if key[0])
    return sum(ns for key, ns in found.items() if key[0]) / in_layers, aligned


def back(output: Any) -> None:
    if isinstance(output, Tensor):
        if output.requires_grad:
            output.float().sum().backward()
    else:
        tensors = output.values() if isinstance(output, dict) else output
        sum(one.float().sum() for one in tensors if isinstance(one, Tensor)).backward()


# Two calls in a row could be one of a model with twice as many blocks.
OF_EQUAL_BLOCKS = {"WaveNet", "Siamese", "linear attention", "decoder"}


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_layers_of_an_architecture_are_found_again(name: str, training: bool, tmp_path: Path) -> None:
    """Some cannot run without data, or have fused operators in inference: these run on the CPU for it."""
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.make().train(training), architecture.inputs()

    def step() -> None:
        with torch.set_grad_enabled(training):
            output = model(*inputs)
        if training:
            back(output)

    step()
    if name in OF_EQUAL_BLOCKS and not training:
        with pytest.raises(TorchprofError, match="could begin at several"):
            compared(recorded(tmp_path, model, step, record_shapes=True), model, inputs)
        with torchprof.annotate(model), torch.profiler.profile() as prof:
            for _ in range(2):
                with torch.profiler.record_function("a request"):
                    step()
        prof.export_chrome_trace(str(tmp_path / "labelled.json"))
        share, run = compared(tmp_path / "labelled.json", model, inputs)
        assert (share > 0.999, run.tree().calls) == (True, 2)
        return
    # In inference, nothing but the shapes of parameters tells where a call of many equal convolutions begins.
    trace = recorded(tmp_path, model, step, record_shapes=not training)
    model.zero_grad()
    before, generator = snapshot(model), torch.random.get_rng_state()
    share, run = compared(trace, model, inputs)
    assert share > 0.999
    assert run.tree().calls == 2
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert snapshot(model) == before


def test_a_forward_that_does_not_run_is_refused(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 4), torch.rand(2, 4)
    trace = recorded(tmp_path, model, lambda: back(model(x)))
    with pytest.raises(TorchprofError, match=r"forward of Linear does not run .* with the inputs: .*Give inputs"):
        compared(trace, model, (torch.rand(2, 5),))


TOKENS = torch.randint(0, 100, (2, 12))
LARGE: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "ResNet-50": (ResNet50, torch.rand(2, 3, 64, 64)),
    "BERT": (lambda: Bert(100, 32, 3, 4, 64), TOKENS),
    "Llama": (lambda: Llama(100, 32, 3, 4, 2, 48), TOKENS),
}


@pytest.mark.parametrize("name", LARGE)
def test_the_inputs_are_not_needed_if_likely_ones_call_the_same_operators(name: str, tmp_path: Path) -> None:
    make, x = LARGE[name]
    model = make()
    share, _ = compared(recorded(tmp_path, model, lambda: back(model(x))), model, None)
    assert share > 0.999


def test_another_batch_size_is_as_good(tmp_path: Path) -> None:
    model = ARCHITECTURES["ResNet"].make()
    x = torch.rand(7, 3, 16, 16)
    trace = recorded(tmp_path, model, lambda: back(model(x)), record_shapes=True)
    share, _ = compared(trace, model, (torch.empty(2, 3, 16, 16, device="meta"),))
    assert share > 0.999


def test_with_autocast_accumulation_and_an_optimizer(tmp_path: Path) -> None:
    model = LARGE["BERT"][0]()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(TOKENS)
            back(output)
        optimizer.step()
        optimizer.zero_grad()

    share, run = compared(recorded(tmp_path, model, step), model, (TOKENS,))
    assert share > 0.999
    assert run.tree().calls == 6


def test_checkpointed_layers_are_found_in_forward(tmp_path: Path) -> None:
    """What backward computes again has no layer of its own: it belongs to the layer of the checkpoint's node."""
    model = Checkpointed(use_reentrant=False)
    x = torch.rand(2, 4)
    trace = recorded(tmp_path, model, lambda: back(model(x)))
    aligned = torchprof.from_trace(without_labels(trace), model, inputs=(x,))
    labelled = torchprof.from_trace(trace, model)
    for node, other in zip(aligned.tree(FORWARD).walk(), labelled.tree(FORWARD).walk()):
        assert node.layer.path == other.layer.path
        assert node.calls == other.calls


def test_equal_layers_fill_the_time_between_backward_passes(tmp_path: Path) -> None:
    """A forward of four equal layers could begin at any of them: the backward passes show where it does."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.rand(2, 8)
    share, run = compared(recorded(tmp_path, model, lambda: back(model(x)), steps=3), model, (x,))
    assert share == 1
    assert [node.calls for node in run.tree().walk()] == [3] * 5


def test_a_deeper_model_of_equal_layers_is_refused(tmp_path: Path) -> None:
    """Twice as many layers between two backward passes are not two calls of the model."""
    deeper, model = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(count))) for count in (8, 4))
    x = torch.rand(2, 8)
    trace = without_labels(recorded(tmp_path, deeper, lambda: back(deeper(x))))
    with pytest.raises(TorchprofError, match="could begin at several"):
        torchprof.from_trace(trace, model, inputs=(x,))


def test_calls_that_follow_at_once_may_be_parts_of_a_deeper_model(tmp_path: Path) -> None:
    def blocks(count: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(count)))

    x = torch.rand(2, 8)
    deeper, model = blocks(3), blocks(1)
    run = torchprof.from_trace(
        without_labels(recorded(tmp_path, deeper, lambda: back(deeper(x)), steps=1)), model, inputs=(x,)
    )
    (warning,) = [one for one in run.warnings if one.code == "adjacent_forwards"]
    assert str(warning) == (
        "2 calls of the model follow another one at once: they may be parts of one call of a deeper model."
    )
    run = torchprof.from_trace(
        without_labels(recorded(tmp_path, model, lambda: back(model(x)), steps=3)), model, inputs=(x,)
    )
    assert not [one for one in run.warnings if one.code == "adjacent_forwards"]


def test_two_models_that_fit_the_same_operators_are_refused(tmp_path: Path) -> None:
    teacher, student = (ARCHITECTURES["LeNet"].make() for _ in range(2))
    x = ARCHITECTURES["LeNet"].inputs()[0]
    trace = without_labels(recorded(tmp_path, teacher, lambda: back(teacher(x))))
    with pytest.raises(TorchprofError, match="Several of the models fit"):
        torchprof.from_trace(trace, [teacher, student], inputs=(x,))


def test_several_models_have_their_own_layers(tmp_path: Path) -> None:
    one, other = nn.Sequential(nn.Linear(4, 8), nn.GELU()), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2), nn.ReLU())
    x = torch.rand(3, 4)

    def step() -> None:
        back(one(x))
        back(other(x))

    trace = recorded(tmp_path, [one, other], step)  # type: ignore[arg-type]
    share, run = compared(trace, [one, other], (x,))  # type: ignore[arg-type]
    assert share > 0.999
    assert [run.tree(root=root).layer.name for root in (0, 1)] == ["Sequential", "Sequential#2"]


def test_a_wrapper_around_the_model_is_its_layer(tmp_path: Path) -> None:
    model, x = nn.DataParallel(ARCHITECTURES["LeNet"].make()), ARCHITECTURES["LeNet"].inputs()[0]
    share, run = compared(recorded(tmp_path, model, lambda: back(model(x))), model, (x,))
    assert share > 0.999
    assert run.tree().children


def test_selected_layers_of_an_aligned_trace(tmp_path: Path) -> None:
    model, x = ARCHITECTURES["ResNet"].make(), ARCHITECTURES["ResNet"].inputs()[0]
    trace = without_labels(recorded(tmp_path, model, lambda: back(model(x))))
    first = next(name for name, _ in model.named_children())
    run = torchprof.from_trace(trace, model, inputs=(x,), paths=[first])
    assert {row.layer.path[1] for row in run.rows if row.layer and row.selected} == {first}
    whole = torchprof.from_trace(trace, model, inputs=(x,))
    assert sum(row.cost.cpu_ns for row in run.rows) == sum(row.cost.cpu_ns for row in whole.rows)


def test_where_a_forward_begins_is_not_guessed(tmp_path: Path) -> None:
    """The same layers, and one more outside of the model: any four of five in a row would do."""
    model, other = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.Linear(8, 8)
    x = torch.rand(2, 8)
    trace = recorded(tmp_path, model, lambda: back(other(model(x))), steps=1)
    with pytest.raises(TorchprofError, match="could begin at several"):
        torchprof.from_trace(without_labels(trace), model, inputs=(x,))


def test_operators_between_layers_that_the_model_does_not_call_have_no_layer(tmp_path: Path) -> None:
    """As those of a wrapper or of a hook: neither the layer before nor the one after has them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    x = torch.rand(2, 4)
    trace = recorded(tmp_path, model, lambda: back(model(x)))
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    run = torchprof.from_trace(without_labels(trace), plain, inputs=(x,))
    where = {row.layer.name if row.layer else "" for row in run.rows if any(f.name == "aten::mul" for f in row.frames)}
    assert where == {""}
    (warning,) = [one for one in run.warnings if one.code == "layers_by_alignment"]
    assert warning.facts["share"] < 1
    assert "the rest is outside" in str(warning)


# Other models


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda: Bert(100, 32, 4, 4, 64), "continues with|nowhere|for at most"),
        (lambda: Llama(100, 32, 3, 4, 2, 48), "for at most|nowhere"),
        (lambda: ResNet50(), "for at most|nowhere"),
    ],
)
def test_another_model_is_refused_with_the_place_where_they_part(
    other: Callable[[], nn.Module], why: str, tmp_path: Path
) -> None:
    model = LARGE["BERT"][0]()
    trace = without_labels(recorded(tmp_path, model, lambda: back(model(TOKENS))))
    with pytest.raises(TorchprofError, match=why) as refused:
        torchprof.from_trace(trace, other())
    assert "names no layers" in str(refused.value)


def test_another_width_is_refused_if_shapes_were_recorded(tmp_path: Path) -> None:
    model = LARGE["BERT"][0]()
    trace = without_labels(recorded(tmp_path, model, lambda: back(model(TOKENS)), record_shapes=True))
    with pytest.raises(TorchprofError, match=r"has a parameter of shape \[64, 32\].*\[96, 32\]|other sizes"):
        torchprof.from_trace(trace, Bert(100, 32, 3, 4, 96), inputs=(TOKENS,))


@pytest.mark.skipif(not TRACES.exists(), reason="the real traces are not here")
def test_a_trace_of_strangers_is_a_resnet_50() -> None:
    """On two A100, with DistributedDataParallel, without shapes and stacks."""
    run = torchprof.from_trace(TRACES / "a100_ddp_train_rank0_of_2.json.gz", ResNet50())
    assert run.tree().calls == 3
    assert run.tree().children[0].layer.params == 9408
    in_model = run.tree(FORWARD).total.device_ns + run.tree(BACKWARD).total.device_ns
    compute = 0
    for row in run.rows:
        last = row.frames[-1] if row.frames else None
        in_optimizer = any(frame.name.startswith("Optimizer.") for frame in row.frames)
        if last is not None and last.kind == "kernel" and not in_optimizer and "nccl" not in last.name.lower():
            compute += row.cost.device_ns * (not last.name.startswith("Mem"))
    communication = sum(
        row.cost.device_ns
        for row in run.rows
        if row.layer and row.frames and ("nccl" in row.frames[-1].name.lower() or row.frames[-1].name.startswith("Mem"))
    )
    assert (in_model - communication) / compute > 0.98


# Random models


class Tree(nn.Module):
    """Calls its children in turn, some of them twice, with arithmetic between them."""

    def __init__(self, children: list[nn.Module], between: list[str], again: bool) -> None:
        super().__init__()
        self.children_ = nn.ModuleList(children)
        self.between = between
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for child, what in zip(self.children_, self.between):
            x = child(x)
            x = x + 1 if what == "add" else x.reshape(x.shape) if what == "view" else x
        return self.children_[0](x) if self.again else x


LEAVES = st.sampled_from([lambda: nn.Linear(4, 4), nn.ReLU, lambda: nn.LayerNorm(4), nn.Identity, nn.GELU])


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda children, between, again: lambda: Tree([make() for make in children], between, again),
        st.lists(leaves, min_size=1, max_size=4),
        st.lists(st.sampled_from(["add", "view", ""]), min_size=4, max_size=4),
        st.booleans(),
    )


@given(st.recursive(LEAVES, trees, max_leaves=12), st.integers(1, 3), st.booleans())
@settings(max_examples=25, deadline=None)
def test_no_operator_of_a_random_model_is_at_a_wrong_layer(make: Any, steps: int, training: bool) -> None:
    """What could begin at several places is refused."""
    model, x = Tree([nn.Linear(4, 4), make()], ["", ""], again=False), torch.rand(2, 4)

    def step() -> None:
        with torch.set_grad_enabled(training):
            output = model(x)
        if training:
            back(output)

    with TemporaryDirectory() as folder:
        trace = recorded(Path(folder), model, step, steps)
        try:
            share, run = compared(trace, model, (x,))
        except TorchprofError as why:
            assert "could begin at several" in str(why)
            assert not training
        else:
            assert share > 0.999
            assert run.tree().calls == steps


def test_the_command_line_gives_layers_to_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = LARGE["ResNet-50"][0](), torch.rand(2, 3, 64, 64)
    trace = without_labels(recorded(tmp_path, model, lambda: back(model(x))))
    spec = f"{ROOT / 'examples' / 'large_models.py'}:ResNet50"
    assert main(["show", str(trace), "--model", spec, "--input", "8,3,64,64", "--report", "top"]) == 0
    assert "ResNet50.layer4" in capsys.readouterr().out
    assert main(["show", str(trace), "--input", "8,3,64,64"]) == 2
    assert "--input is for the model of a trace" in capsys.readouterr().err
    assert main(["show", str(trace)]) == 0
    assert "from_trace(trace, model), or --model" in capsys.readouterr().out
