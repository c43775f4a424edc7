"""A trace file, read as a recording."""
