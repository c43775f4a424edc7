"""Layers for a trace that has none: the labels of a recording are taken away, found again, and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from build.aligned import compared, share_found, without_labels
from build.architectures import ARCHITECTURES
from build.libraries import usable_transformers
from build.models import Layers
from build.places import ROOT, TRACES
from build.snapshots import snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchprof
from examples.large_models import Llama, ResNet50
from examples.models import Bert
from torchprof import TorchprofError
from torchprof.run.words import BACKWARD, FORWARD, RECOMPUTE


def recorded(folder: Path, model: nn.Module, step: Callable[[], Any], steps: int = 2, **options: Any) -> Path:
    """The trace of some steps, with labels."""
    with torchprof.Profile(model, **options) as prof:
        for _ in range(steps):
            step()
    prof.export_chrome_trace(folder / "labelled.json")
    return folder / "labelled.json"


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


@pytest.mark.parametrize("name", sorted(OF_EQUAL_BLOCKS))
def test_the_calls_of_modules_in_a_trace_show_where_a_forward_begins(name: str, tmp_path: Path) -> None:
    model, inputs = ARCHITECTURES[name].make().eval(), ARCHITECTURES[name].inputs()
    with torchprof.annotate(model), torch.profiler.profile(with_stack=True) as prof, torch.no_grad():
        for _ in range(3):
            model(*inputs)
    prof.export_chrome_trace(str(tmp_path / "labelled.json"))
    share, run = compared(tmp_path / "labelled.json", model, inputs)
    assert (share > 0.999, run.tree().calls) == (True, 3)
    assert "adjacent_forwards" not in {warning.code for warning in run.warnings}


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


@pytest.mark.parametrize("name", ["Siamese", "encoder", "encoder and decoder"])
def test_likely_inputs_are_sequences_and_as_many_as_the_forward_needs(name: str, tmp_path: Path) -> None:
    model, inputs = ARCHITECTURES[name].make(), ARCHITECTURES[name].inputs()
    share, _ = compared(recorded(tmp_path, model, lambda: back(model(*inputs))), model, None)
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


class Residual(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class PartlyCheckpointed(nn.Module):
    """Equal blocks, of which some are computed again in backward."""

    def __init__(self, again: Container[int], use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            Residual(norm=nn.LayerNorm(8), up=nn.Linear(8, 16), down=nn.Linear(16, 8), dropout=nn.Dropout(0.1))
            for _ in range(4)
        )
        self.last = nn.Linear(8, 2)
        self.again = again
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=self.use_reentrant) if number in self.again else block(x)
        return self.last(x)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("again", [(0, 1, 2, 3), (1,), (0, 2), (3,)], ids=str)
def test_what_checkpoints_compute_again_is_at_its_layers(
    again: tuple[int, ...], use_reentrant: bool, tmp_path: Path
) -> None:
    """The blocks are equal: which one is computed again is known by the operator that made the autograd node. Without
    labels, the own time of the node includes Python's between the operators."""
    model, x = PartlyCheckpointed(again, use_reentrant), torch.rand(3, 4)
    trace = recorded(tmp_path, model, lambda: back(model(x)), record_shapes=True)
    share, aligned = compared(trace, model, (x,), nodes=False)
    assert share == 1
    labelled = torchprof.from_trace(trace, model)
    for phase in (None, FORWARD, BACKWARD, RECOMPUTE):
        trees = (run.tree() if phase is None else run.tree(phase) for run in (aligned, labelled))
        for node, other in zip(*(tree.walk() for tree in trees), strict=True):
            assert (node.layer.path, node.calls) == (other.layer.path, other.calls)
            assert node.self.flops == other.self.flops
    assert aligned.tree(RECOMPUTE).total.flops


def test_a_checkpoint_that_computes_something_else_has_no_layer(tmp_path: Path) -> None:
    """As with operators that only run in backward: neither the node's layer nor the one computed again has them."""

    class Changing(Layers):
        def again(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls % 2 == 0:
                torch.relu(x.detach())
            return self.layers(x)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.again, x, use_reentrant=False, determinism_check="none")

    model, x = (
        Changing(layers=nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), calls=0),
        torch.rand(3, 4, requires_grad=True),
    )
    with torch.profiler.profile() as prof:
        back(model(x))
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    model.calls = 0
    run = torchprof.from_trace(tmp_path / "trace.json", model, inputs=(x,))
    assert run.tree().calls == 1
    assert not run.tree(RECOMPUTE).total.cpu_ns
    outside = [row for row in run.rows if row.layer is None and row.phase == RECOMPUTE and row.frames]
    assert {row.frames[-1].name for row in outside} >= {"aten::relu", "aten::linear", "aten::gelu"}


def test_gradients_of_gradients_stay_at_their_layers(tmp_path: Path) -> None:
    """Backward records a graph, as forward does: its operators are no recompute."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.rand(3, 4, requires_grad=True)

    def step() -> None:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient.norm() ** 2).backward()

    share, _ = compared(recorded(tmp_path, model, step), model, (x,))
    assert share > 0.999


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.nn.functional.linear(x, weight) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.saved_tensors[0] * 2, None


class OwnFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return Doubling.apply(x, self.weight)


def test_a_function_of_autograd_is_at_its_layer_with_its_backward(tmp_path: Path) -> None:
    own, x = OwnFunction(weight=nn.Parameter(torch.rand(4, 4))), torch.rand(3, 4)
    model = nn.Sequential(nn.Linear(4, 4), own, nn.ReLU())
    share, run = compared(recorded(tmp_path, model, lambda: back(model(x))), model, (x,))
    assert share > 0.999
    assert next(node for node in run.tree(BACKWARD).walk() if node.layer.path[-1] == "1").self.cpu_ns > 0


class Attention(nn.Module):
    """Fused or not: the same layers."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(0.1)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).view(2, -1, 2, 4).transpose(1, 2) for layer in (self.query, self.key, self.value))
        if self.fused:
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        else:
            mixed = self.dropout((query @ key.transpose(2, 3) / 2).softmax(-1)) @ value
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Attending(nn.Module):
    def __init__(self, fused: bool, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), Attention(fused)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("fused", [False, True])
def test_attention_may_be_computed_in_another_way(fused: bool, tmp_path: Path) -> None:
    """What takes the place of attention's operators is at the layer of these."""
    model, x = Attending(fused), torch.rand(2, 5, 4)
    share, run = compared(recorded(tmp_path, model, lambda: back(model(x))), Attending(not fused), (x,))
    assert share == 1 if fused else 0.5 < share < 1
    wanted = {"aten::scaled_dot_product_attention"} if fused else {"aten::matmul", "aten::softmax"}
    for number in range(3):
        layer = f"Attending.layers.{number}.1"
        assert wanted <= {
            row.frames[-1].name for row in run.rows if row.layer and row.layer.name == layer and row.frames
        }
    doubts = [one for one in run.warnings if one.code == "layers_in_doubt"]
    assert [set(doubt.layers) for doubt in doubts] == (
        [] if fused else [{f"Attending.layers.{number}.1" for number in range(3)}]
    )
    with pytest.raises(TorchprofError, match=r"for at most|nowhere"):
        torchprof.from_trace(tmp_path / "stripped.json", Attending(not fused, layers=4), inputs=(x,))


def test_equal_layers_fill_the_time_between_backward_passes(tmp_path: Path) -> None:
    """A forward of four equal layers could begin at any of them: the backward passes show where it does."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.rand(2, 8)
    share, run = compared(recorded(tmp_path, model, lambda: back(model(x)), steps=3), model, (x,))
    assert share == 1
    assert [node.calls for node in run.tree().walk()] == [3] * 5


def test_equal_layers_that_are_called_one_by_one_fill_the_ranges_of_users(tmp_path: Path) -> None:
    """Each layer is an outermost call of a module then: no call has all of a forward."""
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.rand(2, 8)
    with torch.profiler.profile(with_stack=True) as prof, torch.no_grad():
        for _ in range(3):
            with torch.profiler.record_function("step"):
                reduce(lambda value, layer: layer(value), model, x)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    run = torchprof.from_trace(tmp_path / "trace.json", model, inputs=(x,))
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
    (warning,) = [one for one in run.warnings if one.code == "layers_in_doubt"]
    assert 0 < warning.facts["share"] < 1
    assert str(warning).endswith(" of the time of its calls. They come after Sequential.0.")


# Other models


def test_compiled_code_is_refused(tmp_path: Path) -> None:
    model, x = ARCHITECTURES["LeNet"].make(), ARCHITECTURES["LeNet"].inputs()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.profiler.profile() as prof:
        back(compiled(*x))
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    with pytest.raises(TorchprofError, match=r"torch\.compile compiled cannot be aligned, and the trace has some"):
        torchprof.from_trace(tmp_path / "trace.json", model, inputs=x)


class Inner(Layers):
    def forward(self, words: Tensor) -> Any:
        return self.norm(self.words(words))


class WithHead(Layers):
    def forward(self, words: Tensor) -> Any:
        return self.head(self.model(words))


@pytest.mark.parametrize("with_labels", [True, False])
def test_if_a_part_of_the_model_made_the_trace_it_is_named(with_labels: bool, tmp_path: Path) -> None:
    inner, words = Inner(words=nn.Embedding(100, 64), norm=nn.LayerNorm(64)), torch.randint(100, (2, 8))
    model = WithHead(model=inner, head=nn.Linear(64, 5))
    trace = recorded(tmp_path, model.model, lambda: model.model(words), record_shapes=True)
    trace = trace if with_labels else without_labels(trace)
    assert torchprof.from_trace(trace, model.model, inputs=words).layers[0].kind == "Inner"
    with pytest.raises(TorchprofError, match=r"is of a part of this model: give from_trace model\.model \(Inner\)\.$"):
        torchprof.from_trace(trace, model, inputs=words)
    with pytest.raises(TorchprofError, match=r"give from_trace model\[0\] \(Inner\)\.$"):
        torchprof.from_trace(trace, nn.Sequential(model.model, nn.Linear(64, 5)), inputs=words)
    with pytest.raises(TorchprofError) as error:
        torchprof.from_trace(trace, nn.Sequential(nn.Linear(3, 4)), inputs=words)
    assert "part of this model" not in str(error.value)


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


def test_without_a_model_the_operators_tell_what_it_may_be(tmp_path: Path) -> None:
    model = ResNet50()
    x = torch.rand(1, 3, 64, 64)
    trace = without_labels(recorded(tmp_path, model, lambda: back(model(x)), steps=3))
    (warning,) = torchprof.from_trace(trace).warnings
    modules = Counter(type(module).__name__ for module in model.modules())
    calls = {"convolution": modules["Conv2d"], "batch norm": modules["BatchNorm2d"], "max pool": 1, "linear": 1}
    assert dict(warning.facts["kinds"]) == {name: 3 * count for name, count in {**calls, "ReLU": 49}.items()}
    assert " The operators: 3 times 53 convolution, 53 batch norm, 49 ReLU, 1 " in str(warning)


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


class Tree(Layers):
    """Calls its children in turn, some of them twice, with arithmetic between them."""

    def __init__(self, children: list[nn.Module], between: list[str], again: bool) -> None:
        super().__init__(children_=nn.ModuleList(children), between=between, again=again)

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


def test_the_command_line_gives_layers_to_a_trace(tmp_path: Path, cli: Any) -> None:
    model, x = LARGE["ResNet-50"][0](), torch.rand(2, 3, 64, 64)
    trace = without_labels(recorded(tmp_path, model, lambda: back(model(x))))
    spec = f"{ROOT / 'examples' / 'large_models.py'}:ResNet50"
    assert "ResNet50.layer" in cli("show", str(trace), "--model", spec, "--input", "8,3,64,64", "--report", "top").out
    assert "--input is for the model of a trace" in cli("show", str(trace), "--input", "8,3,64,64", code=2).err
    assert "from_trace(trace, model), or --model" in cli("show", str(trace)).out


def test_the_model_of_a_trace_with_labels_is_not_run(tmp_path: Path) -> None:
    class Once(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Once.calls += 1
            return super().forward(x)

    model = Once(4, 4)
    trace = recorded(tmp_path, model, lambda: model(torch.randn(2, 4)))
    before = Once.calls
    assert torchprof.from_trace(trace, model, inputs=(torch.randn(2, 4),)).tree().calls == 2
    assert Once.calls == before
    torchprof.from_trace(without_labels(trace), model, inputs=(torch.randn(2, 4),))
    assert Once.calls > before


# Models of transformers

TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", {"n_layer": 3, "n_head": 2, "n_embd": 16}),
    "Llama": (
        "LlamaForCausalLM",
        {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    ),
    "BERT": (
        "BertForMaskedLM",
        {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2},
    ),
    "T5": ("T5ForConditionalGeneration", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}),
}


def made_of_transformers(name: str, attention: str = "sdpa") -> Any:
    transformers = usable_transformers()
    of, options = TRANSFORMERS[name]
    makes = getattr(transformers, of)
    config = makes.config_class(vocab_size=60, **options)
    config._attn_implementation = attention
    return makes(config)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_layers_of_a_transformer_are_found_again(name: str, training: bool, tmp_path: Path) -> None:
    """The reference is called with other lengths than the recording."""
    model = made_of_transformers(name).train(training)
    inputs = {"input_ids": torch.randint(0, 50, (2, 9))}
    if name == "T5":
        inputs["decoder_input_ids"] = torch.randint(0, 50, (2, 5))

    def step() -> None:
        with torch.set_grad_enabled(training):
            output = model(**inputs)
        if training:
            output[0].sum().backward()

    step()
    trace = recorded(tmp_path, model, step, record_shapes=True)
    kwargs = {key: torch.zeros(1, 7, dtype=torch.long) for key in inputs}
    share, run = compared(trace, model, (), kwargs=kwargs)
    assert share > 0.95  # some operators that make an empty tensor are others on the meta device
    assert run.tree().calls == 2


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_every_forward_of_a_generation_is_found(name: str, tmp_path: Path) -> None:
    """With the cache of keys and values, each forward but the first has one token, and other operators around it."""
    model = made_of_transformers(name).eval()
    tokens = torch.randint(0, 50, (2, 9))

    def step() -> None:
        model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)

    trace = recorded(tmp_path, model, step, record_shapes=True)
    share, run = compared(trace, model, (tokens,))
    assert share > 0.8
    assert run.tree().calls == 12


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_a_transformer_may_attend_in_another_way_than_in_the_recording(name: str, tmp_path: Path) -> None:
    model = made_of_transformers(name, "eager")
    tokens = torch.randint(0, 50, (2, 9))
    trace = recorded(tmp_path, model, lambda: model(tokens)[0].sum().backward())
    aligned = torchprof.from_trace(without_labels(trace), made_of_transformers(name, "sdpa"), inputs=(tokens,))
    assert aligned.tree().calls == 2
    assert share_found(torchprof.from_trace(trace, model), aligned) > 0.8


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_a_checkpointed_transformer(name: str, tmp_path: Path) -> None:
    model = made_of_transformers(name).train()
    model.gradient_checkpointing_enable()
    tokens = torch.randint(0, 50, (2, 9))
    trace = recorded(tmp_path, model, lambda: model(tokens, use_cache=False)[0].sum().backward(), record_shapes=True)
    share, run = compared(trace, model, (tokens,), kwargs={"use_cache": False}, nodes=False)
    assert share > 0.985
    labelled = torchprof.from_trace(trace, model)
    for node, other in zip(run.tree(RECOMPUTE).walk(), labelled.tree(RECOMPUTE).walk(), strict=True):
        assert (node.layer.path, node.calls, node.self.flops) == (other.layer.path, other.calls, other.self.flops)


X = torch.rand(3, 4)


@pytest.mark.parametrize("inputs", [X, (X,), [X], {"x": X}], ids=["tensor", "tuple", "list", "dict"])
def test_inputs_are_a_tensor_arguments_or_keyword_arguments(inputs: Any, tmp_path: Path) -> None:
    class Reading(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).relu()

    model = Reading(fc=nn.Linear(4, 4))
    with torch.profiler.profile() as prof:
        model(X)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    run = torchprof.from_trace(tmp_path / "trace.json", model, inputs=inputs)
    assert run.tree().calls == 1
    with pytest.raises(torchprof.TorchprofError, match="inputs must be a tensor"):
        torchprof.from_trace(tmp_path / "trace.json", model, inputs=4)
