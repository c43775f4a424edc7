"""Code that torch.compile compiled: its regions, its graphs, and the layers of their kernels."""
