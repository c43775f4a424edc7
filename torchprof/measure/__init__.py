"""Compute times, memory, steps, FLOPs, device times and rank times from attributed events while they stream by."""
