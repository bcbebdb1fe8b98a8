"""Overlap of the all-reduce of gradients with the backward pass that completes them, as in DistributedDataParallel.

    ask(...)          start a small all-reduce before this rank's last pass of a window: does this window end now?
    ready(p)          during the pass: `p.grad` is complete. Starts the next bucket when all of its parameters are
    start_buckets()   after the pass: start the buckets that are left
    sums()            wait for the buckets

Every rank asks once for each window, also a rank without samples; the answer is the same on all ranks. If it is yes,
every rank starts all buckets, in the same order: a rank that fails in its pass sends zeros before it sends its error.
If it is no, because samples are missing or the update is skipped, no rank starts any.

A gradient is moved to its bucket: `.grad` is None from then on. A gradient that cannot be in a bucket (sparse), or that
is added later (the parameter is used by several reentrant checkpoints), stays in `.grad` and is summed afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.parallel import collectives

Decision = Callable[[float, float, float], bool]


class Question(NamedTuple):
    """Small all-reduce of the number of ranks that skip the window, of samples and of ended loaders."""

    message: collectives.Scalars
    decide: Decision  # function of the three sums


class Bucket(NamedTuple):
    parameters: list[Tensor]
    started: collectives.Started


class Overlap:
    """Buckets of the gradients of one window. `sent`: ids of the parameters whose gradient is in a bucket."""

    def __init__(self) -> None:
        self._expected: list[Tensor] = []  # parameters that had a dense gradient on any rank in the last window
        self._lock = threading.Lock()  # autograd has one thread for each accelerator
        self.reset()

    def __reduce__(self) -> tuple[type[Overlap], tuple[()]]:
        """A copy knows no parameters yet."""
        return Overlap, ()

    def reset(self) -> None:
        """Forget the buckets of this window."""
        self.sent: set[int] = set()
        self._question: Question | None = None
        self._agreed: bool | None = None
        self._empty = False  # this rank has no samples
        self._left: list[list[Tensor]] = []  # buckets that are not started yet
        self._unready: set[int] = set()  # ids of the parameters that are not ready yet
        self._buckets: list[Bucket] = []

    def expect(self, parameters: Iterable[Tensor]) -> None:
        """Set the parameters that will have a gradient in the next window, in the order of the optimizer; equal on all
        ranks. The first ones are used first, so that their gradients are ready last.
        """
        self._expected = list(parameters)[::-1]

    def ask(self, skips: bool, samples: int, ended: bool, decide: Decision) -> None:
        """Ask whether the ranks exchange gradients now. No effect if this rank has asked already, or if all gradients
        fit one bucket, which would start after the pass. Without samples, `.grad` is ignored: it may be that of the
        last update.
        """
        buckets = [] if self._question is not None else list(collectives.buckets(self._expected))
        if len(buckets) > 1:
            self._question = Question(collectives.start_all_reduce_scalars(skips, samples, ended), decide)
            self._left = buckets
            self._empty = samples == 0
            self._unready = set(map(id, self._expected))

    def ready(self, p: Tensor) -> None:
        """Start the buckets whose parameters are all ready, unless the answer has not arrived yet."""
        with self._lock:
            self._unready.discard(id(p))
            question = self._question
            if question is None or not (self._agreed is not None or question.message.started.done()):
                return
            while self._answer(question) and self._left and self._unready.isdisjoint(map(id, self._left[0])):
                self._start_next()

    def start_buckets(self, error: Exception | None = None) -> None:
        """Start the buckets that are left, if the ranks have agreed. Raises if a rank failed before it asked.
        `error`: that of this rank, if it has failed.
        """
        if self._question is None:
            return
        self._question.message.check(error)
        while self._answer(self._question) and self._left:
            self._start_next()

    def sums(self) -> dict[int, Tensor]:
        """Sums over ranks by the id of the parameter; waits for them, and forgets the buckets."""
        sums: dict[int, Tensor] = {}
        for parameters, started in self._buckets:
            parts = started.result().split([p.numel() for p in parameters])
            for p, part in zip(parameters, parts, strict=True):
                total = part.view(p.shape)
                sums[id(p)] = total if p.is_contiguous() else torch.empty_like(p).copy_(total)
        self.reset()
        return sums

    def _answer(self, question: Question) -> bool:
        if self._agreed is None:
            failed, *numbers = question.message.sums
            self._agreed = not failed and question.decide(*numbers)
        return self._agreed

    @torch.no_grad()
    def _start_next(self) -> None:
        parameters = self._left.pop(0)
        flat = [self._moved(p) for p in parameters]
        started = collectives.start_all_reduce(flat[0] if len(flat) == 1 else torch.cat(flat))
        self._buckets.append(Bucket(parameters, started))

    def _moved(self, p: Tensor) -> Tensor:
        """The gradient as a vector, taken from `p.grad`; zeros if there is none that fits."""
        gradient = None if self._empty else p.grad
        if gradient is None or gradient.layout is not torch.strided or gradient.dtype is not p.dtype:
            return p.new_zeros(p.numel())
        self.sent.add(id(p))
        p.grad = None
        return gradient.reshape(-1)
