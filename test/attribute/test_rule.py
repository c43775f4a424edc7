"""The rule of ownership on hand-made events: layer, phase, number of calls, self time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from build.events import ENGINE, MAIN, NODE_PREFIX, Walked, function, kernel, label, memory, node, op, user_label

from torchprof.attribute.events import Event, Kind, Places, Site
from torchprof.run.words import (
    BACKWARD,
    BEFORE,
    FORWARD,
    LAUNCH_NOT_RECORDED,
    LAUNCHED_BEFORE,
    NOT_SELECTED,
    OUTSIDE,
    RECOMPUTE,
    Frame,
    FrameKind,
)

NET, CONV, FC = 0, 1, 2
PATHS = [("Net",), ("Net", "conv"), ("Net", "fc")]
SITES = {"net": Site((NET,)), "conv": Site((CONV,)), "fc": Site((FC,))}


def walk(*events: Event, sites: dict[str, Site] = SITES, paths: Sequence[tuple[str, ...]] = PATHS) -> Walked:
    """Attribute events to the layers of a small net, sorted by start as the rule requires."""
    return Walked(sorted(events, key=lambda event: event.start_ns), sites, paths)


# Forward


def test_the_innermost_label_owns_an_op() -> None:
    """An op in the range of a child belongs to the child, beside it to the parent, and outside all ranges to no
    layer."""
    walked = walk(
        op("data", 0, 10),
        label("net", 10, 100),
        op("aten::cat", 20, 30),
        label("conv", 30, 60),
        op("aten::conv2d", 40, 50),
        op("aten::relu", 70, 80),
        op("loss", 110, 120),
    )
    assert walked.owner("data") == (OUTSIDE, FORWARD)
    assert walked.owner("aten::cat") == (NET, FORWARD)
    assert walked.owner("aten::conv2d") == (CONV, FORWARD)
    assert walked.owner("aten::relu") == (NET, FORWARD)
    assert walked.owner("loss") == (OUTSIDE, FORWARD)
    assert set(walked.attribution.callers) == {(OUTSIDE, NET), (NET, CONV)}


def test_an_op_directly_inside_an_op_of_the_same_name_is_one_call() -> None:
    """As in torch's tables: the inner op adds time and no call. With another op between the two, it is a call."""
    walked = walk(
        label("net", 0, 100),
        op("aten::sum", 10, 40),
        op("aten::sum", 15, 30),
        op("aten::to", 50, 90),
        op("aten::copy_", 60, 80),
        op("aten::to", 65, 70),
    )
    assert [walked["aten::sum", 0].calls, walked["aten::sum", 1].calls] == [1, 0]
    assert walked["aten::sum", 0].place is walked["aten::sum", 1].place
    assert [walked["aten::to", 0].calls, walked["aten::to", 1].calls] == [1, 1]
    assert walked.frames("aten::to", 1) == ["aten::to", "aten::copy_", "aten::to"]
    assert walked.self_ns()[NET, FORWARD, ("aten::sum",)] == 30


def test_ranges_of_different_threads_do_not_nest() -> None:
    """An op on another thread is inside no range of this thread, even if it runs at the same time."""
    walked = walk(label("net", 0, 100), op("elsewhere", 10, 20, thread=7), op("here", 30, 40))
    assert walked.owner("elsewhere") == (OUTSIDE, FORWARD)
    assert walked.owner("here") == (NET, FORWARD)
    assert walked["elsewhere"].around is None


def test_an_op_and_a_label_whose_names_look_alike_are_two() -> None:
    walked = walk(label("net", 0, 100), user_label(":foo", 10, 30), op("label::foo", 40, 45))
    own = walked.self_ns()
    assert (own[NET, FORWARD, (":foo",)], own[NET, FORWARD, ("label::foo",)]) == (20, 5)


def test_a_user_label_with_the_name_of_an_op_is_no_op() -> None:
    """An op inside a label of the same name is a call."""
    walked = walk(user_label("aten::add", 0, 50), op("aten::add", 10, 20))
    assert walked["aten::add", 1].calls == 1
    assert [frame.kind for frame in walked["aten::add", 1].place.frames] == ["label", "op"]


def test_an_event_that_ends_after_its_parent_is_cut() -> None:
    """It ends a few ns too late, by another clock: it takes only time that its parent has, and events stay nested."""
    walked = walk(label("net", 0, 100), label("conv", 10, 103), op("aten::conv2d", 20, 105), op("after", 101, 110))
    assert walked.owner("after") == (OUTSIDE, FORWARD)
    own = walked.self_ns()
    assert own == {
        (NET, FORWARD, ()): 10,
        (CONV, FORWARD, ()): 10,
        (CONV, FORWARD, ("aten::conv2d",)): 80,
        (OUTSIDE, FORWARD, ("after",)): 9,
    }
    assert all(ns >= 0 for ns in own.values())


# Which module, which path


def test_a_call_of_a_module_at_two_paths_belongs_to_the_path_of_its_caller() -> None:
    """The call belongs to the path whose parent's range is around it, otherwise to the first path."""
    paths = [("Net",), ("Net", "encoder"), ("Net", "encoder", "tied"), ("Net", "decoder"), ("Net", "decoder", "tied")]
    sites = {"net": Site((0,)), "encoder": Site((1,)), "tied": Site((2, 4)), "decoder": Site((3,))}
    walked = walk(
        label("net", 0, 100),
        label("encoder", 10, 30),
        label("tied", 15, 25),
        label("decoder", 40, 60),
        label("tied", 45, 55),
        label("tied", 70, 80),
        label("tied", 110, 120),
        sites=sites,
        paths=paths,
    )
    assert [walked["tied", number].place.layer for number in range(4)] == [2, 4, 2, 2]


def test_a_module_at_two_paths_called_below_its_parent() -> None:
    """A caller deeper inside one of the parents also decides for this parent."""
    paths = [("Net",), ("Net", "a"), ("Net", "a", "s"), ("Net", "b"), ("Net", "b", "deep"), ("Net", "b", "s")]
    sites = {"b": Site((3,)), "deep": Site((4,)), "s": Site((2, 5))}
    walked = walk(label("b", 0, 100), label("deep", 10, 90), label("s", 20, 30), sites=sites, paths=paths)
    assert walked["s"].place.layer == 5


def test_a_shared_module_called_by_another_model_is_at_its_first_path() -> None:
    """A caller above none of the paths does not choose a path."""
    paths = [("Net",), ("Net", "a"), ("Net", "b"), ("Other",)]
    sites = {"shared": Site((1, 2)), "other": Site((3,))}
    walked = walk(label("other", 0, 100), label("shared", 10, 20), sites=sites, paths=paths)
    assert walked["shared"].place.layer == 1
    assert set(walked.attribution.callers) == {(OUTSIDE, 3), (3, 1)}


def test_a_wrapper_and_the_wrapped_module_are_one_call() -> None:
    """The range of a wrapped module directly inside the range of its wrapper continues the wrapper's call."""
    sites = {"ddp": Site((0,)), "core": Site((0,), "ddp"), "fc": Site((2,))}
    walked = walk(
        label("ddp", 0, 100),
        op("buckets", 5, 10),
        label("core", 20, 90),
        op("aten::add", 30, 40),
        label("fc", 50, 60),
        label("core", 200, 230),
        sites=sites,
    )
    assert walked["ddp"].calls == 1
    assert walked["core", 0].calls == 0
    assert walked["core", 1].calls == 1, "called past its wrapper, it is a call of its own"
    assert walked.self_ns()[0, FORWARD, ()] == 100 - 5 - 10 - 10 + 30
    assert set(walked.attribution.callers) == {(OUTSIDE, 0), (0, 2)}


def test_a_wrapper_of_a_wrapper_is_one_call() -> None:
    """``DDP(torch.compile(m))``: three ranges, one call."""
    sites = {"ddp": Site((0,)), "compiled": Site((0,), "ddp"), "core": Site((0,), "compiled")}
    walked = walk(label("ddp", 0, 100), label("compiled", 10, 90), label("core", 20, 80), sites=sites)
    assert [each.calls for each in walked.all] == [1, 0, 0]
    assert walked.self_ns() == {(0, FORWARD, ()): 100}


def test_work_of_modules_that_were_not_selected_is_separate() -> None:
    """A range of a module that ``paths=`` did not select has its own place. A selected module inside it owns its own
    work."""
    sites = {"net": Site((NOT_SELECTED,)), "fc": Site((FC,))}
    walked = walk(
        op("before", 0, 5), label("net", 10, 100), op("a", 20, 30), label("fc", 40, 60), op("b", 45, 50), sites=sites
    )
    assert walked.owner("before") == (OUTSIDE, FORWARD)
    assert walked.owner("a") == (NOT_SELECTED, FORWARD)
    assert walked.owner("b") == (FC, FORWARD)


def test_the_backward_of_a_module_that_was_not_selected_is_not_selected() -> None:
    """In backward, too, the layer of the op that made the node counts, even if that layer was not selected."""
    sites = {"net": Site((NOT_SELECTED,)), "fc": Site((FC,))}
    walked = walk(label("net", 10, 100), op("a", 20, 30, sequence=4), node("ABackward0", 200, 220, 4), sites=sites)
    assert walked.owner(NODE_PREFIX + "ABackward0") == (NOT_SELECTED, BACKWARD)


# Backward


def forward_of_two() -> list[Event]:
    """The net calls conv (nodes 10 and 11) and fc (node 12). Then the loss makes node 13."""
    return [
        label("net", 0, 100),
        label("conv", 10, 40),
        op("aten::conv2d", 15, 30, sequence=10),
        op("aten::convolution", 16, 28, sequence=10),
        op("aten::relu", 32, 38, sequence=11),
        label("fc", 50, 90),
        op("aten::linear", 55, 80, sequence=12),
        op("aten::mse_loss", 110, 120, sequence=13),
    ]


@pytest.mark.parametrize("thread", [MAIN, ENGINE])
def test_backward_belongs_to_the_layer_of_the_op_that_made_the_node(thread: int) -> None:
    """On any thread of the engine, everything inside a node belongs to the layer of its maker, in the phase
    backward."""
    walked = walk(
        *forward_of_two(),
        node("MseLossBackward0", 200, 210, 13, thread=thread),
        node("AddmmBackward0", 220, 250, 12, thread=thread),
        function("AddmmBackward0", 225, 245, 12, thread=thread),
        op("aten::mm", 230, 240, thread=thread),
        node("ReluBackward0", 260, 270, 11, thread=thread),
        node("ConvolutionBackward0", 280, 300, 10, thread=thread),
    )
    assert walked.owner(NODE_PREFIX + "MseLossBackward0") == (OUTSIDE, BACKWARD)
    assert walked.owner(NODE_PREFIX + "AddmmBackward0") == (FC, BACKWARD)
    assert walked.owner("aten::mm") == (FC, BACKWARD)
    assert walked.frames("aten::mm") == [NODE_PREFIX + "AddmmBackward0", "AddmmBackward0", "aten::mm"]
    assert walked.owner(NODE_PREFIX + "ReluBackward0") == (CONV, BACKWARD)
    assert walked.owner(NODE_PREFIX + "ConvolutionBackward0") == (CONV, BACKWARD)


def test_a_node_with_a_number_of_no_op_belongs_to_the_op_with_the_next_lower_number() -> None:
    """An in-place write to a view gives its node a new number: the last op at or below this number is the maker."""
    walked = walk(
        label("conv", 0, 10),
        op("aten::view", 1, 2, sequence=5),
        label("fc", 20, 30),
        op("aten::mul_", 21, 25, sequence=7),
        node("AsStridedBackward0", 100, 110, 6),
        node("CopySlices", 120, 130, 9),
    )
    assert walked.owner(NODE_PREFIX + "AsStridedBackward0") == (CONV, BACKWARD)
    assert walked.owner(NODE_PREFIX + "CopySlices") == (FC, BACKWARD)


def test_the_last_op_with_the_number_of_a_node_is_its_maker() -> None:
    """An op that makes no node has the number of the next node: here the first such op is in another layer."""
    walked = walk(
        label("conv", 0, 10),
        op("aten::detach", 1, 2, sequence=5),
        label("fc", 20, 30),
        op("aten::linear", 21, 29, sequence=5),
        op("aten::t", 22, 24, sequence=5),
        node("TBackward0", 100, 110, 5),
    )
    assert walked.owner(NODE_PREFIX + "TBackward0") == (FC, BACKWARD)


def test_the_last_op_with_a_number_counts_in_any_order_of_numbers() -> None:
    """The order of the numbers does not matter, only which op with a number started last."""
    walked = walk(
        label("conv", 0, 20),
        op("a", 1, 2, sequence=9),
        op("b", 3, 4, sequence=4),
        op("c", 5, 6, sequence=6),
        label("fc", 30, 50),
        op("d", 31, 32, sequence=9),
        op("e", 33, 34, sequence=2),
        node("two", 98, 99, 2),
        node("three", 99, 100, 3),
        node("four", 100, 101, 4),
        node("eight", 106, 107, 8),
        node("nine", 108, 109, 9),
    )
    owners = [walked[NODE_PREFIX + name].place.layer for name in ("two", "three", "four", "eight", "nine")]
    assert owners == [FC, FC, CONV, CONV, FC]


def test_sequence_numbers_are_per_forward_thread() -> None:
    """The same number means another op if forward ran on another thread."""
    walked = walk(
        label("conv", 0, 10, thread=1),
        op("a", 1, 5, sequence=3, thread=1),
        label("fc", 2, 12, thread=5),
        op("b", 3, 8, sequence=3, thread=5),
        node("OfOne", 100, 110, 3, forward_thread=1, thread=ENGINE),
        node("OfFive", 120, 130, 3, forward_thread=5, thread=ENGINE),
        node("OfNobody", 140, 150, 3, forward_thread=6, thread=ENGINE),
    )
    assert walked.owner(NODE_PREFIX + "OfOne") == (CONV, BACKWARD)
    assert walked.owner(NODE_PREFIX + "OfFive") == (FC, BACKWARD)
    assert walked.owner(NODE_PREFIX + "OfNobody") == (OUTSIDE, BACKWARD)


def test_a_node_made_before_the_session_is_outside() -> None:
    """Its number is below all recorded ones: its op was not recorded, and no later layer gets the node."""
    walked = walk(*forward_of_two(), node("OldBackward0", 200, 210, 3), op("aten::mm", 201, 209))
    assert walked.owner(NODE_PREFIX + "OldBackward0") == (OUTSIDE, BACKWARD)
    assert walked.owner("aten::mm") == (OUTSIDE, BACKWARD)


def test_accumulate_grad_belongs_with_the_node_before_it() -> None:
    """It has no number. The engine runs it right after the node that made its gradient."""
    accumulate = "torch::autograd::AccumulateGrad"
    walked = walk(
        *forward_of_two(),
        node("AddmmBackward0", 200, 210, 12),
        node(accumulate, 220, 230),
        function(accumulate, 221, 229),
        op("aten::add_", 222, 228),
        node("ConvolutionBackward0", 240, 250, 10),
        node(accumulate, 260, 270),
        node(accumulate, 280, 290),
        function(accumulate, 281, 289),
    )
    assert [walked[NODE_PREFIX + accumulate, number].place.layer for number in range(3)] == [FC, CONV, CONV]
    assert walked.owner("aten::add_") == (FC, BACKWARD)
    assert [walked[accumulate, number].place.layer for number in range(2)] == [FC, CONV]


def test_accumulate_grad_belongs_with_the_node_before_it_at_the_same_depth() -> None:
    """A node may run the engine again (reentrant checkpoints). Afterwards the outer level continues."""
    walked = walk(
        *forward_of_two(),
        node("CheckpointFunctionBackward", 200, 300, 12),
        function("CheckpointFunctionBackward", 205, 295, 12),
        node("ConvolutionBackward0", 210, 220, 10),
        node("AccumulateGrad", 230, 240),
        node("AccumulateGrad", 310, 320),
    )
    assert walked[NODE_PREFIX + "AccumulateGrad", 0].place.layer == CONV
    assert walked[NODE_PREFIX + "AccumulateGrad", 1].place.layer == FC


def test_accumulate_grad_as_the_first_node_is_outside() -> None:
    """``leaf.backward()``: there is no node before it."""
    walked = walk(*forward_of_two(), node("AccumulateGrad", 200, 210))
    assert walked.owner(NODE_PREFIX + "AccumulateGrad") == (OUTSIDE, BACKWARD)


def test_accumulate_grad_belongs_with_the_node_before_it_on_the_same_thread() -> None:
    """With two engine threads, the last node on the same thread counts, not the last node of all."""
    walked = walk(
        *forward_of_two(),
        node("AddmmBackward0", 200, 210, 12, thread=8),
        node("ConvolutionBackward0", 205, 215, 10, thread=9),
        node("AccumulateGrad", 220, 230, thread=8),
        node("AccumulateGrad", 222, 232, thread=9),
    )
    assert [walked[NODE_PREFIX + "AccumulateGrad", number].place.layer for number in range(2)] == [FC, CONV]


def test_a_node_without_the_engines_range_around_it() -> None:
    """If only the autograd function was recorded, its own number finds the layer."""
    walked = walk(*forward_of_two(), function("AddmmBackward0", 200, 220, 12), op("aten::mm", 205, 210))
    assert walked.owner("AddmmBackward0") == (FC, BACKWARD)
    assert walked.owner("aten::mm") == (FC, BACKWARD)
    assert walked.frames("aten::mm") == ["AddmmBackward0", "aten::mm"]


def test_double_backward_goes_to_the_layer_of_the_backward_op_that_made_the_node() -> None:
    """With ``create_graph``, ops in backward make nodes. These belong to the layer of the backward op."""
    walked = walk(
        *forward_of_two(),
        node("AddmmBackward0", 200, 250, 12),
        function("AddmmBackward0", 205, 245, 12),
        op("aten::mm", 210, 220, sequence=20),
        node("ReluBackward0", 260, 290, 11),
        op("aten::threshold_backward", 265, 285, sequence=21),
        op("aten::norm", 300, 310, sequence=22),
        node("NormBackward0", 400, 410, 22),
        node("ThresholdBackwardBackward0", 420, 430, 21),
        node("MmBackward0", 440, 460, 20),
        op("aten::mm", 445, 455, sequence=30),
        node("MmBackward0", 500, 510, 30),
    )
    assert walked.owner(NODE_PREFIX + "NormBackward0") == (OUTSIDE, BACKWARD)
    assert walked.owner(NODE_PREFIX + "ThresholdBackwardBackward0") == (CONV, BACKWARD)
    assert walked.owner(NODE_PREFIX + "MmBackward0", 0) == (FC, BACKWARD)
    assert walked.owner(NODE_PREFIX + "MmBackward0", 1) == (FC, BACKWARD), "and so on, to any order"


# Recompute


def test_a_labelled_forward_inside_backward_is_recompute() -> None:
    """Checkpointing runs forwards again in backward: the phase is recompute, and it is not a call by a caller."""
    walked = walk(
        label("net", 0, 100),
        op("CheckpointFunction", 10, 90, sequence=2),
        label("conv", 20, 80),
        node("CheckpointFunctionBackward", 200, 400, 2),
        function("CheckpointFunctionBackward", 205, 395, 2),
        label("conv", 210, 260),
        op("aten::conv2d", 220, 240, sequence=5),
        label("fc", 245, 255),
        node("ConvolutionBackward0", 300, 350, 5),
        op("aten::convolution_backward", 310, 340),
    )
    assert walked.owner("conv", 0) == (CONV, FORWARD)
    assert walked.owner("conv", 1) == (CONV, RECOMPUTE)
    assert walked.owner("fc") == (FC, RECOMPUTE)
    assert walked.owner("aten::conv2d") == (CONV, RECOMPUTE)
    assert walked.owner("aten::convolution_backward") == (CONV, BACKWARD)
    assert walked.owner("CheckpointFunctionBackward") == (NET, BACKWARD)
    assert set(walked.attribution.callers) == {(OUTSIDE, NET), (NET, CONV)}
    assert walked["conv", 1].calls == 1


# Memory and kernels


def test_memory_belongs_to_the_innermost_op_around_it() -> None:
    """Memory events have no parent: they belong to the op that is open on their thread at this time."""
    walked = walk(
        label("net", 0, 100),
        op("aten::empty", 10, 20),
        memory(15, 64),
        memory(30, -16),
        memory(15, 8, thread=9),
        memory(100, -64),
        node("Backward", 200, 300, -1),
        memory(250, 128),
    )
    places = {each.event.nbytes: each.place for each in walked.all if each.event.kind is Kind.MEMORY}
    assert [frame.name for frame in places[64].frames] == ["aten::empty"]
    assert (places[-16].layer, places[-16].frames) == (NET, ())
    assert places[8].layer == OUTSIDE
    assert places[-64].layer == OUTSIDE, "freed when the forward had ended"
    assert places[128].phase == BACKWARD
    assert all(each.calls == 0 and each.ns == 0 for each in walked.all if each.event.kind is Kind.MEMORY)


def test_a_kernel_belongs_to_the_op_that_launched_it() -> None:
    """The correlation finds the op, however late the kernel runs. A kernel with an unknown launch is outside, not
    lost."""
    walked = walk(
        label("net", 0, 100),
        label("conv", 10, 60),
        op("aten::conv2d", 20, 50, correlation=71),
        op("cudaLaunchKernel", 25, 30),
        op("aten::relu", 70, 80, correlation=72),
        kernel("gemm", 500, 900, 71),
        kernel("relu", 900, 950, 72),
        kernel("stray", 950, 960, 99),
    )
    assert walked.owner("gemm") == (CONV, FORWARD)
    assert walked["gemm"].place.frames == (Frame(FrameKind.OP, "aten::conv2d"), Frame(FrameKind.KERNEL, "gemm"))
    assert walked.owner("relu") == (NET, FORWARD)
    assert walked.owner("stray") == (OUTSIDE, FORWARD)
    assert walked["stray"].ns == 10
    assert all(walked[name].around is None for name in ("gemm", "relu", "stray")), "it takes no time from the CPU"


def test_kernels_with_an_unknown_launch_are_outside_and_kernels_launched_before_are_separate() -> None:
    walked = walk(
        op("aten::mm", 0, 10, correlation=5), kernel("old", 1, 3, BEFORE), kernel("lost", 4, 6, 0), kernel("k", 7, 9, 5)
    )
    assert walked.frames("old") == [LAUNCHED_BEFORE, "old"]
    assert walked.frames("lost") == [LAUNCH_NOT_RECORDED, "lost"]
    assert walked.frames("k") == ["aten::mm", "k"]
    assert walked.owner("old") == walked.owner("lost") == (OUTSIDE, FORWARD)


def test_a_kernel_with_the_name_of_its_op_is_no_op() -> None:
    """The frame of a kernel differs from that of an op of the same name."""
    walked = walk(op("same", 0, 10, correlation=1), op("same", 2, 8), kernel("same", 20, 30, 1))
    assert [frame.kind for frame in walked["same", 2].place.frames] == ["op", "kernel"]
    assert walked["same", 2].calls == 1


# Nodes without a number: torch omits it


def test_a_node_after_a_hook_is_found_by_the_number_inside_it() -> None:
    """If a hook runs an op first, only the autograd function has the number of the node, and the engine's range does
    not."""
    walked = walk(
        *forward_of_two(),
        node("AddmmBackward0", 200, 260),
        op("aten::mul", 205, 215),
        user_label("mine", 216, 219),
        function("AddmmBackward0", 220, 250, 12),
        op("aten::mm", 225, 245),
        node("AccumulateGrad", 270, 280),
        node("ConvolutionBackward0", 300, 320, 10),
    )
    names = ("AddmmBackward0", NODE_PREFIX + "AddmmBackward0", NODE_PREFIX + "AccumulateGrad")
    for name in (*names, "aten::mul", "aten::mm"):
        assert walked.owner(name) == (FC, BACKWARD)
    assert walked.owner(NODE_PREFIX + "ConvolutionBackward0") == (CONV, BACKWARD)


def test_nodes_inside_a_hook_of_a_node_have_their_own_numbers() -> None:
    """A hook may run a backward. Events that were read ahead come in their order, and once."""
    events = [
        *forward_of_two(),
        node("AddmmBackward0", 200, 300),
        node("ConvolutionBackward0", 210, 240),
        op("aten::mul", 212, 214),
        function("ConvolutionBackward0", 220, 230, 10),
        function("AddmmBackward0", 250, 290, 12),
        op("aten::mm", 255, 260),
        node("Unfinished", 310, 330),
        op("aten::add", 315, 320),
        op("aten::sum", 340, 350),
    ]
    walked = walk(*events)
    assert [one.event.name for one in walked.all] == [event.name for event in events]
    assert walked.owner(NODE_PREFIX + "AddmmBackward0") == (FC, BACKWARD)
    assert walked.owner(NODE_PREFIX + "ConvolutionBackward0") == walked.owner("aten::mul") == (CONV, BACKWARD)
    assert walked.owner("aten::mm") == (FC, BACKWARD)
    assert walked.owner(NODE_PREFIX + "Unfinished") == walked.owner("aten::add") == (FC, BACKWARD)  # as the node before
    assert walked.owner("aten::sum") == (OUTSIDE, FORWARD)


# Sampled lines of Python

_LABEL, _OP = FrameKind.LABEL, FrameKind.OP


@pytest.mark.parametrize(
    ("kinds", "phase", "has_lines"),
    [
        ([], FORWARD, 0),
        ([], BACKWARD, 0),
        ([_LABEL], FORWARD, 1),
        ([_OP], FORWARD, 1),
        ([_OP, _OP, _OP], FORWARD, 1),
        ([_LABEL, _OP, _OP], FORWARD, 2),
        ([_OP, _LABEL, _OP, _OP], FORWARD, 3),
        ([_OP, _LABEL], FORWARD, 2),
        ([_OP], BACKWARD, 1),
        ([_OP, _OP], BACKWARD, 1),
        ([FrameKind.REGION], FORWARD, 1),
        ([FrameKind.REGION, _OP], FORWARD, 1),
    ],
)
def test_a_sampled_line_is_in_the_outermost_range_under_the_same_labels(
    kinds: list[FrameKind], phase: str, has_lines: int
) -> None:
    """``has_lines``: how many of the frames, from the outermost on, are around the line."""
    places = Places()
    chain = [places.of_layer(NET, phase)]
    for number, kind in enumerate(kinds):
        chain.append(places.inside(chain[-1], kind, f"frame {number}"))
    assert places.of_lines(chain[-1]) is chain[has_lines]
