"""BERT and its two pretraining tasks: masked words, and whether one sentence follows another."""
