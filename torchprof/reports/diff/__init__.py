"""The reports of a comparison of two runs."""
