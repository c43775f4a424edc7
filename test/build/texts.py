"""Figures as the text of a table's cell."""

from torchprof.run import formats


def format_time(ns: float) -> str:
    return str(formats.format_time(ns))


def format_memory(nbytes: int) -> str:
    return str(formats.format_memory(nbytes))


def format_count(number: float) -> str:
    return str(formats.format_count(number))
