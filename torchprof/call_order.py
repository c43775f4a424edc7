"""In which order a module calls what it holds, as the source of its forward has it. Knows no torch."""

from __future__ import annotations

import ast
import inspect
import textwrap


def call_order(cls: type) -> tuple[str, ...]:
    """The attributes of ``self`` in the order in which the ``forward`` of a class uses them first, each once.

    A call counts when it is made, after its arguments: ``self.last(self.first(x))`` is first, last. What is no call
    (``for block in self.blocks``) counts where it is written. The class's own methods are followed where they are
    called. Which branches are taken nobody knows: all of them count. ``()`` where there is no source. Reading it takes
    about a millisecond.
    """
    found: dict[str, None] = {}
    _Uses(cls, found).follow("forward")
    return tuple(found)


class _Uses(ast.NodeVisitor):
    """Walks the methods of a class in the order in which they are evaluated."""

    def __init__(self, cls: type, found: dict[str, None]) -> None:
        self._cls = cls
        self._found = found
        self._followed: set[str] = set()
        self._self = ""

    def follow(self, name: str) -> None:
        self._followed.add(name)
        method = inspect.unwrap(getattr(self._cls, name))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
        except (OSError, TypeError, SyntaxError):  # made by exec, written in C, or a lambda inside of other code
            return
        if isinstance(tree, ast.FunctionDef) and tree.args.args:
            around, self._self = self._self, tree.args.args[0].arg
            for statement in tree.body:
                self.visit(statement)
            self._self = around

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        self.visit(node.func)

    def visit_Assign(self, node: ast.Assign) -> None:
        for part in (node.value, *node.targets):
            self.visit(part)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id == self._self):
            self.visit(node.value)
        elif not inspect.isfunction(getattr(self._cls, node.attr, None)):
            self._found[node.attr] = None
        elif node.attr not in self._followed:
            self.follow(node.attr)
