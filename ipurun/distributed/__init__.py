"""Runs of several processes: launching them and communicating between them."""
