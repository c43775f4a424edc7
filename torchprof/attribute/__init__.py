"""The rule of ownership: for which layer, and in which phase, each event worked. It does not import torch."""
