"""A compiled update, bound to the tensors that it reads and changes."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from samplewise.batches import leaves
from samplewise.step.compiled import inductor
from samplewise.step.compiled.cells import cells
from samplewise.step.compiled.decompositions import DECOMPOSITIONS
from samplewise.step.compiled.recording import CHUNK, Recording, record
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
            torch.zeros(1, dtype=torch.float64),
            torch.zeros(width, dtype=torch.float64),
        ]
        self._start, self._flag, self._numbers = map(cells, self._cells)
        self._era = -1
        states = self.states = [] if cohorts is None else list(cohorts.states.values())
        self._others = tensors.others
        self._trained, self.count = tensors.trained, whole.backward.samples
        self._losses_only = whole.backward.known == 1
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
        self.tried = False
        self._recording: Recording | None = None
        self._views: list[tuple[Tensor, ...]] = []  # of the results to come, the next one last

    def record(self) -> None:
        """From now on, a call is its kernels and nothing else, if that can be. Makes an update to see them."""
        if self._recording is not None:
            return
        batch = [t.detach() for t in self._batch]  # each an object of its own, should one be there twice
        found = record(self._run, self._bound, batch) if self.whole.cohorts is not None else None
        if found is not None and self.whole.checks:
            self._recording = Recording(*found, self._cells, batch)

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
        return inductor.compile_graph(graph, inputs.flat(), threads)

    # --- calling ---------------------------------------------------------------------------------------------------

    def feed(self, batch: Any) -> None:
        """The batch that the next calls read from."""
        given = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
        self._batch = [leaf.contiguous() for leaf in given]
        self.copies = [pair for pair in zip(given, self._batch, strict=True) if pair[0] is not pair[1]]
        self._versions = [_version(leaf) for leaf, _ in self.copies]
        if self._recording is not None:
            self._recording.feed(self._batch)

    def copy_again(self) -> None:
        """Data that has been changed since it was copied."""
        versions = [_version(leaf) for leaf, _ in self.copies]
        if versions != self._versions:
            self._versions = versions
            for leaf, copied in self.copies:
                copied.copy_(leaf)

    def __call__(self, start: int, era: int) -> Sequence[Tensor] | None:
        """Makes the update that begins at row `start`, and returns what is known of its samples; None if it was not
        finite or had an index out of range. `era`: within one the optimizer's settings are the same.
        """
        cohorts = self.whole.cohorts
        if self._recording is not None:
            return self._replayed(self._recording, start, era)
        self._start[0] = start
        if cohorts is not None and (era != self._era or cohorts.formula.ages):
            self._numbers[:], self._era = cohorts.numbers(), era
        drawn = torch.get_rng_state() if self.whole.backward.draws else None
        results = self._results()
        if results is None:
            if drawn is not None:
                torch.set_rng_state(drawn)
            return None
        if cohorts is not None and cohorts.formula.ages:
            cohorts.advance(1)
        increment_version(self._changed)
        return results

    def _results(self) -> Sequence[Tensor] | None:
        try:
            results = self._run([*self._bound, *self._batch])
        except (RuntimeError, IndexError):  # an index out of range: nothing has been written yet
            return None
        return None if self.whole.checks and not isfinite(self._flag[0]) else results

    def _replayed(self, recording: Recording, start: int, era: int) -> Sequence[Tensor] | None:
        cohorts = self.whole.cohorts
        assert cohorts is not None
        if era != self._era or cohorts.formula.ages:
            recording.numbers[: cohorts.width], self._era = cohorts.numbers(), era
        if not self._views:
            columns = recording.fresh_columns()
            self._views = [*zip(*(column.unbind() for column in columns), strict=True)][::-1]
        if not recording(start, self.whole.samples, 1, CHUNK - len(self._views)):
            return None
        if cohorts.formula.ages:
            cohorts.advance(1)
        increment_version(self._changed)
        return self._views.pop()

    def many(self, start: int, updates: int) -> tuple[int, Sequence[Tensor]]:
        """At most CHUNK updates at once, of which it returns how many were made before one was not finite."""
        recording, cohorts = self._recording, self.whole.cohorts
        assert recording is not None and cohorts is not None
        numbers = cohorts.numbers(updates)
        recording.numbers[: len(numbers)], self._era, self._views = numbers, -1, []
        columns = recording.fresh_columns()
        made = recording(start, self.whole.samples, updates, 0)
        if cohorts.formula.ages:
            cohorts.advance(made)
        increment_version(self._changed)
        return made, [column[:made].flatten(0, 1) for column in columns]

    @property
    def can_make_many(self) -> bool:
        return self._recording is not None

    def part(self, results: Sequence[Tensor]) -> Part:
        """What is known of the samples."""
        return Part(results[0]) if self._losses_only else self.whole.backward.part(results)

    def gradients(self, results: Sequence[Tensor]) -> dict[str, Tensor]:
        """Those of the update, where the optimizer is to make it."""
        return self.whole.backward.gradients(results)

    def hand_over(self, results: Sequence[Tensor]) -> None:
        for name, gradient in self.gradients(results).items():
            self._trained[name].grad = gradient

    @property
    def tensors(self) -> list[Tensor]:
        """Beside the trained ones, those that must stay where they are."""
        return [*self.states, *self._others, *self.whole.backward.constants]

    @property
    def counters(self) -> Sequence[Sequence[Any]]:
        return () if self.whole.cohorts is None else self.whole.cohorts.counters

    def shape(self) -> Sequence[Any]:
        """What of the optimizer's settings the code depends on."""
        return () if self.whole.cohorts is None else self.whole.cohorts.shape()

    def norm(self) -> float:
        """Of the gradient of the last update made, before `max_grad_norm`."""
        return sqrt(self._flag[0])


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version
