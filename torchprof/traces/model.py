"""The modules of a model, in the form in which ``traces.matching`` matches them with the modules of a trace."""

from __future__ import annotations

from torch.nn.parameter import is_lazy

from torchprof.record.modules import user_class_of
from torchprof.record.plan import Plan
from torchprof.traces.call_order import call_order
from torchprof.traces.module_trees import ModelModule


def model_modules(plan: Plan) -> list[ModelModule]:
    """All places of modules, in their order. A module that no longer exists has no parameters."""
    first: dict[int, int] = {}  # ID of a module → its first place
    orders: dict[type, dict[str, bool]] = {}  # class → the order in which it calls its submodules
    classes: dict[type, int] = {}  # class → its number
    found = []
    for at, (spot, layer) in enumerate(plan.spots):
        module = spot.module()
        before = at if module is None else first.setdefault(id(module), at)
        if module is not None and type(module) not in orders:
            classes[type(module)] = len(classes)
            orders[type(module)] = call_order(user_class_of(module))
        params = () if module is None else tuple(module._parameters.values())
        found.append(
            ModelModule(
                path=spot.path,
                kind="" if module is None else type(module).__name__,
                layer=layer,
                callable=spot.callable,
                param_shapes=tuple(tuple(one.shape) for one in params if one is not None and not is_lazy(one)),
                same_as=None if before == at else before,
                calls={} if module is None else orders[type(module)],
                cls=-1 if module is None else classes[type(module)],
            )
        )
    return found
