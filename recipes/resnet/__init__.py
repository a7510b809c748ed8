"""Residual networks for images, from CIFAR-10 to ImageNet."""
