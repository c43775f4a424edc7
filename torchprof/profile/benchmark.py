"""``benchmark``: how long a model takes at each batch size, inference or training step, each call timed by itself.

It stands beside the profiler, not in it: nothing is recorded here, so nothing slows the model down.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.benchmark import Measurement, TaskSpec, timer

from torchprof.errors import TorchprofError, some
from torchprof.profile.model_state import ModelState
from torchprof.run.cost import UNKNOWN
from torchprof.run.outputs import output
from torchprof.run.samples import quantile

_SHOWN_EVERY = 0.1  # seconds between two writes of the progress: a terminal takes time from the model, too
_ANOTHER_WAY = "Give a function instead that makes the inputs of a batch size: inputs=lambda size: (...)."


@dataclass(frozen=True)
class Latency:
    """How long single calls took at one batch size, in seconds.

    ``seconds`` are the calls in their order. Where memory ran out there are none, ``error`` is what torch said, and
    all figures are None.
    """

    batch_size: int
    seconds: tuple[float, ...] = field(default=(), repr=False)
    error: str | None = None

    @property
    def mean(self) -> float | None:
        return math.fsum(self.seconds) / len(self.seconds) if self.seconds else None

    @property
    def std(self) -> float | None:
        """The standard deviation of the sample: the squares are divided by one less than there are calls."""
        mean = self.mean
        if mean is None or len(self.seconds) < 2:
            return None
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.seconds) / (len(self.seconds) - 1))

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
        """The time below which the share ``q`` (0 to 1) of the calls lies, linear between two neighbours."""
        return quantile(sorted(self.seconds), q) if self.seconds else None


@dataclass(frozen=True)
class Machine:
    """Where times were taken. ``cpus`` are logical ones, ``threads`` those that torch used, ``gpus`` all in sight."""

    cpu: str
    cpus: int | None
    threads: int
    gpus: tuple[str, ...]
    torch: str
    python: str
    system: str

    def __str__(self) -> str:
        parts = [
            f"{self.cpu} ({UNKNOWN if self.cpus is None else self.cpus} CPUs, {self.threads} thread"
            f"{'' if self.threads == 1 else 's'})",
            *(f"{self.gpus.count(name)} × {name}" for name in dict.fromkeys(self.gpus)),
            f"torch {self.torch}",
            f"Python {self.python}",
            self.system,
        ]
        return ", ".join(parts)


@dataclass(frozen=True)
class BenchmarkResult:
    """What ``benchmark`` found; its ``str`` is a table. ``rows`` has one ``Latency`` for each batch size.

    ``model``: class name. ``step``: "inference", "training step", or that with the optimizer's class name.
    ``device``: where the model and its inputs were. ``warnings`` are sentences for the user.
    """

    model: str
    step: str
    device: str
    warmup: int
    repeat: int
    rows: tuple[Latency, ...]
    machine: Machine
    warnings: tuple[str, ...] = ()

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The rows as torch's own measurements, without those where memory ran out.

        ``torch.utils.benchmark.Compare`` puts those of several results into one table: a row for each batch size, a
        column for each model, a table for each kind of step.
        """
        return tuple(
            Measurement(
                1,
                list(row.seconds),
                TaskSpec(
                    stmt="model(inputs)",
                    setup="pass",
                    label=self.step,
                    sub_label=f"batch size {row.batch_size}",
                    description=f"{self.model} on {self.device}",
                    env=str(self.machine),
                    num_threads=self.machine.threads,
                ),
            )
            for row in self.rows
            if row.seconds
        )

    def __str__(self) -> str:
        table: str = output("benchmark_table")(self)
        return table


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
    tensor is the batch; every tensor with as long a dimension 0 is cut or repeated to the wanted size, all else is
    passed as it is. Or a function that is given a batch size and returns such a batch. ``warmup`` calls come first and
    are not timed, ``repeat`` calls are.

    Inference is one call of the model in eval mode under ``torch.inference_mode()``; where a model cannot do with that,
    under ``torch.no_grad()``. ``train=True`` times a training step instead: forward in train mode, ``loss(output)``
    (without ``loss``: the sum of all outputs that have a gradient), backward, and the step of ``optimizer`` where one
    is given. Gradients are cleared between the steps, which is not timed. A model that is in the wanted mode is left in
    it, submodules and all.

    The clock is that of ``torch.utils.benchmark``, which waits for the accelerator. torch computes with as many threads
    as it is set to (``torch.utils.benchmark.Timer`` takes one unless told otherwise). Python's garbage collector rests
    while a call is timed. Where memory runs out, the row says so and the next batch size follows. On a terminal, stderr
    shows how far it is.

    Afterwards, also after an error or Ctrl-C, everything that the model and the optimizer hold is as it was: modes,
    parameters, gradients, buffers, the optimizer's state; so are torch's and Python's random numbers. For training, all
    that is copied to the CPU's memory first; for inference, all but the parameters.

    Raises TorchprofError for what it cannot use; an error of the model, of ``loss`` or of ``inputs`` passes through.
    """
    train = bool(train)
    _check(model, batch_sizes, warmup, repeat, train, loss, optimizer)
    batch_of = _batches(inputs)
    # Around us it may be on, and copies made in it could not be trained with.
    with torch.inference_mode(False), _progress() as show:
        bench = _Bench(model, train, loss, optimizer, warmup, repeat, show)
        rows = tuple(bench.row(size, batch_of) for size in batch_sizes)
    step = "inference" if not train else "training step"
    return BenchmarkResult(
        model=type(model).__name__,
        step=step if optimizer is None else f"{step} with {type(optimizer).__name__}",
        device=", ".join(map(str, bench.devices)) or "cpu",
        warmup=warmup,
        repeat=repeat,
        rows=rows,
        machine=_machine(),
        warnings=(*bench.warnings, *_about_parameters(bench.kept.written)),
    )


def _check(model: Any, batch_sizes: Any, warmup: Any, repeat: Any, train: bool, loss: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = f" Make one first: {model.__name__}(...)." if isinstance(model, type) else ""
        raise TorchprofError(f"benchmark needs a torch.nn.Module, not {model!r:.80}.{hint}")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise TorchprofError(f"{name} has no shape before the first call of the model: call the model once first.")
    if isinstance(batch_sizes, (str, bytes)) or not isinstance(batch_sizes, Sequence) or not batch_sizes:
        raise TorchprofError(f"batch_sizes is a tuple of whole numbers from 1 on, as (1, 8), not {batch_sizes!r:.80}.")
    for size in batch_sizes:
        if not _is_count(size, 1):
            raise TorchprofError(f"A batch size is a whole number from 1 on, not {size!r:.80}.")
    if not _is_count(warmup, 0):
        raise TorchprofError(f"warmup is a number of calls, 0 or more, not {warmup!r:.80}.")
    if not _is_count(repeat, 2):
        raise TorchprofError(f"repeat is a number of calls, 2 or more (one has no spread), not {repeat!r:.80}.")
    if not train and (loss is not None or optimizer is not None):
        raise TorchprofError("loss and optimizer belong to a training step: add train=True, or leave them out.")
    if loss is not None and not callable(loss):
        raise TorchprofError(f"loss is a function of the model's output, not {loss!r:.80}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        hint = f" Make one first: {optimizer.__name__}(model.parameters())." if isinstance(optimizer, type) else ""
        raise TorchprofError(f"optimizer is a torch.optim.Optimizer, not {optimizer!r:.80}.{hint}")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# The inputs


class _Batch:
    """The arguments of a call; the tensors are copies, so that whatever the model does to them is done to its own."""

    def __init__(self, inputs: Any, copied: Callable[[Tensor], Tensor]) -> None:
        args, kwargs = _arguments(inputs)
        self.args, self.kwargs = tree_map(
            lambda leaf: copied(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        self.tensors = _tensors((self.args, self.kwargs))
        if any(tensor.is_meta for tensor in self.tensors):
            raise TorchprofError("inputs are on the meta device, where nothing is computed: there is no time to take.")


def _batches(inputs: Any) -> Callable[[int], _Batch]:
    """What makes the batch of a size out of what the user gave."""
    if callable(inputs) and not isinstance(inputs, Tensor):
        return lambda size: _Batch(inputs(size), _copied)
    # A size may be missing: a nested tensor in strided layout has no shape, but a length.
    lengths = [tensor.size(0) for tensor in _tensors(_arguments(inputs)) if tensor.dim()]
    if not lengths or not lengths[0]:
        what = "holds an empty batch" if lengths else "holds no tensor with a dimension"
        raise TorchprofError(f"inputs {what}, so that there is nothing to resize. {_ANOTHER_WAY}")
    return lambda size: _Batch(inputs, partial(_resized, length=lengths[0], size=size))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if type(inputs) in (tuple, list):  # what derives from them (a PackedSequence) is a single argument
        return tuple(inputs), {}
    raise TorchprofError(
        "inputs is a tensor, a tuple of arguments, a dict of keyword arguments, or a function of the batch size that "
        f"returns one of these, no {type(inputs).__name__}. (A function may return (x,) where x is of another kind.)"
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _resized(tensor: Tensor, length: int, size: int) -> Tensor:
    """A copy with ``size`` in place of ``length`` as dimension 0, in the same memory format; else a plain copy."""
    if not tensor.dim() or tensor.size(0) != length or size == length:
        return _copied(tensor)
    try:
        data = tensor.detach()
        if size < length:
            return data[:size].clone().requires_grad_(tensor.requires_grad)
        pieces = [data] * (size // length)
        if size % length:  # an empty piece would cost the memory format
            pieces.append(data[: size % length])
        return torch.cat(pieces).requires_grad_(tensor.requires_grad)
    except RuntimeError as error:
        if _ran_out_of_memory(error):
            raise
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TorchprofError(
            f"torch can neither cut nor repeat this {kind} tensor, so that its batch of {length} cannot become one of "
            f"{size}. {_ANOTHER_WAY}"
        ) from error


# The calls


class _Bench:
    """Times the calls; ``devices`` and ``warnings`` grow on the way."""

    def __init__(
        self,
        model: nn.Module,
        train: bool,
        loss: Callable[[Any], Tensor] | None,
        optimizer: torch.optim.Optimizer | None,
        warmup: int,
        repeat: int,
        show: Callable[[str], None],
    ) -> None:
        self.model = model
        self.train = train
        self.loss = loss
        self.optimizer = optimizer
        self.warmup = warmup
        self.repeat = repeat
        self.show = show
        self.kept = ModelState(model, [loss, optimizer], parameters=train)
        self.mode: Callable[[], Any] = torch.enable_grad if train else torch.inference_mode
        self.devices: tuple[torch.device, ...] = ()
        self.warnings: list[str] = []

    def row(self, size: int, batch_of: Callable[[int], _Batch]) -> Latency:
        """The calls at one batch size; the model is put back after them, however they ended."""
        try:
            return Latency(size, self._timed(size, batch_of(size)))
        except (RuntimeError, MemoryError) as error:
            if not _ran_out_of_memory(error):
                raise
            return Latency(size, error=_first_line(error))
        finally:
            self.kept.put_back()

    def _timed(self, size: int, batch: _Batch) -> tuple[float, ...]:
        if self.mode is torch.inference_mode:
            try:
                return self._seconds(size, batch)
            except RuntimeError as error:
                if _ran_out_of_memory(error):
                    raise
                reason = _first_line(error)
            # Such as a forward that asks autograd for forces. A model that fails in any case fails here once more.
            self.kept.put_back()
            self.mode = torch.no_grad
            self.warnings.append(f"Ran under torch.no_grad(): under torch.inference_mode() the model failed: {reason}")
        return self._seconds(size, batch)

    def _seconds(self, size: int, batch: _Batch) -> tuple[float, ...]:
        seconds = []
        calls = self.warmup + self.repeat
        now = self._clock(batch)
        self._switch()
        collecting = gc.isenabled()
        try:
            for number in range(calls):
                self.show(f"batch size {size}, call {number + 1} of {calls}")
                if self.train:
                    self.kept.clear_gradients()
                    for tensor in batch.tensors:
                        tensor.grad = None
                torch.clear_autocast_cache()  # under autocast each call casts the weights, as it does in a loop
                with self.mode():
                    gc.disable()
                    start = now()
                    self._step(batch)
                    end = now()
                if collecting:
                    gc.enable()
                seconds.append(end - start)
        finally:
            if collecting:
                gc.enable()
        return tuple(seconds[self.warmup :])

    def _switch(self) -> None:
        if getattr(self.model, "training", self.train) is not self.train:
            try:
                self.model.train(self.train)
            except NotImplementedError:  # what torch.export makes has one mode
                mode = "train" if self.train else "eval"
                said = f"The model cannot be switched to {mode} mode, and ran as it is."
                self.warnings += [] if said in self.warnings else [said]

    def _step(self, batch: _Batch) -> None:
        output = self.model(*batch.args, **batch.kwargs)
        if self.train:
            _loss_of(output, self.loss).backward()
            if self.optimizer is not None:
                self.optimizer.step()

    def _clock(self, batch: _Batch) -> Callable[[], float]:
        """torch's clock waits for the current accelerator alone: first wait for all that work here."""
        found = {tensor.device: None for tensor in (*self.kept.tensors, *batch.tensors)}
        devices = [device for device in found if device.type not in ("cpu", "meta")]
        self.devices = tuple(dict.fromkeys((*self.devices, *devices)))
        waits = []
        for device in devices:
            wait = getattr(getattr(torch, device.type, None), "synchronize", None)
            if wait is not None:
                waits.append(wait if device.type == "mps" else partial(wait, device))

        def now() -> float:
            for wait in waits:
                wait()
            return timer()

        return now if waits else timer


def _loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    if loss is not None:
        value = loss(output)
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise TorchprofError(
                f"loss returned {value!r:.80}; backward needs a tensor with one number and a gradient."
            )
        return value
    sums = [tensor.sum() for tensor in _tensors(output) if tensor.requires_grad]
    if not sums:
        raise TorchprofError(
            "No output of the model has a gradient for backward to start from. Give loss=, a function of the output, "
            "and see that some parameter has requires_grad."
        )
    return sum(sums[1:], sums[0])


def _ran_out_of_memory(error: Exception) -> bool:
    said = str(error).lower()
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or (
        isinstance(error, RuntimeError)
        and any(words in said for words in ("out of memory", "can't allocate memory", "not enough memory"))
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# What is said


def _about_parameters(written: Iterable[str]) -> Iterator[str]:
    names = list(written)
    if names:
        yield f"In eval mode, too, the model writes to its parameters, which are not put back: {some(names)}."


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Gives a function that says on a terminal how far we are, in one line, which is gone at the end."""
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield lambda text: None
        return
    last = -math.inf

    def show(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _SHOWN_EVERY:
            stream.write(f"\r\033[K{text} ")
            stream.flush()
            last = time.monotonic()

    try:
        yield show
    finally:
        stream.write("\r\033[K")
        stream.flush()


def _machine() -> Machine:
    gpus = [
        module.get_device_name(number)
        for module in (torch.cuda, torch.xpu)
        if module.is_available()
        for number in range(module.device_count())
    ]
    return Machine(
        cpu=_cpu_name(),
        cpus=os.cpu_count(),
        threads=torch.get_num_threads(),
        gpus=tuple(gpus),
        torch=torch.__version__,
        python=platform.python_version(),
        system=platform.platform(),
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or UNKNOWN
