"""Count the FLOPs of a session: which ops count, which are part of another op, and which have no formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from torchprof.attribute.event_names import CALL
from torchprof.attribute.events import Attributed, Kind, OpenRanges, Place
from torchprof.attribute.op_groups import OpGroup, OpTree
from torchprof.measure.flops.graphs import GraphCall, GraphCalls
from torchprof.measure.flops.operation import Count, Operation, Work, does_no_arithmetic, formula_of, work_of
from torchprof.measure.flops.torch_registry import calls_only_ops, has_users_formula, is_made_of_ops, registered_work
from torchprof.run.torch_names import FORWARD_ATTENTION, SAVES_RESULTS, VIEWS, KernelWork, aten, kind_of_work
from torchprof.run.words import RANGES, REPLAY, REPLAYS, Frame, FrameKind, Signature, is_generated

_DENSE_SHAPE = aten("_indices _nnz _values indices values crow_indices ccol_indices sparse_dim")
"""Only ops on sparse tensors call these. The recorded shapes are dense, and do not determine the work."""
_PADDING = FORWARD_ATTENTION | aten("matmul bmm _native_multi_head_attention _transformer_encoder_layer_fwd")
"""Ops that pad nested tensors, which have no shape. The shapes of the ops inside are larger than the data, except of
products with a weight, which run on the values."""
_ON_VALUES = aten("mm addmm _addmm_activation")
"""The products with a weight in such an op."""
_AROUND_OTHER_CODE = (*aten("empty new_empty resize_ detach to resolve_conj resolve_neg lift_fresh"), "detach")
"""Prefixes of ops that prepare work of code without ops: memory for a kernel; conversion to NumPy and back."""
_PYTHON_BACKWARD = "Backward"  # suffix of the node of a user's Function; the names of torch's own end in a number
_HANDS_ON = aten("_trilinear _embedding_bag_backward embedding_renorm_ linalg_matrix_exp")
"""Ops with their own kernel that calls other ops for all its work."""
_MAY_BE_EMPTY = ("aten::_trilinear", "Redistribute", "NestedRedistribute", "_NoopSaveInputs")
"""Ranges that call no op if there is nothing to do. Example: a ``DTensor`` that is already distributed as requested.
``_NoopSaveInputs`` only saves the inputs of a checkpoint (torch.utils.checkpoint)."""
_DISPATCHED = "PythonSubclass"
"""The range in which a tensor subclass runs an op in Python. For a ``DTensor``, the op has the shapes of the whole
tensor, and the ops inside those of the part on this rank. Torch before 2.11 records no such range."""
_IN_MODE = "PythonDispatchMode"
"""The range in which a mode runs an op in Python, such as that of fake tensors, which have no data."""
_MAKES_FAKE = ["detach", "empty_strided", "detach"]
"""The ops, without ``set_``, with which torch makes a fake tensor of one on the meta device, in the range of the mode.
For one of another fake tensor, it is ``detach`` alone."""
_ATTENTION = "aten::scaled_dot_product_attention"
_REPLAYED = Frame(FrameKind.KERNELS, REPLAY)

_MOST_FLOPS = 1 << 61
"""The most FLOPs of one op: a column of a run can store less than four times as many. Shapes that give more are from a
damaged trace; the op is not counted then."""


@dataclass(slots=True)
class _Open:
    """An op that has not ended: its own ``work`` by formula (None: unknown), and the ``counts`` inside it, by index of
    their place. ``inner``: the ops directly inside it.

    - ``is_batch``: its inputs are one example, and those of the ops inside it a whole batch.
    - ``is_dispatched``: only the ops inside it count, whatever its inputs are. ``is_in_mode``: a mode runs it;
      ``makes``: the ops without arithmetic in the range of the mode. ``has_fake``: it is inside on fake tensors, too.
    - ``is_opaque``: neither its shapes nor the ops inside it give its work; ``pads``: but for those in ``_ON_VALUES``.
    - ``has_same``: an op of its own name is inside it; ``has_view``: one that returns a view; ``has_preparation``: one
      that prepares work of other code; ``has_work``: one that does something itself, if only to move data.
    - ``call``: of a compiled graph whose work is known.
    """

    end_ns: int
    name: str
    signature: int
    place: int
    work: Work | None
    counts: list[tuple[int, Count]] = field(default_factory=list)
    inner: list[_Inner] = field(default_factory=list)
    is_batch: bool = False
    is_dispatched: bool = False
    is_in_mode: bool = False
    makes: list[str] = field(default_factory=list)
    has_fake: bool = False
    is_opaque: bool = False
    pads: bool = False
    has_same: bool = False
    has_view: bool = False
    has_preparation: bool = False
    has_work: bool = False
    call: GraphCall | None = None

    @property
    def is_fake(self) -> bool:
        """Whether the op runs on tensors without data, as to learn the shape of a result: it does not count. The op may
        be inside it again, on the meta device. A mode that runs the op on data has work inside it."""
        if self.has_fake and not self.counts and not self.is_dispatched:
            return True
        return self.makes == _MAKES_FAKE or ("detach" in self.makes and not self.counts)

    def drop_all_but_parts(self) -> bool:
        """Whether the op calls itself on a part of its inputs, as that of a ``DTensor`` does. Then only the op inside
        counts, and what has no products next to it (the arithmetic of an exchange). Other counts, as of trials on fake
        tensors, are dropped."""
        of_inner = [[count for _, count in self.counts[inner.start : inner.end]] for inner in self.inner]
        macs = [sum(count.macs for count in counts) for counts in of_inner]
        parts = [index for index, inner in enumerate(self.inner) if inner.is_same and not inner.is_trial]
        if not parts:
            return False
        if not self.is_dispatched:
            flops = sum(count.flops for index in parts for count in of_inner[index])
            is_known = not any(count.uncounted for index in parts for count in of_inner[index])
            if self.work is None or not is_known or (sum(macs[index] for index in parts), flops) >= self.work:
                return False
        for index, inner in reversed([*enumerate(self.inner)]):
            if inner.is_trial or (macs[index] and not inner.is_same):
                del self.counts[inner.start : inner.end]
        return True

    def is_less_than_inner(self, work: Work) -> bool:
        """Whether the op is called on one example, which is this ``work``, and the ops inside it on a whole batch."""
        macs = sum(count.macs for _, count in self.counts)
        flops = sum(count.flops for _, count in self.counts)
        if self.has_same or self.is_batch:
            return macs > work.macs or (macs == work.macs and flops > work.flops)
        # Attention pads heads to a width that its kernels support: its inner op works on more than the data.
        return macs > work.macs and self.name != _ATTENTION


class _Inner(NamedTuple):
    """An op directly inside another one. ``is_same``: it has the same name. ``is_trial``: perhaps a trial of the outer
    op, for the shape of the result. Its counts are ``counts[start:end]`` of the outer op."""

    is_same: bool
    is_trial: bool
    start: int
    end: int


class _AlikeGroups(NamedTuple):
    """Groups with equal ``counts`` by path. ``known``: the paths whose work is known. ``times``: how many, by place."""

    counts: Mapping[int, Count]
    known: Sequence[int]
    times: Counter[Place]


class Estimate:
    """Observes ops: their MACs and FLOPs, in ``counts`` by the index of their place.

    docs/flops.md says what counts. Example: ``aten::linear`` has no formula, so it counts as the ``aten::addmm`` inside
    it. A kernel is uncounted if no op around it has known work. A compiled graph counts as the nodes in its text,
    whatever kernels they were fused into.

    It has a stack of open ops of its own: ranges without arithmetic and everything inside them, labels, and ops that
    were stopped before they were executed take no part in the sums.
    """

    def __init__(self, signatures: Sequence[Signature], graphs: GraphCalls | None = None) -> None:
        self.counts: dict[int, Count] = {}
        self._signatures = signatures
        self._work: dict[tuple[str, int], Work | None] = {}
        self._is_idle: dict[str, bool] = {}  # by name: counts 0, with everything inside it
        self._is_transparent: dict[tuple[str, bool], bool] = {}  # see _explains
        self._opaque_calls: set[tuple[str, int]] = set()  # neither shapes nor the ops inside give their work
        self._padding_calls: set[tuple[str, int]] = set()
        self._opaque: set[str] = set()  # the user's Functions whose work is not in ops
        self._known: set[int] = set()  # indices of places: their work is known, with everything inside them
        self._kernels: Counter[Place] = Counter()
        self._replays: Counter[Place] = Counter()  # calls that replay a graph of kernels
        self._graphs = graphs or GraphCalls({})
        self._idle_until: dict[int, int] = {}  # by thread: the end of an op without arithmetic
        self._last_groups: dict[int, OpGroup] = {}  # by thread: not counted yet, as a mark may stop its last op
        self._groups: dict[tuple[OpTree, bytes], _AlikeGroups] = {}
        self._known_in_groups: set[int] = set()  # indices of places of groups in which there may be kernels
        self._uncounted_in_groups: set[int] = set()
        self.group_counts: dict[tuple[Place, OpTree], dict[int, Count]] = {}

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]:
        """Pass all events on; after the last one, ``counts`` and ``group_counts`` are complete."""
        kernel = Kind.KERNEL
        self._open: OpenRanges[_Open] = OpenRanges(self._close)
        for item in stream:
            yield item
            if isinstance(item, OpGroup):
                self._on_group(item)
            elif item.event.kind is kernel:
                self._kernels[item.place] += item.calls
            else:
                self._on_event(item)
        for thread in [*self._last_groups]:
            self._count_last_group(thread)
        self._open.close_all()
        del self._open  # it refers to this object: the cycle would keep both
        self._sum_groups()
        self._count_kernels()

    def _on_group(self, group: OpGroup) -> None:
        """Equal groups have equal counts, unless they are inside an op."""
        thread, start = group.thread, group.columns.start[group.first]
        if not group.tree.outermost:  # only memory events
            return
        self._count_last_group(thread)
        if self._open.at(thread, start) or start < self._idle_until.get(thread, start):
            for item in group.items():
                self._on_event(item)
        else:
            self._last_groups[thread] = group

    def _count_last_group(self, thread: int) -> None:
        if (group := self._last_groups.pop(thread, None)) is None:
            return
        sequences, functions = group.columns.sequence or (), group.tree.functions
        # A function of the user's counts only if it may have a backward.
        key = group.tree, bytes(sequences[group.first + index] >= 0 for index in functions if sequences)
        if (alike := self._groups.get(key)) is None:
            counts, self.counts = self.counts, {}
            for item in group.items():
                self._on_event(item)
            self._open.close_all(thread)
            paths = {place.index: path for path, place in enumerate(group.places())}
            of_paths = {paths[index]: count for index, count in self.counts.items()}
            known = [path for index, path in paths.items() if index in self._known]
            alike = self._groups[key] = _AlikeGroups(of_paths, known, Counter())
            self.counts = counts
        alike.times[group.place] += 1
        if group.columns.correlation and alike.times[group.place] == 1:
            places = group.places()
            uncounted = (path for path, count in alike.counts.items() if count.uncounted)
            self._known_in_groups.update(places[path].index for path in alike.known)
            self._uncounted_in_groups.update(places[path].index for path in uncounted)

    def _sum_groups(self) -> None:
        for (tree, _), alike in self._groups.items():
            for place, times in alike.times.items():
                of_tree = self.group_counts.setdefault((place, tree), {})
                for path, count in alike.counts.items():
                    before = of_tree.get(path, (0, 0, 0))
                    of_tree[path] = Count(*(sum_before + times * value for sum_before, value in zip(before, count)))

    def _on_event(self, item: Attributed) -> None:
        event = item.event
        kind, name, start, thread = event.kind, event.name, event.start_ns, event.thread
        if kind is Kind.STOPPED:
            self._on_stop(thread, start)
        elif kind in (Kind.OP, Kind.GRAPH, Kind.COMPILING) or (
            kind is Kind.BACKWARD_FUNCTION and name.endswith(_PYTHON_BACKWARD)
        ):
            self._count_last_group(thread)
            stack = self._open.at(thread, start)
            if start < self._idle_until.get(thread, start):
                return
            if (idle := self._is_idle.get(name)) is None:
                is_free = does_no_arithmetic(name) and not has_users_formula(name)
                idle = self._is_idle[name] = kind is Kind.COMPILING or is_free
            if idle:
                self._idle_until[thread] = start + item.ns
                self._known.add(item.place.index)
                if stack:
                    self._pass_by(stack, name)
            else:
                self._enter(stack, item)

    def _on_stop(self, thread: int, start: int) -> None:
        """Activation checkpointing stopped a recompute here: when the last tensor was saved for backward. The op before
        the mark began, and was not executed if it saves its inputs. A Function saves them after it was executed."""
        last_group = self._last_groups.pop(thread, None)
        for item in () if last_group is None else last_group.items():
            self._on_event(item)
        last = self._open.by_thread.get(thread)
        if last and last[-1].end_ns <= start and "::" in last[-1].name and last[-1].name not in SAVES_RESULTS:
            last.pop()
        self._open.at(thread, start)  # all others are closed: the next mark must not find them

    def _count_kernels(self) -> None:
        """Count the kernels that are part of no op with known work, except copies, sets and collectives."""
        uncounted = {index for index, count in self.counts.items() if count.uncounted} | self._uncounted_in_groups
        self._known |= self._known_in_groups
        for place, calls in self._kernels.items():
            if kind_of_work(place.name) is KernelWork.COMPUTING and not self._is_explained(place, uncounted):
                self._add(place.index, Count(0, 0, calls))
        recorded = {around.outer for place in self._kernels for around in _around(place) if around.frame == _REPLAYED}
        for place, calls in self._replays.items():
            if place.outer not in recorded and not self._is_explained(place, uncounted):
                self._add(place.index, Count(0, 0, calls))

    def _is_explained(self, kernel: Place, uncounted: Set[int]) -> bool:
        """Whether the kernel needs no own count: the work of an op around it is known, or this op is uncounted in the
        same row of the table, with no layer, label or replayed graph between the two."""
        is_in_another_row = False
        for around in _around(kernel):
            if around.index in self._known or around.kind == FrameKind.COLLECTIVE:
                return True
            if around.index in uncounted and not is_in_another_row:
                return True
            is_in_another_row |= around.kind is None or around.kind in RANGES
        return False

    def _add(self, place: int, count: Count) -> None:
        if (before := self.counts.get(place)) is not None:
            count = Count(before[0] + count[0], before[1] + count[1], before[2] + count[2])
        self.counts[place] = count

    def _pass_by(self, stack: list[_Open], name: str) -> None:
        """An op without arithmetic begins: it shows facts about the ops around it."""
        for around in stack if name in _DENSE_SHAPE else ():
            if around.work is not None:
                # An elementwise op contains an op on the stored values; a product contains no op for its work.
                around.is_opaque = around.work.macs > 0
                around.work, around.counts = None, []
        if stack and stack[-1].is_in_mode and not name.endswith("::set_"):
            stack[-1].makes.append(name.removeprefix("aten::"))
        prepares = name.startswith(_AROUND_OTHER_CODE)
        is_view = not prepares and name in VIEWS
        for around in stack:
            around.has_preparation |= prepares
            around.has_view |= is_view
            around.has_work |= not (prepares or is_view)

    def _enter(self, stack: list[_Open], item: Attributed) -> None:
        event, place, _, calls, ns, _ = item
        _, name, start, _, _, sequence, _, _, _, _, signature = event
        if name == _DISPATCHED:
            for around in stack:
                around.is_dispatched = True
        elif name == _IN_MODE and stack:
            stack[-1].is_in_mode = True
        is_of_graph = bool(stack) and stack[-1].name.startswith(CALL) and is_generated(name)
        if "::" not in name and sequence < 0 and not name.startswith(CALL) and not is_of_graph:
            if name in REPLAYS:
                self._replays[place] += calls
            return  # a call of the device's runtime, or a range of torch that is no op
        try:
            work = self._work[name, signature]
        except KeyError:
            work = self._work_of(name, signature)
            if work is not None and max(work) > _MOST_FLOPS:
                work = None
            self._work[name, signature] = work
        for around in stack:
            around.has_work = True
            if around.name == name:
                around.has_same = True
        entered = _Open(start + ns, name, signature, place.index, work)
        entered.is_opaque = is_of_graph or (work is None and (name, signature) in self._opaque_calls)
        entered.pads = work is None and (name, signature) in self._padding_calls
        if name.startswith(CALL):
            entered.call = self._graphs.next(name)
            if entered.call is not None:
                self._known.add(entered.place)
        elif stack and stack[-1].call is not None:
            stack[-1].call.ran.append((name, entered.place))
        if work is not None:
            self._known.add(entered.place)
        stack.append(entered)

    def _work_of(self, name: str, signature: int) -> Work | None:
        """The work of a call by its formula; None if it is unknown."""
        if not signature:
            return None
        inputs = self._signatures[signature]
        if name in _PADDING and "" in inputs.dtypes[:2]:
            self._padding_calls.add((name, signature))
        if has_users_formula(name):
            work = registered_work(name, inputs)
            if work is None:  # the user's formula replaces ours, even if it gives no result
                self._opaque_calls.add((name, signature))
            return work
        if formula_of(name) is None:
            return registered_work(name, inputs)
        return work_of(Operation(name, inputs))

    def _close(self, stack: list[_Open]) -> None:
        """An op has ended: add its count to the op around it, if any."""
        done = stack.pop()
        counts, work = done.counts, None if done.is_dispatched else done.work
        has_parts = done.drop_all_but_parts()
        if done.is_fake:
            counts = []
            self._known.add(done.place)
            if stack and stack[-1].name == done.name:
                stack[-1].has_fake = True
        elif done.call is not None:
            counts, known = done.call.counts(done.place, [counts[inner.start : inner.end] for inner in done.inner])
            self._known |= known
        elif work is None:
            if any(around.pads for around in stack):  # that one is not counted as a whole
                counts = done.counts
            elif not self._explains(done) and not any(count.uncounted for _, count in done.counts):
                counts = [*done.counts, (done.place, Count(0, 0, 1))]
        elif has_parts:
            for around in stack:
                around.is_dispatched = True
        elif counts and done.is_less_than_inner(work):
            if stack:
                stack[-1].is_batch = True
        elif done.name in _ON_VALUES or not any(around.pads for around in stack):
            counts = [(done.place, Count(work[0], work[1], 0))]
        if stack:
            around = stack[-1]
            is_same = around.name == done.name
            is_alike = is_same and self._signatures[done.signature].shapes == self._signatures[around.signature].shapes
            is_trial = done.is_in_mode if around.is_dispatched else is_alike
            around.inner.append(_Inner(is_same, is_trial, len(around.counts), len(around.counts) + len(counts)))
            around.counts.extend(counts)
            return
        for place, count in counts:
            self._add(place, count)

    def _explains(self, done: _Open) -> bool:
        """Whether the ops inside an op without a formula are all its work."""
        if done.is_opaque:
            done.counts.clear()
            return False
        if done.pads:
            return False
        name = done.name
        if name.startswith(CALL):  # its kernels are no ops, or are several fused ops
            return False
        if "::" not in name or done.is_dispatched:
            return bool(done.counts) or name in _MAY_BE_EMPTY or self._is_all_ops(done)
        key = (name, bool(done.counts))
        if (explains := self._is_transparent.get(key)) is None:
            if done.counts:  # a formula without a result: the tensors are nested; the ops inside run on their values
                explains = name in _HANDS_ON or formula_of(name) is not None or is_made_of_ops(name)
            else:
                explains = name in _MAY_BE_EMPTY or calls_only_ops(name)
            self._is_transparent[key] = explains
        return explains

    def _is_all_ops(self, function: _Open) -> bool:
        """Whether all work of a user's Function is in its ops, if none of these count.

        If its ops only prepare work of other code, the work is in that code. A Function that returns its input makes a
        view in forward and calls nothing in backward; but one that works in other code may call nothing there, too.
        """
        name = function.name
        is_ops = function.has_work or (function.has_view and not function.has_preparation)
        if not is_ops and not function.has_preparation and name.endswith(_PYTHON_BACKWARD):
            is_ops = name.removesuffix(_PYTHON_BACKWARD) not in self._opaque
        if not is_ops:
            self._opaque.add(name)
        return is_ops


def _around(place: Place) -> Iterator[Place]:
    """The place, its outer places in its layer, and the places around its layer's range."""
    inner: Place | None = place
    while inner is not None:
        yield inner
        inner = inner.outer or inner.within
