"""A GPT-2 decoder that learns to write, character by character, from a text that ships with ipurun."""
