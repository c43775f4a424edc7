"""The layers of compiled kernels by their parameters, against two independent truths, kernel by kernel: the memory and
the values of the tensors in each call of a library, and the modules that torch.compile notes while it compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from build.architectures import ARCHITECTURES
from build.examples import SHARE
from build.inductor import kernels_of_zeros
from torch import Tensor, nn

from examples.models import MLP, Bert, LeNet5, TinyTransformer
from torchprof.attribute.compiled_graphs import CompiledKernel, Span
from torchprof.record.compiled.graph_flow import kernels_by_parameters, saves_for
from torchprof.record.compiled.inductor import Provenance
from torchprof.record.compiled.kept_graph import KeptGraph

pytestmark = pytest.mark.compiler
output_code: Any = pytest.importorskip("torch._inductor.output_code")
if "inductor_post_grad_graph_str" not in getattr(output_code.CompiledFxGraph, "__annotations__", {}):
    pytest.skip("graphs of this torch have no text", allow_module_level=True)
inductor_config: Any = pytest.importorskip("torch._inductor.config")
extern_kernels: Any = pytest.importorskip("torch._inductor.select_algorithm").extern_kernels

LIBRARY = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mv")
OWN: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "MLP": (lambda: MLP(16, 64), lambda: (torch.rand(4, 16),)),
    "LeNet-5": (LeNet5, lambda: (torch.rand(2, 1, 32, 32),)),
    "Bert": (lambda: Bert(50, 16, 2, 2, 32).eval(), lambda: (torch.randint(50, (2, 8)),)),
    "TinyTransformer": (TinyTransformer, lambda: (torch.randint(1000, (2, 16)),)),
}
MODELS = {**OWN, **{name: (one.make, one.inputs) for name, one in ARCHITECTURES.items()}}
CHOSEN = [*MODELS] if SHARE == 1 else ["Bert"]
CASTS = {"float32": False, "autocast": True} if SHARE == 1 else {"autocast": True}


class Called(NamedTuple):
    """A graph that was called: its key, and the parameters among its inputs by their root."""

    key: str
    parameters: dict[str, str]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def train(model: Any, inputs: Sequence[Any]) -> None:
    output = model(*inputs)
    while isinstance(output, tuple):
        output = output[0]
    output.float().pow(2).mean().backward()


@contextmanager
def noted(model: nn.Module, known: dict[str, KeptGraph], calls: list[Called]) -> Iterator[None]:
    """Note each graph that is called, and the parameters that it takes."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    original = output_code.CompiledFxGraph.__call__

    def call(graph: Any, inputs: Sequence[Any]) -> Any:
        key = graph._fx_graph_cache_key
        known.setdefault(key, KeptGraph.of(graph, inputs))
        roots = {f"input {at}": name_of[id(one)] for at, one in enumerate(inputs) if id(one) in name_of}
        calls.append(Called(key, roots))
        return original(graph, inputs)

    output_code.CompiledFxGraph.__call__ = call
    try:
        yield
    finally:
        output_code.CompiledFxGraph.__call__ = original


def parameters_in(calls: Sequence[Called], known: dict[str, KeptGraph]) -> dict[str, dict[str, str]]:
    """By key, the parameters of the roots of a graph: for a backward, those of its only forward."""
    texts = {key: one.text for key, one in known.items()}
    found = {}
    for key, text in texts.items():
        is_backward = any(name.startswith("tangents_") for name in text.inputs)
        fitting = [one for one in texts if one != key and saves_for(texts[one], text)] if is_backward else [key]
        names = {tuple(one.parameters.items()) for one in calls if one.key in fitting}
        if len(names) == 1:
            found[key] = dict(names.pop())
    return found


# By memory and by value


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_call_is_of_the_parameter_that_it_reads_or_whose_gradient_it_makes(
    name: str, cast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, make_inputs = MODELS[name]
    model, inputs = make(), make_inputs()
    compiled = torch.compile(model)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            output = compiled(*inputs)
            while isinstance(output, tuple):
                output = output[0]
        output.float().pow(2).mean().backward()

    step()
    model.zero_grad(set_to_none=True)
    memory = {one.untyped_storage().data_ptr(): name for name, one in model.named_parameters()}
    ran: list[tuple[str, str, list[Tensor], Tensor]] = []  # graph, operator, arguments, result
    known, calls = dict[str, KeptGraph](), list[Called]()
    for operator in LIBRARY:
        if (original := getattr(extern_kernels, operator, None)) is not None:
            monkeypatch.setattr(extern_kernels, operator, _noting(operator, original, {*memory}, calls, ran))
    with noted(model, known, calls):
        step()
    monkeypatch.undo()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    values = {name: one.detach().to(torch.bfloat16) for name, one in model.named_parameters() if cast and one.dim() > 1}
    kernels, roots = kernels_by_parameters(known, "unknown")[0], parameters_in(calls, known)
    right = 0
    for key, of_graph in roots.items():
        of_library = [one for one in kernels.get(key, ()) if isinstance(one, CompiledKernel) and one.name in LIBRARY]
        in_graph = [one for one in ran if one[0] == key]
        assert [one.name for one in of_library] == [one[1] for one in in_graph]
        for kernel, (_, _, tensors, result) in zip(of_library, in_graph):
            reads = {memory[at] for one in tensors if (at := one.untyped_storage().data_ptr()) in memory}
            reads |= {name for one in tensors for name in _equal(one, values)}
            said = {_module(of_graph[owner[-1].root]) for owner in kernel.owners if owner}
            true = {_module(one) for one in reads | _equal(result, gradients)}
            assert not said or not true or said <= true or true <= said, (kernel, said, true)
            right += bool(said and true and said <= true)
    assert right > 0 or not ran


def _noting(
    operator: str,
    original: Callable[..., Any],
    memory: set[int],
    calls: list[Called],
    ran: list[tuple[str, str, list[Tensor], Tensor]],
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one is not kwargs.get("out")]
        # Their memory is used again for other values, but for that of parameters.
        arguments = [one if one.untyped_storage().data_ptr() in memory else one.detach().clone() for one in given]
        found = original(*args, **kwargs)
        result = kwargs.get("out", found)
        ran.append((calls[-1].key, operator, arguments, result.detach().clone()))
        return found

    return call


def _equal(tensor: Tensor, values: dict[str, Tensor]) -> set[str]:
    """The names of the values that a tensor has, in any layout and type."""
    both = [one.reshape(-1).float() for one in (tensor, tensor.mT if tensor.dim() > 1 else tensor)]
    flat = {name: value.reshape(-1).float() for name, value in values.items() if value.numel() == tensor.numel()}
    return {name for name, value in flat.items() if any(torch.equal(one, value) for one in both)}


# By the modules that torch.compile notes


@pytest.mark.parametrize("name", CHOSEN)
def test_what_lies_between_layers_ran_in_the_module_around_them(name: str) -> None:
    make, make_inputs = MODELS[name]
    model, inputs = make(), make_inputs()
    known, calls = dict[str, KeptGraph](), list[Called]()
    provenance = Provenance()
    provenance.on()
    try:
        with inductor_config.patch({"cpp.enable_kernel_profile": True}), kernels_of_zeros(), noted(model, known, calls):
            train(torch.compile(model), inputs)
    finally:
        provenance.off()
    roots = parameters_in(calls, known)
    checked = 0
    for key, ours in kernels_by_parameters(known, "unknown")[0].items():
        theirs = Provenance.known[key]
        if key not in roots or isinstance(theirs, str) or isinstance(ours, str):
            continue
        assert [one.name for one in ours] == [one.name for one in theirs]
        for kernel, truth in zip(ours, theirs):
            owners = [owner[-1].path if owner else () for owner in truth.owners if owner is not None]
            if kernel.between and owners:
                block = _shared([_block(span, roots[key]) for span in kernel.between])
                assert _shared(owners)[: len(block)] == block, (kernel.name, block, owners)
                checked += 1
    assert checked or name not in OWN


def _module(parameter: str) -> tuple[str, ...]:
    return tuple(parameter.split(".")[:-1])


def _block(span: Span, names: dict[str, str]) -> tuple[str, ...]:
    """The module that is around a span: by hand, as ``CompiledGraphs._block`` says it in words."""
    before, after = ([_module(names[root]) for root in side if root in names] for side in span[:2])
    if span.is_own and before:
        return _shared(before)
    pairs = product(before or [()], after or [()])
    return max((one[:-1] if one == other else _shared([one, other]) for one, other in pairs), key=len)


def _shared(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    steps = min(map(len, paths))
    while any(path[:steps] != paths[0][:steps] for path in paths):
        steps -= 1
    return paths[0][:steps]
