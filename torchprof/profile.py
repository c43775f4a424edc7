"""``Profile``: labels on, session on, the user's code, both off, and a ``Run``. The one conductor."""

from __future__ import annotations

import platform
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

import torch
from torch import nn
from torch.autograd.profiler_util import EventList

from torchprof.attribute import Attribution, Kind
from torchprof.collect import Session, empty_event_list, is_profiled, missing_device, refuse_if_profiled
from torchprof.cost import FIELDS
from torchprof.doubts import about_calls, about_cost, about_labels, about_modules, about_start, about_uncounted
from torchprof.errors import TorchprofError, suggest
from torchprof.estimate import Estimate
from torchprof.instrument import Labels, Target, label_of
from torchprof.modules import Plan, Trace, walk_modules
from torchprof.peaks import measured_peaks
from torchprof.run import Layer, Meta, Rows, Run, SampleKey, Spread, fold
from torchprof.version import __version__

__all__ = ["Profile", "Trace", "walk_modules"]

_UNFINISHED = "<unfinished torchprof.profile>"
_DEVICES = ("cuda", "xpu", "mps", "mtia", "hpu")


class Profile:
    """Profile a model, layer by layer, forward and backward, in a ``with`` block.

    ``model``: a module, or a list of modules that run together. ``enabled=False`` records nothing and costs nothing.
    ``use_cuda`` records CUDA kernels; ``use_device`` names another kind of device ("xpu", "mps", …).
    ``profile_memory`` records allocations. ``paths`` selects modules, leaf or not: tuples of names or dotted strings,
    with or without the root, ``*`` for any one step; work elsewhere is shown as ``(not selected)``. ``warmup``: so many
    calls of the model's own forward (of several models: of any of them) come first and are not recorded.
    ``with_flops`` counts parameters, MACs and FLOPs from the input shapes of the operators (see docs/flops.md).
    ``record_shapes`` and ``with_stack`` record input shapes and source lines for ``key_averages`` and ``raw``.

    Afterwards ``run`` holds the result, ``display()`` the table, ``raw()`` and ``key_averages()`` torch's own lists.
    A Profile is used once. Raises TorchprofError (a RuntimeError) on entry for a path that matches nothing, while
    another profiler is active, and for a second entry.
    """

    _open: ClassVar[Profile | None] = None  # one block at a time in a process
    _timed: ClassVar[bool] = True  # whether times are asked for

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        enabled: bool = True,
        use_cuda: bool = False,
        profile_memory: bool = False,
        paths: Iterable[Any] | None = None,
        *,
        use_device: str | None = None,
        warmup: int = 0,
        with_flops: bool = False,
        record_shapes: bool = False,
        with_stack: bool = False,
    ) -> None:
        self._model = model
        self.enabled = enabled
        self.use_cuda = use_cuda
        self.profile_memory = profile_memory
        self.paths = paths
        self.use_device = use_device
        self.warmup = warmup
        self.with_flops = with_flops
        self.record_shapes = record_shapes
        self.with_stack = with_stack

        self.entered = False
        self.exited = False
        self.traces: tuple[Trace, ...] = ()
        self._event_lists: defaultdict[tuple[str, ...], list[EventList]] | None = None
        self._run: Run | None = None
        self._label_ns: float | None = None

    # The block

    def __enter__(self) -> Profile:
        if not self.enabled:
            return self
        if self.entered:
            raise TorchprofError("torchprof profiler is not reentrant")
        if Profile._open is not None:
            raise TorchprofError(
                "Another torchprof.Profile block is open, or another of its integrations' profilers: end it first. One "
                "block can hold several models."
            )
        self._models = _checked_models(self._model)
        self._device = self._checked_device()
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise TorchprofError(f"warmup is a number of calls, 0 or more, not {self.warmup!r}.")
        self._plan = Plan(self._models, self.paths)
        refuse_if_profiled()
        self._session = Session(
            None if self._device is None or missing_device(self._device) else self._device,
            profile_memory=self.profile_memory,
            record_shapes=self.record_shapes or self.with_flops,
            with_stack=self.with_stack,
        )
        self._labels = Labels(self._plan.targets)
        self._warmup_left = self.warmup
        if self.warmup:
            self._labels.trigger = self._models
            self._labels.before_first = self._warm
        self._labels.attach()
        try:
            if not self.warmup:
                self._session.start()
        except BaseException:
            self._labels.detach()
            raise
        self.entered = True
        Profile._open = self
        self.traces = self._plan.traces
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if not self.entered or self.exited:
            return
        self._labels.detach()
        Profile._open = None
        try:
            if self._session.started:
                self._session.stop()
                self._label_ns = label_ns() if self._timed else None
        finally:
            self._facts = self._plan.layers()
            self._changes = self._plan.changes(self._models)
            self._rank = _rank()
            self.exited = True

    def _warm(self) -> bool:
        """Called before each call of the model until the session starts; says whether it has."""
        if self._warmup_left:
            self._warmup_left -= 1
            return False
        refuse_if_profiled()
        self._session.start()
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if not isinstance(self._model, nn.Module):
            raise TorchprofError("This Profile holds several models: call the one you mean itself.")
        return self._model(*args, **kwargs)

    # The result

    @property
    def run(self) -> Run:
        """The result. Raises TorchprofError before the block has ended, and where profiling was switched off."""
        if not self.enabled:
            raise TorchprofError("This Profile was made with enabled=False: nothing was recorded.")
        if not self.exited:
            raise TorchprofError("The block of this Profile has not ended: there is no run yet.")
        if self._run is None:
            self._run = self._make_run()
        return self._run

    def display(
        self,
        show_events: bool = False,
        *,
        depth: int | None = None,
        sort_by: str | None = None,
        top: int | None = None,
        percent: bool = False,
        tablefmt: str | None = None,
        file: TextIO | None = None,
    ) -> str:
        """The tree table; see ``torchprof.reports.tree`` for what the options do.

        With ``file``, an open text file, the table is written there as well, with a line's end. Before the block has
        ended, and with ``enabled=False``, the text is ``<unfinished torchprof.profile>``.
        """
        if file is not None and not hasattr(file, "write"):
            raise TorchprofError(f"file={file!r} is no open text file: use `open(path, 'w')`, or sys.stdout.")
        text = _UNFINISHED
        if self.exited:
            text = self.run.report(
                "tree",
                show_events=show_events,
                depth=depth,
                sort_by=sort_by,
                top=top,
                percent=percent,
                tablefmt=tablefmt,
            )
        if file is not None:
            file.write(text + "\n")
        return text

    def __str__(self) -> str:
        return self.display()

    def raw(self) -> tuple[tuple[Trace, ...], defaultdict[tuple[str, ...], list[EventList]]] | None:
        """``(traces, event_lists)``, None before the end.

        ``event_lists[path]`` holds torch's own ``EventList`` for each finished call of that module, in order: of the
        selected modules, or of the leaves where no paths were given. Built when first asked for.
        """
        return (self.traces, self.trace_profile_events) if self.exited else None

    @property
    def trace_profile_events(self) -> defaultdict[tuple[str, ...], list[EventList]]:
        """The mapping that ``raw()`` gives; empty before the end."""
        if not self.exited:
            return defaultdict(list)
        if self._event_lists is None:
            self._event_lists = defaultdict(list)
            paths = {}
            for event, place, *_ in self._attribution().attribute(self._session.events()):
                if event.kind is Kind.LABEL:
                    path = self._plan.real_path(event.name, place.layer)
                    if path is not None and path in self._plan.with_event_lists:
                        paths[event.thread, event.start_ns] = path
            calls = [call for call in self._session.calls() if call.finished and (call.thread, call.start_ns) in paths]
            for call, events in zip(calls, self._session.event_lists(calls)):
                self._event_lists[paths[call.thread, call.start_ns]].append(events)
        return self._event_lists

    def key_averages(self, *args: Any, **kwargs: Any) -> EventList:
        """torch's own averages over all events, with torch's arguments (``group_by_input_shape`` needs
        ``record_shapes=True``, ``group_by_stack_n`` needs ``with_stack=True``). Empty with ``enabled=False``; raises
        TorchprofError before the end."""
        if not self.enabled:
            return empty_event_list()
        if not self.exited:
            raise TorchprofError("The block of this Profile has not ended: there are no averages yet.")
        if "group_by_input_shape" in kwargs:  # torch.profiler's spelling; EventList's has an s
            kwargs["group_by_input_shapes"] = kwargs.pop("group_by_input_shape")
        averages: EventList = self._session.event_list().key_averages(*args, **kwargs)
        return averages

    # How it comes about

    def _checked_device(self) -> str | None:
        if self.use_device is None:
            return "cuda" if self.use_cuda else None
        backend = torch._C._get_privateuse1_backend_name()
        known = (*_DEVICES, *([backend] if backend != "privateuseone" else []))
        if self.use_device not in known:
            raise TorchprofError(
                f"use_device={self.use_device!r} is no kind of device. {suggest(str(self.use_device), known)}"
            )
        if self.use_cuda and self.use_device != "cuda":
            raise TorchprofError(
                f"use_cuda=True and use_device={self.use_device!r} contradict each other: leave one out."
            )
        return self.use_device

    def _attribution(self) -> Attribution:
        return Attribution(self._plan.sites, [layer.path for layer in self._facts], self._plan.selected)

    def _make_run(self) -> Run:
        layers = self._facts
        attribution = self._attribution()
        places = attribution.places.all
        signatures = self._session.signatures
        if self.with_flops:
            estimate = Estimate(signatures)
            attributed = estimate.watch(attribution.attribute(self._session.events(estimate.detail)))
            rows, samples, peaks = fold(
                attributed, places, layers, self._rank, counts=estimate.counts, signatures=signatures, timed=self._timed
            )
        else:
            rows, samples, peaks = fold(attribution.attribute(self._session.events()), places, layers, self._rank)
        asked = [name for name in FIELDS if self._is_asked(name)]
        of_cpu = [name for name in asked if not name.startswith("device_")]
        requested = asked if self._device else of_cpu
        measured = asked if self._session.device else of_cpu
        meta = Meta(
            model=tuple(layer.kind for layer in layers if len(layer.path) == 1),
            rank=self._rank,
            device=self._device,
            requested=tuple(requested),
            measured=tuple(measured),
            paths=self._plan.selected_paths,
            wall_ns=self._session.wall_ns,
            peak_bytes=tuple(sorted(peaks.items())),
            peaks=measured_peaks(),
            warnings=tuple(self._doubts(layers, rows, samples, attribution)),
            versions=(
                ("torchprof", __version__),
                ("torch", torch.__version__),
                ("python", platform.python_version()),
            ),
            flags=(
                ("use_cuda", bool(self.use_cuda)),
                ("profile_memory", bool(self.profile_memory)),
                ("with_flops", bool(self.with_flops)),
                ("record_shapes", bool(self.record_shapes)),
                ("with_stack", bool(self.with_stack)),
            ),
            machine=platform.node(),
            script=str(Path(sys.argv[0]).absolute()) if sys.argv and sys.argv[0] else "",
        )
        return Run((meta,), layers, rows, samples)

    def _is_asked(self, field: str) -> bool:
        """Whether a field of Cost was asked for."""
        if field.endswith("_ns"):
            return self._timed
        if field in ("macs", "flops", "uncounted"):
            return self.with_flops
        return self.profile_memory

    def _doubts(
        self, layers: Sequence[Layer], rows: Rows, samples: dict[SampleKey, Spread], attribution: Attribution
    ) -> Iterator[str]:
        missing = missing_device(self._device) if self._device else None
        if missing:
            yield missing
        yield from about_modules(*self._changes)
        chosen = self._plan.selected
        layer_of = {
            label: site.layers[0]
            for label, site in self._plan.sites.items()
            if chosen is None or not chosen.isdisjoint(site.layers)
        }
        unobserved = {layer_of[label]: calls for label, calls in self._labels.unobserved.items() if label in layer_of}
        unlabelled = [layer_of[label] for label in self._labels.unlabelled if label in layer_of]
        yield from about_labels(layers, unobserved, unlabelled)
        if not self._session.started:
            calls = self.warmup - self._warmup_left
            yield (
                f"Nothing was recorded: of warmup={self.warmup} calls of the model there were {calls}. Only calls of "
                "its own forward count; a model that is used in other ways is warmed up before the block."
            )
            return
        called = {layer for (layer, _), (_, calls) in rows.by_layer.items() if layer >= 0 and calls}
        silent = self._plan.callable_layers - called - set(unobserved)
        yield from about_calls(layers, self._plan.callable_layers, called, silent, attribution.callers)
        yield from about_start(layers, samples)
        yield from about_uncounted(rows)
        if self._label_ns is not None:
            yield from about_cost(attribution.labels, self._label_ns, self._session.wall_ns)


def _checked_models(model: Any) -> list[nn.Module]:
    models = list(model) if isinstance(model, (list, tuple)) else [model]
    if not models:
        raise TorchprofError("Profile needs a model; the list is empty.")
    for one in models:
        if not isinstance(one, nn.Module):
            hint = ""
            if hasattr(one, "_torchdynamo_orig_callable"):
                hint = " A compiled function has no layers: profile the module it calls."
            elif isinstance(one, type) and issubclass(one, nn.Module):
                hint = f" Make one first: {one.__name__}(...)."
            raise TorchprofError(f"Profile needs a torch.nn.Module or a list of them, not {one!r:.80}.{hint}")
        for _, _, module in walk_modules(one):
            if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
                raise TorchprofError(
                    f"nn.DataParallel runs replicas of {type(module.module).__name__} on {len(module.device_ids)} "
                    "devices, in threads that torch's profiler does not record. Profile its `.module` on one device, "
                    "or use DistributedDataParallel."
                )
    return models


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


_calibration = threading.Lock()
_calibrated: list[float] = []


def label_ns() -> float | None:
    """What one label costs inside a session, in nanoseconds; None where another session is active.

    Measured once in a process, in a session of its own: 200 calls of a module that does nothing, labelled and bare. So
    this is for right after a session of ours, when nobody else has one.
    """
    with _calibration:
        if not _calibrated and not is_profiled():
            module = nn.Identity()
            took = []
            session = Session(None)
            session.start()
            try:
                for targets in ([], [Target(module, label_of(("calibration",)))]):
                    labels = Labels(targets)
                    labels.attach()
                    try:
                        module(None)
                        start = time.perf_counter_ns()
                        for _ in range(200):
                            module(None)
                        took.append(time.perf_counter_ns() - start)
                    finally:
                        labels.detach()
            finally:
                session.stop()
            _calibrated.append(max(took[1] - took[0], 0) / 200)
        return _calibrated[0] if _calibrated else None
