"""Ranks compared: who is slow, who waits, and whether that may be chance."""
