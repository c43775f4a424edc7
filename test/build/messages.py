"""Every sentence in the source that a user can meet: help, errors, warnings, findings, notes, headings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "torchprof"

_FEWEST_WORDS = 3
_WORD = re.compile(r"(?<![\w.\-])[A-Za-z][a-z']*(?![\w(=-])")
_REGEX = re.compile(r"\\[wdsSWD(){}.]|\(\?|\]\*")
_NAMES_ONLY = re.compile(r"[\w.]*(\s+[\w.]+){9,}\s*")  # tables of operators and classes, divided by white space
_MARKUP = re.compile(r"^\s*[.@\w-]*\{[-\w]+:|^\s*(import|def) |\{\"")
_STRING_OF_JAVASCRIPT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:[^"\\\n]|\\.)*"|`(?:[^`\\]|\\.)*`)', re.S)


def all_messages() -> str:
    """Each source file with its messages, one a line, in the order of the source."""
    blocks = []
    for file in sorted([*SOURCE.rglob("*.py"), *SOURCE.rglob("*.js")]):
        read = messages_of_python if file.suffix == ".py" else messages_of_javascript
        if found := [text.replace("\n", "\\n") for text in read(file.read_text(encoding="utf-8"))]:
            blocks.append("\n".join([f"# {file.relative_to(SOURCE.parent).as_posix()}", *found]))
    return "\n\n".join(blocks)


def messages_of_python(source: str) -> Iterator[str]:
    """String constants that are sentences or phrases. A field of an f-string is shown as ``{expression}``."""
    for node in _not_docstrings(ast.parse(source)):
        text = _text(node)
        if text is not None and _is_phrase(text):
            yield text


def messages_of_javascript(source: str) -> Iterator[str]:
    """String literals that are phrases, found by their quotes. A template inside a template is cut at its quotes."""
    for found in _STRING_OF_JAVASCRIPT.finditer(source):
        text = (found[1] or "")[1:-1]
        if "\n" not in text and _is_phrase(text):
            yield text


def _is_phrase(text: str) -> bool:
    """Whether this has several words, and is no regular expression, table of names, style sheet, JSON or program."""
    if any(other.search(text) for other in (_REGEX, _MARKUP)) or _NAMES_ONLY.fullmatch(text):
        return False
    return len(_WORD.findall(re.sub(r"\{[^{}]*\}", "", text))) >= _FEWEST_WORDS


def _not_docstrings(node: ast.AST) -> Iterator[ast.AST]:
    """The strings of a syntax tree, outermost first, in the order of the source. A sum of strings is one string."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if _text(child) is not None:
            yield child
        elif not _is_list_of_words(child):
            yield from _not_docstrings(child)


def _is_list_of_words(node: ast.AST) -> bool:
    """Whether this is ``"several names".split()``."""
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr == "split" and isinstance(function.value, ast.Constant)


def _text(node: ast.AST) -> str | None:
    """The text of a string, an f-string, or a sum with either; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "" for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{_expression(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_text(side) for side in (node.left, node.right)]
        if sides != [None, None]:
            return "".join(
                f"{{{_expression(side)}}}" if text is None else text
                for text, side in zip(sides, (node.left, node.right))
            )
    return None


def _expression(node: ast.expr) -> str:
    """An expression as ``ast.unparse`` writes it, alike in all versions of Python.

    They differ in f-strings inside of it and in brackets around the names of a loop.
    """
    return re.sub(r"\bfor \(([^()]*)\) in\b", r"for \1 in", ast.unparse(_WithoutFields().visit(node)))


class _WithoutFields(ast.NodeTransformer):
    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.copy_location(ast.Constant(_text(node)), node)


if __name__ == "__main__":
    print(all_messages())
