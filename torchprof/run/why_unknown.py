"""Why the layers of kernels of torch.compile are unknown, in words."""

from __future__ import annotations

from torchprof.run.words import (
    AMBIGUOUS_MODULE,
    COMPILED_BEFORE,
    FROZEN_PARAMETER,
    GRAPH_NOT_READ,
    IN_CPP,
    LAYERS_NOT_RECORDED,
    NESTED_GRAPHS,
    OTHER_MODULE,
    REPLACED_PARAMETER,
    SHARED_PARAMETER,
    UNKNOWN_KERNEL,
    UNKNOWN_MODULE,
)

COMPILE_IN_BLOCK = (
    "compile the model inside the block (call torch.compiler.reset() before the block, or start a new process); "
    "warmup=1 leaves the first call, which compiles, out of the figures"
)
"""How to have the layers of compiled code recorded."""

WHY_UNKNOWN = {
    COMPILED_BEFORE: f"they were compiled before the block. To see their layers, {COMPILE_IN_BLOCK}",
    LAYERS_NOT_RECORDED: f"these were not recorded. To record them, use compile_layers=True, and {COMPILE_IN_BLOCK}",
    NESTED_GRAPHS: "they are in graphs inside another graph (torch.cond, torch.while_loop, nested regions)",
    GRAPH_NOT_READ: "their graphs could not be read during compilation",
    UNKNOWN_KERNEL: "their names are in no graph, or several kernels have the same name",
    UNKNOWN_MODULE: "torch does not record which module their operations come from",
    OTHER_MODULE: "they belong to modules that are not profiled",
    AMBIGUOUS_MODULE: "the compiled function may have called any of several modules of one class",
    SHARED_PARAMETER: "their parameter is of several layers, or of an embedding that other code multiplies with",
    REPLACED_PARAMETER: "their parameter was replaced or freed before the block ended",
    FROZEN_PARAMETER: "torch._inductor.config.freezing is on, and the compiler made their weights anew",
    IN_CPP: "torch._inductor.config.cpp_wrapper is on, and its calls of libraries have no events",
}
"""Why the layers of kernels of torch.compile are unknown, by the reason in the name of their row."""
