"""The autograd graph: its nodes, structure, saved tensors and hooks."""
