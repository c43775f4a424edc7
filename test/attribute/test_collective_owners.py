"""The owners of collectives, on hand-made events; and modules with hooks that exchange data."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from build.events import ENGINE, MAIN, function, kernel, label, node, op, user_label, walk_of
from build.exchanges import exchange
from torch import nn

import torchprof
from torchprof import Profile
from torchprof.attribute.events import Attributed, Event, Kind, Site
from torchprof.attribute.launches import CollectiveOwners, layers_by_fqn, mesh_of_groups, sole_group
from torchprof.attribute.rule import Attribution
from torchprof.measure.warnings import about_buckets
from torchprof.record import modules as record_modules
from torchprof.record.plan import Plan
from torchprof.run.lockstep import NOT_RECORDED, GroupOfRanks
from torchprof.run.meta import MeshDim
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED, OUTSIDE, RECOMPUTE, Signature

PATHS = [("Net",), ("Net", "a"), ("Net", "b"), ("Net", "b", "0"), ("Net", "b", "1")]
LABELS = ["torchprof:" + ".".join(path) for path in PATHS]
SITES = {name: Site((number,)) for number, name in enumerate(LABELS)}
SIZED = {size: Signature(((size,),), ("float",)) for size in (3, 5, 8)}
LISTED = Signature((((3,), (5,)), None), ("TensorList", ""))
SIGNATURES = [Signature((), ()), *SIZED.values(), LISTED, Signature(((10,), (5,)), ("float", "float"))]
THREE, FIVE, EIGHT, LIST_OF_EIGHT, TEN_FROM_FIVE = range(1, 6)
ACCUMULATE = "torch::autograd::AccumulateGrad"


class Walked:
    """The events of one walk, by name."""

    def __init__(self, *events: Event, selected: set[int] | None = None, **options: Any) -> None:
        self.owners = CollectiveOwners(layers_by_fqn(PATHS), PATHS, SIGNATURES, **options)
        attribution = Attribution(SITES, PATHS, selected, None, self.owners)
        self.all: list[Attributed] = list(walk_of(attribution, events))

    def of(self, name: str) -> list[tuple[int, str, list[str]]]:
        """Layer, phase and frames of the events with one name."""
        found = [one.place for one in self.all if one.event.name == name]
        return [(place.layer, place.phase, [frame.name for frame in place.frames]) for place in found]

    def shared(self, name: str) -> list[tuple[int, ...]]:
        return [one.place.shared for one in self.all if one.event.name == name]


# Requests


def test_a_collective_on_another_thread_belongs_to_the_op_that_requested_it() -> None:
    walked = Walked(
        label(LABELS[1], 0, 20), op("c10d::allreduce_", 5, 8), exchange("gloo:all_reduce", 30), label(LABELS[2], 40, 60)
    )
    assert walked.of("gloo:all_reduce") == [(1, FORWARD, ["c10d::allreduce_", "gloo:all_reduce"])]
    (found,) = [one for one in walked.all if one.event.kind is Kind.COLLECTIVE]
    assert (found.around, found.calls, found.ns) == (None, 1, 0)  # not part of the time of any thread
    assert found.place.frames[-1].kind == "collective"
    assert walked.owners.unmatched == 0


def test_collectives_begin_in_the_order_of_their_requests() -> None:
    asked = [(1, "c10d::allreduce_"), (2, "c10d::_allgather_base_"), (3, "c10d::allreduce_"), (4, "c10d::broadcast_")]
    events = []
    for at, (layer, name) in enumerate(asked):
        events += [label(LABELS[layer], 10 * at, 10 * at + 8), op(name, 10 * at + 1, 10 * at + 4)]
    names = ["gloo:all_reduce", "gloo:broadcast", "gloo:all_reduce", "gloo:all_gather"]
    walked = Walked(*events, *(exchange(name, 100 + at) for at, name in enumerate(names)))
    assert [layer for layer, *_ in walked.of("gloo:all_reduce")] == [1, 3]
    assert [layer for layer, *_ in walked.of("gloo:broadcast")] == [4]
    assert [layer for layer, *_ in walked.of("gloo:all_gather")] == [2]


def test_recorded_sizes_must_match() -> None:
    """Two groups, each with its own order: the sizes decide, for one tensor, for several, and for the input of a
    gather."""
    walked = Walked(
        label(LABELS[1], 0, 9),
        op("c10d::allreduce_", 1, 2, signature=THREE),
        label(LABELS[2], 10, 19),
        op("c10d::allreduce_", 11, 12, signature=LIST_OF_EIGHT),
        label(LABELS[3], 20, 29),
        op("c10d::_allgather_base_", 21, 22, signature=TEN_FROM_FIVE),
        exchange("gloo:all_reduce", 50, signature=EIGHT),
        exchange("gloo:all_reduce", 51, signature=THREE),
        exchange("gloo:all_gather", 52, signature=FIVE),
        exchange("gloo:all_reduce", 53, signature=FIVE),
    )
    assert [layer for layer, *_ in walked.of("gloo:all_reduce")] == [2, 1, OUTSIDE]
    assert [layer for layer, *_ in walked.of("gloo:all_gather")] == [3]
    assert walked.owners.unmatched == 1


@pytest.mark.parametrize(
    ("asked", "begun", "is_it"),
    [
        ("c10d::allreduce_coalesced_", "gloo:all_reduce", True),
        ("c10d::_reduce_scatter_base_", "gloo:all_reduce", True),  # as gloo runs it
        ("c10d::reduce_scatter_", "gloo:reduce_scatter", True),
        ("c10d::reduce_scatter_", "gloo:reduce", False),
        ("c10d::reduce_", "gloo:reduce", True),
        ("c10d::allgather_into_tensor_coalesced_", "gloo:all_gather", True),
        ("c10d::alltoall_base_", "gloo:all_to_all", True),
        ("c10d::recv_", "gloo:recv", True),
        ("c10d::allreduce_", "gloo:sparse_all_reduce", True),
        ("c10d::allreduce_", "gloo:all_gather", False),
        ("c10d::allgather_", "gloo:gather", False),
        ("c10d::barrier", "gloo:barrier", True),
    ],
)
def test_the_collectives_that_each_op_requests(asked: str, begun: str, is_it: bool) -> None:
    walked = Walked(label(LABELS[1], 0, 9), op(asked, 1, 2), exchange(begun, 20))
    assert [layer for layer, *_ in walked.of(begun)] == [1 if is_it else OUTSIDE]


def test_a_collective_that_begins_on_the_requesting_thread_is_no_longer_waited_for() -> None:
    """With NCCL, this thread only launches the collective; the kernel belongs to it."""
    walked = Walked(
        label(LABELS[1], 0, 30),
        op("c10d::allreduce_", 1, 20),
        op("record_param_comms", 2, 18),
        Event(Kind.COLLECTIVE, "nccl:all_reduce", 3, 500, MAIN, correlation=7),
        op("aten::mm", 21, 25),
        exchange("gloo:all_reduce", 40),
        kernel("ncclDevKernel_AllReduce", 50, 90, 7),
    )
    inside = ["c10d::allreduce_", "record_param_comms", "nccl:all_reduce"]
    assert walked.of("nccl:all_reduce") == [(1, FORWARD, inside)]
    assert walked.of("aten::mm") == [(1, FORWARD, ["aten::mm"])]  # the collective has ended
    assert walked.of("ncclDevKernel_AllReduce") == [(1, FORWARD, [*inside, "ncclDevKernel_AllReduce"])]
    assert walked.of("gloo:all_reduce") == [(OUTSIDE, FORWARD, ["gloo:all_reduce"])]
    assert walked.owners.unmatched == 1


# Buckets


def backward(*grads: tuple[int, int], asks: int, signature: int = 0, sized: bool = True) -> list[Event]:
    """A backward: for each gradient (layer, number of elements) the node of its layer's op and its accumulation; after
    the last one, the exchange of a bucket."""
    events: list[Event] = []
    for number, (layer, size) in enumerate(grads):
        at = 1000 + 100 * number
        end = at + 60
        events += [
            node("AddmmBackward0", at, at + 10, sequence=layer, thread=ENGINE),
            node(ACCUMULATE, at + 20, end, thread=ENGINE),
            function(ACCUMULATE, at + 21, at + 25, thread=ENGINE)._replace(signature=size if sized else 0),
        ]
        if number == asks:
            events.append(op("c10d::allreduce_", at + 30, at + 40, thread=ENGINE, signature=signature))
    return events


FORWARDS = [
    event
    for layer in range(1, 5)
    for event in (
        label(LABELS[layer], 10 * layer, 10 * layer + 9),
        op("aten::addmm", 10 * layer, 10 * layer + 5, sequence=layer),
    )
]


@pytest.mark.parametrize(
    ("grads", "signature", "replicated", "layers", "owner"),
    [
        ([(4, THREE), (3, FIVE)], LIST_OF_EIGHT, None, (4, 3), 2),  # Net.b, above both
        ([(4, THREE), (1, FIVE), (4, FIVE)], 0, None, (4, 1), 0),  # each once
        ([(3, THREE), (3, FIVE)], EIGHT, None, (), 3),
        ([(1, THREE), (4, THREE), (3, FIVE)], LIST_OF_EIGHT, {3: set(), 4: set()}, (4, 3), 2),
        ([(3, FIVE), (4, FIVE), (3, THREE)], LIST_OF_EIGHT, {3: {5}, 4: set()}, (4, 3), 2),
    ],
    ids=["layers of a block", "distant layers", "one layer", "a layer that is not replicated", "an ignored gradient"],
)
def test_a_bucket_belongs_to_the_common_ancestor_of_the_layers_with_gradients_since_the_last_bucket(
    grads: list[tuple[int, int]],
    signature: int,
    replicated: dict[int, set[int]] | None,
    layers: tuple[int, ...],
    owner: int,
) -> None:
    asked = backward(*grads, asks=len(grads) - 1, signature=signature)
    walked = Walked(*FORWARDS, *asked, exchange("gloo:all_reduce", 5000), replicated=replicated)
    ((layer, phase, frames),) = walked.of("c10d::allreduce_")
    assert (layer, phase, frames[-1]) == (owner, BACKWARD, "c10d::allreduce_")
    assert frames == ["c10d::allreduce_"] or not layers
    assert walked.of("gloo:all_reduce") == [(owner, BACKWARD, [*frames, "gloo:all_reduce"])]
    assert walked.shared("c10d::allreduce_") == walked.shared("gloo:all_reduce") == [layers]
    assert walked.owners.uncertain == 0


def test_gradients_that_were_not_exchanged_are_in_no_bucket() -> None:
    """As in DDP's ``no_sync``: the next forward begins, so they were accumulated for a later backward."""
    without = backward((1, THREE), (2, FIVE), asks=-1)
    later = [event._replace(start_ns=event.start_ns + 5000, end_ns=event.end_ns + 5000) for event in FORWARDS]
    synced = [
        event._replace(start_ns=event.start_ns + 9000, end_ns=event.end_ns + 9000)
        for event in backward((4, THREE), (3, FIVE), asks=1, signature=LIST_OF_EIGHT)
    ]
    walked = Walked(*FORWARDS, *without, *later, *synced)
    assert walked.shared("c10d::allreduce_") == [(4, 3)]
    assert walked.owners.uncertain == 0


def test_a_bucket_with_another_size_has_other_gradients() -> None:
    """As in DDP's first backward: the layers are unknown, so it belongs to the place of the request."""
    walked = Walked(*FORWARDS, *backward((4, THREE), (3, FIVE), asks=1, signature=FIVE))
    assert walked.of("c10d::allreduce_")[0][:2] == (3, BACKWARD)
    assert (walked.shared("c10d::allreduce_"), walked.owners.uncertain) == ([()], 1)
    unsized = Walked(*FORWARDS, *backward((4, THREE), (3, FIVE), asks=1, signature=FIVE, sized=False))
    assert (unsized.shared("c10d::allreduce_"), unsized.owners.uncertain) == ([(4, 3)], 0)


def test_other_exchanges_of_ready_gradients_are_no_buckets() -> None:
    """A model without DistributedDataParallel: the exchange is in a hook of the user, or FullyShardedDataParallel
    scatters it. If this is unknown, as in a trace, a scattered gradient of another size is no bucket either."""
    events = [*FORWARDS, *backward((4, THREE), (3, FIVE), asks=1, signature=EIGHT)]
    scattered = [one._replace(name=one.name.replace("allreduce_", "_reduce_scatter_base_")) for one in events]
    for replicated, of in (({}, events), ({}, scattered), (None, scattered)):
        sized = [one._replace(signature=FIVE) if one.signature == EIGHT else one for one in of]
        walked = Walked(*sized, replicated=replicated)
        (place,) = [one.place for one in walked.all if one.event.name.startswith("c10d::")]
        assert (place.layer, place.phase, place.shared, walked.owners.uncertain) == (3, BACKWARD, (), 0)


def test_two_buckets_exchanged_at_once_cannot_be_separated() -> None:
    events = backward((4, THREE), (3, FIVE), asks=1)
    again = op("c10d::allreduce_", 1141, 1150, thread=ENGINE)
    walked = Walked(*FORWARDS, *events, again)
    assert walked.shared("c10d::allreduce_") == [(4, 3), ()]
    assert walked.owners.uncertain == 1


def test_a_collective_that_the_user_requests_is_no_bucket() -> None:
    walked = Walked(*FORWARDS, op("c10d::allreduce_", 60, 70), label(LABELS[3], 80, 99), op("c10d::allreduce_", 81, 82))
    assert [layer for layer, *_ in walked.of("c10d::allreduce_")] == [OUTSIDE, 3]


def test_a_bucket_of_layers_that_were_not_selected() -> None:
    """It belongs to the nearest selected layer above, otherwise to NOT_SELECTED."""
    events = [*FORWARDS, *backward((4, THREE), (3, FIVE), asks=1)]
    assert Walked(*events, selected={0, 3, 4}).of("c10d::allreduce_")[0][:2] == (0, BACKWARD)
    assert Walked(*events, selected={3, 4}).of("c10d::allreduce_")[0][:2] == (NOT_SELECTED, BACKWARD)


# FSDP2's ranges


def test_a_gather_belongs_to_the_layer_that_its_range_names() -> None:
    walked = Walked(
        label(LABELS[0], 0, 100),
        user_label("FSDP::pre_forward (b.0)", 10, 30),
        user_label("FSDP::all_gather (b.0)", 12, 20),
        op("c10d::_allgather_base_", 14, 16),
        exchange("gloo:all_gather", 15),
        user_label("FSDP::post_forward", 90, 95),
    )
    names = ["FSDP::pre_forward (b.0)", "FSDP::all_gather (b.0)", "c10d::_allgather_base_", "gloo:all_gather"]
    assert walked.of("gloo:all_gather") == [(3, FORWARD, names)]
    assert walked.of("FSDP::post_forward") == [(0, FORWARD, ["FSDP::post_forward"])]
    assert {frame.kind for one in walked.all for frame in one.place.frames} == {"op", "collective"}


def test_a_prefetched_gather_belongs_to_the_layer_that_needs_it() -> None:
    walked = Walked(
        *FORWARDS,
        node("AddmmBackward0", 100, 200, sequence=4),
        user_label("FSDP::pre_backward (b.1)", 101, 150),
        user_label("FSDP::backward_prefetch for a", 110, 140),
        user_label("FSDP::all_gather (a)", 111, 139),
        op("c10d::_allgather_base_", 112, 113),
        user_label("FSDP::root_post_backward_callback", 300, 400),
        user_label("FSDP::post_backward_reduce", 310, 390),
    )
    assert walked.of("FSDP::pre_backward (b.1)")[0][:2] == (4, BACKWARD)
    assert walked.of("c10d::_allgather_base_")[0][:2] == (1, BACKWARD)
    assert walked.of("FSDP::post_backward_reduce")[0][:2] == (0, BACKWARD)


def test_gathers_for_a_recomputed_forward_are_recompute() -> None:
    walked = Walked(
        *FORWARDS,
        node("CheckpointFunctionBackward", 100, 200, sequence=4),
        user_label("FSDP::pre_forward (b.0)", 110, 120),
        label(LABELS[3], 130, 150),
    )
    assert walked.of("FSDP::pre_forward (b.0)")[0][:2] == (3, RECOMPUTE)
    assert walked.of(LABELS[3])[-1][:2] == (3, RECOMPUTE)


def test_a_range_for_several_modules_is_shared() -> None:
    walked = Walked(label(LABELS[0], 0, 100), user_label("FSDP::all_gather (b.0, b.1)", 10, 30))
    assert (walked.of("FSDP::all_gather (b.0, b.1)")[0][:2], walked.shared("FSDP::all_gather (b.0, b.1)")) == (
        (2, FORWARD),
        [(3, 4)],
    )


@pytest.mark.parametrize("name", ["FSDP::all_gather (somewhere.else)", "FSDP::all_gather (a, nowhere)", "FSDP mine"])
def test_a_range_without_a_known_layer_belongs_to_the_place_around_it(name: str) -> None:
    walked = Walked(label(LABELS[2], 0, 100), user_label(name, 10, 30))
    assert walked.of(name) == [(2, FORWARD, [name])]
    (place,) = [one.place for one in walked.all if one.event.name == name]
    assert place.frames[-1].kind == ("op" if "::" in name else "label")  # a range of torch or of the user


def test_a_name_refers_to_the_root_around_the_range() -> None:
    """Two blocks, each an FSDP root: both have a module "0", and a range without a name may be for either."""
    paths = [("Net",), ("Net", "a"), ("Net", "a", "0"), ("Net", "b"), ("Net", "b", "0")]
    owners = CollectiveOwners({"": [1, 3], "0": [2, 4]}, paths, [])
    assert owners.layers_of_range("FSDP::all_gather (0)", around=1) == (2,)
    assert owners.layers_of_range("FSDP::all_gather (0)", around=4) == (4,)
    assert owners.layers_of_range("FSDP::pre_forward", around=4) == (3,)
    assert owners.layers_of_range("FSDP::all_gather (0) [pg=2]", around=1) == (2,)
    assert owners.layers_of_range("FSDP::all_gather [pg=2]", around=4) == (3,)
    assert owners.layers_of_range("FSDP::all_gather (0)", around=0) == ()
    assert owners.layers_of_range("FSDP::root_post_backward_callback", around=OUTSIDE) == ()
    assert owners.layers_of_range("mine", around=1) is None
    assert layers_by_fqn([("Net",), ("Net", "a"), ("Other",), ("Other", "a")]) == {"": [0, 2], "a": [1, 3]}


def test_with_several_groups_and_no_sizes_an_ambiguous_request_is_unknown() -> None:
    """Each group has its own order: the collective that began first need not be the one requested first."""
    walked = Walked(
        label(LABELS[1], 0, 9),
        op("c10d::allreduce_", 1, 2),
        label(LABELS[2], 10, 19),
        op("c10d::allreduce_", 11, 12),
        exchange("gloo:all_reduce", 50),
        exchange("gloo:all_reduce", 60),
        is_one_group=False,
    )
    assert [layer for layer, *_ in walked.of("gloo:all_reduce")] == [OUTSIDE, 2]  # the second is the only one left
    assert walked.owners.unmatched == 1


# Hooks


def hooks(layer: int, start: int, end: int) -> Event:
    return label(LABELS[layer].replace("torchprof:", "torchprof:!hooks:"), start, end)


def test_hooks_belong_to_their_module_and_are_no_call() -> None:
    walked = Walked(
        label(LABELS[2], 0, 100),
        hooks(3, 5, 10),
        op("aten::mul", 6, 8),
        label(LABELS[3], 10, 20),
        hooks(3, 20, 40),
        op("c10d::allreduce_", 25, 30),
        exchange("gloo:all_reduce", 28),
    )
    assert walked.of("aten::mul") == [(3, FORWARD, ["aten::mul"])]
    assert walked.of("gloo:all_reduce")[0][0] == 3
    calls = [one.calls for one in walked.all if one.event.kind is Kind.LABEL]
    assert calls == [1, 0, 1, 0]
    (own,) = {one.place for one in walked.all if one.place.layer == 3 and not one.place.frames}
    assert own.phase == FORWARD


def test_hooks_of_a_module_that_was_not_selected_belong_to_the_place_around_them() -> None:
    walked = Walked(label(LABELS[2], 0, 100), hooks(3, 5, 10), op("aten::mul", 6, 8), selected={2})
    assert walked.of("aten::mul") == [(2, FORWARD, ["aten::mul"])]
    assert Walked(hooks(4, 5, 10), op("aten::mul", 6, 8), selected={2}).of("aten::mul")[0][0] == OUTSIDE


def test_hooks_in_backward_are_recompute() -> None:
    walked = Walked(*FORWARDS, node("CheckpointFunctionBackward", 100, 200, sequence=4), hooks(3, 110, 120))
    assert walked.all[-1].place.phase == RECOMPUTE


def of_tensor_parallel(hook: object) -> object:
    """Make hooks like those that ``parallelize_module`` registers."""
    hook.__module__ = "torch.distributed.tensor._api"
    return hook


def test_only_hooks_of_tensor_parallel_are_labelled_and_all_are_restored() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen: list[str] = []
    of_torch = of_tensor_parallel(lambda module, args: seen.append("torch's") or (args[0].sin(),))
    after = of_tensor_parallel(lambda module, args, result: result.cos())
    net[0].register_forward_pre_hook(of_torch)
    net[0].register_forward_pre_hook(lambda module, args: (seen.append("mine"), args[0].tan())[1:])
    net[0].register_forward_hook(after)
    before = [[*net[0]._forward_pre_hooks.items()], [*net[0]._forward_hooks.items()]]
    x = torch.randn(2, 4)
    expected = net(x)
    with Profile(net) as prof:
        assert torch.equal(net(x), expected)
        assert [*net[0]._forward_pre_hooks] == [key for key, _ in before[0]]
    assert before == [[*net[0]._forward_pre_hooks.items()], [*net[0]._forward_hooks.items()]]
    assert seen == ["torch's", "mine"] * 2
    owner = {
        row.frames[0].name: row.layer.name
        for row in prof.run.rows
        if row.layer is not None and row.frames and row.frames[0].name in ("aten::sin", "aten::tan", "aten::cos")
    }
    assert owner == {"aten::sin": "Sequential.0", "aten::cos": "Sequential.0", "aten::tan": "Sequential"}
    assert {node.layer.name: node.calls for node in prof.run.tree().walk()}["Sequential.0"] == 1
    assert len(prof.raw()[1]["Sequential", "0"]) == 1


def test_hooks_that_the_user_removes_inside_the_block_stay_removed() -> None:
    net = nn.Linear(4, 4)
    handle = net.register_forward_pre_hook(of_tensor_parallel(lambda module, args: None))
    with Profile(net):
        handle.remove()
        net(torch.randn(2, 4))
    assert not net._forward_pre_hooks


def test_hooks_are_found_in_a_trace_too(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net[1].register_forward_hook(of_tensor_parallel(lambda module, args, result: result.cos()))
    with Profile(net) as prof:
        net(torch.randn(2, 4))
    prof.export_chrome_trace(tmp_path / "trace.json")
    for read in (
        torchprof.from_trace(tmp_path / "trace.json"),
        torchprof.from_trace(tmp_path / "trace.json", net),
        torchprof.from_trace(tmp_path / "trace.json", net, paths=["1"]),
    ):
        (row,) = [row for row in read.rows if row.frames and row.frames[0].name == "aten::cos"]
        assert row.layer is not None
        assert (row.layer.name, row.phase, row.calls) == ("Sequential.1", FORWARD, 1)
        assert all("!" not in layer.name for layer in read.layers)


# Process groups of the job


def group(name: str, size: int, ranks: Sequence[int] = (), description: str = "undefined") -> dict[str, object]:
    return {"pg_name": name, "pg_desc": description, "group_size": size, "ranks": list(ranks)}


def test_the_group_of_collectives_that_name_no_group() -> None:
    everyone = group("0", 4, description="default_pg")
    assert sole_group([everyone]) == GroupOfRanks("0", "default_pg", 4, "")
    assert sole_group([everyone, group("1", 4), group("5", 1, [2])]) == GroupOfRanks("0", "default_pg", 4, "")
    assert sole_group([everyone, group("1", 2, [0, 2])]) is None
    assert sole_group([group("3", 2, [1, 3])]) == GroupOfRanks("3", "undefined", 2, "[1, 3]")
    assert sole_group([{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2}]) == GroupOfRanks(
        "0", "default_pg", 2, ""
    )
    assert sole_group([]) == NOT_RECORDED
    assert sole_group([{}, {"group_size": "2"}, {"group_size": 2, "ranks": "all"}]) == GroupOfRanks("", "", 2, "")


def test_the_mesh_dimensions_that_groups_are_named_after() -> None:
    groups = [group("0", 4), group("1", 2, [1, 3], "mesh_dp"), group("2", 2, [2, 3], "mesh_tp")]
    assert mesh_of_groups(groups, 3) == (MeshDim("dp", 2, 1), MeshDim("tp", 2, 1))
    assert mesh_of_groups(groups, 1) == (MeshDim("dp", 2, 0),)
    assert mesh_of_groups([{"pg_desc": "mesh_x", "ranks": None}], 0) == ()


@pytest.mark.usefixtures("world_of_one")
def test_a_job_of_one_rank_has_no_group(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    with Profile(net) as prof:
        net(torch.randn(1, 2))
    assert (prof.run.meta.rank, prof.run.meta.world_size, prof.run.lockstep) == (0, 1, {})
    prof.export_chrome_trace(tmp_path / "trace.json")
    said = json.loads((tmp_path / "trace.json").read_text())["distributedInfo"]
    assert (said["backend"], said["rank"], said["world_size"]) == ("gloo", 0, 1)


@pytest.mark.usefixtures("world_of_one")
def test_buckets_that_are_not_in_order_yet_give_a_warning() -> None:
    """DistributedDataParallel orders its buckets after its first backward, if there are several."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
    one = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    plan = Plan([model, one], None)
    assert set(plan.replicated) == {*range(len(plan.layer_paths))}
    model(torch.randn(1, 64)).sum().backward()
    said = plan.unordered()
    assert Plan([net], None).unordered() == said  # as it is given to callbacks
    assert said == (["Sequential"] if model._get_ddp_logging_data()["bucket_sizes"].count(",") else [])
    (warning,) = about_buckets(["Sequential"])
    assert str(warning).startswith("The layers of gradient buckets are estimates in Sequential.")
    assert list(about_buckets([])) == []
    model(torch.randn(1, 64)).sum().backward()
    assert plan.unordered() == []
    assert Plan([nn.Linear(2, 2)], None).replicated == {}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("is_module_yet", [False, True])
def test_a_replica_whose_constructor_failed_exchanges_nothing(
    monkeypatch: pytest.MonkeyPatch, is_module_yet: bool
) -> None:
    """The error keeps it alive, as in an interactive session: it must not be asked for anything."""

    def fails(*_: Any) -> None:
        raise RuntimeError("DDP expects same model across all ranks")

    class Parallel(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            broken.append(self)
            super().__init__(module) if is_module_yet else fails()

    broken: list[nn.Module] = []
    net = nn.Linear(2, 2)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr("torch.nn.parallel.distributed._verify_param_shape_across_processes", fails)
        Parallel(net)
    plan = Plan([net], None)
    assert (plan.replicated, plan.unordered()) == ({}, [])
    with Profile(net) as prof:
        net(torch.randn(1, 2))
    assert len(prof.run.rows) > 0
    model = nn.parallel.DistributedDataParallel(net)
    assert (set(plan.replicated), plan.unordered()) == ({0}, [])
    assert broken[0] is not model


@pytest.mark.usefixtures("world_of_one")
def test_the_wrapper_around_a_model_is_searched_until_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is searched again when it is gone, or when a model is added. It is never kept alive."""
    looked = []

    def instances_of(kind: type) -> list[Any]:
        looked.append(1)
        return actual(kind)

    actual = record_modules.instances_of
    monkeypatch.setattr(record_modules, "instances_of", instances_of)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    plan = Plan([first, second], None)

    def found(times: int) -> set[int]:
        before = len(looked)
        replicated = set(plan.replicated)
        assert len(looked) - before == times
        return replicated

    assert [found(1), found(1)] == [set(), set()]
    around = [nn.parallel.DistributedDataParallel(first)]
    assert found(1) == {0}
    around.append(nn.parallel.DistributedDataParallel(second))
    assert [found(1), found(0), found(0)] == 3 * [{0, 1}]
    del around[0]
    gc.collect()
    assert found(1) == {1}


@pytest.mark.usefixtures("world_of_one")
def test_buckets_of_a_model_passed_without_its_wrapper() -> None:
    """Callbacks get such a model: DistributedDataParallel is around it. Ignored gradients, and those that another
    wrapper exchanges, are in no bucket. The first gradients that become ready are those of the last layer."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    net._ddp_params_and_buffers_to_ignore = ["2.weight", "2.bias", "1.bias"]  # type: ignore[assignment]
    model, other = nn.parallel.DistributedDataParallel(net), nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    paths = [("Sequential",), *(("Sequential", str(step)) for step in range(3))]
    for given in (net, model):
        plan = Plan([given], None)
        assert plan.layer_paths == paths
        assert plan.replicated == {0: set(), 1: set(), 2: {4}}  # of the second Linear the bias is ignored
    assert Plan([net[1]], None).replicated == {0: {4}}
    assert Plan([other.module], None).replicated == {0: set()}
    for _ in range(2):
        model(torch.randn(1, 4)).sum().backward()
    for with_sizes in (False, True):  # these must be the sizes in the bucket
        with Profile(net, record_shapes=with_sizes) as prof:
            model(torch.randn(1, 4)).sum().backward()
        asking = [row for row in prof.run.rows if row.frames and row.frames[-1].name == "c10d::allreduce_"]
        assert [{layer.name for layer in row.shared_by} for row in asking] == [{"Sequential.0", "Sequential.1"}]
