"""A callback for Lightning's Trainer that profiles its batches, layer by layer. Needs ``lightning``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from os import PathLike
from typing import Any

from torch import nn
from torch.profiler import ProfilerAction

from torchprof import Profile, Run, TorchprofError
from torchprof.integrations.training_loop import LoopProfile

__all__ = ["ProfileCallback"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_STAGES = ("fit", "validate", "test", "predict")


def _base() -> type:
    """Lightning's Callback class. If both of Lightning's packages are imported, a subclass of both Callback classes.

    This is needed because a Trainer accepts only callbacks of its own package.
    """
    imported = [sys.modules[name] for name in _PACKAGES if sys.modules.get(name)]
    for name in _PACKAGES:
        if imported:
            break
        try:
            imported = [import_module(name)]
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    if not imported:
        raise ImportError("torchprof.integrations.lightning needs Lightning: pip install lightning")
    return type("Callback", tuple(package.Callback for package in imported), {})


Callback: Any = _base()


class ProfileCallback(Callback):  # type: ignore[misc]  # its type is unknown without the package
    """Profile the LightningModule, layer by layer: ``Trainer(callbacks=[ProfileCallback()])``.

    ``stage``: what is profiled, in Lightning's terms: "fit" (training batches only; validation during training is not
    recorded), "validate" (also validation during ``fit``, but not the sanity check), "test" or "predict".

    Each batch is a step, also if gradients are accumulated over several batches. ``schedule`` gets the number of a
    batch and returns whether it is recorded; see ``torchprof.Profile``. Without ``schedule``, the first batch of each
    stage is skipped, the second is for warm-up, three are recorded, and the rest runs as without this callback. If
    validation begins in the middle of a cycle of recorded batches, the cycle ends; another begins after validation.

    ``on_trace_ready`` is called with the Profile at the end of each cycle. ``options`` are other arguments of Profile:
    ``device``, ``profile_memory``, ``with_flops``, ``paths``, … With ``dirpath``, each rank
    saves its run in that folder, as ``<stage>-rank<rank>.json``.

    Afterwards, ``run`` is the result and ``profile`` the Profile of the last time that the stage ran. If the stage
    raised or was interrupted, they have what was recorded until then. Nothing is printed; use ``print(callback.run)``.
    """

    def __init__(
        self,
        stage: str = "fit",
        *,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[[Profile], Any] | None = None,
        dirpath: str | PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if stage not in _STAGES:
            raise TorchprofError(
                f"stage={stage!r} is not a stage of Lightning. Choose from {', '.join(map(repr, _STAGES))}."
            )
        super().__init__()
        self._stage = stage
        self._loop = LoopProfile(stage, schedule, on_trace_ready, dirpath, options)

    @property
    def profile(self) -> Profile:
        """The Profile. Raises TorchprofError if the stage has not run a batch."""
        return self._loop.profile

    @property
    def run(self) -> Run:
        """The result. Raises TorchprofError before the end of the stage, and with ``enabled=False``."""
        return self._loop.run

    def _begin(self, stage: str, module: nn.Module) -> None:
        if stage == self._stage:
            self._loop.begin_step(module)

    def _end(self, stage: str) -> None:
        if stage == self._stage:
            self._loop.end_step()

    def _stop(self, stage: str) -> None:
        if stage == self._stage:
            self._loop.stop()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._begin("fit", pl_module)

    def on_train_batch_end(self, *args: Any) -> None:
        self._end("fit")

    def on_train_end(self, *args: Any) -> None:
        self._stop("fit")

    def on_validation_start(self, *args: Any) -> None:
        if self._stage == "fit":
            self._loop.pause()

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._begin("validate", pl_module)

    def on_validation_batch_end(self, *args: Any) -> None:
        self._end("validate")

    def on_validation_end(self, *args: Any) -> None:
        self._stop("validate")

    def on_test_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._begin("test", pl_module)

    def on_test_batch_end(self, *args: Any) -> None:
        self._end("test")

    def on_test_end(self, *args: Any) -> None:
        self._stop("test")

    def on_predict_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._begin("predict", pl_module)

    def on_predict_batch_end(self, *args: Any) -> None:
        self._end("predict")

    def on_predict_end(self, *args: Any) -> None:
        self._stop("predict")

    def on_exception(self, *args: Any) -> None:
        self._loop.stop()
