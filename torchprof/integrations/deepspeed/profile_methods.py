"""The profiling methods of a model, as DeepSpeed's early profiler adds them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from torchprof import Profile, TorchprofError
from torchprof.encoding import encodable
from torchprof.integrations.deepspeed.arguments import check_model, check_whole, checked_ignored_types
from torchprof.integrations.deepspeed.page import Page
from torchprof.integrations.deepspeed.recorded import Recorded
from torchprof.integrations.figures import known_sum
from torchprof.integrations.modules import modules_of, parameter_sizes


class ProfileMethods:
    """Profiles one model; its methods are those that ``add_profile_methods`` adds to the model.

    Reading figures while it is profiling ends the session, adds its figures, and begins the next session.
    A copy or a pickle of the model gets the methods without the recorded figures.
    """

    _profile: Profile | None = None
    _recorded: Recorded | None = None
    _ignored: frozenset[type] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model}

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Begin to profile; earlier figures are forgotten.

        The own work of modules whose type is in ``ignore_list`` does not count. Raises TorchprofError while another
        profiler is on, and for a list of anything else.
        """
        ignored = checked_ignored_types(ignore_list)
        self.abandon()
        self._begin()
        self._ignored, self._recorded = ignored, Recorded()

    def stop_profile(self) -> None:
        """End the profiling. The figures stay until ``end_profile`` or the next start. A second stop does nothing."""
        self._started()
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
        return known_sum(parameter_sizes(self.model).values())

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
        print(encodable(self.page().top(depth, top_num), sys.stdout))

    def page(self) -> Page:
        return Page(self.model, self._read())

    def abandon(self) -> None:
        """End an open session and drop its figures."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.__exit__(None, None, None)

    def _begin(self) -> None:
        tensors = (
            tensor
            for module in modules_of(self.model)
            for tensor in (*module._parameters.values(), *module._buffers.values())
        )
        on_cuda = any(tensor is not None and tensor.is_cuda for tensor in tensors)
        profile = Profile(self.model, with_flops=True, use_cuda=on_cuda)
        profile.__enter__()
        self._profile = profile

    def _close(self) -> None:
        profile = self._profile
        self.abandon()
        if profile is not None:
            self._started().add(profile, self._ignored)

    def _started(self) -> Recorded:
        """The figures of the sessions that have ended. Raises TorchprofError before ``start_profile``."""
        if self._recorded is None:
            raise TorchprofError(
                "Nothing was recorded: call the model's start_profile(), then the model. After end_profile() its "
                "figures and methods are gone; add_profile_methods(model) brings the methods back."
            )
        return self._recorded

    def _read(self) -> Recorded:
        """The figures recorded so far."""
        recorded = self._started()
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
    if any(isinstance(owner, ProfileMethods) and owner.model is model for owner in owners.values()):
        return model
    taken = [name for name, owner in owners.items() if name in vars(model) and not isinstance(owner, ProfileMethods)]
    if taken:
        raise TorchprofError(
            f"This {type(model).__name__} has an attribute of its own by the name {taken[0]!r}: rename it, or use "
            "get_model_profile(model, …) or from_config(…), which add nothing to the model."
        )
    methods = ProfileMethods(model)
    vars(model).update({name: getattr(methods, name) for name in _METHODS})
    return model
