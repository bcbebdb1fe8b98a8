"""Collectives on request: a rank that needs a collective gets it at any time, and the other ranks take part in it.

The modules of a sharded model gather their parameters in every forward and backward pass, and reduce their gradients.
Ranks need not run the same passes: one may have more microbatches than the others, smaller ones, or a new graph that
must be verified. Therefore a rank asks before such a collective. Ranks exchange what each of them needs next, and run
one of the collectives together, until the rank has got its own. A rank that does not need it contributes its shard, or
zeros. A rank at the end of its passes serves the others until all ranks are there (`all_reduce_scalars`).

The exchange is one small message per collective, two if ranks need different ones. It is saved if the ranks do what
they did before: the collectives between two synchronizations form a *segment*. At its beginning, all ranks commit
themselves to the collectives that followed the same segment the last time, if each rank asks for the first of them.
They are then run in this order without further messages. A rank that does not need one of them, or that fails, takes
part nevertheless until the end of the segment, where collectives that no rank has needed are left out for the next
time. All ranks have the same records, because these contain only what all ranks did together.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn, Protocol
from weakref import ref

MOST_KNOWN = 64  # recorded segments; the record is cleared when it is full

# Digits of the first scalar of a synchronization, each of them summed over ranks.
FAILED = 1
ASKING = 2**20
UNUSED = 2**40  # this rank did not need all collectives to which the ranks had committed themselves


class Participant(Protocol):
    """Object that takes part in collectives when other ranks need them."""

    def serve(self, kind: int) -> None:
        """Take part in the collective of this kind without using its result."""


class Messages(Protocol):
    """Small messages between ranks."""

    def size(self) -> int:
        """Number of ranks."""

    def sum_scalars(self, *mine: int) -> list[int]:
        """Sums over ranks of the first scalar of a synchronization and of further ones."""

    def gather(self, mine: int) -> list[int]:
        """Number of each rank."""

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank."""

    def raise_error(self) -> NoReturn:
        """Raise the error of the rank that has failed."""


class Requests:
    """Requests of this rank for collectives, and its part in those of other ranks."""

    KINDS = 2  # kinds of collectives of a participant

    def __init__(self, messages: Messages):
        self._messages = messages
        self._participants: list[ref[Participant]] = []
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}  # segment -> the one that followed it
        self._last: tuple[int, ...] = ()
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

    # --- a rank that needs a collective ----------------------------------------------------------------------------

    def ask(self, number: int, kind: int) -> None:
        """Return when all ranks take part in this collective of a participant; serve other ranks until then."""
        mine = number * self.KINDS + kind + 1
        while True:
            if self._committed:
                agreed = self._committed.pop()
                self._unused |= agreed != mine
            else:
                agreed = self._agree(mine)
            self._record(agreed, agreed == mine)
            if agreed == mine:
                return
            self._serve(agreed)

    def _agree(self, mine: int) -> int:
        """Exchange requests, and return one of them. At the beginning of a segment, commit to the rest of a known one,
        if all ranks ask for its first collective.
        """
        status, total, squares = self._messages.sum_scalars(ASKING, mine, mine * mine)
        if status % ASKING:
            self.reset()
            self._messages.raise_error()
        ranks = self._messages.size()
        all_alike = status // ASKING % ASKING == ranks and total * total == ranks * squares
        known = self._known.get(self._last, ())
        if self._fresh and all_alike and known[:1] == (mine,):
            self._committed = list(reversed(known[1:]))
        self._fresh = False
        return mine if all_alike else self._chosen(mine)

    def _chosen(self, mine: int) -> int:
        """The request of most ranks; of those with equal numbers, that of the first rank."""
        asked = Counter(request for request in self._messages.gather(mine) if request)
        return asked.most_common(1)[0][0]

    # --- a rank that synchronizes ----------------------------------------------------------------------------------

    def status(self) -> int:
        """First scalar of a synchronization of this rank, after it has served all committed collectives."""
        while self._committed:
            self._unused = True
            self._record(self._committed[-1], False)
            self._serve(self._committed.pop())
        return UNUSED * self._unused

    def answer(self, status: int) -> bool:
        """Serve a request if a rank asks, according to the sum of the first scalars; if none does, end the segment and
        return False.
        """
        self._fresh = False
        if status // ASKING % ASKING:
            agreed = self._chosen(0)
            self._record(agreed, False)
            self._serve(agreed)
            return True
        if self._log:
            self._remember(bool(status // UNUSED))
        self.reset()
        return False

    def _remember(self, unused: bool) -> None:
        """Record this segment, without committed collectives that no rank needed."""
        segment = tuple(self._log)
        if unused:
            needed = self._messages.any_rank(self._used)
            segment = tuple(each for each, is_needed in zip(segment, needed, strict=True) if is_needed)
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[self._last] = segment
        self._last = segment

    def _record(self, agreed: int, used: bool) -> None:
        self._log.append(agreed)
        self._used.append(used)

    def _serve(self, agreed: int) -> None:
        number, kind = divmod(agreed - 1, self.KINDS)
        participant = self._participants[number]()
        assert participant is not None, "a sharded model must exist on all ranks while one of them uses it"
        participant.serve(kind)
