"""What torchprof uses of torch although it is not public, in one list; and how functions of torch are replaced.

``needed`` and ``optional`` look a part up. Some code asks an object or a module at hand instead, with ``getattr``: the
attributes that it asks for are listed in ``test/record/test_torch_internals.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

from torchprof.errors import TorchprofError


class Use(NamedTuple):
    """What a part of torch is used for. ``without``: what happens if it is missing; "" if nothing can be recorded then.
    ``since``, ``until``: the first and the last of the versions 2.4, 2.6, 2.9, 2.11, 2.13, 2.14, 2.15 that has it."""

    purpose: str
    without: str = ""
    since: str = "2.4"
    until: str = "2.15"


_OF_MODULES: dict[str, dict[str, Use]] = {  # a key may be several parts with one use
    "torch._C._autograd": {
        "_KinetoEvent": Use("the recorded events"),
        "_KinetoEvent.end_ns": Use("when an event ended", "start and duration are added", since="2.6"),
        "_KinetoEvent.is_python_function": Use("calls of Python functions", "there are none", since="2.13"),
        "_KinetoEvent.is_user_annotation": Use("annotations on a device", "the names of labels tell", since="2.6"),
        "_KinetoEvent.structured_input_shapes": Use("shapes of lists of tensors", "no FLOPs of these", since="2.13"),
        "_KinetoEvent.device_resource_id": Use("the stream of a kernel", "a device has one stream"),
        "_top_saved_tensors_default_hooks": Use("that hooks see saved tensors of copies", "they see them", since="2.6"),
        "_profiler_enabled": Use("whether a thread is recorded"),
        "_enable_record_function": Use("to switch a forked child's recording off", "it records for nothing"),
        "_add_metadata_json": Use("to write the job into the trace", "the trace of a rank does not name its job"),
    },
    "torch._C._profiler": {
        "_RecordFunctionFast": Use("to record a range at low cost", "record_function does it, more slowly"),
        "_ExperimentalConfig": Use("to ask for source lines and what collectives say", "neither is recorded"),
        "_ExtraFields_Allocation": Use("the addresses of allocations", "kinds of memory are unknown"),
    },
    "torch.autograd": {
        "profiler.profile._prepare_trace": Use("to prepare a session before it starts"),
        "profiler.profile._start_trace": Use("to start a session"),
        "profiler.profile._parse_kineto_results": Use("torch's own list of events", "raw() raises an error"),
        "profiler._run_on_profiler_stop": Use("to tidy up after an interrupted stop", "a later block is refused"),
        "profiler._is_profiler_enabled": Use("whether any thread is recorded", "only this thread is asked"),
        "profiler.KinetoStepTracker._step_dict": Use("whether a profiler warms up", "all objects are searched for one"),
        "profiler_util.EventList._build_tree": Use("the same", "the same"),
        "_engine_run_backward graph._engine_run_backward": Use(
            "when autograd's engine was called", "a backward pass begins with its first node"
        ),
    },
    "torch._C": {
        "_get_tracing_state": Use("whether TorchScript is tracing", "labels are recorded in a trace of TorchScript"),
        "_current_graph_task_id": Use("whether backward is running", "recomputations are calls of models, or missing"),
        "_is_cow_tensor": Use("whether a tensor is copied on write", "asking for its address copies it"),
        "_get_privateuse1_backend_name": Use("the name of a device that an extension adds", "its name is unknown"),
        "_dispatch_has_kernel_for_dispatch_key": Use("which operators do no work", "more are shown as not counted"),
    },
    "torch.utils": {
        "_python_dispatch._disable_current_modes": Use(
            "to call formulas and copies outside of modes", "they are inside"
        ),
        "checkpoint._StopRecomputationError": Use("that a recomputation stopped early", "it may be called unfinished"),
        "checkpoint._checkpoint_without_reentrant_generator": Use("to try a model without", "only reentrant ones"),
        "_pytree": Use("the tensors in inputs and outputs"),
        "data.dataloader._BaseDataLoaderIter": Use("to try a loader with workers", "it is not tried"),
    },
    "torch": {
        "overrides._get_current_function_mode_stack": Use("that a mode sees calls of copies", "it sees them"),
        "nn.Module._call_impl": Use("whether a module was compiled in place", "it is taken for one that was"),
        "_library.custom_ops.OPDEFS": Use("custom ops that pass the profiler by", "no events of them in torch 2.15"),
        "_ops.OpOverload._enable_pyobj_dispatch": Use("the same", "the same", since="2.14"),
        "ao.nn.quantized.Linear._weight_bias": Use("the weights of quantized modules", "their sizes are unknown"),
        "nn.modules.loss._Loss": Use("which modules are losses", "a loss may be a model"),
        "nn.parallel.DistributedDataParallel._get_ddp_logging_data": Use("buckets", "no layers of exchanges"),
    },
    "torch.distributed": {
        "distributed_c10d._get_default_group": Use("the group of all ranks, for gather()", "gather() raises an error"),
        "distributed_c10d._get_default_store": Use("the job's key-value store, for gather()", "it raises an error"),
        "distributed_c10d._world": Use("the process groups", "the groups of collectives are unknown"),
        "device_mesh.DeviceMesh._get_root_mesh": Use("the mesh of a job", "only that of a parameter", since="2.11"),
        "device_mesh._mesh_resources": Use("the same", "the same", until="2.9"),
        "pipelining.stage._PipelineStageBase": Use("the stages of pipelines", "pipelines are not recorded"),
        "pipelining.schedules._wait_batch_p2p": Use("waits for other ranks", "pipelines are not recorded", since="2.9"),
    },
    "torch._C._dynamo.eval_frame": {
        "set_code_exec_strategy _FrameExecStrategy _FrameAction": Use(
            "to keep labels from being compiled", "the older ways are used", since="2.9"
        ),
        "skip_code": Use("the same", "labels are compiled, with one graph break each", until="2.6"),
        "set_eval_frame": Use("the same", "the same"),
        "_debug_get_cache_entry_list": Use("whether a forward is compiled", "compiled models have no source lines"),
    },
    "torch._dynamo": {
        "eval_frame.OptimizedModule": Use("whether a module was compiled", "it is taken for one that was not"),
        "convert_frame.input_codes": Use("whether torch.compile gave a forward up", "such models have no source lines"),
        "callback": Use("when code is compiled", "the time of compilation is not set apart"),
        "utils.get_compilation_metrics": Use("when and why code was compiled", "compilations have no reasons"),
        "utils.graph_break_reasons": Use("why compiled graphs end", "compiled regions have no names of functions"),
        "symbolic_convert.InstructionTranslator": Use("modules of compiled functions", "compile_layers says so"),
    },
    "torch._inductor": {
        "config compile_fx debug scheduler.Scheduler virtualized.V": Use("compiled kernels", "compile_layers says so"),
        "codegen.wrapper.PythonWrapperCodegen": Use("the same", "the same", since="2.6"),
        "output_code.CompiledFxGraph": Use("the work of compiled graphs", "it is not counted", since="2.6"),
    },
    "torch._functorch": {"config": Use("compiled kernels", "compile_layers says so")},
}
INTERNALS = {
    f"{module}.{name}": use for module, uses in _OF_MODULES.items() for key, use in uses.items() for name in key.split()
}


def optional(name: str, default: Any = None) -> Any:
    """A part of torch, by its name in ``INTERNALS``; ``default`` if this torch does not have it."""
    assert name in INTERNALS, name
    module, *attributes = name.split(".")
    value: Any = importlib.import_module(module)
    for number, attribute in enumerate(attributes):
        if not hasattr(value, attribute):
            try:
                importlib.import_module(".".join((module, *attributes[: number + 1])))
            except ImportError:
                return default
        value = getattr(value, attribute, default)
    return value


def needed(name: str) -> Any:
    """The same for a part without which nothing can be recorded. Raises TorchprofError if it is missing."""
    if (value := optional(name)) is None:
        import torch  # not above: the sampler of lines is used before a script imports torch

        raise TorchprofError(
            f"torch {torch.__version__} has no {name} (for: {INTERNALS[name].purpose}), and torchprof cannot record "
            f"without it. Install torch {INTERNALS[name].since} to {INTERNALS[name].until}, or a newer torchprof."
        )
    return value


class SharedChange:
    """A change of the process, from ``on`` to ``off``. Several objects may be on at the same time: the first one makes
    the change, the last one undoes it. Both methods may be called again. Each class has a change of its own: ``_make``
    makes it, and adds what undoes it to ``_undo``. If that stays empty, the next ``on`` tries it again."""

    _all_on: ClassVar[WeakSet[Any]]  # one that is freed is no longer on
    _undo: ClassVar[list[Callable[[], object]]]

    def __init_subclass__(cls) -> None:
        cls._all_on, cls._undo = WeakSet(), []

    def on(self) -> None:
        self._all_on.add(self)
        if not self._undo:
            self._make()

    def off(self) -> None:
        self._all_on.discard(self)
        while self._undo and not self._all_on:
            self._undo.pop()()

    def _make(self) -> None:
        raise NotImplementedError

    def _put(self, owner: Any, name: str, ours: Any) -> None:
        self._undo.append(replaced(owner, name, ours))

    def _set(self, get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> None:
        """Change a setting of Python; it is restored unless other code has changed it meanwhile."""
        before = get()
        put(value)
        ours = get()  # as Python rounded it
        self._undo.append(lambda: put(before) if get() == ours else None)


def replaced(owner: Any, name: str, ours: Any) -> Callable[[], None]:
    """Replace an attribute of a class or a module. Returns what restores it, unless others have replaced it."""
    before = getattr(owner, name)
    setattr(owner, name, ours)

    def restore() -> None:
        if getattr(owner, name) is ours:
            setattr(owner, name, before)

    return restore
