"""The events of a trace as columns in the order of the file: how they are grouped, sorted and corrected; and the inputs
of operators and collectives, read from JSON in which any value may be malformed."""

from __future__ import annotations

import ast
import marshal
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, count, groupby, islice
from math import isfinite
from operator import gt
from typing import Any

from torchprof.attribute.event_columns import BEYOND
from torchprof.attribute.events import Detail, SignatureTable
from torchprof.run.collectives import signature_of
from torchprof.run.words import Signature, is_collective

# The groups of events, and Kineto's categories

OP, RANGE, OP_OR_RANGE, MODULE = "op", "range", "op or range", "module"
RUNTIME_CALLS, MEMORY_EVENTS, DEVICE_WORK = "runtime", "memory", "device"
SESSION, NO_WORK = "session", ""
OVERHEAD_EVENTS = "overhead"  # what the profiler records as overhead, without a thread in the file
MODULE_PREFIX = "nn.Module: "  # of modules among the Python functions that ``with_stack=True`` records
MTIA_WORK = "mtia_ccp_events"
"""The work of MTIA's command processors: kernels, copies ("dma…"), and waits for each other, with "Sync" in their
names (Holistic Trace Analysis, ``hta/utils/utils.py``)."""
GROUPS = {
    "cpu_op": OP,
    "user_annotation": RANGE,
    "Operator": OP_OR_RANGE,  # until torch 1.12
    "Runtime": RUNTIME_CALLS,
    **dict.fromkeys(("kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset", MTIA_WORK), DEVICE_WORK),
    **dict.fromkeys(("python_function", "Python function"), MODULE),
    "Trace": SESSION,
    "overhead": OVERHEAD_EVENTS,
}
"""The group of each of Kineto's categories, in all its versions; for those of runtimes, see ``RUNTIMES``. Others are
not work: copies of ranges on a device's timeline, waits of one stream for another."""
RUNTIMES = frozenset({"cuda", "xpu", "mtia", "musa", "privateuse1"})
"""The kind of device is the first part of a runtime's category, before ``_runtime`` or ``_driver``; "cuda" for HIP."""

# Columns

_MICROSECOND = 1000  # ns: in traces of whole microseconds, rounding can make a shorter event this long
_WINDOW = 1024  # events of each stretch that are sorted at a time
_MANY_STRETCHES = 2000  # from here on, sorting everything at once is faster


TraceRow = tuple[int, int, int, int, int, int, int]
"""An event: start, ns, name, lane, sequence, number, signature, as in ``Columns``."""


class Columns:
    """Events in the order of the file, a column for each field.

    - ``start``: in ns. ``ns``: the duration; of a memory event, the bytes.
    - ``name``: the number of a group and name in ``names``. ``lane``: see ``EventTable``.
    - ``sequence``: the sequence number; of device work, the number of the operator that launched it.
    - ``number``: that of an operator ("External id"); of a runtime call and of device work, the correlation ID; of a
      memory event, the address.
    - ``signature``: see ``TraceSignatures``.
    - ``stretches``: the first event of each stretch in which no event starts before the previous one.
    """

    def __init__(self, names: Sequence[tuple[str, str]]) -> None:
        self._names = names
        self.start, self.ns = array("q"), array("q")
        self.name, self.lane = array("i"), array("i")
        self.sequence, self.number = array("q"), array("q")
        self.signature = array("i")
        self.stretches = [0]

    def add(self, rows: Sequence[TraceRow]) -> None:
        begin = max(len(self.start) - 1, 0)
        for column, values in zip(self._columns(), zip(*rows)):
            column.extend(values)
        starts = self.start[begin:]
        self.stretches += compress(count(begin + 1), map(gt, starts, islice(starts, 1, None)))

    def windows(self) -> Iterator[Sequence[int]]:
        """The indices of the events in the order of their start, in lists. A trace consists of sorted stretches, of one
        thread or one kind of event. They are merged a window at a time, which takes little memory; a sorted list of all
        events would take as much as the columns. For example, with at most two events of each stretch in a window, the
        starts ``0 2 5``, ``1 3 4`` of two stretches come as ``0 1 2``, ``3 4`` and ``5``."""
        start, ns, number = self.start, self.ns, self.number

        def outer_first(index: int) -> tuple[int, int, bool, int]:
            group = self._names[self.name[index]][0]
            if group is MEMORY_EVENTS:  # inside the innermost operator that starts then; in the order of the file
                return start[index], 1, False, 0
            return start[index], -ns[index], group is RUNTIME_CALLS, number[index]

        # In whole microseconds, as torch wrote them before 2.3, many events start at the same time.
        key: Callable[[int], Any] = start.__getitem__ if any(time % _MICROSECOND for time in start) else outer_first
        heads, ends = list(self.stretches), [*self.stretches[1:], len(start)]
        if len(heads) > _MANY_STRETCHES:
            yield sorted(range(len(start)), key=key)
            return
        unfinished = [which for which, head in enumerate(heads) if head < ends[which]]
        while unfinished:
            # No event of a later window starts before this time, or at it.
            limit = min(start[min(heads[which] + _WINDOW, ends[which]) - 1] for which in unfinished)
            window: list[int] = []
            for which in unfinished:
                after = bisect_right(start, limit, heads[which], ends[which])
                window.extend(range(heads[which], after))
                heads[which] = after
            window.sort(key=key)
            yield window
            unfinished = [which for which in unfinished if heads[which] < ends[which]]

    def _columns(self) -> tuple[array[int], ...]:
        return self.start, self.ns, self.name, self.lane, self.sequence, self.number, self.signature

    def in_order(self) -> Iterator[TraceRow]:
        for window in self.windows():
            yield from zip(*(map(column.__getitem__, window) for column in self._columns()))

    def drop_duplicates(self) -> int:
        """Drop events that repeat an earlier one in all fields, and return how many were dropped. In traces of whole
        microseconds, different short events can have equal fields. There, events of the CPU are duplicates only if they
        have a number. Device work is one only if it took longer than rounding can explain: a stream runs one thing at a
        time. An allocation, or a deallocation, is one if it directly follows an equal one at the same address."""
        duplicates: set[int] = set()
        for window in self.windows():
            for start, group in groupby(window, self.start.__getitem__):
                indices = list(group)
                if len(indices) > 1:
                    duplicates.update(self._duplicates(start, indices))
        if duplicates:
            kept = [index for index in range(len(self.start)) if index not in duplicates]
            for column in self._columns():
                column[:] = array(column.typecode, map(column.__getitem__, kept))
            self.stretches = [0, *(index for index in range(1, len(kept)) if self.start[index] < self.start[index - 1])]
        return len(duplicates)

    def _duplicates(self, start: int, indices: Sequence[int]) -> Iterator[int]:
        """The duplicates among events that start at the same time, given in their order."""
        seen: set[tuple[int, ...]] = set()
        last_at: dict[tuple[int, int, int], int] = {}  # by thread, device and address: bytes allocated or freed
        for index in indices:
            ns, name, lane, number = self.ns[index], self.name[index], self.lane[index], self.number[index]
            if (group := self._names[name][0]) is MEMORY_EVENTS:
                if number and last_at.get((lane, name, number)) == ns:
                    yield index
                last_at[lane, name, number] = ns
                continue
            event = ns, name, lane, number, self.sequence[index], self.signature[index]
            is_exact = start % _MICROSECOND or ns % _MICROSECOND
            if event in seen and (is_exact or (ns > _MICROSECOND if group is DEVICE_WORK else number)):
                yield index
            seen.add(event)

    def separate(self, threads: Sequence[int], is_left_out: Sequence[bool]) -> int:
        """Cut a range that overlaps the start of the next one on its thread, which would otherwise be inside it::

            |first...........|                  |first..........|
                            |second....|   →                    |second....|

        The overlap is taken for rounding if it is below 1 us, and shorter than the rest of either range. ``threads``:
        by lane. ``is_left_out``: by name, whether an event is not a range of its thread. Returns how many ranges end
        later than the range around them for other reasons.
        """
        crossing = 0
        starts, lengths, lanes, names = self.start, self.ns, self.lane, self.name
        open_ranges: dict[int, list[int]] = {thread: [] for thread in threads}  # outer to inner
        cut: dict[int, int] = {}  # of those that end later than the one around them: where that ends
        for window in self.windows():
            for index in window:
                if is_left_out[names[index]]:
                    continue
                start, end = starts[index], starts[index] + lengths[index]
                stack = open_ranges[threads[lanes[index]]]
                while stack:
                    last = stack[-1]
                    last_end = cut.get(last, starts[last] + lengths[last])
                    overlap = last_end - start
                    if overlap > 0:
                        is_rounding = overlap < _MICROSECOND and 2 * overlap < min(lengths[last], lengths[index])
                        if not is_rounding or start + overlap >= end:
                            if end > last_end:
                                cut[index] = last_end
                                crossing += overlap > _MICROSECOND and end - last_end > _MICROSECOND
                            break
                        lengths[last] -= overlap
                    stack.pop()
                stack.append(index)
        return crossing


# The inputs of operators


class TraceSignatures(SignatureTable):
    """The inputs of the operators and collectives of a trace: ``record.session_columns.InputSignatures`` are those of a
    live session. For example, the args ::

        {"Input Dims": [[8, 4], []], "Input type": ["float", "Scalar"], "Concrete Inputs": ["", "2.5"]}

    are ``Signature(shapes=((8, 4), ()), dtypes=("float", "Scalar"), scalars=(None, 2.5))``.

    ``operators``: the numbers of the names of operators, in traces that have one category for operators and ranges.
    """

    def __init__(self, detail: Callable[[str], Detail]) -> None:
        """``detail``: for the name of an operator, how much of its inputs is kept."""
        super().__init__()
        self.operators: set[int] = set()
        self._detail = detail
        self._details: dict[str, Detail] = {}
        self._scalars: dict[str, Any] = {"": None}

    @property
    def has_shapes(self) -> bool:
        return any(self._number_of_bytes.values())

    def of_operator(self, name: str, group: str, name_number: int, args: Mapping[str, Any]) -> int:
        """The number of the signature of an operator, or of a collective's range; equal signatures have one number."""
        shapes = args["Input Dims"] if "Input Dims" in args else args["Input dims"]  # the spelling of torch 1.8
        if not shapes:
            return 0
        if group is not OP:
            if group is OP_OR_RANGE:
                self.operators.add(name_number)
            if group is RANGE and not is_collective(name):
                return 0
        if "Collective name" in args:
            return self.of_collective(args)
        if (detail := self._details.get(name)) is None:
            detail = self._details[name] = Detail.SHAPES if group is RANGE else self._detail(name)
        dtypes = args.get("Input type", ())
        values = args.get("Concrete Inputs", ()) if detail in (Detail.ONES, Detail.SCALARS) else ()
        if detail is Detail.ONES and isinstance(values, list):
            values = [value if value in ("", "0", "1", "True", "False", "0.", "1.") else "2" for value in values]
        key = marshal.dumps((shapes, dtypes, values), 2)
        if (number := self._number_of_bytes.get(key)) is None:
            number = self._number_of_bytes[key] = self._number(self._checked(shapes, dtypes, values))
        return number

    def _checked(self, shapes: Any, dtypes: Any, values: Any) -> Signature:
        """The signature from an event's args, with an entry for each input; what torch would not write is unknown."""
        if not isinstance(shapes, list):
            return self.all[0]

        def each(entries: Any, read: Callable[[Any], Any]) -> tuple[Any, ...]:
            fits = isinstance(entries, list) and len(entries) == len(shapes)
            return tuple(map(read, entries)) if fits else ()

        return Signature(each(shapes, _parsed_shape), each(dtypes, encodable_text), each(values, self._scalar))

    def of_collective(self, args: Mapping[str, Any]) -> int:
        """The number of the signature of a collective, from an event's args; 0 if they name no collective."""
        if (signature := signature_of(args)) is None:
            return 0
        scalars = tuple(encodable_text(value) if isinstance(value, str) else value for value in signature.scalars)
        return self._number(signature._replace(dtypes=tuple(map(encodable_text, signature.dtypes)), scalars=scalars))

    def _scalar(self, text: Any) -> Any:
        """A value from torch's text of it; None if the text has no value."""
        text = encodable_text(text)
        if text not in self._scalars:
            try:
                self._scalars[text] = _frozen(ast.literal_eval(text))
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                self._scalars[text] = text
        return self._scalars[text]


# Values in the JSON


def encodable_text(value: Any) -> str:
    """A string that UTF-8 can encode; "" for other values. Half of a surrogate pair, which JSON can escape, is "?"."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def _parsed_shape(value: Any) -> Any:
    """The sizes of a tensor as a tuple, or a tuple of these for a list of tensors; None for other values."""
    if not isinstance(value, list):
        return None
    if value and all(isinstance(part, list) for part in value):
        tensors = tuple(map(_sizes, value))
        return None if None in tensors else tensors
    return _sizes(value)


def _sizes(value: Iterable[Any]) -> tuple[int, ...] | None:
    sizes = tuple(value)
    return sizes if all(type(size) is int and 0 <= size < BEYOND for size in sizes) else None


def _frozen(value: Any) -> Any:
    """The value with tuples in place of lists, and None in place of values that JSON cannot hold (complex numbers)."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    known = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value))
    return value if known else None
