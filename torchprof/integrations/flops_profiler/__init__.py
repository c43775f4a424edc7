"""flops-profiler as a drop-in: its functions, its convention of counting, its text.

``get_model_profile`` and ``FlopsProfiler`` have the arguments of flops-profiler 0.1.2 and of DeepSpeed's, and print the
same three parts. docs/coming-from-flops-profiler.md says which figures differ, and why.
"""

from __future__ import annotations

from torchprof.integrations.flops_profiler.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
