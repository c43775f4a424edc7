"""What a layer is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """What a layer is, not what it did.

    ``path``: root class name, then attribute names. ``kind``: class name. ``params``, ``trainable_params`` and
    ``param_bytes`` count the parameters that the layer itself holds (not its children), each at the first layer that
    holds it; None where a lazy layer has not made them yet, or a quantised one has packed them. ``dtype_bytes`` are the
    same bytes by type ("float32"), ``buffers`` and ``buffer_bytes`` the elements and bytes of its buffers. Shapes are
    those of the first forward call: one tuple for each tensor, with -1 for a size that is no number (nested tensors);
    ``()`` where it was not called. ``same_shapes``: of a model, whether all its forward calls had inputs of these
    shapes, None where that is not known, and for the layers below it (see ``torchprof.varying``). ``output_bytes`` is
    how large the tensors are that the first call returned, None where that is not known. ``settings`` are what a layer
    of torch's own says of itself, as ``print(model)`` has it ("3, 64, kernel_size=(7, 7), stride=(2, 2)"); empty for
    classes of others, of which nobody knows what they say.
    A trace that was read without the model tells what ran, not what on: ``kind`` may be empty then, and what the layer
    holds, its buffers and whether it was in ``training`` mode are None.
    ``compiled``: inside a ScriptModule or a module under torch.compile, where it may run without being called.
    ``tied``: it holds parameters that count at another layer. ``recursive``: it was called inside of its own calls, so
    that not each of them is one by itself.
    ``shared_with``: the other paths of the same module. ``ranks``: those that have it, ascending; ``()`` for all that
    are in the run.
    """

    path: tuple[str, ...]
    kind: str
    params: int | None = 0
    trainable_params: int | None = 0
    param_bytes: int | None = 0
    dtype_bytes: tuple[tuple[str, int], ...] = ()
    buffers: int | None = 0
    buffer_bytes: int | None = 0
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    same_shapes: bool | None = None
    output_bytes: int | None = None
    training: bool | None = True
    settings: str = ""
    compiled: bool = False
    tied: bool = False
    recursive: bool = False
    shared_with: tuple[tuple[str, ...], ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The path as a dotted string."""
        return ".".join(self.path)
