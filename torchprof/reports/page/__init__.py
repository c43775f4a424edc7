"""The HTML page: its data, and what it is made of."""
