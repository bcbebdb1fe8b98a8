"""The projection of `g.project` as a matrix, for comparison with plain products."""

import torch

import samplewise as sw


def projection(model, dim, seed=0):
    """Matrix (trained parameters, dim): rows of the identity, projected."""
    parts = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            identity = torch.eye(p.numel(), dtype=p.dtype).view(-1, *p.shape)
            q = torch.zeros_like(p, requires_grad=True)
            parts.append(sw.gradients((identity * q).flatten(1).sum(1), {name: q}).project(dim, seed))
    return torch.cat(parts)
