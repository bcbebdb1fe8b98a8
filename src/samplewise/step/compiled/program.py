"""A compiled update, bound to the tensors that it reads and changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, strided

from samplewise.core.batches import PLAIN, is_whole, leaves
from samplewise.step.compiled import CannotCompile, inductor
from samplewise.step.compiled.decompositions import DECOMPOSITIONS
from samplewise.step.compiled.optim import raw_view
from samplewise.step.compiled.replay import KernelReplay, record
from samplewise.step.compiled.tracing import Tensors
from samplewise.step.compiled.update_fn import CompiledUpdate, Inputs
from samplewise.transforms.stats import SampleStats

NOMINAL = 64  # rows of the example batch that is compiled; real batches may have any number
SMALL = 2**18  # elements of all parameters, or of one intermediate result, up to which one thread is fastest


class Program:
    """Compiled update that reads rows of a batch by index. With checks, a non-finite update changes nothing."""

    def __init__(self, update: CompiledUpdate, tensors: Tensors, example: Any):
        self.update = update
        buckets = update.buckets
        width = 0 if buckets is None else buckets.width
        self._ages = buckets is not None and buckets.formula.ages  # each update has scalars of its own
        self._cells = [
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(1, dtype=torch.float64),
            torch.zeros(width, dtype=torch.float64),
        ]
        self._start, self._flag, self._numbers = map(raw_view, self._cells)
        self._hyperparameter_version = -1
        states = [] if buckets is None else list(buckets.states.values())
        self.states = states
        self._untrained = tensors.untrained
        self._trained = tensors.trained
        self.count = update.backward.samples
        self._losses_only = update.backward.first_gradient == 1
        bound = Inputs(
            [p.detach() for p in tensors.trained.values()],
            [s.detach() for s in states],
            [t.detach() for t in tensors.untrained],
            update.backward.constants,
            self._cells,
            [],
        )
        self._bound = bound.flat()
        self._batch: list[Tensor] = []
        self._changed = [
            *(tensors.trained.values() if buckets is not None else ()),
            *states,
            *(tensors.untrained[k] for k in update.backward.moving),
        ]
        rows = max(NOMINAL, 2 * update.samples)
        batch = [
            leaf.new_empty(rows, *leaf.shape[1:]) if has_rows else leaf
            for leaf, has_rows in zip(tensors_in(example), update.has_rows, strict=True)
        ]
        self._run = self._compile(bound._replace(batch=batch), tensors)
        self.verified = False
        self._recording: KernelReplay | None = None
        self._views: list[tuple[Tensor, ...]] = []  # rows for the results of the next updates, the next one last

    def record(self) -> None:
        """Record the kernels of one call, if possible; later calls run these kernels only. Runs one update."""
        if self._recording is not None:
            return
        batch = [t.detach() for t in self._batch]  # distinct objects, in case a tensor occurs twice
        recorded = record(self._run, self._bound, batch) if self.update.buckets is not None else None
        if recorded is not None and self.update.checks:
            samples = self.update.samples
            self._recording = KernelReplay(*recorded, self._cells, batch, samples=samples, ages=self._ages)
            self._numbers = self._recording.numbers
            self._hyperparameter_version = -1

    def _compile(self, inputs: Inputs, tensors: Tensors) -> inductor.Compiled:
        def updates(*flat: Tensor) -> tuple[Tensor, ...]:
            return self.update(inputs.like(flat))

        table = inductor.compiler_decompositions(DECOMPOSITIONS)
        graph = inductor.trace_functional(updates, inputs.flat(), table)
        results = [node.meta.get("val") for node in graph.graph.nodes if node.op != "placeholder"]
        largest = max((t.numel() for t in results if isinstance(t, Tensor)), default=0)
        work = max(largest, sum(p.numel() for p in tensors.trained.values()))
        threads = 1 if work <= SMALL else torch.get_num_threads()
        return inductor.compile_graph(graph, inputs.flat(), threads)

    # --- calling ---------------------------------------------------------------------------------------------------

    def feed(self, batch: Any) -> None:
        """Set the batch that the next calls read from; tensors that are not contiguous are copied."""
        tensors = tensors_in(batch)
        self._batch = [leaf.contiguous() for leaf in tensors]
        self.copies = [pair for pair in zip(tensors, self._batch, strict=True) if pair[0] is not pair[1]]
        self._versions = [_version(leaf) for leaf, _ in self.copies]
        if self._recording is not None:
            self._recording.feed(self._batch)

    def copy_again(self) -> None:
        """Copy non-contiguous tensors of the batch again if they have changed."""
        versions = [_version(leaf) for leaf, _ in self.copies]
        if versions != self._versions:
            self._versions = versions
            for leaf, copied in self.copies:
                copied.copy_(leaf)

    def __call__(self, start: int, hyperparameter_version: int) -> Sequence[Tensor] | None:
        """Run the update of the samples from row `start` and return its per-sample results.

        Returns None if the update was not finite or had an index out of range. `hyperparameter_version` identifies the
        hyperparameters of the optimizer: the scalars are written again when it changes.
        """
        if self._recording is not None:
            return self._replay(self._recording, start, hyperparameter_version)
        self._start[0] = start
        self._write_numbers(1, hyperparameter_version)
        random_state = torch.get_rng_state() if self.update.backward.draws else None
        try:
            results = self._run([*self._bound, *self._batch])
            finite = not self.update.checks or isfinite(self._flag[0])
        except (RuntimeError, IndexError):  # an index out of range; nothing has been written yet
            finite = False
        if not finite:
            if random_state is not None:
                torch.set_rng_state(random_state)
            return None
        self._count(1)
        return results

    def _replay(self, recording: KernelReplay, start: int, hyperparameter_version: int) -> Sequence[Tensor] | None:
        self._write_numbers(1, hyperparameter_version)
        if not self._views:
            columns = recording.fresh_columns()
            self._views = [*zip(*(column.unbind() for column in columns), strict=True)][::-1]
        if not recording(start, 1):
            return None
        self._count(1)
        return self._views.pop()

    def many(self, start: int, updates: int, hyperparameter_version: int) -> tuple[int, Sequence[Tensor]]:
        """Run up to CHUNK updates; return the number run before a non-finite one, and their per-sample results."""
        recording = self._recording
        assert recording is not None
        self._write_numbers(updates, hyperparameter_version)
        self._views = []
        columns = recording.fresh_columns()
        count = recording(start, updates)
        self._count(count)
        return count, [column[:count].flatten(0, 1) for column in columns]

    def _write_numbers(self, updates: int, hyperparameter_version: int) -> None:
        """Write the scalars of the next `updates` updates."""
        buckets = self.update.buckets
        if buckets is not None and (self._ages or hyperparameter_version != self._hyperparameter_version):
            numbers = buckets.numbers(updates if self._ages else 1)
            self._numbers[: len(numbers)] = numbers
            self._hyperparameter_version = hyperparameter_version

    def _count(self, updates: int) -> None:
        """Count updates that have been made: in the optimizer's step counters, and in the versions of tensors."""
        if self.update.buckets is not None and self._ages:
            self.update.buckets.advance(updates)
        inductor.increment_version(self._changed)

    @property
    def can_make_many(self) -> bool:
        return self._recording is not None

    def stats(self, results: Sequence[Tensor]) -> SampleStats:
        """Per-sample results of an update, from the results of the compiled code."""
        return SampleStats(results[0]) if self._losses_only else self.update.backward.stats(results)

    def gradients(self, results: Sequence[Tensor]) -> dict[str, Tensor]:
        """Gradients by parameter name, if the optimizer performs the update (no formula)."""
        return self.update.backward.gradients(results)

    def separate_gradients(self, results: Sequence[Tensor]) -> dict[str, Tensor]:
        """Gradients by parameter name, which may be changed in place: none shares memory with another one or with an
        input of the program.
        """
        used = {t.untyped_storage().data_ptr() for t in (*self._bound, *self._batch)}
        separate = {}
        for name, gradient in self.gradients(results).items():
            memory = gradient.untyped_storage().data_ptr()
            separate[name] = gradient.clone() if memory in used else gradient
            used.add(memory)
        return separate

    def write_gradients(self, results: Sequence[Tensor]) -> None:
        """Write the gradients to `.grad` of the parameters."""
        for name, gradient in self.gradients(results).items():
            self._trained[name].grad = gradient

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors other than trained parameters whose memory address is compiled into the code."""
        return [*self.states, *self._untrained, *self.update.backward.constants]

    @property
    def counters(self) -> Sequence[Sequence[Any]]:
        return () if self.update.buckets is None else self.update.buckets.counters

    def optimizer_settings(self) -> Sequence[Any]:
        """Optimizer settings that are compiled into the code."""
        return () if self.update.buckets is None else self.update.buckets.optimizer_settings()

    def norm(self) -> float:
        """Gradient norm of the last update, before `max_grad_norm`."""
        return sqrt(self._flag[0])


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


# --- signature of a batch ---------------------------------------------------------------------------------------------


def signature(batch: Any, rows: int | None) -> tuple[Any, ...]:
    """Structure of the batch, shapes and dtypes of its rows, and values of non-tensors: compiled into the code."""
    if isinstance(batch, Tensor):
        if batch.device.type != "cpu":
            raise CannotCompile(f"the batch is on {batch.device}; updates are compiled for the CPU only")
        if batch.layout is not strided or batch.requires_grad:
            raise CannotCompile("the batch has tensors that are sparse or require gradients")
        if batch.is_conj() or batch.is_neg():
            raise CannotCompile("the batch has tensors with a pending conjugation or negation")
        if has_rows(batch, rows):
            return "rows", tuple(batch.shape[1:]), batch.dtype
        return "tensor", tuple(batch.shape), batch.dtype
    if isinstance(batch, Mapping):
        return type(batch), tuple((key, signature(value, rows)) for key, value in batch.items())
    if isinstance(batch, (tuple, list)) and not (batch and all(isinstance(item, PLAIN) for item in batch)):
        return type(batch), tuple(signature(item, rows) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if hasattr(batch, field.name)]
        return type(batch), tuple((name, signature(getattr(batch, name), rows)) for name in names)
    if isinstance(batch, PLAIN):
        return type(batch), batch
    raise CannotCompile(f"the batch contains an object that is not a tensor ({type(batch).__name__})")


def tensors_in(batch: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]


def has_rows(leaf: Any, rows: int | None) -> bool:
    """Test whether leaf is a tensor with one row per sample."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows and not is_whole(leaf)
