"""Two runs compared, layer by layer."""
