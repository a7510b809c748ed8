"""Vision transformers, from handwritten digits to ImageNet."""
