"""The layers in a trace, by hand: from labels, from events of modules, from ranges."""

from __future__ import annotations

import pytest

from torchprof.attribute.events import Site
from torchprof.record.labels import label_of
from torchprof.traces.layers import (
    Hierarchy,
    ModuleCall,
    RangeCall,
    layers_of_labels,
    layers_of_modules,
    layers_of_ranges,
    path_of_label,
    traced_class_name,
)


def warning_texts(made: Hierarchy) -> tuple[str, ...]:
    return tuple(map(str, made.warnings))


def module(name: str, *parents: str) -> ModuleCall:
    return ModuleCall(f"nn.Module: {name}", tuple(parent and f"nn.Module: {parent}" for parent in parents or ("",)))


def names(hierarchy) -> list[str]:
    return [layer.name for layer in hierarchy.layers]


def site(hierarchy, name: str) -> list[str]:
    return [hierarchy.layers[index].name for index in hierarchy.sites[name].layers]


@pytest.mark.parametrize("path", [("Net",), ("Net#2", "features", "0"), ("Né t", 'a"b', "x:y(1)", "%41")])
def test_a_path_comes_back_from_its_label(path: tuple[str, ...]) -> None:
    assert path_of_label(label_of(path)) == path


def test_labels_give_their_layers_and_all_layers_above() -> None:
    labels = [
        label_of(path) for path in [("Net",), ("Net", "blocks", "0", "fc"), ("Net", "head"), ("Net", "blocks", "1")]
    ]
    made = layers_of_labels([*labels, "torchprof:!stopped", "aten::mm"], {labels[1]: "Linear"})
    assert names(made) == ["Net", "Net.blocks", "Net.blocks.0", "Net.blocks.0.fc", "Net.blocks.1", "Net.head"]
    assert [layer.kind for layer in made.layers] == ["Net", "", "", "Linear", "", ""]
    assert made.sites == {labels[0]: Site((0,)), labels[1]: Site((3,)), labels[2]: Site((5,)), labels[3]: Site((4,))}


def test_the_parameters_and_the_mode_of_a_layer_are_unknown() -> None:
    (layer,) = layers_of_labels([label_of(("Net#2",))], {}).layers
    assert (layer.path, layer.kind) == (("Net#2",), "Net")
    held = layer.params, layer.trainable_params, layer.param_bytes, layer.buffers, layer.buffer_bytes, layer.training
    assert held == (None,) * 6


def test_the_labels_of_a_wrapper_and_of_the_module_in_it_are_one_layer() -> None:
    outer, core = label_of(("Net", "fc")), label_of(("Net", "fc", "_orig_mod"))
    parallel, inside = ("DistributedDataParallel",), ("DistributedDataParallel", "module", "fc")
    made = layers_of_labels(
        [outer, core, label_of(parallel), label_of(inside), label_of(("Other", "module"))], {core: "Linear"}
    )
    assert names(made) == [
        "Net",
        "Net.fc",
        "DistributedDataParallel",
        "DistributedDataParallel.fc",
        "Other",
        "Other.module",
    ]
    assert made.layers[1].kind == "Linear"
    assert made.sites[outer] == Site((1,))
    assert made.sites[core] == Site((1,), outer)


def test_module_events_are_layers_under_their_callers() -> None:
    calls = [module("Net_0"), module("My_Block2_0", "Net_0"), module("Linear_0", "My_Block2_0"), module("Loss_0")]
    made = layers_of_modules([*calls, module("Linear_1", "Net_0")])
    assert names(made) == ["Net", "Net.My_Block2_0", "Net.My_Block2_0.Linear_0", "Net.Linear_1", "Loss"]
    assert [layer.kind for layer in made.layers] == ["Net", "My_Block2", "Linear", "Linear", "Loss"]
    assert traced_class_name("nn.Module: My_Block2_0") == "My_Block2"


def test_two_models_of_a_class_keep_their_numbers() -> None:
    assert names(layers_of_modules([module("Net_0"), module("Net_1"), module("D_0")])) == ["Net_0", "Net_1", "D"]


def test_a_module_with_several_callers_is_several_layers() -> None:
    calls = [module("Net_0"), module("A_0", "Net_0"), module("B_0", "Net_0"), module("ReLU_0", "A_0", "B_0", "")]
    made = layers_of_modules(calls)
    assert site(made, "nn.Module: ReLU_0") == ["Net.A_0.ReLU_0", "Net.B_0.ReLU_0"]
    first, second = (made.layers[index] for index in made.sites["nn.Module: ReLU_0"].layers)
    assert (first.shared_with, second.shared_with) == ((second.path,), (first.path,))


def test_recursive_modules_have_finitely_many_layers() -> None:
    assert names(layers_of_modules([module("Net_0", "", "Net_0")])) == ["Net"]
    assert names(layers_of_modules([module("A_0", "", "B_0"), module("B_0", "A_0")])) == ["A", "A.B_0"]


def test_modules_that_all_call_each_other_have_finitely_many_layers() -> None:
    everyone = [f"M_{number}" for number in range(12)]  # there are 12! orders of calls
    made = layers_of_modules([module(name, *(other for other in everyone if other != name)) for name in everyone])
    assert all(len(set(layer.path)) == len(layer.path) for layer in made.layers)
    assert len(made.layers) <= 4096 * len(everyone)
    assert len(warning_texts(made)) == 1


def test_a_wrapper_and_the_module_in_it_are_one_layer() -> None:
    calls = [module("DistributedDataParallel_0"), module("OptimizedModule_0", "DistributedDataParallel_0")]
    made = layers_of_modules([*calls, module("Net_0", "OptimizedModule_0"), module("Linear_0", "Net_0")])
    assert names(made) == ["Net", "Net.Linear_0"]
    assert made.sites["nn.Module: DistributedDataParallel_0"] == Site((0,))
    assert made.sites["nn.Module: OptimizedModule_0"] == Site((0,), "nn.Module: DistributedDataParallel_0")
    assert made.sites["nn.Module: Net_0"] == Site((0,), "nn.Module: OptimizedModule_0")


def test_ranges_are_layers_under_the_ranges_around_them() -> None:
    calls = [
        RangeCall("ProfilerStep#3", ("",)),
        RangeCall("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", ("ProfilerStep#3",)),
        RangeCall("## forward ##", ("ProfilerStep#3",)),
        RangeCall("DistributedDataParallel.forward", ("## forward ##",)),
        RangeCall("attention", ("DistributedDataParallel.forward", "## forward ##")),
        RangeCall("nothing", ("## forward ##",), has_ops=False),
        RangeCall("Optimizer.step#SGD.step", ("ProfilerStep#3",)),
    ]
    made = layers_of_ranges(calls)
    assert [layer.path for layer in made.layers] == [
        ("## forward ##",),
        ("## forward ##", "DistributedDataParallel.forward"),
        ("## forward ##", "DistributedDataParallel.forward", "attention"),
        ("## forward ##", "attention"),
    ]
    assert made.sites["attention"] == Site((2, 3))
    assert set(made.sites) == {"## forward ##", "DistributedDataParallel.forward", "attention"}


def test_numbers_of_repetitions_are_folded_and_numbers_of_parts_are_kept() -> None:
    steps = [f"epoch 2 step {number}" for number in range(21)]
    blocks = [f"block_{number}" for number in range(48)]
    calls = [RangeCall(step, ("",)) for step in steps] + [RangeCall(block, tuple(steps)) for block in blocks]
    made = layers_of_ranges(calls)
    assert names(made) == ["epoch 2 step N", *(f"epoch 2 step N.{block}" for block in blocks)]
    assert {made.sites[step] for step in steps} == {Site((0,))}
    assert len(layers_of_ranges(calls[:20]).layers) == 20
    assert names(layers_of_ranges([RangeCall(f"part{number}", ("",)) for number in range(129)])) == ["partN"]


def tower(*sizes: int) -> list[RangeCall]:
    """Ranges on several levels; each range of a level is inside each range of the level above."""
    calls, around = [], ("",)
    for level, size in enumerate(sizes):
        here = tuple(f"{chr(ord('a') + level)} {number}" for number in range(size))
        calls += [RangeCall(name, around) for name in here]
        around = here
    return calls


def test_a_range_in_many_places_is_a_layer_in_each_or_in_none() -> None:
    made = layers_of_ranges(tower(32, 8, 1))
    assert len(made.layers) == 32 + 32 * 8 + 32 * 8
    assert len({made.layers[index].path for index in made.sites["c 0"].layers}) == 256
    assert warning_texts(made) == ()
    crowded = layers_of_ranges(tower(64, 65, 1, 2))
    assert len(crowded.layers) == 64 + 64 * 65
    assert {"c 0", "d 0", "d 1"}.isdisjoint(crowded.sites)
    assert warning_texts(crowded) == (
        "Called in more than 4096 places, and not shown as layers: c 0, d 0, d 1. Their work counts in the "
        "layer around them.",
    )


def test_ranges_inside_a_left_out_range_are_left_out() -> None:
    calls = tower(64, 65, 1)
    made = layers_of_ranges([*calls, RangeCall("x", ("c 0",)), RangeCall("y", ("a 0",))])
    assert "x" not in made.sites
    assert site(made, "y") == ["a 0.y"]


def test_the_places_of_a_range_list_each_other_if_they_are_at_most_100() -> None:
    few, many = layers_of_ranges(tower(100, 1)), layers_of_ranges(tower(101, 1))
    assert {len(few.layers[index].shared_with) for index in few.sites["b 0"].layers} == {99}
    assert {len(many.layers[index].shared_with) for index in many.sites["b 0"].layers} == {0}


def test_a_trace_without_names_has_no_layers() -> None:
    for made in (layers_of_labels([], {}), layers_of_modules([]), layers_of_ranges([])):
        assert (made.layers, made.sites, warning_texts(made)) == ((), {}, ())
