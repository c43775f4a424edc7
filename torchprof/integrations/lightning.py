"""A callback for Lightning's Trainer that profiles its batches, layer by layer. Needs ``lightning``."""

from __future__ import annotations

import sys
from functools import partialmethod
from importlib import import_module
from typing import Any

from torchprof.integrations.training_loop import LoopCallback

__all__ = ["ProfileCallback"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _base() -> type:
    """Lightning's Callback class. If both of Lightning's packages are imported, a subclass of both Callback classes.
    This is needed because a Trainer accepts only callbacks of its own package."""
    imported = [sys.modules[name] for name in _PACKAGES if sys.modules.get(name)]
    for name in () if imported else _PACKAGES:
        try:
            imported = imported or [import_module(name)]
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    if not imported:
        raise ImportError("torchprof.integrations.lightning needs Lightning: pip install lightning")
    return type("Callback", tuple(package.Callback for package in imported), {})


Callback: Any = _base()


class ProfileCallback(LoopCallback, Callback):  # type: ignore[misc]  # its type is unknown without the package
    """Profile the LightningModule, layer by layer: ``Trainer(callbacks=[ProfileCallback()])``.

    ``stage``: what is profiled, in Lightning's terms: "fit" (training batches only; validation during training is not
    recorded), "validate" (also validation during ``fit``, but not the sanity check), "test" or "predict". A step is a
    batch, also if gradients are accumulated over several batches. ``options``: see ``LoopCallback``.
    """

    STAGES = ("fit", "validate", "test", "predict")
    NOT_A_STAGE = "is not a stage of Lightning. Choose from 'fit', 'validate', 'test', 'predict'."

    def __init__(self, stage: str = "fit", **options: Any) -> None:
        super().__init__(stage, **options)

    def _begin_step_of(self, stage: str, trainer: Any, pl_module: Any, *args: Any) -> None:
        if stage == self._stage and not trainer.sanity_checking:
            self._begin_step(pl_module)

    on_train_batch_start = partialmethod(_begin_step_of, "fit")
    on_train_batch_end = partialmethod(LoopCallback._end_step_of, "fit")
    on_train_end = partialmethod(LoopCallback._end_loop_of, "fit")
    on_validation_batch_start = partialmethod(_begin_step_of, "validate")
    on_validation_batch_end = partialmethod(LoopCallback._end_step_of, "validate")
    on_validation_end = partialmethod(LoopCallback._end_loop_of, "validate")
    on_test_batch_start = partialmethod(_begin_step_of, "test")
    on_test_batch_end = partialmethod(LoopCallback._end_step_of, "test")
    on_test_end = partialmethod(LoopCallback._end_loop_of, "test")
    on_predict_batch_start = partialmethod(_begin_step_of, "predict")
    on_predict_batch_end = partialmethod(LoopCallback._end_step_of, "predict")
    on_predict_end = partialmethod(LoopCallback._end_loop_of, "predict")

    def on_validation_start(self, *args: Any) -> None:
        if self._stage == "fit":
            self._pause()

    def on_exception(self, *args: Any) -> None:
        self._end_loop()
