"""Reports on layers."""
