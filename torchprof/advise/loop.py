"""Python outside of layers: what the functions of a loop spend their time on."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torchprof.advise import Advice, rule
from torchprof.advise.chains import (
    Among,
    Frames,
    always,
    calling,
    is_direct,
    is_line,
    is_loading,
    is_own_time,
    is_wait_for_ranks,
    is_wait_for_threads,
)
from torchprof.advise.evidence import Evidence
from torchprof.advise.python import FIND_THE_LINE, UNKNOWN_REASON, Function, Spent, functions, most_of
from torchprof.analyze.lines import FEWEST_SAMPLES, lines_of_code
from torchprof.run.formats import format_time
from torchprof.run.torch_names import DATA, GARBAGE, OPTIMIZER, purpose_of
from torchprof.run.words import (
    AUTOGRAD_ENGINE,
    BACKWARD,
    FORWARD,
    OUTSIDE,
    PHASES,
    WAITS_FOR_AUTOGRAD,
    WAITS_FOR_THREADS,
    FrameKind,
    sampled_line,
)

_SMALL_NS = 30_000  # an operator of less time is small
_GAP_NS = 30_000  # what the call of an operator, a node or a model takes outside of it
_LEAST_UNKNOWN_NS = 5_000_000  # less may be the beginning and the end of a block
_MANY = 20  # small operators, or reads, for each call of a model
_OPS_PER_READ = 2  # at most, in a loop that mainly reads values
_FEWEST_UNUSUAL = 3  # passes
_OFTEN_AT = 0.2  # the share of the time from which on a line is no other work
_MANY_COPIES = 5  # for each call of a model

# What functions do, by the names of what they call

_LESS_OFTEN = "Do it less often: `if step % 100 == 0:`"


class _Kind(NamedTuple):
    """What a function does: ``calls`` is a pattern of the names of what it calls. ``says``: a clause for the finding.
    ``remedy`` and ``options``: see ``Advice``."""

    calls: str
    says: str
    remedy: str
    options: str = ""


_COPIES_THE_MODEL = _Kind(
    r"(.*\.)?(deepcopy|state_dict|load_state_dict)",
    "it copies the model",
    "Update an average in place: `torch._foreach_lerp_(averages, parameters, 1 - decay)`, which "
    "`torch.optim.swa_utils.AveragedModel` does.",
    "Copy the model less often.",
)
_READS_VALUES = _Kind(
    r"(.*\.)?(item|tolist|numpy)",
    "it reads values of tensors, one by one",
    "Keep results as tensors, and read them once in many steps, or many at once: `torch._foreach_norm(tensors)`.",
)
_CONCATENATES = _Kind(
    r"torch\.(cat|concat|concatenate|[hv]stack)|np\.(append|concatenate|[hv]stack)",
    "it concatenates, which copies all of its inputs",
    "If a tensor grows by it, collect the parts in a list, and concatenate them once, after the loop: "
    "`torch.cat(parts)`.",
)
_KINDS = (
    _Kind(
        r"(.*\.)?DataLoader\.__iter__",
        "the workers of a DataLoader are started again for each pass over the data",
        "Keep them: `DataLoader(…, persistent_workers=True)`.",
    ),
    _Kind(
        r"(.*\.)?sleep",
        "it sleeps",
        "Wait for the thing itself, without `time.sleep`: `queue.Queue.get()`, `threading.Condition.wait()`.",
    ),
    _Kind(
        r"subprocess\..*|(.*\.)?(Popen|check_output|check_call|communicate)|os\.(system|popen)",
        "it starts processes",
        f"{_LESS_OFTEN}, in a thread, or read the same in this process (`psutil`, `/proc`).",
    ),
    _Kind(
        r"(.*\.)?(save|dump|savez\w*|save_file|save_pretrained|write|writelines|write_\w+|flush|to_csv|imwrite"
        r"|savefig|add_scalars?|add_histogram|add_image)",
        "it writes to files",
        f"{_LESS_OFTEN}, or hand a copy of the data to a thread that writes.",
    ),
    _COPIES_THE_MODEL,
    _Kind(
        r"print|(log|logger|logging|wandb|mlflow)\.\w+|(.*\.)?(dumps|pformat)",
        "it prints, logs, or turns values into text",
        f"{_LESS_OFTEN}. Print numbers (`loss.item()`) instead of tensors; write tensors with `torch.save`.",
    ),
    _Kind(
        r"(?i)(.*\.)?(acquire|recv|\w*_?lock)|(.*\.)?\w*(queue|thread|worker|process|future|event|condition)s?"
        r"\.(get|put|join|wait|result)",
        "it waits for a lock or another thread",
        "Hold the lock for less time: copy the data under the lock, and work without it; or pass data through a "
        "`queue.Queue`.",
    ),
    _Kind(
        r"(.*\.)?(load|loads|read|readline|readlines|read_\w+|imread|open|urlopen|listdir|glob)|requests\.\w+",
        "it reads files or data from elsewhere",
        "Read it once, before the loop, or in the workers of a `DataLoader`.",
    ),
    _Kind(
        r"re\.\w+|(.*\.)?(findall|finditer|lower|upper|strip|replace|tokenize)",
        "it processes text",
        "Do it once, before the loop, or in the workers of a `DataLoader`.",
    ),
    _CONCATENATES,
    _Kind(
        r"torch\.(tensor|as_tensor|asarray|\w+Tensor)",
        "it makes tensors of Python lists",
        "Keep the values as tensors or in a NumPy array (`torch.from_numpy(array)`), and gather many at once: "
        "`values[indices]`.",
    ),
    _Kind(
        r"(np|numpy|pd|pandas|scipy)\..*",
        "this is NumPy",
        "Replace NumPy with tensor operations, or do it in the workers of a `DataLoader`.",
    ),
    _READS_VALUES,
)
"""The name of a call has the first kind that matches it."""
_NO_CALL = ""
_ALL_ROWS = _Kind(
    _NO_CALL,
    "it calls small operators in a loop",
    "Compute all rows at once: one operator on all of them (`cross_entropy(outputs, targets)`), or "
    "`torch.vmap(function)(rows)`. A penalty on weights can be the optimizer's `weight_decay`.",
)
_ALL_TENSORS = _Kind(
    _NO_CALL,
    "it calls small operators in a loop",
    "Treat all at once: one operator on stacked rows; of many tensors, such as parameters, "
    "`torch._foreach_add_(tensors, others)`, `torch._foreach_norm(tensors)`.",
    "`torch.optim` has optimizers, `clip_grad_norm_(…, foreach=True)` clips.",
)
_GRADIENTS = _Kind(
    r"(torch\.)?autograd\.grad",
    "it asks autograd for gradients one by one",
    "Ask for all at once: `torch.autograd.grad(…, is_grads_batched=True)`, `torch.func.jacrev`, `torch.vmap`.",
)
_AT_ONCE = re.compile(r"(.*\.)?(clip_grad_\w+|_foreach_\w+)")
_PYTHON = _Kind(
    _NO_CALL,
    "this is Python between operators",
    "Replace the loop with tensor operations, do it less often, or move it to the workers of a `DataLoader`.",
)
_UNKNOWN = _Kind(_NO_CALL, UNKNOWN_REASON, FIND_THE_LINE)
_READ = "aten::item"
_CALLS_THAT_READ = rf"{_READS_VALUES.calls}|float|int|bool"
_COPIES = frozenset({"aten::clone", "aten::copy_", "aten::_to_copy", "aten::to", "aten::empty_like"})

# The rule


@rule
def python_in_the_loop(evidence: Evidence) -> Iterator[Advice]:
    """Functions outside all layers in which Python, and what it calls, takes much time: sleeping, processes, files,
    copies of the model, text, locks, NumPy, values read one by one, loops over parameters with small operators.

    Python's own time is that in which no operator runs, without 30 us for each operator, autograd node and call of a
    model (Python, autograd's engine and the profiler take 5 to 20 us), without what marked steps had beyond the median
    one, and without waiting for other stages of a pipeline. With samples it is shared
    among functions by their samples, and so is that of operators. Without samples the one finding has no function.
    """
    if not evidence.ops_recorded or not evidence.recorded_ns:
        return
    own_ns, overhead_ns = _time_in_no_operator(evidence)
    left = own_ns - overhead_ns  # what no finding has
    sampled = [function for function in functions(evidence, _is_loop) if function.samples >= FEWEST_SAMPLES]
    if not sampled:
        if left >= max(evidence.notable_ns, _LEAST_UNKNOWN_NS) and 2 * left > own_ns:
            yield _finding(evidence, "", own_ns, _UNKNOWN)
        return
    rests: list[Counter[Spent]] = []
    for function in sampled:
        by_kind = _by_kind(function)
        rest = by_kind.pop(_PYTHON)
        known = {kind: spent for kind, spent in by_kind.items() if spent.total() >= evidence.notable_ns}
        for kind, spent in known.items():
            yield _finding(evidence, most_of(spent), spent.total(), kind)
            left -= sum(ns for part, ns in spent.items() if not part.op)
        others = function.spent - sum(known.values(), Counter[Spent]())
        small, backward_ns = _small_operators(function, evidence) if 2 * others.total() >= function.ns else (None, 0)
        if small is not None and others.total() + backward_ns >= evidence.notable_ns:
            yield _finding(evidence, most_of(others), others.total() + backward_ns, small)
        else:
            rests.append(rest)
    for rest in rests:
        if min(rest.total(), left) >= evidence.notable_ns:
            yield _finding(evidence, most_of(rest), rest.total(), _PYTHON)


@rule
def waits_for_threads(evidence: Evidence) -> Iterator[Advice]:
    """A loop, or a layer, that waits for other threads of its own, such as one that prepares batches. The line is the
    one that was sampled most."""
    lines: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for row in evidence.rows(_is_line_of_wait, phases=(FORWARD,)):
        if (line := sampled_line(row.frames)) is not None:
            lines[row.layer][line] += row.calls
    for layer, took in evidence.took(_waits_for_threads, phases=(FORWARD,)).items():
        if took.cpu_ns >= evidence.notable_ns:
            most = "".join(f", most often at {line}" for line, _ in lines[layer].most_common(1))
            yield Advice(
                evidence.name_of(layer),
                f"It waits {format_time(took.cpu_ns)} for its own threads{most}.",
                "Do less in these threads, or let more of them, or processes, do it.",
                evidence.while_idle(took.cpu_ns),
                layers=(evidence.name_of(layer),) if layer >= 0 else (),
                details="Threads that run Python share its interpreter lock.",
            )


@rule
def passes_that_take_longer(evidence: Evidence) -> Iterator[Advice]:
    """Passes of a loop that take far longer than the others, again and again. What else they do is at the line where
    most of them were sampled. The gain is what they took beyond the usual time."""
    for passes in evidence.run.passes:
        if passes.ns is None or len(passes.unusual) < _FEWEST_UNUSUAL or passes.unusual_ns < evidence.notable_ns:
            continue
        lines = Counter(each.line for each in passes.unusual if each.line)
        [(line, count)] = lines.most_common(1) or [("", 0)]
        is_most = 2 * count > max(lines.total(), len(passes.unusual) / 2)
        usual_share = _usual_share(evidence, line)  # an interruption falls where most of the time is
        is_most &= usual_share < _OFTEN_AT and count > 2 * usual_share * lines.total()
        often = f", most often at {line}" if is_most else ""
        every = _spacing([each.number for each in passes.unusual])
        if not often and not every:
            continue  # other processes interrupt a loop, too
        which = f"One pass in {every} takes" if every > 1 else "Some passes take"
        these = [each.ns for each in passes.unusual if not often or each.line == line]
        longest, usual = format_time(max(these)), format_time(passes.ns.median)
        part = sum(these) / sum(each.ns for each in passes.unusual)
        text = f"{which} up to {longest}, others {usual}{often}"
        yield Advice(
            evidence.name_of(OUTSIDE),
            f"{text}.",
            "If workers of its DataLoader start there, keep them: `DataLoader(…, persistent_workers=True)`; else use "
            "more of them, or a larger `prefetch_factor`."
            if line.endswith("__next__")
            else "If the work is needed less often, do it less often; else in a thread, or after the loop.",
            evidence.while_idle(round(passes.unusual_ns * part)),
        )


def _usual_share(evidence: Evidence, line: str) -> float:
    """The share of the recorded time at the line of an unusual pass."""
    place = line.partition(" ")[0]
    at_line = sum(each.ns for each in lines_of_code(evidence.run) if f"{each.line.file}:{each.line.line}" == place)
    return at_line / max(evidence.recorded_ns, 1)


def _spacing(numbers: Sequence[int]) -> int:
    """Every how many passes these come, by most of the differences; 0 if there is no such number."""
    differences = Counter(later - earlier for earlier, later in pairwise(sorted(numbers)))
    [(spacing, count)] = differences.most_common(1)
    return spacing if 2 * count > differences.total() else 0


@rule
def threads_that_run(evidence: Evidence) -> Iterator[Advice]:
    """Another thread that runs Python all the time, such as one that polls a queue: the interpreter runs one thread at
    a time. The gain is at most the time in which this thread ran no operator."""
    own_ns = sum(took.cpu_ns for took in evidence.took(is_own_time).values())
    running = [warning.facts for warning in evidence.run.meta.warnings if warning.code == "thread_runs"]
    for facts in sorted(running, key=lambda facts: facts["share"])[-1:]:  # others may be the same thread
        yield Advice(
            ", ".join(evidence.run.meta.model),
            f"Another thread uses {facts['share']:.0%} of a processor, most often at {facts['line']}: if that is "
            "Python, the loop waits for the interpreter meanwhile.",
            "If it polls, let it wait: `queue.Queue.get()`, `threading.Event.wait()`. If it computes, move it to a "
            "process (`multiprocessing`).",
            evidence.while_idle(min(round(facts["share"] * evidence.recorded_ns), own_ns)),
        )


_waits_for_threads = Among(is_wait_for_threads, lambda frames: not is_loading(frames))
_is_line_of_wait = Among(is_line, lambda frames: len(frames) > 1 and frames[-2].kind == FrameKind.WAIT)


def _time_in_no_operator(evidence: Evidence) -> tuple[int, int]:
    """The time of the loop in which no operator runs, and the part of it that the calls of operators take, or that is
    unusual."""
    own = evidence.took_outside(Among(is_own_time, _is_loop), FORWARD)
    waits_for_ranks = evidence.took_outside(is_wait_for_ranks, FORWARD).cpu_ns
    waited = sum(pipeline.waited_ns for pipeline in evidence.run.pipelines if pipeline.device == "cpu")
    gaps = [spread for _, spread in evidence.samples["step_gap_ns"]]
    unusual = sum(max(0, spread.sum - round(spread.median * spread.count)) for spread in gaps)
    nodes = sum(took.calls for took in evidence.took(is_direct, phases=PHASES[1:]).values())
    calls = (
        nodes
        + evidence.took_outside(is_direct, FORWARD).calls
        + sum(evidence.forward_calls[root] for root in evidence.run.layers.roots)
    )
    return max(0, own.cpu_ns - max(0, waited - waits_for_ranks)), unusual + _GAP_NS * calls


def _finding(evidence: Evidence, line: str, ns: int, kind: _Kind) -> Advice:
    """The finding on a line that takes so much time; ``line`` is "" without samples."""
    where = f"{line} takes" if line else "No operator and no layer runs for"
    text = f"{where} {format_time(ns)}: {kind.says}."
    return Advice(evidence.name_of(OUTSIDE), text, kind.remedy, evidence.while_idle(ns), options=kind.options)


def _by_kind(function: Function) -> dict[_Kind, Counter[Spent]]:
    """The time of a function by what it calls, with the operators in that. ``_PYTHON``: all other time, without
    operators. Waits for threads have a rule of their own."""
    by_kind: dict[_Kind, Counter[Spent]] = {_PYTHON: Counter()}
    for spent, ns in function.spent.items():
        kind = next((kind for kind in _KINDS if re.fullmatch(kind.calls, spent.line.calls)), _PYTHON)
        if spent.op != WAITS_FOR_THREADS and (kind is not _PYTHON or not spent.op):
            by_kind.setdefault(kind, Counter())[spent] += ns
    return by_kind


def _small_operators(function: Function, evidence: Evidence) -> tuple[_Kind | None, int]:
    """What a function does with many small operators, None if it has few, and the time of their backward."""
    calls, ns = function.op_calls.total(), function.op_ns()
    python_ns = function.ns - ns
    reads = evidence.took_outside(_reads_in_loop, FORWARD).calls  # too short for many samples
    copied = sum(function.op_calls[name] for name in _COPIES)
    passes = max((evidence.forward_calls[root] for root in evidence.run.layers.roots), default=0) or 1
    direct = evidence.took_outside(Among(is_direct, _is_loop), FORWARD)
    reads_here = any(spent.op == _READ or re.fullmatch(_CALLS_THAT_READ, spent.line.calls) for spent in function.spent)
    if reads_here and reads >= _MANY * passes and _OPS_PER_READ * reads >= direct.calls:
        return _READS_VALUES._replace(options=""), 0
    if 2 * function.op_ns(*_COPIES) >= ns > python_ns and copied >= _MANY_COPIES * passes:
        return _COPIES_THE_MODEL._replace(says="it copies tensors"), 0
    at_once = sum(ns for spent, ns in function.spent.items() if not spent.op and _AT_ONCE.fullmatch(spent.line.calls))
    if calls < _MANY * passes or ns >= _SMALL_NS * calls or 2 * at_once >= python_ns:
        return None, 0
    nodes = evidence.took_outside(is_direct, BACKWARD)
    are_small = nodes.calls >= _MANY * passes and nodes.cpu_ns < _SMALL_NS * nodes.calls
    backward_ns = evidence.took_outside(always, BACKWARD).cpu_ns if are_small else 0
    backward = f"; backward outside of layers takes {format_time(backward_ns)}" if backward_ns else ""
    asks = any(re.fullmatch(_GRADIENTS.calls, spent.line.calls) for spent in function.spent)
    if asks and evidence.whole_of(_engine).calls >= _MANY * (evidence.steps or passes):
        return _GRADIENTS, backward_ns
    says = f"it calls small operators in a loop ({format_time(ns / calls)} each{backward})"
    return (_ALL_ROWS if backward_ns else _ALL_TENSORS)._replace(says=says), backward_ns


def _is_loop(frames: Frames) -> bool:
    """Whether work is that of the loop: not of data loading, an optimizer, the garbage collector or autograd."""
    if any(frame.kind == FrameKind.WAIT and frame.name == WAITS_FOR_AUTOGRAD for frame in frames):
        return False
    return purpose_of(FORWARD, frames) not in (DATA, OPTIMIZER, GARBAGE)


_engine = calling([AUTOGRAD_ENGINE])
_reads_in_loop = Among(is_direct, lambda frames: frames[-1].name == _READ and _is_loop(frames))
