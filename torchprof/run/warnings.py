"""Warnings as data: a code, the layers and the facts; and for each code the function that makes its sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchprof.errors import some
from torchprof.run.cost import format_time
from torchprof.run.words import (
    AMBIGUOUS_MODULE,
    COMPILED_BEFORE,
    GRAPH_NOT_READ,
    LAUNCHED_BEFORE,
    NESTED_GRAPHS,
    OTHER_MODULE,
    UNKNOWN_KERNEL,
    UNKNOWN_MODULE,
)

Fact = Any
"""An int, float, str or bool, or nested tuples of these: what JSON can store."""

Sentence = Callable[..., str]
_Function = TypeVar("_Function", bound=Sentence)


@dataclass(frozen=True)
class Caveat:
    """A warning about the figures of a run. ``str()`` is its sentence.

    - ``code``: what it is about. ``layers``: the layers concerned, by dotted name. ``facts``: everything else, by name.
    - ``added``: one entry for each sum of runs that it has passed through, the last sum first: the numbers of the runs
      that had it, from 1 on, and how many runs were added.
    - ``ranks``: the ranks that it is of, in ``Run.warnings``; empty in ``Meta.warnings``.

    A code of a newer torchprof has no sentence here: ``str()`` shows the code with its layers and facts.
    """

    code: str
    layers: tuple[str, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)
    added: tuple[tuple[tuple[int, ...], int], ...] = ()
    ranks: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return hash((self.code, self.layers, frozenset(self.facts.items()), self.added, self.ranks))

    def __str__(self) -> str:
        return "".join(map(_of_the_runs_added, self.added)) + self._sentence()

    def _sentence(self) -> str:
        try:
            return SENTENCES[self.code](list(self.layers), **self.facts)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):  # of a newer torchprof
            facts = [f"{name}={value!r}" for name, value in self.facts.items()]
            about = "; ".join([*([some(list(self.layers))] if self.layers else []), *facts])
            return f"{self.code}: {about}" if about else self.code


def caveat(code: str, layers: Sequence[str] = (), **facts: Fact) -> Caveat:
    """A caveat with these facts."""
    return Caveat(code, tuple(layers), facts)


def sharing_key(warning: Caveat) -> tuple[Any, ...]:
    """Equal for two warnings only if they are written alike: one object, and one entry of a file, can serve for both.

    Stricter than ``==``, for which 1, 1.0 and True are equal.
    """
    return warning.code, warning.layers, repr([*warning.facts.items()]), warning.added, warning.ranks


def _of_the_runs_added(added: tuple[Sequence[int], int]) -> str:
    numbers, count = added
    if len(numbers) == count:
        return f"Each of the {count} runs added: "
    return f"Run{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of the {count} added: "


SENTENCES: dict[str, Sentence] = {}
"""For each code the function that makes the sentence of the layers and facts. It has the name of the code."""


def _sentence(function: _Function) -> _Function:
    SENTENCES[function.__name__] = function
    return function


def _fixed(code: str, text: str) -> None:
    """Declare a code with a constant sentence."""

    def sentence(layers: list[str]) -> str:
        return text

    SENTENCES[code] = sentence


def _of_layers(code: str, text: str) -> None:
    """Declare a code whose sentence names layers: they replace ``{layers}`` in ``text``."""

    def sentence(layers: list[str]) -> str:
        return text.replace("{layers}", some(layers))

    SENTENCES[code] = sentence


def _of_facts(code: str, text: str) -> None:
    """Declare a code whose sentence has facts: ``{name}`` in ``text`` is that fact. A tuple becomes a list in words."""

    def sentence(layers: list[str], **facts: Fact) -> str:
        words = {name: some(list(fact)) if isinstance(fact, tuple) else fact for name, fact in facts.items()}
        return text.format(**words)

    SENTENCES[code] = sentence


# Modules and their calls

_of_layers("modules_added", "Added or replaced inside the block, and part of the layer above: {layers}.")
_of_layers("modules_removed", "Removed inside the block: {layers}. They show what they did until then.")
_of_layers("layers_unlabelled", "Could not be labelled, and are part of the layer above: {layers}.")
_of_layers("never_called", "Never called: {layers}. What ran of them, if anything did, is shown where it ran.")


@_sentence
def calls_not_recorded(layers: list[str], calls: int) -> str:
    return (
        f"Not counted: {calls} call{'s' if calls > 1 else ''} of {layers[0]} on a thread that torch's "
        "profiler does not record. It records the thread that enters the block, and autograd's."
    )


@_sentence
def called_by_others(layers: list[str], callers: Sequence[str]) -> str:
    """``callers``: for each of the layers its caller, "" for code outside the model."""
    past = [f"{inner} by {outer or 'code outside the model'}" for inner, outer in zip(layers, callers)]
    return (
        f"Called by other than the layer above them: {some(past)}. They count where they stand in the tree, so the "
        "totals above them are not how long those layers' own calls lasted."
    )


@_sentence
def label_cost(layers: list[str], calls: int, cost_ns: float, is_at_most: bool, wall_ns: int) -> str:
    about = "at most" if is_at_most else "about"
    return (
        f"The labels themselves took {about} {format_time(cost_ns)} of {format_time(wall_ns)} "
        f"({cost_ns / wall_ns:.0%}): {calls} calls of {format_time(cost_ns / calls)}."
    )


@_sentence
def clock_set(layers: list[str], jump_ns: int, wall_ns: int) -> str:
    direction = "forward" if jump_ns > 0 else "back"
    return (
        f"The system's clock was set {direction} by {format_time(abs(jump_ns))} during a recording of "
        f"{format_time(wall_ns)}. torch's profiler measures with it: the times of this run are wrong."
    )


# Communication between ranks

_of_facts("collectives_unmatched", "Outside of layers: {count} collective(s) of which nobody was seen to ask for them.")
_of_facts(
    "buckets_uncertain",
    "{count} bucket(s) of gradients held others than came before them, as in the first backward of "
    "DistributedDataParallel: they count where the last of these came.",
)
_of_layers(
    "buckets_unordered",
    "DistributedDataParallel had not put the buckets of {layers} in order when the recording began: "
    "it does so after its first backward, but not with find_unused_parameters=True. A bucket is said to serve "
    "the layers whose gradients were ready before it, and may be of others.",
)

# What could not be recorded

_of_facts(
    "device_without_kernels",
    "{device} reports no kernels to torch's profiler: its columns are unknown, the CPU's are right.",
)
_of_facts("no_device", "{device} was asked for, but torch finds no {device} device here: its columns are unknown.")
_of_facts(
    "device_not_recordable",
    "{device} was asked for, but this torch cannot record its kernels: its columns are unknown.",
)
_of_facts(
    "moved_to_device",
    "The model was moved to {device} inside the block: only the CPU was recorded. Move it before the block, or use "
    'device="{kind}".',
)
_fixed("recording_lost", "What was recorded last is lost: an error came while torch's profiler was being stopped.")
_of_facts(
    "nothing_after_steps",
    "Nothing was recorded: after {steps} calls of step() the schedule had not begun to record.",
)
_of_facts(
    "nothing_after_warmup",
    "Nothing was recorded: of warmup={warmup} calls of the model there were {calls}. Only calls of its own forward "
    "count; a model that is used in other ways is warmed up before the block.",
)
_of_facts(
    "nothing_after_calls",
    "Nothing was recorded: {warmup} calls of models were to come first, and there were {calls}.",
)
_of_facts(
    "compiler_unknown",
    "This torch's compiler does not tell which layers its kernels are of ({reason}): regions are shown "
    "whole. torch 2.13 is known to tell it.",
)
_of_facts("backward_incomplete", "Backward is incomplete: on the meta device it stopped with {error}")

TOO_MUCH_FOR_STACKS = (
    "The profiler records every Python call of the compiler then, with the source lines that lead to it: gigabytes of "
    "memory even for a small model. Call the model once before the block, or use warmup=1."
)


@_sentence
def stacks_left_out(layers: list[str], modules: Sequence[str]) -> str:
    names = ", ".join(modules)
    return f"Source lines were left out: {names} had still to be compiled by torch.compile. {TOO_MUCH_FOR_STACKS}"


# Programs that were recorded as a whole

_of_facts("too_many_models", "Only the first {count} models are told apart; later ones are (outside).")
_fixed(
    "gave_way",
    "The program started a profiler of its own, and this one gave way: recorded up to there.",
)
_fixed("no_model_called", "No model was called: all that was recorded is outside of models.")


@_sentence
def calls_reached(layers: list[str], calls: int) -> str:
    return f"{calls} call{'s' if calls > 1 else ''} of models recorded, as asked; the program went on."


@_sentence
def long_start(layers: list[str], start_ns: int, wall_ns: int) -> str:
    return (
        f"{format_time(start_ns)} of {format_time(wall_ns)} went by before the first call "
        "of a model: imports, data, making it. `--warmup-calls 1` leaves that out."
    )


@_sentence
def calls_on_other_threads(layers: list[str], classes: Sequence[tuple[str, int]]) -> str:
    calls = [f"{name} ({count})" for name, count in classes]
    return f"Not seen, because on threads that torch's profiler does not record: calls of {some(calls)}."


# Trace files

MODULES_OF_CALL_STACKS = (
    'It was recorded with_stack=True by an old torch, which wrote source lines for each operator (its "Call '
    'stack") and no modules: record it inside `torchprof.annotate(model)`, or with a newer torch'
)
"""How to record a trace with modules, if this one has only call stacks of operators."""

_of_facts("trace_around_unread", "What stands {where} the events of {file} could not be read.")
_of_facts("trace_end_unread", "{file} was read to the end of its events, but {reason}.")
_of_facts("trace_goes_on", "{file} goes on behind the end of its trace: that was not read.")
_of_facts(
    "trace_without_operators",
    "{file} holds no operators, as without ProfilerActivity.CPU: what the CPU did is unknown, and so is "
    "for which operator and layer a kernel ran.",
)
_of_facts(
    "trace_events_missing",
    "{count} event(s) of {file} are missing: they had no name, no time, no thread, or a time that cannot be.",
)
_of_facts(
    "trace_of_processes",
    "{file} holds {count} processes, and torch writes one a file: where their numbers "
    "are the same, what they launched on devices, and whose backward is whose, may be mixed up.",
)
_of_facts(
    "trace_without_numbers",
    "{file} has no sequence numbers, like traces of torch 1.8: which layers its backward belongs to is "
    "unknown, and it is shown outside of layers.",
)


@_sentence
def trace_cut(layers: list[str], file: str, events: int, reason: str) -> str:
    why = f"; {reason}" if reason else ""
    noun = "event" if events == 1 else "events"
    return f"{file} ends in the middle (after {events:,} {noun}{why}): what came later is missing."


@_sentence
def trace_events_unread(layers: list[str], file: str, lost: int, events: int, at: int) -> str:
    verb, which = ("is", "it") if lost == 1 else ("are", "the first of them")
    return (
        f"{lost:,} of {events:,} events of {file} could not be read and "
        f"{verb} missing: {which} begins at character {at:,}."
    )


@_sentence
def trace_events_twice(layers: list[str], file: str, count: int) -> str:
    verb, counts = ("stands", "counts") if count == 1 else ("stand", "count")
    return (
        f"{count:,} event{'s' * (count > 1)} of {file} {verb} in it twice, with the same time, thread or "
        f"stream, name and number, and {counts} once: was it merged with a copy of itself?"
    )


@_sentence
def trace_without_layers(layers: list[str], file: str, has_call_stacks: bool) -> str:
    how = f" {MODULES_OF_CALL_STACKS}." if has_call_stacks else ""
    return (
        f"{file} tells of no layers, so that all work is outside of them: it has no labels of "
        "torchprof.annotate(model), no modules (with_stack=True) and no ranges of record_function around operators."
        f"{how}"
    )


# Matching a trace with a model

_of_facts(
    "too_many_places",
    "In more than {most} places, and no layers: {modules}. Their work is shown in what is around them.",
)
_of_layers(
    "labelled_in_trace_only",
    "Labelled in the trace and not in the model, so that their work counts where they were called: {layers}.",
)
_of_facts(
    "matched_by_order",
    "Told apart only by the order of their first calls, which is taken to be that in the source: {modules}.",
)
_of_facts(
    "matched_of_more",
    "There are more of their kind that were never called, and the first ones are taken to be those that were: "
    "{modules}.",
)
_of_facts(
    "matched_of_fewer",
    "The trace has more of their kind than the model, and the first that fit are taken to be these: {modules}.",
)
_of_facts(
    "matched_far",
    "Not called by what holds them, and perhaps others of their class: {modules}.",
)
_of_facts("not_in_model_shown", "Not found in the model, and shown under what called them: {modules}.")
_of_facts("not_in_model", "Not found in the model, and no layers: {modules}.")
_fixed(
    "model_of_other_sizes",
    "No operator in the trace was called on parameters of the shapes that the model's have: is it the "
    "model that was traced, and of its size?",
)
_of_facts(
    "classes_of_one_name",
    "The model has several classes of one name ({classes}), and torch counts the modules of each by "
    "itself: different ones have one name in the trace, and what is shown of them may be another's. Record "
    "inside torchprof.annotate(model) to tell them apart.",
)


# What follows from the run

_COMPILE_IN_IT = (
    "compile the model inside the block (call torch.compiler.reset() before the block, or start a new process); "
    "warmup=1 leaves the first call, which compiles, out of the figures"
)
_WHY_UNKNOWN = {
    COMPILED_BEFORE: f"they were compiled before the block. To see their layers, {_COMPILE_IN_IT}",
    NESTED_GRAPHS: "they are in graphs inside of a graph (torch.cond, torch.while_loop, nested regions)",
    GRAPH_NOT_READ: "their graphs could not be read while they were compiled",
    UNKNOWN_KERNEL: "they ran under names that no kernel of their graph has, or that several may have",
    UNKNOWN_MODULE: "torch does not record which module their operations come from",
    OTHER_MODULE: "they work for modules that are not among the profiled ones",
    AMBIGUOUS_MODULE: "the compiled function may have called any of several modules of one class",
}
"""Why the layers of compiled kernels are unknown, by the reason in the name of their row."""

_WHY_SLOW = {
    "same": "that start-up, the model's or the profiler's own, is in the totals",
    "varying": "not all were on the same shapes, so how much of that is start-up is not known",
    "": "that is start-up or other shapes, and is in the totals",
}


@_sentence
def slow_start(layers: list[str], first_ns: int, later_ns: float, shapes: str) -> str:
    """``shapes``: whether the input shapes of all calls were the "same" or "varying"; "" if unknown."""
    return (
        f"The first call of {layers[0]} took {format_time(first_ns)}, the later ones "
        f"{format_time(later_ns)} on average: {_WHY_SLOW[shapes]}."
    )


@_sentence
def launched_before(layers: list[str], kernels: int, device: str, device_ns: int, all_ns: int) -> str:
    """``all_ns``: the time of all kernels in the recording."""
    verb = "was" if kernels == 1 else "were"
    return (
        f"{kernels} kernel{'s' * (kernels > 1)} {verb} launched before the recording began: "
        f"{format_time(device_ns)}, {device_ns / max(all_ns, 1):.1%} of the {device} time in the recording. "
        f"The row {LAUNCHED_BEFORE} has {'it' if kernels == 1 else 'them'}; no layer, step, share or comparison "
        "does."
    )


@_sentence
def graph_breaks(layers: list[str], places: Sequence[str]) -> str:
    breaks = f"graph break{'s' if len(places) > 1 else ''}"
    return f'{len(places)} {breaks} of torch.compile: {some(list(places))}. The report "compiled" says why.'


@_sentence
def compiled_meanwhile(layers: list[str], cpu_ns: int, by_layers: bool) -> str:
    without = "warmup=1 leaves it out" if by_layers else "call the model once before, or use warmup=1"
    took = format_time(cpu_ns)
    return f"torch.compile was at work while this was recorded, for {took}, which is in the totals: {without}."


_of_facts("kernels_divided", "Kernels of several layers are {how} among them: their times are estimates.")


@_sentence
def not_attributable(layers: list[str], reason: str, share: float) -> str:
    """``share``: the fraction of the time in kernels of compiled graphs."""
    why = _WHY_UNKNOWN.get(reason, reason)
    return f"Not attributable: {share:.0%} of the time in kernels of compiled graphs: {why}."


_fixed(
    "inside_compiled",
    "Layers inside compiled code are not called one by one, so their times are unknown (–). To see their share "
    f"of the kernels, use compile_layers=True, and {_COMPILE_IN_IT}.",
)


@_sentence
def machine_busy(layers: list[str], delay_ns: int, wall_ns: int) -> str:
    return (
        f"The machine was busy: for {format_time(delay_ns)} of {format_time(wall_ns)} ({delay_ns / wall_ns:.0%}) the "
        "main thread was ready to run, and other threads or processes had all processors. CPU times are elapsed times, "
        "so that is in the times of whatever ran then. Measure again on an idle machine."
    )


WITHOUT_SHAPES = "uncounted_without_shapes"
"""The only code that is both stored and computed. Only torch knows which of these operators have a formula, so their
names are stored. How often and where they were called is computed from the run."""

_UNCOUNTED = {
    "uncounted_operator": "{names} ({count} call{s}, in {layers})",
    WITHOUT_SHAPES: "{count} call{s} of {names} (in {layers}), recorded without shapes: record_shapes=True records "
    "them",
    "uncounted_generated": "{count} generated kernel{s} of torch.compile (in {layers})",
    "uncounted_graph": "{count} call{s} of compiled graphs, whose kernels were not recorded (in {layers})",
    "uncounted_replayed": "{count} kernel{s} that CUDA graphs replayed (in {layers})",
    "uncounted_replay": "{count} CUDA graph{s}, whose kernels were not recorded (in {layers})",
    "uncounted_no_operator": "{count} kernel{s} that no operator launched: {names} (in {layers})",
    "uncounted_no_launch": "{count} kernel{s} whose launch was not recorded: {names} (in {layers})",
}
_WIDTH = 60  # of a name


def _of_uncounted(code: str, text: str) -> None:
    def sentence(layers: list[str], names: Sequence[str], count: int) -> str:
        words = {"names": some([*map(_short, names)]), "layers": some([*map(_short, layers)])}
        return f"Not counted: {text.format(count=count, s='' if count == 1 else 's', **words)}."

    SENTENCES[code] = sentence


for _code, _text in _UNCOUNTED.items():
    _of_uncounted(_code, _text)

_of_facts("uncounted_more", "Not counted: {operators} more without a formula (calls: {calls}).")


def _short(name: str) -> str:
    """A long name without its middle."""
    head = _WIDTH * 3 // 5
    return name if len(name) <= _WIDTH else f"{name[:head]}…{name[len(name) - (_WIDTH - 1 - head) :]}"
