"""Replacements for modules of the Poplar SDK that PopTorch programs also import."""
