"""A recording of a model from a start to a stop, or of one call: what flops-profiler and DeepSpeed both offer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchprof import Profile, TorchprofError
from torchprof.encoding import encodable
from torchprof.integrations.conventions import Convention
from torchprof.integrations.model_figures import ModelFigures, modules_of, parameters_of


class ModelRecording:
    """Records a model between ``start_profile`` and ``stop_profile``.

    Figures can be read and printed from the start to ``end_profile``; reading them stops a recording that is going on.
    A process has one recording at a time: if the code after ``start_profile`` may raise, put ``end_profile`` into a
    ``finally``. A copy of the recording, as of its model, has no figures.
    """

    convention: Convention
    started = False
    _ignored: tuple[Any, ...] = ()
    _profile: Profile | None = None
    _figures: ModelFigures | None = None

    def __init__(self, model: nn.Module) -> None:
        check_model(model)
        self.model = model

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model}

    def start_profile(self, ignore_list: Iterable[Any] | None = None) -> None:
        """Start profiling. Earlier figures and a recording that is going on are dropped. ``ignore_list``: classes of
        modules, or modules of the model. Their work is not counted; their time is. Raises TorchprofError for anything
        else, and if another profiler is active."""
        ignored = _checked_ignored(ignore_list, self.model)
        self._drop()
        profile = Profile(self.model, with_flops=True)
        profile.__enter__()
        self._profile, self._ignored, self.started = profile, ignored, True

    def stop_profile(self) -> None:
        """Stop profiling. Does nothing if it has not been started."""
        profile = self._profile
        if profile is not None:
            self._drop()
            self._figures = ModelFigures(profile.run, self.model, self.convention, self._ignored)

    def reset_profile(self) -> None:
        """Drop the figures. If a recording is going on, start again."""
        if self._profile is not None:
            self.start_profile(self._ignored)
        self._figures = None

    def end_profile(self) -> None:
        """Stop profiling, and drop the figures."""
        self._drop()
        self.started = False

    def figures(self) -> ModelFigures:
        """The figures of the recording, which ends if it is still going on. Raises TorchprofError if there are none."""
        self.stop_profile()
        if self._figures is None:
            raise TorchprofError(
                "There are no figures: call start_profile(), then the model. They stay until end_profile()."
            )
        return self._figures

    def record_call(
        self,
        call: Callable[..., Any],
        inputs: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]],
        warm_up: int,
        ignore_modules: Iterable[Any] | None,
    ) -> None:
        """Record one call of the model in eval mode, after ``warm_up`` calls that are not recorded. Then every module
        is in the mode (train or eval) that it had before. ``inputs``: makes the arguments of a call."""
        # A frozen ScriptModule has no attribute ``training``.
        modes = [(module, module.training) for module in modules_of(self.model) if hasattr(module, "training")]
        try:
            for module, _ in modes:
                module.training = False  # a model may override model.eval() to do more
            for _ in range(warm_up):
                args, kwargs = inputs()
                call(*args, **kwargs)
            args, kwargs = inputs()
            self.start_profile(ignore_modules)
            call(*args, **kwargs)
            self.stop_profile()
        except BaseException:
            self.end_profile()
            raise
        finally:
            for module, mode in modes:
                module.training = mode

    def _drop(self) -> None:
        """End the recording that is going on, and drop the figures."""
        profile, self._profile, self._figures = self._profile, None, None
        if profile is not None:
            profile.__exit__(None, None, None)


def ones(model: nn.Module, name: str, sizes: Any, batch: Sequence[int] = ()) -> torch.Tensor:
    """A tensor of ones with the dtype and the device of the model's first parameter of a floating or complex type.
    ``batch`` are sizes before those of the user. Raises TorchprofError, with the argument's ``name``, for bad sizes."""
    listed = list(sizes) if isinstance(sizes, (tuple, list)) else []
    if not listed or not all(is_whole(size) and size >= 0 for size in listed):
        raise TorchprofError(f"{name} is a tuple of sizes, whole numbers from 0 on, (3, 224, 224), not {sizes!r:.80}.")
    floating = (param for param in parameters_of(model) if param.is_floating_point() or param.is_complex())
    like = next(floating, None)
    dtype, device = (None, None) if like is None else (like.dtype, like.device)
    return torch.ones((*batch, *listed), dtype=dtype, device=device)


def show(text: str) -> None:
    print(encodable(text, sys.stdout))


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int) -> None:
    if not is_whole(value) or value < least:
        raise TorchprofError(f"{name}={value!r} should be a whole number from {least} on.")


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = f" Make one first: {model.__name__}(...)." if isinstance(model, type) else ""
        raise TorchprofError(f"The model has to be a torch.nn.Module, not {model!r:.80}.{hint}")


def _checked_ignored(ignore: Any, model: nn.Module) -> tuple[Any, ...]:
    if ignore is None:
        return ()
    is_list = isinstance(ignore, Iterable) and not isinstance(ignore, (str, nn.Module))
    ignored = tuple(ignore) if is_list else (ignore,)
    for item in ignored:
        is_class = isinstance(item, type) and issubclass(item, nn.Module)
        if not is_class and not any(item is module for module in modules_of(model)):
            raise TorchprofError(
                f"{item!r:.80} cannot be ignored: give classes of modules, [torch.nn.Dropout], or modules of the model."
            )
    return ignored
