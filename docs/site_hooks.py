"""What MkDocs calls when it builds the site: pages that the code writes, and links to files outside of ``docs/``."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = re.compile(r"\]\(\.\./((?:examples|torchprof)/[^)#]+)\)")
_COMMANDS = "<!-- the commands -->"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files outside of ``docs/`` that pages link to."""
    linked = {
        name for page in files.documentation_pages() for name in _OUTSIDE.findall(Path(page.abs_src_path).read_text())
    }
    for name in sorted(linked):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to those files lead to their copies, and fill in the help of each command."""
    markdown = _OUTSIDE.sub(r"](\1)", markdown)
    return markdown.replace(_COMMANDS, _help()) if _COMMANDS in markdown else markdown


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
