"""How torch is set: torch.compile, train and eval, gradients on and off, threads, switches for finding errors."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import PurePath

from torchprof.advise import Advice, Gain, merged, rule
from torchprof.advise.chains import always, inside, is_step
from torchprof.advise.evidence import Evidence
from torchprof.analyze.compiled_regions import OF_TORCH, WRAPPED, Compiled, compiled_in, python_name
from torchprof.run.formats import format_memory, format_time
from torchprof.run.layers import Layer
from torchprof.run.meta import Compilation
from torchprof.run.torch_names import BATCH_NORMS, CONVOLUTIONS, FACTORS
from torchprof.run.words import BACKWARD, FORWARD

# torch.compile

_GIVEN = re.compile(r"args\[(\d+)\]")
"""torch's name of an input of a module of ``torch.nn``, and of any function with ``*args``."""
_ONCE_IN_EACH_WAY = "If you need both, call it once in each way before the loop that matters."
_REMEDIES = (
    (
        re.compile(r"tensor '(?P<what>[^']*)' size mismatch at index (?P<at>\d+)"),
        "If this size varies, say so before the first call: `torch._dynamo.mark_dynamic({name}, {at})`{which}, or "
        "compile with `dynamic=True`.",
        "Else pad the inputs to a few sizes.",
    ),
    (re.compile("rank mismatch"), "Call it with tensors of the same number of dimensions each time."),
    (re.compile("stride mismatch"), "Call it with tensors of the same memory layout each time: `.contiguous()`."),
    (
        re.compile(r"tensor '(?P<what>[^']*)' requires_grad mismatch"),
        "The `requires_grad` of `{name}`{which} differs between calls: keep it the same.",
        _ONCE_IN_EACH_WAY,
    ),
    (
        re.compile("(dtype|device|dispatch key set) mismatch|GLOBAL_STATE changed|[Aa]utocast|grad_mode"),
        "Call it with the same types and devices, and in the same modes (`torch.no_grad()`, autocast), each time.",
        _ONCE_IN_EACH_WAY,
    ),
    (
        re.compile(r"\.training\b"),
        "Training and evaluation need a version each: call it once in each mode before the loop that matters.",
    ),
    (re.compile("___check_type_id"), "Call it with values of the same Python types each time."),
    (
        re.compile("___check_obj_id|___check_current_backend"),
        "Call it with the same objects (modules, functions) each time, or compile a function for each of them.",
    ),
    (
        re.compile(r"\blen\("),
        "Call it with lists and dicts of the same length each time: their length is part of the compiled code.",
    ),
    (
        re.compile(r"___stack\d+ == "),
        "This is a value that the code before a graph break computed.",
        "If it is from `.item()`, keep it a tensor, or set `torch._dynamo.config.capture_scalar_outputs = True`.",
    ),
    (
        re.compile(r"G\['(?P<what>\w+)'\] == "),
        "The global variable `{what}` is part of the compiled code: keep it the same, or make it a tensor.",
    ),
    (re.compile(r"== [-\d.]"), "This number is part of the compiled code: pass it as a tensor, or keep it the same."),
)
"""By a pattern of torch's reasons, the sentences of a remedy."""
_ANY_REMEDY = (
    "Keep what torch names here the same in all calls.",
    "`TORCH_LOGS=recompiles` prints each reason as it occurs.",
)
_NO_REASON = "torch did not keep the reason"
_MOST_REASONS = 2
_AT_LIMIT = re.compile("(recompile|cache.size).?limit", re.IGNORECASE)


@rule
def compiled_again(evidence: Evidence) -> Iterator[Advice]:
    """Functions that torch.compile compiled again while they were recorded: a version before did not fit the call.

    The gain is the time of all known versions, with those of their backward, without the longest.
    """
    every = [*chain.from_iterable(meta.compilations for meta in evidence.run.metas)]
    again = [  # during the recording
        compilation
        for compilation in every
        if compilation.step is not None and compilation.name.rpartition("/")[2] != "0" and not compilation.failure
    ]
    if not again:
        return
    usage = compiled_in(evidence.run)
    by_function: defaultdict[tuple[str, str, int], list[Compilation]] = defaultdict(list)
    for compilation in again:
        by_function[compilation.function, compilation.file, compilation.line].append(compilation)
    for key, several in by_function.items():
        versions = [compilation for compilation in several if compilation.phase == FORWARD]
        if not versions:
            continue
        alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)  # by remedy
        for compilation in versions:
            alike[remedy_of(compilation.reason)].append(compilation.reason)
        most = sorted(alike.items(), key=lambda item: len(item[1]), reverse=True)[:_MOST_REASONS]
        why = [
            (f"`{first}`" if first else _NO_REASON) + (f" and {len(more)} more like it" if more else "")
            for _, (first, *more) in most
        ]
        others = len(versions) - sum(len(reasons) for _, reasons in most)
        why += [f"{others} for other reasons"] if others else []
        ns = sum(compilation.ns for compilation in several)
        of_version: Counter[str] = Counter()
        for compilation in every:
            if (compilation.function, compilation.file, compilation.line) == key and not compilation.failure:
                of_version[compilation.name] += compilation.ns
        layer, layers = _layers(evidence, usage, several)
        action, *options = (sentence for remedy, _ in most for sentence in remedy)
        yield Advice(
            layer,
            f"torch.compile compiled {_described(usage, several[0])} again {_times(len(versions))}, for "
            f"{format_time(ns)}: {', '.join(why)}.",
            action,
            min(ns, of_version.total() - max(of_version.values())),
            layers=layers,
            options=" ".join(options),
        )


@rule
def no_longer_compiled(evidence: Evidence) -> Iterator[Advice]:
    """Functions that reached torch.compile's limit of versions: calls that fit none run without torch.compile. The gain
    is unknown."""
    for compilation in chain.from_iterable(meta.compilations for meta in evidence.run.metas):
        if compilation.phase == BACKWARD or not _AT_LIMIT.search(compilation.failure):
            continue
        usage = compiled_in(evidence.run)
        layer, layers = _layers(evidence, usage, [compilation])
        last = f" The last reason: `{compilation.reason}`." if compilation.reason else ""
        action, *options = remedy_of(compilation.reason)
        yield Advice(
            layer,
            f"torch.compile gave up on {_described(usage, compilation)}: it had compiled as many versions as it may.",
            action,
            layers=layers,
            details=f"Calls that fit none of them run without torch.compile.{last}",
            options=" ".join([*options, "To allow more versions: `torch._dynamo.config.recompile_limit`."]),
        )


@rule
def graph_broken(evidence: Evidence) -> Iterator[Advice]:
    """Graph breaks for which torch has a hint. The gain is unknown: what the parts of a function cost is not
    recorded."""
    if not any(region.break_hint for meta in evidence.run.metas for region in meta.regions):
        return
    usage = compiled_in(evidence.run)
    for region, uses in usage.breaks.items():
        if not region.break_hint:
            continue
        numbers = dict.fromkeys(use.layer for use in uses)
        yield Advice(
            ", ".join(map(evidence.name_of, numbers)),
            f"The compiled graph ends at {region.break_place}, {_times(sum(use.calls for use in uses))}: "
            f"{region.break_reason.rstrip('.')}.",
            region.break_hint,
            layers=tuple(evidence.name_of(number) for number in numbers if number >= 0),
        )


def remedy_of(reason: str) -> tuple[str, ...]:
    """The sentences on what to change, for torch's reason to compile again."""
    for pattern, *remedy in _REMEDIES:
        if match := pattern.search(reason):
            known = match.groupdict(default="")
            given = _GIVEN.fullmatch(known.get("what", ""))
            which = f" (`x`: input {int(given[1]) + 1})" if given else ""
            known["name"] = "x" if given else known.get("what", "")
            return tuple(sentence.format(**known, which=which) for sentence in remedy)
    return _ANY_REMEDY


def _layers(evidence: Evidence, usage: Compiled, several: list[Compilation]) -> tuple[str, tuple[str, ...]]:
    """The layers that some compilations were for: as one name, and each."""
    functions = {compilation.name.partition("/")[0] for compilation in several}
    numbers = dict.fromkeys(use.layer for use in usage.uses if use.name.partition("/")[0] in functions)
    name = ", ".join(map(evidence.name_of, numbers)) or ", ".join(evidence.run.meta.model)
    return name, tuple(evidence.name_of(number) for number in numbers if number >= 0)


def _described(usage: Compiled, compilation: Compilation) -> str:
    """The compiled function, with its file and line."""
    of = compilation.name.partition("/")[0]
    known = next((use.known for use in usage.uses if use.known and use.name.partition("/")[0] == of), None)
    if known is not None:
        return python_name(known)
    if compilation.function == WRAPPED:
        return OF_TORCH
    file = PurePath(compilation.file).name
    if file:
        return f"{compilation.function} ({file}:{compilation.line})"
    return compilation.function or f"the region {compilation.name}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# Modes and switches

_DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")
_THREADS = 4
_LONG_NS = 200_000  # shorter products gain little from threads
_LEAST_PRODUCTS = 0.1  # of the recorded time


@rule
def eval_forgotten(evidence: Evidence) -> Iterator[Advice]:
    """Dropout and batch normalization layers that were called in train mode, in a run without backward and optimizer.

    If the run is inference, its results are random or depend on the rest of the batch, and the running statistics
    change. So it is reported however little time it takes.
    """
    if _trains(evidence):
        return
    numbers = [
        number
        for number, layer in enumerate(evidence.run.layers)
        if layer.training and evidence.forward_calls[number] and _depends_on_mode(layer)
    ]
    if not numbers:
        return
    took = evidence.took(always, phases=(FORWARD,))
    first = evidence.run.layers[numbers[0]]
    more = f" and {len(numbers) - 1} more layer{'s' * (len(numbers) > 2)} were" if len(numbers) > 1 else " was"
    yield Advice(
        ", ".join(dict.fromkeys(evidence.run.layers[number].path[0] for number in numbers)),
        f"{first.name} ({first.kind}){more} called in train mode, for "
        f"{format_time(sum(evidence.time_of(took[number]) for number in numbers))}, but no backward was recorded.",
        "If this is inference, call `model.eval()` first: otherwise results are random or depend on the batch.",
        layers=tuple(evidence.run.layers[number].name for number in numbers),
    )


@rule
def gradients_never_used(evidence: Evidence) -> Iterator[Advice]:
    """Memory that forward calls saved for a backward that did not run: samples of ``kept_bytes`` in a run without
    backward and optimizer. Under ``no_grad`` they are all 0. The memory may be used after the recording, so the remedy
    is a condition."""
    if _trains(evidence):
        return
    layers = evidence.run.layers
    kept: Counter[int] = Counter()
    by_model: defaultdict[int, set[int]] = defaultdict(set)
    for key, spread in evidence.samples["kept_bytes"]:
        if key.layer >= 0 and spread.sum > 0:
            by_model[layers.lineage(key.layer)[0]].add(key.layer)
            kept[key.layer] += spread.sum
    per_call, gains = {}, {}
    for model, numbers in by_model.items():
        per_call[model] = sum(kept[number] for number in numbers) // max(evidence.timed_calls(model), 1)
        gains[model] = Gain(nbytes=per_call[model] * max(len(evidence.durations(model)), 1))
    for group in merged(evidence, gains):
        nbytes = sum(per_call[model] for model in group.numbers)
        of_each = f" of each of {len(group.numbers)} models" if len(group.numbers) > 1 else ""
        on_rank = f" on each of {len(evidence.run.metas)} ranks" if len(evidence.run.metas) > 1 else ""
        most = max((number for model in group.numbers for number in by_model[model]), key=kept.__getitem__)
        yield group.advice(
            f"A forward call{of_each} leaves {format_memory(nbytes)} saved for backward on average{on_rank}, most "
            f"of it in {evidence.name_of(most)}, but no backward was recorded.",
            "If this is inference, run it under `torch.inference_mode()` or `torch.no_grad()`.",
        )


@rule
def anomaly_detection_on(evidence: Evidence) -> Iterator[Advice]:
    """``torch.autograd.set_detect_anomaly`` was on at the end. It is always reported: the whole recording is slower, by
    an unknown amount."""
    if evidence.switches.get("detect_anomaly") == "True":
        yield Advice(
            ", ".join(evidence.run.meta.model),
            "Anomaly detection was on: each forward operator stores its stack, and each backward operator is checked "
            "for NaN.",
            "Remove `torch.autograd.set_detect_anomaly(True)` unless you are looking for a NaN, and measure again.",
            details="All times include that.",
        )


@rule
def few_threads(evidence: Evidence) -> Iterator[Advice]:
    """Operators that run on a quarter of the usable processors or fewer: ``torch.set_num_threads(1)`` that was left in
    a script, or OMP_NUM_THREADS=1, which torchrun sets.

    Two logical processors may be one core, so threads on half of them are enough, and the gain is as if long matrix
    products and convolutions ran on that many.
    """
    threads, usable = (int(evidence.switches.get(name, 0)) for name in ("num_threads", "usable_cpus"))
    run = evidence.run
    if not 0 < threads * _THREADS <= usable or evidence.device != "cpu" or run.meta.world_size > 1:
        return
    took = evidence.took(inside(*FACTORS, *CONVOLUTIONS)).values()
    products = sum(work.cpu_ns for work in took if work.cpu_ns >= _LONG_NS * work.calls)
    if products < _LEAST_PRODUCTS * evidence.recorded_ns:
        return
    cores = usable // 2
    yield Advice(
        ", ".join(run.meta.model),
        f"Operators run on {threads} thread{'s' * (threads > 1)}, and {usable} processors are usable.",
        f"`torch.set_num_threads({cores})`, or `OMP_NUM_THREADS={cores}` in the environment.",
        products * (cores - threads) // cores,
        details=f"Long matrix products and convolutions take {format_time(products)}.",
    )


@rule
def deterministic_algorithms_on(evidence: Evidence) -> Iterator[Advice]:
    """``torch.use_deterministic_algorithms`` was on at the end. It is always reported, because the time of the faster
    kernels is unknown."""
    if evidence.switches.get("deterministic_algorithms") == "True":
        yield Advice(
            ", ".join(evidence.run.meta.model),
            "Deterministic algorithms were on: some operators use slower kernels, and memory from `torch.empty` is "
            "filled.",
            "Remove `torch.use_deterministic_algorithms(True)` unless results must be bitwise reproducible.",
            options="If they must, set `torch.utils.deterministic.fill_uninitialized_memory = False`.",
        )


def _trains(evidence: Evidence) -> bool:
    """Whether there was a backward, or the step of an optimizer, whose backward may not have been recorded."""
    return BACKWARD in evidence.run.phases() or evidence.any_row(is_step)


def _depends_on_mode(layer: Layer) -> bool:
    if layer.kind in BATCH_NORMS:
        return "track_running_stats=False" not in layer.settings
    return layer.kind in _DROPOUTS and not layer.settings.startswith(("p=0,", "p=0.0,"))
