"""``benchmark``: how long a model takes at each batch size, inference or training step, each call timed by itself.

It stands beside the profiler, not in it: nothing is recorded here, so nothing slows the model down.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import random
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.benchmark import Measurement, TaskSpec, timer

from torchprof.cost import format_count, format_time
from torchprof.doubts import some
from torchprof.errors import TorchprofError
from torchprof.reports.tree import UNKNOWN, draw

_SHOWN_EVERY = 0.1  # seconds between two writes of the progress: a terminal takes time from the model, too
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number
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
        if not self.seconds:
            return None
        times = sorted(self.seconds)
        at = q * (len(times) - 1)
        low = math.floor(at)
        high = min(low + 1, len(times) - 1)
        return times[low] + (times[high] - times[low]) * (at - low)


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
        headings = ["Batch size", "Mean ± std", "Median", "P95", "Min", "Max", "Samples/s"]
        notes = [
            f"{self.model}, {self.step} on {self.device}: {self.repeat} calls at each batch size, "
            f"after {self.warmup} that were not timed.",
            str(self.machine),
            *(f"Batch size {row.batch_size} did not fit in memory: {row.error}" for row in self.rows if row.error),
            *self.warnings,
        ]
        return "\n".join([draw(headings, [_cells(row) for row in self.rows]), "", *notes])


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
        self.kept = _Kept(model, [loss, optimizer], parameters=train)
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


# The model, as it was


_FOLLOWED = (nn.Module, torch.optim.Optimizer, Tensor, dict, list, tuple)


class _Kept:
    """Everything that calls may change, and how it was: what can be reached from a model and others.

    Attributes are followed through modules, optimizers, dicts, lists and tuples. Of tensors the numbers are copied to
    the CPU, so that the device's memory is left to the model. With ``parameters=False`` those of parameters are not
    copied; ``written`` then names the ones that were written to.
    """

    def __init__(self, model: nn.Module, others: Iterable[Any], parameters: bool) -> None:
        self.tensors: list[Tensor] = []
        self.written: dict[str, None] = {}
        self._boxes: list[tuple[Any, Any]] = []
        # A frozen ScriptModule has no mode.
        self._modes = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
        self._gradients: list[tuple[Tensor, bool, Tensor | None]] = []
        self._numbers: list[tuple[Tensor, Tensor, Tensor]] = []
        self._unlike: list[tuple[Tensor, Tensor, int]] = []
        self._uncopied: list[tuple[str, Tensor, int]] = []
        self._random = _random_states()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        seen: set[int] = set()
        # A ScriptModule has its tensors elsewhere than in its dict.
        waiting: list[Any] = [model, list(model.parameters()), list(model.buffers()), *others]
        while waiting:
            value = waiting.pop()
            if not isinstance(value, _FOLLOWED) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                waiting.append(vars(value))
            elif isinstance(value, torch.optim.Optimizer):
                waiting += [vars(value), value.state, value.param_groups]  # of a wrapper these are another's
            elif isinstance(value, dict):
                if type(value) in (dict, OrderedDict, defaultdict):  # what derives from them may act on its own
                    self._boxes.append((value, dict(value)))
                waiting += value.values()
            elif isinstance(value, (list, tuple)):
                if type(value) is list:
                    self._boxes.append((value, list(value)))
                waiting += value
            else:
                self.tensors.append(value)
                if value.is_leaf:
                    self._gradients.append((value, value.requires_grad, value.grad))
                # What was made in inference mode carries no count of writes.
                if isinstance(value, nn.Parameter) and not parameters:
                    if not value.is_inference():
                        self._uncopied.append((names.get(id(value), "one outside of it"), value, value._version))
                elif is_traceable_wrapper_subclass(value):
                    waiting += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
                elif value.layout is not torch.strided or value.is_quantized:
                    if not value.is_inference():
                        self._unlike.append((value, value.detach().clone(), value._version))
                elif not value.is_meta:
                    self._numbers.append((value, value.data, _bits(_once(value.data)).clone()))

    def clear_gradients(self) -> None:
        for tensor, _, _ in self._gradients:
            tensor.grad = None

    def put_back(self) -> None:
        """Make all as it was. Ctrl-C waits for that."""
        try:
            self._put_back()
        except KeyboardInterrupt:
            self._put_back()
            raise

    def _put_back(self) -> None:
        for box, then in self._boxes:
            if isinstance(box, list):
                if len(box) != len(then) or any(now is not was for now, was in zip(box, then)):
                    box[:] = then
                continue
            for key in [key for key in box if key not in then]:
                del box[key]
            for key, value in then.items():
                if key not in box or box[key] is not value:
                    box[key] = value
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
        for name, tensor, version in self._uncopied:
            if tensor._version != version:
                self.written[name] = None
        for tensor, data, bits in self._numbers:
            if _place(tensor) != _place(data):
                tensor.data = data
            once = _once(data)
            if not torch.equal(_bits(once), bits):  # what was not written to may lie in memory that cannot be
                once.copy_(bits.view(once.dtype).view(once.shape))
        for tensor, data, version in self._unlike:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(data)
        for tensor, requires_grad, gradient in self._gradients:
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for put, state in self._random:
            put(state)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _once(data: Tensor) -> Tensor:
    """An expanded tensor's numbers without their repetitions."""
    for dim, (size, stride) in enumerate(zip(data.shape, data.stride())):
        if stride == 0 and size > 1:
            data = data.narrow(dim, 0, 1)
    return data


def _bits(data: Tensor) -> Tensor:
    """The numbers as integers on the CPU: as these a NaN is equal to itself. They may share the memory of ``data``."""
    data = data.cpu().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(data) if data.is_complex() else data).contiguous().view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def _random_states() -> list[tuple[Callable[[Any], object], Any]]:
    states: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    for module in (torch.cuda, torch.xpu):
        if module.is_available():
            states.append((module.set_rng_state_all, module.get_rng_state_all()))
    if torch.backends.mps.is_available():
        states.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
    return states


# What is said


def _cells(row: Latency) -> list[str]:
    mean, std, rate = row.mean, row.std, row.samples_per_s
    if mean is None:
        return [str(row.batch_size), "out of memory", *[UNKNOWN] * 5]
    spread = UNKNOWN if std is None else _time(std)
    return [
        str(row.batch_size),
        f"{_time(mean)} ± {spread}",
        *(_time(value) for value in (row.median, row.p95, row.min, row.max)),
        UNKNOWN if rate is None else format_count(rate),
    ]


def _time(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_time(seconds * 1e9)


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
