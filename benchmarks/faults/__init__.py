"""Scripts with one planted fault each, and what the first screen of a profiler says about it."""
