"""ipurun: train PyTorch models on Graphcore IPUs, or on a CPU, from declarative config."""

__version__ = "0.1.0"
