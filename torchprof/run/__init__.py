"""The value that everything on the left makes and everything on the right reads: one run, its sums and its file."""
