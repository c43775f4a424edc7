"""Lines of the package, the tests and the docs by feature: what each costs. ``make size`` prints the table and what is
above its ceiling; ``make size ARGS=--renew`` writes the ceilings anew, into docs/size.md.

Every file belongs to one feature. A file that several features share belongs to them by its definitions: each function
or class that is named here counts with its own feature, the rest with the feature of the file.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "size.md"
KINDS = ("package", "tests", "docs")
STEP = 25
"""Ceilings are multiples of this."""
SLACK = 100
"""A feature that is so many lines below its ceiling has a ceiling that is too high."""


class Feature(NamedTuple):
    """What a feature is, and its files in the package, the tests and the docs: the starts of paths, without ``.py`` and
    ``.md``. The longest start decides. ``run/meta:Peak`` is a definition in a file."""

    shows: str
    package: str = ""
    tests: str = ""
    docs: str = ""


FEATURES = {
    "run": Feature(
        "the run as a value: layers, rows, sums, warnings, its file",
        "run/ analyze/sentences analyze/warnings",
        "run/ analyze/test_warning_texts build/messages",
        "run-file warnings",
    ),
    "recording": Feature(
        "a live recording: session, labels, owners of events, sums by layer",
        "record/ attribute/ measure/ profile/",
        "record/ attribute/ measure/ profile/ whole/",
        "attribution cost inference tour",
    ),
    "layers": Feature(
        "reports of layers: tree, types, calls, summary; tables, columns and figures",
        "analyze/ reports/",
        "analyze/ reports/",
    ),
    "first screen": Feature(
        "headline, verdict, overview",
        "first_screen/",
        "reports/test_headline reports/test_overview reports/test_verdict",
    ),
    "findings": Feature(
        "findings and their rules",
        "advise/",
        "advise/ whole/test_faults",
        "advice",
    ),
    "operators": Feature(
        "reports of operators and of lines of Python",
        "analyze/operators analyze/ops analyze/top run/operators record/python_lines",
        "reports/test_ops reports/test_top run/test_operators record/test_python_lines",
        "operators",
    ),
    "devices": Feature(
        "kernels, time in which a device is busy or idle",
        "analyze/device attribute/launches measure/busy run/timeline:DeviceTime run/timeline:StreamTime",
        "measure/test_devices reports/test_kernels_report whole/test_kernels",
        "device",
    ),
    "FLOPs": Feature(
        "FLOPs and MACs, flops() without computing, what the machine can do",
        "measure/flops/ profile/flops record/peak run/meta:Peak",
        "measure/test_flops measure/test_formulas analyze/test_uncounted profile/test_shapes record/test_peak"
        " build/architectures",
        "flops",
    ),
    "memory": Feature(
        "memory by layer, its peak, what is live",
        "analyze/memory measure/memory record/holders run/timeline:Memory run/timeline:Held run/timeline:Growth",
        "measure/test_memory measure/test_growth",
        "memory",
    ),
    "steps": Feature(
        "loops: steps, parts of the time, cycles, schedules",
        "analyze/steps measure/steps profile/cycles run/merge:add_cycle",
        "measure/test_steps measure/test_open_step profile/test_loops attribute/test_unmarked_steps",
        "training-loops",
    ),
    "timeline": Feature(
        "what ran when; Chrome traces and speedscope",
        "measure/timeline run/timeline reports/viewers",
        "measure/test_timeline",
        "timeline",
    ),
    "scripts": Feature(
        "whole scripts: torchprof run",
        "profile/program profile/script profile/passes profile/pass_times run/passes profile/signals cli/run",
        "profile/test_program profile/test_script profile/test_signals cli/test_run_command build/warm",
        "whole-scripts",
    ),
    "comparison": Feature(
        "two runs: changes, noise, budgets",
        "comparison/ cli/compare",
        "comparison/ build/pairs",
        "compare ci",
    ),
    "page": Feature(
        "the HTML page",
        "reports/html reports/page/",
        "reports/test_html reports/test_page_ build/browser build/page build/colors",
        "html",
    ),
    "exports": Feature(
        "text, Markdown, notebooks, JSON, CSV, DataFrame, metrics",
        "reports/exports reports/documents analyze/records analyze/metrics",
        "reports/test_exports reports/test_markdown reports/test_notebook reports/test_report_data"
        " analyze/test_metrics",
        "exports metrics",
    ),
    "traces": Feature(
        "traces that other programs recorded",
        "traces/",
        "traces/ build/trace",
        "traces",
    ),
    "alignment": Feature(
        "layers of a trace that names none",
        "traces/align traces/reference",
        "traces/test_alignment build/aligned",
    ),
    "ranks": Feature(
        "several ranks: merging, stragglers, waiting, gathering",
        "ranks/ run/lockstep run/merge measure/lockstep measure/waiting profile/gather",
        "ranks/ run/test_merge measure/test_lockstep reports/test_ranks_report profile/test_gather"
        " profile/test_trace_ready whole/test_delays whole/test_job whole/test_jobs build/delayed_training"
        " build/distributed_models build/hand_made_ranks build/jobs build/merging build/plain_training"
        " build/slow_loading build/torchrun",
        "ranks ranks-in-a-job merging",
    ),
    "collectives": Feature(
        "collectives: owners, bytes, bandwidth",
        "ranks/collectives run/collectives attribute/launches:CollectiveOwners",
        "attribute/test_collective_owners run/test_collectives build/collectives build/exchanges",
        "collectives",
    ),
    "pipelines": Feature(
        "pipelines: stages, idle time",
        "ranks/pipeline run/timeline:Pipeline attribute/pipeline_ranges measure/pipelines",
        "ranks/test_pipeline measure/test_pipeline record/test_pipelining reports/test_pipeline_report"
        " whole/test_pipeline build/delayed_pipeline build/pipeline",
        "pipelines",
    ),
    "job folder": Feature(
        "many files: Parquet, job folders, reading in processes",
        "run/saved run/processes",
        "run/test_job_folder run/test_parquet cli/test_job",
        "job-folder",
    ),
    "torch.compile": Feature(
        "compiled code: regions, layers and FLOPs of kernels, compilations",
        "record/compiled/ attribute/compiled_ analyze/compiled measure/flops/graphs"
        " run/meta:CompiledRegion run/meta:Compilation",
        "record/test_called record/test_compil record/test_exported record/test_graph record/test_kept"
        " attribute/test_compiled measure/test_graph_text reports/test_compiled_report build/compiled build/inductor"
        " advise/test_advice_compilation",
        "compile",
    ),
    "flops-profiler and DeepSpeed": Feature(
        "interfaces of these two profilers",
        "integrations/",
        "integrations/",
        "coming-from-deepspeed coming-from-flops-profiler",
    ),
    "trainers": Feature(
        "callbacks of Lightning and of transformers' Trainer",
        "integrations/lightning integrations/transformers integrations/training_loop",
        "integrations/test_lightning integrations/test_transformers",
        "integrations",
    ),
    "watching": Feature(
        "trainings that are watched: reports from time to time, slow ranks in the log",
        "profile/watch",
        "profile/test_trace_ready profile/test_watch build/delayed_training",
        "watch",
    ),
    "torch's profiler": Feature(
        "annotate, from_profiler, and the methods of torch's profiler",
        "profile/torch_profiler record/session_events",
        "profile/test_annotate build/torchs_list",
    ),
    "latency": Feature(
        "benchmark: latency by batch size",
        "profile/benchmark",
        "profile/test_latency",
        "latency",
    ),
    "command line": Feature(
        "the command line but for run and compare",
        "cli/ __main__",
        "cli/ whole/test_bad_input",
        "command-line shell",
    ),
    "house": Feature(
        "public names, errors, the names of torchprof 1.4, tests of the whole, what tests share",
        "__init__ types errors version integrations/__init__",
        "test_ conftest build/ gpu/ whole/test_contract",
        "api index coming-from-1.4.0 torch-versions size",
    ),
}


def main() -> int:
    sizes = lines_by_feature()
    if "--renew" in sys.argv[1:]:
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), sizes), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    print("\n".join(table(sizes)))
    wrong = [*above_or_below(sizes, ceilings(text))]
    print("\n".join(wrong) or "Each is at most at its ceiling.")
    return bool(wrong)


def lines_by_feature() -> dict[str, Counter[str]]:
    """The lines of each feature by kind. Their sum is the number of lines of all files."""
    sizes = {name: Counter[str]() for name in FEATURES}
    for kind, file, path in files():
        lines = file.read_text(encoding="utf-8").count("\n")
        home = home_of(path, kind)
        sizes[home][kind] += lines
        for name, definition in definitions_in(path, kind):
            length = length_of(file, definition)
            sizes[home][kind] -= length
            sizes[name][kind] += length
    return sizes


def files() -> Iterator[tuple[str, Path, str]]:
    """The files under version control: their kind, where they are, and their path as the features have it."""
    listed = subprocess.run(
        ["git", "ls-files", "torchprof/*.py", "test/*.py", "docs/*.md"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().split():
        folder, _, path = name.partition("/")
        kind = {"torchprof": "package", "test": "tests", "docs": "docs"}[folder]
        if (ROOT / name).exists():
            yield kind, ROOT / name, path.rpartition(".")[0]


def starts(kind: str) -> Iterator[tuple[str, str]]:
    """Each start of a path with its feature."""
    for name, feature in FEATURES.items():
        for start in getattr(feature, kind).split():
            yield start, name


def home_of(path: str, kind: str) -> str:
    """The feature of a file: that of the longest start of its path."""
    fitting = [(len(start), name) for start, name in starts(kind) if path.startswith(start)]
    if not fitting:
        raise LookupError(f"{path} belongs to no feature: add it to FEATURES in test/build/size.py.")
    return max(fitting)[1]


def definitions_in(path: str, kind: str) -> Iterator[tuple[str, str]]:
    """The definitions of a file that belong to other features, each with its feature."""
    for start, name in starts(kind):
        file, _, definition = start.partition(":")
        if definition and file == path:
            yield name, definition


def length_of(file: Path, definition: str) -> int:
    """The lines of a function or class at the top of a file, with the two empty lines after it."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == definition:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            assert node.end_lineno is not None
            return node.end_lineno - first + 3
    raise LookupError(f"{file} has no {definition}: see FEATURES in test/build/size.py.")


def table(figures: dict[str, Counter[str]]) -> list[str]:
    """A table in Markdown: a line for each feature, the largest first, and their sums."""
    lines = ["| feature | what it is | package | tests | docs |", "|---|---|---:|---:|---:|"]
    total = Counter[str]()
    for name in sorted(figures, key=lambda name: -figures[name]["package"]):
        total += figures[name]
        lines.append(_line(name, FEATURES[name].shows, figures[name]))
    return [*lines, _line("**sum**", "", total)]


def _line(name: str, shows: str, figures: Counter[str]) -> str:
    return f"| {name} | {shows} | {' | '.join(f'{figures[kind]:,}' for kind in KINDS)} |"


def ceilings(text: str) -> dict[str, Counter[str]]:
    """The table of docs/size.md."""
    rows = re.findall(r"^\| ([^|*]+?) \| [^|]* \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    return {
        name: Counter({kind: int(figure.replace(",", "")) for kind, figure in zip(KINDS, figures)})
        for name, *figures in rows
    }


def above_or_below(sizes: dict[str, Counter[str]], limits: dict[str, Counter[str]]) -> Iterator[str]:
    """What is above its ceiling, and what is far below it."""
    for name, figures in sizes.items():
        for kind in KINDS:
            lines, limit = figures[kind], limits.get(name, Counter())[kind]
            if lines > limit:
                yield (
                    f"{name}: {lines:,} lines of {kind}, its ceiling is {limit:,}. Remove what became superfluous, or "
                    "raise the ceiling in docs/size.md in the same commit, and say there what it displaces."
                )
            elif limit - lines >= SLACK:
                yield f"{name}: {lines:,} lines of {kind}, far below its ceiling of {limit:,}: lower it."


def renewed(text: str, sizes: dict[str, Counter[str]]) -> str:
    """The page with ceilings just above these sizes."""
    figures = {
        name: Counter({kind: -(-lines // STEP) * STEP for kind, lines in counts.items()})
        for name, counts in sizes.items()
    }
    return re.sub(r"^\| feature .*(\n\|.*)*", "\n".join(table(figures)), text, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
