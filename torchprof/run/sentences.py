"""The sentence of each warning, made of its layers and facts: a text, or a function for a sentence with cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torchprof.errors import some
from torchprof.run.formats import NumberRanges, format_memory, format_time, ranks_in_words, short_time
from torchprof.run.words import COMPILE_IN_BLOCK, LAUNCHED_BEFORE, WHY_UNKNOWN

Fact = Any
"""An int, float, str or bool, or nested tuples of these: what JSON can store."""

Sentence = Callable[..., str]
_Function = TypeVar("_Function", bound=Sentence)

TOO_MUCH_FOR_STACKS = (
    "With source lines, the profiler records every Python call of the compiler: gigabytes of memory even for a small "
    "model. Call the model once before the block, or use warmup=1."
)

_TEXTS = {
    # Modules and their calls
    "modules_added": "Added or replaced inside the block: {layers}. Their work counts in the layer above.",
    "modules_removed": "Removed inside the block: {layers}. Their figures end there.",
    "layers_unlabelled": "Cannot be labeled: {layers}. Their work counts in the layer above.",
    "never_called": "Never called: {layers}. If another layer uses the parameters, that work counts there.",
    "not_called_when_recorded": "Not called in a recorded pass, but perhaps in others: {layers}.",
    "exported": "{layers}: a graph of torch.export runs the operators of its layers itself, so their figures are "
    "unknown. To see them, profile torch.export.unflatten(program).",
    # Communication between ranks
    "collectives_unmatched": "{count} collective(s) without a known caller: counted outside of layers.",
    "buckets_uncertain": "{count} gradient bucket(s) with unknown layers, as in the first backward of "
    "DistributedDataParallel: counted in the layer of the last gradient before.",
    "buckets_unordered": "The layers of gradient buckets are estimates in {layers}. DistributedDataParallel had not "
    "sorted its buckets when the recording began: it does so after the first backward, but never with "
    "find_unused_parameters=True. A bucket counts in the layers whose gradients were ready before it.",
    "thread_runs": "Another thread of the program uses {share:.0%} of a processor, most often at {line}. If that is "
    "Python, this thread waits for the interpreter meanwhile.",
    # What could not be recorded
    "child_processes": "Processes that the program started are not in the figures: {count}. If they are the ranks of a "
    "job, let torchrun start them (`torchrun … -m torchprof run train.py`), or use a torchprof.Profile in each.",
    "threads_not_recorded": "torch's profiler records the thread that enters the block, and the threads of autograd. "
    "To record all threads, but no memory, with torch 2.7 or newer: `with torchprof.annotate(model), "
    "torch.profiler.profile(experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)) as "
    "p:`, and then `torchprof.from_profiler(p, model)`.",
    "device_without_kernels": "{device} reports no kernels to torch's profiler: its columns are unknown. The columns "
    "of the CPU are correct.",
    "no_device": "{device} was requested, but torch finds no {device} device: its columns are unknown.",
    "device_not_recordable": "{device} was requested, but this version of torch cannot record its kernels: its columns "
    "are unknown.",
    "moved_to_device": "The model was moved to {device} inside the block: only the CPU was recorded. Move it before "
    'the block, or use device="{kind}".',
    "recording_lost": "The last recording is lost: an error occurred while torch's profiler was stopping.",
    "nothing_after_steps": "Nothing was recorded: after {steps} calls of step() the schedule had not started to "
    "record.",
    "nothing_after_warmup": "Nothing was recorded: warmup={warmup} leaves out the first {warmup} calls of the model, "
    "and there were {calls}. Only calls of the model's own forward count. If you use the model in other ways, warm up "
    "before the block.",
    "nothing_after_calls": "Nothing was recorded: the first {warmup} model calls are left out as warm-up, and there "
    "were {calls}.",
    "compiler_unknown": "The layers of kernels that torch.compile generated are unknown: the compiler of this version "
    "of torch does not report them ({reason}). torch 2.13 is supported.",
    "backward_incomplete": "Backward is incomplete: on the meta device it stopped with {error}",
    "counted_on_data": "Counted on random data, on the CPU: on the meta device, {reason}",
    "stacks_left_out": "Source lines were not recorded: torch.compile had not compiled {modules} yet. "
    f"{TOO_MUCH_FOR_STACKS}",
    # Programs that were recorded as a whole
    "calls_reached": "{calls:,} model call(s) recorded, as requested. The program then continued without recording.",
    "too_many_models": "Only the first {count} models have layers. The work of later models counts outside of layers.",
    "gave_way": "The recording ended early: the program started a profiler of its own. Only the time before is in the "
    "figures.",
    "nothing_tried": "Nothing was tried: `--try` needs a single process, and a loop with more than {passes} passes, of "
    "which some are not recorded.",
    "no_model_called": "No model was called: all recorded work is outside of models.",
    "memory_grows": "Memory in use grew by {nbytes} with each call of a model. `torchprof run --memory` shows what "
    "stays.",
    "long_start": "{start_ns} of {wall_ns} passed before the first model call: imports, data, making the model. "
    "`--warmup 1` leaves that out.",
    # Trace files
    "trace_around_unread": "The text {where} the events of {file} could not be read.",
    "trace_end_unread": "All events of {file} were read, but {reason}.",
    "trace_goes_on": "{file} has more text after the end of its trace: it was ignored.",
    "trace_without_operators": "{file} has no operators, as if recorded without ProfilerActivity.CPU: the work of the "
    "CPU is unknown, and so are the operator and the layer of each kernel.",
    "trace_events_missing": "{count} event(s) of {file} are missing: without a name, time or thread, or with an "
    "impossible time.",
    "trace_of_processes": "{file} has events of {count} processes, but torch writes one file per process. Where two "
    "processes use the same numbers, kernels and backward may count in the wrong layer.",
    "trace_without_numbers": "{file} has no sequence numbers, as in traces of torch 1.8: the layers of backward are "
    "unknown, and backward is shown outside of layers.",
    "trace_events_unread": "Missing, because unreadable: {lost:,} of {events:,} events of {file}. The first begins at "
    "character {at:,}.",
    "trace_events_twice": "Twice in {file}, with the same time, thread or stream, name and number: {count:,} event(s). "
    "The copies were ignored. Was the file merged with a copy of itself?",
    "trace_ranges_cross": "{count:,} range(s) of {file} end after the range around them on their thread: they are cut "
    "there, and the rest of their time counts in what is around both.",
    "nested_too_deep": "Ranges, operators or layers are nested {most} deep or more: what is deeper counts in what "
    "is around it.",
    "clocks_differ": "{count:,} kernel(s) or copies of {file} begin before the call that launched them: the clocks of "
    "the CPU and the device differ. The times of each are right, but not which of both came first.",
    "layers_by_alignment": "The trace names no layers: its operators were aligned with those of the model's forward, "
    "in {count:,} call(s).",
    "layers_in_doubt": "Operators that were not found in the model have no layer: {share:.1%} of the time of its "
    "calls. They come after {layers}.",
    "adjacent_forwards": "{count:,} call(s) of the model follow another one at once: they may be parts of one call of "
    "a deeper model.",
    "too_many_places": "Called in more than {most} places, and not shown as layers: {modules}. Their work counts in "
    "the layer around them.",
    "labelled_in_trace_only": "Labeled in the trace, but not in the model: {layers}. Their work counts in the layer "
    "that called them.",
    "session_outside": "The session of the profiler began {before_ns} before the first event and ended {after_ns} "
    "after the last. This time is in no figure.",
    "trace_left_out": "{file} is left out: {why}",
    # What follows from the run
    "inside_compiled": "The times of layers inside compiled code are unknown: compiled code does not call them one by "
    f"one. To see their share of the kernels, use compile_layers=True, and {COMPILE_IN_BLOCK}.",
    "launch_not_recorded": "{device_ns} of {all_ns} {device} time are kernels whose launch was not recorded: they are "
    "of no layer. Record more steps, after warm-up steps.",
    "uncounted_more": "Not counted: {operators} more operators without a FLOPs formula (calls: {calls}).",
}
"""The sentences by their codes, if they only have layers and facts in them: in place of ``{layers}`` and ``{name}``,
tuples as a list and ``_ns`` as times, in words. ``(s)`` is the plural of a noun after ``{count}`` or ``{calls}``."""


def _of_text(code: str, text: str, shown: Callable[[str], str] = lambda name: name) -> Sentence:
    """``shown``: how a name in a list is written."""
    has_facts = "{" in text.replace("{layers}", "")

    def sentence(layers: list[str], **facts: Fact) -> str:
        if facts and not has_facts:
            raise TypeError(f"{code} has no facts")
        words = {name: some([*map(shown, fact)]) if isinstance(fact, tuple) else fact for name, fact in facts.items()}
        words.update((name, format_time(fact)) for name, fact in facts.items() if name.endswith("_ns"))
        words.update((name, format_memory(fact)) for name, fact in facts.items() if name == "nbytes")
        plural = "" if facts.get("count", facts.get("calls")) == 1 else "s"
        return text.replace("(s)", plural).format(layers=some([*map(shown, layers)]), **words)

    return sentence


SENTENCES: dict[str, Sentence] = {code: _of_text(code, text) for code, text in _TEXTS.items()}
"""For each code the function that makes the sentence of the layers and facts."""


def _sentence(function: _Function) -> _Function:
    """Declare a sentence by a function, which has the name of the code."""
    SENTENCES[function.__name__] = function
    return function


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@_sentence
def calls_not_recorded(layers: list[str], calls: int) -> str:
    return f"{_counted(calls, 'call')} of {layers[0]} on other threads {'was' if calls == 1 else 'were'} not recorded."


@_sentence
def kernels_lost(layers: list[str], lost: int, launched: int, unknown: bool) -> str:
    consequence = "Device times and idle time are unknown" if unknown else "Device times are lower bounds"
    return (
        f"{lost:,} of {_counted(launched, 'launched kernel')} were not recorded: probably the profiler's buffers were "
        f"full. {consequence}. Record fewer steps."
    )


@_sentence
def kernels_overlap(layers: list[str], overlapping: int, kernels: int, unknown: bool) -> str:
    consequence = "Device times and idle time are unknown." if unknown else "Some device times are wrong."
    return (
        f"{overlapping:,} of {_counted(kernels, 'kernel')} began before an earlier one on their stream had ended, but "
        f"a stream runs one after another: recorded times are wrong. {consequence}"
    )


@_sentence
def called_by_others(layers: list[str], callers: Sequence[str]) -> str:
    """``callers``: for each of the layers its caller, "" for code outside the model."""
    past = [f"{inner} by {outer or 'code outside the model'}" for inner, outer in zip(layers, callers)]
    return (
        f"Not called by the layer above: {some(past)}. This time counts in the totals of the layers above, not of the "
        "callers, so these totals differ from the duration of calls."
    )


@_sentence
def label_cost(layers: list[str], calls: int, cost_ns: float, is_at_most: bool, wall_ns: int) -> str:
    about = "at most" if is_at_most else "about"
    return (
        f"{cost_ns / wall_ns:.0%} of the recorded time is overhead of torchprof's own labels: {about} "
        f"{format_time(cost_ns)} of {format_time(wall_ns)} ({calls:,} calls, {format_time(cost_ns / calls)} each). "
        "It is in the times of layers."
    )


@_sentence
def clock_set(layers: list[str], jump_ns: int, wall_ns: int) -> str:
    direction = "forward" if jump_ns > 0 else "back"
    return (
        f"The times of this run are wrong: the system clock was set {direction} by {format_time(abs(jump_ns))} during "
        f"a recording of {format_time(wall_ns)}. Measure again."
    )


@_sentence
def ranks_chosen(
    layers: list[str],
    count: int,
    verdict: str,
    ranks: Sequence[int],
    missing: Sequence[int | tuple[int, int]],
    slow: Sequence[int],
    late: Sequence[int],
    may_be_chance: bool,
) -> str:
    """``ranks``: those in the run. ``missing``: those that gave no run, as the first and the last of each range, or one
    by one, as in old files. The others are for the report "ranks"."""
    ranges = [(each, each) if isinstance(each, int) else each for each in missing]
    without = NumberRanges(range(first, last + 1) for first, last in ranges)
    absent = f" {ranks_in_words(without).capitalize()} gave no run." if without else ""
    rest = f"{ranks_in_words(ranks)} {'is' if len(ranks) == 1 else 'are'} in this run, with all figures"
    why = ": stragglers, and some others" if {*slow, *late}.intersection(ranks) else ""
    return f"{count:,} ranks were compared: {verdict}{absent} Only {rest}{why}."


RANKS_CHOSEN = ranks_chosen.__name__


@_sentence
def no_compiled_code(layers: list[str], where: str, reason: str) -> str:
    why = f"gave up on {where}: {reason.rstrip('.')}" if reason else f"is switched off, or gave up on {where}"
    return f"{some(layers)} is compiled, but no compiled code ran: torch.compile {why}."


@_sentence
def start_up(layers: list[str], before_ns: int, first_ns: int, calls: int, all_ns: int) -> str:
    """``before_ns``: before the first call of a model. ``first_ns``: the first step, with ``calls`` calls of models."""
    first = f" and {short_time(first_ns)} in the first step" if calls else ""
    before = f"{short_time(before_ns)} before the first model call"
    return f"Start-up is not in the figures: {before}{first} (`--warmup 0` records it)."


@_sentence
def calls_on_other_threads(layers: list[str], classes: Sequence[tuple[str, int]]) -> str:
    calls = [f"{name} ({count})" for name, count in classes]
    return f"Calls on threads that torch's profiler does not record are missing: {some(calls)}."


@_sentence
def trace_cut(layers: list[str], file: str, events: int, reason: str) -> str:
    return f"{file} is cut off after {_counted(events, 'event')}{reason and ': '}{reason}. Later events are missing."


_WITH_THE_MODEL = (
    "Give the model, and its layers are found by the order of operators: from_trace(trace, model), or --model."
)


@_sentence
def trace_without_layers(
    layers: list[str], file: str, has_call_stacks: bool, kinds: Sequence[tuple[str, int]] = ()
) -> str:
    how = (
        " It was recorded with_stack=True by an old version of torch, which writes the source lines of operators "
        '("Call stack"), but no modules: record it inside `torchprof.annotate(model)`, or with a newer torch.'
    )
    return (
        f"{file} has no layers, so all work is outside of layers.{_of_operators(kinds)} {_WITH_THE_MODEL} A trace has "
        "layers if it was recorded inside torchprof.annotate(model), with_stack=True, or with record_function ranges "
        f"around operators.{how * has_call_stacks}"
    )


@_sentence
def ranges_as_layers(layers: list[str], kinds: Sequence[tuple[str, int]]) -> str:
    return f"The layers are ranges of record_function.{_of_operators(kinds)} {_WITH_THE_MODEL}"


def _of_operators(kinds: Sequence[tuple[str, int]]) -> str:
    """A sentence on the operators by which people know a model, and how often."""
    if not kinds:
        return ""
    times = math.gcd(*(count for _, count in kinds))
    what = some([f"{count // times:,} {kind}" for kind, count in kinds], 6)
    return f" The operators: {f'{times:,} times ' if times > 1 else ''}{what}."


_WHY_SLOW = {
    "same": "This start-up work, of the model or of the profiler, is in the totals",
    "varying": "Input shapes differ between calls, so it is unknown how much of that is start-up",
    "": "This is start-up work or other input shapes, and is in the totals",
}


@_sentence
def slow_start(layers: list[str], first_ns: int, later_ns: float, shapes: str) -> str:
    """``shapes``: whether the input shapes of all calls were the "same" or "varying"; "" if unknown."""
    return (
        f"The first recorded call of {layers[0]} took {format_time(first_ns)}, later calls {format_time(later_ns)} on "
        f"average. {_WHY_SLOW[shapes]}."
    )


@_sentence
def launched_before(layers: list[str], kernels: int, device: str, device_ns: int, all_ns: int) -> str:
    """``all_ns``: the time of all kernels in the recording."""
    verb, them = ("was", "it") if kernels == 1 else ("were", "them")
    return (
        f"{_counted(kernels, 'kernel')} {verb} launched before the recording began: {format_time(device_ns)}, "
        f"{device_ns / max(all_ns, 1):.1%} of the {device} time. The row {LAUNCHED_BEFORE} has {them}; no layer, step, "
        "share or comparison includes this time."
    )


@_sentence
def graph_breaks(layers: list[str], places: Sequence[str]) -> str:
    breaks = _counted(len(places), "graph break")
    return f'{breaks} of torch.compile: {some(list(places))}. The report "compiled" shows the reasons.'


@_sentence
def compiled_meanwhile(layers: list[str], cpu_ns: int, by_layers: bool) -> str:
    without = "use warmup=1" if by_layers else "call the model once before the block, or use warmup=1"
    return f"The totals include {format_time(cpu_ns)} of compilation by torch.compile. To leave it out, {without}."


@_sentence
def not_attributable(layers: list[str], reason: str, share: float, ns: int) -> str:
    """``share``: the fraction of the time in kernels of compiled graphs; ``ns``: that time."""
    why = WHY_UNKNOWN.get(reason, reason)
    of_all = f"{share:.0%} of the time in kernels of compiled graphs ({format_time(ns)})"
    return f"{of_all} is not attributable to layers: {why}."


@_sentence
def layers_by_parameters(layers: list[str], asked: bool) -> str:
    where = "that was compiled before the block" if asked else "of torch.compile"
    return (
        f"In code {where}, a call of a library is at the layer whose parameter it reads or whose gradient it computes; "
        "of its other kernels only the layers before and after are known, if any."
    )


@_sentence
def passes_sampled(layers: list[str], recorded: int, count: int, memory: bool) -> str:
    """``memory``: whether the run has peaks of memory."""
    peaks = " Peaks of memory are of the recorded ones: others may be higher." if memory else ""
    return (
        f"Shares are estimates from {recorded:,} of {count:,} passes of the loop. The others ran without the profiler: "
        f"times are scaled to theirs, those of layers to within some 10%.{peaks}"
    )


@_sentence
def passes_chosen(layers: list[str], recorded: int, count: int) -> str:
    return f"As requested, {recorded:,} of {count:,} passes of the loop are in the figures, and no other time."


@_sentence
def passes_unusual(layers: list[str], longest_ns: int, number: int, line: str, extra_ns: int) -> str:
    """``number``: of the longest one among those of its kind, from 1 on. ``extra_ns``: of all unusual ones."""
    at = f", most often at {line}" if line else ""
    return (
        f"Unusual passes of the loop took {format_time(extra_ns)} longer than others: pass {number:,} of {layers[0]} "
        f"took {format_time(longest_ns)}{at}. This time is in no layer."
    )


@_sentence
def passes_slower(layers: list[str], count: int, first_ns: float, last_ns: float) -> str:
    """``first_ns``, ``last_ns``: of a pass, in the first and in the last quarter of ``count``."""
    return (
        f"Passes of {layers[0]} became slower: {format_time(first_ns)} in the first quarter of {count:,}, "
        f"{format_time(last_ns)} in the last ({last_ns / first_ns - 1:+.0%})."
    )


@_sentence
def machine_busy(layers: list[str], delay_ns: int, wall_ns: int) -> str:
    return (
        f"The machine was busy: the main thread waited for a processor for {format_time(delay_ns)} of "
        f"{format_time(wall_ns)} ({delay_ns / wall_ns:.0%}). Times include this. Measure again on an idle machine."
    )


WITHOUT_SHAPES = "uncounted_without_shapes"
"""The only code that is both stored and computed. Only torch knows which of these operators have a formula, so their
names are stored. How often and where they were called is computed from the run."""

_UNCOUNTED = {
    "uncounted_operator": "{names} ({count} call(s), in {layers})",
    WITHOUT_SHAPES: "{count} call(s) of {names} (in {layers}), recorded without shapes: use record_shapes=True",
    "uncounted_generated": "{count} generated kernel(s) of torch.compile (in {layers})",
    "uncounted_graph": "at least {count} operator(s) in compiled graphs (in {layers})",
    "uncounted_replayed": "{count} kernel(s) that CUDA graphs replayed (in {layers})",
    "uncounted_replay": "{count} CUDA graph(s), whose kernels were not recorded (in {layers})",
    "uncounted_no_operator": "{count} kernel(s) that no operator launched: {names} (in {layers})",
    "uncounted_no_launch": "{count} kernel(s) whose launch was not recorded: {names} (in {layers})",
}
_NAME_WIDTH = 60


def _short(name: str) -> str:
    """A long name without its middle."""
    head = _NAME_WIDTH * 3 // 5
    return name if len(name) <= _NAME_WIDTH else f"{name[:head]}…{name[len(name) - (_NAME_WIDTH - 1 - head) :]}"


SENTENCES.update((code, _of_text(code, f"Not counted: {text}.", _short)) for code, text in _UNCOUNTED.items())
