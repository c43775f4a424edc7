"""The calls of layers, as the tree of a run shows them."""

from torchprof import Profile
from torchprof.run.words import FORWARD


def calls_of(prof: Profile, phase: str = FORWARD) -> dict[str, int]:
    """The number of calls of each layer, by its name."""
    trees = [prof.run.tree(phase, root) for root in range(len(prof.run.roots))]
    return {node.layer.name: node.calls for tree in trees for node in tree.walk()}
