"""How remedies of findings are carried out on a copy of a model."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from time import perf_counter
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils import checkpoint
from torch.utils.data import BatchSampler, DataLoader, default_collate

from torchprof.profile.benchmark import tensors_in
from torchprof.profile.signals import DelayedSignals
from torchprof.record.modules import instances_of
from torchprof.record.peak import who_sees_calls
from torchprof.record.torch_internals import optional, replaced
from torchprof.run.formats import format_memory
from torchprof.run.processes import usable_cpus

OF_OPTIMIZERS = "optimizer_step_per_tensor"
"""The rule whose remedy changes the step of an optimizer, and nothing before it."""
Optimizer: TypeAlias = torch.optim.Optimizer | None
ToTry: TypeAlias = tuple[str, tuple[str, ...], str]
"""A finding: its rule, the names of its layers, and its remedy in words."""
_MOST_BYTES = 2**31  # of a model that is copied, with its gradients and the state of its optimizer


_GLOBAL_HOOKS = {
    "torch.nn.modules.module": ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}


class NotTried(Exception):
    """Why a remedy cannot be tried."""


class Remedy(NamedTuple):
    """How a remedy is carried out.

    - ``how``: the lines for the user; "{optimizer}" stands for the class of the optimizer.
    - ``change``: changes a copy of the model, given the layers of the finding in it, and a copy of its optimizer;
      returns whether there was anything to change.
    - ``around``: is entered around each call, with ``spans_backward`` around the whole step.
    - ``cast``: the type of floating-point inputs. ``frees_gradients``: before a step gradients are freed, where the
      program fills them with zeros. ``loading``: makes the batches of the loop as they are, and with the remedy.
    """

    how: str
    change: Callable[[nn.Module, Sequence[nn.Module], Optimizer], bool] = lambda model, layers, optimizer: True
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    cast: torch.dtype | None = None
    spans_backward: bool = False
    frees_gradients: bool = False
    loading: Callable[[], Loading] | None = None


# Copies


def stop(optimizers: Iterable[torch.optim.Optimizer | None]) -> None:
    """From now on, steps change no parameter."""
    for optimizer in optimizers:
        for group in optimizer.param_groups if optimizer is not None else ():
            group["lr"] = 0.0


def copy_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """A copy of a model, and of the optimizer that updates it, without the hooks of the user."""
    tensors = {*model.parameters(), *model.buffers()}
    if optimizer is not None:
        tensors |= {parameter for group in optimizer.param_groups for parameter in group["params"]}
        tensors |= {value for state in optimizer.state.values() for value in tensors_in([*state.values()])}
    size = sum(tensor.nbytes * (2 if tensor.requires_grad else 1) for tensor in tensors)  # with gradients
    if size > _MOST_BYTES:
        raise NotTried(f"a copy of the model takes {format_memory(size)}")
    if seen := who_sees_calls():
        raise NotTried(seen)
    for module in model.modules():  # a closure in it would call the user's own model
        if "forward" in vars(module) or getattr(module, "_compiled_call_impl", None) is not None:
            raise NotTried(f"a forward of {type(module).__name__} is replaced")
    for file, names in _GLOBAL_HOOKS.items():
        hooks = [hook for name in names for hook in getattr(import_module(file), name, {}).values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("torch") for hook in hooks):
            raise NotTried("a hook on all modules, or on all optimizers, would run for copies")
    copies: tuple[nn.Module, torch.optim.Optimizer | None] = copy.deepcopy((model, optimizer))
    for module in copies[0].modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for key, hook in [*hooks.items()]:
                    if not str(getattr(hook, "__module__", "")).startswith("torch."):
                        del hooks[key]
    return copies


_DRAWS_NOTHING = re.compile(r"QueueFeederThread|_pin_memory_loop|^torchprof")  # threads, by their names


@contextmanager
def as_before(cuda_devices: Sequence[int]) -> Iterator[None]:
    """Afterwards the random states are as before: those of torch, and those of all generators in the process."""
    states = [*_random_states()]
    try:
        with torch.random.fork_rng(devices=cuda_devices):
            yield
    finally:
        with DelayedSignals():
            for restore, state in states:
                restore(state)


def _random_states() -> Iterator[tuple[Callable[[Any], object], Any]]:
    """The state of each generator of Python, NumPy and torch that anything refers to, with what sets it. Those of torch
    are not known to the collector, but to what refers to them; after ``gc.freeze`` only modules are. While threads of
    the user run, only the global ones."""
    numpy: Any = sys.modules.get("numpy.random")
    yield random.setstate, random.getstate()
    if numpy is not None:
        yield numpy.set_state, numpy.get_state()
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    if not all(type(thread).__module__.startswith("tqdm") or _DRAWS_NOTHING.search(thread.name) for thread in others):
        return  # what another thread draws meanwhile is not to be drawn again
    modules = [vars(module) for module in [*sys.modules.values()] if isinstance(module, ModuleType)]
    generators = torch.Generator, random.Random, *((numpy.RandomState, numpy.Generator) if numpy is not None else ())
    referents = gc.get_referents(*gc.get_objects(), *modules)
    kinds = {kind for kind in {*map(type, referents)} - {random.SystemRandom} if issubclass(kind, generators)}
    for value in {id(value): value for value in referents if type(value) in kinds}.values():
        if isinstance(value, random.Random):
            yield value.setstate, value.getstate()
        elif hasattr(value, "bit_generator"):
            yield partial(setattr, value.bit_generator, "state"), value.bit_generator.state
        else:
            yield value.set_state, value.get_state()


# Remedies


def _in_float32(model: nn.Module, layers: Sequence[nn.Module], optimizer: Optimizer) -> bool:
    model.float()
    for state in optimizer.state.values() if optimizer is not None else ():
        state |= {name: value.float() for name, value in state.items() if isinstance(value, torch.Tensor)}
    return True


def _fused(model: nn.Module, layers: Sequence[nn.Module], optimizer: Optimizer) -> bool:
    if optimizer is None:
        raise NotTried("the model has no optimizer of torch's, or several")
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=None)
    for parameter, state in optimizer.state.items():  # its kernel reads the step from the device
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device)
    return True


def _compiled(model: nn.Module, layers: Sequence[nn.Module], optimizer: Optimizer) -> bool:
    for layer in layers:
        layer.compile()
    return bool(layers)


def _without_dropout(model: nn.Module, layers: Sequence[nn.Module], optimizer: Optimizer) -> bool:
    has_changed = False
    for module in {module for layer in layers for module in layer.modules()}:
        name = "p" if "Dropout" in type(module).__name__ else "dropout"
        if type(getattr(module, name, None)) is float and getattr(module, name) > 0:
            setattr(module, name, 0.0)
            has_changed = True
    return has_changed


def _frozen(model: nn.Module, layers: Sequence[nn.Module], optimizer: Optimizer) -> bool:
    parameters = [parameter for layer in layers for parameter in layer.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    return bool(parameters)


def _without_attention_weights(model: nn.Module, layers: Sequence[nn.Module], optimizer: Optimizer) -> bool:
    attention = [layer for layer in layers if isinstance(layer, nn.MultiheadAttention)]
    for layer in attention:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "need_weights": False}), with_kwargs=True
        )
    return bool(attention)


def _in_channels_last(model: nn.Module, layers: Sequence[nn.Module], optimizer: Optimizer) -> bool:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() == 4:
                state[name] = value.contiguous(memory_format=torch.channels_last)
    return any(parameter.dim() == 4 for parameter in model.parameters())


@contextmanager
def _with_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


_NON_REENTRANT = "_checkpoint_without_reentrant_generator"


class _Called:
    """In place of the autograd function of a checkpoint: calls what it would have checkpointed."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    def around_call(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    with ExitStack() as stack:
        stack.callback(replaced(checkpoint, "CheckpointFunction", _Called))
        if optional(f"torch.utils.checkpoint.{_NON_REENTRANT}") is not None:
            stack.callback(replaced(checkpoint, _NON_REENTRANT, around_call))
        yield


@contextmanager
def _with_more_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(usable_cpus() // 2, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _without_denormals() -> Iterator[None]:
    was_on = not torch.tensor(1e-40, dtype=torch.float32, device="cpu").mul(1).item()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_on)


_AUTOCAST = 'with torch.autocast("cpu", dtype=torch.bfloat16):'
_HOW_TF32 = 'torch.set_float32_matmul_precision("high")\ntorch.backends.cudnn.allow_tf32 = True'
REMEDIES = {
    "bfloat16_not_used": Remedy(_AUTOCAST, around=partial(torch.autocast, "cpu", dtype=torch.bfloat16)),
    "half_precision_on_the_cpu": Remedy("model.float(), x.float()", _in_float32, cast=torch.float32),
    "double_precision": Remedy("model.float(), x.float()", _in_float32, cast=torch.float32),
    "costly_dropout": Remedy("p=0 in each dropout", _without_dropout),
    "few_threads": Remedy("torch.set_num_threads(…)", around=_with_more_threads, spans_backward=True),
    "slower_than_usual": Remedy("torch.set_flush_denormal(True)", around=_without_denormals, spans_backward=True),
    "many_small_operators": Remedy("layer.compile()", _compiled),
    "recomputed_layers": Remedy("layer(x), not checkpoint(layer, x)", around=_without_checkpoints, spans_backward=True),
    "gradients_zeroed": Remedy("optimizer.zero_grad(set_to_none=True)", frees_gradients=True),
    "gradients_never_used": Remedy("with torch.no_grad():", around=torch.no_grad),
    "frozen_layers_with_gradients": Remedy("layer.requires_grad_(False)", _frozen),
    "attention_not_fused": Remedy("attention(…, need_weights=False)", _without_attention_weights),
    "channels_last_missed": Remedy("model.to(memory_format=torch.channels_last)", _in_channels_last),
    "tf32_not_used": Remedy(_HOW_TF32, around=_with_tf32, spans_backward=True),
    "autocast_not_used": Remedy(
        'with torch.autocast("cuda", dtype=torch.bfloat16):',
        lambda model, layers, optimizer: torch.cuda.is_available(),
        partial(torch.autocast, "cuda", dtype=torch.bfloat16),
    ),
    OF_OPTIMIZERS: Remedy("torch.optim.{optimizer}(…, fused=True)", _fused),
}
"""By the rule of a finding, what is tried."""


# Loading batches

_OF_LOADERS = {"waiting_for_data", "python_in_the_loop", "passes_that_take_longer"}
_IN_REMEDY = re.compile(r"`(DataLoader\([^`]+\))`")
_MOST_OBJECTS = 2_000_000  # of a data set that is copied
_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType)  # a deep copy has the same ones
_FEWEST_BATCHES = 8  # in turn
_MOST_SECONDS = 10  # for a batch: a library that does not survive a fork may wait forever in a worker


class Batches:
    """The batches of a loader, pass after pass. ``send``: its workers are stopped while others are timed."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._iterator = iter(loader)

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._loader)
            return next(self._iterator)

    def send(self, name: str) -> None:
        """Send a signal to the workers: ``"SIGCONT"`` or ``"SIGSTOP"``."""
        for worker in getattr(self._iterator, "_workers", ()):
            with suppress(ProcessLookupError):  # its pass has ended
                os.kill(worker.pid, getattr(signal, name))

    def close(self) -> None:
        """End the workers, whatever happens meanwhile: a process that is stopped would not end with the script."""
        try:
            self.send("SIGCONT")
            getattr(self._iterator, "_shutdown_workers", int)()
        finally:
            for worker in getattr(self._iterator, "_workers", ()):
                worker.kill()


class Loading(NamedTuple):
    """The batches of a loop as they are, and with a remedy; and how many of them are loaded in turn."""

    before: Batches
    after: Batches
    batches: int


def in_loop(step: Callable[[], Any], batches: Batches, count: int, loads: int, limit: float) -> Callable[[], Any]:
    """A function that makes steps, each with batches, and returns what the last one does. Raises NotTried if a step
    would begin after ``limit``, in seconds of ``perf_counter``."""

    def steps() -> Any:
        batches.send("SIGCONT")
        try:
            for _ in range(count):
                if perf_counter() > limit:
                    raise NotTried("the time for trials is spent")
                for _ in range(loads):
                    next(batches)
                result = step()
        finally:
            batches.send("SIGSTOP")
        return result

    return steps


def remedy_to_try(rule: str, action: str) -> Remedy:
    """How the remedy of a finding is carried out. ``action``: as the finding says it. Raises NotTried."""
    found = _IN_REMEDY.search(action) if rule in _OF_LOADERS else None
    if found is None and rule not in REMEDIES:
        raise NotTried("it changes your code")
    return REMEDIES[rule] if found is None else _of_loader(found[1])


def _of_loader(how: str) -> Remedy:
    """The remedy of a loader, as the finding writes it: "DataLoader(…, num_workers=2, persistent_workers=True)"."""
    iterator = _iterator_in_use()
    workers = iterator._num_workers
    if "BatchSampler" in how:
        if workers:
            raise NotTried("the loop reads from another loader now")
        return Remedy(how, loading=partial(_loading, iterator, {}, by_index=True))
    if found := re.search(r"num_workers=(\d+)", how):
        options = {"num_workers": int(found[1]), "persistent_workers": True}
    elif "num_workers" in how:
        options = {"num_workers": min(2 * workers, usable_cpus())}
        how = how.replace("num_workers=…", f"num_workers={options['num_workers']}")
        if workers and options["num_workers"] <= workers:
            raise NotTried(f"there are no more processors than the {workers} workers of the loader")
    else:
        options = {"persistent_workers": True}
    if (workers > 0) == bool(found) or (workers and iterator._persistent_workers and "persistent" in how):
        raise NotTried("the loop reads from another loader now")
    own = getattr(iterator, "_workers", ())
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    kinds = {type(worker).__name__ for worker in own}  # "SpawnProcess", of the context of the loader
    if not hasattr(signal, "SIGSTOP") or method != "fork" or kinds & {"SpawnProcess", "ForkServerProcess"}:
        raise NotTried("new workers would run the script again, since they do not start by fork")
    return Remedy(how, loading=partial(_loading, iterator, options, passes="num_workers" not in options))


def _iterator_in_use() -> Any:
    """The iterator of the DataLoader that the program is reading. Raises NotTried if none is known, or several."""
    gc.collect()  # iterators of loops that ended
    kind = optional("torch.utils.data.dataloader._BaseDataLoaderIter")
    found = [each for each in instances_of(kind) if each._num_yielded] if kind is not None else []
    with suppress(TypeError):  # some samplers have no length
        found = [each for each in found if each._num_yielded < len(each._index_sampler)] or found
    if len(found) != 1:
        raise NotTried(f"the loop reads from {len(found)} loaders" if found else "no loader was found")
    return found[0]


def _loading(iterator: Any, options: Mapping[str, Any], *, by_index: bool = False, passes: bool = False) -> Loading:
    """Loaders of copies of the data set. ``passes``: whole passes over it are loaded in turn."""
    parts = iterator._dataset, iterator._index_sampler, iterator._collate_fn
    if isinstance(parts[0], torch.utils.data.IterableDataset):
        raise NotTried("its data set is a stream, which cannot be read twice")
    _refuse_large(parts)
    workers = options.get("num_workers", iterator._num_workers)
    batches = len(parts[1]) if passes else max(_FEWEST_BATCHES, 4 * workers)
    before, after = _loader_of(iterator, parts, {}), _loader_of(iterator, parts, options, by_index)
    return Loading(Batches(before), Batches(after), batches)


def _loader_of(
    iterator: Any, parts: Sequence[Any], options: Mapping[str, Any], by_index: bool = False
) -> DataLoader[Any]:
    """A loader like that of an iterator, of a copy of its data set, with other options."""
    data, indices, collate = copy.deepcopy(tuple(parts))
    settings: dict[str, Any] = {"batch_sampler": indices} if iterator._auto_collation else {"sampler": indices}
    if by_index:
        if collate is not default_collate or not isinstance(indices, BatchSampler):
            raise NotTried("its batches are made by your code")
        few = next(iter(indices))
        if not _are_equal(default_collate([data[index] for index in few]), data[few]):
            raise NotTried("data[indices] are not the same batch")
        return DataLoader(data, sampler=indices, batch_size=None, pin_memory=iterator._pin_memory)
    if not iterator._auto_collation:
        settings["batch_size"] = None
    if iterator._num_workers:
        settings["worker_init_fn"] = iterator._worker_init_fn
        settings["prefetch_factor"] = iterator._prefetch_factor
        settings["persistent_workers"] = iterator._persistent_workers
    settings |= {"num_workers": iterator._num_workers, "pin_memory": iterator._pin_memory, **options}
    if settings["num_workers"]:  # to use the default context would fix how the script starts processes
        settings |= {"timeout": _MOST_SECONDS, "multiprocessing_context": multiprocessing.get_context("fork")}
    return DataLoader(data, collate_fn=collate, **settings)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two batches have equal tensors."""
    tensors = tensors_in(one), tensors_in(other)
    return bool(tensors[0]) and len(tensors[0]) == len(tensors[1]) and all(map(torch.equal, *tensors))


def _refuse_large(parts: object) -> None:
    """Raise NotTried if a copy would be large, or not the same: a file that is mapped to memory would be in memory."""
    size, seen, left = 0, set[int](), [parts]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, _SHARED):
            continue
        seen.add(id(each))
        is_mapped = type(each).__name__ in ("memmap", "mmap")
        if isinstance(each, torch.Tensor) and each.layout == torch.strided:
            size += each.untyped_storage().nbytes()  # a copy of a view has all of it
            is_mapped = bool(getattr(each.untyped_storage(), "filename", None))
        else:  # NumPy's arrays say how large they are, and of what they are views
            size += max(sys.getsizeof(each), int(getattr(each, "nbytes", 0)))
            left.append(getattr(each, "base", None))
        if is_mapped:
            raise NotTried("its data set maps a file to memory")
        if size > _MOST_BYTES or len(seen) > _MOST_OBJECTS:
            raise NotTried(
                f"its data set has more than {format_memory(_MOST_BYTES)}, or than {_MOST_OBJECTS:,} objects"
            )
        left += gc.get_referents(each)
