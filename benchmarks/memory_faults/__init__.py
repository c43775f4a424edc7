"""Scripts with one planted fault of memory each, and what the first screen of ``torchprof run --memory`` says of it."""
