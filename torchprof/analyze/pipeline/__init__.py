"""Pipelines of stages: their figures, their idle time, and the slow stage."""
