"""When and why torch.compile compiled: read from hand-made records of torch, and from real ones."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from build.inductor import kernels_of_zeros
from torch import nn

from torchprof import Profile
from torchprof.record.compiled.dynamo_code import compilations
from torchprof.run.meta import Compilation
from torchprof.run.words import BACKWARD, FORWARD

SECOND = 1_000_000_000


def record(name: str, start: float, **fields: Any) -> SimpleNamespace:
    """What torch keeps of one compilation; times in seconds."""
    of_function = {"co_name": "forward", "co_filename": "net.py", "co_firstlineno": 3}
    missing = dict.fromkeys(("fail_type", "fail_reason", "is_forward", "recompile_reason"))
    return SimpleNamespace(**{"compile_id": name, "start_time": start, **of_function, **missing, **fields})


FIRST = record(
    "0/0",
    100.0,
    entire_frame_compile_time_s=8.0,
    backend_compile_time_s=7.0,
    inductor_compile_time_s=4.0,
    triton_compile_time_us=3_000_000,
    duration_us=8_100_000,
    inductor_fx_local_cache_hit_count=0,
    aotautograd_local_cache_hit_count=0,
)
ITS_BACKWARD = record(
    "0/0",
    110.0,
    co_name=None,
    is_forward=False,
    entire_frame_compile_time_s=None,
    backend_compile_time_s=None,
    inductor_compile_time_s=2.0,
    triton_compile_time_us=500_000,
    duration_us=2_500_000,
    aotautograd_local_cache_hit_count=1,
)


def read(monkeypatch: pytest.MonkeyPatch, records: list[Any], step_starts: list[float]) -> tuple[Compilation, ...]:
    monkeypatch.setitem(sys.modules, "torch._dynamo.convert_frame", SimpleNamespace())
    utils = SimpleNamespace(get_compilation_metrics=lambda: records)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    return compilations([round(start * SECOND) for start in step_starts])


def test_the_parts_of_a_compilation_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = read(monkeypatch, [ITS_BACKWARD, FIRST], [105.0, 108.0, 109.0])
    assert forward == Compilation(
        *("0/0", FORWARD, "forward", "net.py", 3, None, "", ""),
        *(8 * SECOND, SECOND, 3 * SECOND, SECOND, 3 * SECOND, False, 100 * SECOND),
    )
    assert (backward.phase, backward.step, backward.from_cache, backward.began_ns) == (BACKWARD, 2, True, 110 * SECOND)
    assert backward.ns == 2.5 * SECOND
    parts = (backward.tracing_ns, backward.autograd_ns, backward.lowering_ns, backward.kernels_ns)
    assert parts == (0, 0.5 * SECOND, 1.5 * SECOND, 0.5 * SECOND)


def test_one_that_cannot_be_read_does_not_lose_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = record("1/0", 120.0, co_firstlineno=None)
    assert read(monkeypatch, [FIRST, odd], [0.0]) == read(monkeypatch, [FIRST], [0.0]) != ()


def test_a_backward_has_the_function_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    _, backward = read(monkeypatch, [FIRST, ITS_BACKWARD], [0.0])
    assert (backward.function, backward.file, backward.line) == ("forward", "net.py", 3)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3", None),
        ("0/1: k == 1.5      # y = x * k  # net.py:7 in forward", "k == 1.5"),
        ("1/1: ___check_type_id(k, 139858280796672), type=<class 'float'>  # def f(x, k)", None),
        (None, ""),
    ],
)
def test_a_reason_has_no_code_and_no_addresses(monkeypatch: Any, theirs: str | None, ours: str | None) -> None:
    one = record("0/1", 1.0, entire_frame_compile_time_s=1.0, recompile_reason=theirs)
    (found,) = read(monkeypatch, [one], [0.0])
    if ours is None:
        assert theirs is not None
        ours = theirs.partition(": ")[2].partition("  #")[0].replace(", 139858280796672", "")
    assert found.reason == ours


def test_what_an_older_torch_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(
        compile_id="0/0",
        start_time=5.0,
        entire_frame_compile_time_s=3.0,
        backend_compile_time_s=2.0,
        inductor_compile_time_s=1.5,
        co_name="forward",
        co_filename="net.py",
        co_firstlineno=3,
        fail_type=None,
        fail_reason=None,
    )
    of_backward = SimpleNamespace(compile_id="0/0", inductor_compile_time_s=1.0, fail_type=None, fail_reason=None)
    (found,) = read(monkeypatch, [of_backward, old], [0.0])
    assert (found.kernels_ns, found.from_cache, found.lowering_ns) == (None, None, 1.5 * SECOND)


def test_a_failure_has_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "Dynamo recompile limit exceeded\n  Explanation: too many."
    failed = record("0/8", 1.0, co_name=None, fail_type="Unsupported", fail_reason=why, duration_us=3000)
    (found,) = read(monkeypatch, [failed], [0.0])
    assert (found.failure, found.ns, found.tracing_ns) == ("Dynamo recompile limit exceeded", 3_000_000, 3_000_000)


@pytest.mark.parametrize("records", [[object()], None])
def test_records_of_another_form_give_none(monkeypatch: pytest.MonkeyPatch, records: Any) -> None:
    assert read(monkeypatch, records, [0.0]) == ()


def test_a_process_that_compiled_nothing_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.convert_frame", raising=False)
    assert compilations([0]) == ()


@pytest.mark.compiler
@kernels_of_zeros()
def test_each_compilation_is_at_its_step_and_their_time_is_that_of_the_events() -> None:
    """With static shapes, each new batch size is a new version; the last one is beyond the limit."""
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    compiled = torch.compile(net, dynamic=False)
    compiled(torch.rand(2, 8)).sum().backward()
    config: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch({limit: 3}), Profile(compiled) as prof:
        for size in (2, 3, 3, 4, 5):
            compiled(torch.rand(size, 8)).sum().backward()
            prof.step()
    found = prof.run.meta.compilations
    steps = [(one.name, one.step) for one in found if one.phase == FORWARD]
    if torch.__version__ < "2.9":  # it does not tell why, and another limit has another name
        steps = steps[:3]
    assert steps[:3] == [("0/0", None), ("0/1", 1), ("0/2", 3)]
    text = prof.run.report("compiled")
    if torch.__version__ >= "2.9":
        assert steps[3:] == [("0/3", 4)]
        assert "size mismatch at index 0. expected 2, actual 3" in text
        assert "limit" in found[-1].failure
    for one in found:
        assert one.ns == one.tracing_ns + one.autograd_ns + one.lowering_ns + (one.kernels_ns or 0)
    events = sum(
        row.cost.cpu_ns for row in prof.run.rows if any((f.kind, f.name) == ("region", "compiling") for f in row.frames)
    )
    assert sum(one.ns for one in found if one.step is not None) == pytest.approx(events, rel=0.3)
