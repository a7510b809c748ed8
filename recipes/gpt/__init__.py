"""A decoder of GPT-2's kind that learns to write, character by character, from a text that ships with ipurun."""
