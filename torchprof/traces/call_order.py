"""In which order a module calls what it holds, as the source of its forward has it. Knows no torch."""

from __future__ import annotations

import ast
import inspect
import textwrap


def call_order(cls: type) -> dict[str, bool]:
    """The attributes of ``self`` in the order in which the ``forward`` of a class uses them first, each once, with
    whether it does so in every call.

    A call counts when it is made, after its arguments: ``self.last(self.first(x))`` is first, last. What is no call
    (``for block in self.blocks``) counts where it is written. The class's own methods are followed where they are
    called. Which branches are taken is unknown: all of them count, and what is used only there, or only asked for
    something that it holds (``self.dropout.p``), is not used in every call. Empty where there is no source. Reading it
    takes about a millisecond.
    """
    found: dict[str, bool] = {}
    _Uses(cls, found).follow("forward")
    return found


def _may_return(statement: ast.stmt) -> bool:
    return not isinstance(statement, ast.Return) and any(isinstance(part, ast.Return) for part in ast.walk(statement))


class _Uses(ast.NodeVisitor):
    """Walks the methods of a class in the order in which they are evaluated."""

    def __init__(self, cls: type, found: dict[str, bool]) -> None:
        self._cls = cls
        self._found = found
        self._followed: set[str] = set()
        self._self = ""
        self._doubts = 0  # what is around the node that may not run, or calls nothing

    def follow(self, name: str) -> None:
        self._followed.add(name)
        try:
            method = inspect.unwrap(getattr(self._cls, name))
            tree = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
        except (OSError, TypeError, SyntaxError):  # made by exec, written in C, or a lambda inside of other code
            return
        except AttributeError:  # the class has none, only what is made of it: TorchScript
            return
        if isinstance(tree, ast.FunctionDef) and tree.args.args:
            around, self._self = self._self, tree.args.args[0].arg
            doubts = self._doubts
            for statement in tree.body:
                self.visit(statement)
                self._doubts += _may_return(statement)  # what comes after it need not be reached
            self._self, self._doubts = around, doubts

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        if isinstance(node.func, ast.Attribute) and not self._is_own(node.func):
            self.visit(node.func.value)  # self.parts.first(x) calls what self.parts holds
        else:
            self.visit(node.func)

    def visit_Assign(self, node: ast.Assign) -> None:
        for part in (node.value, *node.targets):
            self.visit(part)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._is_own(node):
            self._visit(node.value, in_doubt=isinstance(node.value, ast.Attribute))
        elif not inspect.isfunction(getattr(self._cls, node.attr, None)):
            self._found[node.attr] = self._found.get(node.attr, False) or not self._doubts
        elif node.attr not in self._followed:
            self.follow(node.attr)

    def _is_own(self, node: ast.Attribute) -> bool:
        return isinstance(node.value, ast.Name) and node.value.id == self._self

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        for part in ast.iter_child_nodes(node):
            self._visit(part, in_doubt=part is not node.test)

    visit_IfExp = visit_If  # noqa: N815 - so ast calls it

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        for part in node.body:
            self._visit(part, in_doubt=True)

    def _visit(self, node: ast.AST, in_doubt: bool) -> None:
        self._doubts += in_doubt
        self.visit(node)
        self._doubts -= in_doubt
