"""The layer that causes the peak of memory, and how it could allocate less."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import inf

from torchprof.advise import Advice, Gain, merged, merged_into_one, rule
from torchprof.advise.evidence import Evidence
from torchprof.advise.gradients import could_be_fused, optimizers_of
from torchprof.analyze.memory import growth_in_words, holder_in_words, name_of_device
from torchprof.run.formats import format_memory
from torchprof.run.groups import sums_by_key
from torchprof.run.timeline import Memory
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED, OUTSIDE, OUTSIDE_NAME

_LEAST_SHARE = 1 / 3  # of the live memory at the peak
_LEAST_BYTES = 2**20
_KINDS = ("activations", "temporaries")
_LEAST_OF_KIND = 0.05  # of the live memory at the peak, of a kind with a remedy of its own
_LEAST_GROWTH, _LEAST_BYTES_THAT_GROW = 0.02, 2**18  # of memory that stays of each call, at the peak
_LEAST_STATE = 0.4  # of the live memory at the peak, of the state of optimizers: with Adam it is a third of many peaks
_LEAST_OTHERS = {"other parameters": 0.15, "other tensors": 0.6}  # of the same
_LEAST_SPREAD = 0.5  # of the same, of activations that many layers have
_SMALL_PART = 0.01  # smaller parts of a layer's bytes are not named

_Bytes = Counter[tuple[str, str]]
"""Live bytes by their kind and the phase that allocated them."""


@rule
def memory_that_grows(evidence: Evidence) -> Iterator[Advice]:
    """Memory that stays of each call of a model, and is live at the peak: results that the caller's code keeps, with
    the autograd graphs behind them or without.

    Measured with the losses of 40 calls of a model of two ``Linear`` in a list, on a CPU: the peak is 16.50 MB above
    the start, with ``loss.item()`` and with ``loss.detach()`` 1.06 MB, under ``torch.no_grad()`` 0.50 MB.
    """
    for memory in evidence.run.memory:
        live = _growth_at_peak(memory)
        layers = sums_by_key((growth.layer, live[growth[:3]]) for growth in memory.growth or ())
        if layers.total() < max(_LEAST_GROWTH * memory.bytes_at_peak, _LEAST_BYTES_THAT_GROW):
            continue
        gains = {layer: Gain(nbytes=nbytes) for layer, nbytes in layers.most_common() if nbytes}
        cause, remedy = f"{growth_in_words(memory)}.", _remedy_of_growth(evidence, memory)
        yield merged_into_one(evidence, gains).advice(cause, remedy)


def _growth_at_peak(memory: Memory) -> Counter[tuple[int, str, str]]:
    """The bytes that grew and are live at the peak, by layer, phase and kind."""
    live = sums_by_key((held[:3], held.nbytes) for held in memory.held)
    return Counter({growth[:3]: min(growth.nbytes, live[growth[:3]]) for growth in memory.growth or ()})


def _remedy_of_growth(evidence: Evidence, memory: Memory) -> str:
    """How to keep less of each call: numbers, or results without their graphs, or nothing."""
    holder, layers = memory.holder, {growth.layer for growth in memory.growth or ()}
    saved = {key.layer for key, spread in evidence.samples["kept_bytes"] if spread.sum}
    if not (holder.with_graph if holder is not None else layers & saved):
        return "Keep only what is needed of each call (a sum, a metric, a copy in a file), or clear what keeps it."
    if holder is not None and holder.are_numbers:
        return "Keep numbers (`loss.item()`), not tensors with their graphs; in evaluation, use `torch.no_grad()`."
    return "Keep results without their graphs (`.detach()`, in evaluation `torch.no_grad()`), or only a number of each."


@rule
def layer_that_makes_the_peak(evidence: Evidence) -> Iterator[Advice]:
    """One layer, or the code outside all layers, that allocated much of the live memory at the peak of a device:
    activations (saved for backward or returned) and temporaries. Also: all layers with activations together."""
    large = _large_at_peak(evidence)
    bytes_of = {layer: sum(by_peak.values(), _Bytes()) for layer, by_peak in large.items()}
    remedies = {layer: _remedy(evidence, live.most_common(1)[0][0][0]) for layer, live in bytes_of.items()}
    gains = {layer: Gain(nbytes=live.total()) for layer, live in bytes_of.items()}
    for group in merged(evidence, gains, remedies):
        peaks = [evidence.run.memory[index] for index in {index for layer in group.numbers for index in large[layer]}]
        live = sum((bytes_of[layer] for layer in group.numbers), _Bytes())
        all_bytes = sum(memory.bytes_at_peak for memory in peaks)
        [device, *others] = (name_of_device(evidence.run, memory) for memory in peaks)
        where = f"the peaks of {len(peaks)} devices" if others else f"the peak of {device}"
        above = " above the start" if any(memory.before is None for memory in peaks) else ""
        parts = ", ".join(
            f"{format_memory(nbytes)} {kind} of {phase}"
            for (kind, phase), nbytes in live.most_common()
            if nbytes >= _SMALL_PART * live.total()
        )
        yield group.advice(
            f"{live.total() / all_bytes:.0%} of {where} ({format_memory(all_bytes)}{above}) was allocated here: "
            f"{parts}.",
            remedies[group.numbers[0]],
        )


@rule
def temporaries_at_the_peak(evidence: Evidence) -> Iterator[Advice]:
    """What is live at the peak of a device without need: casts of weights that autocast keeps, in calls without
    gradients; temporaries of optimizers that have a fused step there.

    Measured with eight ``Linear(1024, 1024)`` on a CPU: the peak is 16.21 MB above the start and a call takes 3.1 ms,
    2.20 MB and 2.8 ms without the cache, 0.20 MB and 1.8 ms with weights in bfloat16. With Adam, a model of 12 MB and
    a largest parameter of 8 MB: a step lifts the peak by 16.00 MB, with ``foreach=True`` by 12.04 MB, with
    ``fused=True`` by 0.03 MB.
    """
    for memory, casts in _live_of_kind(evidence, "weight casts"):
        yield Advice(
            ", ".join(evidence.run.meta.model),
            f"{_share_of_peak(evidence, memory, casts.total())} are casts of weights, which `torch.autocast` keeps "
            "until its context ends.",
            "Use `torch.autocast(…, cache_enabled=False)`, or weights in the smaller type (`model.bfloat16()`).",
            gain_bytes=casts.total(),
            layers=tuple(evidence.name_of(layer) for layer, nbytes in casts.most_common() if layer >= 0),
        )
    names = could_be_fused(evidence)
    for memory, temporaries in _live_of_kind(evidence, "optimizer temporaries") if names else ():
        yield Advice(
            OUTSIDE_NAME,
            f"{_share_of_peak(evidence, memory, temporaries.total())} are temporaries of the optimizer "
            f"({', '.join(names)}).",
            f"Use {' and '.join(f'`torch.optim.{name}(…, fused=True)`' for name in names)}, which has none.",
            gain_bytes=temporaries.total(),
        )


@rule
def optimizer_state_at_the_peak(evidence: Evidence) -> Iterator[Advice]:
    """The state of optimizers that is the largest part of the live memory at the peak of a device.

    Measured with fused Adam and a model of 13.9 MB, on a CPU: the whole peak is 55.4 MB, with ``Adafactor`` 36.7 MB,
    with ``SGD`` without momentum 27.8 MB. With ``LBFGS`` and a model of 1 MB, it is 163.9 MB with the default
    ``history_size`` of 100, and 29.4 MB with 10.
    """
    for memory in evidence.run.memory:
        state = dict(memory.before or ()).get("optimizer state", 0)
        if state >= max(_LEAST_STATE * memory.bytes_at_peak, _LEAST_BYTES):
            names = f" ({', '.join(optimizers)})" if (optimizers := optimizers_of(evidence)) else ""
            yield Advice(
                OUTSIDE_NAME,
                f"{_share_of_peak(evidence, memory, state)} are optimizer state{names}.",
                "Use an optimizer with less state, if it trains as well: `torch.optim.Adafactor`, `SGD`, 8-bit states."
                if "LBFGS" not in optimizers
                else "Keep fewer updates: `torch.optim.LBFGS(…, history_size=10)`.",
                gain_bytes=state,
                options="On several ranks, shard the state (ZeRO, FSDP).",
            )


@rule
def others_at_the_peak(evidence: Evidence) -> Iterator[Advice]:
    """Tensors that were live at the start and are not of the models and their optimizers, if they are a large part of
    the live memory at the peak: data, caches, copies of a model.

    Measured on a CPU: 37.7 MB of pictures in one tensor, read batch by batch, take the whole peak from 75.5 to 4.8 MB.
    A cache of keys and values in bfloat16 in place of float32 takes it from 36.7 to 21.0 MB; a copy of the model in a
    file, from 43.6 to 23.1 MB.
    """
    for memory in evidence.run.memory:
        for kind, nbytes in memory.before or ():
            if nbytes < max(_LEAST_OTHERS.get(kind, inf) * memory.bytes_at_peak, _LEAST_BYTES):
                continue
            what, remedy = _OF_OTHERS[kind]
            is_most = nbytes == max(dict(memory.before or ()).get(each, 0) for each in _OF_OTHERS)
            where = f": {holder_in_words(memory.others)}" if memory.others and is_most else ""
            cause = f"{_share_of_peak(evidence, memory, nbytes)} are {what}{where}."
            yield Advice(OUTSIDE_NAME, cause, remedy, gain_bytes=nbytes)


_OF_OTHERS = {
    "other parameters": (
        "parameters of modules that are not profiled, such as a copy of the model",
        "If nothing uses them now, keep them in a file (`torch.save(model.state_dict(), …)`), or `del` the module.",
    ),
    "other tensors": (
        "tensors that were loaded or made before the start",
        "Load data batch by batch (`DataLoader`), use a smaller type (`bfloat16`, `uint8`), or `del` what is used up.",
    ),
}


def _share_of_peak(evidence: Evidence, memory: Memory, nbytes: int) -> str:
    return f"{nbytes / memory.bytes_at_peak:.0%} of what is live at the peak of {name_of_device(evidence.run, memory)}"


def _live_of_kind(evidence: Evidence, kind: str) -> Iterator[tuple[Memory, Counter[int]]]:
    """The peaks of which memory of a kind is a large part, with its bytes by layer; what was live at the start has
    none."""
    for memory in evidence.run.memory:
        live = sums_by_key((held.layer, held.nbytes) for held in memory.held if held.kind == kind)
        live[OUTSIDE] += dict(memory.before or ()).get(kind, 0)
        if live.total() >= max(_LEAST_OF_KIND * memory.bytes_at_peak, _LEAST_BYTES):
            yield memory, live


def _large_at_peak(evidence: Evidence) -> dict[int, dict[int, _Bytes]]:
    """The live bytes of the layers that have enough of them, by layer and the index of the peak in ``Run.memory``."""
    called = sum(key.phase == FORWARD for key, _ in evidence.samples["cpu_ns"])
    share = max(_LEAST_SHARE, 2 / max(called, 1))
    large: defaultdict[int, dict[int, _Bytes]] = defaultdict(dict)
    for index, memory in enumerate(evidence.run.memory):
        bytes_of: defaultdict[int, _Bytes] = defaultdict(Counter)
        activations: defaultdict[int, _Bytes] = defaultdict(Counter)
        grown, most = _growth_at_peak(memory), _bytes_of_a_call(evidence, memory)
        for held in memory.held:
            if (nbytes := held.nbytes - grown[held[:3]]) > 0 and held.layer != NOT_SELECTED and held.kind in _KINDS:
                if held.kind == "activations" and held.layer >= 0:  # more is of earlier calls
                    nbytes = min(nbytes, most.get((held.layer, held.phase), nbytes))
                    activations[held.layer][held.kind, held.phase] += nbytes
                bytes_of[held.layer][held.kind, held.phase] += nbytes
        for layer, live in bytes_of.items():
            if live.total() >= max(share * memory.bytes_at_peak, _LEAST_BYTES):
                large[layer][index] = live
        spread = sum(live.total() for live in activations.values())
        if not large and spread >= max(_LEAST_SPREAD * memory.bytes_at_peak, _LEAST_BYTES):
            for layer, live in sorted(activations.items(), key=lambda each: -each[1].total()):
                large[layer][index] = live
    return large


def _bytes_of_a_call(evidence: Evidence, memory: Memory) -> dict[tuple[int, str], int]:
    """The most that one call of the outermost layer can leave of a layer, by layer and phase: its peak in a call, as
    often as it is called in one."""
    calls = {key.layer: spread.count for key, spread in evidence.samples["cpu_ns"] if key.phase == FORWARD}
    outermost = max((calls.get(root, 0) for root in evidence.run.layers.roots), default=0)
    return {
        (key.layer, key.phase): spread.max * -(-spread.count // max(outermost, 1))
        for key, spread in evidence.samples["peak_bytes"]
        if key.device == memory.device and key.rank == memory.rank
    }


def _remedy(evidence: Evidence, kind: str) -> str:
    """How to allocate less memory of this kind."""
    if kind == "temporaries":
        return "Compute in parts (`torch.chunk`), in place, or with an operator without this intermediate result."
    if BACKWARD in evidence.run.phases():
        return (
            "Use activation checkpointing (`torch.utils.checkpoint`), half precision (`torch.autocast`), or smaller "
            "micro-batches with gradient accumulation."
        )
    return "Use smaller batches, or return fewer tensors."
