"""``annotate`` labels a model for another profiler; ``from_profiler`` makes a ``Run`` of what it recorded.
``tensorboard_trace_handler`` and ``log_stragglers`` are functions for ``on_trace_ready``."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchprof.errors import TorchprofError
from torchprof.measure.assemble import assemble, wanted_detail, with_warnings
from torchprof.measure.memory_blocks import NOT_MEASURED
from torchprof.measure.recording import Observations, Options, Recording
from torchprof.profile.gather import Comparisons
from torchprof.profile.signals import DelayedSignals, uninterrupted
from torchprof.record.compiled.dynamo_code import compiled_regions
from torchprof.record.labels import Labels
from torchprof.record.modules import checked_models
from torchprof.record.plan import Plan
from torchprof.record.session import CustomOps
from torchprof.record.session_events import SessionEvents, ended_session
from torchprof.record.this_process import live_memory, this_job, this_process
from torchprof.run.run import Run

if TYPE_CHECKING:
    from torchprof.profile.profile import Profile


@contextmanager
def annotate(model: nn.Module | Sequence[nn.Module], *, paths: Iterable[Any] | None = None) -> Iterator[None]:
    """Label every forward of a model inside a ``with`` block, and record nothing. It can also decorate a function.

    It is for another profiler, which may start before the block or inside it: ``torch.profiler.profile``, ``emit_nvtx``
    with Nsight Systems, ``emit_itt`` with VTune. Each call of a module is a range with the name ``torchprof:`` + path,
    percent-escaped to plain ASCII. ``model``: a module, or a list of modules. ``paths`` selects modules as for
    ``Profile``.

    Inside or around a ``Profile`` of the same model, only the Profile's labels are used, so that no call counts twice.
    Blocks may overlap, in tasks, threads and generators: the model is restored when the last block ends.

    Raises TorchprofError for anything but a module, and for a path that matches nothing.
    """
    plan = Plan(checked_models(model), paths, model)
    labels = Labels(plan.targets, gives_way=True)
    custom_ops = CustomOps()
    with ExitStack() as last:
        last.callback(custom_ops.off)
        last.callback(uninterrupted, labels.detach)
        with DelayedSignals():
            labels.attach()
            custom_ops.on()
        yield


def from_profiler(profiler: Any, model: nn.Module | Sequence[nn.Module], *, paths: Iterable[Any] | None = None) -> Run:
    """Make a run of an annotated model from one of torch's profilers.

    ``profiler``: a ``torch.profiler.profile`` (with a schedule: its last cycle) or ``torch.autograd.profiler.profile``
    that was around or inside ``torchprof.annotate(model)``, and has ended. ``model`` and ``paths``: the arguments of
    ``annotate``. The run has memory, FLOPs and input shapes if the profiler recorded memory and shapes
    (``profile_memory``, ``record_shapes``). The shapes of the layers are unknown.

    Raises TorchprofError if the profiler has not ended, or has no labels of this model.
    """
    plan = Plan(checked_models(model), paths, model)
    session: SessionEvents = ended_session(profiler)
    if not (labels := {call.label for call in session.calls()}):
        raise TorchprofError(
            "This profiler recorded no call of an annotated model: put `with torchprof.annotate(model):` around the "
            "recorded code. With a schedule, read the profiler in on_trace_ready, before the next cycle begins."
        )
    if labels.isdisjoint(plan.sites):
        raise TorchprofError(
            f"This profiler recorded other modules than those of {', '.join(plan.names)}: "
            f"{', '.join(sorted(labels)[:3])}. Give from_profiler the same model and paths as annotate."
        )
    has = session.has
    asked = Options(
        device=session.device,
        profile_memory=has["profile_memory"],
        with_flops=has["record_shapes"],
        record_shapes=has["record_shapes"],
        with_stack=has["with_stack"],
    )
    observations = Observations()
    job = this_job(plan.models)
    recording = Recording(
        source=session,
        columns=partial(session.columns, wanted_detail(asked), asked.profile_memory),
        layers=plan.layers(),
        origin=this_process(job),
        observations=observations,
        end=live_memory(plan.models) if asked.profile_memory else NOT_MEASURED,
        group=job.group,
        regions=compiled_regions(),
    )
    return with_warnings(assemble(recording, plan.layer_plan(), asked), observations)


def tensorboard_trace_handler(
    dir_name: str | PathLike[str], worker_name: str | None = None, use_gzip: bool = False
) -> Callable[[Profile], None]:
    """Make a function for ``on_trace_ready`` that writes the trace of each cycle into a folder.

    It corresponds to torch's function of the same name. The file is ``<worker_name>.<time in ns>.pt.trace.json``, with
    ``.gz`` appended for ``use_gzip``. The folder is created if it does not exist. ``worker_name`` must be different in
    each process of a job; the default is ``<host name>_<process id>``. The returned function raises TorchprofError if
    the folder cannot be created, and OSError if the file cannot be written.
    """

    def write_trace(profile: Profile) -> None:
        folder = Path(dir_name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TorchprofError(f"No folder for traces can be made at {folder}: {error.strerror}.") from error
        worker = worker_name or f"{socket.gethostname()}_{os.getpid()}"
        profile.export_chrome_trace(folder / f"{worker}.{time.time_ns()}.pt.trace.json{'.gz' if use_gzip else ''}")

    return write_trace


_comparisons_of: WeakKeyDictionary[Profile, Comparisons] = WeakKeyDictionary()


def log_stragglers(prof: Profile) -> None:
    """Compare the ranks of the job in the steps of the last cycle, and log on rank 0 which of them is slow.

    It is a function for ``on_trace_ready``; see docs/ranks-in-a-job.md. Every rank calls it, and sends a kilobyte or
    two to the job's store without waiting. Rank 0 waits for the others, 5 s at most, and compares what has come. It
    logs one line with the logger "torchprof": a warning if a rank is slow or sent nothing, else an info. It does not
    wait again for a rank that sent nothing in the cycle before.

    Without a process group, and for a cycle without a whole step, nothing is compared. Why ranks could not be compared,
    as in a process group without a key-value store (MPI), is logged as a warning: no error ends a training. Raises
    TorchprofError for a Profile that has no run yet.
    """
    distributed = torch.distributed
    run = prof.run
    steps = run.meta.marked_steps
    if not steps or not (distributed.is_available() and distributed.is_initialized()):
        return
    comparisons = _comparisons_of.get(prof) or _comparisons_of.setdefault(prof, Comparisons())
    first, last = prof.step_num - steps, prof.step_num - 1
    comparisons.add(run, first, (first, last), distributed.get_rank(), distributed.get_world_size())
