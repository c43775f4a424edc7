"""The early DeepSpeed pytorch-profiler as a drop-in, and DeepSpeed's profiler settings for any training loop.

The printed text is the model's repr with figures at each module: parameters, multiply-adds and time, the shares of
these, and TFLOPS = 2 · multiply-adds / time / 10¹². The tool's "flops" are multiply-adds ("Mac").
docs/coming-from-deepspeed.md says what counts, and where torchprof's own count differs.
"""

from __future__ import annotations

from torchprof.integrations.conventions import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from torchprof.integrations.deepspeed.profiler import add_profile_methods, get_model_profile
from torchprof.integrations.deepspeed.settings import StepProfiler, from_config

__all__ = [
    "StepProfiler",
    "add_profile_methods",
    "duration_to_string",
    "flops_to_string",
    "from_config",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]
