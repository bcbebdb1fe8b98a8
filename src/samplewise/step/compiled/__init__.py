"""Compiled updates: tracing, compilation with Inductor, guards, and verification against the eager update."""
