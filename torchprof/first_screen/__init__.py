"""What is read first: the headline, the verdict and the overview."""
