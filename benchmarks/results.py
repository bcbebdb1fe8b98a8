"""Cells of the benchmark tables: a number, or the reason why there is none."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from peers import Contender, Loop, norms_of, total_norm
from torch import Tensor
from workloads import Workload

# Correct results in float32 differ by up to 4e-4 if a ReLU flips, otherwise by up to 3e-5.
TOLERANCE = 1e-3
JOBS = {
    "norms": "norms",
    "clipped_sum": "clipped sum",
    "clipped_sum_twice": "clipped sum, `twice`",
    "full": "full",
}


@dataclass(frozen=True)
class Result:
    value: float | None = None
    word: str = ""  # "-", "refuses", "error", "wrong"
    why: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return self.word
        return f"{self.value:.2f}" if self.value < 10 else f"{self.value:.0f}"


Cells = dict[tuple[type[Contender], str], Result]  # of one workload: (contender, job) -> result


def failed(error: BaseException) -> Result:
    why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if isinstance(error, ImportError):
        return Result(word="-", why=why)
    return Result(word="refuses" if isinstance(error, NotImplementedError) else "error", why=why)


class Judge:
    """Compare the result of a job with the loop over single samples."""

    def __init__(self, work: Workload):
        self.loop = Loop(work)

    @functools.cached_property
    def norms(self) -> Tensor:
        return self.loop.norms()

    @functools.cached_property
    def sum_norm(self) -> Tensor:
        return total_norm(self.loop.clipped_sum())

    def distance(self, job: str, answer: Tensor | list[Tensor]) -> float:
        """Largest relative error. Sums and rows are compared by norm, because a library may reorder the parameters."""
        if job.startswith("clipped_sum"):
            found, expected = total_norm(answer), self.sum_norm
        else:
            found, expected = (answer if job == "norms" else norms_of(answer)), self.norms
        if found.shape != expected.shape:
            return float("inf")
        return ((found - expected).abs() / expected).max().item()

    def verdict(self, job: str, answer: Tensor | list[Tensor]) -> Result | None:
        """None if the result is correct."""
        distance = self.distance(job, answer)
        return None if distance <= TOLERANCE else Result(word="wrong", why=f"off by {distance:.1%}")
