"""Where Python takes the time outside of layers: at which function, with what."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torchprof.advise import Advice, rule
from torchprof.advise.chains import (
    Among,
    Frames,
    Holds,
    always,
    inside,
    is_direct,
    is_in_op,
    is_line,
    is_own_time,
    node_of,
    outermost_op,
)
from torchprof.advise.evidence import Evidence
from torchprof.run.formats import format_time
from torchprof.run.torch_names import DATA, GARBAGE, OPTIMIZER, purpose_of
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE, PHASES, Frame, FrameKind, SourceLine, sampled_line

_SHARE = 0.05
_DATA_SHARE = 0.1
_FEWEST = 5  # samples
_SMALL_NS = 30_000
_MANY = 20  # small operators, or reads, for each call of a model
_READS = 2
_COPIED = 5
_GAP_NS = 30_000

_LESS_OFTEN = "Do it less often: `if step % 100 == 0:`"
_ANY_LAYER, _ANY_OPERATOR = 0, Frame(FrameKind.OP, "any")
_Place = tuple[int, tuple[Frame, ...]]
"""A layer, and the labels with the outermost operator in them."""


class _Kind(NamedTuple):
    """What a function does: ``calls`` matches the names of what it calls. ``says``: a clause for the finding.
    ``remedy`` and ``options``: see ``Advice``."""

    calls: re.Pattern[str]
    says: str
    remedy: str
    options: str = ""


_COPIES_THE_MODEL = _Kind(
    re.compile(r"(.*\.)?(deepcopy|state_dict|load_state_dict)"),
    "it copies the model",
    "Update an average in place: `torch._foreach_lerp_(averages, parameters, 1 - decay)`, which "
    "`torch.optim.swa_utils.AveragedModel` does.",
    "Copy the model less often.",
)
_READS_VALUES = _Kind(
    re.compile(r"(.*\.)?(item|tolist|numpy)"),
    "it reads values of tensors, one by one",
    "Keep results as tensors, and read them once in many steps, or many at once: `torch._foreach_norm(tensors)`.",
)
_CONCATENATES = _Kind(
    re.compile(r"torch\.(cat|concat|concatenate|[hv]stack)|np\.(append|concatenate|[hv]stack)"),
    "it concatenates, which copies all of its inputs",
    "If a tensor grows by it, collect the parts in a list, and concatenate them once, after the loop: "
    "`torch.cat(parts)`.",
)
_KINDS = (
    _Kind(
        re.compile(r"(.*\.)?DataLoader\.__iter__"),
        "the workers of a DataLoader are started again for each pass over the data",
        "Keep them: `DataLoader(…, persistent_workers=True)`.",
    ),
    _Kind(
        re.compile(r"(.*\.)?sleep"),
        "it sleeps",
        "Wait for the thing itself, without `time.sleep`: `queue.Queue.get()`, `threading.Condition.wait()`.",
    ),
    _Kind(
        re.compile(r"subprocess\..*|(.*\.)?(Popen|check_output|check_call|communicate)|os\.(system|popen)"),
        "it starts processes",
        f"{_LESS_OFTEN}, in a thread, or read the same in this process (`psutil`, `/proc`).",
    ),
    _Kind(
        re.compile(
            r"(.*\.)?(save|dump|savez\w*|save_file|save_pretrained|write|writelines|write_\w+|flush|to_csv|imwrite"
            r"|savefig|add_scalars?|add_histogram|add_image)"
        ),
        "it writes to files",
        f"{_LESS_OFTEN}, or hand a copy of the data to a thread that writes.",
    ),
    _COPIES_THE_MODEL,
    _Kind(
        re.compile(r"(.*\.)?(dumps|pformat)"),
        "it turns values into text",
        f"{_LESS_OFTEN}, or write tensors as they are: `torch.save`.",
    ),
    _Kind(
        re.compile(r"print|(log|logger|logging|wandb|mlflow)\.\w+"),
        "it prints or logs",
        f"{_LESS_OFTEN}, and print numbers (`loss.item()`) instead of tensors.",
    ),
    _Kind(
        re.compile(
            r"(.*\.)?(acquire|recv|\w*_?lock)|(.*\.)?\w*(queue|thread|worker|process|future|event|condition)s?"
            r"\.(get|put|join|wait|result)",
            re.IGNORECASE,
        ),
        "it waits for a lock or another thread",
        "Hold the lock for less time: copy the data under the lock, and work without it; or pass data through a "
        "`queue.Queue`.",
    ),
    _Kind(
        re.compile(
            r"(.*\.)?(load|loads|read|readline|readlines|read_\w+|imread|open|urlopen|listdir|glob)|requests\.\w+"
        ),
        "it reads files or data from elsewhere",
        "Read it once, before the loop, or in the workers of a `DataLoader`.",
    ),
    _Kind(
        re.compile(r"re\.\w+|(.*\.)?(findall|finditer|lower|upper|strip|replace|tokenize)"),
        "it processes text",
        "Do it once, before the loop, or in the workers of a `DataLoader`.",
    ),
    _CONCATENATES,
    _Kind(
        re.compile(r"torch\.(tensor|as_tensor|asarray|\w+Tensor)"),
        "it makes tensors of Python lists",
        "Keep the values as tensors or in a NumPy array (`torch.from_numpy(array)`), and gather many at once: "
        "`values[indices]`.",
    ),
    _Kind(
        re.compile(r"(np|numpy|pd|pandas|scipy)\..*"),
        "this is NumPy",
        "Replace NumPy with tensor operations, or do it in the workers of a `DataLoader`.",
    ),
    _READS_VALUES,
)
"""The name of a call has the first kind that matches it."""
_PREPARES = (
    "Do it once, before the loop, or less often; or only for what a step needs: `data[indices[:16]]`, not "
    "`data[indices][:16]`; or in the workers of a `DataLoader`."
)
_ALL_ROWS = (
    "Compute all rows at once: one operator on all of them (`cross_entropy(outputs, targets)`), or "
    "`torch.vmap(function)(rows)`."
)
_AT_ONCE = re.compile(r"(.*\.)?(clip_grad_\w+|_foreach_\w+)")
_PYTHON = _Kind(
    re.compile(""),
    "this is Python between operators",
    "Replace the loop with tensor operations, do it less often, or move it to the workers of a `DataLoader`.",
)
_OF_NO_DATA = re.compile(
    r"aten::(_foreach_\w+|\w+_|item|to|copy|rand\w*|normal|uniform|bernoulli|exponential|multinomial|poisson)"
)
_COPIES = frozenset({"aten::clone", "aten::copy_", "aten::_to_copy", "aten::to", "aten::empty_like"})


class Spent(NamedTuple):
    """What the time of a function is spent on: the line, and the outermost operator that runs ("" if none does)."""

    line: SourceLine
    op: str = ""


@dataclass
class Function:
    """A function of the user's: its time, the calls of the operators that run in it, and how often it was sampled."""

    spent: Counter[Spent] = field(default_factory=Counter)
    op_calls: Counter[str] = field(default_factory=Counter)
    samples: int = 0

    @property
    def ns(self) -> int:
        return self.spent.total()

    @property
    def at(self) -> SourceLine:
        """The line that takes most of the time, without what it calls."""
        return _line_of(self.spent)

    def op_ns(self, *names: str) -> int:
        """The time of these operators, or of all."""
        return sum(ns for spent, ns in self.spent.items() if spent.op and (not names or spent.op in names))


def functions(evidence: Evidence, holds: Holds, *, in_layers: bool = False) -> list[Function]:
    """The functions that were sampled in matching work outside all layers, or in layers, forward; the longest first.

    The time of an operator, and that between operators under the same labels, is shared among its lines by their
    samples; in layers, the time of all operators and that between them, because most layers have no sample. ``holds``
    gets the frames without the line.
    """
    if not evidence.any_row(is_line):
        return []
    times: Counter[_Place] = Counter()
    calls: Counter[_Place] = Counter()
    lines: defaultdict[_Place, Counter[SourceLine]] = defaultdict(Counter)

    def matches(frames: Frames) -> bool:
        return holds(frames[:-1] if is_line(frames) else frames)

    for layer, _, frames, called, ns, *_ in evidence.rows(matches, phases=(FORWARD,)):
        if (layer >= 0) != in_layers:
            continue
        outermost = _outermost(frames)
        place = (_ANY_LAYER, outermost[-1:] and (_ANY_OPERATOR,)) if in_layers else (layer, outermost)
        if (line := sampled_line(frames)) is not None:
            lines[place][line] += called
        else:
            times[place] += ns
            if len(place[1]) == len(frames) and not is_own_time(frames):
                calls[place] += called
    by_owner: dict[str, Function] = {}
    for place, seen in lines.items():
        samples = max(seen.total(), 1)  # a file may have lines without samples
        for line, count in seen.items():
            function = by_owner.setdefault(line.owner, Function())
            op = "" if is_own_time(place[1]) else place[1][-1].name
            function.samples += count
            function.spent[Spent(line, op)] += times[place] * count // samples
            if op:
                function.op_calls[op] += calls[place] * count // samples
    return sorted(by_owner.values(), key=lambda function: function.ns, reverse=True)


def _outermost(frames: Frames) -> tuple[Frame, ...]:
    """The labels, and the outermost operator, without its inputs."""
    place: list[Frame] = []
    for frame in frames:
        if frame.kind == FrameKind.PYTHON:
            break
        place.append(Frame(frame.kind, frame.name))
        if frame.kind != FrameKind.LABEL:
            break
    return tuple(place)


@rule
def python_in_the_loop(evidence: Evidence) -> Iterator[Advice]:
    """Functions outside all layers in which Python, and what it calls, takes much time: sleeping, processes, files,
    copies of the model, text, locks, NumPy, values read one by one, loops over parameters with small operators.

    Python's own time is that in which no operator runs, without 30 us for each operator, autograd node and call of a
    model (Python, autograd's engine and the profiler take 5 to 20 us), without what marked steps had beyond the median
    one, and without waiting for other stages of a pipeline. With a sampling thread (``torchprof run``) it is shared
    among functions by their samples, and so is that of operators. Without samples there is one finding, without a
    function.
    """
    whole = evidence.recorded_ns
    if not evidence.ops_recorded or not whole:
        return
    own = evidence.took_outside(_OWN_TIME_OF_LOOP, FORWARD)
    gaps = [spread for _, spread in evidence.samples("step_gap_ns")]
    unusual = sum(max(0, spread.sum - round(spread.median * spread.count)) for spread in gaps)
    waited = sum(pipeline.waited_ns for pipeline in evidence.run.pipelines if pipeline.device == "cpu")
    own_ns = max(0, own.cpu_ns - waited)
    left = own_ns - unusual - _calls_ns(evidence)
    sampled = [function for function in functions(evidence, _is_loop) if function.samples >= _FEWEST]
    if not sampled:
        if left >= _SHARE * whole and 2 * left > own_ns:
            yield _finding(evidence, "", own_ns, _PYTHON.says, _PYTHON.remedy)
        return
    others: list[Counter[Spent]] = []
    for function in sampled:
        by_kind = _by_kind(function)
        rest = by_kind.pop(_PYTHON)
        known = {kind: spent for kind, spent in by_kind.items() if spent.total() >= _SHARE * whole}
        for kind, spent in known.items():
            yield _finding(evidence, _line_of(spent), spent.total(), kind.says, kind.remedy, kind.options)
            left -= sum(ns for part, ns in spent.items() if not part.op)
        unknown = function.spent - sum(known.values(), Counter[Spent]())
        prepares = _prepares_data(unknown, evidence)
        small = _small_operators(function, evidence) if 2 * unknown.total() >= function.ns else None
        if small is not None and unknown.total() + small.backward_ns >= _SHARE * whole:
            ns = unknown.total() + small.backward_ns
            yield _finding(evidence, _line_of(unknown), ns, small.says, small.remedy, small.options)
        elif sum(prepares.values()) >= _DATA_SHARE * whole:
            first = max((part for part in prepares if part.op), key=prepares.__getitem__)
            says = f"it runs `{first.op}` on data without gradients"
            yield _finding(evidence, first.line.at, sum(prepares.values()), says, _PREPARES)
        else:
            others.append(rest)
    for rest in others:
        if min(rest.total(), left) >= _SHARE * whole:
            yield _finding(evidence, _line_of(rest), rest.total(), _PYTHON.says, _PYTHON.remedy)


@rule
def hooks(evidence: Evidence) -> Iterator[Advice]:
    """Forward hooks that take at least 5 % of the recorded time, with their operators: functions that torch calls with
    a module, as a sampling thread saw them (``torchprof run``)."""
    models = evidence.run.meta.model
    for function in functions(evidence, always, in_layers=True):
        line = function.at
        if line.is_hook and function.samples >= _FEWEST and function.ns >= _SHARE * evidence.recorded_ns:
            yield Advice(
                ", ".join(models),
                f"{line.file}:{line.line} {line.function} takes {format_time(function.ns)}: a hook of modules, which "
                "runs in each of their calls.",
                "Remove it with `handle.remove()` of its `handle = module.register_forward_hook(…)`.",
                evidence.while_idle(function.ns),
                layers=models,
            )


def _finding(evidence: Evidence, line: str, ns: int, says: str, remedy: str, options: str = "") -> Advice:
    per_step = evidence.per_step(ns)
    each = "" if per_step is None else f" ({format_time(per_step)} per step)"
    where = f"{line} takes" if line else "No operator and no layer runs for"
    text = f"{where} {format_time(ns)}{each}: {says}."
    return Advice(evidence.name_of(OUTSIDE), text, remedy, evidence.while_idle(ns), options=options)


def _line_of(spent: Counter[Spent]) -> SourceLine:
    """The line that takes most of the time, without what it calls."""
    lines: Counter[SourceLine] = Counter()
    for part, ns in spent.items():
        lines[part.line.at] += ns
    return lines.most_common(1)[0][0]


def _by_kind(function: Function) -> dict[_Kind, Counter[Spent]]:
    """The time of a function by what it calls, with the operators in that. ``_PYTHON``: all other time, without
    operators."""
    by_kind: dict[_Kind, Counter[Spent]] = {_PYTHON: Counter()}
    for spent, ns in function.spent.items():
        kind = next((kind for kind in _KINDS if kind.calls.fullmatch(spent.line.calls)), _PYTHON)
        if kind is not _PYTHON or not spent.op:
            by_kind.setdefault(kind, Counter())[spent] += ns
    return by_kind


def _prepares_data(spent: Counter[Spent], evidence: Evidence) -> Counter[Spent]:
    """The time of operators without a node in backward, if others outside all layers have some, and of Python in the
    same lines: what frees their memory. Random numbers are left out, because noise is new in each step, and
    what changes a tensor in place, as an average of parameters, or reads or copies it."""
    trained: set[str | None] = set()  # the names of nodes outside all layers
    inside_of: defaultdict[str, set[str]] = defaultdict(set)  # by outermost operator: all operators in it
    for layer, phase, frames, *_ in evidence.rows(is_in_op):
        if layer != OUTSIDE:
            continue
        if phase == BACKWARD:
            trained.add(node_of(frames))
        else:
            inside_of[outermost_op(frames) or ""] |= {
                _plain(frame.name) for frame in frames if frame.kind == FrameKind.OP
            }
    on_data = {
        part
        for part in spent
        if trained
        and part.op.startswith("aten::")
        and not _OF_NO_DATA.fullmatch(part.op)
        and not _AT_ONCE.fullmatch(part.line.calls)
        and not inside_of[part.op] & trained
    }
    lines = {part.line.at for part in on_data}
    return Counter(
        {part: ns for part, ns in spent.items() if part in on_data or (part.line.at in lines and not part.op)}
    )


def _plain(name: str) -> str:
    """The name of an operator as ``node_of`` writes that of its node."""
    return name.removeprefix("aten::").replace("_", "")


class _Small(NamedTuple):
    """What a function does with many small operators: a clause for the finding, and a remedy. ``backward_ns``: the time
    of their backward."""

    says: str
    remedy: str
    options: str = ""
    backward_ns: int = 0


def _small_operators(function: Function, evidence: Evidence) -> _Small | None:
    calls, ns = function.op_calls.total(), function.op_ns()
    reads = evidence.took_outside(inside("aten::item"), FORWARD).calls  # too short for many samples
    copied = sum(function.op_calls[name] for name in _COPIES)
    passes = max(map(evidence.run.rows.forward_calls, evidence.run.layers.roots), default=0) or 1
    direct = evidence.took_outside(Among(is_direct, _is_loop), FORWARD)
    if reads >= _MANY * passes and _READS * reads >= direct.calls:
        return _Small(f"it reads values of tensors one by one ({reads:,} times)", _READS_VALUES.remedy)
    if 2 * function.op_ns(*_COPIES) >= ns > function.ns - ns and copied >= _COPIED * passes:
        return _Small("it copies tensors", *_COPIES_THE_MODEL[2:])
    python_ns = function.ns - ns
    at_once = sum(ns for spent, ns in function.spent.items() if not spent.op and _AT_ONCE.fullmatch(spent.line.calls))
    if calls >= _MANY * passes and ns < _SMALL_NS * calls and 2 * at_once < python_ns:
        says = f"it calls small operators in a loop ({calls:,} of {format_time(ns / calls)}"
        backward_ns = _small_backward_ns(evidence, _MANY * passes)
        if backward_ns:
            return _Small(f"{says}, and their backward takes {format_time(backward_ns)})", _ALL_ROWS, "", backward_ns)
        return _Small(
            f"{says})",
            "Treat all tensors at once: `torch._foreach_add_(tensors, others)` and its relatives, or one operator on "
            "stacked tensors.",
            "`torch.optim` has optimizers, `clip_grad_norm_(…, foreach=True)` clips.",
        )
    return None


def _small_backward_ns(evidence: Evidence, least: int) -> int:
    """The time of backward outside all layers, with the engine's, if it has many small nodes."""
    nodes = evidence.took_outside(is_direct, BACKWARD)
    if nodes.calls < least or nodes.cpu_ns >= _SMALL_NS * nodes.calls:
        return 0
    return evidence.took_outside(always, BACKWARD).cpu_ns


def _is_loop(frames: Frames) -> bool:
    """Whether work is that of the loop: not of data loading, an optimizer or the garbage collector."""
    return purpose_of(FORWARD, frames) not in (DATA, OPTIMIZER, GARBAGE)


_OWN_TIME_OF_LOOP = Among(is_own_time, _is_loop)


def _calls_ns(evidence: Evidence) -> int:
    """The time that the calls of operators, autograd nodes and models take outside of them."""
    outside = evidence.took_outside(is_direct, FORWARD)
    nodes = sum(took.calls for took in evidence.took(is_direct, phases=PHASES[1:]).values())
    calls = sum(map(evidence.run.rows.forward_calls, evidence.run.layers.roots))
    return _GAP_NS * (nodes + calls + outside.calls)
