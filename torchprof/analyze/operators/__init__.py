"""Reports on operators, kernels and the Python between them."""
