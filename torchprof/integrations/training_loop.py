"""The base of the callbacks for other libraries' training loops."""

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

    ``schedule`` gets the number of a step and returns whether it is recorded; see ``torchprof.Profile``. Without one,
    the first step is skipped, one is for warm-up, three are recorded, and then the Profile ends: the rest of the loop
    runs without labels. ``on_trace_ready`` is called with the Profile at the end of each cycle. With ``dirpath``, each
    rank saves its run in that folder, as ``<stage>-rank<rank>.json``. ``options`` are other arguments of ``Profile``.

    Afterwards, ``run`` is the result and ``profile`` the Profile of the last time that the stage ran. If the stage
    raised or was interrupted, they have what was recorded until then. Nothing is printed; use ``print(callback.run)``.

    A callback calls ``_begin_step``, ``_end_step``, ``_end_loop``, and ``_pause`` before work that is not recorded
    (validation), which ends a cycle. A step lasts until a pause, or until the next step begins, so that it includes
    loading the next batch.

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
        self._schedule = schedule
        self._on_trace_ready = on_trace_ready
        self._dirpath = dirpath
        self._options = options
        self._profile: Profile | None = None
        self._has_begun = False  # whether the loop has begun its first step
        self._is_open = False  # whether the Profile is open
        self._step = 0  # the number of the current step
        self._step_has_ended = False  # whether the current step has ended, and the next one has not begun
        self._is_paused = False

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
        if not self._has_begun:
            self._step = first
            self._step_has_ended = self._is_paused = False
            options = {"schedule": self._action_of_step, "on_trace_ready": self._on_trace_ready, **self._options}
            self._profile = Profile(model, **options)
            self._profile.start()
            self._has_begun = self._is_open = True
        elif self._is_open and self._step_has_ended:
            self._step_has_ended = self._is_paused = False
            self._step += 1
            self._advance_profile(self._step)
            if self._schedule is None and self._step >= _WAIT + _WARMUP + _ACTIVE:
                self._close_profile()

    def _end_step(self) -> None:
        """End the step. The time until the next step begins is still part of it."""
        self._step_has_ended = True

    def _pause(self) -> None:
        """Stop recording until the next step begins. A cycle of recorded steps ends here."""
        if self._is_open and self._step_has_ended and not self._is_paused:
            self._is_paused = True
            self._advance_profile(self._step + 1)

    def _advance_profile(self, next_step: int) -> None:
        """End the step of the Profile. ``next_step``: the number of the next one, since the Profile counts pauses."""
        self.profile.step_num = next_step - 1
        self.profile.step()

    def _end_loop(self) -> None:
        """End the loop and the Profile, also after an error. A step that has not ended is recorded, but not counted."""
        self._has_begun = False
        try:
            self._pause()
        finally:
            self._close_profile()

    def _close_profile(self) -> None:
        """Stop the Profile, and save its run with ``dirpath``."""
        if not self._is_open:
            return
        self._is_open = False
        self.profile.stop()
        if self._dirpath is not None and self.profile.enabled:
            folder = Path(self._dirpath)
            folder.mkdir(parents=True, exist_ok=True)
            self.run.save(folder / f"{self._stage}-rank{self.run.meta.rank}.json")

    def _action_of_step(self, _: int) -> ProfilerAction:
        """The action for the current step. The Profile's own step number is not used: it also counts pauses."""
        if self._is_paused:
            return ProfilerAction.NONE
        schedule = self._schedule or torch.profiler.schedule(wait=_WAIT, warmup=_WARMUP, active=_ACTIVE, repeat=1)
        return schedule(self._step)

    # For the hooks of a library, which are called in each of its stages

    def _end_step_of(self, stage: str, *args: Any, **kwargs: Any) -> None:
        if stage == self._stage:
            self._end_step()

    def _end_loop_of(self, stage: str, *args: Any, **kwargs: Any) -> None:
        if stage == self._stage:
            self._end_loop()
