"""The methods for profiling that DeepSpeed's early profiler adds to a model."""

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
from torchprof.integrations.modules import parameter_sizes


class ProfileMethods:
    """Profiles one model. ``add_profile_methods`` adds the methods of this class to the model.

    Reading figures while profiling ends the session, adds its figures, and starts the next session. A copy or a pickle
    of the model has the methods, but not the recorded figures.
    """

    _profile: Profile | None = None
    _recorded: Recorded | None = None
    _ignored: frozenset[type] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model}

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Start profiling, and drop earlier figures.

        The self work of modules whose type is in ``ignore_list`` does not count. Raises TorchprofError if another
        profiler is active, and for items that are not types of modules.
        """
        ignored = checked_ignored_types(ignore_list)
        self.abandon()
        self._begin()
        self._ignored, self._recorded = ignored, Recorded()

    def stop_profile(self) -> None:
        """Stop profiling. The figures stay until ``end_profile`` or the next start. A second stop does nothing."""
        self._started()
        self._close()

    def end_profile(self) -> None:
        """Stop profiling, drop the figures, and remove the methods from the model."""
        self.abandon()
        self._recorded = None
        for name in _METHODS:
            if getattr(vars(self.model).get(name), "__self__", None) is self:
                del vars(self.model)[name]

    def get_total_flops(self) -> int | None:
        """The multiply-adds of the recorded forwards; None if there are none."""
        return self._read().total().known_macs

    def get_total_duration(self) -> float | None:
        """The seconds of the recorded forwards; None if there are none."""
        return self._read().total().seconds

    def get_total_params(self) -> int | None:
        """The number of parameters, each counted once; None if a lazy module has not made its parameters yet."""
        return known_sum(parameter_sizes(self.model).values())

    compute_total_flops = get_total_flops
    compute_total_duration = get_total_duration
    compute_total_params = get_total_params

    def print_model_profile(self) -> None:
        """Print the model's repr with the figures of each module, and notes on how they were counted."""
        self.page().show(-1, 1, top=False)

    def print_model_aggregated_profile(self, depth: int = -1, top_num: int = 3) -> None:
        """Print the ``top_num`` classes of modules at a depth with the most multiply-adds, parameters and time.

        ``depth`` 0 is the model itself. -1, or more than the largest depth, is the largest depth.
        """
        check_whole("depth", depth, -1)
        check_whole("top_num", top_num, 1)
        print(encodable(self.page().top(depth, top_num), sys.stdout))

    def page(self) -> Page:
        return Page(self.model, self._read())

    def abandon(self) -> None:
        """End the open session, if there is one, and drop its figures."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.__exit__(None, None, None)

    def _begin(self) -> None:
        profile = Profile(self.model, with_flops=True)
        profile.__enter__()
        self._profile = profile

    def _close(self) -> None:
        profile = self._profile
        self.abandon()
        if profile is not None:
            self._started().add(profile, self._ignored)

    def _started(self) -> Recorded:
        """The figures of the ended sessions. Raises TorchprofError before ``start_profile``."""
        if self._recorded is None:
            raise TorchprofError(
                "Nothing was recorded: call the model's start_profile(), then the model. After end_profile() its "
                "figures and methods are gone; add_profile_methods(model) brings the methods back."
            )
        return self._recorded

    def _read(self) -> Recorded:
        """All figures so far; a session that is open is ended and the next one started."""
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
    """Add methods for profiling to a model, and return the model.

    They are ``start_profile(ignore_list=None)``, ``stop_profile()``, ``end_profile()``, ``get_total_flops()``,
    ``get_total_duration()`` (seconds), ``get_total_params()``, these three also as ``compute_total_…``,
    ``print_model_profile()`` and ``print_model_aggregated_profile(depth=-1, top_num=3)``. Forwards between start and
    stop add up. Figures can be read and printed from start to end; ``end_profile`` removes the methods. A model that
    already has the methods is not changed. Raises TorchprofError for anything but a module, and if the model has
    another attribute with one of these names.
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
