"""``torchprof run``: what it prints and saves, how it ends, and that its first lines name the cause of slowness."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from build.places import ROOT
from build.torchrun import torchrun
from build.warm import run_warm, warm_job

import torchprof

pytestmark = pytest.mark.jobs

SCRIPTS = ROOT / "examples" / "scripts"

MODEL = """
import os, sys, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x)

model = Net()
x = torch.rand(2, 4)
"""


def run(
    folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``python -m torchprof run`` in a process that has torch imported already."""
    return run_warm(["-m", "torchprof", "run", *arguments], folder, {"COLUMNS": "200", **(environment or {})})


def start(folder: Path, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """``python -m torchprof run``, from the start of Python to its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "99", "COLUMNS": "200"}
    command = [sys.executable, "-m", "torchprof", "run", *arguments]
    options = {
        "capture_output": True,
        "text": True,
        "check": False,
        "cwd": folder,
        "env": environment,
        "timeout": 300,
        **more,
    }
    return subprocess.run(command, **options)


Start = Callable[..., subprocess.CompletedProcess[str]]


def script(folder: Path, code: str, name: str = "script.py") -> str:
    (folder / name).write_text(MODEL + code)
    return name


def sections(out: str) -> dict[str, list[str]]:
    """The lines of each section, by its heading, which is underlined with =."""
    found: dict[str, list[str]] = {}
    lines = out.splitlines()
    heading = ""
    for line, below in zip(lines, [*lines[1:], ""]):
        if line and below == "=" * len(line):
            heading = line
        elif heading:
            found.setdefault(heading, []).append(line)
    return found


def first_row(out: str) -> list[str]:
    """The cells of the first row of the section "Where the time goes"."""
    return [cell.strip() for cell in sections(out)["Where the time goes"][3].split("|")]


def saved(folder: Path, name: str = "script.torchprof.json") -> torchprof.Run:
    return torchprof.load(folder / name)


def calls(found: torchprof.Run) -> int:
    return found.tree("forward").calls if found.roots else 0


# Planted faults: the cause is known, and must be in the first row


def test_the_slow_convolution_in_double_precision_is_named_first(tmp_path: Path) -> None:
    # Without the first call: it loads torch's library for convolutions, which takes long from a cold disk.
    done = run(tmp_path, "--warmup", "1", str(SCRIPTS / "double_precision.py"), "8", "3")
    assert done.returncode == 0 and done.stdout.startswith("step 0: [")
    share, _, layer, kind, phase, work = first_row(done.stdout)
    assert (layer, kind, phase) == ("ConvNet.block.2.conv", "Conv2d, float64", "forward")
    assert "conv" in work and float(share.rstrip("%")) > 20
    # In torch's own table of the same script, the operator is one that no float32 convolution uses.
    assert work in "\n".join(sections(done.stdout)["The operators"])


def test_the_mask_made_with_numpy_is_named_first(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    file = SCRIPTS / "numpy_mask.py"
    done = run(tmp_path, str(file))
    assert done.returncode == 0, done.stderr
    share, _, layer, _, phase, work = first_row(done.stdout)
    [line] = [number for number, text in enumerate(file.read_text().splitlines(), 1) if "np.argwhere(" in text]
    assert (layer, phase) == ("MyModule, MASK INDICES (label)", "forward")
    assert work.startswith("(between ops), ") and f"% at scripts/numpy_mask.py:{line} forward" in work
    assert float(share.rstrip("%")) > 50
    found = saved(tmp_path, "numpy_mask.torchprof.json")
    label = next(op for op in found.ops()[found.layers[0].path] if op.name == "MASK INDICES")
    assert label.kind == "label" and label.calls == 2


# The report


TRAINS_IN_DOUBLE = """
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
for _ in range(30):
    optimizer.zero_grad()
    model(torch.rand(256, 256, dtype=torch.double)).square().mean().backward()
    optimizer.step()
print("sum", sum(parameter.sum().item() for parameter in model.parameters()), torch.rand(1).item())
"""


TRAINS_ON_TWO_RANKS = """
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1)).double()
model = nn.parallel.DistributedDataParallel(block)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(24):
    optimizer.zero_grad()
    model(torch.rand(16, 8, dtype=torch.double)).square().mean().backward()
    optimizer.step()
print("sum", [parameter.sum().item() for parameter in model.parameters()], torch.rand(1).item(), flush=True)
dist.destroy_process_group()
"""


def test_a_job_computes_the_same_with_try_and_nothing_is_tried(tmp_path: Path) -> None:
    plain = torchrun(tmp_path, 2, TRAINS_ON_TWO_RANKS)
    job = torchrun(tmp_path, 2, "torchprof", "run", "--try", "job.py", module=True)
    assert plain.code == job.code == 0, f"{plain}\n{job}"
    sums = [[line for line in out.splitlines() if line.startswith("sum")] for out in plain.out]
    assert [[line for line in out.splitlines() if line.startswith("sum")] for out in job.out] == sums != [[], []]
    assert "Nothing was tried: `--try` needs a single process" in " ".join(job.out[0].split()), job


def test_remedies_are_tried_between_two_passes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import torch\n\ntorch.manual_seed(0)\n{TRAINS_IN_DOUBLE}")
    plain = run(tmp_path, "script.py").stdout.splitlines()[0]
    for _ in range(3):  # on a busy machine, other findings may be larger
        done = run(tmp_path, "--try", "--try-seconds", "10", "script.py")
        assert done.returncode == 0 and done.stdout.splitlines()[0] == plain, "the script computes something else"
        if trials := [trial for trial in saved(tmp_path).trials if trial.rule == "double_precision"]:
            break
    [trial] = trials
    assert trial.has_gained and trial.result in done.stdout.replace("\n", " ")
    assert (
        run(tmp_path, "--try-seconds", "0", "script.py")
        .stderr.rstrip()
        .endswith("'0' is not a number of seconds above 0, as 20")
    )
    assert "leave out --all, --steps and --max-calls" in run(tmp_path, "--try", "--all", "script.py").stderr


def test_the_whole_report_of_a_training_script(tmp_path: Path) -> None:
    done = run(tmp_path, str(SCRIPTS / "train.py"), "1")
    assert done.returncode == 0 and done.stderr == ""
    before, _, report = done.stdout.partition("\ntorchprof: ")
    assert before.splitlines()[-1].endswith("% right")
    assert f"{SCRIPTS / 'train.py'} ended. Recorded: " in report.splitlines()[0]
    headings = ["Where the time goes", "The layers", "The operators", "Between the operators", "Recorded on", "Legend"]
    assert [heading for heading in sections(report) if heading != "Findings"] == headings
    ran, parts, headline, *_ = report.splitlines()[2:]
    assert ran.startswith("6 steps: median ") and " · 4 calls without gradients: median " in ran
    assert "optimizer " in parts and "forward (no grad) " in parts
    assert headline.endswith(".") and "% of the time is" in headline
    for name in ("torch", "built", "threads", "CPU", "system"):
        assert f"\n  {name:<8} " in report
    layers = "\n".join(sections(report)["The layers"])
    assert "│├── 3 " in layers and "Optimizer.step#AdamW.step (label)" in layers and "Backward CPU total" in layers
    assert report.splitlines()[-1] == (
        "Written: train.torchprof.json. To see more of it: torchprof show train.torchprof.json"
    )
    found = saved(tmp_path, "train.torchprof.json")
    [start_up] = [warning for warning in found.warnings if warning.code == "start_up"]
    assert calls(found) + start_up.facts["calls"] == 256 // 32 + 256 // 64 and start_up.facts["calls"] == 1
    assert str(start_up) in report.splitlines()
    assert "\n".join(found.report("top", top=5).splitlines()[:7]) in report and found.meta.script == str(
        SCRIPTS / "train.py"
    )


def test_options_select_what_is_recorded_and_shown(tmp_path: Path) -> None:
    code = "for _ in range(9):\n    model(x).sum().backward()\nprint(sys.argv)"
    options = ["--warmup-calls", "2", "--max-calls", "3", "--memory", "--flops", "--depth", "0", "-o", "there.json.gz"]
    done = run(tmp_path, *options, script(tmp_path, code), "--memory", "-m", "--", "--max-calls=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['script.py', '--memory', '-m', '--', '--max-calls=1']\n")
    found = saved(tmp_path, "there.json.gz")
    assert calls(found) == 3
    assert found.tree("forward").total.macs == 3 * 2 * 4 * 4 and found.tree("forward").total.cpu_allocated > 0
    shown = sections(done.stdout)
    assert not any("fc" in line for line in shown["The layers"])
    assert "Deeper layers are hidden: --depth 1 shows all." in shown["The layers"]
    assert "Memory" in shown and "MACs" in shown["The layers"][1]
    assert (
        "3 model calls recorded, as requested. The program then continued without recording."
        in shown["Where the time goes"]
    )


ADVICE = """
import torchprof.advise

def found(evidence):
    yield torchprof.advise.Advice("Net", "Is slow.", "Make it fast.", None, None, "mine")

torchprof.advise.rules = lambda: dict.fromkeys("abcdefgh"[:{count}], found)
model(x)
"""
MORE = "torchprof show {} --report findings shows all."


@pytest.mark.parametrize(
    "count, options, said",
    [
        (3, [], []),
        (4, [], ["1 more finding is not shown: " + MORE.format("script.torchprof.json")]),
        (5, ["-o", "table.csv", "-o", "run.json.gz"], ["2 more findings are not shown: " + MORE.format("run.json.gz")]),
        (4, ["-o", "table.csv"], ["1 more finding is not shown: saved with -o run.json, " + MORE.format("run.json")]),
    ],
)
def test_the_advice_names_the_command_that_shows_the_rest(
    tmp_path: Path, count: int, options: list[str], said: list[str]
) -> None:
    done = run(tmp_path, *options, "--shapes", "--memory", script(tmp_path, ADVICE.replace("{count}", f"{count}")))
    lines = sections(done.stdout)["Findings"]
    assert "3. Gain unknown in Net: Is slow." in lines and "4. Gain unknown in Net: Is slow." not in lines
    assert [line for line in lines if "not shown" in line] == said
    if said:
        command = said[0].removesuffix(" shows all.").split("torchprof show ")[1].split()
        if (tmp_path / command[0]).exists():
            [*_, last] = torchprof.load(tmp_path / command[0]).report("findings").splitlines()
            assert "More can be found" not in last, "all was recorded that can be asked for here"


@pytest.mark.parametrize(
    "options, said",
    [
        ([], ["More can be found in a run with --shapes (shapes and types) and --memory (memory)."]),
        (["--memory"], ["More can be found in a run with --shapes (shapes and types)."]),
        (["--shapes"], ["More can be found in a run with --memory (memory)."]),
        (["--shapes", "--memory"], []),
    ],
)
def test_the_advice_names_the_options_that_record_more(tmp_path: Path, options: list[str], said: list[str]) -> None:
    done = run(tmp_path, *options, script(tmp_path, ADVICE.replace("{count}", "1")))
    assert [line for line in sections(done.stdout)["Findings"] if "More" in line] == said
    signatures = [frame.signature for chain in saved(tmp_path).rows.frames for frame in chain if frame.signature]
    assert any((2, 4) in one.shapes for one in signatures) == ("--shapes" in options)
    assert "record_shapes" not in done.stdout and "use_cuda" not in done.stdout


def test_long_trees_are_shortened_by_default(tmp_path: Path) -> None:
    code = "model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(30)))\nmodel(x)"
    name = script(tmp_path, code)
    layers = sections(run(tmp_path, name).stdout)["The layers"]
    rows = [line.split(" | ")[0].strip(" │├└─") for line in layers if "── " in line]
    assert rows[:3] == ["0–29  30 × Sequential", "0  30 × Linear", "1  30 × ReLU"]
    assert "--depth 2 shows all." in layers
    layers = sections(run(tmp_path, "--depth", "2", name).stdout)["The layers"]
    assert sum("├── " in line or "└── " in line for line in layers) == 90 and "hidden" not in "\n".join(layers)


def test_the_report_has_python_functions_of_a_second_run(tmp_path: Path) -> None:
    code = """
def slow():
    return sum(number * number for number in range(300_000))

print("squares", slow())
model(x)
"""
    done = run(tmp_path, "--python", script(tmp_path, code))
    assert done.returncode == 0 and done.stdout.count("squares ") == 1
    table = sections(done.stdout)["Python's functions outside torch, in a second run"]
    [line] = [number for number, text in enumerate(MODEL.splitlines() + code.splitlines(), 1) if "for number" in text]
    assert any(row.endswith(f"| script.py:{line} <genexpr>") and "| 300001 |" in row for row in table)
    assert not any("torch/nn/modules" in line or "torch._C" in line for line in table)


def test_the_second_run_of_a_failing_script_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path, "--python", script(tmp_path, "model(x)\nraise ValueError('no')"))
    assert done.returncode == 1
    last = "\n".join(sections(done.stdout)["Python's functions outside torch, in a second run"])
    assert "This run ended with exit code 1." in last and "ValueError: no" in last


def test_a_module_runs_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    script(tmp_path / "package", "model(x)\nprint(__name__, __package__, sys.argv[1:])", "work.py")
    done = run(tmp_path, "-m", "package.work", "-o", "theirs", "--depth")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("__main__ package ['-o', 'theirs', '--depth']\n")
    assert "torchprof: package.work ended." in done.stdout
    assert calls(saved(tmp_path, "work.torchprof.json")) == 1


def test_scripts_without_a_model_or_without_torch(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import time\ntime.sleep(0.1)\n")
    done = start(tmp_path, "plain.py")
    assert done.returncode == 0
    shown = sections(done.stdout)
    assert list(shown) == ["Where the time goes", "Between the operators", "Recorded on", "Legend"]
    assert first_row(done.stdout)[0] == "100.0%" and "at plain.py:2 <module>" in first_row(done.stdout)[-1]
    assert "No model was called: all recorded work is outside of models." in shown["Where the time goes"]


def test_a_warning_is_printed_once(tmp_path: Path) -> None:
    code = "model.unused = nn.Linear(1, 1)\nmodel(x)"
    done = run(tmp_path, "--flops", script(tmp_path, code))
    assert done.stdout.count("Never called: Net.unused") == 1


# How scripts end


def test_a_script_that_fails_has_its_traceback_its_report_and_its_exit_code(tmp_path: Path) -> None:
    done = run(tmp_path, script(tmp_path, "model(x)\nmodel(torch.rand(3, 5))"))
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and "torchprof" not in done.stderr.replace(str(ROOT), "")
    assert "torchprof: script.py failed: RuntimeError: " in done.stdout
    assert calls(saved(tmp_path)) == 2 and "Net.fc" in "\n".join(sections(done.stdout)["Where the time goes"])


@pytest.mark.parametrize(("code", "status"), [("sys.exit(7)", 7), ("sys.exit('bad')", 1), ("raise SystemExit", 0)])
def test_the_exit_code_is_that_of_the_script(tmp_path: Path, code: str, status: int) -> None:
    done = run(tmp_path, script(tmp_path, f"model(x)\n{code}"))
    assert done.returncode == status and calls(saved(tmp_path)) == 1


@pytest.mark.skipif(os.name == "nt", reason="no such signals")
@pytest.mark.parametrize("number, said", [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_an_interrupted_script_has_a_report_and_ends_by_the_signal(tmp_path: Path, number: int, said: str) -> None:
    code = "model(x)\nopen('ready', 'w').close()\nwhile True:\n    model(x)\n    time.sleep(0.01)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "99"}
    command = [sys.executable, "-m", "torchprof", "run", "--python", script(tmp_path, code)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 120
        while not (tmp_path / "ready").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(number)
        try:
            out, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == -number
    assert said in out and calls(saved(tmp_path)) >= 1
    assert "Not run: the first run was interrupted." in out


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (start, "sys.stdout.close()"),
        (start, "sys.stdout = None"),
        (start, "os.close(1)"),
        (run, "sys.stdout = open(os.devnull, 'w')"),
        (run, "os.chdir('/')"),
        (run, "sys.stdout.write('no line end'); sys.exit()"),
    ],
)
def test_the_report_and_the_file_are_written_even_if_the_script_changes_folder_or_stdout(
    tmp_path: Path, how: Start, code: str
) -> None:
    done = how(tmp_path, "-o", "run.json", script(tmp_path, f"model(x)\n{code}"))
    assert "Where the time goes" in done.stdout and calls(saved(tmp_path, "run.json")) == 1
    (tmp_path / "plain.py").write_text(f"import os, sys\n{code}")
    plain = subprocess.run([sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr)
    assert done.stdout.startswith(plain.stdout)


def test_a_reader_that_closes_the_pipe(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = start(
            tmp_path,
            script(tmp_path, "model(x)\nsys.exit(3)"),
            capture_output=False,
            stdout=write,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (3, "") and calls(saved(tmp_path)) == 1


def test_a_script_that_ends_by_os_exit_has_no_report(tmp_path: Path) -> None:
    done = run(tmp_path, script(tmp_path, "model(x)\nos._exit(4)"))
    assert (done.returncode, done.stdout, done.stderr) == (4, "", "")


def test_workers_and_child_processes_print_no_report(tmp_path: Path) -> None:
    code = """
import multiprocessing
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return model(torch.rand(4)).detach()

def work():
    model(x)

if __name__ == "__main__":
    for batch in DataLoader(Data(), batch_size=2, num_workers=2):
        model(batch)
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=work)
        process.start()
        process.join()
        assert process.exitcode == 0
"""
    done = start(tmp_path, script(tmp_path, code))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Where the time goes") == 1 and calls(saved(tmp_path)) == 4


def test_recording_ends_when_the_script_starts_a_profiler(tmp_path: Path) -> None:
    code = """
model(x)
with torch.profiler.profile() as profiler:
    model(x)
print(profiler.key_averages().table(row_limit=1).count("aten::"))
model(x)
"""
    done = run(tmp_path, script(tmp_path, code))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1\n") and calls(saved(tmp_path)) == 1
    assert "The recording ended early: the program started a profiler of its own." in done.stdout


def test_a_script_that_ends_while_its_profiler_is_on(tmp_path: Path) -> None:
    """torch may crash then, as it does without torchprof; the report is printed before that."""
    code = """
model(x)
profiler = torch.profiler.profile()
profiler.start()
model(x)
sys.exit(5)
"""
    done = start(tmp_path, script(tmp_path, code))
    plain = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == plain.returncode, done.stderr
    assert calls(saved(tmp_path)) == 1 and "The recording ended early" in done.stdout


# Wrong input


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--max-calls", "0", "script.py"], "max_calls must be a number of calls, 1 or more, not 0."),
        (["--warmup-calls", "-1", "script.py"], "'-1' is not a whole number from 0 on; examples: 20, 10k"),
        (["-o", "nowhere/run.json", "script.py"], "its folder does not exist"),
        (["--memry", "script.py"], "--memry"),
        ([], "script.py"),
        (["missing.py"], "can't open file"),
        (["-m", "missing_module"], "No module named missing_module"),
    ],
)
def test_with_wrong_input_nothing_runs(tmp_path: Path, arguments: list[str], said: str) -> None:
    script(tmp_path, "open('ran', 'w').close()")
    done = run(tmp_path, *arguments)
    assert done.returncode == (1 if "missing_module" in arguments else 2)
    assert said in done.stderr and done.stdout == "" and not (tmp_path / "ran").exists()
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="everything can be written to")
def test_the_script_runs_even_if_its_folder_is_not_writable(tmp_path: Path) -> None:
    name = script(tmp_path, "model(x)")
    tmp_path.chmod(0o500)
    done = run(tmp_path, name)
    tmp_path.chmod(0o700)
    assert done.returncode == 0 and "Where the time goes" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Not written: script.torchprof.json: Permission denied.")


@pytest.mark.parametrize("ends, code", [("", 2), ("\nsys.exit(6)", 6)])
def test_a_run_that_cannot_be_saved_is_shown(ends: str, code: int, tmp_path: Path) -> None:
    done = run(tmp_path, "-o", "taken.json", script(tmp_path, f"model(x)\nos.mkdir('taken.json'){ends}"))
    assert done.returncode == code and "Where the time goes" in done.stdout
    assert done.stdout.splitlines()[-1] == ("Not written: taken.json: Is a directory. Choose another place: -o FILE.")


def test_a_stream_that_cannot_encode_all_characters(tmp_path: Path) -> None:
    """The report is complete, and the exit code is the script's. The script sees the stream unchanged."""
    code = """
model(x)
print(sys.stdout.encoding, sys.stdout.errors)
try:
    print("\\u2265")
except UnicodeEncodeError:
    sys.exit(3)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "99", "PYTHONIOENCODING": "cp1252"}
    done = start(tmp_path, script(tmp_path, code), env=environment, encoding="cp1252")
    assert done.returncode == 3 and done.stderr == ""
    assert done.stdout.startswith("cp1252 strict\n")
    assert "\n`-- fc " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Written: script.torchprof.json.")


@pytest.mark.parametrize(
    "option, recorded, said",
    [
        ("--all", 49, ""),
        ("--steps=20:30", 10, r"As requested, 10 of 49 passes of the loop are in the figures, and no other time\."),
        ("--max-calls=7", 7, "7 model calls recorded"),
        # a pass that took unusually long has another one recorded in its place
        ("--warmup=0", 50, r"Shares are estimates from (2[4-9]|[34]\d) of 50 passes of the loop\."),
    ],
)
def test_which_steps_are_recorded_may_be_chosen(tmp_path: Path, option: str, recorded: int, said: str) -> None:
    code = "with torch.no_grad():\n    for _ in range(50): model(x)"
    done = run(tmp_path, option, "-o", "run.json", script(tmp_path, code))
    found = saved(tmp_path, "run.json")
    assert done.returncode == 0 and calls(found) == recorded
    assert re.search(said, done.stdout)
    assert bool(found.passes) is (option == "--warmup=0")


def test_steps_that_do_not_come_leave_nothing(tmp_path: Path) -> None:
    code = "with torch.no_grad():\n    for _ in range(30): model(x)"
    for warmup in ([], ["--warmup", "0"]):
        done = run(tmp_path, "--steps", "500:600", *warmup, "-o", "run.json", script(tmp_path, code))
        assert done.returncode == 0 and "As requested, 0 of" in done.stdout, done
        assert calls(saved(tmp_path, "run.json")) == 0 and saved(tmp_path, "run.json").meta.wall_ns == 0
    done = run(tmp_path, "--steps", "1:6", "--warmup", "0", "-o", "run.json", script(tmp_path, code))
    assert calls(saved(tmp_path, "run.json")) == 5
    done = run(tmp_path, "--steps", "0:5", "--warmup", "0", "-o", "run.json", script(tmp_path, code))
    assert calls(saved(tmp_path, "run.json")) == 5 and "before the first model call" not in done.stdout
    done = run(tmp_path, "--steps", "1:6", "--max-calls", "2", script(tmp_path, code))
    assert done.returncode == 2 and "--steps and --max-calls both say what is recorded" in done.stderr


@pytest.mark.parametrize("steps", ["20", "30:20", "a:b", "1:2:3"])
def test_wrong_steps_are_refused(tmp_path: Path, steps: str) -> None:
    done = run(tmp_path, "--steps", steps, script(tmp_path, "print('ran')"))
    assert done.returncode == 2 and done.stdout == ""
    assert f"{steps!r} is not A:B with A < B, as 100:120 for passes 100 to 119" in done.stderr


# Under torchrun

IN_A_JOB = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
for step in range(3):
    out = model(torch.rand(2, 4))
    if step == 1 and "dies" in sys.argv and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(out.detach())
print("rank", dist.get_rank())
dist.destroy_process_group()
"""


def test_the_ranks_of_a_job_write_a_file_each_and_the_first_prints(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")  # for the job folder
    (tmp_path / "train.py").write_text(IN_A_JOB)
    outputs = [word for file in ("rank{rank}.json", "{rank}.csv", "job/") for word in ("-o", file)]
    job = warm_job(tmp_path, 2, "-m", "torchprof", "run", *outputs, "train.py")
    assert job.code == 0, job
    assert job.out[1] == "rank 1\n" and job.out[0].startswith("rank 0\n\ntorchprof: train.py ended.")
    assert job.out[0].splitlines()[-3:] == [
        "Written: rank0.json. Each other rank writes its own. To compare them: torchprof show FILE …",
        "Written: 0.csv.",
        "Written: job/, to which each other rank writes. To compare them: torchprof show job/",
    ]
    runs = [saved(tmp_path, f"rank{rank}.json") for rank in range(2)]
    assert [(run.meta.rank, run.meta.world_size, calls(run)) for run in runs] == [(0, 2, 3), (1, 2, 3)]
    assert {*runs[1].rows.columns["rank"]} == {1} and (tmp_path / "1.csv").is_file()
    assert torchprof.merge(runs).missing_ranks == ()
    assert torchprof.open_job(tmp_path / "job").run() == torchprof.merge(runs)


TRAINS_IN_A_JOB = """
import time, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    if dist.get_rank() == 2:
        time.sleep(0.02)
    model(torch.rand(16, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_the_ranks_of_a_job_record_the_same_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS_IN_A_JOB)
    for last in (False, False, True):  # a busy machine may interrupt one of the ranks: then its times are its own
        job = warm_job(tmp_path, 4, "-m", "torchprof", "run", "-o", "rank{rank}.json", "train.py")
        assert job.code == 0, job
        runs = [saved(tmp_path, f"rank{rank}.json") for rank in range(4)]
        for run in runs:
            [passes] = run.passes
            assert (passes.count, passes.recorded, run.meta.steps, calls(run)) == (59, 24, 59, 59)
        merged = torchprof.merge(runs)
        assert [passes.rank for passes in merged.passes] == [0, 1, 2, 3]
        assert "24 of 59 passes" in merged.report("overview")
        are_paired = all(lockstep.is_paired for key, lockstep in merged.lockstep.items() if key.keeps_values)
        assert are_paired or not last
        if are_paired:
            break


def test_after_one_rank_fails_the_others_write_what_ran_until_then(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IN_A_JOB)
    job = torchrun(tmp_path, 2, "torchprof", "run", "train.py", "dies", module=True)
    assert job.code == 1 and "torchprof: train.py" in job.out[0], job
    [file] = tmp_path.glob("*.torchprof.json")
    run = saved(tmp_path, file.name)
    assert file.name == "train.rank0.torchprof.json" and calls(run) == 2 and run.missing_ranks == (1,)


def test_one_file_for_all_ranks_is_an_error_before_the_run(tmp_path: Path) -> None:
    name = script(tmp_path, "print('ran')")
    job = {"RANK": "1", "WORLD_SIZE": "2"}
    done = run(tmp_path, "-o", "{rank}.json", "-o", "run.json", name, environment=job)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "torchprof: -o run.json: all 2 ranks would write this file. Put {rank} into its name, or write a job folder: "
        "job/\n"
    )
    done = run(tmp_path, "--python", name, environment=job)
    assert (done.returncode, done.stdout) == (2, "") and "which a rank of a job cannot do" in done.stderr
    done = run(tmp_path, "-o", "run{rank}.json", name)
    assert done.returncode == 0 and calls(saved(tmp_path, "run0.json")) == 0


def test_torchs_profiler_is_quiet_and_the_environment_is_unchanged(tmp_path: Path) -> None:
    """torch 2.13 writes two lines to stderr in each session unless a variable says otherwise before the first one."""
    code = "model(x)\nprint(os.environ.get('KINETO_LOG_LEVEL'))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("KINETO_LOG_LEVEL", None)
    done = start(tmp_path, script(tmp_path, code), env=environment)
    assert done.stderr == "" and done.stdout.startswith("None\n")
    bare = "with torchprof.Profile(model): model(x)\nprint(os.environ.get('KINETO_LOG_LEVEL'))"
    name = script(tmp_path, f"import torchprof\n{bare}\n{bare}")
    done = subprocess.run(
        [sys.executable, name], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert done.stderr == "" and done.stdout == "None\nNone\n"
