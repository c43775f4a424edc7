"""The reports of two runs that are compared."""
