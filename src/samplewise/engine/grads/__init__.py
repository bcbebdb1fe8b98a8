"""Representations of the per-sample gradients of one parameter."""
