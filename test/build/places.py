"""Where things are that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "test" / "data"
TRACES = ROOT.parent / "shared" / "traces"
"""Real traces, which not everybody has: tests of them are skipped without."""
