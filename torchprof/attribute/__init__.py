"""The rule of ownership: the layer and phase of each event. This package does not import torch."""
