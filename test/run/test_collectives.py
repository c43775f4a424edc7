"""What a collective was called on, and the report of it: args as torch writes them, rows by hand, sums by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from build.collectives import ALL_REDUCE, NCCL, kernel
from build.hand_made import cells, headings, label, op, row, run_of
from build.places import TRACES
from build.warnings import run_warnings

from torchprof import TorchprofError
from torchprof.run.collectives import (
    Collective,
    collective_of,
    name_of_collective,
    shows_collective,
    signature_in_group,
    signature_of,
)
from torchprof.run.lockstep import GroupOfRanks
from torchprof.run.words import BACKWARD, NOT_SELECTED, OUTSIDE, Frame, FrameKind, Signature

A100 = TRACES / "a100_ddp_train_rank0_of_2.json.gz"
CUDA: dict[str, Any] = {"device": "cuda", "requested": ("cpu_ns", "device_ns"), "measured": ("cpu_ns", "device_ns")}
ALL_GATHER = {
    **ALL_REDUCE,
    "Collective name": "_allgather_base",
    "dtype": "BFloat16",
    "In msg nelems": 1000,
    "Out msg nelems": 8000,
    "Process Group Name": "7",
    "Process Group Description": "undefined",
    "Group size": 8,
    "Process Group Ranks": "[0, 1, ..., 7]",
    "Seq": 12,
    "Is asynchronized op": 1,
}


def recorded(args: Mapping[str, Any]) -> Frame:
    return Frame(FrameKind.OP, "record_param_comms", signature_of(args))


def ranged(name: str, *shapes: Any, dtypes: tuple[str, ...] = ("float",)) -> Frame:
    return Frame(FrameKind.COLLECTIVE, name, Signature(shapes, dtypes) if shapes else None)


def collective(args: Mapping[str, Any]) -> Collective:
    found = collective_of((kernel(args),))
    assert found is not None
    return found


def test_a_collective_is_read_from_the_args_of_a_kernel() -> None:
    """2048 floats are 8 KiB; 8000 elements of BFloat16 are 16000 bytes."""
    reduce, gather = collective(ALL_REDUCE), collective(ALL_GATHER)
    assert reduce == Collective("all_reduce", "Float", 2048, 2048, "0", "default_pg", 2, "[0, 1]")
    assert (reduce.bytes_in, reduce.bytes_out) == (8192, 8192)
    assert gather == Collective("all_gather", "BFloat16", 1000, 8000, "7", "undefined", 8, "[0, 1, ..., 7]")
    assert (gather.bytes_in, gather.bytes_out) == (2000, 16000)
    assert signature_of(ALL_GATHER) == signature_of({**ALL_GATHER, "Seq": 13})  # it would be a row for each call


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"stream": 7, "grid": [8, 1, 1]},
        {**ALL_REDUCE, "Collective name": "wait", "dtype": "Byte", "In msg nelems": 0, "Group size": 1},
        {**ALL_REDUCE, "Collective name": "init"},
        {**ALL_REDUCE, "Collective name": ""},
        {**ALL_REDUCE, "Collective name": 3},
    ],
)
def test_args_without_a_collective_have_no_signature(args: dict[str, Any]) -> None:
    assert signature_of(args) is None


DTYPES = (
    "Byte uint8, Char int8, Bool bool, Float8_e4m3fn float8_e4m3fn, Float8_e5m2 float8_e5m2, Short int16, "
    "UInt16 uint16, Half float16, BFloat16 bfloat16, Int int32, Float float32, ComplexHalf complex32, Long int64, "
    "Double float64, ComplexFloat complex64, ComplexDouble complex128"
)


@pytest.mark.parametrize(("name", "dtype"), [pair.split() for pair in DTYPES.split(", ")])
def test_element_sizes_are_those_of_torch(name: str, dtype: str) -> None:
    assert collective({**ALL_REDUCE, "dtype": name, "In msg nelems": 1}).bytes_in == getattr(torch, dtype).itemsize


def test_missing_args_are_unknown_and_not_0() -> None:
    unknown = collective({"Collective name": "allreduce"})
    assert unknown == Collective("all_reduce")
    assert (unknown.bytes_in, unknown.bytes_out) == (None, None)
    odd = collective({**ALL_REDUCE, "dtype": "Float3", "Out msg nelems": -1, "Group size": "2"})
    assert (odd.elements_in, odd.bytes_in, odd.elements_out, odd.size) == (2048, None, None, None)
    barrier = collective({**ALL_REDUCE, "Collective name": "barrier", "In msg nelems": 0, "Out msg nelems": 0})
    assert (barrier.bytes_in, barrier.bytes_out) == (0, 0)


def test_a_kernel_has_priority_over_the_op_and_the_op_over_the_range() -> None:
    launch = (op("c10d::allreduce_", (9,)), recorded(ALL_GATHER), ranged("nccl:all_reduce", (3, 5)))
    assert collective_of((*launch, kernel(ALL_REDUCE))) == collective(ALL_REDUCE)
    assert collective_of((*launch, kernel())) == collective(ALL_GATHER)
    assert collective_of((launch[0], launch[2], kernel())) == Collective("all_reduce", "Float", 15, 15)
    assert collective_of(()) is None


def test_without_args_the_name_of_the_op_or_kernel_is_used() -> None:
    """The kernel name does not show which collective NCCL runs by sends and receives."""
    gather = op("c10d::_allgather_base_", (9,))
    assert collective_of(
        (gather, kernel(name="ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"))
    ) == Collective("all_gather")
    assert collective_of((op("c10d::alltoall_base_"), kernel(name="ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t"))) == (
        Collective("all_to_all")
    )
    for name, told in (
        (NCCL, "all_reduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWork*)", "all_gather"),
        ("ncclReduceScatterRingLLKernel_sum_f32(ncclColl)", "reduce_scatter"),  # before NCCL 2.9
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevComm*)", "reduce"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "broadcast"),
    ):
        assert collective_of((kernel(name=name),)) == Collective(told)
    for name in ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "ncclDevKernel_Generic", "ncclAllReducer", "gemm"):
        assert collective_of((kernel(name=name),)) is None
    assert collective_of((gather,)) is None  # the op alone is no exchange


@pytest.mark.parametrize(
    ("names", "known_as"),
    [
        ("allreduce allreduce_coalesced nccl:all_reduce gloo:sparse_all_reduce c10d::allreduce_", "all_reduce"),
        ("all_gather _allgather_base allgather_into_tensor_coalesced nccl:_all_gather_base", "all_gather"),
        ("_reduce_scatter_base reduce_scatter_tensor_coalesced c10d::reduce_scatter_", "reduce_scatter"),
        ("all_to_all all_to_allv c10d::alltoall_base_", "all_to_all"),
        ("broadcast _broadcast_oop c10d::broadcast_", "broadcast"),
        ("reduce _reduce_oop gloo:reduce", "reduce"),
        ("barrier nccl:all_reduce_barrier c10d::monitored_barrier_", "barrier"),
        ("gather nccl:gather", "gather"),
        ("scatter gloo:scatter", "scatter"),
    ],
)
def test_a_collective_has_one_name(names: str, known_as: str) -> None:
    assert {name_of_collective(name) for name in names.split()} == {known_as}
    assert name_of_collective("nccl:send 0->1") == "send"
    assert name_of_collective("c10d::recv_any_source_") == "recv"
    assert name_of_collective("nccl:coalesced") == "coalesced"  # which ones, nobody knows


def test_a_collective_is_read_from_the_range_of_a_backend() -> None:
    """The output of a gather is not in the recorded inputs. Only tensors have elements. Mixed types are unknown."""
    say = collective_of
    two = ranged("gloo:broadcast", (2, 3), (), dtypes=("c10::BFloat16", "c10::BFloat16"))
    assert say((two,)) == Collective("broadcast", "BFloat16", 7, 7)
    gather = say((ranged("nccl:all_gather", (4,), (), (), dtypes=("long int", "Scalar", "")),))
    assert gather == Collective("all_gather", "Long", 4)
    assert (gather.bytes_in, gather.bytes_out) == (32, None)
    assert say((ranged("gloo:send", (4,)),)) == Collective("send", "Float", 4, 4)
    assert say((ranged("gloo:all_reduce", (4,), (4,), dtypes=("float", "double")),)) == Collective("all_reduce")
    assert say((ranged("gloo:all_reduce", None),)) == Collective("all_reduce")
    assert say((ranged("gloo:all_reduce", (-1, 2)),)) == Collective("all_reduce")
    assert say((ranged("gloo:barrier"),)) == Collective("barrier")
    assert say((label("my nccl: range"),)) is None


def test_the_size_of_the_group_makes_the_output_of_a_range_known() -> None:
    """Of four ranks, each receives what four sent, or a quarter of what is reduced."""
    group = GroupOfRanks("7", "mesh_dp", 4, "[0, 2, 4, 6]")
    of_group = ("7", "mesh_dp", 4, "[0, 2, 4, 6]")

    def in_group(name: str, *shapes: Any) -> Collective | None:
        inputs = ranged(name, *shapes).signature or Signature((), ())
        return collective_of((Frame(FrameKind.COLLECTIVE, name, signature_in_group(name, inputs, group)),))

    gather = in_group("gloo:all_gather", (4, 3))
    assert gather == Collective("all_gather", "Float", 12, 48, *of_group)
    assert (gather.bytes_in, gather.bytes_out) == (48, 192)
    assert in_group("ucc:reduce_scatter", (8,)) == Collective("reduce_scatter", "Float", 8, 2, *of_group)
    assert in_group("gloo:all_reduce", (8,)) == Collective("all_reduce", "Float", 8, 8, *of_group)
    assert in_group("gloo:all_to_all", (8,)) == Collective("all_to_all", "Float", 8, None, *of_group)
    assert in_group("gloo:all_gather") == Collective("all_gather", "", None, None, *of_group)
    unknown = signature_in_group("gloo:all_gather", Signature(((4,),), ("float",)), group._replace(size=None))
    assert collective_of((Frame(FrameKind.COLLECTIVE, "gloo:all_gather", unknown),)) == Collective(
        "all_gather", "Float", 4, None, "7", "mesh_dp", None, "[0, 2, 4, 6]"
    )


def test_the_signature_of_an_op_is_not_mistaken_for_a_collective() -> None:
    six = Frame(
        FrameKind.OP, "aten::six", Signature(((1,),) * 6, ("float",) * 6, ("collective", "a", "b", "c", 2, "d"))
    )
    two = Frame(FrameKind.OP, "aten::two", Signature(((1,), ()), ("float", ""), (None, "collective")))
    assert collective_of((six, two)) is None
    assert not shows_collective(six)
    assert shows_collective(recorded(ALL_REDUCE))
    assert shows_collective(ranged("gloo:barrier"))


ROWS = [
    row(1, op("AllReduce"), recorded(ALL_REDUCE), ranged("nccl:all_reduce"), phase=BACKWARD, calls=3, cpu_ns=900),
    row(1, op("AllReduce"), recorded(ALL_REDUCE), phase=BACKWARD, calls=3, cpu_ns=100),
    row(1, op("AllReduce"), recorded(ALL_REDUCE), kernel(ALL_REDUCE), phase=BACKWARD, calls=3, device_ns=24_576),
    row(2, op("AllReduce"), recorded(ALL_REDUCE), kernel(ALL_REDUCE), phase=BACKWARD, calls=1, device_ns=8_192),
    row(2, op("AllGather"), kernel(ALL_GATHER, "some other name"), calls=2, device_ns=4_000),
    row(3, op("aten::mm"), kernel(name="gemm"), calls=1, device_ns=50_000),
    row(OUTSIDE, kernel(name="ncclKernel_Any(ncclWork*)"), calls=1, device_ns=3_232),
]


def test_the_report_has_bytes_and_bandwidth_of_collectives(golden: Callable[..., None]) -> None:
    """8192 bytes four times in 32.768 us are 1 GB/s, 16000 twice in 4 us are 8 GB/s; 40 us are all communication."""
    golden(run_of(ROWS, warnings=run_warnings("Beware."), **CUDA).report("collectives"))


def test_the_time_of_a_gloo_collective_is_that_of_its_range(golden: Callable[..., None]) -> None:
    """A range inside another is part of it. Of a gather only what went in is known, of a barrier that a file of before
    2.7 holds no time. 4000 bytes, twice in 8 us, are 1 GB/s; of 10 us 80 % are the all-reduce."""
    rows = [
        row(OUTSIDE, ranged("gloo:all_reduce", (1000,)), calls=2, collective_ns=8_000),
        row(OUTSIDE, ranged("gloo:all_gather", (512,)), calls=1, cpu_ns=70, collective_ns=2_000),
        row(OUTSIDE, ranged("gloo:all_gather", (512,)), ranged("gloo:send", (512,)), calls=1, collective_ns=900),
        row(1, ranged("gloo:barrier"), calls=1),
        row(NOT_SELECTED, ranged("gloo:barrier"), calls=2),
        row(NOT_SELECTED, ranged("gloo:barrier"), calls=0, cpu_allocated=64),
    ]
    golden(run_of(rows).report("collectives"))


def test_launches_count_only_on_ranks_without_kernels(golden: Callable[..., None]) -> None:
    """Rank 0 has the kernel of the all-reduce, rank 1 recorded only the CPU. The range of gloo counts on both; it is of
    its own kind, for both may have been at the same time."""
    launch = (recorded(ALL_REDUCE), ranged("nccl:all_reduce"))
    rows = [
        row(1, *launch, kernel(ALL_REDUCE), device_ns=8_192),
        row(1, *launch, cpu_ns=7),
        row(1, launch[0], cpu_ns=7),
        row(1, ranged("gloo:barrier"), collective_ns=1_808),
    ]
    of_rank_1 = [(*each[:8], 1) for each in rows[1:]]
    one, both = run_of(rows, **CUDA), run_of([*rows, *of_rank_1], **CUDA)
    golden(one.report("collectives"), both.report("collectives"))


def test_all_to_alls_of_all_sizes_share_a_row(golden: Callable[..., None]) -> None:
    """Experts get other numbers of tokens in each call: 1000 to 3000 bytes, 8000 in all in 4 us."""
    sizes = [(1000, 2000), (3000, 1000), (2000, 3000)]
    args = [
        {**ALL_REDUCE, "Collective name": "all_to_allv", "dtype": "Byte", "In msg nelems": sent, "Out msg nelems": got}
        for sent, got in sizes
    ]
    unknown = {**args[0], "Out msg nelems": None}
    others = {**ALL_REDUCE, "dtype": "Byte", "Out msg nelems": 1000}
    rows = [row(1, kernel(each), device_ns=1_000 * (2 if each is args[2] else 1)) for each in (*args, unknown)]
    rows += [row(1, kernel({**others, "In msg nelems": size}), device_ns=10) for size in (1000, 3000)]
    golden(run_of(rows, **CUDA).report("collectives"))


def test_groups_with_the_same_description_share_a_line() -> None:
    """The ranks of a mesh may give the group different names: "3" and "11", eight ranks each."""
    names = [{**ALL_REDUCE, "Process Group Name": name, "Process Group Description": "mesh_tp"} for name in ("3", "11")]
    rows = [row(1, kernel(args), device_ns=10) for args in names]
    assert [line[1:7:5] for line in cells(run_of(rows, **CUDA).report("collectives"))] == [["mesh_tp", "2"]]
    apart = [{**args, "Process Group Description": "undefined"} for args in names]
    rows = [row(1, kernel(args), device_ns=10) for args in apart]
    assert [line[1:7:5] for line in cells(run_of(rows, **CUDA).report("collectives"))] == [["3", "1"], ["11", "1"]]


def test_a_run_without_communication_says_so() -> None:
    run = run_of([row(1, op("aten::mm"), kernel(name="gemm"), device_ns=9)], warnings=run_warnings("Beware."), **CUDA)
    assert run.report("collectives") == "This run recorded no communication between ranks.\nBeware."


def test_the_report_in_another_table_format() -> None:
    run = run_of(ROWS, **CUDA)
    assert headings(run.report("collectives", tablefmt="github"))[1] == "Collective"
    with pytest.raises(TorchprofError, match="githob"):
        run.report("collectives", tablefmt="githob")


@pytest.mark.skipif(not A100.exists(), reason="the trace is not part of the project")
def test_the_collectives_of_a_trace_of_two_a100() -> None:
    """Three steps of ResNet-50 under DDP: each reduces its 25 557 032 parameters once, in five buckets."""
    events = json.loads(gzip.decompress(A100.read_bytes()))["traceEvents"]
    kernels = [
        (event, frame)
        for event in events
        if event.get("cat") == "kernel" and shows_collective(frame := kernel(event["args"], event["name"]))
    ]
    assert {event["name"][:4] for event, _ in kernels} == {"nccl"}
    assert len(kernels) == sum(event.get("cat") == "kernel" and "nccl" in event["name"] for event in events) == 21
    made = [collective_of((frame,)) for _, frame in kernels]
    reduced = [one for one in made if one and one.name == "all_reduce"]
    assert sum(one.bytes_in or 0 for one in reduced) == 3 * 4 * 25_557_032
    ops = [signature_of(event["args"]) for event in events if event["name"] == "record_param_comms"]
    assert sorted(filter(None, ops)) == sorted(filter(None, (frame.signature for _, frame in kernels)))
    assert ops.count(None) == 6  # waiting for the broadcasts
    rows = [row(OUTSIDE, frame, phase=BACKWARD, device_ns=round(event["dur"] * 1000)) for event, frame in kernels]
    first, second, _ = run_of(rows, **CUDA).report("collectives").split("\n\n")
    lines = cells(first)
    assert len(lines) == 5 + 2
    assert {tuple(line[1:3]) for line in lines} == {("default_pg", "2")}
    assert sum(int(line[6]) for line in lines) == 21
    ((_, _, nbytes, calls, *_),) = cells(second)
    broadcast = 3 * (4 * 53_120 + 8 * 53)  # means and variances, and how many batches: the buffers of 53 norms
    assert (nbytes, calls) == (f"{(3 * 4 * 25_557_032 + broadcast) / 1024**2:.2f} MB", "21")
