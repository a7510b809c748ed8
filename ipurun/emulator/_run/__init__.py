"""Compile captured graphs and run them."""
