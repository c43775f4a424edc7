"""``torchprof.flops``: figures from shapes equal those of a real run; the user's model is not changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from build.models import Checkpointed, Functional, Layers, PackedLstm, Several, Tied
from build.snapshots import snapshot
from build.warnings import sentences
from torch import Tensor, nn

import torchprof
from examples.models import AlexNet, LeNet5, TinyTransformer


def counted(run: torchprof.Run, phase: str) -> dict[str, tuple[int, int, int]]:
    """MACs, FLOPs and calls by layer."""
    return {node.layer.name: (node.total.macs, node.total.flops, node.calls) for node in run.tree(phase).walk()}


def profiled(model: nn.Module, *args: Any) -> torchprof.Run:
    with torchprof.Profile(model, with_flops=True) as prof:
        output = model(*args)
        torch.autograd.backward([output], [torch.ones_like(output)])
    return prof.run


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (LeNet5(), torch.rand(3, 1, 32, 32)),
        (AlexNet(), torch.rand(1, 3, 224, 224)),
        (Several(), torch.rand(2, 4)),
        (Tied(), torch.rand(2, 4)),
        (Functional(), torch.rand(2, 4)),
        pytest.param(
            Checkpointed(use_reentrant=False),
            torch.rand(2, 4),
            marks=pytest.mark.skipif(
                torch.__version__.startswith("2.4."), reason="torch 2.4 checkpoints no meta tensors"
            ),
        ),
        (nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)), torch.rand(2, 3, 9, 9)),
        (nn.Sequential(nn.ConvTranspose2d(3, 6, 3, stride=2), nn.GELU()), torch.rand(2, 3, 5, 5)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_figures_from_shapes_equal_those_of_a_real_run(model: nn.Module, x: Tensor) -> None:
    real, of_shapes = profiled(model, x), torchprof.flops(model, x)
    assert of_shapes.phases() == real.phases()
    for phase in real.phases():
        assert counted(of_shapes, phase) == counted(real, phase)


def test_forward_attention_has_the_same_macs_as_a_real_run() -> None:
    """On the meta device, attention runs as separate products. Forward is the same; backward does not recompute QKᵀ."""
    model, x = TinyTransformer(), torch.randint(100, (2, 16))
    real, of_shapes = profiled(model, x), torchprof.flops(model, x)
    assert counted(of_shapes, "forward") == counted(real, "forward")


def test_times_and_memory_are_not_measured() -> None:
    run = torchprof.flops(LeNet5(), torch.rand(1, 1, 32, 32))
    assert run.meta.requested == run.meta.measured == ("macs", "flops", "uncounted")
    assert run.samples == {}
    assert not any(any(run.rows.columns[name]) for name in ("cpu_ns", "device_ns", "cpu_allocated", "cpu_freed"))
    headings = [heading.strip() for heading in run.report("tree").splitlines()[0].split("|")]
    assert headings == ["Module", "Params", "MACs", "FLOPs", "Number of Calls", "Backward MACs", "Backward FLOPs"]
    assert sentences(run) == ()
    assert run.tree().layer.input_shapes == ((1, 1, 32, 32),)


def test_under_no_grad_only_the_forward_runs() -> None:
    with torch.no_grad():
        assert torchprof.flops(LeNet5(), torch.rand(1, 1, 32, 32)).phases() == ("forward",)


def test_the_model_and_its_arguments_are_not_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model.train()
    model(torch.rand(3, 4)).sum().backward()
    x = torch.rand(3, 4, requires_grad=True)
    before, gradients = snapshot(model), [parameter.grad for parameter in model.parameters()]
    values = [tensor.clone() for tensor in model.state_dict().values()]
    state = torch.get_rng_state()
    torchprof.flops(model, x)
    assert snapshot(model) == before
    assert all(now is then for now, then in zip([parameter.grad for parameter in model.parameters()], gradients))
    assert all(torch.equal(now, then) for now, then in zip(model.state_dict().values(), values))
    assert x.grad is None
    assert x.device.type == "cpu"
    assert torch.equal(torch.get_rng_state(), state)


def test_no_memory_is_needed() -> None:
    """A model of 4 TB, made on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**18, 2**18, bias=False) for _ in range(16)))
    with torch.no_grad():
        run = torchprof.flops(model, torch.empty(8, 2**18, device="meta"))
    assert run.tree().total.macs == 16 * 8 * 2**36
    assert run.total_params()[("Sequential",)] == 16 * 2**36
    assert sum(layer.param_bytes or 0 for layer in run.layers) == 4 * 2**40


def test_a_real_model_is_not_copied_with_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Tensor, memo: dict[int, Any]) -> Tensor:
        raise AssertionError("the data of a tensor was copied")

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", refuse)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", refuse)
    assert torchprof.flops(model, torch.rand(2, 4)).tree("forward").total.macs == 32


class HoldsTensors(Layers):
    """Has tensors that are neither parameters nor buffers, and makes tensors in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(4, dtype=torch.float32)
        return self.fc(x) * self.scale + self.tables[0] + self.tables[1]["more"] + steps + torch.ones(4)


def test_tensors_in_attributes_and_tensors_made_in_forward() -> None:
    run = torchprof.flops(
        HoldsTensors(fc=nn.Linear(4, 4), scale=torch.rand(4), tables=[torch.rand(4), {"more": torch.rand(4)}]),
        torch.rand(2, 4),
    )
    assert run.tree("forward").self.flops == 5 * 8  # a product and four sums of 2 × 4
    assert run.tree("forward").total.macs == 2 * 4 * 4


def test_tied_weights_stay_tied() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    whole = nn.Sequential(model["a"], model["b"])
    run = torchprof.flops(whole, torch.rand(2, 4))
    assert run.total_params()[("Sequential",)] == 16


def test_keyword_arguments_and_containers() -> None:
    class TakesMany(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], *, options: dict[str, Any]) -> Tensor:
            return pair[0] @ pair[1] * options["factor"]

    run = torchprof.flops(TakesMany(), (torch.rand(2, 3), torch.rand(3, 5)), options={"factor": torch.rand(5)})
    assert run.tree("forward").total.macs == 2 * 3 * 5


def test_a_forward_that_needs_values_raises() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(torchprof.TorchprofError, match=r"Asks does not run on the meta device.*Profile it on data"):
        torchprof.flops(Asks(), torch.rand(2))
    with torchprof.Profile(nn.Linear(2, 2)) as prof:  # the failed block was closed
        pass
    assert prof.run


def test_lengths_that_depend_on_data_raise() -> None:
    with pytest.raises(torchprof.TorchprofError, match="PackedLstm does not run on the meta device"):
        torchprof.flops(PackedLstm(), torch.rand(2, 5, 3), torch.tensor([5, 3]))


def test_the_model_s_own_errors_pass_through() -> None:
    with pytest.raises(TypeError):
        torchprof.flops(LeNet5())
    with pytest.raises(RuntimeError, match=r"reduction dim|cannot be multiplied"):
        torchprof.flops(nn.Linear(4, 4), torch.rand(2, 3))


def test_a_backward_that_fails_on_the_meta_device_is_a_warning() -> None:
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("no way back")

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return Stops.apply(self.fc(x))

    run = torchprof.flops(Net(fc=nn.Linear(4, 4)), torch.rand(2, 4))
    assert run.tree("forward").total.macs == 32
    assert "Backward is incomplete: on the meta device it stopped with no way back." in sentences(run)


def test_anything_but_a_module_raises() -> None:
    with pytest.raises(torchprof.TorchprofError, match=r"needs a torch\.nn\.Module"):
        torchprof.flops(lambda x: x, torch.rand(2))  # type: ignore[arg-type]


def test_a_model_that_cannot_be_copied_raises() -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise TypeError("cannot pickle '_thread.lock' object")

    with pytest.raises(torchprof.TorchprofError, match=r"Locked cannot be copied without its data.*Profile it on data"):
        torchprof.flops(Locked(4, 4), torch.rand(2, 4))


def test_a_model_on_the_meta_device_is_not_changed() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = snapshot(model)
    runs = [torchprof.flops(model, torch.rand(2, 4)) for _ in range(2)]
    assert runs[0].rows == runs[1].rows
    assert snapshot(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_packed_sequences_keep_their_lengths() -> None:
    lstm = nn.LSTM(3, 5)
    packed = nn.utils.rnn.pack_padded_sequence(torch.rand(7, 2, 3), torch.tensor([7, 4]))
    with torch.no_grad():
        assert torchprof.flops(lstm, packed).tree().total.macs == 11 * (4 * 5 * 3 + 4 * 5 * 5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_operators_that_the_meta_device_cannot_run_raise() -> None:
    with pytest.raises(torchprof.TorchprofError, match=r"LazyLinear has lazy parameters.*call the model once before"):
        torchprof.flops(nn.LazyLinear(4), torch.rand(2, 4))
    with pytest.raises(torchprof.TorchprofError, match=r"contains TorchScript.*Profile it on data"):
        torchprof.flops(nn.Sequential(torch.jit.script(nn.Linear(4, 4))), torch.rand(2, 4))

    class Complains(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("missing metadata")

    with pytest.raises(RuntimeError, match="missing metadata") as caught:
        torchprof.flops(Complains(), torch.rand(2))
    assert not isinstance(caught.value, torchprof.TorchprofError)


def test_a_compiled_model_is_counted_without_compilation() -> None:
    model = LeNet5()
    expected = torchprof.flops(model, torch.rand(1, 1, 32, 32)).tree().total.macs
    compiled = torch.compile(model, backend="eager")
    assert torchprof.flops(compiled, torch.rand(1, 1, 32, 32)).tree().total.macs == expected == 416_520 + 715_440
