"""A run as a value: what the other packages record, sum and report. Its sums and its file are here, too."""
