"""The memory report."""
