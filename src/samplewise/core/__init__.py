"""Helpers that need torch alone and know nothing of per-sample gradients."""
