"""Residual networks for pictures, from CIFAR-10 to ImageNet."""
