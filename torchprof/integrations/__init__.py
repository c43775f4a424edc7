"""Interfaces for other tools, and what several of them share. No other package of torchprof imports them."""

from __future__ import annotations
