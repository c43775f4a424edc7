"""A callback for Hugging Face's Trainer that profiles its steps, layer by layer. Needs ``transformers``."""

from __future__ import annotations

import weakref
from functools import partialmethod
from importlib import import_module
from typing import Any, ClassVar

from torch import nn

from torchprof.integrations.training_loop import LoopCallback

__all__ = ["ProfileCallback"]

try:
    TrainerCallback: Any = import_module("transformers").TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "torchprof.integrations.transformers needs Hugging Face transformers: pip install 'transformers[torch]'"
    ) from None


class ProfileCallback(LoopCallback, TrainerCallback):  # type: ignore[misc]  # its type is unknown without the package
    """Profile the model of a Trainer, layer by layer: ``Trainer(..., callbacks=[ProfileCallback()])``.

    ``stage``: "train" profiles the steps of ``train()``; evaluation in between is not recorded. "evaluate" profiles the
    batches of ``evaluate()`` and ``predict()``, and of evaluation during training, without the first of each, since the
    Trainer calls its callbacks only after a batch. A step is the Trainer's: all batches whose gradients are
    accumulated, and the optimizer's step. ``options``: see ``LoopCallback``.

    A Trainer that raises or is interrupted does not call its callbacks, and the Profile stays open. So train in a
    block, ``with callback: trainer.train()``, or call ``stop()`` afterwards. The next training in this process also
    calls ``stop()``.
    """

    STAGES = ("train", "evaluate")
    NOT_A_STAGE = "cannot be profiled: choose 'train' or 'evaluate'."
    _all: ClassVar[weakref.WeakSet[ProfileCallback]] = weakref.WeakSet()

    def __init__(self, stage: str = "train", **options: Any) -> None:
        super().__init__(stage, **options)
        ProfileCallback._all.add(self)

    def stop(self) -> None:
        """End the Profile after the Trainer has raised. Does nothing if the stage has ended."""
        self._end_loop()

    def __enter__(self) -> ProfileCallback:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.stop()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        for callback in ProfileCallback._all:  # a Trainer that has raised may have left them open
            callback.stop()

    def on_step_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        if self._stage == "train":
            self._begin_step(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_step_of("train")
        self._pause_before_evaluation(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pause_before_evaluation(control)

    def _pause_before_evaluation(self, control: Any) -> None:
        if self._stage == "train" and control.should_evaluate:
            self._pause()

    def on_prediction_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        if self._stage == "train":
            self._pause()  # an evaluation that control.should_evaluate did not announce
        else:
            self._end_step()
            self._begin_step(model, first=1)

    on_train_end = partialmethod(LoopCallback._end_loop_of, "train")
    on_evaluate = on_predict = partialmethod(LoopCallback._end_loop_of, "evaluate")
