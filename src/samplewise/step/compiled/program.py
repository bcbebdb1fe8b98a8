"""A compiled update, bound to the tensors that it reads and changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samplewise.batches import leaves
from samplewise.step.compiled import inductor
from samplewise.step.compiled.cells import cells
from samplewise.step.compiled.decompositions import DECOMPOSITIONS
from samplewise.step.compiled.tracing import Tensors
from samplewise.step.compiled.whole import Inputs, Whole
from samplewise.step.parts import Part

NOMINAL = 64  # rows of a batch, for the compiler
SMALL = 2**18  # parameters up to which a second thread costs more than it brings


class Program:
    """Reads batches by row. An update that is not finite changes nothing."""

    def __init__(self, whole: Whole, tensors: Tensors, example: Any):
        self.whole, cohorts = whole, whole.cohorts
        width = 0 if cohorts is None else cohorts.width
        self._cells = [
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(whole.block, dtype=torch.float64),
            torch.zeros(whole.block * width, dtype=torch.float64),
        ]
        self._start, self._flags, self._numbers = map(cells, self._cells)
        self._written: list[float] = []
        states = self.states = [] if cohorts is None else list(cohorts.states.values())
        self._trained = tensors.trained
        bound = Inputs(
            [p.detach() for p in tensors.trained.values()],
            [s.detach() for s in states],
            [t.detach() for t in tensors.others],
            whole.backward.constants,
            self._cells,
            [],
        )
        self._bound, self._batch = bound.flat(), list[Tensor]()
        self._changed = [
            *(tensors.trained.values() if cohorts is not None else ()),
            *states,
            *(tensors.others[k] for k in whole.backward.moving),
        ]
        self._run = self._compile(bound._replace(batch=self._nominal(example)), tensors)

    def _nominal(self, example: Any) -> list[Tensor]:
        given = [leaf for leaf in leaves(example) if isinstance(leaf, Tensor)]
        rows = max(NOMINAL, 2 * self.whole.samples)
        return [
            leaf.new_empty(rows, *leaf.shape[1:]) if has else leaf
            for leaf, has in zip(given, self.whole.chosen, strict=True)
        ]

    def _compile(self, inputs: Inputs, tensors: Tensors) -> inductor.Compiled:
        def updates(*flat: Tensor) -> tuple[Tensor, ...]:
            return self.whole(inputs.like(flat))

        graph = inductor.trace_functional(updates, inputs.flat(), DECOMPOSITIONS)
        small = sum(p.numel() for p in tensors.trained.values()) <= SMALL
        threads = 1 if small else torch.get_num_threads()
        return inductor.compile_graph(graph, inputs.flat(), threads, wrapper_in_cpp=False)

    # --- calling ---------------------------------------------------------------------------------------------------

    def feed(self, batch: Any) -> None:
        """The batch that the next calls read from."""
        self._batch = [leaf.contiguous() for leaf in leaves(batch) if isinstance(leaf, Tensor)]

    def __call__(self, start: int) -> tuple[int, Sequence[Tensor]]:
        """How many updates were made, and what is known of their samples; the next one could not be."""
        cohorts, block = self.whole.cohorts, self.whole.block
        self._start[0] = start
        if cohorts is not None:
            numbers = cohorts.numbers()
            for ahead in range(1, block):
                numbers += cohorts.numbers(ahead)
            if numbers != self._written:
                self._numbers[:] = self._written = numbers
        results = self._run([*self._bound, *self._batch])
        made = 0
        while made < block and (not self.whole.checks or math.isfinite(self._flags[made])):
            made += 1
        if made and cohorts is not None:
            cohorts.advance(made)
        torch.autograd.graph.increment_version(self._changed)
        return made, results

    def part(self, results: Sequence[Tensor], updates: int) -> Part:
        """What is known of the samples of the first so many updates."""
        found = self.whole.backward.part(results)
        if updates == self.whole.block:
            return found
        samples = updates * self.whole.samples
        return Part(found.losses[:samples], None if found.counts is None else found.counts[:samples])

    def gradients(self, results: Sequence[Tensor]) -> dict[str, Tensor]:
        """Those of the update, where the optimizer is to make it."""
        return self.whole.backward.gradients(results)

    def hand_over(self, results: Sequence[Tensor]) -> None:
        for name, gradient in self.gradients(results).items():
            self._trained[name].grad = gradient

    def shape(self) -> Sequence[Any]:
        """What of the optimizer's settings the code depends on."""
        return () if self.whole.cohorts is None else self.whole.cohorts.shape()

    def norm(self, k: int = 0) -> float:
        """Of the gradient of the last update made, before `max_grad_norm`."""
        return math.sqrt(self._flags[k])
