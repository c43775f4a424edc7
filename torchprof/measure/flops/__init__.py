"""The FLOPs estimator: a formula for each operator, and what is counted for a recording."""
