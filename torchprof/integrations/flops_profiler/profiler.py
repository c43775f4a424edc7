"""``FlopsProfiler``: profile a model between start and stop, and print flops-profiler's text."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

import torchprof
from torchprof.encoding import encodable
from torchprof.integrations.flops_profiler.measured import Measured, is_one_of
from torchprof.integrations.flops_profiler.printed import lines_by_depth, printed_text
from torchprof.integrations.flops_profiler.strings import at_least, duration_text, macs_text, number_text, params_text


class FlopsProfiler:
    """Profile a model between ``start_profile`` and ``stop_profile``, and print the results as flops-profiler does.

    Figures can be read and printed from ``stop_profile`` to ``end_profile``; at other times that raises TorchprofError.
    torchprof allows one profile at a time in a process: if the code after ``start_profile`` may raise, put
    ``end_profile`` into a ``finally``.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise torchprof.TorchprofError(f"FlopsProfiler needs a torch.nn.Module, not {model!r:.80}.")
        self.model = model
        self.started = False
        self._ignored: tuple[Any, ...] = ()
        self._block: torchprof.Profile | None = None
        self._figures: Measured | None = None

    def start_profile(self, ignore_list: Iterable[Any] | None = None) -> None:
        """Start profiling. If a profile is open, it is dropped, and profiling starts again.

        ``ignore_list``: modules of the model, or classes of modules. Their work is not counted; their time is still
        part of the latency.
        """
        ignored = _checked_ignored(ignore_list, self.model)
        self.end_profile()
        block = torchprof.Profile(self.model, with_flops=True)
        block.__enter__()
        self._block, self._ignored, self.started = block, ignored, True

    def stop_profile(self) -> None:
        """Stop profiling. Does nothing if it has not been started."""
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(None, None, None)
            self._figures = Measured(block.run, self.model, self._ignored)

    def reset_profile(self) -> None:
        """Drop the figures. If a profile is open, profiling starts again."""
        if self._block is not None:
            self.start_profile(self._ignored)
        self._figures = None

    def end_profile(self) -> None:
        """Drop the figures. If a profile is open, stop it."""
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(None, None, None)
        self._figures = None
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> int | str | None:
        """The floating-point operations of the model's forwards; None (as text ``–``) if no operator could be counted.

        The text has a ``≥`` if some operators could not be counted.
        """
        whole = self._measured().whole
        return at_least(number_text(whole.known[0]), whole.is_lower_bound) if as_string else whole.known[0]

    def get_total_macs(self, as_string: bool = False) -> int | str | None:
        """The multiply-accumulates of the model's forwards, in the form of ``get_total_flops``."""
        whole = self._measured().whole
        return at_least(macs_text(whole.known[1]), whole.is_lower_bound) if as_string else whole.known[1]

    def get_total_params(self, as_string: bool = False) -> int | str | None:
        """The number of parameters; None (as text ``–``) if a lazy layer has not made its parameters yet."""
        params = self._measured().whole.params
        return params_text(params) if as_string else params

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """How long the model's forwards lasted, in seconds."""
        ns = self._measured().whole.ns
        return duration_text(ns) if as_string else ns / 1e9

    def get_total_functional_duration(self, as_string: bool = False) -> float | str:
        """How long the functionals in the model's forwards lasted, in seconds."""
        ns = self._measured().functionals_ns
        return duration_text(ns) if as_string else ns / 1e9

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | PathLike[str] | None = None,
    ) -> None:
        """Print the aggregated profile and, with ``detailed``, the profile of each module; then how they were counted.

        ``module_depth``: the last depth of the aggregated profile; -1 for all. ``output_file``: write to this file
        instead of stdout. Raises TorchprofError for a file that cannot be written.
        """
        measured = self._measured()
        check_printing(module_depth, top_modules, output_file)
        text = printed_text(measured, profile_step, module_depth, top_modules, detailed)
        if not output_file:
            print(encodable(text, sys.stdout))
            return
        try:
            Path(output_file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise torchprof.TorchprofError(f"output_file={str(output_file)!r} cannot be written: {error}") from error

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the ``top_modules`` classes of modules with the largest sums, for each depth up to ``module_depth``.

        The sums are of parameters, flops, MACs and forward latency.
        """
        measured = self._measured()
        check_printing(module_depth, top_modules, None)
        print(encodable("\n".join(lines_by_depth(measured, module_depth, top_modules)), sys.stdout))

    def _measured(self) -> Measured:
        if self._block is not None:
            raise torchprof.TorchprofError("Profiling is still going on: call stop_profile() first.")
        if self._figures is None:
            raise torchprof.TorchprofError(
                "There are no figures: call start_profile(), then the model, then stop_profile(). They are there until "
                "reset_profile() or end_profile()."
            )
        return self._figures


def _checked_ignored(ignore: Any, model: nn.Module) -> tuple[Any, ...]:
    if ignore is None:
        return ()
    if not isinstance(ignore, Iterable) or isinstance(ignore, (str, nn.Module)):
        raise torchprof.TorchprofError(
            f"What is to be ignored is a list of classes of modules, [nn.Dropout], or of modules, not {ignore!r:.80}."
        )
    ignored = tuple(ignore)
    for kind in ignored:
        if isinstance(kind, nn.Module):
            if not is_one_of(kind, model.modules()):
                raise torchprof.TorchprofError(f"{kind!r:.80}, which is to be ignored, is not a module of the model.")
        elif not isinstance(kind, type):
            raise torchprof.TorchprofError(
                f"{kind!r:.80} cannot be ignored: it is neither a class of modules nor a module."
            )
    return ignored


def check_printing(module_depth: Any, top_modules: Any, output_file: Any) -> None:
    """Check the options of printing. Raises TorchprofError."""
    if not isinstance(module_depth, int) or module_depth < -1:
        raise torchprof.TorchprofError(f"module_depth is 0 or more, or -1 for all depths, not {module_depth!r}.")
    if not isinstance(top_modules, int) or top_modules < 1:
        raise torchprof.TorchprofError(f"top_modules is how many are listed, 1 or more, not {top_modules!r}.")
    if output_file:
        if not isinstance(output_file, (str, PathLike)):
            raise torchprof.TorchprofError(f"output_file is the name of a file, not {output_file!r:.80}.")
        folder = Path(output_file).absolute().parent
        if not folder.is_dir():
            raise torchprof.TorchprofError(
                f"output_file={str(output_file)!r}: there is no folder {str(folder)!r}. Make it first."
            )
