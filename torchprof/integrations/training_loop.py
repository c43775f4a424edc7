"""The base of the callbacks for other libraries' loops: it profiles a loop, controlled step by step."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.profiler import ProfilerAction

from torchprof import Profile, Run, TorchprofError

_WAIT, _WARMUP, _ACTIVE = 1, 1, 3  # the default schedule, in steps; it is not repeated


class LoopCallback:
    """Profiles the loop of one ``stage``, of the ``STAGES`` of a library, from its first step to its end.

    A step lasts until the next step begins, so that it includes loading the next batch. It ends earlier at ``_pause``,
    which the callback calls before work that is not recorded (validation).
    ``on_trace_ready`` and ``options``: arguments of ``Profile``. Without a ``schedule``, the first step is skipped, one
    is for warm-up, three are recorded, and then the Profile ends: the rest of the loop runs without labels. With
    ``dirpath``, the run is saved in that folder as ``<stage>-rank<rank>.json``; the folder is created if needed.

    Raises TypeError for options that Profile does not have, TorchprofError for those that do not apply here.
    """

    STAGES: ClassVar[tuple[str, ...]]
    NOT_A_STAGE: ClassVar[str]
    """The end of the sentence that begins with another ``stage``."""

    def __init__(
        self,
        stage: str,
        *,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[[Profile], Any] | None = None,
        dirpath: str | PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if stage not in self.STAGES:
            raise TorchprofError(f"stage={stage!r} {self.NOT_A_STAGE}")
        if schedule is not None and not callable(schedule):
            raise TorchprofError(
                f"schedule={schedule!r:.80} is not a schedule: use for example "
                "torch.profiler.schedule(wait=1, warmup=1, active=3)."
            )
        if "warmup" in options:
            raise TorchprofError("warmup= counts calls of the model, and here steps count: use schedule=.")
        Profile([], **options)  # raises for unknown options before training begins
        super().__init__()
        self._stage = stage
        self._recorded = schedule
        self._on_trace_ready = on_trace_ready
        self._dirpath = dirpath
        self._options = options
        self._profile: Profile | None = None
        self._begun = False  # whether the loop has begun its first step
        self._open = False  # whether the Profile is open
        self._step = 0  # the number of the current step
        self._ended = False  # whether the current step has ended, and the next one has not begun
        self._paused = False

    @property
    def profile(self) -> Profile:
        """The Profile. Raises TorchprofError if the stage has not run a step."""
        if self._profile is None:
            raise TorchprofError(f"Nothing was profiled: this callback has seen no step of {self._stage!r}.")
        return self._profile

    @property
    def run(self) -> Run:
        """The result. Raises TorchprofError before the end of the stage, and with ``enabled=False``."""
        return self.profile.run

    def _begin_step(self, model: nn.Module, first: int = 0) -> None:
        """Begin a step. The loop's first step has the number ``first``. If the last step has not ended, because its
        batch was skipped, that step continues instead."""
        if not self._begun:
            self._step = first
            self._ended = self._paused = False
            self._profile = Profile(model, schedule=self._action, on_trace_ready=self._on_trace_ready, **self._options)
            self._profile.start()
            self._begun = self._open = True
        elif self._open and self._ended:
            self._ended = self._paused = False
            self._step += 1
            self._end_step_of_profile(self._step)
            if self._recorded is None and self._step >= _WAIT + _WARMUP + _ACTIVE:
                self._leave()

    def _end_step(self) -> None:
        """End the step. The time until the next step begins is still part of it."""
        self._ended = True

    def _pause(self) -> None:
        """Stop recording until the next step begins. A cycle of recorded steps ends here."""
        if self._open and self._ended and not self._paused:
            self._paused = True
            self._end_step_of_profile(self._step + 1)

    def _end_step_of_profile(self, ended: int) -> None:
        """``ended``: how many steps of the loop have ended. The Profile counts pauses, too: its number is set."""
        self.profile.step_num = ended - 1
        self.profile.step()

    def _stop(self) -> None:
        """End the loop, also after an error. A step that has not ended is not counted, but its work is recorded."""
        self._begun = False
        try:
            self._pause()
        finally:
            self._leave()

    def _leave(self) -> None:
        if not self._open:
            return
        self._open = False
        self.profile.stop()
        if self._dirpath is not None and self.profile.enabled:
            folder = Path(self._dirpath)
            folder.mkdir(parents=True, exist_ok=True)
            self.run.save(folder / f"{self._stage}-rank{self.run.meta.rank}.json")

    def _action(self, _: int) -> ProfilerAction:
        """The action for the current step. The Profile's own step number is not used: it also counts pauses."""
        if self._paused:
            return ProfilerAction.NONE
        recorded = self._recorded or torch.profiler.schedule(wait=_WAIT, warmup=_WARMUP, active=_ACTIVE, repeat=1)
        return recorded(self._step)

    def _step_ended(self, stage: str, *args: Any, **kwargs: Any) -> None:
        if stage == self._stage:
            self._end_step()

    def _stage_ended(self, stage: str, *args: Any, **kwargs: Any) -> None:
        if stage == self._stage:
            self._stop()
