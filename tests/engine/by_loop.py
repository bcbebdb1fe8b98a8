"""Comparison of the engine with the plain loop: one backward pass per sample."""

import torch
from torch import nn

import samplewise as sw
from samplewise.engine import backward
from samplewise.engine.strategies import jacobian_rows


def rows_by_loop(losses, parameters):
    """name -> (B, *shape)"""
    if isinstance(parameters, nn.Module):
        parameters = dict(parameters.named_parameters())
    return jacobian_rows(losses, parameters)


def norms_by_loop(losses, parameters):
    """(B,)"""
    rows = rows_by_loop(losses, parameters).values()
    return torch.stack([torch.linalg.vector_norm(r.reshape(len(r), -1).double(), dim=1) for r in rows]).norm(dim=0)


def assert_as_loop(losses, parameters, rtol=1e-9, atol=1e-12, **options):
    """Norms, rows and the sum, in this order, from one `sw.gradients(losses, parameters)`."""
    g = sw.gradients(losses, parameters, **options)
    rows = rows_by_loop(losses, parameters)
    torch.testing.assert_close(g.norms().double(), norms_by_loop(losses, parameters), rtol=rtol, atol=atol)
    full = g.full()
    sums = g.sum()
    for name, expected in rows.items():
        torch.testing.assert_close(full[name], expected, rtol=rtol, atol=atol)
        torch.testing.assert_close(sums[name], expected.sum(0), rtol=rtol, atol=atol)


def count_passes(monkeypatch):
    """Return a list that gets an entry for each backward pass of the engine."""
    passes = []

    def counted(run):
        return lambda *args, **options: passes.append(1) or run(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", counted(torch.autograd.grad))
    monkeypatch.setattr(backward, "_engine_run_backward", counted(backward._engine_run_backward))
    return passes
