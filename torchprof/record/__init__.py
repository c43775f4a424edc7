"""All that touches torch: its profiler's sessions and events, labels on modules, the compiler, devices, the job."""
