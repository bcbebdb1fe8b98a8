"""Reference direction with which per-sample gradients are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from samplewise.errors import TransformError

Direction = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Reference:
    """Direction in parameter space, recomputed for every window if `source` is a function."""

    source: Direction | Callable[[], Direction]
    unit: bool  # whether the direction is scaled to norm 1

    def __post_init__(self) -> None:
        if not callable(self.source) and not isinstance(self.source, Mapping):
            raise TransformError(
                "reference must be a dict name -> tensor, or a function that returns one; "
                f"found {type(self.source).__name__}."
            )

    def direction(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameter name -> tensor of the parameter's shape; zero if the direction to be scaled is zero."""
        given = self.source() if callable(self.source) else self.source
        missing = [name for name, p in parameters.items() if name not in given or given[name].shape != p.shape]
        if missing:
            raise TransformError(
                "the reference must have a tensor of the same name and shape for every trained parameter; found none "
                f"for {missing[0]!r}. Compute it with sw.gradients(losses, model).mean()."
            )
        direction = {name: given[name].detach() for name in parameters}
        if not self.unit:
            return direction
        length = torch.stack([d.norm() for d in direction.values()]).norm()
        return {name: torch.where(length > 0, d / length, 0.0) for name, d in direction.items()}
