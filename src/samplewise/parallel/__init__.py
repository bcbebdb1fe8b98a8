"""Collectives and wrappers of torch.distributed."""
