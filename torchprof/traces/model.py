"""The modules of a model, in the form in which ``traces.matching`` matches them with the modules of a trace.

That includes the order in which a module calls its submodules, from the source of its forward.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

from torch.nn.parameter import is_lazy

from torchprof.record.modules import user_class_of
from torchprof.record.plan import Plan
from torchprof.traces.module_trees import ModelModule


def model_modules(plan: Plan) -> list[ModelModule]:
    """All places of modules, in their order. A module that no longer exists has no parameters."""
    first: dict[int, int] = {}  # ID of a module → its first place
    orders: dict[type, dict[str, bool]] = {}  # class → the order in which it calls its submodules
    classes: dict[type, int] = {}  # class → its number
    layers = []
    for index, spot in enumerate(plan.spots):
        module = spot.module()
        before = index if module is None else first.setdefault(id(module), index)
        if module is not None and type(module) not in orders:
            classes[type(module)] = len(classes)
            orders[type(module)] = call_order(user_class_of(module))
        params = () if module is None else tuple(module._parameters.values())
        layers.append(
            ModelModule(
                path=spot.path,
                kind="" if module is None else type(module).__name__,
                layer=spot.layer,
                callable=spot.callable,
                param_shapes=tuple(tuple(param.shape) for param in params if param is not None and not is_lazy(param)),
                same_as=None if before == index else before,
                calls={} if module is None else orders[type(module)],
                cls=-1 if module is None else classes[type(module)],
            )
        )
    return layers


def call_order(cls: type) -> dict[str, bool]:
    """The attributes of ``self`` in the order of their first use in ``forward``, each with whether every call uses it.

    - A call counts when it is executed, after its arguments: ``self.last(self.first(x))`` is first, last.
    - Another use (``for block in self.blocks``) counts where it is written.
    - Methods of the class are followed where they are called.
    - All branches count, because it is unknown which of them run. An attribute that is used only in a branch, or only
      to read a value (``self.dropout.p``), is not used in every call.

    Empty if there is no source. Takes about a millisecond.
    """
    uses = _Uses(cls)
    uses.follow("forward")
    return uses.called


class _Uses(ast.NodeVisitor):
    """Walks the methods of a class in the order in which they are evaluated."""

    def __init__(self, cls: type) -> None:
        self.called: dict[str, bool] = {}
        self._cls = cls
        self._followed: set[str] = set()
        self._self = ""
        self._conditions = 0  # if not 0, the current node may not run, or it calls nothing

    def follow(self, name: str) -> None:
        """Visit the body of a method."""
        self._followed.add(name)
        try:
            method = inspect.unwrap(getattr(self._cls, name))
            tree = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
        except (OSError, TypeError, SyntaxError):  # made by exec, written in C, or a lambda in an expression
            return
        except AttributeError:  # only instances have it: TorchScript
            return
        if isinstance(tree, ast.FunctionDef) and tree.args.args:
            around, self._self = self._self, tree.args.args[0].arg
            conditions = self._conditions
            for statement in tree.body:
                self.visit(statement)
                if not isinstance(statement, ast.Return):  # after a return in it, the following statements may not run
                    self._conditions += any(isinstance(part, ast.Return) for part in ast.walk(statement))
            self._self, self._conditions = around, conditions

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        if isinstance(node.func, ast.Attribute) and not self._is_attribute_of_self(node.func):
            self.visit(node.func.value)  # self.parts.first(x) calls a submodule of self.parts
        else:
            self.visit(node.func)

    def visit_Assign(self, node: ast.Assign) -> None:
        for part in (node.value, *node.targets):
            self.visit(part)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._is_attribute_of_self(node):
            self._visit(node.value, may_not_run=isinstance(node.value, ast.Attribute))
        elif not inspect.isfunction(getattr(self._cls, node.attr, None)):
            self.called[node.attr] = self.called.get(node.attr, False) or not self._conditions
        elif node.attr not in self._followed:
            self.follow(node.attr)

    def _is_attribute_of_self(self, node: ast.Attribute) -> bool:
        return isinstance(node.value, ast.Name) and node.value.id == self._self

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        for part in ast.iter_child_nodes(node):
            self._visit(part, may_not_run=part is not node.test)

    visit_IfExp = visit_If  # noqa: N815 - the name that ast.NodeVisitor calls

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        for part in node.body:
            self._visit(part, may_not_run=True)

    def _visit(self, node: ast.AST, may_not_run: bool) -> None:
        self._conditions += may_not_run
        self.visit(node)
        self._conditions -= may_not_run
