"""One call of an operator, and the registry of the formulas that count its work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from torchprof.attribute.events import Detail
from torchprof.run.words import Signature

Shape = tuple[int, ...]


class Unknown(Exception):
    """The recorded inputs do not determine the work."""


class Work(NamedTuple):
    """Multiply-accumulates, and all floating-point operations: two for each multiply-accumulate, and the others."""

    macs: int
    flops: int


class Count(NamedTuple):
    """The work of one place, and the number of its calls that are not counted."""

    macs: int
    flops: int
    uncounted: int


class Operation:
    """One call of an op with its recorded inputs: the argument of a formula."""

    def __init__(self, name: str, signature: Signature) -> None:
        self.name = name
        self._shapes, self._dtypes, self._scalars, _ = signature

    def __len__(self) -> int:
        return len(self._dtypes)

    def has(self, index: int) -> bool:
        """Whether an input exists and is a tensor."""
        return index < len(self) and self._dtypes[index] not in _NO_TENSOR

    def is_missing(self, index: int) -> bool:
        """Whether an input is None, or a tensor without a shape (a nested tensor)."""
        return index < len(self) and self._dtypes[index] == ""

    def shape(self, index: int) -> Shape:
        """The shape of an input. Raises ``Unknown`` if it is not a tensor, or has no shape (a nested tensor)."""
        if not self.has(index) or self._shapes[index] is None:
            raise Unknown
        shape: Shape = self._shapes[index]
        return shape

    def numel(self, index: int) -> int:
        return prod(self.shape(index))

    def numel_of_list(self, index: int) -> int:
        return sum(map(prod, self.shapes_of_list(index)))

    def shapes_of_list(self, index: int) -> tuple[Shape, ...]:
        """The shapes of a list of tensors. Raises ``Unknown`` if the input is not such a list."""
        if index >= len(self) or self._dtypes[index] != "TensorList" or self._shapes[index] is None:
            raise Unknown
        shapes: tuple[Shape, ...] = self._shapes[index]
        return shapes

    def scalar(self, index: int) -> Any:
        """The value of an input that is not a tensor; None if it was omitted. Raises ``Unknown`` if not recorded."""
        if index >= len(self._scalars):
            raise Unknown
        return self._scalars[index]

    def sizes(self, index: int, dims: int) -> Shape:
        """A list of numbers, one for each of ``dims`` dimensions. A single number counts for all dimensions."""
        value = self.scalar(index)
        if isinstance(value, int):
            value = (value,)
        if not isinstance(value, tuple) or not all(isinstance(size, int) for size in value):
            raise Unknown
        return value * dims if len(value) == 1 else value

    def broadcast(self, count: int) -> int:
        """The number of elements of the broadcast result of the tensors among the first ``count`` inputs."""
        return prod(broadcast([self.shape(index) for index in range(count) if self.has(index)]))

    @property
    def is_complex(self) -> bool:
        return any("complex" in dtype for dtype in self._dtypes)

    @property
    def is_floating(self) -> bool:
        return any(dtype in _FLOATING or dtype.startswith("c10::") for dtype in self._dtypes)

    @property
    def is_quantized(self) -> bool:
        return any("qint" in dtype or "quint" in dtype for dtype in self._dtypes)


Formula = Callable[[Operation], tuple[int, int]]
Flops = Callable[[Operation], int]
"""A formula without multiply-accumulates: the other operations."""

_FLOATING = frozenset({"float", "double", "TensorList"})  # a TensorList has no recorded type
_NO_TENSOR = frozenset({"", "Scalar", "ScalarList", "TensorList", "GenericList"})
FORMULAS: dict[str, Formula] = {}
"""By the names of ops, as ``bare`` makes them."""
_details: dict[str, Detail] = {}


def work_of(operation: Operation) -> Work | None:
    """The work of one call of an op; None if it has no formula or the recorded inputs do not determine the work."""
    formula = formula_of(operation.name)
    if formula is None or operation.is_quantized:
        return None
    try:
        macs, others = formula(operation)
    except (Unknown, ArithmeticError, LookupError, TypeError, ValueError):
        return None  # the op itself rejects such inputs: wrong rank, stride 0
    if operation.is_complex:
        macs, others = 4 * macs, others * (6 if bare(operation.name) in _COMPLEX_PRODUCTS else 2)
    elif not operation.is_floating:
        others = 0
    return Work(macs, 2 * macs + others)


def formula_of(name: str) -> Formula | None:
    """The formula of an op by its name in a profile (``aten::add_``); None if there is none."""
    return FORMULAS.get(bare(name))


def detail_of(name: str) -> Detail:
    """How much of an op's inputs its formula reads."""
    return _details.get(bare(name), Detail.SHAPES)


def bare(name: str) -> str:
    """The name under which formulas are registered: for torch's ops without namespace and the ``_`` of in-place ops."""
    namespace, _, op = name.rpartition("::")
    if namespace not in ("aten", "prims"):
        return name
    return op if op in FORMULAS else op.removesuffix("_")


def broadcast(shapes: Iterable[Shape]) -> Shape:
    """The shape of the result of broadcasting."""
    result: list[int] = []
    for shape in shapes:
        result = [1] * (len(shape) - len(result)) + result
        for length in range(1, len(shape) + 1):
            if shape[-length] != 1:
                result[-length] = shape[-length]
    return tuple(result)


def counts(*names: str, scalars: bool = False, ones: bool = False) -> Callable[[Formula], Formula]:
    """Register a function as the formula of these ops.

    ``scalars``: it reads the values of inputs that are not tensors. ``ones``: it only reads which of them are 0 or 1.
    """

    def register(formula: Formula) -> Formula:
        for name in names:
            FORMULAS[name] = formula
            if scalars or ones:
                _details[name] = Detail.SCALARS if scalars else Detail.ONES
        return formula

    return register


def counts_flops(*names: str, scalars: bool = False, ones: bool = False) -> Callable[[Flops], Flops]:
    """The same for a formula without multiply-accumulates."""

    def register(flops: Flops) -> Flops:
        counts(*names, scalars=scalars, ones=ones)(lambda op: (0, flops(op)))
        return flops

    return register


def per_element(index: int, times: int = 1, optional: Sequence[int] = ()) -> Flops:
    """The formula of ``times`` FLOPs for each element of an input, and of one more for each of these ``optional``
    inputs that exists."""
    return lambda op: op.numel(index) * (times + sum(map(op.has, optional)))


def windows_along(length: int, kernel: int, stride: int, dilation: int = 1, round_up: bool = False) -> int:
    """The number of windows along one dimension that is padded to ``length``."""
    free = length - dilation * (kernel - 1) - 1
    return (-(-free // stride) if round_up else free // stride) + 1


_COMPLEX_PRODUCTS = frozenset({"mul", "multiply", "div", "divide", "true_divide", "_foreach_mul", "_foreach_div"})
