"""Transforms of per-sample gradients: one coefficient per sample before the sum, and noise on the sum."""
