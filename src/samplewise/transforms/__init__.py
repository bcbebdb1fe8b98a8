"""Coefficients per sample, between "each sample's gradient is known" and "they are summed"; noise on the sum."""
