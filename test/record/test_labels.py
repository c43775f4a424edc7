"""The labels: what the model does inside the block is what it does outside, and nothing of ours stays behind."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import io
import pickle
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from build.calls import calls_of
from build.libraries import RELEASE
from build.models import Layers, profiled
from build.nonempty import at_least_one
from build.processes import in_thread, run_fresh
from build.snapshots import snapshot
from build.warm import run_warm
from build.warnings import sentences
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree

from torchprof import Profile, TorchprofError
from torchprof.record.this_process import block_of


@pytest.fixture
def untouched() -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Give a model to this; at the end of the test it must be as it was."""
    before: list[tuple[nn.Module, dict[str, Any]]] = []

    def watch(model: nn.Module) -> nn.Module:
        before.append((model, snapshot(model)))
        return model

    yield watch
    for model, was in at_least_one(before):
        assert snapshot(model) == was
    assert not torch.autograd.profiler._is_profiler_enabled


def warnings_of(prof: Profile) -> str:
    return "\n".join(sentences(prof.run))


class Net(Layers):
    def __init__(self) -> None:
        super().__init__(body=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()), head=nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def same_inside(model: nn.Module, *inputs: Any) -> Profile:
    """A profile of a model that gives the same result as before the block."""
    right = model(*inputs)
    with Profile(model) as prof:
        assert torch.equal(model(*inputs), right)
    return prof


NET_ONCE = {"Net": 1, "Net.body": 1, "Net.body.0": 1, "Net.body.1": 1, "Net.body.2": 1, "Net.head": 1}


# Nothing stays behind


@pytest.mark.parametrize("options", [{}, {"profile_memory": True}, {"paths": ["head", "body.*"]}, {"warmup": 1}])
def test_the_model_is_as_it_was_after_the_block(untouched, options) -> None:
    model = untouched(Net())
    with Profile(model, **options):
        model(torch.rand(5, 3)).sum()


def test_instances_carry_nothing_of_torchprof_inside_the_block() -> None:
    model = Net()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with Profile(model):
        model(torch.rand(5, 3))
        assert {name: set(vars(module)) for name, module in model.named_modules()} == before
        assert type(model) is Net and type(model.head) is nn.Linear
        assert not [name for name in model.state_dict() if "torchprof" in name]


def test_train_and_eval_mode_are_kept_and_may_change_inside_the_block(untouched) -> None:
    model = untouched(Net().eval())
    with Profile(model):
        model(torch.rand(5, 3))
    assert not any(module.training for module in model.modules())
    with Profile(model):
        model.train()
        model(torch.rand(5, 3))
        model.eval()


def test_results_gradients_and_buffers_are_those_without_a_profiler() -> None:
    torch.manual_seed(0)
    plain, seen = Net(), Net()
    seen.load_state_dict(plain.state_dict())
    x = torch.rand(5, 3)
    plain(x).pow(2).sum().backward()
    with Profile(seen, profile_memory=True):
        seen(x).pow(2).sum().backward()
    for mine, theirs in zip(plain.parameters(), seen.parameters()):
        assert torch.equal(mine.grad, theirs.grad)
    for (name, mine), theirs in zip(plain.named_buffers(), seen.buffers()):
        assert torch.equal(mine, theirs), name


# Copies made inside the block


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved])
@pytest.mark.parametrize("called_before", [True, False])
def test_a_copy_made_inside_runs_its_own_weights_inside_and_after(untouched, copied, called_before) -> None:
    model = untouched(Net().eval())
    x = torch.rand(2, 3)
    right = model(x)
    with Profile(model) as prof:
        if called_before:
            model(x)
        twin = copied(model)
        with torch.no_grad():
            twin.head.weight.zero_()
            twin.head.bias.copy_(torch.tensor([1.0, 2.0]))
        assert torch.equal(twin(x), torch.tensor([[1.0, 2.0]] * 2))
        assert torch.equal(model(x), right)
    assert calls_of(prof)["Net"] == 1 + called_before  # the copy's calls are not the model's
    assert torch.equal(twin(x), torch.tensor([[1.0, 2.0]] * 2))
    assert set(vars(twin)) == set(vars(model))


def test_a_shallow_copy_made_inside_works() -> None:
    model = nn.Linear(2, 2, bias=False)
    x = torch.ones(1, 2)
    with Profile(model) as prof:
        twin = copy.copy(model)
        twin._parameters = dict(model._parameters)  # a shallow copy shares the very dict
        twin.weight = nn.Parameter(torch.full((2, 2), 2.0))
        assert torch.equal(twin(x), torch.full((1, 2), 4.0))
        model(x)
    assert calls_of(prof) == {"Linear": 1}
    assert torch.equal(twin(x), torch.full((1, 2), 4.0))


def test_a_replica_as_data_parallel_makes_them_runs_its_own_weights() -> None:
    model = nn.Linear(2, 2, bias=False)
    with Profile(model):
        replica = model._replicate_for_data_parallel()
        replica.weight, replica.bias = torch.full((2, 2), 2.0), None
        assert torch.equal(replica(torch.ones(1, 2)), torch.full((1, 2), 4.0))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_copies_of_a_module_with_a_forward_on_the_instance_keep_that_forward(untouched, copied) -> None:
    model = nn.Linear(2, 2)
    model.forward = torch.sin
    untouched(model)
    x = torch.rand(2)
    with Profile(model):
        twin = copied(model)
        assert torch.equal(twin(x), torch.sin(x))
    assert torch.equal(twin(x), torch.sin(x))
    if copied is copy.deepcopy:
        assert twin.forward is torch.sin


# Forwards of every sort


def test_the_signature_of_forward_is_kept() -> None:
    class Picky(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None, *, cache: bool = False) -> torch.Tensor:
            """What it does."""
            return ids

    model = Picky()
    signature = inspect.signature(model.forward)
    with Profile(model):
        assert inspect.signature(model.forward) == signature
        assert inspect.signature(Picky.forward) == inspect.signature(inspect.unwrap(Picky.forward))
        assert (model.forward.__name__, model.forward.__doc__) == ("forward", "What it does.")
        assert model.forward.__self__ is model


class Base(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)


class Child(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class Grandchild(Child):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Base.forward(self, super().forward(x))


class Heir(Base):
    pass


def test_super_forward_counts_once(untouched) -> None:
    model = untouched(nn.Sequential(Child(), Grandchild(), Base(), Heir(), Heir()))
    prof = same_inside(model, torch.rand(3))
    assert set(calls_of(prof).values()) == {1}
    sines = {path[-1]: sum(e.name == "aten::sin" for e in lists[0]) for path, lists in prof.raw()[1].items()}
    assert sines == {"0": 1, "1": 2, "2": 1, "3": 1, "4": 1}


def test_calls_of_unprofiled_models_of_a_profiled_class_are_not_recorded(untouched) -> None:
    seen, other = untouched(nn.Sequential(Heir())), untouched(nn.Sequential(Heir(), Base()))
    with Profile(seen) as prof:
        for _ in range(3):
            other(torch.rand(2))
        seen(torch.rand(2))
    assert calls_of(prof) == {"Sequential": 1, "Sequential.0": 1}


class StaticForward(nn.Module):
    @staticmethod
    def forward(x: torch.Tensor, power: int = 2) -> torch.Tensor:
        return x**power


class ClassForward(nn.Module):
    power = 3

    @classmethod
    def forward(cls, x: torch.Tensor) -> torch.Tensor:
        return x**cls.power


class CallableForward(nn.Module):
    forward = torch.sin  # a builtin binds no self


class PropertyForward(nn.Module):
    @property
    def forward(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x + len(list(self.children()))


class PartialForward(nn.Module):
    def run(self, x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by

    forward = functools.partialmethod(run, by=2.0)


class NoGradForward(nn.Module):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize(
    "kind", [StaticForward, ClassForward, CallableForward, PropertyForward, PartialForward, NoGradForward]
)
def test_forwards_that_are_not_plain_methods_are_labelled(untouched, kind) -> None:
    model = untouched(nn.Sequential(kind(), kind()))
    x = torch.rand(3, requires_grad=True)
    right = model(x)
    signature = inspect.signature(model[0].forward) if kind is not CallableForward else None
    with Profile(model) as prof:
        result = model(x)
        assert torch.equal(result, right) and result.requires_grad == right.requires_grad
        model[1].forward(x)
        if signature is not None:
            assert inspect.signature(model[0].forward) == signature
    assert calls_of(prof) == {"Sequential": 1, "Sequential.0": 1, "Sequential.1": 2}


def test_a_static_forward_called_on_the_class_belongs_to_no_layer(untouched) -> None:
    model = untouched(StaticForward())
    with Profile(model) as prof:
        assert torch.equal(StaticForward.forward(torch.full((2,), 3.0)), torch.full((2,), 9.0))
        assert torch.equal(model(torch.full((2,), 2.0), power=3), torch.full((2,), 8.0))
    assert calls_of(prof) == {"StaticForward": 1}


def test_a_forward_on_the_instance_is_labelled_and_restored(untouched) -> None:
    model = Net().eval()
    own = functools.partial(F.linear, weight=torch.ones(2, 4))
    model.head.forward = own
    untouched(model)
    prof = same_inside(model, torch.rand(2, 3))
    assert model.head.forward is own
    assert calls_of(prof) == NET_ONCE


def test_a_forward_put_on_the_instance_inside_the_block_is_kept() -> None:
    """As accelerate does: it keeps the old forward and calls it from the new one."""
    model = nn.Linear(2, 2)
    x = torch.rand(1, 2)
    right = model(x)
    with Profile(model) as prof:
        old = model.forward

        def new(*args: Any) -> torch.Tensor:
            return old(*args) + 1

        model.forward = new
        assert torch.equal(model(x), right + 1)
    assert model.forward is new
    assert torch.equal(model(x), right + 1)
    assert calls_of(prof) == {"Linear": 1}
    del model.forward
    assert torch.equal(model(x), right)


def test_a_class_that_the_user_patches_inside_the_block_stays_patched() -> None:
    class Patched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def patch(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with Profile(Patched()):
        Patched.forward = patch
    assert Patched.__dict__["forward"] is patch


def test_keyword_only_and_positional_only_arguments(untouched) -> None:
    class Named(nn.Module):
        def forward(self, x, /, y, *more, self_=0, original=0, label=0, **rest):
            return x, y, more, self_, original, label, rest

    model = untouched(Named())
    with Profile(model) as prof:
        got = model(1, 2, 3, self_=4, original=5, label=6, args=8, kwargs=9, x=10)
        assert got == (1, 2, (3,), 4, 5, 6, {"args": 8, "kwargs": 9, "x": 10})
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
            model(1)
    assert calls_of(prof) == {"Named": 2}


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: Any = None


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"a": x, "b": [x, (x, None)]},
        lambda x: Output(x, "text"),
        lambda x: None,
        lambda x: 3,
        lambda x: (x for _ in range(3)),
        lambda x: torch.nn.utils.rnn.pack_padded_sequence(x, [2, 1], batch_first=True),
    ],
    ids=["dict", "dataclass", "None", "int", "generator", "packed"],
)
def test_a_forward_may_return_any_object(untouched, make) -> None:
    class Any_(nn.Module):  # noqa: N801
        def forward(self, x: Any) -> Any:
            return result

    x = torch.rand(2, 2, 2)
    result = make(x)
    model = untouched(Any_())
    with Profile(model) as prof:
        assert model(x) is result
        assert model(result) is result
        assert model(x=result) is result
    assert calls_of(prof) == {"Any_": 3}


def test_a_forward_may_be_a_generator(untouched) -> None:
    class Stream(nn.Module):
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for number in range(3):
                yield x + number

    model = untouched(Stream())
    with Profile(model) as prof:
        assert [int(value) for value in model(torch.tensor(1))] == [1, 2, 3]
    assert calls_of(prof) == {"Stream": 1}


def test_arguments_that_contain_themselves_do_not_hang_the_call(untouched) -> None:
    class Loop(list):
        visits = 0

        def _visit(self) -> None:
            Loop.visits += 1
            assert Loop.visits < 100, "the shapes of the arguments are looked for in a circle"

        def __iter__(self):
            self._visit()
            return super().__iter__()

        def __reversed__(self):
            self._visit()
            return super().__reversed__()

    loop = Loop([torch.rand(1)])
    loop.append(loop)
    model = untouched(nn.Identity())
    with Profile(model) as prof:
        assert model(loop) is loop
    assert calls_of(prof) == {"Identity": 1}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_pass_through_and_the_run_can_be_saved(untouched, layout, tmp_path) -> None:
    """A nested tensor of the strided layout has no shape to ask for."""
    model = untouched(nn.Sequential(nn.Linear(4, 4)))
    x = torch.nested.nested_tensor([torch.rand(2, 4), torch.rand(3, 4)], layout=layout)
    right = model(x)
    with Profile(model) as prof:
        result = model(x)
    assert all(torch.equal(a, b) for a, b in zip(result.unbind(), right.unbind()))
    assert calls_of(prof) == {"Sequential": 1, "Sequential.0": 1}
    prof.run.save(tmp_path / "run.json")


def test_a_hook_of_the_user_disables_the_fast_path_as_without_a_profile() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model.linear1.register_forward_hook(lambda *_: None)
    x = torch.rand(2, 5, 8)
    with torch.no_grad(), torch.autograd.profiler.profile(use_kineto=True) as plain:
        model(x)
    with torch.no_grad(), Profile(model) as prof:
        model(x)
    fused = "aten::_transformer_encoder_layer_fwd"
    was_off = fused not in {row.key for row in plain.key_averages()}  # not so in torch 2.4
    assert (fused not in {row.key for row in prof.key_averages()}) == was_off
    assert calls_of(prof)["TransformerEncoderLayer.linear1"] == was_off


# Hooks of the user's


def test_hooks_run_as_often_and_in_the_same_order(untouched) -> None:
    model = Net()
    log: list[str] = []
    model.head.register_forward_pre_hook(lambda m, args: log.append("pre"))
    model.head.register_forward_hook(lambda m, args, out: log.append("post") or out * 2)
    model.head.register_forward_hook(lambda m, args, kwargs, out: log.append("kwargs"), with_kwargs=True)
    model.head.register_full_backward_pre_hook(lambda m, grad: log.append("backward pre"))
    model.head.register_full_backward_hook(lambda m, gin, gout: log.append("backward"))
    model.body[0].weight.register_hook(lambda grad: log.append("weight"))
    untouched(model.eval())
    x = torch.rand(2, 3)
    right = model(x)
    right.sum().backward()
    without, log[:] = list(log), []
    with Profile(model) as prof:
        result = model(x)
        result.sum().backward()
    assert log == without and len(log) == 6
    assert torch.equal(result, right)
    assert calls_of(prof) == NET_ONCE


def test_hooks_may_be_added_and_removed_inside_the_block() -> None:
    model = Net()
    kept = []
    removed = model.head.register_forward_hook(lambda *_: None)
    with Profile(model):
        handle = model.body.register_forward_hook(lambda *_: kept.append(1))
        removed.remove()
        model(torch.rand(2, 3))
    assert len(model.body._forward_hooks) == 1 and not model.head._forward_hooks
    assert kept == [1]
    handle.remove()


# torch.compile, TorchScript, fx, export


class Block(Layers):
    def __init__(self) -> None:
        super().__init__(lin=nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.lin(x)) + 1


class Stack(Layers):
    def __init__(self) -> None:
        super().__init__(a=Block(), b=Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def _optimized(model: nn.Module, backend: str = "eager", **options: Any) -> nn.Module:
    return torch.compile(model, backend=backend, **options)


def _compiled_in_place(model: nn.Module, backend: str = "eager", **options: Any) -> nn.Module:
    model.compile(backend=backend, **options)
    return model


def test_a_compiled_function_that_calls_the_model(untouched, dynamo) -> None:
    model = untouched(Stack())

    step = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
    first_inside = torch.compile(lambda x: model(x).mean(), backend="eager", fullgraph=True)
    x = torch.rand(2, 3)
    right = step(x)
    with Profile(model):
        assert torch.equal(step(x), right)
    assert torch.equal(step(x), right)
    assert dynamo() == 1
    with Profile(model):
        assert torch.allclose(first_inside(x), right / 6)
    assert torch.allclose(first_inside(x), right / 6)
    assert dynamo() == 2


def test_copies_of_a_compiled_model_made_inside_run_their_own_weights(dynamo) -> None:
    model = _compiled_in_place(nn.Linear(2, 2, bias=False))
    x = torch.ones(1, 2)
    model(x)
    with Profile(model):
        twin = copy.deepcopy(model)
        nn.init.constant_(twin.weight, 3.0)
        assert torch.equal(twin(x), torch.full((1, 2), 6.0))
    assert torch.equal(twin(x), torch.full((1, 2), 6.0))


class WithDefaults(Block):
    def forward(self, x: torch.Tensor, scale: float = 2.0, shift: torch.Tensor | None = None) -> torch.Tensor:
        x = super().forward(x) * scale
        return x if shift is None else x + shift


class WithKeywords(Block):
    def forward(self, x: torch.Tensor, *, scale: float = 3.0, shift: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale + shift


def _twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    times = 2

    @functools.wraps(forward)
    def decorated(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * times

    return decorated


class WithDecorator(Block):
    @_twice
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return F.relu(self.lin(x)) * scale


class Outermost(nn.Module):
    """As layers of transformers do for checkpointing: each class has a forward that does more where it is the one of
    the module's own class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inner = cls.forward

        @functools.wraps(inner)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_outermost = type(self).forward is forward
            return inner(self, *args, **kwargs) + (5 if is_outermost else 7)

        cls.forward = forward


class KnowsItself(Outermost):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return F.relu(self.lin(x)) * scale


class KnowsItselfAnew(KnowsItself):
    def forward(self, x: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
        return super().forward(x, scale)


class Around(Layers):
    def __init__(self, child: nn.Module) -> None:
        super().__init__(child=child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x) + self.child(x)


def _looks_of(forward: Any) -> list[Any]:
    """What torch.compile looks at in its guards wherever a class has a forward, by identity; and its signature."""
    cells = forward.__closure__ and [id(cell) for cell in forward.__closure__]
    names = str(inspect.signature(forward)), forward.__qualname__
    return [*(forward.__defaults__ or ()), forward.__kwdefaults__, cells, *names]


FORWARDS = pytest.mark.parametrize("kind", [WithDefaults, WithKeywords, WithDecorator, KnowsItself, KnowsItselfAnew])
COMPILED = pytest.mark.parametrize("compiled", [_optimized, _compiled_in_place])
AS_CHILD = pytest.mark.parametrize("as_child", [False, True], ids=["root", "child"])


@FORWARDS
@COMPILED
@AS_CHILD
def test_compiled_forwards_of_any_form_are_not_recompiled(untouched, dynamo, kind, compiled, as_child) -> None:
    """Compiled before the block: of defaults and of variables of a closure there are guards in every class."""
    looks = [_looks_of(cls.forward) for cls in kind.__mro__ if "forward" in vars(cls)]
    model = kind()
    inner = Around(model) if as_child else model
    x = torch.rand(2, 3)
    eager = inner(x)
    fast = untouched(compiled(inner))
    right = fast(x)
    assert torch.allclose(right, eager)
    graphs = dynamo()
    signature = inspect.signature(model.forward)
    with Profile(fast) as prof:
        assert [_looks_of(cls.forward) for cls in kind.__mro__ if "forward" in vars(cls)] == looks
        assert inspect.signature(model.forward) == signature
        for _ in range(2):
            assert torch.equal(fast(x), right)
    assert dynamo() == graphs == 1
    assert torch.equal(fast(x), right)
    assert dynamo() == graphs, "recompiled after the block"
    assert [_looks_of(cls.forward) for cls in kind.__mro__ if "forward" in vars(cls)] == looks
    assert prof.run.tree().calls == 2
    assert torch.equal(inner(x), right) or torch.allclose(inner(x), eager)


@FORWARDS
@COMPILED
@AS_CHILD
def test_forwards_of_any_form_may_be_compiled_inside_the_block(dynamo, kind, compiled, as_child) -> None:
    """One graph, which is still good when the block has ended, and in the next."""
    model = kind()
    inner = Around(model) if as_child else model
    x = torch.rand(2, 3)
    right = inner(x)
    forwards = {key: value for key, value in snapshot(inner).items() if key[0] == "forward of"}
    knows_itself = kind in (KnowsItself, KnowsItselfAnew)
    graphs = 2 if RELEASE < (2, 13) and knows_itself else 1  # there, the guards on such a forward fail once
    with Profile(inner):
        fast = compiled(inner)
        for _ in range(2):
            assert torch.allclose(fast(x), right)
        assert dynamo() in (1, graphs)
    assert torch.allclose(fast(x), right)
    assert dynamo() in (1, graphs), "recompiled after the block"
    with Profile(fast) as prof:
        assert torch.allclose(fast(x), right)
    assert dynamo() <= graphs, "recompiled in the next"
    assert prof.run.tree().calls == 1
    assert {key: value for key, value in snapshot(inner).items() if key[0] == "forward of"} == forwards


@FORWARDS
def test_forwards_of_any_form_are_labelled_if_nothing_is_compiled(untouched, kind) -> None:
    """And do what they do, what they know of themselves among it."""
    model = untouched(Around(kind()))
    prof = same_inside(model, torch.rand(2, 3))
    assert calls_of(prof) == {"Around": 1, "Around.child": 2, "Around.child.lin": 2}


@pytest.mark.parametrize("kinds", [[Block], [WithDefaults, WithKeywords, WithDecorator]])
def test_unprofiled_compiled_models_of_any_form_are_not_recompiled(dynamo, kinds) -> None:
    """Its classes are those of one that is."""
    fast = [_optimized(Around(kind())) for kind in kinds]
    x = torch.rand(2, 3)
    right = [one(x) for one in fast]
    with Profile([Around(kind()) for kind in kinds]) as prof:
        assert all(torch.equal(one(x), result) for one, result in zip(fast, right))
    assert all(torch.equal(one(x), result) for one, result in zip(fast, right))
    assert dynamo() == len(kinds)
    assert set(calls_of(prof).values()) == {0}


def get_compilation_metrics() -> list[Any]:
    """What torch.compile says of each frame that it has looked at."""
    return torch._dynamo.utils.get_compilation_metrics()


def frames_of(prof: Profile) -> set[str]:
    chains = [row.frames for row in prof.run.rows] + [one.frames for row in prof.run.rows for one in row.within]
    return {frame.name for frames in chains for frame in frames}


@COMPILED
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_that_was_compiled_before_compiles_nothing_inside(untouched, dynamo, compiled, backend) -> None:
    """Nor is anything of ours compiled with it: there is no work of torch.compile in its run."""
    model = untouched(compiled(Stack(), backend))
    x = torch.rand(2, 3)
    for _ in range(2):
        model(x).sum().backward()
    torch._dynamo.utils.clear_compilation_metrics()
    with Profile(model) as prof:
        for _ in range(2):
            model(x).sum().backward()
    assert not get_compilation_metrics()
    assert dynamo() == 1
    assert "compiling" not in frames_of(prof)
    torch._dynamo.reset()
    with Profile(model) as first:
        model(x).sum().backward()
    assert "compiling" in frames_of(first), "in the run of a first call there is"


@COMPILED
@pytest.mark.parametrize("warmup", [0, 1])
def test_no_code_of_torchprof_is_compiled_with_a_model(dynamo, compiled, warmup) -> None:
    """Compiled inside the block, where calls are looked at: all that torch.compile has looked at is the user's."""
    torch._dynamo.utils.clear_compilation_metrics()
    model = nn.Sequential(Stack(), Breaks(), WithDefaults())
    with Profile(model, warmup=warmup):
        fast = compiled(model)
        for _ in range(3):
            fast(torch.rand(2, 3)).sum().backward()
    files = {one.co_filename for one in get_compilation_metrics()}
    assert files and not [file for file in files if file and "torchprof" in Path(file).parts[-2:-1]]


class Breaks(Layers):
    def __init__(self) -> None:
        super().__init__(a=nn.Linear(3, 3), b=nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


@COMPILED
@pytest.mark.parametrize("before", [True, False], ids=["compiled before", "compiled inside"])
@pytest.mark.parametrize("deep", [False, True], ids=["child", "grandchild"])
def test_a_graph_break_in_a_child_gives_no_warning_about_calls(dynamo, compiled, before, deep) -> None:
    """The child is called by code that torch.compile made for the model, and is called by the model all the same."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), Breaks()) if deep else Breaks(), nn.ReLU())
    x = torch.rand(2, 3)
    eager = model(x)
    fast = compiled(model)
    if before:
        fast(x)
    with Profile(fast) as prof:
        assert torch.allclose(fast(x), eager)
    graphs = dynamo()
    fast(x)
    assert dynamo() == graphs
    assert "other than" not in warnings_of(prof)
    calls = calls_of(prof)
    names = ["Sequential", "Sequential.1", *(["Sequential.1.1"] if deep else [])]
    assert [calls[name] for name in names] == [1] * len(names)


def original(x: torch.Tensor) -> torch.Tensor:
    """Of a name that our functions use, too."""
    return x + 1


labels = identity = original


class UsesGlobals(Layers):
    def __init__(self) -> None:
        super().__init__(fc=nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return labels(original(identity(F.relu(self.fc(x)))))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_inside_the_block_finds_the_globals_of_the_forward() -> None:
    model, x = nn.Sequential(UsesGlobals(), nn.Conv1d(2, 2, 1)), torch.rand(2, 3)
    right, forwards = model(x), [type(module).forward for module in model.modules()]
    with Profile(model):
        scripted = torch.jit.script(model)
        assert torch.equal(scripted(x), right)
        assert torch.jit.script(nn.Linear(3, 3))(x).shape == x.shape  # of a class of the model's
    assert torch.equal(scripted(x), right)
    assert "profiler" not in str(scripted.inlined_graph)
    assert forwards == [type(module).forward for module in model.modules()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_tracing_inside_the_block(untouched) -> None:
    model = untouched(Net().eval())
    x = torch.rand(2, 3)
    right = model(x)
    with Profile(model):
        traced = torch.jit.trace(model, x)
        assert torch.equal(traced(x), right)
    assert torch.equal(traced(x), right)
    graph = str(traced.inlined_graph)
    assert "aten::linear" in graph and "profiler" not in graph


def test_symbolic_tracing_inside_the_block(untouched) -> None:
    model = untouched(Net().eval())
    without = torch.fx.symbolic_trace(model)
    x = torch.rand(2, 3)
    with Profile(model):
        traced = torch.fx.symbolic_trace(model)
        assert torch.equal(traced(x), model(x))
    assert str(traced.graph) == str(without.graph)
    assert torch.equal(traced(x), model(x))
    child = untouched(Block())
    with Profile(child) as prof:
        traced = torch.fx.symbolic_trace(child)
        child(x)
    assert torch.equal(traced(x), child(x))
    # What was seen with stand-ins for tensors does not spoil what is known of the layer.
    assert prof.run.layers[0].output_shapes == ((2, 3),)


def test_a_graph_module_can_be_profiled_and_recompiled_inside() -> None:
    model = torch.fx.symbolic_trace(Net().eval())
    x = torch.rand(2, 3)
    right = model(x)
    before = snapshot(model)
    with Profile(model) as prof:
        assert torch.equal(model(x), right)
    assert snapshot(model) == before
    assert calls_of(prof)[type(model).__name__] == 1
    with Profile(model):
        model.graph.lint()
        model.recompile()
        assert torch.equal(model(x), right)
    assert "torchprof/record/labels" not in type(model).forward.__code__.co_filename
    assert torch.equal(model(x), right)


@pytest.mark.skipif(torch.__version__.startswith("2.4."), reason="the export of torch 2.4 traces the wrapper too")
def test_exporting_inside_the_block(untouched, dynamo) -> None:
    model = untouched(Block().eval())
    x = torch.rand(2, 3)
    right = model(x)
    with Profile(model):
        exported = torch.export.export(model, (x,))
    assert torch.allclose(exported.module()(x), right)
    assert not [node for node in exported.graph.nodes if "profiler" in str(node.target)]
    assert list(inspect.signature(model.forward).parameters) == ["x"]


@pytest.mark.filterwarnings("ignore")
def test_the_older_export_inside_the_block(dynamo) -> None:
    """It lets torch.compile forget what it was told of our functions, and traces them. The export of torch 2.6 does so,
    too."""
    model, x = UsesGlobals(), torch.rand(2, 3)
    right, forward = model(x), UsesGlobals.forward
    with Profile(model):
        exported, _ = torch._dynamo.export(model)(x)
    assert torch.equal(exported(x), right)
    assert not [node for node in exported.graph.nodes if "profiler" in str(node.target)]
    assert UsesGlobals.forward is forward


def test_a_class_may_be_pickled_by_value_inside_the_block(tmp_path: Path) -> None:
    """As cloudpickle does with classes of ``__main__``, for Ray, Dask, Spark and joblib: the process that reads it need
    not have torchprof, and runs the forward that was there."""
    cloudpickle = pytest.importorskip("cloudpickle")

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.fc(x))

    class Below(Base):
        def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            return super().forward(x) * scale

    class Static(nn.Module):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x + 1

    carries = Base()
    carries.forward = torch.sin
    model, x = nn.Sequential(Base(), Below(), Static(), carries), torch.rand(2, 3)
    right = model(x)
    for called in (False, True):
        with Profile(model):
            if called:
                model(x)
            (tmp_path / f"{called}.pkl").write_bytes(cloudpickle.dumps((model, x, right)))
    code = """
        import pickle, sys
        sys.modules["torchprof"] = None
        import torch
        for name in ("False.pkl", "True.pkl"):
            model, x, right = pickle.load(open(name, "rb"))
            assert torch.equal(model(x), right)
            assert torch.equal(model[1](x, scale=4.0), 2 * model[1](x))
    """
    (tmp_path / "reads.py").write_text(textwrap.dedent(code), encoding="utf-8")
    done = run_warm(["reads.py"], tmp_path)
    assert done.returncode == 0, done.stderr


# Lazy modules


class LazyOwn(nn.modules.lazy.LazyModuleMixin, nn.Module):
    """A lazy module that becomes a class with another forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.UninitializedParameter()

    def initialize_parameters(self, x: torch.Tensor) -> None:
        if self.has_uninitialized_params():
            with torch.no_grad():
                self.weight.materialize((x.shape[-1],))
                self.weight.fill_(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Grown(nn.Module):
    weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + 1


LazyOwn.cls_to_become = Grown  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("warmed", [False, True])
def test_lazy_modules_are_labelled_in_their_first_call_and_later(warmed) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyConv2d(2, 3), nn.Flatten(), nn.LazyLinear(3), nn.LazyBatchNorm1d(), LazyOwn())
        if warmed:
            model(x)
        return model

    x = torch.rand(2, 3, 5, 5)
    plain = made()
    right = [plain(x), plain(x)]
    model = made()
    forwards = {cls: cls.__dict__["forward"] for cls in (nn.Conv2d, nn.Linear, LazyOwn, Grown)}
    with Profile(model) as prof:
        results = [model(x), model(x)]
    assert {cls: cls.__dict__["forward"] for cls in forwards} == forwards
    assert [type(module) for module in model] == [nn.Conv2d, nn.Flatten, nn.Linear, nn.BatchNorm1d, Grown]
    assert all("forward" not in vars(module) for module in model)
    assert set(calls_of(prof).values()) == {2}
    assert [len(lists) for lists in prof.raw()[1].values()] == [2] * 5
    assert prof.run.layers[1].params == 3 * 2 * 9 + 2
    assert torch.equal(results[1], right[1])
    assert torch.equal(results[0], right[0])


# Threads


def test_two_threads_on_one_model_do_not_crash_and_a_warning_reports_calls_on_the_other_thread(untouched) -> None:
    model = untouched(Net().eval())
    x = torch.rand(2, 3)
    right = model(x)
    barrier = threading.Barrier(3)
    wrong: list[Any] = []

    def work() -> None:
        barrier.wait(60)
        for _ in range(20):
            result = model(x)
            if not torch.equal(result, right):
                wrong.append(result)

    threads = [threading.Thread(target=work) for _ in range(2)]
    with Profile(model) as prof:
        for thread in threads:
            thread.start()
        barrier.wait(60)
        for _ in range(20):
            assert torch.equal(model(x), right)
        for thread in threads:
            thread.join(60)
    assert not wrong
    assert set(calls_of(prof).values()) == {20}
    assert "40 calls of Net " in str(prof) and "thread" in str(prof)


def test_a_model_first_called_on_another_thread(untouched) -> None:
    model = untouched(nn.Linear(2, 3))
    with Profile(model) as prof:
        in_thread(model, torch.rand(1, 2))
        model(torch.rand(5, 2))
    assert calls_of(prof) == {"Linear": 1}
    assert "1 call of Linear on other threads" in warnings_of(prof)
    assert prof.run.layers[0].output_shapes == ((5, 3),)


def test_profiling_on_a_thread_that_is_not_the_main_one(untouched) -> None:
    model = untouched(Net())
    profs: list[Profile] = []

    def work() -> None:
        with Profile(model) as prof:
            model(torch.rand(2, 3)).sum().backward()
        profs.append(prof)

    in_thread(work)
    assert calls_of(profs[0]) == NET_ONCE
    assert not [doubt for doubt in sentences(profs[0].run) if "thread" in doubt]
    assert profs[0].run.tree("backward").total.cpu_ns > 0


# Errors inside the block


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, TypeError, StopIteration])
def test_an_error_in_a_forward_is_raised_and_the_model_is_restored(untouched, error) -> None:
    raised = error("the user's own")

    class Failing(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.sin(self.first(x))
            counted.append(1)
            raise raised

    counted: list[int] = []
    model = untouched(Failing(first=nn.Linear(2, 2), runs=0))
    prof = Profile(model)
    with pytest.raises(error) as caught, prof:
        model(torch.rand(1, 2))
    assert caught.value is raised and caught.value.__cause__ is None
    assert counted == [1], "a TypeError made the old torchprof run it twice"
    assert prof.exited
    calls = calls_of(prof)
    assert calls == {"Failing": 1, "Failing.first": 1}
    assert "first" in str(prof) and "aten::sin" in prof.display(show_events=True)


def test_an_error_outside_of_any_forward_restores_the_model_too(untouched) -> None:
    model = untouched(Net())
    with pytest.raises(ZeroDivisionError), Profile(model) as prof:
        model(torch.rand(2, 3))
        raise ZeroDivisionError
    assert calls_of(prof) == NET_ONCE


# Profilers of the user's own


def some_work() -> None:
    torch.sin(torch.rand(3))


PROFILERS = {
    "autograd": torch.autograd.profiler.profile,
    "torch.profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "autograd without kineto": lambda: torch.autograd.profiler.profile(use_kineto=False),
}


@pytest.mark.parametrize("theirs", PROFILERS.values(), ids=PROFILERS)
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_profile_is_refused_while_a_profiler_of_the_user_is_active(untouched, theirs, warmup) -> None:
    model = untouched(Net())
    with theirs() as user:
        some_work()
        ours = Profile(model, warmup=warmup)
        with pytest.raises(TorchprofError, match=r"(?i)profiler") as caught, ours:
            pytest.fail("the block must not run")
        some_work()
    assert "before the `with" in str(caught.value)
    assert {row.key: row.count for row in user.key_averages()}["aten::sin"] == 2
    with ours:  # it was never entered
        for _ in range(1 + warmup):
            model(torch.rand(2, 3))
    assert calls_of(ours) == NET_ONCE


@pytest.mark.parametrize("theirs", [*PROFILERS.values()][:2], ids=[*PROFILERS][:2])
def test_a_profiler_started_inside_the_block_is_refused_and_ours_goes_on(untouched, theirs) -> None:
    model = untouched(Net())
    user = theirs()
    with Profile(model) as prof:
        model(torch.rand(2, 3))
        with pytest.raises(TorchprofError, match=r"inside a torchprof\.Profile block") as caught, user:
            pytest.fail("the block must not run")
        model(torch.rand(2, 3))
    assert "before the `with" in str(caught.value)
    assert set(calls_of(prof).values()) == {2}
    # The one that was refused is still somewhere in the user's hands: it stands in nobody's way.
    assert calls_of(profiled(model, torch.rand(2, 3))) == NET_ONCE
    with theirs() as user:
        some_work()
    assert "aten::sin" in {row.key for row in user.key_averages()}


def test_a_disabled_profiler_of_the_user_is_allowed_inside_the_block() -> None:
    model = Net()
    with Profile(model) as prof, torch.autograd.profiler.profile(enabled=False):
        model(torch.rand(2, 3))
    with torch.autograd.profiler.profile(enabled=False), Profile(model):
        model(torch.rand(2, 3))
    assert calls_of(prof) == NET_ONCE


def test_record_function_of_the_users_inside_the_block_is_kept() -> None:
    model = Net()
    with Profile(model) as prof, torch.autograd.profiler.record_function("mine"):
        model(torch.rand(2, 3))
    assert {row.key: row.count for row in prof.key_averages()}["mine"] == 1
    assert calls_of(prof) == NET_ONCE


def test_a_profile_may_start_while_a_schedule_waits(untouched) -> None:
    model = untouched(Net())
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    seen: list[set[str]] = []
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=cpu, schedule=schedule, on_trace_ready=lambda p: seen.append({row.key for row in p.key_averages()})
    ) as user:
        prof = profiled(model, torch.rand(2, 3))
        for _ in range(2):
            user.step()
            some_work()
        user.step()
    assert calls_of(prof) == NET_ONCE
    assert len(seen) == 1 and "aten::sin" in seen[0]


def test_a_profile_may_start_after_a_profiler_that_has_ended() -> None:
    with torch.autograd.profiler.profile() as first:
        some_work()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=torch.profiler.schedule(wait=0, warmup=5, active=1)
    ) as second:
        some_work()  # ended in its warm-up
    model = Net()
    assert calls_of(profiled(model, torch.rand(2, 3))) == NET_ONCE
    assert first is not second


def test_entering_does_not_search_the_objects_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be millions. Only a ``torch.profiler.profile`` that has not ended makes that necessary."""

    def search(*objects: object) -> list[object]:
        raise AssertionError("all objects of the process were searched")

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        some_work()
    monkeypatch.setattr("gc.get_referrers", search)
    for part in ("stage", "schedules"):  # which are looked for, if another test has imported them
        monkeypatch.delitem(sys.modules, f"torch.distributed.pipelining.{part}", raising=False)
    assert calls_of(profiled(Net(), torch.rand(2, 3))) == NET_ONCE


SCRIPTS = {
    "in warm-up": """
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
        with torch.profiler.profile(activities=cpu, schedule=schedule) as user:
            with refused("warm-up"), Profile(model) as prof:
                model(torch.rand(1, 2))
            user.step()
            torch.sin(torch.rand(3))
        theirs(user)
        ours()
    """,
    "on another thread": """
        started, end = threading.Event(), threading.Event()
        def other():
            with torch.autograd.profiler.profile() as user:
                torch.sin(torch.rand(3))
                started.set()
                end.wait(60)
            theirs(user)
        thread = threading.Thread(target=other)
        thread.start()
        started.wait(60)
        with refused(), Profile(model) as prof:
            model(torch.rand(1, 2))
        end.set()
        thread.join(60)
        ours()
    """,
    "started inside on another thread": """
        def other():
            for start in (torch.autograd.profiler.profile, torch.profiler.profile):
                with refused(), start():
                    model(torch.rand(1, 2))
        def on_another_thread():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(60)
        ours(on_another_thread)
    """,
    "a schedule steps inside": """
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
        user = torch.profiler.profile(activities=cpu, schedule=schedule)
        user.start()
        def step():
            model(torch.rand(1, 2))
            with refused():
                user.step()
        ours(step)
    """,
    "our warmup meets theirs": """
        with refused(), Profile(model, warmup=1) as prof:
            model(torch.rand(1, 2))
            with torch.autograd.profiler.profile() as user:
                torch.sin(torch.rand(3))
                model(torch.rand(1, 2))
        theirs(user)
        ours()
    """,
    "infinite recursion": """
        class Forever(nn.Module):
            def forward(self, x):
                return self(x)
        model = Forever()
        limit = sys.getrecursionlimit()
        try:
            with Profile(model) as prof:
                model(torch.rand(1))
        except RecursionError:
            print("raised", sys.getrecursionlimit() == limit, "Forever" in str(prof))
    """,
}
"""Scripts that a bug could make crash or hang, by name; they begin with this:"""

BEGINNING = """
    import contextlib, sys, threading, torch
    from torch import nn
    from torchprof import Profile, TorchprofError
    model = nn.Linear(2, 2)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    @contextlib.contextmanager
    def refused(by="profiler"):
        try:
            yield
        except TorchprofError as error:
            print("refused", by in str(error), "before the `with" in str(error))
    def theirs(user):
        print("theirs", "aten::sin" in {row.key for row in user.key_averages()})
    def ours(before=lambda: None):
        with Profile(model) as prof:
            before()
            model(torch.rand(1, 2))
        print("ours", prof.run.tree().calls)
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("in warm-up", ["refused True True", "theirs True", "ours 1"]),
        ("on another thread", ["refused True True", "theirs True", "ours 1"]),
        ("started inside on another thread", ["refused True True", "refused True True", "ours 1"]),
        ("a schedule steps inside", ["refused True True", "ours 2"]),
        ("our warmup meets theirs", ["refused True True", "theirs True", "ours 1"]),
        ("infinite recursion", ["raised True True"]),
    ],
)
def test_in_a_process_of_its_own(name, expected, tmp_path: Path) -> None:
    """Profilers that would kill the process are refused."""
    code = textwrap.dedent(BEGINNING) + textwrap.dedent(SCRIPTS[name])
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    done = run_warm(["script.py"], tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr


def test_a_profile_does_not_import_torchs_compiler() -> None:
    """That takes a second, and changes what Ctrl-C does."""
    code = """
        import sys, torch, torchprof
        with torchprof.Profile(torch.nn.Linear(2, 2)) as prof:
            prof(torch.rand(1, 2)).sum().backward()
        str(prof), prof.raw(), prof.key_averages()
        print("torch._dynamo" in sys.modules)
    """
    assert run_fresh(textwrap.dedent(code)) == "False"


# Several Profiles


@pytest.mark.parametrize("same", [True, False])
def test_a_profile_inside_a_profile_is_refused_and_the_outer_one_goes_on(untouched, same) -> None:
    outer_model = untouched(Net())
    inner_model = outer_model if same else untouched(Net())
    with Profile(outer_model) as outer:
        inner = Profile(inner_model)
        with pytest.raises(TorchprofError, match=r"Another torchprof\.Profile"), inner:
            pytest.fail("the block must not run")
        inner_model(torch.rand(2, 3))
        outer_model(torch.rand(2, 3))
    assert calls_of(outer)["Net"] == (2 if same else 1)
    with inner:
        inner_model(torch.rand(2, 3))
    assert calls_of(inner) == NET_ONCE


def test_profiles_that_wait_in_their_warmup_leave_the_model_as_it_was_whatever_the_order() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model, forward, limit = Own(), Own.forward, sys.getrecursionlimit()
    first, second = Profile(model, warmup=3), Profile(model, warmup=5)
    first.__enter__()
    with contextlib.suppress(TorchprofError):  # a clear refusal is right as well
        second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert Own.forward is forward
    assert sys.getrecursionlimit() == limit


def test_consecutive_profiles_are_independent(untouched) -> None:
    model = untouched(Net())
    first = profiled(model, torch.rand(2, 3), paths=["head"])
    before = str(first)
    with Profile(model) as second:
        model(torch.rand(2, 3))
        model(torch.rand(2, 3))
    assert str(first) == before
    assert set(calls_of(second).values()) == {2}


# Modules that come and go


def _add(model: Net) -> None:
    model.body.append(nn.Dropout())


def _replace(model: Net) -> None:
    model.head = nn.Linear(4, 7)


def _remove(model: Net) -> None:
    model.body = model.body[:2]


@pytest.mark.parametrize(
    ("change", "told", "layer"),
    [(_add, "Added", "Net.body.3"), (_replace, "replaced", "Net.head"), (_remove, "Removed", "Net.body.2")],
)
def test_a_module_that_is_changed_inside_the_block_gives_a_warning(change, told, layer) -> None:
    """What is new has no calls; what was there before keeps those that it had."""
    model = Net()
    with Profile(model) as prof:
        model(torch.rand(2, 3))
        change(model)
        model(torch.rand(2, 3))
    (warning,) = (sentence for sentence in sentences(prof.run) if told.lower() in sentence.lower())
    assert layer in warning
    gone = {_add: (), _replace: ("Net.head",), _remove: ("Net.body", "Net.body.2")}[change]
    assert calls_of(prof) == {name: 1 if name in gone else 2 for name in NET_ONCE}


def test_a_new_module_does_not_get_the_label_of_a_freed_one() -> None:
    """Python gives the identity of what was freed to what is made next: two hundred tries find it."""
    model = nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU())
    with Profile(model) as prof:
        model(torch.rand(2))
        model[0] = nn.Identity()
        for _ in range(200):
            nn.ReLU()(torch.rand(2))
            nn.Sequential(nn.ReLU())(torch.rand(2))
    assert calls_of(prof) == {"Sequential": 1, "Sequential.0": 1, "Sequential.0.0": 1, "Sequential.1": 1}


def test_a_class_swapped_inside_the_block() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = nn.Linear(2, 2)
    x = torch.rand(1, 2)
    right = model(x) * 2
    with Profile(model):
        model.__class__ = Doubling
        assert torch.equal(model(x), right)
    assert type(model) is Doubling
    assert torch.equal(model(x), right)


# Deep, wide and circular models


class Onion(Layers):
    def __init__(self, inner: nn.Module | None, direct: bool) -> None:
        super().__init__(inner=inner, direct=direct)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner is None:
            return x
        return self.inner.forward(x) if self.direct else self.inner(x)


def onion(layers: int, direct: bool) -> Onion:
    model = Onion(None, direct)
    for _ in range(layers - 1):
        model = Onion(model, direct)
    return model


def fits(model: nn.Module) -> bool:
    try:
        model(torch.rand(1))
    except RecursionError:
        return False
    return True


@pytest.mark.parametrize("direct", [False, True])
def test_a_recursion_that_just_fits_into_the_limit_fits_when_profiled(direct) -> None:
    limit = sys.getrecursionlimit()
    depth, step = 0, 512
    while step:
        if depth + step < limit and fits(onion(depth + step, direct)):
            depth += step
        step //= 2
    assert depth > 100 and not fits(onion(depth + 1, direct))
    model = onion(depth, direct)
    with Profile(model) as prof:
        assert fits(model)
    assert sys.getrecursionlimit() == limit
    assert set(calls_of(prof).values()) == {1}
    assert len(calls_of(prof)) == depth
    assert prof.display().count("inner") == depth - 1
    assert "layers are not shown" in str(prof)


def test_a_recursion_limit_that_the_user_sets_inside_the_block_is_kept() -> None:
    limit = sys.getrecursionlimit()
    with Profile(Net()):
        sys.setrecursionlimit(limit + 1234)
    assert sys.getrecursionlimit() == limit + 1234


def test_ten_thousand_layers() -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(9_999)])
    forward = nn.Identity.forward
    x = torch.rand(1)
    prof = profiled(model, x)
    assert nn.Identity.forward is forward
    calls = calls_of(prof)
    assert len(calls) == 10_000 and set(calls.values()) == {1}
    lines = prof.display().split("\n\n")[0].splitlines()
    # Of so many objects Python may collect garbage meanwhile, outside of layers.
    assert len([line for line in lines if not line.startswith(("(outside)", "└── (garbage"))]) == 10_002


def test_a_module_may_have_its_parent_or_itself_as_a_child() -> None:
    class Knot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Sequential(nn.Linear(2, 2))
            self.child.parent = self
            self.me = self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.child[0](x)

    model = Knot()
    prof = profiled(model, torch.rand(1, 2))
    assert calls_of(prof) == {"Knot": 1, "Knot.child": 0, "Knot.child.0": 1}
    assert "child" in str(prof)


def test_one_module_at_many_places_is_labelled_once(untouched) -> None:
    shared = nn.ReLU()
    model = untouched(nn.Sequential(shared, nn.Sequential(shared, shared), shared))
    prof = profiled(model, torch.rand(2))
    assert sum(count for name, count in calls_of(prof).items() if name not in ("Sequential", "Sequential.1")) == 4


# Modules with tricks


def test_modules_that_guard_their_attributes() -> None:
    class Frozen(nn.Module):
        __slots__ = ("slot",)

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)
            object.__setattr__(self, "slot", 3)
            self.__dict__["sealed"] = True

        def __setattr__(self, name: str, value: Any) -> None:
            if self.__dict__.get("sealed"):
                raise AttributeError(f"sealed: {name}")
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            raise AttributeError(f"sealed: {name}")

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or name in ("_modules", "_parameters", "_buffers"):
                raise AttributeError(name)
            return super().__getattr__("lin") if name == "lin" else f"made up: {name}"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x) * self.slot

    model = Frozen()
    before = snapshot(model)
    prof = same_inside(model, torch.rand(1, 2))
    assert snapshot(model) == before
    assert calls_of(prof) == {"Frozen": 1, "Frozen.lin": 1}


def test_modules_with_a_false_truth_value_are_labelled(untouched) -> None:
    class Empty(nn.Identity):
        def __len__(self) -> int:
            return 0

    model = untouched(nn.Sequential(Empty(), nn.Sequential(), nn.ModuleList(), nn.Identity())[0:2])
    assert set(calls_of(profiled(model, torch.rand(1))).values()) == {1}


def test_a_module_that_overrides_call(untouched) -> None:
    class Twice(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(super().__call__(x))

    assert calls_of(same_inside(untouched(Twice(3, 3)), torch.rand(2, 3))) == {"Twice": 2}


def test_parametrized_and_normed_modules(untouched) -> None:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    ).eval()
    untouched(model)
    prof = same_inside(model, torch.rand(2, 3))
    assert [calls_of(prof)[f"Sequential.{number}"] for number in range(3)] == [1, 1, 1]


def test_a_parametrization_put_on_and_taken_off_inside() -> None:
    class Twofold(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    x = torch.ones(1, 2)
    with Profile(model) as prof:
        torch.nn.utils.parametrize.register_parametrization(model, "weight", Twofold())
        assert torch.equal(model(x), torch.full((1, 2), 4.0))
        torch.nn.utils.parametrize.remove_parametrizations(model, "weight")
        assert torch.equal(model(x), torch.full((1, 2), 4.0))
    assert type(model) is nn.Linear
    assert calls_of(prof)["Linear"] == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_old_weight_norm_which_is_a_hook() -> None:
    model = torch.nn.utils.weight_norm(nn.Linear(3, 3))
    before = set(vars(model))
    prof = same_inside(model, torch.rand(2, 3))
    assert set(vars(model)) == before
    assert calls_of(prof) == {"Linear": 1}


def test_functional_call_and_transforms_inside_the_block(untouched) -> None:
    model = untouched(nn.Sequential(nn.Linear(2, 1, bias=False)))
    x = torch.ones(3, 2)
    with Profile(model) as prof:
        doubled = torch.func.functional_call(model, {"0.weight": torch.full((1, 2), 2.0)}, (x,))
        assert torch.equal(doubled, torch.full((3, 1), 4.0))
        mapped = torch.func.vmap(model)(x)
        grads = torch.func.grad(lambda w: torch.func.functional_call(model, {"0.weight": w}, (x,)).sum())(
            torch.zeros(1, 2)
        )
    assert torch.equal(mapped, model(x))
    assert torch.equal(grads, torch.full((1, 2), 3.0))
    assert calls_of(prof) == {"Sequential": 3, "Sequential.0": 3}


@pytest.mark.filterwarnings("error:Accessing the data pointer of FakeTensor")
def test_a_fake_tensor_has_no_block_and_torch_does_not_warn() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert block_of(torch.empty(3)) is None
    assert block_of(torch.empty(3, device="meta")) is None
    tensor = torch.empty(3)
    assert block_of(tensor) == ("cpu", tensor.data_ptr())


def test_fake_tensors_and_the_meta_device(untouched) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = untouched(nn.Linear(2, 3, device="meta"))
    with Profile(model) as prof:
        assert model(torch.rand(4, 2, device="meta")).shape == (4, 3)
    assert calls_of(prof) == {"Linear": 1}
    with FakeTensorMode():
        fake = nn.Linear(2, 3)
        with Profile(fake) as prof:
            assert fake(torch.rand(4, 2)).shape == (4, 3)
    assert prof.run.layers[0].output_shapes == ((4, 3),)


def test_a_pytree_of_arguments_is_passed_on_as_it_is(untouched) -> None:
    class Echo(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    model = untouched(Echo())
    tree = ({"a": [torch.rand(1), 2]}, "text", None)
    with Profile(model):
        args, kwargs = model(*tree, key=tree)
    leaves = _pytree.tree_leaves((args, kwargs))
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in _pytree.tree_leaves((tree, tree))]


# warmup


def test_the_first_calls_are_not_recorded(untouched) -> None:
    model = untouched(Net())
    with Profile(model, warmup=2) as prof:
        for batch in range(3, 8):
            model(torch.rand(batch, 3))
    assert set(calls_of(prof).values()) == {3}
    assert {len(lists) for lists in prof.raw()[1].values()} == {3}
    assert prof.run.layers[0].input_shapes == ((5, 3),)  # of the first call that was recorded
    rand = {row.key: row.count for row in prof.key_averages()}["aten::rand"]
    assert rand == 2  # those after the session had started


def test_a_warmup_counts_calls_of_the_whole_model_also_where_a_part_is_selected(untouched) -> None:
    model = untouched(Net())
    with Profile(model, paths=["body.0"], warmup=1) as prof:
        model.head(torch.rand(2, 4))  # no call of the model
        model(torch.rand(2, 3))
        model(torch.rand(2, 3))
    assert calls_of(prof)["Net.body.0"] == 1


def test_the_backward_of_a_warmup_step_is_not_recorded() -> None:
    model = Net()
    with Profile(model, warmup=1) as prof:
        model(torch.rand(2, 3)).sum().backward()
        model(torch.rand(2, 3))
    assert prof.run.phases() == ("forward",)


@pytest.mark.parametrize("calls", [0, 2, 3])
def test_fewer_calls_than_the_warmup_give_a_warning(untouched, calls) -> None:
    model = untouched(Net())
    with Profile(model, warmup=3) as prof:
        for _ in range(calls):
            model(torch.rand(2, 3))
    assert prof.exited
    assert "warmup=3" in str(prof) and "Nothing was recorded" in str(prof)
    assert set(calls_of(prof).values()) == {0}
    traces, event_lists = prof.raw()
    assert len(traces) == 6 and sum(map(len, event_lists.values())) == 0
    assert len(prof.key_averages()) == 0
    assert calls_of(profiled(model, torch.rand(2, 3))) == NET_ONCE


def test_a_call_nested_in_a_warmup_call_is_not_recorded(untouched) -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            return self(torch.cos(x), times - 1) if times else x

    model = untouched(Recursive())
    with Profile(model, warmup=1) as prof:
        model(torch.rand(2), 2)
        model(torch.rand(2), 2)
    assert calls_of(prof) == {"Recursive": 3}


def test_calls_on_another_thread_do_not_start_the_session_there(untouched) -> None:
    """The profiler records the thread that starts it: that must be the one that entered the block."""
    model = untouched(Net())

    def work() -> None:
        for _ in range(3):
            model(torch.rand(2, 3))

    with Profile(model, warmup=1) as prof:
        in_thread(work)
        model(torch.rand(2, 3))  # the warm-up
        model(torch.rand(2, 3))
    calls = calls_of(prof)
    assert set(calls.values()) in ({1}, {2}), calls  # whether or not the other thread's calls count as a warm-up
    assert "Never called" not in warnings_of(prof)


def test_an_error_in_the_warmup_restores_the_model(untouched) -> None:
    model = untouched(Net())
    with pytest.raises(RuntimeError), Profile(model, warmup=1) as prof:
        model(torch.rand(2, 99))
    assert "Nothing was recorded" in str(prof)


# Reading a result never opens a session


@pytest.mark.parametrize("state", ["active", "warm"])
def test_a_result_can_be_printed_while_another_profiler_runs(state) -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(300)))
    prof = profiled(model, torch.rand(1))
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1) if state == "warm" else None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as theirs:
        assert prof.display().startswith("Module")
        theirs.step()
        torch.rand(3) + 1
    assert "aten::add" in {event.name for event in theirs.events()}


def test_a_profile_that_is_switched_off_inside_its_block_still_ends() -> None:
    model = nn.Linear(2, 2)
    forward = nn.Linear.forward
    with Profile(model) as prof:
        prof.enabled = False
    assert nn.Linear.forward is forward
    assert profiled(model, torch.rand(1, 2)).run.tree("forward").calls == 1


def test_ctrl_c_while_the_session_starts_leaves_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's session has begun by then, and a process that ends with one dies."""
    from torch.autograd import profiler as torch_profiler

    model = nn.Linear(2, 2)
    enable = torch_profiler._enable_profiler

    def interrupted(*args: Any) -> None:
        enable(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch_profiler, "_enable_profiler", interrupted)
    with pytest.raises(KeyboardInterrupt), Profile(model):
        pass
    monkeypatch.undo()
    assert not torch.autograd._profiler_enabled()
    assert profiled(model, torch.rand(1, 2)).run.tree("forward").calls == 1


# A forward with a closure


class Looking(Layers):
    def __init__(self) -> None:
        super().__init__(fc=nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = []
        frame = sys._getframe()
        while frame is not None:
            self.seen.append((frame.f_code.co_name, dict(frame.f_locals)))
            frame = frame.f_back
        return self.fc(x)


class LookingBelow(Looking):
    """``super()`` makes a cell of the class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_the_frames_around_a_forward_can_be_inspected() -> None:
    """As debuggers do, and what prints local variables under a traceback: also that of ours with cells of another."""
    model = LookingBelow()
    with Profile(model):
        model(torch.rand(2, 3))
    named = [names for name, names in model.seen if name == "forward"]
    assert len(named) == 4  # two of the model's, and ours before the outer one: the wrapper, and what calls that
    assert sum(model in (names.get("self"), names.get("self_")) for names in named) == 4


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("kind", [WithDefaults, WithDecorator, Block])
def test_a_profile_and_its_model_are_freed_without_references(kind, warmup) -> None:
    model = kind()
    with Profile(model, warmup=warmup) as prof:
        model(torch.rand(2, 3))
        model(torch.rand(2, 3))
    alive = [weakref.ref(prof), weakref.ref(prof._labels), weakref.ref(model)]
    del prof, model
    gc.collect()
    assert [one() for one in alive] == [None, None, None]
