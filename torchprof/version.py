"""The version of torchprof, known without torch."""

__version__ = "2.7.0"
