"""Findings on functions outside of layers, and on hooks: rows with sampled lines made by hand, and real programs."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from build.hand_made import label, op, python_line, row, run_of
from build.models import Layers
from torch import Tensor, nn

from torchprof.advise import Advice, advise
from torchprof.advise.evidence import Evidence
from torchprof.advise.python import functions
from torchprof.profile.program import Program
from torchprof.run.measures import Spread
from torchprof.run.passes import Passes, Unusual
from torchprof.run.run import Run
from torchprof.run.words import AUTOGRAD_ENGINE, BACKWARD, OUTSIDE, Frame

MS = 1_000_000


def line(text: str, samples: int, *around: Frame, layer: int = OUTSIDE) -> Any:
    return row(layer, *around, python_line(text), calls=samples)


def of(run: Run, rule: str = "python_in_the_loop") -> list[Advice]:
    return [one for one in advise(run) if one.rule == rule]


def loop(*lines: Any, own_ms: int = 40, ops: int = 10, op_ms: int = 0, name: str = "aten::add_") -> Run:
    """100 ms: so many outside layers in no operator, so many in operators there, the rest in a layer."""
    rows = [
        row(OUTSIDE, cpu_ns=own_ms * MS),
        row(OUTSIDE, op(name), calls=ops, cpu_ns=op_ms * MS),
        row(1, op("aten::mm"), calls=4, cpu_ns=(100 - own_ms - op_ms) * MS),
    ]
    return run_of([*rows, *lines], wall_ns=100 * MS)


@pytest.mark.parametrize(
    "called, says, remedy",
    [
        ("time.sleep", "it sleeps", "queue.Queue.get"),
        ("subprocess.run", "it starts processes", "psutil"),
        ("torch.save", "it writes to files", "if step % 100 == 0"),
        ("writer.add_scalar", "it writes to files", "if step % 100 == 0"),
        ("copy.deepcopy", "it copies the model", "torch._foreach_lerp_"),
        ("model.state_dict", "it copies the model", "torch._foreach_lerp_"),
        ("print", "it prints, logs", "loss.item()"),
        ("lock", "it waits for a lock or another thread", "queue.Queue"),
        ("self.batch_queue.get", "it waits for a lock or another thread", "queue.Queue"),
        ("thread.join", "it waits for a lock or another thread", "queue.Queue"),
        ("os.path.join", "this is Python between operators", "Replace the loop"),
        ("settings.get", "this is Python between operators", "Replace the loop"),
        ("str", "this is Python between operators", "Replace the loop"),
        ("json.load", "it reads files", "before the loop"),
        ("json.dumps", "it prints, logs, or turns values into text", "torch.save"),
        ("requests.get", "it reads files or data from elsewhere", "before the loop"),
        ("re.findall", "it processes text", "before the loop"),
        ("line.lower", "it processes text", "before the loop"),
        ("x.split", "this is Python between operators", "Replace the loop"),
        ("torch.tensor", "it makes tensors of Python lists", "from_numpy"),
        ("wandb.log", "it prints, logs", "step % 100"),
        ("np.argsort", "this is NumPy", "tensor operations"),
        ("pd.DataFrame", "this is NumPy", "tensor operations"),
        ("loss.item", "it reads values of tensors, one by one", "torch._foreach_norm"),
        ("DataLoader.__iter__", "the workers of a DataLoader are started again", "persistent_workers=True"),
        ("", "this is Python between operators", "Replace the loop"),
        ("anything", "this is Python between operators", "Replace the loop"),
    ],
)
def test_what_a_function_calls_says_what_it_does(called: str, says: str, remedy: str) -> None:
    text = f"train.py:7 log → {called}" if called else "train.py:7 log"
    [advice] = of(loop(line(text, 8)))
    assert advice.finding.startswith(f"train.py:7 log takes 40.000ms: {says}")
    assert remedy in advice.remedy and advice.gain_ns == 40 * MS and advice.layer == "(outside)"


def test_time_is_shared_by_samples_and_each_function_of_five_percent_is_reported() -> None:
    """40 ms by 20 samples, 2 ms each: `log` has 12 on two lines, `main` 8; a function of 4 samples is left out."""
    seen = [line("train.py:7 log → print", 9), line("train.py:8 log → print", 3), line("train.py:30 main", 8)]
    first, second = of(loop(*seen))
    assert (first.gain_ns, second.gain_ns) == (24 * MS, 16 * MS)
    assert first.finding.startswith("train.py:7 log takes 24.000ms")
    assert of(loop(line("train.py:7 log → print", 4))) == of(loop())


def test_each_kind_has_its_time_and_its_line() -> None:
    """40 ms by 20 samples: 6 on print, 5 on NumPy, 9 on what is not known."""
    seen = [line("train.py:7 log → print", 6), line("train.py:8 log → np.sum", 5), line("train.py:9 log → zip", 9)]
    found = of(loop(*seen))
    assert [one.gain_ns for one in found] == [18 * MS, 12 * MS, 10 * MS]
    assert [one.finding.partition(" takes")[0] for one in found] == [f"train.py:{at} log" for at in (9, 7, 8)]
    assert "this is Python between operators" in found[0].finding


def test_what_an_operator_is_called_for_is_its_kind() -> None:
    """2 operators of 15 ms each, called by torch.cat, and 10 ms beside them."""
    seen = [line("train.py:7 main → torch.cat", 9, op("aten::cat")), line("train.py:8 main → print", 9)]
    first, second = of(loop(*seen, own_ms=10, ops=2, op_ms=30, name="aten::cat"))
    assert first.gain_ns == 30 * MS and "it concatenates" in first.finding and "torch.cat(parts)" in first.remedy
    assert second.gain_ns == 10 * MS and "it prints" in second.finding


def test_small_operators_have_their_backward() -> None:
    """20 ms of operators and 10 between them; 1,000 nodes of 20 us outside all layers, and 5 ms of the engine."""
    seen = [line("train.py:7 loss", 3), line("train.py:7 loss", 9, op("aten::sub"))]
    nodes = [
        row(OUTSIDE, op("SubBackward0"), phase=BACKWARD, calls=1000, cpu_ns=20 * MS),
        row(OUTSIDE, op(AUTOGRAD_ENGINE), phase=BACKWARD, calls=0, cpu_ns=5 * MS),
    ]
    [advice] = of(loop(*seen, *nodes, own_ms=10, ops=2000, op_ms=20, name="aten::sub"))
    assert advice.gain_ns == 55 * MS and "backward outside of layers takes 25.000ms" in advice.finding
    assert "vmap" in advice.remedy


@pytest.mark.parametrize(("passes", "says"), [(399, "it calls small operators in a loop"), (400, "one by one")])
def test_gradients_of_a_jacobian_row_by_row(passes: int, says: str) -> None:
    """20 steps; autograd's engine runs 20 times in each, or nearly so."""
    seen = [line("train.py:7 main → torch.autograd.grad", 9, op("aten::sum")), line("train.py:7 main", 3)]
    engine = row(1, op(AUTOGRAD_ENGINE), phase=BACKWARD, calls=passes, cpu_ns=MS)
    run = loop(*seen, engine, own_ms=10, ops=2000, op_ms=20, name="aten::sum")
    run = replace(run, metas=(replace(run.meta, steps=20),))
    [advice] = of(run)
    assert says in advice.finding and ("is_grads_batched" in advice.remedy) == (passes == 400)


def test_a_loop_of_small_operators_is_reported_with_its_python() -> None:
    """2,000 operators of 15 us: 30 ms, and 10 ms between them."""
    seen = [line("train.py:7 sgd", 3), line("train.py:7 sgd", 9, op("aten::add_"))]
    [advice] = of(loop(*seen, own_ms=10, ops=2000, op_ms=30))
    assert advice.finding == ("train.py:7 sgd takes 40.000ms: it calls small operators in a loop (15.000us each).")
    assert "torch._foreach_add_" in advice.remedy and advice.gain_ns == 40 * MS


@pytest.mark.parametrize("reads, said", [(50, 0), (1000, 1)])
def test_one_value_for_each_call_of_the_model_is_not_many(reads: int, said: int) -> None:
    """A loss that is read once a step, beside operators of the loss; 20 reads for each call of the model are many."""
    softmax = op("aten::log_softmax")
    items = row(OUTSIDE, op("aten::item"), calls=reads, cpu_ns=MS)
    calls = row(0, calls=50)
    seen = line("train.py:7 main", 9, softmax), line("train.py:8 main → loss.item", 1, op("aten::item"))
    run = loop(*seen, items, calls, own_ms=0, ops=50, op_ms=30, name=softmax.name)
    assert len(of(run)) == said


@pytest.mark.parametrize("ops", [10, 1000])
def test_long_operators_are_the_work_of_the_loop(ops: int) -> None:
    """A loss: 30 us and more each."""
    assert of(loop(line("train.py:7 main", 9, op("aten::add_")), own_ms=0, ops=ops, op_ms=30)) == []


def test_copies_of_tensors_are_reported() -> None:
    seen = [line("train.py:7 average", 9, op("aten::clone"))]
    [advice] = of(loop(*seen, own_ms=0, ops=40, op_ms=30, name="aten::clone"))
    assert "it copies tensors" in advice.finding and "AveragedModel" in advice.remedy


def test_the_lines_of_loading_and_of_the_optimizer_are_not_those_of_the_loop() -> None:
    for name in ("enumerate(DataLoader)#x", "Optimizer.step#SGD.step"):
        within = label(name)
        rows = [row(OUTSIDE, within, cpu_ns=60 * MS), line("train.py:9 main", 12, within)]
        assert of(run_of([*rows, row(1, op("aten::mm"), cpu_ns=40 * MS)], wall_ns=100 * MS)) == []


def test_all_time_of_a_place_is_that_of_its_functions() -> None:
    """Whatever the samples are, functions have the time of the sampled places, to what integer division leaves."""
    seen = [line(f"train.py:{at} f{at % 3}", at % 4 + 1) for at in range(20)]
    found = functions(Evidence(loop(*seen)), lambda frames: True)
    assert len(found) == 3 and 0 <= 40 * MS - sum(one.ns for one in found) < 20
    assert sum(one.samples for one in found) == sum(at % 4 + 1 for at in range(20))


def test_a_hook_is_reported_with_its_operators() -> None:
    """5 of 10 samples between operators, which take 10 ms, and 6 of 27 in operators, which take 90."""
    rows = [
        row(1, cpu_ns=10 * MS),
        row(1, op("aten::std"), calls=50, cpu_ns=20 * MS),
        row(1, op("aten::mm"), cpu_ns=70 * MS),
    ]
    seen = [line("hooks.py:4 look (hook)", 5, layer=1), line("hooks.py:4 look (hook)", 6, op("aten::std"), layer=1)]
    seen += [line("net.py:9 forward", 5, layer=1), line("net.py:9 forward", 21, op("aten::mm"), layer=1)]
    [advice] = of(run_of([*rows, *seen], wall_ns=100 * MS), "hooks")
    assert advice.gain_ns == 25 * MS and advice.finding.startswith("hooks.py:4 look takes 25.000ms: a hook")
    assert "handle.remove()" in advice.remedy


class Slow(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_lines_of_a_real_program_say_what_they_call() -> None:
    """A sleep, a lock that another thread holds, and a hook, 150 ms each."""
    model, lock, held = Slow(fc=nn.Linear(4, 4)), threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(0.15)

    def waits() -> None:
        with lock:
            pass

    def sleeps() -> None:
        time.sleep(0.15)

    def looks(module: nn.Module, inputs: Any, output: Tensor) -> None:
        time.sleep(0.15)

    model.fc.register_forward_hook(looks)
    with Program() as program:
        model(torch.rand(2, 4))
        sleeps()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        waits()
        thread.join()
    said = [one.finding for one in advise(program.run)]
    for what in (" sleeps takes ", " waits takes ", " looks takes "):
        assert any(what in one for one in said), said
    assert next(one for one in said if " sleeps takes " in one).endswith(": it sleeps.")
    assert next(one for one in said if " waits takes " in one).endswith(": it waits for a lock or another thread.")
    assert "a hook of modules" in next(one for one in said if " looks takes " in one)


# Passes that take longer


def with_unusual(*numbers: int, line: str = "train.py:9 main → save", ms: int = 30) -> Run:
    """100 passes of 1 ms, of which these took 30 ms more."""
    unusual = tuple(Unusual(number, (ms + 1) * MS, line) for number in numbers)
    times = Spread.of([(number, MS) for number in range(100)])
    passes = Passes(0, 0, True, True, 100, 0, 0, times, ms * MS * len(numbers), unusual)
    return replace(run_of([row(OUTSIDE, cpu_ns=300 * MS)], wall_ns=300 * MS), passes=(passes,))


def test_passes_that_take_far_longer_again_and_again_are_reported_with_their_line() -> None:
    [one] = of(with_unusual(9, 19, 29, 39), "passes_that_take_longer")
    assert one.gain_ns == 120 * MS
    assert one.cause == ("One pass in 10 takes up to 31.000ms, others 1.000ms, most often at train.py:9 main → save.")


def test_the_gain_is_that_of_passes_at_the_line() -> None:
    run = with_unusual(9, 20, 33, 50)
    [passes] = run.passes
    other = passes.unusual[0]._replace(line="train.py:4 main → load")
    [one] = of(replace(run, passes=(replace(passes, unusual=(other, *passes.unusual[1:])),)), "passes_that_take_longer")
    assert one.gain_ns == 90 * MS and "train.py:9 main → save" in one.cause


@pytest.mark.parametrize(("samples", "count"), [(30, 0), (10, 0), (9, 1)])
def test_interruptions_fall_most_often_where_most_of_the_time_is(samples: int, count: int) -> None:
    """Of 300 ms, the line has 180, 60 or 54 ms in usual passes, too."""
    lines = [python_line(text) for text in ("train.py:9 main → save", "train.py:4 main → load")]
    rows = [
        row(OUTSIDE, cpu_ns=300 * MS),
        *(row(OUTSIDE, line, calls=calls) for line, calls in zip(lines, (samples, 50 - samples))),
    ]
    run = with_unusual(9, 20, 33, 50)
    assert len(of(replace(run, rows=run_of(rows).rows), "passes_that_take_longer")) == count


def test_a_few_passes_or_short_ones_are_not_reported() -> None:
    assert of(with_unusual(9, 19), "passes_that_take_longer") == []
    assert of(with_unusual(9, 19, 29, ms=4), "passes_that_take_longer") == []  # 12 of 300 ms


def test_long_waits_for_a_loader_may_be_the_start_of_its_workers() -> None:
    run = with_unusual(9, 17, 40, line="train.py:3 main → _BaseDataLoaderIter.__next__")
    [one] = of(run, "passes_that_take_longer")
    assert one.cause.startswith("Some passes take up to 31.000ms") and "persistent_workers" in one.remedy
