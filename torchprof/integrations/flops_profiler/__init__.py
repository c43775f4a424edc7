"""flops-profiler's interface over torchprof: its calls, its convention of counting, its page.

``get_model_profile`` and ``FlopsProfiler`` take what those of flops-profiler 0.1.2 and of DeepSpeed's flops profiler
take, and print the same three parts under the same labels. docs/coming-from-flops-profiler.md says which figures differ
and why.
"""

from __future__ import annotations

from torchprof.integrations.flops_profiler.model_profile import get_model_profile
from torchprof.integrations.flops_profiler.profiler import FlopsProfiler

__all__ = ["FlopsProfiler", "get_model_profile"]
