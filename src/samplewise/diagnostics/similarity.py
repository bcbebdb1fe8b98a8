"""Cosine similarity of per-sample gradients: agreeing pairs, opposing pairs and clusters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samplewise.core.text import SHOWN, Table, Tabular, plural
from samplewise.engine.gradients import Gradients, check_gradients

Pair = tuple[int, int, float]  # two samples, and the cosine between their gradients


@dataclass(frozen=True, repr=False)
class Similarity(Tabular):
    """Cosines between per-sample gradients.

    matrix     (B, B), or (B, B2) for two sets of samples; 0 for a gradient of norm zero
    symmetric  True if rows and columns are the same samples, so that each pair counts once
    """

    matrix: Tensor
    symmetric: bool

    def most_similar(self, k: int = 10) -> list[Pair]:
        """The k pairs (i, j, cosine) with the largest cosines, in descending order."""
        return self._pairs(k, largest=True)

    def most_opposed(self, k: int = 10) -> list[Pair]:
        """The k pairs (i, j, cosine) with the smallest cosines, in ascending order; negative cosines only."""
        return [pair for pair in self._pairs(k, largest=False) if pair[2] < 0]

    def clusters(self, threshold: float = 0.5) -> list[list[int]]:
        """Average-linkage clusters as lists of samples, the largest first.

        The two clusters with the highest mean cosine between their samples are merged, until no mean exceeds the
        threshold. Deterministic; takes O(B³) time.
        """
        if not self.symmetric:
            raise ValueError("clusters need one set of samples; found two sets. Call similarity(g) for one of them.")
        groups = [[i] for i in range(len(self.matrix))]
        means = self.matrix.detach().double().clone().fill_diagonal_(-torch.inf)
        while groups:
            flat_index = int(means.argmax())
            i, j = sorted(divmod(flat_index, len(means)))
            if not means[i, j] > threshold:
                break
            # Average linkage: the means of a merged cluster are those of its parts, weighted by their sizes.
            a, b = len(groups[i]), len(groups[j])
            means[i] = (a * means[i] + b * means[j]) / (a + b)
            means[:, i] = means[i]
            means[j] = means[:, j] = means[i, i] = -torch.inf
            groups[i] = sorted(groups[i] + groups[j])
            groups[j] = []
        return sorted((group for group in groups if group), key=lambda group: (-len(group), group))

    def _table(self) -> Table:
        rows, columns = self.matrix.shape
        size = plural(rows, "sample") if self.symmetric else f"{rows} × {columns} samples"
        pairs = dict.fromkeys([*self.most_similar(SHOWN), *reversed(self.most_opposed(SHOWN))])
        cells = [(str(i), str(j), f"{cosine:.3f}") for i, j, cosine in pairs]
        return Table(("sample", "sample", "cosine"), cells, f"gradients of {size}: most similar and most opposed pairs")

    def _pairs(self, k: int, largest: bool) -> list[Pair]:
        rows, columns = self.matrix.shape
        indices = torch.triu_indices(rows, columns, 1) if self.symmetric else torch.ones(rows, columns).nonzero().T
        i, j = indices.to(self.matrix.device)
        values = self.matrix[i, j].detach()
        order = values.argsort(descending=largest, stable=True)[:k]
        return list(zip(i[order].tolist(), j[order].tolist(), values[order].tolist(), strict=True))


def similarity(g: Gradients, other: Gradients | None = None) -> Similarity:
    """Cosine similarity of all pairs of per-sample gradients of `g`, or of those of `g` with those of `other`."""
    check_gradients(g)
    gram = g.gram(other)
    norms = gram.diagonal().clamp(min=0).sqrt() if other is None else g.norms()
    other_norms = norms if other is None else other.norms()
    products = norms[:, None] * other_norms
    cosines = torch.where(products > 0, gram / products.where(products > 0, 1), 0).clamp(-1, 1)
    return Similarity(cosines, symmetric=other is None)
