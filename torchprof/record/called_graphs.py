"""The graphs of torch.compile that are called while a session records: their texts, and the sizes of their inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, ClassVar

import torch

from torchprof.attribute.events import COMPILED_INPUTS
from torchprof.measure.recording import CalledGraph
from torchprof.record.compiler import Provenance
from torchprof.record.session import is_observed, record
from torchprof.record.torch_internals import optional

_GRAPHS = "torch._inductor.output_code.CompiledFxGraph"


class CalledGraphs:
    """From ``on`` to ``off``, notes each call of a graph of Inductor, whenever it was compiled. While a ``Provenance``
    is on, a range around each call tells with which parameters it was called.

    A method of Inductor's class of graphs is replaced for that, and restored by the last one that goes off. A process
    that did not use torch.compile before ``on`` is left as it is.
    """

    _lock: ClassVar[Lock] = Lock()
    _all_on: ClassVar[list[CalledGraphs]] = []
    _undo: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.by_key: dict[str, CalledGraph] = {}
        """The graphs by the key in the profiler's range around each call."""

    def on(self) -> None:
        with CalledGraphs._lock:
            if not CalledGraphs._all_on:
                CalledGraphs._undo = _noting_calls()
            CalledGraphs._all_on.append(self)

    def off(self) -> None:
        """Note no more calls. Does nothing the second time."""
        with CalledGraphs._lock:
            if self in CalledGraphs._all_on:
                CalledGraphs._all_on.remove(self)
                if not CalledGraphs._all_on:
                    CalledGraphs._undo()

    def _note(self, key: str, text: str, inputs: Sequence[Any]) -> None:
        known = self.by_key.get(key)
        if known is None:
            known = self.by_key.setdefault(key, CalledGraph(text, []))
        if known.has_symbols and is_observed():
            known.calls.append(tuple(tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in inputs))


def _noting_calls() -> Callable[[], None]:
    """Have each call of a graph noted. Returns what restores torch."""
    # A process without this module has compiled nothing: torch.compile imports it.
    graphs: Any = optional(_GRAPHS) if _GRAPHS.rpartition(".")[0] in sys.modules else None
    original = None if graphs is None else vars(graphs).get("__call__")
    if original is None:
        return lambda: None

    def call(graph: Any, inputs: Sequence[Any]) -> Any:
        key, text = (getattr(graph, name, None) for name in ("_fx_graph_cache_key", "inductor_post_grad_graph_str"))
        if isinstance(key, str) and isinstance(text, str):
            for one in CalledGraphs._all_on:
                one._note(key, text, inputs)
        number = Provenance.number_of_call(key, graph, inputs) if isinstance(key, str) and is_observed() else None
        if number is None:
            return original(graph, inputs)
        with record(f"{COMPILED_INPUTS}{number}"):
            return original(graph, inputs)

    def undo() -> None:
        if vars(graphs).get("__call__") is call:
            graphs.__call__ = original

    graphs.__call__ = call
    return undo
