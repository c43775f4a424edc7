"""What is computed from attributed events while they stream by: times, memory, steps, FLOPs, devices, ranks."""
