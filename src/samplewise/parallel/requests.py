"""Collectives on request: a rank that needs a collective gets it at any time, and the other ranks take part in it.

The modules of a sharded model gather their parameters in every forward and backward pass, and reduce their gradients.
Ranks need not run the same passes: one may have more microbatches than the others, smaller ones, or a new graph that
must be verified. Therefore a rank asks before such a collective. Ranks exchange what each of them needs next, and run
one of the collectives together, until the rank has got its own. A rank that does not need it contributes its shard, or
zeros. A rank at the end of its passes serves the others until all ranks are there (`all_reduce_scalars`).

The collectives of torch alone need the same passes on all ranks: they hang if a module is used by the samples of one
rank only, as an expert of a mixture is, and the engine's passes depend on the number of samples and on the graph.

The exchange is one small message per collective, two if ranks need different ones. With it, a clipped update would
take twice as long (two ranks, gloo, 25 modules). It is saved if the ranks do what they did before: the collectives
between two synchronizations form a *segment*. At its beginning, all ranks commit themselves to the collectives that
followed the same segment the last time, if each rank asks for the first of them. They are then run in this order
without further messages. A rank that does not need one of them, or that fails, takes part nevertheless until the end of
the segment, where collectives that no rank has needed are left out for the next time. All ranks have the same records,
because these contain only what all ranks did together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol
from weakref import ref

from samplewise.errors import DistributedError

MOST_KNOWN = 64  # recorded segments; the record is cleared when it is full
LONGEST = 2**14  # recorded collectives of a segment; plain passes between updates may make it any longer

# Digits of the first scalar of a synchronization, each of them summed over ranks.
FAILED = 1
ASKING = 2**20
UNUSED = 2**40  # this rank did not need all collectives to which the ranks had committed themselves


class Participant(Protocol):
    """Object that takes part in collectives when other ranks need them."""

    def serve(self, kind: int) -> None:
        """Take part in the collective of this kind without using its result. PASS: another rank begins a pass whose
        gradients are summed.
        """


class Messages(Protocol):
    """Small messages between ranks."""

    def size(self) -> int:
        """Number of ranks."""

    def sum_scalars(self, *numbers: int) -> list[int]:
        """Sums over ranks of the first scalar of a synchronization and of further ones."""

    def gather(self, mine: int) -> list[int]:
        """Number of each rank."""

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank."""

    def raise_error(self) -> NoReturn:
        """Raise the error of the rank that has failed."""


GATHER, REDUCE, PASS = 0, 1, 2  # kinds of requests; the first ones are served first
KINDS = 3


class Requests:
    """Requests of this rank for collectives, and its part in those of other ranks."""

    def __init__(self, messages: Messages):
        self._messages = messages
        self._participants: list[ref[Participant]] = []
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}  # segment -> the one that followed it
        self._last: tuple[int, ...] = ()
        self.passes_may_differ = False  # the ranks serve each other until the end of a window
        self.reset()

    def reset(self) -> None:
        """Begin a segment."""
        self._committed: list[int] = []  # collectives to be run without further messages, the next one last
        self._log: list[int] = []  # collectives of this segment
        self._used: list[bool] = []  # whether this rank needed them
        self._unused = False  # this rank did not need all committed ones
        self._fresh = True  # no message was exchanged in this segment

    def add(self, participant: Participant) -> int:
        """Register a participant, in the same order on all ranks; returns its number."""
        self._known.clear()
        self._participants.append(ref(participant))
        return len(self._participants) - 1

    @contextmanager
    def different_passes(self) -> Iterator[None]:
        """Context manager: ranks reach the code inside at different places of a window, or not at all. Each pass inside
        is served by the others, so that it must not contain collectives that are not requested.
        """
        self.passes_may_differ = True
        try:
            yield
        finally:
            self.passes_may_differ = False

    # --- a rank that needs a collective ----------------------------------------------------------------------------

    def ask(self, number: int, kind: int) -> None:
        """Return when all ranks take part in this collective of a participant; serve other ranks until then.

        PASS is no collective, but the beginning of a pass whose gradients are summed. A rank arrives there when each
        rank does so or has finished its passes. Sums of several ranks are then always added in the same order,
        whichever other passes they run, and a segment ends.
        """
        request = number * KINDS + kind + 1
        if kind == PASS:
            self._serve_committed()
        agreed = 0
        while agreed != request:
            if self._committed:
                agreed = self._committed.pop()
                self._unused |= agreed != request
                self._take_part(agreed, request)
            else:
                agreed = self._agree(request)

    def _agree(self, request: int) -> int:
        """Exchange requests, and take part in one of them. At the beginning of a segment, commit to the rest of a known
        one, if all ranks ask for its first collective.
        """
        status, total, squares = self._messages.sum_scalars(ASKING + UNUSED * self._unused, request, request * request)
        if status % ASKING:
            self.reset()
            self._messages.raise_error()
        ranks = self._messages.size()
        all_alike = status // ASKING % ASKING == ranks and total * total == ranks * squares
        agreed = request if all_alike else self._chosen(request)
        followers = self._known.get(self._last, ())
        if self._fresh and all_alike and followers[:1] == (request,):
            self._committed = list(reversed(followers[1:]))
        self._fresh = False
        self._take_part(agreed, request, status)
        if all_alike and _kind(request) == PASS:
            self._committed = list(reversed(self._known.get(self._last, ())))
        return agreed

    def _chosen(self, request_here: int) -> int:
        """One of the requests of all ranks: of the first kind, of most ranks, of the first rank."""
        asked = [request for request in self._messages.gather(request_here) if request]
        first = min(map(_kind, asked))
        return Counter(request for request in asked if _kind(request) == first).most_common(1)[0][0]

    def _take_part(self, agreed: int, mine: int, status: int = 0) -> None:
        """Record a collective of all ranks, and serve it unless it is this rank's own."""
        if _kind(agreed) == PASS:
            self._end_segment(status, agreed)
        elif len(self._log) < LONGEST:
            self._log.append(agreed)
            self._used.append(agreed == mine)
        if agreed != mine:
            number, kind = divmod(agreed - 1, KINDS)
            participant = self._participants[number]()
            if participant is None:
                raise DistributedError(
                    "a sharded model must exist on all ranks while a rank uses it; found that this rank has deleted "
                    "one. Delete it on all ranks, after an update without it."
                )
            participant.serve(kind)

    # --- a rank that synchronizes ----------------------------------------------------------------------------------

    def status(self) -> int:
        """First scalar of a synchronization of this rank, after it has served all committed collectives."""
        self._serve_committed()
        return UNUSED * self._unused

    def _serve_committed(self) -> None:
        while self._committed:
            self._unused = True
            self._take_part(self._committed.pop(), 0)

    def answer(self, status: int) -> bool:
        """Serve a request if a rank asks, according to the sum of the first scalars; if none does, end the segment and
        return False.
        """
        if status // ASKING % ASKING:
            self._fresh = False
            self._take_part(self._chosen(0), 0, status)
            return True
        self._end_segment(status)
        return False

    def _end_segment(self, status: int, *mark: int) -> None:
        """Record this segment, without committed collectives that no rank needed. `mark`: the PASS that ends it."""
        if self._log or mark:
            segment = tuple(self._log)
            if status // UNUSED:
                needed = self._messages.any_rank(self._used)
                segment = tuple(module for module, is_needed in zip(segment, needed, strict=True) if is_needed)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[self._last] = segment
            self._last = (*mark, *segment)
        self.reset()


def _kind(request: int) -> int:
    return (request - 1) % KINDS
