"""The verdict: what ran, the parts of its time, and what would help. It fits on the first screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from torchprof.advise import Advice, findings_table, gain_in_words, judge, place_in_words, share_of
from torchprof.advise.chains import inside
from torchprof.advise.evidence import Evidence
from torchprof.analyze.compiled import compiled_in_short
from torchprof.analyze.lines import largest_lines
from torchprof.analyze.metrics import mfu
from torchprof.analyze.ratios import unusual_ratios
from torchprof.analyze.report import Part, name_of_layer, stacked
from torchprof.analyze.sentences import about_times, called_models, count_of_ranks, filled, peak_in_words, throughput
from torchprof.analyze.steps import device_parts, ns_behind_the_cpu, percents, spreads_of, time_parts
from torchprof.analyze.top import measures_of
from torchprof.errors import printable
from torchprof.first_screen.headline import headline
from torchprof.run.formats import as_range, format_count, format_memory, format_share, short_time
from torchprof.run.groups import sums_by_key
from torchprof.run.measures import COMBINED, Spread
from torchprof.run.run import Run
from torchprof.run.torch_names import PRODUCT_KERNELS
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE, StepEnd

_WIDTH = 100  # at most, in characters


def verdict(run: Run, width: int | None = None, findings: Sequence[Advice] | None = None) -> list[Part]:
    """The sections of the verdict: what ran, its parts and the headline; what would help; the lines of code;
    unusual ratios; what makes all times less certain than they look.

    ``width``: the number of characters of a line, of which at most 100 are used. ``findings``: all findings, if known.
    """
    width = min(width or _WIDTH, _WIDTH)
    uncertain = stacked(map(printable, about_times(run)))
    ran = stacked([*lines_of_run(run), headline(run)])
    unusual = textwrap.fill(unusual_ratios(run), width)
    return [ran, what_would_help(run, width, findings), *largest_lines(run, width), unusual, uncertain]


# What ran

_GROWTH_SHOWN = 0.02  # of the peak: less is not in the headline
_CALLS_FOR_PERCENTILES = 20  # with fewer calls, less than one is beyond the 95th


def lines_of_run(run: Run) -> list[str]:
    """What ran, and the parts of its time: a line each."""
    lines = [what_ran(run), *parts_of_time(run), compiled_in_short(run)]
    if len(run.metas) > 1:
        from torchprof.ranks import balance_of
        from torchprof.ranks.pipeline_report import pipelines_in_short
        from torchprof.ranks.sentences import straggler

        lines += [straggler(run, balance_of(run)), *pipelines_in_short(run)]
    return [*filter(None, lines)]


def what_ran(run: Run) -> str:
    """Steps or calls with their times, the rate, MFU if the peak of the device was measured, the size of the model and
    its peak memory, in one line."""
    no_grad = [spread for key, spread in run.samples.items() if key.measure == "no_grad_ns"]  # in a run with backward
    times = [_times(run), _distribution(no_grad, "call", " without gradients") if no_grad else ""]
    return printable(" · ".join(filter(None, [*times, _rate(run), _mfu(run), _params(run), _macs(run), *_peak(run)])))


def _times(run: Run) -> str:
    """The time of a step, or of a call of the model: the median with the smallest and the largest."""
    ranks = f"{count_of_ranks(run)} ranks" if len(run.metas) > 1 else ""
    steps = spreads_of(run, OUTSIDE, "step_ns")
    if steps and (any(meta.marked_steps for meta in run.metas) or BACKWARD in run.phases()):
        behind = max(ns_behind_the_cpu(run, meta) for meta in run.metas)
        ahead = f" on the CPU, which runs ahead of {run.meta.device_heading}: {short_time(behind)}" if behind else ""
        is_few = steps[0].count < _CALLS_FOR_PERCENTILES and run.meta.step_end == StepEnd.OPTIMIZER
        ends = ", each until a step of the optimizer" if is_few else ""
        times = f"{_distribution(steps, 'step')}{ends}{ahead}"
    else:
        times = _times_of_calls(run)
    return ", ".join(filter(None, [ranks, times]))


def _times_of_calls(run: Run) -> str:
    """The calls of the model that took the most time, and how many others there are; "" without a call."""
    if not (models := called_models(run)):
        return ""
    spreads = {root: spreads_of(run, root, "cpu_ns") for root in models}
    root = max(models, key=lambda index: sum(spread.sum for spread in spreads[index]))
    others = f" (and {len(models) - 1} more model{'s' * (len(models) > 2)})" if len(models) > 1 else ""
    name = run.layers[root].name + others
    if run.layers[root].same_shapes is False:
        name += ", input shapes differ"
    if not spreads[root] or "cpu_ns" not in run.meta.measured:
        return f"{models[root]:,} call{'s' * (models[root] != 1)} of {name}"
    return _distribution(spreads[root], "forward call", f" of {name}")


def _distribution(spreads: Sequence[Spread], noun: str, suffix: str = "") -> str:
    """The times of the steps or calls of all ranks: "32 forward calls of Net: median 81.2ms, 90% in 79–95.2ms".

    ``spreads``: one for each rank. ``noun``: "forward call", ``suffix``: " of Net".
    """
    whole = sum(spreads[1:], spreads[0])
    if whole.count == 1:
        return f"1 {noun}{suffix}: {short_time(whole.sum)}"
    is_each = len(spreads) > 1 and len({spread.count for spread in spreads}) == 1  # as many on each rank
    count = spreads[0].count if is_each else whole.count
    counted = f"{count:,} {noun}{'s' * (count != 1)}{suffix}{' each' * is_each}"
    median = short_time(whole.median)
    if whole.count < _CALLS_FOR_PERCENTILES:
        return f"{counted}: median {median} ({as_range(short_time(whole.min), short_time(whole.max))})"
    p5, p95 = (short_time(whole.quantile(share)) for share in (0.05, 0.95))
    return f"{counted}: median {median}, 90% in {as_range(p5, p95)}"


def _rate(run: Run) -> str:
    models = called_models(run)
    return "".join(
        throughput(run, root) for root, calls in models.items() if run.layers[root].same_shapes or calls == 1
    )


def _mfu(run: Run) -> str:
    utilization = mfu(run)
    return "" if utilization is None else f"MFU {utilization.text(format_share)}"


def _params(run: Run) -> str:
    """The parameters of all models; a lower bound if those of some layers are unknown."""
    known = [layer.params for layer in run.layers if layer.params is not None]
    bound = "≥ " if len(known) < len(run.layers) else ""
    return f"{bound}{format_count(sum(known))} parameters" if any(known) else ""


def _macs(run: Run) -> str:
    """The MACs of an average forward call, if one model was called."""
    models = called_models(run)
    if "flops" not in run.meta.measured or len(models) != 1:
        return ""
    [root] = models
    tree = run.tree(FORWARD, run.layers.roots.index(root))
    bound = "≥ " if tree.total.uncounted else ""
    return f"{bound}{format_count(tree.total.macs / tree.calls)} MACs a call" if tree.calls else ""


def _peak(run: Run) -> Iterator[str]:
    """The largest peak of memory, and the layer with the largest part of what was live then."""
    memory = max(run.memory, key=lambda device: device.peak_bytes, default=None)
    if memory is None or memory.peak_bytes <= 0:
        return
    by_layer = sums_by_key((held.layer, max(held.nbytes, 0)) for held in memory.held)
    text = f"{memory.device} peak {peak_in_words(run, memory.peak_bytes)}"
    [(largest, nbytes)] = by_layer.most_common(1) or [(OUTSIDE, 0)]
    if nbytes:
        kinds = sums_by_key((held.kind, max(held.nbytes, 0)) for held in memory.held if held.layer == OUTSIDE)
        outside = f"{max(kinds, key=kinds.__getitem__)} outside of layers" if largest == OUTSIDE else ""
        text += f", {nbytes / by_layer.total():.0%} of it {outside or f'in {name_of_layer(run, largest)}'}"
    has_grown = sum(growth.nbytes for growth in memory.growth or ()) >= _GROWTH_SHOWN * memory.peak_bytes
    yield f"{text}, grows by {format_memory(round(memory.growth_per_call or 0))} a call" if has_grown else text


# The parts of the time


def parts_of_time(run: Run) -> Iterator[str]:
    """The parts of the time, in percent that add up to 100: a line for the CPU and, if it was measured, one for the
    device before it. A trace whose layers are only ranges has none."""
    if not run.meta.model and run.layers:
        return
    if "device_ns" in run.meta.measured:
        yield _line_of_parts(f"{run.meta.device_heading}: ", percents(device_parts(run)))
    if "cpu_ns" in run.meta.measured:
        name = "CPU: " if "device_ns" in run.meta.measured else ""
        yield _line_of_parts(name, percents(time_parts(run, "cpu_ns")))


def _line_of_parts(name: str, shares: dict[str, int]) -> str:
    return name + " · ".join(f"{part} {share}%" for part, share in shares.items()) if shares else ""


# What would help

FIRST_SHARE = 0.03
"""A finding with a smaller gain is not on the first screen."""
_FINDINGS = 3  # at most, on the first screen
_LINES = 2  # at most, of a finding, and of its remedy
_MOSTLY_PRODUCTS = 0.5  # the share of the time in products from which on it is said
_FASTER_ALONE = 1.5  # times: from then on it is said
_LOOKED_FOR = "Looked for, as far as recorded: waiting, Python, work done twice, small operators, slow number formats."


def what_would_help(run: Run, width: int = _WIDTH, findings: Sequence[Advice] | None = None) -> Part:
    """Up to three findings that are worth at least 3 % of the time or of the memory, the largest gain first, then those
    whose gain is unknown; or that there is none, and what bounds the run."""
    evidence = Evidence(run)
    if not (first := first_findings(evidence, findings)):
        return textwrap.fill(no_finding(run), width)
    texts = (_wrapped(number, *in_short(advice, evidence), width) for number, advice in enumerate(first, 1))
    gained = (trial for trial in run.trials if trial.rule == COMBINED and trial.has_gained)
    together = (f"All of these that gained: {trial.result}." for trial in gained)
    return findings_table("\n".join(["What would help", *texts, *together]), first)


def first_findings(evidence: Evidence, findings: Sequence[Advice] | None = None) -> list[Advice]:
    """The findings of the first screen. ``findings``: all findings, if they are known."""
    findings = judge(evidence.run).advice if findings is None else findings
    shares = ((advice, share_of(advice.gain, evidence)) for advice in findings)
    return [advice for advice, share in shares if share < 0 or share >= FIRST_SHARE][:_FINDINGS]


def findings_to_try(run: Run) -> list[tuple[str, tuple[str, ...], str]]:
    """The findings of the first screen, each as its rule, the names of its layers, and its remedy in words."""
    return [(advice.rule, advice.layers, advice.action) for advice in first_findings(Evidence(run))]


def in_short(advice: Advice, evidence: Evidence) -> tuple[str, str]:
    """A finding in two sentences: the gain, the place and the cause; and the remedy."""
    return f"{short_gain(advice, evidence)}{place_in_words(advice)}: {advice.cause}", advice.action


def _wrapped(number: int, cause: str, remedy: str, width: int) -> str:
    """A finding and its remedy, each in two lines at most."""
    texts = (f"{number}. {cause}", ""), (f"→ {remedy}", "   ")
    return "\n".join(filled(text, width, first, "   ", max_lines=_LINES, placeholder=" …") for text, first in texts)


def short_gain(advice: Advice, evidence: Evidence) -> str:
    """The largest possible gain: "Up to 31% (24.9ms a step)"; if it was measured: "Measured: 28% (27–30%)"."""
    parts = []
    if advice.measured is not None:
        return gain_in_words(advice, evidence)
    if advice.gain_ns and evidence.recorded_ns:
        per_step = evidence.per_step(advice.gain_ns, in_layers=bool(advice.layers))
        ns = short_time(advice.gain_ns) if per_step is None else f"{short_time(per_step)} a step"
        parts.append(f"{min(advice.gain_ns / evidence.recorded_ns, 1):.0%} ({ns})")
    if advice.gain_bytes and evidence.peak_bytes:
        share = min(advice.gain_bytes / evidence.peak_bytes, 1)
        parts.append(f"{share:.0%} of the peak ({format_memory(advice.gain_bytes)})")
    return f"Up to {' and '.join(parts)}" if parts else "Gain unknown"


def no_finding(run: Run) -> str:
    """That no finding is worth 3 % of the run, how much of the time are products, and what was looked for."""
    if "cpu_ns" not in run.meta.measured and "device_ns" not in run.meta.measured:
        return ""
    if any(meta.lacks_kernels for meta in run.metas):
        return "What would help is unknown, as device times are: many kernels are missing, or cannot be right."
    nothing = f"No change was found that saves {FIRST_SHARE:.0%} of the time."
    field = next(measures_of(run), ("cpu_ns", ""))[0]
    whole = run.rows.of_recording.total(field)
    ns = run.rows.total(field, frames=inside(*PRODUCT_KERNELS))
    looked = _LOOKED_FOR if field == "cpu_ns" else ""
    if whole <= 0 or ns < _MOSTLY_PRODUCTS * whole:
        return f"{nothing} {looked}".rstrip()
    products = f"Matrix products and convolutions take {ns / whole:.0%} of it.{_beside_ordinary(run)}"
    return f"{nothing} {products} {looked}".rstrip()


def _beside_ordinary(run: Run) -> str:
    """How many times as fast the largest layers are when they are computed again alone, with ordinary values; "" if
    that is not known, or near to 1: in a model, a layer reads its weights from farther away."""
    measure = "bfloat16_ns" if dict(run.meta.switches).get("cpu_autocast") == "True" else "ordinary_ns"
    keys = [key for key in run.samples if key.measure == measure and key.phase == FORWARD]
    ordinary_ns = sum(run.samples[key].sum for key in keys)
    times = sum(run.samples[key._replace(measure="cpu_ns")].median for key in keys) / max(ordinary_ns, 1)
    said = f" Computed again alone, with 0.5 for all values, the largest layers are {times:.1f} times as fast."
    return said if ordinary_ns and times >= _FASTER_ALONE else ""
