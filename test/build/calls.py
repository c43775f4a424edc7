"""The forward calls of layers, as the tree of a run shows them."""

from torchprof import Profile


def calls_of(prof: Profile, root: int = 0) -> dict[str, int]:
    """The number of forward calls of each layer of a model, by the layer's name. ``root``: the number of the model."""
    return {node.layer.name: node.calls for node in prof.run.tree(root=root).walk()}
