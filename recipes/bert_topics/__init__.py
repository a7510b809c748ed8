"""BERT fine-tuned to tell the topic of a sentence."""
