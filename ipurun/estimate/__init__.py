"""Estimate the memory and speed of a plan on IPUs. Only `plan_estimate`, which traces the model, imports torch."""
