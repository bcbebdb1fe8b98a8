"""Window builder: from batches to complete windows, whose gradient sum is in `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from time import perf_counter
from typing import Any, ClassVar

from samplewise.core.batches import length
from samplewise.core.microbatch import MicrobatchSize
from samplewise.core.state import Buffers
from samplewise.core.text import plural
from samplewise.engine.deferred_checks import DeferredChecks, collect_in
from samplewise.errors import (
    BatchError,
    LoaderStopped,
    LossesError,
    NonFiniteGradientError,
    NonFiniteLossError,
)
from samplewise.parallel.mode import Parallel
from samplewise.step.accumulate import Accumulator, PlainAccumulator, WeightedAccumulator
from samplewise.step.config import StepConfig
from samplewise.step.first_window import SAMPLES, FirstWindowChecks
from samplewise.step.forward import LossEvaluator
from samplewise.step.group_means import GroupCounts, GroupMeansAccumulator
from samplewise.step.grouped import GroupedAccumulator
from samplewise.step.parameters import OpenWindowGuard
from samplewise.step.ranks import reduce_window
from samplewise.step.recheck import Recheck
from samplewise.step.sizes import WindowSizes
from samplewise.step.split_accumulate import GuardedAccumulator
from samplewise.step.window import (
    BatchCursor,
    BatchLayouts,
    Counters,
    Window,
    empty_stats,
    record_columns,
    unknown_stats,
)
from samplewise.transforms.stats import SampleStats


class WindowBuilder:
    """Fills windows with microbatches. `window` is the open window, `cursor` the batch that is not used up yet.

    `fill`, `end` and `close` return complete windows, which the caller applies one by one.
    """

    def __init__(
        self,
        config: StepConfig,
        evaluator: LossEvaluator,
        guard: OpenWindowGuard,
        layouts: BatchLayouts,
        ranks: Parallel,
        counters: Counters,
        buffers: Buffers,
        sizes: WindowSizes,
    ):
        self.config = config
        self.sizes = sizes
        self.evaluator = evaluator
        self.recheck = Recheck(evaluator, config.recheck, config.transforms.measures)
        self.checks = FirstWindowChecks(evaluator, self.recheck)
        self.size = MicrobatchSize(
            config.microbatch,
            evaluator.budget,
            layouts.length,
            evaluator.saved_state_and_sums,
            self.checks.compare_slice,
        )
        self.ranks = ranks
        self.counters = counters
        self.window = Window(config)
        self._complete = Window(config)  # the last complete window; `begun` until it is applied
        self.cursor: BatchCursor | None = None
        self.columns: dict[str, Hashable] = {}  # column name -> key of the batch
        self.record_norms = "norms" in config.record or sizes.follower is not None
        self.predictions: frozenset[str] = frozenset()  # columns of a criterion, see `prediction_columns`
        # Adds the gradient sums of a microbatch by compiled code, or returns None: see `MicrobatchRunner.add`.
        self.compiled_sums: Callable[[Any], SampleStats | None] | None = None
        self._trained = evaluator.trained
        self._guard = guard
        self._buffers = buffers
        self._chain = config.transforms  # those of the accumulator
        self._accumulator = self.make_accumulator()

    def configure(self, config: StepConfig) -> None:
        """Use these settings from the next window on; `samples` and `tail` apply to the open window as well, and all of
        them to a restored window without new samples, whose settings are not in its state.
        """
        if config.samples != self.config.samples:
            self.sizes.configure(config.samples)
            self.record_norms = self.record_norms or self.sizes.follower is not None
        self.config = config
        self.ranks.follow_samples(self.window)
        begun = self.window.begun or self.ranks.carried > 0  # also if only other ranks carry samples
        if self.window.restored or not begun:
            self.window.config = config
            if config.transforms is not self._chain:
                self._follow_transforms()

    @property
    def samples(self) -> int | None:
        """Number of samples of the open window, over all ranks; None: it is a batch."""
        return self.sizes.of(self.window)

    def _open_window(self) -> None:
        """Start a new window, with the current settings."""
        self.window = Window(self.config)
        if self.config.transforms is not self._chain:
            self._follow_transforms()

    def _follow_transforms(self) -> None:
        """Use another accumulator, after the transforms have changed."""
        self._chain = self.config.transforms
        self._accumulator = self.make_accumulator()
        self.checks.follow(self._chain)

    def attach(self, ranks: Parallel) -> None:
        """Use these ranks from the next window on."""
        self.ranks = ranks
        self._accumulator = self.make_accumulator()

    def require(self, norms: bool, columns: Mapping[str, Hashable], predictions: Iterable[str]) -> None:
        """Record norms, batch columns and columns of a criterion from the next window on."""
        self.record_norms = self.record_norms or norms
        self.columns.update(columns)
        self.predictions |= frozenset(predictions)

    # --- from batches to windows -----------------------------------------------------------------------------------

    def fill(self, cursor: BatchCursor) -> Iterator[Window]:
        """Add the samples of a batch, and yield each window that they complete."""
        self.ranks.check_group()
        if cursor.batch is None and self.config.policy.empty_updates:  # this rank adds no samples to the window
            self._guard.enter()
            self._is_complete(None, self.config.tail)
            yield self._finish()
            return
        self.cursor = cursor
        while self.cursor is not None:
            window = self.next_window()
            if window is not None:
                yield window

    def end(self) -> Iterator[Window]:
        """Yield the windows that are completed at the end of a loader, according to `tail`. With several ranks, take
        part in their windows until all loaders have ended.
        """
        config = self.config
        while True:
            complete = None
            self._guard.enter()
            if self._is_complete(self.samples, config.tail, ended=True):
                complete = self._finish()
            all_ended = self.ranks.all_ended
            if all_ended:  # before the last update, so that a `break` there still ends the epoch
                self.counters.epochs += 1
                if config.tail == "drop" and complete is None:
                    self.drop()
                if self.window.begun:
                    self._leave()
                self.ranks.next_pass(self.window, self.samples)
            if complete is not None:
                yield complete
            if all_ended:
                return

    def accumulate(self, cursor: BatchCursor) -> None:
        """Add all samples of a batch to the open window."""
        self.ranks.check_group()
        self._guard.enter()
        while not cursor.empty:
            microbatch, size = cursor.take(self.size.size)
            self._add(cursor, microbatch, size)
        self._leave()

    def _leave(self) -> None:
        """Watch the open window until it is continued. Its parameters may change if they are not those of its sums: the
        window is computed at its end, or was restored, and the model may be loaded after the step.
        """
        self._guard.leave(parameters=not (self._accumulator.needs_window or self.window.restored))

    def close(self) -> Window | None:
        """Complete the window with the samples it has, on all ranks; None if there are none."""
        self._guard.enter()
        return self._finish() if self._is_complete(None, "update", ended=True) else None

    # --- filling a window ------------------------------------------------------------------------------------------

    def _is_complete(self, samples: int | None, tail: str, ended: bool = False) -> bool:
        """True if the ranks together have the samples of the window. `ended`: this rank's loader has ended."""
        window = self.window
        if not self._accumulator.needs_window:
            self.ranks.begin_exchange(window, window.samples, samples, tail, ended)
        return self.ranks.agree(window, samples, tail, ended)

    def next_window(self) -> Window | None:
        """Add microbatches of the current batch until the window is complete; None if the batch is used up first."""
        samples = self.samples
        if self._guard.active:
            self._guard.enter()
        while self.cursor is not None:
            cursor = self.cursor
            window = self.window
            if window.share is None:
                window.share = self.ranks.share(samples)
            room = window.share - window.samples  # samples that this rank has to add
            if room > 0:
                limit = room if self.size.size is None else min(room, self.size.size)
                microbatch, size = cursor.take(None if limit == inf else int(limit))
                if size == 0:  # an empty microbatch may be deferred, and would then fail only with a later batch
                    raise self._empty_batch(cursor)
                if cursor.empty:
                    self.cursor = None
                if samples is not None and size is None and self._accumulator.needs_window:
                    raise BatchError(_UNCUT.format(samples=samples, found="batches that cannot be cut"))
                if samples is None:
                    is_window = is_last = cursor.empty
                else:
                    is_window = size == samples
                    is_last = size is not None and window.samples + size == window.share
                is_window = is_window and not (window.begun or self.ranks.exchanges)
                self._add(cursor, microbatch, size, is_window, is_last)
                if samples is not None and window.samples > window.share:
                    excess = f"{plural(window.samples, 'sample')} after a batch that cannot be cut"
                    raise BatchError(_UNCUT.format(samples=samples, found=excess))
            full = window.samples >= window.share or (samples is None and cursor.empty)
            if full and self._is_complete(samples, self.config.tail):
                return self._finish()
        if self.window.begun and not self.window.summing:
            self._leave()
        return None

    def _add(
        self, cursor: BatchCursor, microbatch: Any, size: int | None, is_window: bool = False, is_last: bool = False
    ) -> None:
        """Add a microbatch of `size` samples (None: unknown) to the window. `is_window`: it is the whole window;
        `is_last`: it is the last one of this rank.
        """
        started = perf_counter()
        window = self.window
        try:
            first = not (window.parts or window.deferred)
            window.restored = False
            if not window.begun:
                self.begin()
            if self.checks.unsliced and size is not None and microbatch is not cursor.batch:
                self.checks.compare_slice(cursor.batch, cursor.consumed - size, cursor.consumed)
            if first and (SAMPLES in self.checks.pending or self.config.recheck):
                self.checks.recheck(microbatch, self.counters.updates)
            if self.columns and (window.columns or first):  # columns of all samples of a window, or of none
                window.columns.append(record_columns(microbatch, self.columns, self.counters.epochs))
            if self._accumulator.needs_window:
                window.deferred.append(microbatch)
                window.samples += size or length(microbatch) or 1  # a lower bound until the losses are computed
                window.sized &= size is not None
            else:
                exchanges = is_last and self.ranks.exchanges and not self.size.automatic
                with self._exchange(size) if exchanges else nullcontext():
                    parts = self._accumulate([microbatch], is_window)
                window.samples += self._count(parts, None if self._accumulator.drops_samples else size)
                window.parts += parts
        except Exception as error:
            if cursor.rows == 0:  # checked only after a failure: checking each batch would cost microseconds
                raise self._empty_batch(cursor) from error
            raise
        window.seconds += perf_counter() - started

    def _exchange(self, size: int | None) -> AbstractContextManager[None]:
        """Context manager: the ranks sum gradients during the last pass of this rank, inside, of `size` samples."""
        self._accumulator.compute_directions()  # they may contain collectives, which then come first on all ranks
        samples = self.window.samples + (size or 1)  # without `samples=`, the number need not be exact
        ready = self.ranks.begin_exchange(self.window, samples, self.samples, self.config.tail)
        self.window.summing = ready is not None
        return self.evaluator.exchanging(ready)

    def begin(self) -> None:
        """Prepare gradients and buffers for the window, if it is new. Also called on a rank without samples, before
        gradients of other ranks are added to `.grad`.
        """
        window = self.window
        if window.begun:
            return
        window.begun = True
        self.evaluator.seconds = 0.0
        if self.record_norms and not self._accumulator.knows_norms:
            self._accumulator = self.make_accumulator()
        self._trained.refresh()
        self._trained.clear()
        if not (self._accumulator.checks_at_once or self._trained.device.type == "cpu"):
            window.checks = DeferredChecks()
        self.config.policy.begin(self._trained)
        self.ranks.begin_window()
        if self._buffers.owners:
            self._buffers.remember()
        if self.evaluator.criterion is not None:
            self.evaluator.predictions = self.predictions
        self._accumulator.begin()
        if self.checks.pending:
            self.checks.begin(self._accumulator)

    def _accumulate(self, microbatches: Sequence[Any], is_window: bool = False) -> list[SampleStats]:
        """Accumulate gradients into `.grad`. A non-finite value that may be skipped marks the window as failed instead
        of raising.
        """
        window = self.window
        if window.failure is None:
            try:
                if window.checks is None:
                    return self._add_gradients(microbatches, is_window)
                with collect_in(window.checks):
                    parts = self._add_gradients(microbatches, is_window)
                if self.checks.pending or self.ranks.exchanges:
                    window.checks.settle()  # first checks and collectives need to know whether the window fails
                return parts
            except (NonFiniteLossError, NonFiniteGradientError) as error:
                self._fail(error)
        return [unknown_stats(length(microbatch) or 0, window.parts) for microbatch in microbatches]

    def _fail(self, error: NonFiniteLossError | NonFiniteGradientError) -> None:
        """Mark the window as failed by an error that may be skipped, or raise it."""
        if not self.config.skips(error):
            raise error
        self.window.failure = error

    def _add_gradients(self, microbatches: Sequence[Any], is_window: bool) -> list[SampleStats]:
        """Accumulate gradients by compiled code, in microbatches that fit into memory, or as they are."""
        window = self.window
        accumulator = self._accumulator
        if self.compiled_sums is not None and not accumulator.needs_window:
            stats = self.compiled_sums(microbatches[0])
            if stats is not None:
                return [stats]
        start = 0 if window.deferred else window.samples
        if self.size.automatic and not accumulator.exchanges:
            return self.size.retry(lambda pieces: accumulator.add(pieces, start), microbatches)
        sums = bool(window.config.transforms.on_sum)  # noise is added to the sum
        divide = is_window and not sums and window.config.constant_divisor is None
        parts = accumulator.add(microbatches, start, divide)
        window.divided = accumulator.divided
        return parts

    @property
    def defers(self) -> bool:
        """True if microbatches are computed when the window is complete."""
        return self._accumulator.needs_window

    def _count(self, parts: Sequence[SampleStats], size: int | None) -> int:
        """Count samples and microbatches; `size` is the expected number of samples, None if unknown."""
        samples = 0
        for part in parts:
            samples += part.losses.shape[0]
        if size is not None and samples != size:
            raise LossesError(
                "loss_fn must return one loss per sample if batches are cut; found "
                f"{plural(samples, 'loss', 'losses')} for {plural(size, 'sample')}. Use samples=None and "
                "microbatch=None, or return one loss per sample."
            )
        self.counters.samples += samples
        self.counters.microbatches += len(parts)
        return samples

    def _finish(self) -> Window:
        """Compute deferred microbatches, sum the gradients over ranks, and check the first window for mistakes. Returns
        the complete window and opens a new one.
        """
        started = perf_counter()
        window = self.window
        if not window.begun:  # on a rank without samples in this window
            self.begin()
        if self._accumulator.needs_window:
            window.parts = self._accumulate(window.deferred)
            exact = window.sized and not self._accumulator.drops_samples
            window.samples = self._count(window.parts, window.samples if exact else None)
            self.ranks.refresh_totals(window)
        if self.ranks.exchanges:
            reduce_window(self.ranks, window, self._trained, self._buffers, self._accumulator.fingerprint)
        self.config.policy.check_model()  # the last pass of the window is made
        samples = window.samples if window.totals is None else window.totals.samples
        if window.failure is None and window.config.transforms.samples.uses_positions:
            window.config.transforms.samples.check_positions(samples)
        if self.checks.pending:
            self.checks.end(window, self._accumulator, self.ranks.size)
        window.parts = window.parts or [empty_stats(next(iter(self._trained.named.values())))]
        self._complete = window
        self._open_window()
        window.forward_seconds = self.evaluator.seconds
        window.seconds += perf_counter() - started
        return window

    def make_accumulator(self) -> Accumulator:
        """Accumulator for the transforms of the open window and the norms to record."""
        chain = self._chain
        accumulator: Accumulator
        if not chain.weighs and not self.record_norms:
            accumulator = PlainAccumulator(self.evaluator)
        else:
            kind = WeightedAccumulator if chain.grouping is None else GroupedAccumulator
            inner = kind(self.evaluator, chain, self.record_norms, self.ranks, self.size)
            accumulator = GuardedAccumulator(inner) if chain.drops else self.config.policy.accumulator(inner)
        counts = self.evaluator.means
        if not isinstance(counts, GroupCounts):
            return accumulator
        one_pass = chain.grouping is None
        return GroupMeansAccumulator(accumulator, counts, self.evaluator, self.ranks, self.size, one_pass)

    # --- discarding a window ---------------------------------------------------------------------------------------

    @contextmanager
    def discard_on_error(self) -> Iterator[None]:
        """After an exception in the block, discard the open window and the rest of the batch, and send the error to the
        other ranks. A generator that is closed, and a loader that ends the pass early, leave the window open.
        """
        try:
            yield
        except (GeneratorExit, LoaderStopped):
            raise
        except BaseException as error:
            self.discard()
            if isinstance(error, Exception):
                self.ranks.announce(error)
            raise

    def discard(self) -> None:
        """Discard the open window and the rest of the batch; restore gradients, buffers and counters."""
        self._guard.forget()
        for window in (self.window, self._complete):
            if window.begun:
                self._trained.clear()
                self._buffers.restore()
                if window is self.window:  # parameters of a complete window may be changed by its update
                    self.config.policy.restore_model()
                self.counters.samples -= sum(len(part) for part in window.parts)
                self.counters.microbatches -= len(window.parts)
        self._complete = Window(self.config)
        self._open_window()
        self.cursor = None

    def drop(self) -> None:
        """Discard the open window without an update, but count its samples."""
        window = self.window
        samples = self.counters.samples
        if window.deferred:
            samples += window.samples
        if window.totals is not None:
            samples += window.totals.samples - window.samples  # of other ranks
        self.discard()
        self.counters.samples = samples

    def _empty_batch(self, cursor: BatchCursor) -> BatchError:
        where = ""
        if cursor.number is not None:
            where = f", batch {cursor.number} of epoch {self.counters.epochs}, both counted from 0"
        return BatchError(
            f"a batch must have at least one sample; found an empty batch{where}. Check what the dataset, sampler "
            "or collate_fn returns there, or leave the batch out."
        )

    # --- state -----------------------------------------------------------------------------------------------------

    NO_WINDOW: ClassVar[dict[str, Any]] = {"samples": {}, "gradient_sums": {}, "failure": [], "columns": []}

    def state_dict(self) -> dict[str, Any]:
        """State of the open window, as gradient sums. Samples that are not computed yet are not included."""
        window = self.window
        if window.checks is not None:
            try:
                window.checks.settle()
            except (NonFiniteLossError, NonFiniteGradientError) as error:
                self._fail(error)
        parts = window.sample_state() if not window.deferred else {}
        sums = {}
        self._guard.enter()
        columns = []
        if parts:
            sums = {name: gradient.clone() for name, gradient in self._trained.local_gradients().items()}
            columns = [{"epoch": column.epoch, "values": column.values} for column in window.columns]
        if window.begun:
            self._leave()
        failure = [] if window.failure is None else [type(window.failure).__name__, str(window.failure)]
        state = {"samples": parts, "gradient_sums": sums, "failure": failure, "columns": columns}
        reached = self.ranks.reached() if parts else []
        return {**state, "reached": reached} if reached else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore an open window from `state_dict`."""
        self.window = Window.from_state(self.config, state)
        if "norms" in state["samples"] and not (state["failure"] or self._accumulator.knows_norms):
            self.record_norms = True  # the window was begun with norms, so all of its samples need them
            self._accumulator = self.make_accumulator()
        if state["samples"]:  # all samples of a window have the same columns
            self.evaluator.predictions = frozenset(state["samples"].get("columns", ()))
        self._buffers.remember()
        device = self._trained.device
        self._trained.set_gradients(
            {name: total.to(device, copy=True) for name, total in state["gradient_sums"].items()}
        )
        self.ranks.begin_window(state.get("reached", ()))
        if self.window.begun:
            self._leave()


_UNCUT = (
    "each update must have exactly samples={samples} samples; found {found}. Use samples=None, or batches whose "
    "tensors have one row per sample; for other entries, decorate the loss function with @sw.batch_constants(keys)."
)
