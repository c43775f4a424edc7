"""Advice on torch.compile: compiled again, no longer compiled, graph breaks; each with near misses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from build.events import label, op, run_of_events

from torchprof.advise import Advice, rules
from torchprof.advise.compiled import remedy_of
from torchprof.advise.evidence import Evidence
from torchprof.attribute.events import Event, Kind, Site
from torchprof.run.layers import Layer
from torchprof.run.meta import Compilation, CompiledRegion
from torchprof.run.words import BACKWARD, FORWARD

LAYERS = (Layer(("Net",), "Net"), Layer(("Net", "fc"), "Linear"))
SITES = {"Net": Site((0,)), "fc": Site((1,))}
CODE = ("forward", "/home/me/net.py", 10)
SIZE = "tensor 'x' size mismatch at index 1. expected 2, actual 3"
MS = 1_000_000


def compiled(name: str, step: int | None, ms: int, reason: str = "", phase: str = FORWARD, failure: str = ""):
    return Compilation(name, phase, *CODE, step, reason, failure, ms * MS, ms * MS, 0, 0, 0, False, 0)


def found(rule: str, *compilations: Compilation, regions: tuple[CompiledRegion, ...] = ()) -> list[Advice]:
    events = [
        label("Net", 0, 1000),
        label("fc", 10, 900),
        Event(Kind.REGION, "Torch-Compiled Region: 0/1", 20, 800, 1),
        op("aten::mm", 30, 700),
    ]
    run = run_of_events(events, SITES, LAYERS, None, regions=regions, compilations=compilations)
    return list(rules()[rule](Evidence(replace(run))))


def test_versions_compiled_in_the_recording_are_reported_with_their_backward() -> None:
    (one,) = found(
        "compiled_again",
        compiled("0/0", None, 50),
        compiled("0/0", 0, 40, phase=BACKWARD),
        compiled("0/1", 0, 10, SIZE),
        compiled("0/1", 0, 5, phase=BACKWARD),
        compiled("0/2", 1, 20, SIZE.replace("3", "4")),
        compiled("0/3", 2, 7, "k == 1.5"),
        compiled("0/4", 2, 1, ""),
    )
    assert (one.layer, one.layers, one.gain_ns) == ("Net.fc", ("Net.fc",), 43 * MS)
    assert one.finding == (
        "torch.compile compiled forward (net.py:10) again 4 times, for 43.000ms: "
        f"`{SIZE}` and 1 more like it, `k == 1.5`, 1 for other reasons."
    )
    assert "mark_dynamic(x, 1)" in one.remedy and "pass it as a tensor" in one.remedy


def test_one_version_in_place_of_several_still_has_to_be_compiled() -> None:
    """The second version takes 900 ms, the first took 20: with sizes that vary from the start, 20 are saved."""
    first, second = compiled("0/0", 0, 20), compiled("0/1", 0, 900, SIZE)
    (one,) = found("compiled_again", first, second)
    assert one.gain_ns == 20 * MS and "for 900.000ms" in one.finding


@pytest.mark.parametrize(
    "near_miss",
    [compiled("0/0", 0, 50), compiled("0/1", None, 50, SIZE), compiled("0/8", 0, 1, SIZE, failure="limit")],
    ids=["first version", "before the recording", "failed"],
)
def test_what_is_not_compiled_again(near_miss: Compilation) -> None:
    assert found("compiled_again", near_miss) == []


def test_a_function_beyond_the_limit_of_versions() -> None:
    at_limit = compiled("0/8", 3, 1, SIZE, failure="Dynamo recompile limit exceeded")
    (one,) = found("no_longer_compiled", compiled("0/7", 2, 10, SIZE), at_limit)
    assert "gave up on forward (net.py:10)" in one.finding and SIZE in one.finding
    assert "recompile_limit" in one.remedy and "mark_dynamic(x, 1)" in one.remedy
    assert one.gain_ns is None
    assert found("no_longer_compiled", compiled("0/1", 2, 1, failure="graph break")) == []


def test_a_graph_break_with_a_hint() -> None:
    region = CompiledRegion("0/1", "Net.forward", "/home/me/net.py", 10, 12, "Call to print", "Do not print.")
    (one,) = found("graph_broken", regions=(region,))
    assert one.finding == "The compiled graph ends at net.py:12, once: Call to print."
    assert (one.remedy, one.layer) == ("Do not print.", "Net.fc")
    assert found("graph_broken", regions=(region._replace(break_hint=""),)) == []
    assert found("graph_broken", regions=(region._replace(name="0/2"),)) == []


@pytest.mark.parametrize(
    ("reason", "of_remedy"),
    [
        (SIZE, "`torch._dynamo.mark_dynamic(x, 1)`"),
        ("tensor 'x' rank mismatch. expected 2, actual 3", "Keep what torch names here the same"),
        ("tensor 'x' dtype mismatch. expected Float, actual Half", "Keep what torch names here the same"),
        ("tensor 'x' requires_grad mismatch. expected requires_grad=1", "Each mode needs a version"),
        (SIZE.replace("'x'", "'args[0]'"), "`torch._dynamo.mark_dynamic(x, 1)` (`x`: input 1)"),
        ("___stack0 == 6.328125", "capture_scalar_outputs"),
        ("G['FLAG'] == 1", "as a tensor"),
        ("GLOBAL_STATE changed: grad_mode", "Each mode"),
        ("self.training", "Each mode"),
        ("k == 1.5", "as a tensor"),
        ("k == -2", "as a tensor"),
        ("something new", "TORCH_LOGS"),
        ("", "TORCH_LOGS"),
    ],
)
def test_the_remedy_for_a_reason(reason: str, of_remedy: str) -> None:
    assert of_remedy in " ".join(remedy_of(reason))
