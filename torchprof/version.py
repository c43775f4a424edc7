"""The version of torchprof, known without torch."""

from __future__ import annotations

__version__ = "2.8.0"
