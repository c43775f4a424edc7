"""The version of torchprof. It can be read without importing torch."""

from __future__ import annotations

__version__ = "3.0.0"
