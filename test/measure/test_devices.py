"""The busy times of devices: against calculations by hand, a count of each ns, and real traces; and the report."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from build.events import walk_of
from build.hand_made import row, run_of
from build.places import TRACES
from build.raw_events import MARKED, MODEL, events_of, small_step
from build.raw_events import kernel as raw_kernel
from build.warnings import run_warnings
from hypothesis import given
from hypothesis import strategies as st

from torchprof import Run, TorchprofError
from torchprof.attribute.events import Event, Kind, Site
from torchprof.attribute.rule import Attribution
from torchprof.measure.busy import DeviceTimes
from torchprof.measure.fold import fold
from torchprof.run.layers import Layer
from torchprof.run.merge import add_cycle
from torchprof.run.meta import Meta
from torchprof.run.timeline import DeviceTime, StreamTime
from torchprof.run.torch_names import KernelWork, kind_of_work

GEMM, REDUCE, COPY = (
    "gemm",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "Memset (Device)",
)
MEASURES = ("cpu_ns", "device_ns")
CUDA: dict[str, Any] = {"device": "cuda", "requested": MEASURES, "measured": MEASURES}


class Ran(NamedTuple):
    """A kernel, a copy or a set."""

    name: str
    start: int
    end: int
    stream: int = 7
    device: str = "cuda:0"


def event_of(ran: Ran) -> Event:
    return Event(Kind.KERNEL, ran.name, ran.start, ran.end, ran.stream, device=ran.device)


def watched(ran: Iterable[Ran], rank: int = 0) -> tuple[tuple[DeviceTime, ...], dict[str, int]]:
    """The times of devices, and their busy times by ``fold``."""
    layers = (Layer(("Net",), "Net"),)
    attribution = Attribution({}, [layer.path for layer in layers])
    device_times = DeviceTimes(rank)
    found = device_times.observe(walk_of(attribution, map(event_of, ran)))
    _, _, busy = fold(found, attribution.places.all, layers, rank)
    return device_times.result()["device_times"], {device: ns for device, ns in busy.items() if device != "cpu"}


STEP = (
    Ran(GEMM, 1_000, 5_000),
    Ran(REDUCE, 3_000, 9_000, 20),
    Ran(GEMM, 5_000, 6_000),
    Ran(COPY, 5_500, 6_500),
    Ran(GEMM, 8_500, 9_500),
    Ran(COPY, 10_500, 11_000, 13),
)
OF_STEP = DeviceTime(
    device="cuda:0",
    rank=0,
    span_ns=10_000,
    busy_ns=8_500 + 500,
    compute_ns=4_000 + 1_000 + 1_000,
    communication_ns=6_000,
    copy_ns=1_000 + 500,
    overlap_ns=2_000 + 1_000 + 500,
    streams=(
        StreamTime(7, 4, 5_500 + 1_000, 6_000, 0, 1_000),
        StreamTime(13, 1, 500, 0, 0, 500),
        StreamTime(20, 1, 6_000, 0, 6_000, 0),
    ),
)


def test_a_step_by_hand() -> None:
    """An all-reduce from 3 to 9 us, other work until 6 and from 8.5 us, a set meanwhile, a copy at the end."""
    (found,), busy = watched(STEP)
    assert found == OF_STEP
    assert busy == {"cuda:0": 9_000}
    assert (found.idle_ns, found.exposed_ns, found.copy_alone_ns) == (1_000, 2_500, 500)


def test_everything_is_passed_on() -> None:
    attribution = Attribution({}, [("Net",)])
    events = [Event(Kind.OP, "aten::mm", 0, 10, 1), Event(Kind.MEMORY, "[memory]", 5, 5, 1), *map(event_of, STEP)]
    found = [each.event for each in DeviceTimes().observe(walk_of(attribution, events))]
    assert found == events


def test_without_work_on_a_device_there_are_none() -> None:
    attribution = Attribution({}, [("Net",)])
    device_times = DeviceTimes()
    list(device_times.observe(walk_of(attribution, [Event(Kind.OP, "aten::mm", 0, 10, 1)])))
    assert device_times.result() == {"device_times": (), "overlapping": (0, 0)}


NAMES = {GEMM: "compute", REDUCE: "communication", COPY: "copy"}
RAN = st.builds(
    lambda start, lasts, name, stream, device: Ran(name, start, start + lasts, stream, device),
    st.integers(-9, 30),
    st.integers(0, 9),
    st.sampled_from([*NAMES]),
    st.integers(0, 2),
    st.sampled_from(["cuda:0", "cuda:1"]),
)


def covered(ran: Iterable[Ran]) -> set[int]:
    """Each ns in which any of them ran."""
    return {ns for one in ran for ns in range(one.start, one.end)}


@given(st.lists(RAN, max_size=14))
def test_every_time_equals_a_count_of_each_ns(ran: list[Ran]) -> None:
    ran.sort(key=lambda one: one.start)
    found, busy = watched(ran)
    assert [one.device for one in found] == sorted({one.device for one in ran})
    for time in found:
        mine = [one for one in ran if one.device == time.device]
        kinds = {kind: covered(one for one in mine if NAMES[one.name] == kind) for kind in NAMES.values()}
        assert time.span_ns == max(one.end for one in mine) - min(one.start for one in mine)
        assert time.busy_ns == len(covered(mine)) == busy[time.device]
        assert (time.compute_ns, time.communication_ns, time.copy_ns) == tuple(map(len, kinds.values()))
        assert time.overlap_ns == len(kinds["compute"] & kinds["communication"])
        assert time.exposed_ns == len(kinds["communication"] - kinds["compute"])
        assert time.copy_alone_ns == len(kinds["copy"] - kinds["compute"] - kinds["communication"])
        assert time.idle_ns == time.span_ns - len(covered(mine)) >= 0
        parts = (time.compute_ns - time.overlap_ns, time.overlap_ns, time.exposed_ns, time.copy_alone_ns, time.idle_ns)
        assert sum(parts) == time.span_ns
        assert [one.stream for one in time.streams] == sorted({one.stream for one in mine})
        for stream in time.streams:
            its = [one for one in mine if one.stream == stream.stream]
            of_kinds = [covered(one for one in its if NAMES[one.name] == kind) for kind in NAMES.values()]
            assert stream[1:] == (len(its), len(covered(its)), *map(len, of_kinds))


@given(st.lists(st.lists(RAN, max_size=8), min_size=1, max_size=3))
def test_cycles_add_up(cycles: list[list[Ran]]) -> None:
    """Each time of each device and stream is the sum over the cycles, also if it is in only some of them."""
    run: Run | None = None
    expected: defaultdict[tuple[Any, ...], int] = defaultdict(int)
    for ran in cycles:
        ran.sort(key=lambda one: one.start)
        times, _ = watched(ran)
        for key, value in figures(times):
            expected[key] += value
        run = add_cycle(run, replace(run_of([row(0)]), device_times=times))
    assert run is not None
    assert dict(figures(run.device_times)) == dict(expected)


def figures(times: Iterable[DeviceTime]) -> Iterable[tuple[tuple[Any, ...], int]]:
    for time in times:
        for name, value in vars(time).items():
            if name.endswith("_ns"):
                yield (time.device, name), value
        for stream in time.streams:
            for name, value in zip(stream._fields[1:], stream[1:]):
                yield (time.device, stream.stream, name), value


@pytest.mark.parametrize(
    ("work", "names"),
    [
        (
            KernelWork.COMMUNICATION,
            (
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
                "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
                "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",
                "NcclOpReduce",
                "rccl_main_kernel",
                "void deep_ep::intranode::dispatch<8, 768>(int4*, float*)",
                "void dpsk::internode::combine<8, true>(int4*)",
                "dpsk::low_latency_dispatch",
                "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
                "void two_shot_all_reduce_kernel<float, 16, 8>(float**)",
                "multimem_one_shot_all_reduce_kernel",
                "void vllm::cross_device_reduce_2stage<__half, 4>(RankData*)",
            ),
        ),
        (
            KernelWork.COPYING,
            (
                "Memcpy HtoD (Pageable -> Device)",
                "Memcpy PtoP (Device -> Device)",
                "Memset (Device)",
                "CopyHostToDevice",
                "CopyDeviceToDevice",
                "FillBuffer",
                "MEMORY_COPY_DEVICE_TO_HOST",
                "__amd_rocclr_copyBuffer.kd",
                "__amd_rocclr_fillBufferAligned.kd",
                "zeCommandListAppendMemoryCopy(M2D)",
                "zeCommandListAppendMemoryFill(32)",
                "dma_copy_h2d",
            ),
        ),
        (
            KernelWork.COMPUTING,
            (
                "ampere_sgemm_128x64_nn",
                "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(at::native::ReduceOp<float>)",
                "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<float>(float*)",
                "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)",
                "triton_red_fused__to_copy_0",
                "void dpsk::fp8_gemm_kernel<128>(float*)",
                "void flashinfer::allreduce_fusion_kernel(ncclComm*)",
                "MemcpyLike",
                "",
            ),
        ),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, KernelWork) else "",
)
def test_kinds_of_work_by_name(work: KernelWork, names: tuple[str, ...]) -> None:
    """The names in traces of CUDA, ROCm, XPU and MTIA, and of several versions of NCCL; everything else is
    computing."""
    assert {name: kind_of_work(name) for name in names} == dict.fromkeys(names, work)


def recorded(stream_of_reduce: int = 20) -> Run:
    """A step as torch records it, with an all-reduce next to the kernel of backward, read through a session."""
    raws = [*small_step(), raw_kernel(REDUCE, 3000, 6100, 11, stream_of_reduce)]
    layers = (Layer(("Model",), "Model"),)
    attribution = Attribution({MODEL: Site((0,))}, [layer.path for layer in layers])
    device_times = DeviceTimes()
    events = events_of(sorted(raws, key=lambda raw: raw.start_ns()))
    rows, samples, busy = fold(device_times.observe(walk_of(attribution, events)), attribution.places.all, layers)
    meta = Meta(("Model",), wall_ns=6500, busy_ns=tuple(busy.items()), **CUDA)
    return Run((meta,), layers, rows, samples, device_times=device_times.result()["device_times"])


@MARKED
def test_a_recorded_step() -> None:
    """All kernels, copies and sets on their streams. Mirrors of ranges, which torch also puts on a stream, are no work.
    It computes at [400, 5430], [5500, 5600] and [6000, 6007], and communicates at [3000, 6100]."""
    run = recorded()
    (time,) = run.device_times
    assert time == DeviceTime(
        "cuda:0",
        0,
        span_ns=6100 - 95,
        busy_ns=100 + 5700,
        compute_ns=5030 + 100 + 7,
        communication_ns=3100,
        copy_ns=100 + 4,
        overlap_ns=2430 + 100 + 7,
        streams=(StreamTime(7, 7, 5241, 5137, 0, 104), StreamTime(20, 1, 3100, 0, 3100, 0)),
    )
    assert dict(run.meta.busy_ns)["cuda:0"] == time.busy_ns
    (time,) = recorded(stream_of_reduce=7).device_times
    assert time.streams == (StreamTime(7, 8, 5800, 5137, 3100, 104),)


# Real traces


def swept(intervals: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]] | None = None) -> int:
    """The time in which any interval is open, and any of the others: by a sweep over all starts and ends."""
    marks = [(at, 0, step) for start, end in intervals for at, step in ((start, 1), (end, -1))]
    marks += [(at, 1, step) for start, end in others or () for at, step in ((start, 1), (end, -1))]
    total = last = 0
    opened = [0, 0]
    for at, which, step in sorted(marks):
        if opened[0] and (others is None or opened[1]):
            total += at - last
        last = at
        opened[which] += step
    return total


@pytest.mark.skipif(not TRACES.is_dir(), reason="no real traces here")
@pytest.mark.parametrize("name", ["a100_ddp_train_rank0_of_2.json.gz", "mi250_toy_train_rocm62.json.gz"])
def test_a_real_trace(name: str) -> None:
    """The work on the streams of a trace, against a sweep over the file, where the category identifies copies."""
    with gzip.open(TRACES / name) as file:
        document = json.load(file)
    categories = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
    raws = [raw for raw in document["traceEvents"] if raw.get("cat") in categories and raw["ph"] == "X"]
    ran = []
    kinds: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for raw in raws:
        start, lasts = (round(raw[key] * 1000) for key in ("ts", "dur"))
        ran.append(Ran(raw["name"], start, start + lasts, raw["args"]["stream"], f"cuda:{raw['args']['device']}"))
        kind = "communication" if "ncclKernel" in raw["name"] else categories[raw["cat"]]
        kinds[kind].append((start, start + lasts))
    (time,), _ = watched(sorted(ran, key=lambda one: one.start))
    assert time.busy_ns == swept(one[1:3] for one in ran)
    assert time.compute_ns == swept(kinds["kernel"])
    assert time.communication_ns == swept(kinds["communication"])
    assert time.copy_ns == swept(kinds["copy"])
    assert time.overlap_ns == swept(kinds["kernel"], kinds["communication"])
    assert sum(stream.kernels for stream in time.streams) == len(raws)
    for stream in time.streams:
        assert stream.busy_ns == swept(one[1:3] for one in ran if one.stream == stream.stream)


# The report


def reported(*times: DeviceTime, **meta: Any) -> Run:
    return replace(run_of([row(0)], **{"wall_ns": 12_500, **CUDA, **meta}), device_times=times)


def test_the_report_on_devices(golden: Callable[..., None]) -> None:
    """One that does not communicate, one of each rank (of an unprintable name), one whose work has no length, an idle
    one, and a trace that does not say how long was recorded."""
    (silent,), _ = watched([Ran(GEMM, 0, 5), Ran(GEMM, 6, 10)])
    (short,), _ = watched([Ran(GEMM, 5, 5)])
    one = reported(OF_STEP, warnings=run_warnings("Beware."))
    metas = (one.meta, replace(one.meta, rank=1, wall_ns=70_000))
    of_both = (OF_STEP, replace(OF_STEP, rank=1, device="cuda:1\n\x1b[31m"))
    golden(
        one.report("device"),
        {
            "without communication": reported(silent, cycles=3).report("device"),
            "a device of each rank": replace(one, metas=metas, device_times=of_both).report("device"),
            "no length": reported(short).report("device"),
            "nothing ran": reported().report("device"),
            "nothing ran, for how long": reported(wall_ns=0).report("device"),
            "for how long": reported(OF_STEP, wall_ns=0).report("device").splitlines()[-1],
            "another format": reported(OF_STEP).report("device", tablefmt="github").split("\n\n")[1],
        },
    )


@pytest.mark.parametrize(
    ("run", "options", "says"),
    [
        (lambda: run_of([row(0)]), {}, "recorded no device"),
        (lambda: reported(measured=("cpu_ns",)), {}, "its times are unknown"),
        (lambda: run_of([row(0, device="cuda:0", device_ns=5)], **CUDA), {}, "has no times by stream"),
        (lambda: reported(OF_STEP), {"tablefmt": "bold"}, "no format"),
    ],
    ids=["cpu", "missing", "no streams", "no format"],
)
def test_runs_with_unknown_times(run: Callable[[], Run], options: dict[str, Any], says: str) -> None:
    with pytest.raises(TorchprofError, match=says):
        run().report("device", **options)
