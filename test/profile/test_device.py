"""Which device a ``Profile`` records: ``device=``, and the older ``use_cuda=`` and ``use_device=``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from build.golden import message
from build.warnings import sentences
from torch import nn

from torchprof import Profile, Run, flops


def claiming(kind: str) -> type[nn.Parameter]:
    """A class of parameters that say they are on a device of this kind, and compute on the CPU."""
    return type("Elsewhere", (nn.Parameter,), {"device": torch.device(kind), "is_cpu": False})


def move(layer: nn.Linear, kind: str) -> None:
    layer.weight = claiming(kind)(layer.weight.detach())


def model_on(*kinds: str) -> nn.Sequential:
    """A model with a layer for each kind of device."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in kinds))
    for layer, kind in zip(model, kinds):
        if kind != "cpu":
            move(layer, kind)
    return model


def profiled(model: Any, **options: Any) -> Run:
    with Profile(model, **options) as prof:
        for one in model if isinstance(model, list) else [model]:
            one(torch.rand(1, 2))
    return prof.run


def test_device_is_auto_and_by_name_only() -> None:
    device = inspect.signature(Profile).parameters["device"]
    assert (device.default, device.kind) == ("auto", inspect.Parameter.KEYWORD_ONLY)


@pytest.mark.parametrize(
    ("kinds", "device"),
    [
        (["cpu", "cpu"], None),
        (["cuda"], "cuda"),
        (["cuda:1"], "cuda"),
        (["cpu", "cuda"], "cuda"),
        (["cuda:0", "cuda:1"], "cuda"),
        (["xpu", "cuda"], "xpu"),
        (["meta", "cuda"], "cuda"),
        (["mps"], "mps"),
        (["xla"], None),
        (["meta"], None),
    ],
    ids=str,
)
def test_auto_is_what_the_model_is_on(kinds: list[str], device: str | None) -> None:
    module = torch.backends.mps if device == "mps" else getattr(torch, device or "cpu")
    if device is not None and module.is_available():
        pytest.skip("there is such a device here: it would be recorded")
    run = profiled(model_on(*kinds))
    assert run.meta.device == device
    assert run.meta.requested == (("cpu_ns",) if device is None else ("cpu_ns", "device_ns"))
    assert run.meta.measured == ("cpu_ns",)  # no such device is here
    named = [sentence for sentence in sentences(run) if (device or "device").upper() in sentence]
    assert len(named) == (device is not None), named


def test_auto_looks_at_buffers_and_at_every_model() -> None:
    with_buffer = nn.Sequential(nn.BatchNorm1d(2, affine=False))
    there = claiming("xpu")(torch.zeros(2), requires_grad=False)
    with_buffer[0]._buffers["running_mean"] = there
    with_buffer.eval()
    assert profiled([nn.Linear(2, 2), with_buffer]).meta.device == "xpu"


def test_a_model_without_tensors_is_on_the_cpu() -> None:
    assert profiled(nn.ReLU()).meta.device is None


def test_the_device_is_that_of_the_beginning_of_the_block() -> None:
    model = model_on("cpu")
    prof = Profile(model)
    move(model[0], "xpu")
    with prof:
        model(torch.rand(1, 2))
    assert prof.run.meta.device == "xpu"


@pytest.mark.parametrize("options", [{}, {"warmup": 1}, {"schedule": lambda _: torch.profiler.ProfilerAction.RECORD}])
def test_a_model_moved_inside_the_block_has_a_warning(options: dict[str, Any]) -> None:
    model = model_on("cpu")
    with Profile(model, **options) as prof:
        move(model[0], "xpu")
        model(torch.rand(1, 2))
        model(torch.rand(1, 2))
        if "schedule" in options:
            prof.step()
    assert prof.run.meta.device is None
    warnings = [one for one in prof.run.warnings if one.code == "moved_to_device"]
    assert [str(one) for one in warnings] == [
        "The model was moved to XPU inside the block: only the CPU was recorded. Move it before the block, or use "
        'device="xpu".'
    ]


def test_no_warning_for_a_moved_model_if_only_the_cpu_was_asked_for() -> None:
    for options in ({"device": "cpu"}, {"use_cuda": False}):
        model = model_on("cpu")
        with Profile(model, **options) as prof:
            move(model[0], "xpu")
        assert "moved_to_device" not in [one.code for one in prof.run.warnings]


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"device": "cpu"}, None),
        ({"device": torch.device("cpu")}, None),
        ({"device": "cuda"}, "cuda"),
        ({"device": "cuda:1"}, "cuda"),
        ({"device": torch.device("cuda", 1)}, "cuda"),
        ({"device": "xpu"}, "xpu"),
        ({"use_cuda": False}, None),
        ({"use_cuda": True}, "cuda"),
        ({"use_device": "xpu"}, "xpu"),
        ({"use_device": "xpu", "use_cuda": False}, "xpu"),
        ({"device": "auto", "use_device": "xpu"}, "xpu"),
        ({"device": "cuda", "use_cuda": True}, "cuda"),
        ({"device": "xpu:0", "use_device": "xpu"}, "xpu"),
        ({"device": "cpu", "use_cuda": False}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_a_named_device_is_recorded(options: dict[str, Any], device: str | None, kind: str) -> None:
    if torch.cuda.is_available() or torch.xpu.is_available():
        pytest.skip("there is a device here: it would be recorded")
    assert profiled(model_on(kind), **options).meta.device == device


def test_the_positional_use_cuda_of_torchprof_1_4_0_is_as_it_was() -> None:
    model = model_on("mps")
    with Profile(model, True, False) as prof:
        model(torch.rand(1, 2))
    assert prof.run.meta.device is None and prof.use_cuda is False
    assert Profile(model, True, True).use_cuda is True
    later = Profile(model, True, False)
    later.use_cuda = True  # a plain attribute until the block begins
    with later:
        model(torch.rand(1, 2))
    assert later.run.meta.device == "cuda"
    assert Profile(model).use_cuda is False
    with Profile(model, use_device="cpu") as on_cpu:
        model(torch.rand(1, 2))
    assert on_cpu.run.meta.device is None


CONTRADICTIONS: list[dict[str, Any]] = [
    *({"device": "cuda", "use_cuda": False}, {"device": "cpu", "use_cuda": True}, {"device": "xpu", "use_cuda": True}),
    *({"device": "cuda", "use_device": "cpu"}, {"device": "cuda", "use_device": "xpu"}),
    {"device": torch.device("cuda:1"), "use_device": "xpu"},
]
UNKNOWN = ["cuad", "gpu", "cuda:x", "auto:0", "", "meta", torch.device("meta"), None, 0, True, ["cuda"]]


def test_contradicting_and_unknown_devices_raise(golden: Callable[..., None]) -> None:
    model = model_on("cpu")
    wrong = [*CONTRADICTIONS, *({"device": device} for device in UNKNOWN)]
    golden({str(options): message(profiled, model, **options) for options in wrong})
    assert profiled(model).meta.device is None  # nothing is left open


def test_flops_records_no_device() -> None:
    assert flops(model_on("cpu"), torch.rand(1, 2)).meta.device is None
