"""The command line: exit codes, what is printed where, and wrong input."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from build.hand_made import row, run_of
from build.hand_made_ranks import run_of_ranks
from build.libraries import usable_transformers
from build.places import ROOT
from build.processes import run_fresh

import torchprof
from torchprof.analyze.report import QUESTIONS
from torchprof.analyze.sentences import legend
from torchprof.cli import main, parser
from torchprof.reports import known
from torchprof.reports.documents import terminal_width
from torchprof.run.lockstep import NOT_RECORDED
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD

NET = """
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8, fail=False):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.body = nn.Linear(width, width)
        self.fail = fail

    def forward(self, x, ids=None):
        if self.fail:
            self.body(x)
            raise ValueError("not today")
        y = self.body(x)
        return {"y": y if ids is None else y + self.embed(ids).sum(1), "training": self.training}


    def twice(self, x, more=0):
        for _ in range(2 + more):
            x = self.body(x)
        return x


class Frozen(Net):
    def forward(self, x):
        return super().forward(x)["y"].detach()


class Config:
    def __init__(self, width=8):
        self.width = width


class FromConfig(Net):
    config_class = Config

    def __init__(self, config):
        super().__init__(config.width)


made = Net()
number = 7


class Taking(Net):
    def forward(self, x):
        Path("taken.json").mkdir(exist_ok=True)
        return super().forward(x)


def stopped(width=8):
    raise KeyboardInterrupt


class Stopped(Net):
    last = 4  # of the first, which is the warm-up

    def forward(self, x):
        self.last -= 1
        if not self.last:
            raise KeyboardInterrupt
        return super().forward(x)


class StoppedAtOnce(Stopped):
    last = 1


def broken():
    raise KeyError("no weights")


def not_a_module():
    return 7
"""


@pytest.fixture
def net(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (here / "net.py").write_text(NET)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    return here


TIMED = """
import time
import timed
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        began = time.perf_counter_ns()
        for _ in range(50):
            x = self.fc(x)
        timed.ns.append(time.perf_counter_ns() - began)
        return x
"""


def test_profile_takes_what_a_stopwatch_in_the_model_says(net: Path, monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    """Within 5 %, in one of some attempts: the machine may be busy. To look at the inputs of a call of 2 ms takes some
    30 us of that, twice here. Nothing else of the recorded time is the tool's."""
    (net / "net.py").write_text(TIMED)
    for _ in range(4):
        timed: Any = ModuleType("timed")
        timed.ns = []
        monkeypatch.setitem(sys.modules, "timed", timed)
        monkeypatch.delitem(sys.modules, "net", raising=False)
        cli("profile net.py:Net --input 64,64 --steps 20 -o run.json")
        run, took = torchprof.load(net / "run.json"), sum(timed.ns[-20:])
        assert took <= run.tree().total.cpu_ns <= run.meta.wall_ns
        if run.meta.wall_ns <= 1.05 * took:
            return
    pytest.fail(f"{run.meta.wall_ns} ns were recorded, and the calls took {took}")


def test_profile_prints_the_overview_and_saves_the_run(net: Path, cli: Any) -> None:
    options = ["--input", "3,8", "--backward", "--train", "--memory", "--warmup", "2", "--steps", "4", "-o", "run.json"]
    out = cli("profile net.py:Net", *options).out
    run = torchprof.load(net / "run.json")
    node = run.tree("forward")
    assert (node.calls, node.children[1].calls) == (4, 4)
    assert node.layer.training and node.children[1].layer.input_shapes == ((3, 8),)
    assert node.children[1].self.cpu_allocated - node.children[1].self.cpu_freed == 4 * 3 * 8 * 4
    assert run.tree("backward").total.cpu_ns > 0
    assert out == run.report("overview", width=terminal_width(), whole="--depth 1 shows all.") + "\n"


def test_each_step_is_marked(net: Path, cli: Any) -> None:
    for number in (1, 4):
        cli("profile net.py:Net --input 3,8 --backward --steps", f"{number}", "-o", "r.json")
        run = torchprof.load("r.json")
        assert run.meta.steps == number
        assert cli("show r.json --report steps").out.splitlines()[2].startswith(f"{number} ")


def test_runs_with_steps_can_be_compared_for_noise_in_backward(net: Path, cli: Any) -> None:
    for name in ("before", "after"):
        options = ["--input", "3,8", "--backward", "--steps", "8", "-o", f"{name}.json"]
        cli("profile net.py:Net", *options)
    rows = {line.split(" ")[0]: line for line in cli("compare before.json after.json").out.splitlines() if "|" in line}
    for name in ("Net", "Net.body", "(outside)"):
        assert "?" not in rows[name] and "noise unknown" not in rows[name]


def test_the_option_shapes_records_shapes(net: Path, cli: Any) -> None:
    cli("profile net.py:Net --input 3,8 -o without.json")
    cli("profile net.py:Net --input 3,8 --shapes -o with.json")
    shapes = {
        name: {
            frame.signature.shapes[0]
            for chain in torchprof.load(name).rows.frames
            for frame in chain
            if frame.signature
        }
        for name in ("without.json", "with.json")
    }
    assert shapes["without.json"] == set() and (3, 8) in shapes["with.json"]


def test_every_command_prints_the_files_that_it_wrote(net: Path, cli: Any) -> None:
    for command in (
        ["profile", "net.py:Net", "--input", "3,8", "-o", "run.json"],
        ["flops", "net.py:Net", "--input", "3,8", "-o", "run.json"],
        ["show", "run.json", "-o", "run.json"],
        ["compare", "run.json", "run.json", "-o", "run.json"],
    ):
        assert cli(*command, "-o", "table.md").err == "Written: run.json.\nWritten: table.md.\n"
    cli("show run.json", code=2)  # the last is a comparison
    assert cli("profile net.py:Net --input 3,8").err == ""


def test_a_file_that_cannot_be_written_is_reported_and_the_others_are_written(net: Path, cli: Any) -> None:
    """A folder with the second name appears while the model runs, after the names were checked."""
    files = ["-o", "run.json", "-o", "taken.json", "-o", "table.md"]
    said = cli("profile net.py:Taking --input 3,8", *files, code=2)
    assert said.err == (
        "Written: run.json.\n"
        "Not written: taken.json: Is a directory. Choose another place: -o FILE.\n"
        "Written: table.md.\n"
    )
    assert torchprof.load("run.json").report("headline") in said.out.splitlines()[:3]
    assert torchprof.load("run.json").report("markdown") == (net / "table.md").read_text(encoding="utf-8")


def test_all_names_of_files_are_checked_before_anything_runs(net: Path, cli: Any) -> None:
    (net / "taken.json").mkdir()
    names = ["run.json", "run.out", "no/run.json", "taken.json", "a.md", f"{net}/./a.md", "a.md"]
    options = [word for name in names for word in ("-o", name)]
    for command, target in (("profile", "net.py:broken"), ("show", "nowhere.json"), ("run", "net.py")):
        lines = cli(command, *options, target, code=2).err.splitlines()
        assert lines[0].startswith("torchprof: -o 'run.out' does not say by its ending")
        assert lines[1:] == [
            "-o no/run.json: its folder does not exist.",
            "-o taken.json: this is a folder, not a file.",
            f"-o {net}/./a.md: the same file as -o a.md.",
            f"-o a.md: the same file as -o {net}/./a.md.",
        ]
    assert {path.name for path in net.iterdir()} == {"net.py", "taken.json"}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_file_without_write_permission_is_found_before_the_run(net: Path, cli: Any) -> None:
    (net / "run.json").touch(mode=0o400)
    assert "-o run.json: no permission to write it." in cli("profile net.py:broken -o run.json", code=2).err


# Ctrl-C


@pytest.mark.parametrize(
    ("spec", "shown", "said"),
    [
        ("net.py:Stopped", True, "interrupted (Ctrl-C): the report shows what ran until then."),
        ("net.py:StoppedAtOnce", False, "interrupted (Ctrl-C): nothing was recorded yet."),
        ("net.py:stopped", False, "interrupted (Ctrl-C)."),
    ],
)
def test_after_ctrl_c_there_is_a_report_and_no_traceback(
    net: Path, cli: Any, spec: str, shown: bool, said: str
) -> None:
    out, err = cli("profile", spec, "--input", "3,8", "--steps", "9", "-o", "run.json", code=130)
    assert err.splitlines()[-1] == f"torchprof: {said}" and "Traceback" not in err
    assert ("\nModule" in out) == shown == (net / "run.json").exists()
    if shown:
        assert torchprof.load("run.json").tree("forward").calls == 3  # two complete steps and the interrupted one


def test_ctrl_c_in_commands_that_record_nothing_has_no_traceback(net: Path, cli: Any) -> None:
    for command in (["flops", "net.py:stopped"], ["show", str(TRACE), "--model", "net.py:stopped"]):
        assert cli(*command, code=130) == ("", "torchprof: interrupted (Ctrl-C).\n")


# Streams that cannot encode all characters


ALL_IN_ONE_PROCESS = """
import json, runpy, sys

for command in json.loads(sys.argv[1]):
    sys.argv[1:] = command
    try:
        runpy.run_module("torchprof", run_name="__main__")
    except SystemExit as ended:
        print(f"\\nexit code {ended.code or 0}", end="\\0", flush=True)
"""


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_has_only_characters_that_the_stream_can_encode(net: Path, encoding: str) -> None:
    commands = (
        ["profile", "net.py:Net", "--input", "3,8", "--depth", "1", "-o", "run.json", "-o", "table.txt"],
        ["show", "run.json"],
        ["flops", "net.py:Net", "--input", "3,8", "--depth", "1"],
        ["compare", "run.json", "run.json", "--fail-if", "calls > 0"],
        ["profile", "net.py:≥", "--input", "3,8"],
        ["sh…w"],
        ["--help"],
        ["profile", "--help"],
    )
    done = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE_PROCESS, json.dumps(commands)],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
        timeout=300,
    )
    errors = done.stderr.decode(encoding)
    assert done.returncode == 0 and "Traceback" not in errors, errors
    for command, printed in zip(commands, done.stdout.decode(encoding).split("\0")[:-1], strict=True):
        code = {"compare": 1, "sh…w": 2}.get(command[0], 2 if "net.py:≥" in command else 0)
        text, ended = printed.rsplit("\n", 1)
        assert ended == f"exit code {code}", (command, errors)
        assert command[0] not in ("profile", "show", "flops") or code or "|-- embed" in text or "--help" in command
    assert "\n├── embed" in (net / "table.txt").read_text(encoding="utf-8")


def test_show_has_all_advice(net: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchprof.advise

    def one_more(evidence: object) -> object:
        return iter([torchprof.advise.Advice("Net", "Is slow.", "Make it fast.", None, None, "mine")])

    cli("profile net.py:Net --input 3,8 -o run.json")
    monkeypatch.setattr(torchprof.advise, "rules", lambda: {f"rule{number}": one_more for number in range(30)})
    out = cli("show run.json --report findings").out
    assert "30. Gain unknown in Net: Is slow." in out and "not shown" not in out


def test_with_an_option_of_the_table_profile_prints_the_whole_table(net: Path, cli: Any) -> None:
    said = cli("profile net.py:Net --input 3,8 --steps 2 --depth 1 -o run.json")
    assert said.out == torchprof.load("run.json").report("tree", depth=1) + "\n"


def test_a_layer_that_was_not_called_is_unknown_in_the_overview(net: Path, cli: Any) -> None:
    out = cli("profile net.py:Net --input 3,8").out
    assert "Median" not in out and "Backward" not in out
    assert re.search(r"embed  \w+ +\| –", out)


def test_inputs_have_names_types_and_ranges(net: Path, cli: Any) -> None:
    inputs = ["--input", "3,16", "--input", "ids=int64:3,2:8..10"]
    cli("profile net.py:Net --kwargs", '{"width": 16}', *inputs, "-o", "run.json.gz")
    embed, body = torchprof.load("run.json.gz").tree("forward").children
    assert embed.layer.input_shapes == ((3, 2),) and embed.calls == 1
    assert body.layer.input_shapes == ((3, 16),) and not body.layer.training


def test_a_config_becomes_an_object_of_the_models_config_class(net: Path, cli: Any) -> None:
    options = ["--kwargs", '{"config": {"width": 4}}', "--input", "1,4", "-o", "run.json"]
    cli("profile net.py:FromConfig", *options)
    assert torchprof.load("run.json").layers[2].params == 4 * 4 + 4


def test_a_class_of_a_package_and_an_existing_module(net: Path, cli: Any) -> None:
    cli("profile torch.nn:Linear --kwargs", '{"in_features": 4, "out_features": 2}', "--input", "1,4")
    cli("profile net.py:made --input 1,8 --paths body --show-events --depth 1")


def test_a_model_that_fails_still_shows_what_was_recorded(net: Path, cli: Any) -> None:
    options = ["--kwargs", '{"fail": true}', "--input", "1,8", "--warmup", "0", "-o", "run.json"]
    out, err = cli("profile net.py:Net", *options, code=1)
    assert "ValueError: not today" in err and "1,8" in err
    assert "└── body" in out and torchprof.load("run.json").tree("forward").children[1].calls == 1


def said_of(commands: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What each command prints on stderr, and its exit code."""
    told = []
    for command in commands.strip().splitlines():
        try:
            code: object = main(shlex.split(command))
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        assert out == "" and "Traceback" not in err
        assert len(err.splitlines()) <= 4, "the message is not below a page of options"
        told.append(f"$ torchprof {command}\n{err}exit code {code}\n")
    return "\n".join(told)


def test_the_message_for_bad_input_says_what_was_wrong(
    net: Path, capsys: pytest.CaptureFixture[str], golden: Callable[..., None]
) -> None:
    (net / "before.json").touch()
    (net / "empty").mkdir()
    commands = """
        profile net.py:Net --input eight
        profile net.py:Net --input ids=int64:1,8:5..5
        profile net.py:Net --input flaot32:3,8
        profile net.py:Net --input int64:1,8:5.2..5.4
        profile net.py:Net --kwargs '{width: 4}'
        profile net.py:Net --kwargs [4]
        profile net.py:Net --kwargs '{"depth": 4}'
        profile net.py:FromConfig --kwargs '{"config": {"depth": 4}}'
        profile net.py:made --kwargs '{"width": 4}'
        profile net.py:Net --method twise
        profile net.py:Net --call-kwargs more=4
        profile net.py:Net --call-kwargs [4]
        profile net.py:Net --input x=3,8 --call-kwargs '{"x": 4}'
        profile net.py:Net --dtype bfloat32
        profile net.py:Nett
        profile net.py
        profile nett.py:Net
        profile no_such_package:Net
        profile net.py:number
        profile net.py:not_a_module
        profile net.py:broken
        profile net.py:Net --input 1,8 --paths boddy
        profile net.py:Net --input 1,8 --sort-by size
        profile net.py:Net --input 1,8 --steps 0
        profile net.py:Frozen --input 1,8 --backward
        profile net.py:Net --input 1,8 -o no/such/folder/run.json
        profile net.py:Net --input 3,8 --device cdua
        profile net.py:Net --input 3,8 --device meta
        flops net.py:Net --method twise
        show befor.json
        show no/such/run.json
        show net.py
        show empty
        compare xyz.json before.json
    """
    golden(said_of(textwrap.dedent(commands), capsys))


def test_similar_names_of_commands_and_options_are_suggested(
    capsys: pytest.CaptureFixture[str], golden: Callable[..., None]
) -> None:
    commands = """
        shwo run.json
        train.py --epochs 3
        trace.json.gz
        show run.json --reprot top
        show run.json --reprot=top
        profile net.py:Net --inptu 1,8
        run --memry train.py
        compare a.json b.json c.json
        profile
        profile net.py:Net --steps -1
        profile net.py:Net --steps some
    """
    golden(said_of(textwrap.dedent(commands), capsys))
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "a command is missing: torchprof --help shows them" in capsys.readouterr().err


def test_help_is_ordered_by_questions_and_has_all_commands_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    questions = [question for key, question in QUESTIONS.items() if key]
    assert [line for line in out.splitlines() if line in questions] == questions
    assert all(re.search(rf"torchprof {command}\b", out) for command in parser().commands.choices)
    words = set(re.findall(r"[\w-]+", out))
    assert {name for name, one in known().items() if one.answers} <= words
    assert all(f"\n  {code} " in out for code in (0, 1, 2, 130))
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("command", parser().commands.choices)
def test_each_command_has_a_short_usage_and_examples_that_parse(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = parser().commands.choices[command].format_help()
    usage, _, rest = text.partition("\n\n")
    assert usage.startswith(f"usage: torchprof {command} ") and len(usage.splitlines()) <= 2
    examples = rest.partition("\nexamples:\n")[2].replace("\\\n", " ")
    lines = [line.strip() for line in examples.splitlines() if line.startswith("  torch")]
    assert lines
    for line in lines:
        words = shlex.split(line.partition(" > ~")[0])
        assert parser().parse(words[words.index("torchprof") + 1 :]).execute


def test_cuda_without_a_cuda_device_is_an_error(net: Path, cli: Any) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert "no CUDA device" in cli("profile net.py:Net --input 1,8 --cuda", code=2).err


def test_the_model_and_its_inputs_get_the_dtype(net: Path, cli: Any) -> None:
    for name, dtype in (
        ("bf16", "bfloat16"),
        ("float64", "float64"),
        ("half", "float16"),
        ("torch.float32", "float32"),
    ):
        inputs = ["--input", "3,8", "--input", "ids=int64:3,2:0..9", "-o", "run.json"]
        cli("profile net.py:Net", *inputs, "--dtype", name)
        run = torchprof.load("run.json")
        assert {name for layer in run.layers for name, _ in layer.dtype_bytes} == {dtype}
        cli("flops net.py:Net", *inputs, "--dtype", name)
        assert {name for layer in torchprof.load("run.json").layers for name, _ in layer.dtype_bytes} == {dtype}


def test_another_method_is_called_with_inputs_and_other_arguments(net: Path, cli: Any) -> None:
    call = ["--input", "3,8", "--method", "twice", "--call-kwargs", '{"more": 4}', "-o", "run.json"]
    cli("profile net.py:Net", *call, "--steps", "2")
    assert torchprof.load("run.json").tree("forward").children[1].calls == 2 * (2 + 4)
    cli("flops net.py:Net", *call)
    run = torchprof.load("run.json")
    assert run.tree("forward").children[1].calls == 2 + 4
    assert run.tree("forward").total.macs == (2 + 4) * 3 * 8 * 8


BATCHES = """
import torch
from torch import nn

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, batch, scale=None):
        values = batch.values() if isinstance(batch, dict) else batch
        assert [*map(type, values)] == [torch.Tensor] * 2
        return sum(self.linear(value.float()) for value in values) * (1 if scale is None else scale[0])

class Reads(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.linear = nn.Linear(8, size)

    def forward(self, x):
        return self.linear(x) if x.sum().item() >= 0 else x
"""


@pytest.fixture
def batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``batches.py``, which is the current one."""
    (tmp_path / "batches.py").write_text(BATCHES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [
        ["[4,8;4,8]"],
        ["batch=[4,8; int64:4,8:0..9]"],
        ["{img=4,8;other=4,8}"],
        ["batch={img=4,8;ids=int64:4,8}", "scale=[1;2]"],
    ],
)
def test_an_input_is_a_list_or_a_dict(given: list[str], batches: Path, cli: Any) -> None:
    cli("flops batches.py:Pair -o run.json", *(word for text in given for word in ("--input", text)))
    assert torchprof.load("run.json").tree("forward").total.macs == 2 * 4 * 8 * 4


@pytest.mark.parametrize("given", ["[3,8;a=3,8]", "{3,8;5,8}", "[3,8;5,8}", "[]", "{a=3,8;b=x}", "{a=3,8;a=5,8}"])
def test_a_wrong_list_or_dict_is_an_error(given: str, batches: Path, cli: Any) -> None:
    error = cli("flops batches.py:Pair --input", given, code=2).err
    assert "[2,8;2,8]" in error
    assert "--input" in error


def test_the_error_of_a_model_without_such_an_argument_says_how_to_give_a_dict(batches: Path, cli: Any) -> None:
    assert "A model that takes a dict: --input '{img=2,8" in cli("flops batches.py:Pair --input img=2,8", code=1).err


def test_flops_of_a_model_that_needs_values_are_counted_on_data(
    batches: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = cli("flops batches.py:Reads --input 3,8 -o run.json").out
    run = torchprof.load("run.json")
    assert run.tree("forward").total.macs == 3 * 8 * 8
    assert "cpu_ns" not in run.meta.requested
    assert "on the meta device, `return self.linear(x) if x.sum().item() >= 0 else x` (batches.py:21) failed" in out
    monkeypatch.setattr("torchprof.cli.flops.free_bytes", lambda: iter([2 * 4 * (8 * 8 + 8) - 1]))  # half is too small
    assert "torchprof.Profile(model, with_flops=True)" in cli("flops batches.py:Reads --input 3,8", code=2).err


def test_a_mixture_of_experts_in_float32_is_counted(batches: Path, cli: Any) -> None:
    """transformers calls a product on the meta device that torch has for bfloat16 alone."""
    usable_transformers()
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    kwargs = json.dumps({"config": {**sizes, **heads}})
    cli("flops transformers:MixtralForCausalLM --input input_ids=int64:1,16 -o run.json --kwargs", kwargs)
    projections, attention = 64 * (64 + 32 + 32 + 64), 2 * 16 * 16 * 64
    experts, head = 64 * 4 + 2 * 3 * 64 * 128, 64 * 100
    assert torchprof.load("run.json").tree("forward").total.macs == 16 * (projections + experts + head) + attention


def test_the_device_is_where_the_model_is(net: Path, cli: Any) -> None:
    """On this machine that is the CPU."""
    for device in ("auto", "cpu"):
        cli("profile net.py:Net --input 3,8 --device", device, "-o", "run.json")
        run = torchprof.load("run.json")
        assert "cpu_ns" in run.meta.measured and not run.device_times


def test_numbers_have_the_units_of_counts(net: Path, cli: Any) -> None:
    cli("profile net.py:Net --input 3,8 --steps 0.002k --warmup 0k -o run.json")
    assert torchprof.load("run.json").meta.steps == 2


def test_show_has_every_report_of_a_run(net: Path, cli: Any) -> None:
    cli("profile net.py:Net --input 3,8 --memory -o run.json")
    run = torchprof.load("run.json")
    for options, report in (
        *((name, run.report(name)) for name in ("ops", "top", "memory", "python", "calls")),
        ("memory --depth 0 --tablefmt github", run.report("memory", depth=0, tablefmt="github")),
        ("ops --top 3", run.report("ops", top=3)),
        ("ops --op aten::linear --top 1", run.report("ops", op="aten::linear", top=1)),
        ("ops --op aten::linear --phase forward", run.report("ops", op="aten::linear", phase="forward")),
        ("top --top 2", run.report("top", top=2)),
        ("advice --top 1", run.report("findings", top=1)),
    ):
        assert cli("show run.json --report", *options.split()) == (f"{report}\n", "")


def squeezed(text: str) -> str:
    """A text with columns as narrow as they can be, and tables without their last column: how wide columns are depends
    on the figures in all rows, and how much of the last one is written on the room that the others leave."""
    return re.sub(r"-+", "-", re.sub(" +", " ", re.sub(r" *\|[^|\n]*$", "", text, flags=re.M)))


def test_show_prints_all_sections_and_with_table_options_only_the_table(net: Path, cli: Any) -> None:
    cli("profile net.py:Net --input 3,8 --memory --steps 2 -o run.json")
    run = torchprof.load("run.json")
    out = cli("show run.json").out
    for text in (
        run.report("headline"),
        run.report("top", top=5),
        run.report("overview", places=0, width=terminal_width()).split("\n\n")[1],
        run.report("ops", top=12),
        run.report("python", top=5),
        run.report("memory", depth=1),
        run.report("calls", depth=1),
    ):
        assert squeezed("\n".join(text.splitlines()[:4])) in squeezed(out)
    sections, signs = out.rstrip("\n").split("\n\nLegend\n======\n")
    assert signs.splitlines() == legend(sections), "the last section has the signs of those above it"
    assert cli("show run.json --depth 0").out.startswith(run.report("tree", depth=0) + "\n")
    cli("flops net.py:Net --input 3,8 -o run.json")
    out = cli("show run.json").out
    assert out.startswith("torchprof: run.json.\n\n") and "\nWhere the FLOPs are\n" in out


def test_python_m_torchprof_into_a_pipe_that_closes(net: Path) -> None:
    command = f"{sys.executable} -m torchprof profile net.py:Net --input 1,8 --show-events -o run.json"
    code = subprocess.run(
        f"{command} | head -n 1; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    heading, status = code.stdout.splitlines()
    assert (net / "run.json").exists(), "the file is written, even if the reader closes the pipe"
    assert heading.startswith("Module") and status == "0" and "Traceback" not in code.stderr


def test_files_of_several_formats_are_written_in_one_run(net: Path, cli: Any) -> None:
    """Only for a trace and a page, the timeline is recorded."""
    files = ["run.json", "page.html", "net.trace.json", "table.csv.gz"]
    options = [word for file in files for word in ("-o", file)]
    cli("profile net.py:Net --input 2,8", *options)
    run = torchprof.load(net / "run.json")
    assert run.timeline is not None and run.timeline.spans is not None
    assert (net / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert json.loads((net / "net.trace.json").read_text())["traceEvents"]
    table = gzip.decompress((net / "table.csv.gz").read_bytes()).decode()
    assert table == run.report("csv")
    cli("profile net.py:Net --input 2,8 -o run.json")
    assert torchprof.load(net / "run.json").timeline is None


TRACE = ROOT / "examples" / "trace.json.gz"


# merge


@pytest.fixture
def ranks(here: Path) -> list[Run]:
    """The runs of ranks 0, 1 and 3 of a job of four, in rank0.json, …. Rank 1 takes 2 times as long, rank 3 3 times."""
    runs = []
    for rank, times in ((0, 1), (1, 2), (3, 3)):
        run = run_of([row(0, cpu_ns=100 * times), row(1, cpu_ns=1000 * times)])
        run.rows.columns["rank"][:] = array("q", [rank] * len(run.rows))
        runs.append(replace(run, metas=(replace(run.meta, rank=rank, world_size=4),)))
        runs[-1].save(f"rank{rank}.json")
    return runs


def test_merge_compares_the_ranks_and_writes_one_run(ranks: list[Run], cli: Any) -> None:
    printed = cli("show rank3.json rank0.json rank1.json -o all.json.gz -o table.md").out
    merged = torchprof.load("all.json.gz")
    assert merged == torchprof.merge(ranks)
    assert merged.tree().total.cpu_ns == 1100 * (1 + 2 + 3)
    assert "Rank 2 of 4 is missing" in printed
    titles = [line for line, below in itertools.pairwise(printed.splitlines()) if below == "=" * len(line) != ""]
    assert titles[:2] == ["The ranks", "Where the time goes"]
    table = merged.report("ranks").split("\n\n")[0]
    assert f"\nThe ranks\n=========\n{table}\n" in printed
    assert cli("show all.json.gz --report ranks").out == merged.report("ranks") + "\n"
    assert "sums over ranks 0, 1 and 3" in Path("table.md").read_text()
    assert "3.300us" in cli("show rank0.json rank1.json --report tree --depth 0").out
    assert cli("show all.json.gz --summary").out == merged.report("summary") + "\n"


def test_show_considers_that_ranks_are_missing(tmp_path: Path, cli: Any) -> None:
    """Two of four ranks are in the run: a missing rank may have arrived even later."""
    times = {("Net.a", FORWARD): {rank: [10_000_000] * 8 for rank in range(2)}}
    exchanges = {("Net", BACKWARD, "all_reduce", NOT_RECORDED): {0: [5_000_000] * 8, 1: [1_000_000] * 8}}
    of_four = {rank: {"world_size": 4} for rank in range(2)}
    run = run_of_ranks(times, exchanges, world_size=4, metas=of_four)
    run.save(tmp_path / "two.json")
    shown = cli("show", str(tmp_path / "two.json")).out
    assert "inferred" not in shown
    assert all(line in shown for line in run.report("ranks").splitlines() if line.startswith(("0 ", "1 ")))


def test_show_can_select_one_rank(ranks: list[Run], cli: Any) -> None:
    torchprof.merge(ranks).save("all.json")
    shown = cli("show all.json").out
    table = next(line for line in torchprof.load("all.json").report("ranks").splitlines() if line.startswith("Rank"))
    assert table in shown.splitlines()
    assert "3.300us" in cli("show all.json --rank 3 --depth 0 -o alone.json").out
    assert torchprof.load("alone.json").rows == ranks[2].of_rank(3).rows
    assert "no rank 2. It has ranks 0, 1 and 3." in cli("show all.json --rank 2", code=2).err


def test_merge_reads_traces_and_saved_runs_in_any_mix(tmp_path: Path, cli: Any) -> None:
    """Two traces, and the saved run of the third rank."""
    trace = json.loads(gzip.decompress(TRACE.read_bytes()))
    files = [str(tmp_path / f"rank{rank}.json") for rank in range(3)]
    for rank, file in enumerate(files):
        Path(file).write_text(json.dumps({**trace, "distributedInfo": {"rank": rank, "world_size": 3}}))
    expected = torchprof.from_trace(files)
    torchprof.from_trace(files[1]).save(files[1])
    merged = str(tmp_path / "merged.json")
    cli("show", *files, "--jobs", "2", "-o", merged, "--report", "tree")
    assert torchprof.load(merged) == expected


def test_merge_reports_bad_input(
    ranks: list[Run], capsys: pytest.CaptureFixture[str], golden: Callable[..., None]
) -> None:
    ranks[0].save("again.json")
    replace(ranks[0], metas=(replace(ranks[0].meta, rank=5, world_size=8),), rows=run_of([]).rows).save("other.json")
    Path("broken.json").write_text(Path("rank1.json").read_text()[:500])
    Path("broken.json.gz").write_bytes(gzip.compress(b"no run")[:-9])
    torchprof.merge(ranks).save("all.json")
    commands = """
        show rank0.json again.json
        show rank0.json nowhere.json
        show rank0.json broken.json
        show rank0.json broken.json.gz
        show rank0.json other.json
        show rank0.json --jobs 0
        show rank0.json --model net.py:Net
        show rank0.json --model torch.nn:ReLU
        show rank0.json --kwargs '{"a": 1}'
        show rank0.json -o merged.pdf
        show rank0.json --report rnaks
        show rank0.json --report ops --depth 0 --full-names
        show rank0.json --report ops --op aten::linear --by-shape
        show rank0.json --report ops --by-shape
        show rank0.json --report headline --top 3
        show rank0.json --op x --phase forward
        show rank0.json --report top --summary
        show rank0.json --report kernels
        show all.json --rank 2
    """
    golden(said_of(textwrap.dedent(commands), capsys))


def test_merge_explains_how_traces_get_the_number_of_their_rank(tmp_path: Path, cli: Any) -> None:
    """Two traces without rank numbers: recorded at the same time, and one after the other."""
    trace = json.loads(gzip.decompress(TRACE.read_bytes()))
    (tmp_path / "b.json").write_text(json.dumps(trace))
    said = cli("show", str(TRACE), str(tmp_path / "b.json"), "--jobs", "1", code=2)
    assert '"distributedInfo": {"rank": 1, "world_size": 2}' in said.err


def test_merge_with_add_cycles_adds_the_cycles_of_a_rank(ranks: list[Run], cli: Any) -> None:
    ranks[0].save("again.json")
    cli("show rank0.json rank1.json again.json --add-cycles -o all.json")
    merged = torchprof.load("all.json")
    assert [meta.cycles for meta in merged.metas] == [2, 1]
    assert merged.tree().total.cpu_ns == 1100 * (1 + 2 + 1)


def test_merge_of_saved_runs_imports_no_torch(ranks: list[Run]) -> None:
    code = (
        "import sys\nfrom torchprof.cli import main\n"
        "main(['show', 'rank0.json', 'rank1.json'])\nprint('torch' in sys.modules)"
    )
    assert run_fresh(code).splitlines()[-1] == "False"


def test_show_opens_a_trace_and_merges_several_files(ranks: list[Run], cli: Any) -> None:
    """A trace, plain and gzipped; a folder of traces; a folder of saved runs."""
    trace = json.loads(gzip.decompress(TRACE.read_bytes()))
    Path("traces").mkdir()
    for rank in range(2):
        data = json.dumps({**trace, "distributedInfo": {"rank": rank, "world_size": 2}}).encode()
        Path(f"traces/{rank}.json{'.gz' * rank}").write_bytes(gzip.compress(data) if rank else data)
    runs = {
        "traces/0.json": torchprof.from_trace("traces/0.json"),
        "traces/1.json.gz": torchprof.from_trace("traces/1.json.gz"),
        "traces": torchprof.from_trace("traces"),
        ".": torchprof.merge(ranks),
    }
    torchprof.merge(ranks).save("traces/saved.json")  # what the user keeps beside traces is none of them
    for path, expected in runs.items():
        assert cli("show", path, "--jobs", "1", "--report", "tree").out == expected.report("tree") + "\n"
    said = cli("show rank0.json traces/1.json.gz -o both.json", code=2)
    assert "of 2 ranks (rank 1) and of 4 ranks (rank 0)" in said.err
    cli("show traces --jobs 1 --rank 1 -o one.json")
    assert torchprof.load("one.json").rows == runs["traces/1.json.gz"].rows
    with pytest.raises(
        torchprof.TorchprofError, match=r"`python -m torchprof show FILE -o run.json` makes a saved run of it"
    ):
        torchprof.load("traces/0.json")


def test_trace_prints_memory_over_time(cli: Any) -> None:
    assert "with_timeline" not in cli("show", str(TRACE), "--report", "memory").out


# Data


def test_json_is_the_data_of_the_chosen_report_and_all_of_stdout(net: Path, cli: Any) -> None:
    for command in (
        ["profile", "net.py:Net", "--input", "3,8"],
        ["flops", "net.py:Net", "--input", "3,8"],
        ["show", "again.json"],
        ["show", str(TRACE)],
        ["show", "again.json"],
    ):
        for options, name, expected in (
            ([], "overview", {}),
            (["--report", "ops", "--top", "3"], "ops", {"top": 3}),
            (["--depth", "1"], "tree", {"depth": 1}),
            (["--summary"], "summary", {}),
        ):
            out, err = cli(*command, *options, "--json", "-o", "run.json")
            assert out.isascii() and json.loads(out) == torchprof.load("run.json").report(name, **expected).data
            assert err == "Written: run.json.\n"
        Path("run.json").rename("again.json")


def test_json_of_a_comparison_and_its_exit_code(net: Path, cli: Any) -> None:
    run_of([row(0, cpu_ns=100)]).save("run.json")
    limits = ["--fail-if", "calls > 0", "--fail-if", "calls > 10k"]
    out, err = cli("compare run.json run.json --top 3 --json", *limits, code=1)
    assert json.loads(out) == torchprof.compare("run.json", "run.json").report("table", top=3).data
    assert err.startswith("Limit exceeded: ")


def test_json_of_what_has_no_data(net: Path, cli: Any) -> None:
    run_of([row(0, cpu_ns=100)]).save("run.json")
    out, err = cli("show run.json --report html --json", code=2)
    assert out == "" and "The report 'html' is a file format" in err
    assert "torchprof run has no --json: stdout belongs to the script." in cli("run --json net.py", code=2).err


def test_a_damaged_run_in_a_folder_is_left_out(ranks: list[Run], cli: Any) -> None:
    Path("runs").mkdir()
    good = Path("rank0.json").read_bytes()
    Path("runs", "a.json").write_bytes(good[: len(good) // 2])
    Path("runs", "b.json").write_bytes(b"\xef\xbb\xbf" + good)
    out = cli("show runs --report headline")
    assert "a.json" in out.err and out.err.startswith("Left out: ")
    assert out.out
    assert main(["show", "runs/a.json"]) != 0
