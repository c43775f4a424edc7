"""Interfaces for other tools, one file or package each. No other package of torchprof imports them."""

from __future__ import annotations
