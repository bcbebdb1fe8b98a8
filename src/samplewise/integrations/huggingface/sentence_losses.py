"""Losses of sentence-transformers: those of single samples, and those that compare samples.

A sample has several texts: a pair, a triplet, a query with candidates. Their columns are embedded in one forward pass
each, or in a common one, whose rows i, i + B, i + 2B, ... are those of sample i.

Most losses are sums over samples. Others compare the samples of a batch with each other: in-batch negatives, rankings
such as CoSENT, hard triplets. The gradient of one sample is not defined for these. In the matrix of second derivatives
with respect to the outputs, they have entries other than zero between rows of different samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samplewise.engine.ownership.independence import RULE
from samplewise.errors import GraphError, SamplesInteractError


def check_sentence_loss(
    criterion: nn.Module, loss: Tensor, model: nn.Module, outputs: Sequence[Tensor], owners: Sequence[Tensor]
) -> None:
    """Raise an error if the gradients of single samples are not known. `owners`: samples of the rows of each output."""
    of_model = set(map(id, model.parameters()))
    for name, p in criterion.named_parameters():
        if p.requires_grad and id(p) not in of_model:
            raise GraphError(
                "PerSample needs a loss whose trained parameters are those of the model; found the parameter "
                f"{name!r} of {type(criterion).__name__}. Use a loss without parameters."
            )
    if compares_samples(loss, outputs, owners):
        raise SamplesInteractError(
            f"{RULE}; found {type(criterion).__name__}, which compares samples of a batch with each other, as in-batch "
            "negatives do.",
            (
                "use a loss of single samples, such as CosineSimilarityLoss, ContrastiveLoss, TripletLoss or "
                "MarginMSELoss",
                "record which samples were used with sw.Ledger(norms=False), without transforms",
            ),
        )


def compares_samples(loss: Tensor, outputs: Sequence[Tensor], owners: Sequence[Tensor]) -> bool:
    """True if the gradient with respect to rows of one sample depends on rows of another one.

    Two samples differ in a bit of their numbers: for each bit, the gradient at the samples that have it set is
    differentiated with respect to the others.
    """
    gradients = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
    used = [(c, z, owner) for c, z, owner in zip(gradients, outputs, owners, strict=True) if c is not None]
    generator = torch.Generator().manual_seed(0)  # a generator of its own: does not change the user's random state
    directions = [torch.rand(c.shape, generator=generator).to(c) for c, _, _ in used]
    for bit in range((max(int(owner.max()) for owner in owners)).bit_length()):
        total = sum(
            ((c * direction).flatten(1).sum(1) * ((owner >> bit) & 1)).sum()
            for (c, _, owner), direction in zip(used, directions, strict=True)
        )
        if not isinstance(total, Tensor) or not total.requires_grad:  # the loss is linear
            return False
        seconds = torch.autograd.grad(total, [z for _, z, _ in used], retain_graph=True, allow_unused=True)
        for second, (_, _, owner) in zip(seconds, used, strict=True):
            if second is not None and bool(second[(owner >> bit) & 1 == 0].any()):
                return True
    return False
