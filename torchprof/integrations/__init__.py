"""Other tools' interfaces over torchprof's runs: one file for each. Nothing in the core imports this."""

from __future__ import annotations
