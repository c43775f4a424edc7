"""The layers of a run as a tree: indices, parents, children and sums over what is below."""

from __future__ import annotations

import pickle
from dataclasses import replace

from build.hand_made import row, run_of

from torchprof.run.layers import Layer, Layers
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED, OUTSIDE

PATHS = [("Net",), ("Net", "a"), ("Net", "a", "0"), ("Net", "b"), ("Other",), ("Other", "c")]
LAYERS = Layers(Layer(path, path[-1]) for path in PATHS)


def test_parents_children_and_roots_of_layers() -> None:
    assert LAYERS.index_of == {path: index for index, path in enumerate(PATHS)}
    assert LAYERS.parent == (OUTSIDE, 0, 1, 0, OUTSIDE, 4)
    assert LAYERS.children == ([1, 3], [2], [], [], [5], [])
    assert LAYERS.roots == (0, 4)
    assert [*map(LAYERS.lineage, (2, 4, OUTSIDE, NOT_SELECTED))] == [(0, 1, 2), (4,), (OUTSIDE,), (NOT_SELECTED,)]
    assert [LAYERS.at_or_below(tops) for tops in ([1], [3, 4], [OUTSIDE])] == [{1, 2}, {3, 4, 5}, set()]


def test_roll_up_adds_the_layers_below() -> None:
    assert LAYERS.roll_up([1, 2, 4, 8, 16, 32]) == [15, 6, 4, 8, 48, 32]
    assert LAYERS.roll_up([1, 2, 4, 8, 16, 32, 64, 128])[6:] == [64, 128]  # of no layer
    assert LAYERS.roll_up([False, False, True, False, False, False], max) == [True, True, True, False, False, False]


def test_roll_up_by_phase_keeps_phases_apart() -> None:
    of_phases = {(2, FORWARD): 4, (0, FORWARD): 1, (3, BACKWARD): 8, (OUTSIDE, FORWARD): 64}
    assert LAYERS.roll_up_by_phase(of_phases) == {
        (0, FORWARD): 5,
        (1, FORWARD): 4,
        (2, FORWARD): 4,
        (0, BACKWARD): 8,
        (3, BACKWARD): 8,
        (OUTSIDE, FORWARD): 64,
    }


def test_layers_are_a_tuple() -> None:
    assert tuple(LAYERS) == LAYERS
    assert Layers.of(LAYERS) is LAYERS
    assert pickle.loads(pickle.dumps(LAYERS)) == LAYERS


def test_a_run_makes_layers_of_a_tuple() -> None:
    run = run_of([row(0)])
    assert isinstance(replace(run, layers=tuple(run.layers)).layers, Layers)
    assert replace(run).layers is run.layers


def test_a_tree_has_only_the_layers_of_its_model() -> None:
    run = run_of([row(index, cpu_ns=2**index) for index in range(6)], layers=LAYERS)
    for root, total in ((0, 15), (1, 48)):
        nodes = [*run.tree(None, root).walk()]
        assert [node.layer.path for node in nodes] == [path for path in PATHS if path[0] == PATHS[4 * root][0]]
        assert nodes[0].total.cpu_ns == total
    run.tree().children.clear()
    assert len(run.tree().children) == 2  # each call makes nodes of its own
