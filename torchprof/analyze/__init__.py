"""Questions to one run."""
