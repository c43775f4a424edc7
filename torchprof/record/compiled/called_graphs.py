"""The graphs of torch.compile that are called while a session records: their texts, the sizes of their inputs, and the
layers of their kernels."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import Lock
from typing import Any, ClassVar

import torch

from torchprof.attribute.compiled_graphs import CompiledGraphs
from torchprof.attribute.events import COMPILED_INPUTS
from torchprof.measure.recording import CalledGraph
from torchprof.record.compiled.graph_parameters import kernels_by_parameters
from torchprof.record.compiled.inductor import Provenance, replace
from torchprof.record.compiled.kept_graph import KeptGraph
from torchprof.record.compiled.noted_calls import NotedCalls
from torchprof.record.plan import Plan
from torchprof.record.session import is_observed, record
from torchprof.record.torch_internals import optional
from torchprof.run.words import COMPILED_BEFORE, LAYERS_NOT_RECORDED

_GRAPHS = "torch._inductor.output_code.CompiledFxGraph"
_NUMBERS = itertools.count(1)


class CalledGraphs:
    """From ``on`` to ``off``, notes each call of a graph of Inductor, whenever it was compiled. A range around the call
    tells with which parameters it was called, unless a ``Provenance`` knows the layers of the graph.

    A method of Inductor's class of graphs is replaced for that, and restored by the last one that goes off. A process
    that did not use torch.compile before ``on`` is left as it is.
    """

    _lock: ClassVar[Lock] = Lock()
    _all_on: ClassVar[list[CalledGraphs]] = []
    _undo: ClassVar[ExitStack] = ExitStack()

    def __init__(self) -> None:
        self.by_key: dict[str, CalledGraph] = {}
        """The graphs by the key in the profiler's range around each call."""
        self._calls = NotedCalls()
        self._kept: dict[str, KeptGraph] = {}  # by key, read when their kernels are asked for

    def on(self) -> None:
        with CalledGraphs._lock:
            if not CalledGraphs._all_on:
                # A process without this module has compiled nothing: torch.compile imports it.
                graphs: Any = optional(_GRAPHS) if _GRAPHS.rpartition(".")[0] in sys.modules else None
                if graphs is not None and "__call__" in vars(graphs):
                    replace(CalledGraphs._undo, (graphs, "__call__"), _noting)
            CalledGraphs._all_on.append(self)
            self._calls = NotedCalls.current() or self._calls  # the numbers of calls stand in the events of all
            self._calls.on()

    def off(self) -> None:
        """Note no more calls. Does nothing the second time."""
        with CalledGraphs._lock:
            if self in CalledGraphs._all_on:
                CalledGraphs._all_on.remove(self)
                self._calls.off()
                if not CalledGraphs._all_on:
                    CalledGraphs._undo.close()

    @property
    def knows_parameters(self) -> bool:
        """Whether graphs that no ``Provenance`` knows were called with parameters."""
        return any(graph.taken for graph in self._kept.values())

    def layers(self, plan: Plan, provenance: Provenance | None) -> CompiledGraphs | None:
        """The layers of all graphs, for the models of a profile; None if nothing is known and it was not requested.

        ``provenance``: the one that was on.
        """
        knows_layers = self.knows_parameters or any(key in Provenance.known for key in self.by_key)
        if provenance is None and not knows_layers:
            return None
        why_unknown = LAYERS_NOT_RECORDED if provenance is None else COMPILED_BEFORE
        kernels, hiding = kernels_by_parameters(self._kept, why_unknown)
        return CompiledGraphs(
            {**kernels, **Provenance.known},
            plan.modules,
            plan.is_alone,
            self._calls.given(plan.holders_of),
            hiding,
            why_unknown,
        )

    def _note(self, key: str, graph: Any, inputs: Sequence[Any]) -> int | None:
        """Note a call. Its number, for the range around it; None if the graph is known, or has no parameters."""
        text = getattr(graph, "inductor_post_grad_graph_str", None)
        if isinstance(text, str):
            called = self.by_key.setdefault(key, CalledGraph(text, []))
            if called.has_symbols and is_observed():
                sizes = (tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in inputs)
                called.calls.append(tuple(sizes))
        if key in Provenance.known or not is_observed():
            return None
        if key not in self._kept:
            self._kept[key] = KeptGraph.of(graph, inputs)
        return self._kept[key].number_of(graph, inputs, self._calls)


def _noting(original: Callable[..., Any], graph: Any, inputs: Sequence[Any]) -> Any:
    """Call a graph, and have the call noted."""
    key = getattr(graph, "_fx_graph_cache_key", "")
    if key is None:  # no cache has it; the range around the call needs a key
        key = graph._fx_graph_cache_key = f"torchprof-called-{next(_NUMBERS)}"
    numbers = [noting._note(key, graph, inputs) for noting in CalledGraphs._all_on if isinstance(key, str)]
    number = numbers[-1] if numbers else None  # all have the same
    if number is None:
        return original(graph, inputs)
    with record(f"{COMPILED_INPUTS}{number}"):
        return original(graph, inputs)
