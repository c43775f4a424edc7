"""Functions that torch.compile compiled again, gave up on, or compiled in parts because of a graph break."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import PurePath

from torchprof.advise import Advice, rule
from torchprof.advise.evidence import Evidence
from torchprof.analyze.compiled_regions import OF_TORCH, WRAPPED, Compiled, RegionUse, compiled_in, python_name
from torchprof.run.formats import format_time
from torchprof.run.groups import lists_by_key, sums_by_key
from torchprof.run.meta import Compilation
from torchprof.run.words import BACKWARD, FORWARD

# Remedies for torch's reasons

_UNNAMED_INPUT = re.compile(r"args\[(\d+)\]")
"""torch's name of an input of a module of ``torch.nn``, and of any function with ``*args``."""
_REMEDIES = (
    (
        re.compile(r"tensor '(?P<what>[^']*)' size mismatch at index (?P<at>\d+)"),
        "If this size varies, say so before the first call: `torch._dynamo.mark_dynamic({name}, {at})`{which}, or "
        "compile with `dynamic=True`.",
        "Else pad the inputs to a few sizes.",
    ),
    (
        re.compile(r"requires_grad mismatch|GLOBAL_STATE changed|[Aa]utocast|grad_mode|\.training\b"),
        "Each mode needs a version: if you need both, call it once in each before the loop that matters.",
    ),
    (
        re.compile(r"___stack\d+ == "),
        "This is a value that the code before a graph break computed.",
        "If it is from `.item()`, keep it a tensor, or set `torch._dynamo.config.capture_scalar_outputs = True`.",
    ),
    (re.compile(r"== [-\d.]"), "This value is part of the compiled code: pass it as a tensor, or keep it the same."),
)
"""By a pattern of torch's reasons, the sentences of a remedy: ``Advice.action``, then ``Advice.options``."""
_ANY_REMEDY = (
    "Keep what torch names here the same in all calls.",
    "`TORCH_LOGS=recompiles` prints each reason as it occurs.",
)


def remedy_of(reason: str) -> tuple[str, ...]:
    """The sentences on what to change, for torch's reason to compile again."""
    for pattern, *remedy in _REMEDIES:
        if match := pattern.search(reason):
            named = match.groupdict(default="")
            unnamed = _UNNAMED_INPUT.fullmatch(named.get("what", ""))
            which = f" (`x`: input {int(unnamed[1]) + 1})" if unnamed else ""
            named["name"] = "x" if unnamed else named.get("what", "")
            return tuple(sentence.format(**named, which=which) for sentence in remedy)
    return _ANY_REMEDY


# Rules

_NO_REASON = "torch did not keep the reason"
_MOST_REASONS = 2
_AT_LIMIT = re.compile("(recompile|cache.size).?limit", re.IGNORECASE)


@rule
def compiled_again(evidence: Evidence) -> Iterator[Advice]:
    """Functions that torch.compile compiled again while they were recorded: a version before did not fit the call."""
    compiled = [compilation for compilation in _compilations(evidence) if not compilation.failure]
    versions_of = _by_function(compiled)
    recompiled = _by_function(each for each in compiled if each.step is not None and not each.is_first_version)
    for function, again in recompiled.items():
        reasons = [compilation.reason for compilation in again if compilation.phase == FORWARD]
        if not reasons:
            continue
        usage = compiled_in(evidence.run)
        ns = sum(compilation.ns for compilation in again)
        version_ns = sums_by_key((compilation.name, compilation.ns) for compilation in versions_of[function])
        why, (action, *options) = _reasons_and_remedy(reasons)
        layer, layers = _layers(evidence, usage, again)
        yield Advice(
            layer,
            f"torch.compile compiled {_described(usage, again[0])} again {_times(len(reasons))}, for "
            f"{format_time(ns)}: {why}.",
            action,
            min(ns, version_ns.total() - max(version_ns.values())),
            layers=layers,
            options=" ".join(options),
        )


def _compilations(evidence: Evidence) -> Iterator[Compilation]:
    return chain.from_iterable(meta.compilations for meta in evidence.run.metas)


def _by_function(compilations: Iterable[Compilation]) -> dict[tuple[str, str, int], list[Compilation]]:
    """Compilations by the function that they compiled: its name, file and first line."""
    by_function: defaultdict[tuple[str, str, int], list[Compilation]] = defaultdict(list)
    for compilation in compilations:
        by_function[compilation.function, compilation.file, compilation.line].append(compilation)
    return by_function


def _reasons_and_remedy(reasons: Iterable[str]) -> tuple[str, list[str]]:
    """The most frequent reasons in words, and the sentences of their remedies. Reasons with one remedy count as one."""
    by_remedy = lists_by_key((remedy_of(reason), reason) for reason in reasons)
    most_frequent = sorted(by_remedy.items(), key=lambda item: len(item[1]), reverse=True)
    in_words = []
    for _, (first, *more) in most_frequent[:_MOST_REASONS]:
        in_words.append((f"`{first}`" if first else _NO_REASON) + (f" and {len(more)} more like it" if more else ""))
    if others := sum(len(alike) for _, alike in most_frequent[_MOST_REASONS:]):
        in_words.append(f"{others} for other reasons")
    return ", ".join(in_words), [sentence for remedy, _ in most_frequent[:_MOST_REASONS] for sentence in remedy]


@rule
def no_longer_compiled(evidence: Evidence) -> Iterator[Advice]:
    """Functions that reached torch.compile's limit of versions: calls that fit none run without torch.compile."""
    for compilation in _compilations(evidence):
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
    """Graph breaks for which torch has a hint. What the parts of a function cost is not recorded."""
    if not any(region.break_hint for meta in evidence.run.metas for region in meta.regions):
        return
    usage = compiled_in(evidence.run)
    for region, uses in usage.breaks.items():
        if not region.break_hint:
            continue
        layer, layers = _named(evidence, uses)
        yield Advice(
            layer,
            f"The compiled graph ends at {region.break_place}, {_times(sum(use.calls for use in uses))}: "
            f"{region.break_reason.rstrip('.')}.",
            region.break_hint,
            layers=layers,
        )


def _layers(evidence: Evidence, usage: Compiled, compilations: Sequence[Compilation]) -> tuple[str, tuple[str, ...]]:
    """The layers that some compilations were for: as one name, and each."""
    frames = {_frame_id(compilation.name) for compilation in compilations}
    name, layers = _named(evidence, [use for use in usage.uses if _frame_id(use.name) in frames])
    return name or ", ".join(evidence.run.meta.model), layers


def _named(evidence: Evidence, uses: Iterable[RegionUse]) -> tuple[str, tuple[str, ...]]:
    """The layers in which regions were used: as one name, and each."""
    numbers = dict.fromkeys(use.layer for use in uses)
    return ", ".join(map(evidence.name_of, numbers)), tuple(evidence.name_of(layer) for layer in numbers if layer >= 0)


def _described(usage: Compiled, compilation: Compilation) -> str:
    """The compiled function, with its file and line."""
    frame = _frame_id(compilation.name)
    known = next((use.known for use in usage.uses if use.known and _frame_id(use.name) == frame), None)
    if known is not None:
        return python_name(known)
    if compilation.function == WRAPPED:
        return OF_TORCH
    if file := PurePath(compilation.file).name:
        return f"{compilation.function} ({file}:{compilation.line})"
    return compilation.function or f"the region {compilation.name}"


def _frame_id(compile_id: str) -> str:
    """The part of a compile id that all versions of one piece of code share: "3" of "3/0" and "3/1"."""
    return compile_id.partition("/")[0]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
