"""One Profile over a loop that another library runs, and that it tells callbacks of, step by step."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerAction, schedule

from torchprof import Profile, Run, TorchprofError

WAIT, WARMUP, ACTIVE = 1, 1, 3
"""The default schedule, in steps: wait, warm up, record, once."""


class LoopProfile:
    """What a callback does between the start of a loop and its end.

    A step lasts from its begin to the begin of the next, so that the loading of the next batch is part of it; or to
    ``pause``, where the loop turns to something else for a while, which is not recorded.

    ``name`` is that of the loop. ``on_trace_ready`` and ``options`` are those of ``Profile``; where the options name no
    device, that of the model is taken. ``recorded`` is a schedule; None: the first step goes by, one warms up, three
    are recorded, and the Profile ends there, so that the rest of the loop runs without labels. With a ``dirpath`` the
    run is saved in that folder, which is made where it is missing, as ``<name>-rank<rank>.json``.

    Raises TypeError for options that Profile does not know, TorchprofError for those that mean nothing here.
    """

    def __init__(
        self,
        name: str,
        recorded: Callable[[int], ProfilerAction] | None,
        on_trace_ready: Callable[[Profile], Any] | None,
        dirpath: str | PathLike[str] | None,
        options: dict[str, Any],
    ) -> None:
        if recorded is not None and not callable(recorded):
            raise TorchprofError(
                f"schedule={recorded!r:.80} is no schedule: use torch.profiler.schedule(wait=1, warmup=1, active=3), "
                "say."
            )
        if "warmup" in options:
            raise TorchprofError("warmup= counts calls of the model, and here steps count: use schedule=.")
        Profile([], **options)  # a name that it does not know shows now, and not when training has begun
        self._name = name
        self._recorded = recorded
        self._on_trace_ready = on_trace_ready
        self._dirpath = dirpath
        self._options = options
        self._profile: Profile | None = None
        self._begun = False  # this loop has had its first step
        self._open = False  # and its Profile has not ended
        self._step = 0  # the number of the present step
        self._ended = False  # it is done, and the next one has not begun
        self._paused = False

    @property
    def profile(self) -> Profile:
        """The Profile of the last loop. Raises TorchprofError where none has begun."""
        if self._profile is None:
            raise TorchprofError(f"Nothing was profiled: this callback has seen no step of {self._name!r}.")
        return self._profile

    @property
    def run(self) -> Run:
        """Its run. Raises TorchprofError before its end."""
        return self.profile.run

    def begin_step(self, model: nn.Module, first: int = 0) -> None:
        """A step begins; where it is the loop's first, it has the number ``first``.

        A step that has begun and has not ended (its batch was skipped) goes on.
        """
        if not self._begun:
            self._enter(model, first)
        elif self._open and self._ended:
            self._ended = self._paused = False
            self._step += 1
            self.profile.step()
            if self._recorded is None and self._step >= WAIT + WARMUP + ACTIVE:
                self._leave()

    def end_step(self) -> None:
        """The step is done; what comes until the next begins is part of it still."""
        self._ended = True

    def pause(self) -> None:
        """What comes until the next step begins is part of none and not recorded: a cycle of recorded steps ends."""
        if self._open and self._ended and not self._paused:
            self._paused = True
            self.profile.step()

    def stop(self) -> None:
        """The loop is over, however it ended. A step that has not ended does not count; what it did is recorded."""
        self._begun = False
        try:
            self.pause()
        finally:
            self._leave()

    def _enter(self, model: nn.Module, first: int) -> None:
        options = {"use_cuda": any(parameter.is_cuda for parameter in model.parameters()), **self._options}
        self._step = first
        self._ended = self._paused = False
        self._profile = Profile(model, schedule=self._action, on_trace_ready=self._on_trace_ready, **options)
        self._profile.start()
        self._begun = self._open = True

    def _leave(self) -> None:
        if not self._open:
            return
        self._open = False
        self.profile.stop()
        if self._dirpath is not None and self.profile.enabled:
            folder = Path(self._dirpath)
            folder.mkdir(parents=True, exist_ok=True)
            self.run.save(folder / f"{self._name}-rank{self.run.meta.rank}.json")

    def _action(self, _: int) -> ProfilerAction:
        """What is done in the present step. The Profile counts pauses too: its number does not matter."""
        if self._paused:
            return ProfilerAction.NONE
        recorded = self._recorded or schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1)
        return recorded(self._step)
