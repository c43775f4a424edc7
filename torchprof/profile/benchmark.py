"""``benchmark``: the latency of single calls at each batch size, for inference or a training step, without profiler."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.benchmark import timer

from torchprof.errors import TorchprofError
from torchprof.profile.arguments import check_count, check_warmup
from torchprof.record.modules import arguments_of
from torchprof.record.peak import clock_that_waits
from torchprof.record.torch_internals import needed
from torchprof.run.measures import quantile
from torchprof.run.run import output

_pytree = needed("torch.utils._pytree")
_USE_A_FUNCTION = "Give a function instead that makes the inputs of a batch size: inputs=lambda size: (...)."
_UPDATE_S = 0.1  # the time between two updates of the progress: writing to a terminal takes CPU time


@dataclass(frozen=True)
class Latency:
    """The latencies of single calls at one ``batch_size``, in ``seconds``, in order. After an out-of-memory error there
    are none, ``error`` is torch's message, and all figures are None."""

    batch_size: int
    seconds: tuple[float, ...] = field(default=(), repr=False)
    error: str | None = None

    @property
    def mean(self) -> float | None:
        return fmean(self.seconds) if self.seconds else None

    @property
    def std(self) -> float | None:
        """The standard deviation of the sample (divided by n - 1)."""
        return stdev(self.seconds) if len(self.seconds) > 1 else None

    @property
    def median(self) -> float | None:
        return self.quantile(0.5)

    @property
    def p95(self) -> float | None:
        return self.quantile(0.95)

    @property
    def min(self) -> float | None:
        return min(self.seconds, default=None)

    @property
    def max(self) -> float | None:
        return max(self.seconds, default=None)

    @property
    def samples_per_s(self) -> float | None:
        """Throughput: the batch size divided by the mean."""
        return self.batch_size / self.mean if self.mean else None

    def quantile(self, q: float) -> float | None:
        """The quantile ``q`` (0 to 1), interpolated linearly between the two nearest calls."""
        return quantile(sorted(self.seconds), q) if self.seconds else None


@dataclass(frozen=True, repr=False)
class BenchmarkResult:
    """The result of ``benchmark``; its ``str`` is a table. ``rows``: one ``Latency`` for each batch size.

    ``warmup``, ``repeat``: the calls before, and the timed calls, at each batch size. ``model``: class name. ``step``:
    "inference", "training step", or "training step with <optimizer's class>". ``device``: the devices of the model and
    its inputs. ``warnings``: sentences for the user.
    """

    model: str
    step: str
    device: str
    warmup: int
    repeat: int
    rows: tuple[Latency, ...]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        table: str = output("text_of")(output("benchmark_table")(self))
        return table

    __repr__ = __str__  # Python's prompt shows it

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        html: str = output("html_of")(output("benchmark_table")(self))
        return html


def benchmark(
    model: nn.Module,
    inputs: Any,
    batch_sizes: Sequence[int] = (1, 8),
    *,
    warmup: int = 3,
    repeat: int = 20,
    train: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> BenchmarkResult:
    """Time single calls of a model at each batch size.

    ``inputs``: one batch, as a tensor, a tuple of arguments or a dict of keyword arguments. Dimension 0 of its first
    tensor is the batch. Every tensor whose dimension 0 has the same length is cut or repeated to the batch size; all
    other inputs are passed unchanged. ``inputs`` may also be a function that takes the batch size and returns a batch.
    At each batch size, ``warmup`` calls of the model come first and are not timed; then ``repeat`` calls are timed.

    Inference is one call of the model in eval mode under ``torch.inference_mode()``; if the model fails there, under
    ``torch.no_grad()``. ``train=True`` times a training step instead: forward in train mode, ``loss(output)`` (without
    ``loss``: the sum of all outputs that have a gradient), backward, and the step of ``optimizer`` if one is given.
    Gradients are cleared between the steps; that is not timed. If the model already is in the required mode, the modes
    of its submodules are not changed.

    The clock is that of ``torch.utils.benchmark``, which waits for the accelerator. torch computes with
    ``torch.get_num_threads()`` threads (``torch.utils.benchmark.Timer`` uses one by default). Python's garbage
    collector is off while a call is timed. After an out-of-memory error, the row has the error, and the benchmark
    continues with the next batch size. On a terminal, stderr shows the progress.

    At the end, also after an error or Ctrl-C, the modes of all modules and the gradients of the parameters are as they
    were. Nothing else is restored: training changes parameters (with ``optimizer``) and buffers, as those of batch
    normalization, and a cache that the model fills in inference holds tensors that cannot be used for training. Pass
    ``copy.deepcopy(model)``, with an optimizer of its parameters, if the model is needed afterwards.

    Raises TorchprofError for wrong arguments. Errors of the model, of ``loss`` and of ``inputs`` pass through.
    """
    train = bool(train)
    _check(model, batch_sizes, warmup, repeat, train, loss, optimizer)
    batch_of, parameters = _batches_of(inputs), _parameters(model, loss, optimizer)
    # The caller may be in inference mode: tensors copied there could not be used for training.
    with torch.inference_mode(False), _in_mode(model, train, parameters) as warnings, shown_progress() as show:
        timing = _Timing(
            model=model,
            parameters=parameters,
            train=train,
            loss=loss,
            optimizer=optimizer,
            warmup=warmup,
            repeat=repeat,
            show=show,
            warnings=warnings,
        )
        rows = tuple(timing.latency(size, batch_of) for size in batch_sizes)
    step = "inference" if not train else "training step"
    return BenchmarkResult(
        model=type(model).__name__,
        step=step if optimizer is None else f"{step} with {type(optimizer).__name__}",
        device=", ".join(map(str, timing.devices)) or "cpu",
        warmup=warmup,
        repeat=repeat,
        rows=rows,
        warnings=tuple(warnings),
    )


def _check(model: Any, batch_sizes: Any, warmup: Any, repeat: Any, train: bool, loss: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = f" Make one first: {model.__name__}(...)." if isinstance(model, type) else ""
        raise TorchprofError(f"benchmark needs a torch.nn.Module, not {model!r:.80}.{hint}")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise TorchprofError(f"{name} has no shape before the first call of the model: call the model once before.")
    if isinstance(batch_sizes, (str, bytes)) or not isinstance(batch_sizes, Sequence) or not batch_sizes:
        raise TorchprofError(
            f"batch_sizes must be a tuple of integers of at least 1, for example (1, 8), not {batch_sizes!r:.80}."
        )
    for size in batch_sizes:
        check_count(size, 1, "A batch size must be an integer of at least 1")
    check_warmup(warmup)
    check_count(repeat, 2, "repeat must be a number of calls, 2 or more (one call has no spread)")
    if not train and (loss is not None or optimizer is not None):
        raise TorchprofError("loss= and optimizer= need a training step: add train=True, or leave them out.")
    if loss is not None and not callable(loss):
        raise TorchprofError(f"loss must be a function of the model's output, not {loss!r:.80}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        hint = f" Make one first: {optimizer.__name__}(model.parameters())." if isinstance(optimizer, type) else ""
        raise TorchprofError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r:.80}.{hint}")


# The batches: the user's inputs, cut or repeated to fit each batch size


class _Batch:
    """The arguments of a call. The tensors are copies, so that the model cannot change the user's tensors."""

    def __init__(self, inputs: Any, copied: Callable[[Tensor], Tensor]) -> None:
        arguments = _pytree.tree_map_only(Tensor, copied, arguments_of(inputs))
        self.args, self.kwargs = arguments
        self.tensors = tensors_in(arguments)
        if any(tensor.is_meta for tensor in self.tensors):
            raise TorchprofError("inputs are on the meta device, which computes nothing: there is no time to measure.")


def _batches_of(inputs: Any) -> Callable[[int], _Batch]:
    """A function that makes the batch of a given size from the user's ``inputs``."""
    if callable(inputs) and not isinstance(inputs, Tensor):
        return lambda size: _Batch(inputs(size), _copied)
    # size(0), since a nested tensor in strided layout has no ``shape``.
    lengths = [tensor.size(0) for tensor in tensors_in(arguments_of(inputs)) if tensor.dim()]
    if not lengths or not lengths[0]:
        what = "an empty batch" if lengths else "no tensor with a dimension"
        raise TorchprofError(f"inputs holds {what}, so there is nothing to resize. {_USE_A_FUNCTION}")
    return lambda size: _Batch(inputs, partial(_resized, length=lengths[0], size=size))


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in a value, and in tuples, lists and dicts in it."""
    return [leaf for leaf in _pytree.tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _resized(tensor: Tensor, length: int, size: int) -> Tensor:
    """A copy in the same memory format. If dimension 0 is ``length`` long, it is cut or repeated to ``size``."""
    if not tensor.dim() or tensor.size(0) != length or size == length:
        return _copied(tensor)
    try:
        data = tensor.detach()
        if size < length:
            return data[:size].clone().requires_grad_(tensor.requires_grad)
        pieces = [data] * (size // length)
        if size % length:  # cat with an empty piece loses the memory format
            pieces.append(data[: size % length])
        return torch.cat(pieces).requires_grad_(tensor.requires_grad)
    except RuntimeError as error:
        if _ran_out_of_memory(error):
            raise
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TorchprofError(
            f"torch can neither cut nor repeat this {kind} tensor, so that its batch of {length} cannot become one of "
            f"{size}. {_USE_A_FUNCTION}"
        ) from error


# The calls


def _parameters(
    model: nn.Module, loss: Callable[[Any], Tensor] | None, optimizer: torch.optim.Optimizer | None
) -> list[Tensor]:
    """What a call can give a gradient: the parameters of the model, of a loss that is a module, of the optimizer."""
    of_loss = loss.parameters() if isinstance(loss, nn.Module) else ()
    of_optimizer = [tensor for group in optimizer.param_groups for tensor in group["params"]] if optimizer else []
    return list({id(tensor): tensor for tensor in (*model.parameters(), *of_loss, *of_optimizer)}.values())


@contextmanager
def _in_mode(model: nn.Module, train: bool, parameters: Sequence[Tensor]) -> Iterator[list[str]]:
    """Put the model in train or eval mode; afterwards, its modes and gradients are as before. Yields warnings."""
    # A frozen ScriptModule has no attribute ``training``.
    modes = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    warnings = []
    try:
        if getattr(model, "training", train) is not train:
            try:
                model.train(train)
            except NotImplementedError:  # a module of torch.export has a single mode
                mode = "train" if train else "eval"
                warnings.append(f"The model cannot be switched to {mode} mode, and ran as it is.")
        yield warnings
    finally:
        for module, training in modes:
            if module.training is not training:
                module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient


@dataclass
class _Timing:
    """Times the calls of a model, and collects ``devices`` and ``warnings`` while it does. The gradients of
    ``parameters`` are cleared before each step. ``show`` shows the progress."""

    model: nn.Module
    parameters: Sequence[Tensor]
    train: bool
    loss: Callable[[Any], Tensor] | None
    optimizer: torch.optim.Optimizer | None
    warmup: int
    repeat: int
    show: Callable[[str], None]
    warnings: list[str]
    devices: tuple[torch.device, ...] = ()

    def __post_init__(self) -> None:
        self._grad_mode: Callable[[], Any] = torch.enable_grad if self.train else torch.inference_mode

    def latency(self, size: int, batch_of: Callable[[int], _Batch]) -> Latency:
        """Time the calls at one batch size. Being out of memory is a result, too."""
        try:
            return Latency(size, self._seconds_in_some_mode(size, batch_of(size)))
        except (RuntimeError, MemoryError) as error:
            if not _ran_out_of_memory(error):
                raise
            return Latency(size, error=_first_line(error))

    def _seconds_in_some_mode(self, size: int, batch: _Batch) -> tuple[float, ...]:
        """``_seconds`` under ``inference_mode``, or if the model fails there, under ``no_grad``."""
        if self._grad_mode is torch.inference_mode:
            try:
                return self._seconds(size, batch)
            except RuntimeError as error:
                if _ran_out_of_memory(error):
                    raise
                reason = _first_line(error)
            # Some models need autograd in forward (forces of a molecule). A broken model fails again under no_grad.
            self._grad_mode = torch.no_grad
            self.warnings.append(f"Ran under torch.no_grad(): under torch.inference_mode() the model failed: {reason}")
        return self._seconds(size, batch)

    def _seconds(self, size: int, batch: _Batch) -> tuple[float, ...]:
        """The duration of each call after the warm-up, in seconds."""
        seconds = []
        calls = self.warmup + self.repeat
        now = self._clock(batch)
        had_gc = gc.isenabled()
        try:
            for number in range(calls):
                self.show(f"batch size {size}, call {number + 1} of {calls}")
                if self.train:
                    for tensor in (*self.parameters, *batch.tensors):
                        tensor.grad = None
                torch.clear_autocast_cache()  # under autocast, each call casts the weights, as in a training loop
                with self._grad_mode():
                    gc.disable()
                    start = now()
                    self._step(batch)
                    end = now()
                if had_gc:
                    gc.enable()
                seconds.append(end - start)
        finally:
            if had_gc:
                gc.enable()
        return tuple(seconds[self.warmup :])

    def _clock(self, batch: _Batch) -> Callable[[], float]:
        used = {tensor.device: None for tensor in (*self.model.parameters(), *self.model.buffers(), *batch.tensors)}
        devices = [device for device in used if device.type not in ("cpu", "meta")]
        self.devices = tuple(dict.fromkeys((*self.devices, *devices)))
        return clock_that_waits(devices, timer)

    def _step(self, batch: _Batch) -> None:
        output = self.model(*batch.args, **batch.kwargs)
        if self.train:
            loss_of(output, self.loss).backward()
            if self.optimizer is not None:
                self.optimizer.step()


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """``loss(output)``; without ``loss``, the sum of all outputs that require a gradient."""
    if loss is not None:
        value = loss(output)
        if isinstance(value, Tensor) and value.requires_grad:
            return value
        raise TorchprofError(f"loss returned {value!r:.80}; backward needs a tensor with one number and a gradient.")
    sums = [tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad]
    if not sums:
        raise TorchprofError(
            "No output of the model has a gradient for backward to start from. Give loss=, a function of the output, "
            "and make sure that a parameter has requires_grad."
        )
    return sum(sums[1:], sums[0])


def _ran_out_of_memory(error: Exception) -> bool:
    """Whether an error says that a device, or the machine, has no memory left."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    if isinstance(error, RuntimeError):  # torch.cuda.OutOfMemoryError is one
        return isinstance(error, torch.cuda.OutOfMemoryError) or any(word in str(error).lower() for word in words)
    return isinstance(error, MemoryError)


def _first_line(error: Exception) -> str:
    """The first line of the message of an error, as it is."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def shown_progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows a line on stderr if stderr is a terminal. The line is erased at the end."""
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield lambda text: None
        return
    last = -math.inf

    def show(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _UPDATE_S:
            stream.write(f"\r\033[K{text} ")
            stream.flush()
            last = time.monotonic()

    try:
        yield show
    finally:
        stream.write("\r\033[K")
        stream.flush()
