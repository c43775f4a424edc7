"""Everything of torch that torchprof uses although it is not public, in one list.

``needed`` and ``optional`` look a part up. Some code asks an object or a module at hand instead, with ``getattr``: what
it asks for is in the lists, too.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from torchprof.errors import TorchprofError


class Internal(NamedTuple):
    """A part of torch that is not public. ``since``, ``until``: the first and the last version of 2.4, 2.6, 2.9, 2.11,
    2.13, 2.14 and 2.15 that has it. ``use``: what torchprof knows by it. ``without``: what happens if it is missing;
    "" if torchprof cannot record without it."""

    since: str
    until: str
    use: str
    without: str


_AN_ERROR = ""
_EVENT = "torch._C._autograd._KinetoEvent"
_FRAMES = "torch._C._dynamo.eval_frame"
_PIPELINING = "torch.distributed.pipelining"

INTERNALS: dict[str, Internal] = {
    # The profiler
    _EVENT: Internal("2.4", "2.15", "the recorded events", _AN_ERROR),
    f"{_EVENT}.end_ns": Internal("2.6", "2.15", "when an event ended", "start and duration are added"),
    f"{_EVENT}.is_python_function": Internal(
        "2.13", "2.15", "calls of Python functions", "a torch without it gives none"
    ),
    f"{_EVENT}.is_user_annotation": Internal(
        "2.6", "2.15", "which spans on a device are annotations", "they are known by the names of labels"
    ),
    f"{_EVENT}.structured_input_shapes": Internal(
        "2.13", "2.15", "the shapes of lists of tensors", "FLOPs of operators on lists are not counted"
    ),
    f"{_EVENT}.device_resource_id": Internal("2.4", "2.15", "the stream of a kernel", "a device has one stream"),
    "torch._C._autograd._profiler_enabled": Internal("2.4", "2.15", "whether a thread is recorded", _AN_ERROR),
    "torch._C._autograd._enable_record_function": Internal(
        "2.4", "2.15", "to switch a forked child's recording off", "a child records events that are never read"
    ),
    "torch._C._autograd._add_metadata_json": Internal(
        "2.4", "2.15", "to write the job into the trace", "the trace of a rank does not name its job"
    ),
    "torch._C._profiler._RecordFunctionFast": Internal(
        "2.4", "2.15", "to record a range at low cost", "torch.profiler.record_function does it, more slowly"
    ),
    "torch._C._profiler._ExperimentalConfig": Internal(
        "2.4", "2.15", "to ask for source lines and what collectives say", "neither is recorded"
    ),
    "torch._C._profiler._ExtraFields_Allocation": Internal(
        "2.4", "2.15", "the addresses of allocations", "kinds of memory are unknown"
    ),
    "torch.autograd.profiler.profile._prepare_trace": Internal(
        "2.4", "2.15", "to prepare a session before it starts", _AN_ERROR
    ),
    "torch.autograd.profiler.profile._start_trace": Internal("2.4", "2.15", "to start a session", _AN_ERROR),
    "torch.autograd.profiler.profile._parse_kineto_results": Internal(
        "2.4", "2.15", "torch's own list of events", "raw(), key_averages() and trace_profile_events raise an error"
    ),
    "torch.autograd.profiler._run_on_profiler_stop": Internal(
        "2.4",
        "2.15",
        "to tidy up after an interrupted stop",
        "a later block is refused, because torch says that a profiler is active",
    ),
    "torch.autograd.profiler._is_profiler_enabled": Internal(
        "2.4", "2.15", "whether any thread is recorded", "only this thread is asked"
    ),
    "torch.autograd.profiler.KinetoStepTracker._step_dict": Internal(
        "2.4", "2.15", "whether a profiler is in its warm-up", "all objects of the process are searched for one"
    ),
    "torch.autograd.profiler_util.EventList._build_tree": Internal(
        "2.4", "2.15", "torch's own list of events", "raw(), key_averages() and trace_profile_events raise an error"
    ),
    # Modules, operators and autograd
    "torch._C._get_tracing_state": Internal(
        "2.4", "2.15", "whether TorchScript is tracing", "labels are recorded in a trace of TorchScript"
    ),
    "torch.autograd._engine_run_backward": Internal(
        "2.4", "2.15", "when autograd's engine was called", "a backward pass begins with its first node"
    ),
    "torch.autograd.graph._engine_run_backward": Internal("2.4", "2.15", "the same", "the same"),
    "torch._C._current_graph_task_id": Internal(
        "2.4",
        "2.15",
        "whether backward is running",
        "what is computed again is a call of a model in torchprof run; layers of transformers have none of it",
    ),
    "torch._C._get_privateuse1_backend_name": Internal(
        "2.4", "2.15", "the name of a device that an extension adds", "such a device is unknown by its name"
    ),
    "torch._C._dispatch_has_kernel_for_dispatch_key": Internal(
        "2.4", "2.15", "which operators do no work of their own", "more operators are shown as not counted"
    ),
    "torch.utils._python_dispatch._disable_current_modes": Internal(
        "2.4", "2.15", "to count with a formula of torch's outside of modes", "it is called inside them"
    ),
    "torch.utils.checkpoint._StopRecomputationError": Internal(
        "2.4", "2.15", "that a recomputation stopped early on purpose", "a layer may be called unfinished"
    ),
    "torch.nn.Module._call_impl": Internal(
        "2.4", "2.15", "whether a module was compiled in place", "it is taken for one that was"
    ),
    "torch._library.custom_ops.OPDEFS": Internal(
        "2.4", "2.15", "the custom ops, which torch 2.15 calls past the profiler", "they have no events in torch 2.15"
    ),
    "torch._ops.OpOverload._enable_pyobj_dispatch": Internal("2.14", "2.15", "the same", "the same"),
    "torch.nn.modules.loss._Loss": Internal("2.4", "2.15", "which modules are losses", "a loss may be a model"),
    "torch.utils._pytree": Internal("2.4", "2.15", "the tensors in inputs and outputs", _AN_ERROR),
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": Internal(
        "2.4", "2.15", "the tensors inside a tensor", "only the outer one is put back after a measurement"
    ),
    # Jobs of several ranks
    "torch.distributed.distributed_c10d._get_default_group": Internal(
        "2.4", "2.15", "the group of all ranks, for gather()", "gather() raises an error"
    ),
    "torch.distributed.distributed_c10d._get_default_store": Internal(
        "2.4", "2.15", "the job's key-value store, for gather()", "gather() raises an error"
    ),
    "torch.distributed.distributed_c10d._world": Internal(
        "2.4", "2.15", "the process groups", "the groups of collectives are unknown"
    ),
    "torch._C._distributed_c10d._dump_fr_trace_json": Internal(
        "2.9", "2.15", "the process groups of gloo's collectives", "with several groups, waiting for ranks is unknown"
    ),
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": Internal(
        "2.11", "2.15", "the whole mesh of a job", "the mesh is that of the first sharded parameter"
    ),
    "torch.distributed.device_mesh._mesh_resources": Internal("2.4", "2.9", "the same", "the same"),
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": Internal(
        "2.4", "2.15", "the buckets of gradients", "exchanges of gradients belong to the whole model"
    ),
    f"{_PIPELINING}.stage._PipelineStageBase": Internal(
        "2.4", "2.15", "the stages of pipelines", "models of stages have no number, and pipelines are not recorded"
    ),
    f"{_PIPELINING}.schedules._wait_batch_p2p": Internal(
        "2.9", "2.15", "when a pipeline waits for other ranks", "pipelines are not recorded"
    ),
    # torch.compile
    f"{_FRAMES}.set_code_exec_strategy": Internal(
        "2.9", "2.15", "to keep torch.compile from compiling labels", "the ways of torch 2.4 to 2.6 are used"
    ),
    f"{_FRAMES}._FrameExecStrategy": Internal("2.9", "2.15", "the same", "the same"),
    f"{_FRAMES}._FrameAction": Internal("2.9", "2.15", "the same", "the same"),
    f"{_FRAMES}.skip_code": Internal("2.4", "2.6", "the same", "labels are compiled, with one graph break each"),
    f"{_FRAMES}.set_eval_frame": Internal("2.4", "2.15", "the same", "the same"),
    f"{_FRAMES}._debug_get_cache_entry_list": Internal(
        "2.4", "2.15", "whether a forward is compiled already", "source lines are left out for compiled models"
    ),
    "torch._dynamo.eval_frame.OptimizedModule": Internal(
        "2.4", "2.15", "whether a module was compiled", "it is taken for one that was not"
    ),
    "torch._dynamo.convert_frame.input_codes": Internal(
        "2.4", "2.15", "whether torch.compile gave a forward up", "source lines are left out for such a model"
    ),
    "torch._dynamo.callback": Internal(
        "2.4", "2.15", "when code is compiled", "the time of compilation is not set apart"
    ),
    "torch._dynamo.utils.get_compilation_metrics": Internal(
        "2.4", "2.15", "when and why code was compiled", "the reasons of compilations are left out"
    ),
    "torch._dynamo.utils.graph_break_reasons": Internal(
        "2.4", "2.15", "why compiled graphs end", "compiled regions have no names of functions"
    ),
    "torch._dynamo.symbolic_convert.InstructionTranslator": Internal(
        "2.4", "2.15", "the modules that a compiled function calls", "compile_layers finds no layers, and says so"
    ),
    "torch._functorch.config": Internal("2.4", "2.15", "the layers of compiled kernels", "the same"),
    "torch._inductor.config": Internal("2.4", "2.15", "the same", "the same"),
    "torch._inductor.compile_fx": Internal("2.4", "2.15", "the same", "the same"),
    "torch._inductor.debug": Internal("2.4", "2.15", "the same", "the same"),
    "torch._inductor.codegen.wrapper.PythonWrapperCodegen": Internal("2.6", "2.15", "the same", "the same"),
    "torch._inductor.scheduler.Scheduler": Internal("2.4", "2.15", "the same", "the same"),
    "torch._inductor.virtualized.V": Internal("2.4", "2.15", "the same", "the same"),
    "torch._inductor.output_code.CompiledFxGraph": Internal(
        "2.6", "2.15", "the work of compiled graphs", "it is not counted"
    ),
}


ATTRIBUTES: dict[str, Internal] = {
    # Of modules and their wrappers
    "_modules": Internal("2.4", "2.15", "the modules in a module", _AN_ERROR),
    "_parameters": Internal("2.4", "2.15", "the parameters of a module", _AN_ERROR),
    "_buffers": Internal("2.4", "2.15", "the buffers of a module", _AN_ERROR),
    "_forward_hooks": Internal("2.4", "2.15", "the hooks that split a layer over ranks", _AN_ERROR),
    "_forward_pre_hooks": Internal("2.4", "2.15", "the same", _AN_ERROR),
    "_get_name": Internal("2.4", "2.15", "a module's name in the pages of replaced profilers", _AN_ERROR),
    "_orig_mod": Internal("2.4", "2.15", "the module that torch.compile wrapped", "the wrapper is a layer"),
    "_fsdp_wrapped_module": Internal("2.4", "2.15", "the module that FSDP1 wrapped", "the wrapper is a layer"),
    "_checkpoint_wrapped_module": Internal("2.4", "2.15", "the module of a checkpoint", "the wrapper is a layer"),
    "_packed_params": Internal("2.4", "2.15", "that a layer is quantized", "its parameters are counted as 0"),
    "_delay_all_reduce_all_params": Internal("2.4", "2.15", "that a hook exchanges gradients", "they have no bucket"),
    "_ty": Internal("2.6", "2.15", "the class of a module of torch.export.unflatten", "it has torch's class"),
    "_compiled_call_impl": Internal("2.4", "2.15", "that it was compiled in place", "it is taken for one that was not"),
    # Of tensors and operators
    "_schema": Internal("2.4", "2.15", "the arguments and results of an operator", "a registered formula is not used"),
    "_version": Internal("2.4", "2.15", "whether a parameter was written to", _AN_ERROR),
    "_local_tensor": Internal("2.4", "2.15", "the part of a DTensor on this rank", "the size of the whole is taken"),
    "_opoverload": Internal("2.4", "2.15", "the operator of a custom op", "it has no events in torch 2.15"),
    "_pyobj_dispatcher": Internal("2.14", "2.15", "whether an operator is called past the profiler", "the same"),
    # Of meshes and groups
    "_get_root_mesh": Internal("2.11", "2.15", "the whole mesh of a job", "the mesh is that of the parameter"),
    "_get_fsdp_state": Internal("2.4", "2.15", "the parameters that FSDP2 gathers", "compiled code of them is unknown"),
    "_fsdp_param_groups": Internal("2.13", "2.15", "the same", "that of older versions is used"),
    "_fsdp_param_group": Internal("2.4", "2.15", "the same", "compiled code of them is unknown"),
    "_unsharded_param": Internal("2.4", "2.15", "the same", "compiled code of them is unknown"),
    "_module_info": Internal("2.4", "2.15", "the same", "compiled code of them is unknown"),
    # Of pipelines
    "_stage": Internal("2.4", "2.15", "the stage of a schedule", _AN_ERROR),
    "_stages": Internal("2.4", "2.15", "the stages of a schedule", _AN_ERROR),
    # Of compiled code
    "_dynamo_source": Internal("2.4", "2.15", "which module a compiled function took", "its layers are unknown"),
    "_torchdynamo_disable": Internal("2.4", "2.15", "that a forward is never compiled", "source lines are left out"),
    "_torchdynamo_inline": Internal("2.4", "2.15", "what torch.compile compiles instead", "labels are compiled"),
    "_torchdynamo_orig_callable": Internal("2.4", "2.15", "the class that a wrapper replaces", "it has its own name"),
    "_compile_fx_inner": Internal("2.6", "2.15", "the layers of compiled kernels", "compile_layers says so"),
    "_fx_graph_cache_key": Internal("2.4", "2.15", "the graph of a compiled kernel", "its layers are unknown"),
    "source_code": Internal("2.9", "2.15", "the layers of compiled code", "they are unknown"),
    "inductor_post_grad_graph_str": Internal("2.9", "2.15", "the work of compiled graphs", "it is not counted"),
    "_inductor_triton_kernel_to_post_grad_node_info": Internal("2.9", "2.15", "the same", "compile_layers says so"),
}
"""Attributes of objects that are at hand, by their names."""


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
    value = optional(name)
    if value is None:
        raise TorchprofError(
            f"torch {torch.__version__} has no {name} (for: {INTERNALS[name].use}), and torchprof cannot record "
            f"without it. Install torch {INTERNALS[name].since} to {INTERNALS[name].until}, or a newer torchprof."
        )
    return value
