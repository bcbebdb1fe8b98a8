"""Differentially private training: Poisson sampling, noise streams, accounting of the privacy spent."""
