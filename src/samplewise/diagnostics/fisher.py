"""`sw.fisher`: diagonal of the Fisher matrix over a dataset."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.losses import LossFn
from samplewise.core.means import WeightedMean
from samplewise.core.microbatch import Microbatch
from samplewise.core.state import eval_mode
from samplewise.scan import scan


def fisher(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Any],
    *,
    microbatch: Microbatch = "auto",
) -> dict[str, Tensor]:
    """Diagonal of the empirical Fisher matrix: parameter name -> mean over samples of the squared gradient.

    Takes about as long as an epoch, in evaluation mode; sums are accumulated in float64. For the true Fisher matrix,
    whose labels are drawn from the model, sample them in `loss_fn`: labels = Categorical(logits=logits).sample().

    microbatch: as in `sw.scan`
    """
    means: dict[str, WeightedMean] = defaultdict(lambda: WeightedMean(torch.float64))
    with eval_mode(model):
        for _, g in scan(model, loss_fn, loader, microbatch=microbatch):
            for name, squares in g.sum_of_squares().items():
                means[name].add_sum(squares, len(g))
    if not means:
        raise ValueError(
            "the loader must yield at least one batch; found none. Pass a loader or a list: an iterator is exhausted "
            "after one pass."
        )
    dtypes = {name: p.dtype.to_real() for name, p in model.named_parameters()}
    return {name: torch.as_tensor(mean.quotient(), dtype=dtypes[name]) for name, mean in means.items()}
