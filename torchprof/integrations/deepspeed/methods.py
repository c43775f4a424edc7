"""The calls of DeepSpeed's profiler on a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torchprof import Profile, TorchprofError
from torchprof.encoding import fitting
from torchprof.integrations.deepspeed.arguments import check_model, check_whole, checked_types, is_whole
from torchprof.integrations.deepspeed.counting import Recorded
from torchprof.integrations.deepspeed.page import Page, modules_of, params_of, sizes_of, sum_of_sizes
from torchprof.integrations.deepspeed.strings import params_to_string

# Profiling a model


class Recording:
    """The profiling of one model, with the methods that ``add_profile_methods`` gives it.

    Reading while it is on ends the session, adds its figures to what there was, and begins the next one.
    A copy or a pickle of the model gets the methods without what was recorded.
    """

    _profile: Profile | None = None
    _recorded: Recorded | None = None
    _ignored: frozenset[type] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model}

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Begin to profile; what was recorded before is forgotten.

        The own work of modules whose type is in ``ignore_list`` does not count. Raises TorchprofError while another
        profiler is on, and for a list of anything else.
        """
        ignored = checked_types(ignore_list)
        self.abandon()
        self._begin()
        self._ignored, self._recorded = ignored, Recorded()

    def stop_profile(self) -> None:
        """End the profiling. The figures stay until ``end_profile`` or the next start. A second stop does nothing."""
        self._known()
        self._close()

    def end_profile(self) -> None:
        """End the profiling, forget the figures, and take the methods off the model."""
        self.abandon()
        self._recorded = None
        for name in _METHODS:
            if getattr(vars(self.model).get(name), "__self__", None) is self:
                del vars(self.model)[name]

    def get_total_flops(self) -> int | None:
        """The multiply-adds of the forwards that were recorded; None where none was."""
        return self._read().total().known_macs

    def get_total_duration(self) -> float | None:
        """The seconds of the forwards that were recorded; None where none was."""
        return self._read().total().seconds

    def get_total_params(self) -> int | None:
        """The parameters of the model, shared ones once; None where a lazy module has not made them yet."""
        return sum_of_sizes(sizes_of(self.model))

    compute_total_flops = get_total_flops
    compute_total_duration = get_total_duration
    compute_total_params = get_total_params

    def print_model_profile(self) -> None:
        """Print the model's repr with the figures of each module, and how they were counted."""
        self.page().show(-1, 1, top=False)

    def print_model_aggregated_profile(self, depth: int = -1, top_num: int = 3) -> None:
        """Print the ``top_num`` kinds of modules at a depth with most multiply-adds, parameters and time.

        ``depth`` 0 is the model itself; -1, or more than there is, are the innermost modules.
        """
        check_whole("depth", depth, -1)
        check_whole("top_num", top_num, 1)
        print(fitting(self.page().top(depth, top_num), sys.stdout))

    def page(self) -> Page:
        return Page(self.model, self._read())

    def abandon(self) -> None:
        """End a session that is on, and drop what it saw."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.__exit__(None, None, None)

    def _begin(self) -> None:
        held = (held for module in modules_of(self.model) for held in (module._parameters, module._buffers))
        on_cuda = any(tensor is not None and tensor.is_cuda for tensors in held for tensor in tensors.values())
        profile = Profile(self.model, with_flops=True, use_cuda=on_cuda)
        profile.__enter__()
        self._profile = profile

    def _close(self) -> None:
        profile = self._profile
        self.abandon()
        if profile is not None:
            self._known().add(profile, self._ignored)

    def _known(self) -> Recorded:
        if self._recorded is None:
            raise TorchprofError(
                "Nothing was recorded: call the model's start_profile(), then the model. After end_profile() its "
                "figures and methods are gone; add_profile_methods(model) brings the methods back."
            )
        return self._recorded

    def _read(self) -> Recorded:
        """What was recorded so far."""
        recorded = self._known()
        if self._profile is not None:
            self._close()
            self._begin()
        return recorded


_METHODS = (
    "start_profile",
    "stop_profile",
    "end_profile",
    "compute_total_flops",
    "compute_total_duration",
    "compute_total_params",
    "get_total_flops",
    "get_total_duration",
    "get_total_params",
    "print_model_profile",
    "print_model_aggregated_profile",
)


def add_profile_methods(model: nn.Module) -> nn.Module:
    """Give a model methods to profile it, and return it.

    ``start_profile(ignore_list=None)``, ``stop_profile()``, ``end_profile()``, ``get_total_flops()``,
    ``get_total_duration()`` (seconds), ``get_total_params()``, each of these three as ``compute_total_…`` as well,
    ``print_model_profile()`` and ``print_model_aggregated_profile(depth=-1, top_num=3)``. Forwards between start and
    stop add up. Reading and printing work from start to end; ``end_profile`` takes the methods off again. A model that
    has them keeps those it has. Raises TorchprofError for what is no module, and where the model has an attribute of
    such a name.
    """
    check_model(model)
    owners = {name: getattr(vars(model).get(name), "__self__", None) for name in _METHODS}
    if any(isinstance(owner, Recording) and owner.model is model for owner in owners.values()):
        return model
    taken = [name for name, owner in owners.items() if name in vars(model) and not isinstance(owner, Recording)]
    if taken:
        raise TorchprofError(
            f"This {type(model).__name__} has an attribute of its own by the name {taken[0]!r}: rename it, or use "
            "get_model_profile(model, …) or from_config(…), which add nothing to the model."
        )
    recording = Recording(model)
    vars(model).update({name: getattr(recording, name) for name in _METHODS})
    return model


def get_model_profile(
    model: nn.Module,
    input_res: Any,
    input_constructor: Callable[[Any], Mapping[str, Any]] | None = None,
    print_profile: bool = True,
    print_aggregated_profile: bool = True,
    depth: int = -1,
    top_num: int = 3,
    warm_up: int = 10,
    as_strings: bool = True,
    ignore_modules: Iterable[type] | None = None,
) -> tuple[int | str | None, int | str | None]:
    """Profile one forward of a model in eval mode, print it, and return (multiply-adds, parameters).

    ``input_res``: the sizes of one example; the model is called on a batch of one such tensor of ones, of the type and
    on the device of its parameters. With ``input_constructor`` it is ``model(**input_constructor(input_res))``.
    ``depth`` and ``top_num`` are for the aggregated profile: 0 is the model itself, -1 the innermost modules.
    ``warm_up`` calls come first and are not measured. ``as_strings`` returns text (``"429.25 KMac"``, ``"61.71 k"``).
    The own work of modules whose type is in ``ignore_modules`` does not count. Whether gradients are recorded is for
    the caller to say. Raises TorchprofError for bad arguments; what the model raises passes through. The train/eval
    state of every module comes back.
    """
    check_model(model)
    check_whole("depth", depth, -1)
    check_whole("top_num", top_num, 1)
    check_whole("warm_up", warm_up, 0)
    checked_types(ignore_modules)
    inputs = _inputs_from(input_constructor, input_res) if input_constructor is not None else _ones(model, input_res)
    recording = Recording(model)
    # A frozen ScriptModule has no mode.
    modes = [(module, module.training) for module in modules_of(model) if hasattr(module, "training")]
    try:
        for module, _ in modes:
            module.training = False  # not model.eval(): a model may do more in that than change the mode
        for _ in range(warm_up):
            args, kwargs = inputs()
            model(*args, **kwargs)
        args, kwargs = inputs()
        recording.start_profile(ignore_modules)
        model(*args, **kwargs)
        recording.stop_profile()
    finally:
        recording.abandon()
        for module, mode in modes:
            module.training = mode
    page, params = recording.page(), recording.get_total_params()
    page.show(depth, top_num, tree=print_profile, top=print_aggregated_profile)
    if as_strings:
        return page.total.macs_text(precision=2), params_to_string(params)
    return page.total.known_macs, params


_Inputs = Callable[[], "tuple[tuple[Any, ...], Mapping[str, Any]]"]


def _ones(model: nn.Module, input_res: Any) -> _Inputs:
    """What makes a batch of one example of these sizes."""
    sizes = list(input_res) if isinstance(input_res, (tuple, list)) else []
    if not sizes or not all(is_whole(size) and size > 0 for size in sizes):
        raise TorchprofError(
            f"input_res={input_res!r:.80} are no sizes of one example: write a tuple of numbers from 1 on, without the "
            "batch, (3, 224, 224). For inputs of another kind give an input_constructor that makes them."
        )
    floating = (param for param in params_of(model) if param.is_floating_point() or param.is_complex())
    like = next(floating, None)
    dtype, device = (None, None) if like is None else (like.dtype, like.device)
    return lambda: ((torch.ones((1, *sizes), dtype=dtype, device=device),), {})


def _inputs_from(constructor: Callable[[Any], Mapping[str, Any]], input_res: Any) -> _Inputs:
    if not callable(constructor):
        raise TorchprofError(
            f"input_constructor={constructor!r} cannot be called: give a function that takes input_res and returns the "
            "model's keyword arguments as a dict."
        )

    def inputs() -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        made = constructor(input_res)
        if not isinstance(made, Mapping) or not all(isinstance(name, str) for name in made):
            raise TorchprofError(
                f"input_constructor returned a {type(made).__name__} where a dict of the model's keyword arguments "
                'belongs: the model is called as model(**input_constructor(input_res)). Return {"x": tensor}.'
            )
        return (), made

    return inputs
