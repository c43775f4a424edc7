"""The FLOPs estimator: a formula for each operator, and the count of a recording."""
