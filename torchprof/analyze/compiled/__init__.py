"""Compiled regions and their report."""
