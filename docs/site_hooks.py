"""What MkDocs calls when it builds the site: pages that the code writes, and links to files outside of ``docs/``."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = re.compile(r"\]\(\.\./((?:examples|torchprof)/[^)#]+)\)")
_COMMANDS = "<!-- the commands -->"
_WARNINGS = "<!-- the warnings -->"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files outside of ``docs/`` that pages link to."""
    linked = {
        name for page in files.documentation_pages() for name in _OUTSIDE.findall(Path(page.abs_src_path).read_text())
    }
    for name in sorted(linked):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to those files lead to their copies, and fill in the help of each command and the list of warnings."""
    markdown = _OUTSIDE.sub(r"](\1)", markdown)
    for mark, made in ((_COMMANDS, _help), (_WARNINGS, _warnings)):
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return markdown


def _warnings() -> str:
    """A row for each code of a warning, with its sentence. ``…`` is a fact of the run."""
    from torchprof.run.sentences import SENTENCES

    lines = ["| code | sentence |", "|---|---|"]
    for code, sentence in SENTENCES.items():
        text = inspect.getclosurevars(sentence).nonlocals.get("text") or _returned(inspect.getsource(sentence))
        text = re.sub(r"\{\w*(:[^}]*)?\}", "…", text).replace("|", r"\|").replace("<", "&lt;")
        lines.append(f"| `{code}` | {text} |")
    return "\n".join(lines)


def _returned(source: str) -> str:
    """The text that a function returns, with ``…`` for what it computes."""
    *_, last = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
    parts = last.values if isinstance(last, ast.JoinedStr) else [last]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


def _help() -> str:
    """The help of ``torchprof`` and of each of its commands, as the parser prints it."""
    from torchprof.cli import parser

    os.environ["COLUMNS"] = "100"  # argparse wraps its lines at the width of the terminal
    whole = parser()
    sections = [f"```text\n{whole.format_help()}```"]
    for action in whole._actions:
        if isinstance(action, argparse._SubParsersAction):
            names: dict[Any, list[str]] = {}  # of each command: `trace` and `merge` are other names of `show`
            for name, command in action.choices.items():
                names.setdefault(command.get_default("execute"), []).append(name)
            for name, *others in names.values():
                same = f"\n\nThe same: {', '.join(f'`torchprof {other}`' for other in others)}." if others else ""
                sections.append(f"### torchprof {name}\n\n```text\n{action.choices[name].format_help()}```{same}")
    return "\n\n".join(sections)
