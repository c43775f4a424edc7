"""Questions to one run, or to two."""
