"""Events as torch's profiler keeps them, made by hand, with kernels of a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from build.events import walk_of
from torch.autograd import DeviceType

from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import Attributed, Event, Site
from torchprof.attribute.rule import Attribution
from torchprof.measure.fold import fold
from torchprof.record import session_columns, session_events
from torchprof.record import session_columns as raw_events
from torchprof.record.labels import label_of
from torchprof.record.session import Session
from torchprof.run.layers import Layer
from torchprof.run.meta import Meta
from torchprof.run.run import Run

NODE_PREFIX = "autograd::engine::evaluate_function: "

MODEL = label_of(("Model",))

FUNCTION, BACKWARD_FUNCTION, USER = 0, 1, 7  # scopes

MARKED = pytest.mark.skipif(
    not hasattr(torch._C._autograd._KinetoEvent, "is_user_annotation"), reason="torch 2.4 does not mark these events"
)


def _reads(field: str) -> Callable[[Any], Any]:
    """A method that returns a field."""
    return lambda raw: getattr(raw, field)


@dataclass
class Raw:
    """A stand-in for one of the profiler's raw events: the same methods, over plain fields."""

    _name: str
    _start: int
    _end: int
    _thread: int = 1
    _scope: int = FUNCTION
    _sequence: int = -1
    _forward_thread: int = 0
    _correlation: int = 0
    _linked: int = 0
    _device: DeviceType = DeviceType.CPU
    _index: int = -1
    _nbytes: int = 0
    _annotation: bool = False
    _python: bool = False
    _async: bool = False

    name, scope, nbytes = _reads("_name"), _reads("_scope"), _reads("_nbytes")
    start_ns, end_ns = _reads("_start"), _reads("_end")
    start_thread_id = end_thread_id = device_resource_id = _reads("_thread")
    sequence_nr, fwd_thread_id = _reads("_sequence"), _reads("_forward_thread")
    correlation_id, linked_correlation_id = _reads("_correlation"), _reads("_linked")
    device_type, device_index = _reads("_device"), _reads("_index")
    is_user_annotation, is_python_function, is_async = _reads("_annotation"), _reads("_python"), _reads("_async")

    def duration_ns(self) -> int:
        return self._end - self._start

    def metadata_json(self) -> str:
        return ""

    def is_hidden_event(self) -> bool:
        return False

    def shapes(self) -> list[Any]:
        return []

    dtypes = concrete_inputs = stack = shapes


def columns_of(raws: list[Raw], device: str | None = "cuda") -> EventColumns:
    """What a session that has recorded these raw events hands on."""
    session = Session(None)
    session.device = device
    session._profiler.kineto_results = SimpleNamespace(events=lambda: list(raws), trace_start_ns=lambda: 0)
    # Where the package holds methods of torch's events, not their names, it gets those of ours.
    real = torch._C._autograd._KinetoEvent
    names = [name for name in vars(real) if hasattr(Raw, name) and not name.startswith("__")]
    with ExitStack() as patched:
        for module in (session_events, raw_events, session_columns):
            for place, value in [*vars(module).items()]:
                for name in names:
                    if value is getattr(real, name):
                        patched.enter_context(mock.patch.object(module, place, getattr(Raw, name)))
        return session.columns()


def events_of(raws: list[Raw], device: str | None = "cuda") -> list[Event]:
    return [*columns_of(raws, device).events()]


def attributed(raws: list[Raw], device: str | None = "cuda") -> tuple[list[Attributed], Run]:
    """Every event with its place, and the run they make, for a model of one layer."""
    layers = (Layer(("Model",), "Module"),)
    attribution = Attribution({MODEL: Site((0,))}, [layer.path for layer in layers])
    found = list(walk_of(attribution, events_of(raws, device)))
    rows, samples, _ = fold(found, attribution.places.all, layers)
    meta = Meta(model=("Module",), device="cuda", measured=("cpu_ns", "device_ns"))
    return found, Run((meta,), layers, rows, samples)


def kernel(name: str, start: int, end: int, linked: int, stream: int = 7) -> Raw:
    """A kernel (or a copy, or a set) that the op with that correlation number launched."""
    return Raw(name, start, end, stream, _correlation=9000 + start, _linked=linked, _device=DeviceType.CUDA, _index=0)


def launch(start: int, end: int, linked: int, thread: int = 4321) -> Raw:
    """A call of the device's runtime: on the thread number of the system, linked to its op."""
    return Raw("cudaLaunchKernel", start, end, thread, _correlation=8000 + start, _linked=linked)


def gpu_annotation(name: str, start: int, end: int, linked: int) -> Raw:
    """The mirror of a CPU range on the device's timeline."""
    return Raw(name, start, end, 7, _linked=linked, _device=DeviceType.CUDA, _index=0, _annotation=True)


def small_step() -> list[Raw]:
    """A step of a model with one op: forward, loss, backward on a thread of its own, gradient, optimizer."""
    return [
        Raw("aten::copy_", 0, 90, _correlation=1),
        Raw(MODEL, 100, 1000, _scope=USER, _correlation=2, _annotation=True),
        Raw("aten::linear", 150, 900, _sequence=5, _correlation=3),
        Raw("aten::addmm", 200, 800, _sequence=5, _correlation=4),
        launch(300, 350, 4),
        kernel("gemm", 400, 2400, 4),
        Raw("mine", 910, 950, _scope=USER, _correlation=5, _annotation=True),
        Raw("aten::sum", 1100, 1200, _sequence=6, _correlation=6),
        launch(1150, 1160, 6),
        Raw(NODE_PREFIX + "SumBackward0", 1300, 1340, 2, FUNCTION, 6, 1, 7),
        Raw("SumBackward0", 1310, 1330, 2, BACKWARD_FUNCTION, 6, 1, 8),
        Raw(NODE_PREFIX + "AddmmBackward0", 1400, 1900, 2, FUNCTION, 5, 1, 9),
        Raw("AddmmBackward0", 1410, 1800, 2, BACKWARD_FUNCTION, 5, 1, 10),
        Raw("aten::mm", 1500, 1700, 2, _correlation=11),
        launch(1550, 1600, 11, 8765),
        Raw(NODE_PREFIX + "torch::autograd::AccumulateGrad", 1910, 1990, 2, _correlation=12),
        Raw("torch::autograd::AccumulateGrad", 1920, 1980, 2, BACKWARD_FUNCTION, _correlation=13),
        Raw("aten::add_", 1930, 1970, 2, _correlation=14),
        Raw("Optimizer.step#SGD.step", 2000, 2200, _scope=USER, _correlation=15, _annotation=True),
        Raw("aten::_foreach_add_", 2050, 2150, _correlation=16),
        kernel("Memcpy HtoD (Pageable -> Device)", 95, 195, 1),
        gpu_annotation("begun before the session", 60, 1060, 0),
        gpu_annotation(MODEL, 400, 2400, 2),
        gpu_annotation("mine", 500, 2300, 5),
        kernel("reduce", 2400, 2430, 6),
        kernel("gemm", 2430, 5430, 11),
        kernel("Memset (Device)", 5430, 5434, 14),
        gpu_annotation("Optimizer.step#SGD.step", 5500, 5600, 15),
        kernel("multi_tensor_apply", 5500, 5600, 16),
        kernel("who launched this", 6000, 6007, 77),
    ]
