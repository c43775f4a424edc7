"""Fixtures of the tests that need a device. Without one, they run on the CPU, as far as they make sense there."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from build.machine import Machine, note


@pytest.fixture
def machine() -> Iterator[Machine]:
    torch.manual_seed(0)
    yield Machine()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``figure(name, value, reference, unit)`` keeps what a test measured, also where nothing depends on it."""
    part = request.path.stem.removeprefix("test_gpu_")

    def keep(name: str, value: Any, reference: Any = None, unit: str = "") -> None:
        note(part, name, value, reference, unit)

    return keep


@pytest.fixture(scope="module", autouse=True)
def _clocks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep what the driver says of the device before and after a file of tests: a throttled device explains a lot."""
    part = request.path.stem.removeprefix("test_gpu_")
    before = readings()
    yield
    after = readings()
    for name, value in after.items():
        note(part, name, value, before.get(name))


def readings() -> dict[str, float]:
    """Clocks, power, temperature and energy of the first device, through NVML; empty where it is not there."""
    found: dict[str, float] = {}
    if Machine().device.type != "cuda":
        return found
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # the package, the library or the right to ask is missing
        return found
    for name, read in {
        "SM clock, MHz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory clock, MHz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power, mW": lambda: nvml.nvmlDeviceGetPowerUsage(handle),
        "temperature, C": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "energy, mJ": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle),
    }.items():
        with suppress(Exception):  # this device has no such reading
            found[name] = read()
    return found
