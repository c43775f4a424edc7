"""Which parameters change while we record: an optimizer updates them in place."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class Updates:
    """Compares the versions of parameters with those at the first look. torch counts a version for each change in
    place, by an optimizer or by hand; compiled code may change a parameter without it.

    A parameter is known by its id, so it must be alive. The fused steps of torch's optimizers count no version.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}

    def look(self, parameters: Iterable[Tensor]) -> None:
        """Note the versions of parameters that are not known."""
        for parameter in parameters:
            if not parameter.is_inference():  # has no version
                self._before.setdefault(id(parameter), parameter._version)

    def changed(self, parameter: Tensor) -> bool:
        """Whether a parameter changed since the first look; False for unknown ones."""
        before = self._before.get(id(parameter))
        return before is not None and not parameter.is_inference() and parameter._version != before
