"""Recipes out of the files and command lines of other tools."""
