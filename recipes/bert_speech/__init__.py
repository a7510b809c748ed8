"""BERT fine-tuned to tell direct speech from the rest of a text."""
