"""What one cell of a table can say: a number, or why there is none."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from peers import Contender, Loop, norms_of, total_norm
from torch import Tensor
from workloads import Workload

# Right answers in float32 were seen up to 4e-4 apart, where a ReLU flips; 3e-5 otherwise.
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


Cells = dict[tuple[type[Contender], str], Result]  # of one workload: (contender, job) -> what to print


def failed(error: BaseException) -> Result:
    why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if isinstance(error, ImportError):
        return Result(word="-", why=why)
    return Result(word="refuses" if isinstance(error, NotImplementedError) else "error", why=why)


class Judge:
    """Compares what a job returned with the loop of one."""

    def __init__(self, work: Workload):
        self.loop = Loop(work)

    @functools.cached_property
    def norms(self) -> Tensor:
        return self.loop.norms()

    @functools.cached_property
    def sum_norm(self) -> Tensor:
        return total_norm(self.loop.clipped_sum())

    def distance(self, job: str, answer: Tensor | list[Tensor]) -> float:
        """The largest relative error. Sums and rows are compared by their norms: a peer may reorder the parameters."""
        if job.startswith("clipped_sum"):
            found, expected = total_norm(answer), self.sum_norm
        else:
            found, expected = (answer if job == "norms" else norms_of(answer)), self.norms
        if found.shape != expected.shape:
            return float("inf")
        return ((found - expected).abs() / expected).max().item()

    def verdict(self, job: str, answer: Tensor | list[Tensor]) -> Result | None:
        """None where the answer is right."""
        distance = self.distance(job, answer)
        return None if distance <= TOLERANCE else Result(word="wrong", why=f"off by {distance:.1%}")


def jobs_of(contender: type[Contender]) -> list[str]:
    return [job for job in JOBS if hasattr(contender, job)]
