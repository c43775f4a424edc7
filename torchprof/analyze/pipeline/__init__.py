"""Pipelines of stages: their figures, their idle time, and better splits of the model."""
