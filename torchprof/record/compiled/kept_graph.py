"""A compiled graph as Inductor keeps it: the Python source of its calls, and the text of its nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from torchprof.attribute.compiled_graphs import FROZEN
from torchprof.measure.flops.graph_text import GraphText, read_graph
from torchprof.record.compiled.dynamo_sources import Taken
from torchprof.record.compiled.graph_source import TANGENTS, GraphSource, read_source
from torchprof.record.compiled.noted_calls import NotedCalls

_FROZEN = re.compile(r"(\w+): \"[^\"]*\" = self\.(_frozen_param\d+)")
"""The line of a tensor that is a part of the graph, with ``torch._inductor.config.freezing``: its node, its name."""


@dataclass(frozen=True)
class KeptGraph:
    """A graph that was called. Its ``code`` and its ``nodes`` are text: ``source`` and ``text`` parse them.

    ``taken``: its inputs that are parameters; after them, the tensors that are parts of the graph. ``frozen``: the
    names of these, by node.
    """

    code: str
    nodes: str
    taken: tuple[Taken, ...] = ()
    frozen: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Any, inputs: Sequence[Any]) -> KeptGraph:
        """What a graph of Inductor keeps of itself, and which inputs are parameters; both empty if it keeps nothing."""
        code, nodes = (getattr(graph, name, None) for name in ("source_code", "inductor_post_grad_graph_str"))
        if not isinstance(code, str) or not isinstance(nodes, str):
            return cls("", "")
        given = () if TANGENTS in nodes else inputs  # a backward's parameters are those of its forward
        taken = [
            Taken(index, f"input {index}", ()) for index, value in enumerate(given) if isinstance(value, nn.Parameter)
        ]
        frozen = dict(_FROZEN.findall(nodes))
        taken += [Taken(len(inputs) + index, f"{FROZEN}{node}", ()) for index, node in enumerate(frozen)]
        return cls(code, nodes, tuple(taken), frozen)

    def number_of(self, graph: Any, inputs: Sequence[Any], calls: NotedCalls) -> int | None:
        """The number of a call; None if the graph takes no parameters, or is a backward. That gets the number of its
        forward's call from the events: both have the same sequence number."""
        if not self.taken:
            return None
        try:
            return calls.number_of(self.taken, [*inputs, *self._frozen_tensors(graph)] if self.frozen else inputs)
        except (IndexError, TypeError):  # not the inputs of the first call
            return None

    def _frozen_tensors(self, graph: Any) -> list[Any]:
        """The tensors that are parts of a graph, from the module with its code; None for one that it does not have."""
        code = getattr(graph, "current_callable", None)
        of_module = getattr(getattr(code, "__func__", code), "__globals__", {})
        return [of_module.get(name) for name in self.frozen.values()]

    @cached_property
    def source(self) -> GraphSource:
        """Raises ValueError if it cannot be read."""
        return read_source(self.code)

    @cached_property
    def text(self) -> GraphText:
        """Raises ValueError if it cannot be read."""
        return read_graph(self.nodes)

    @property
    def is_readable(self) -> bool:
        """Whether source and text can be read, and are of the same graph."""
        try:
            inputs, of_text = self.source.inputs, tuple(self.text.inputs)
        except ValueError:
            return False
        return inputs == of_text and all(taken.number < len(inputs) + len(self.frozen) for taken in self.taken)

    @cached_property
    def roots(self) -> dict[str, str]:
        """By the name of an input that is a parameter: its root, see ``TracedModule``."""
        names = [*self.source.inputs, *self.frozen]
        return {names[taken.number]: taken.root for taken in self.taken}
