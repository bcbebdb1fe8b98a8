"""Collectives on request: ranks that need different ones run the same, in the same order, and all of them end."""

import contextlib
import random
import threading

import pytest

from samplewise.parallel.requests import ASKING, FAILED, GATHER, PASS, REDUCE, Requests

RANKS = 3


class Failed(Exception):
    """Of a rank, as the others see it."""


class World:
    """Ranks in threads, which exchange numbers at a barrier."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS, timeout=20)
        self.table = [None] * RANKS
        self.messages = 0

    def exchange(self, rank, value):
        self.table[rank] = value
        self.barrier.wait()
        found = list(self.table)
        self.messages += rank == 0
        self.barrier.wait()
        return found


class Rank:
    """Messages and participants of one rank; `done` is what it took part in."""

    def __init__(self, world, rank):
        self.world, self.rank, self.done = world, rank, []
        self.requests = Requests(self)
        self.participants = [Participant(self, number) for number in range(4)]

    def size(self):
        return RANKS

    def sum_scalars(self, *mine):
        return [sum(column) for column in zip(*self.world.exchange(self.rank, mine), strict=True)]

    def gather(self, mine):
        return self.world.exchange(self.rank, mine)

    def any_rank(self, flags):
        return [any(column) for column in zip(*self.world.exchange(self.rank, flags), strict=True)]

    def raise_error(self):
        raise Failed

    def need(self, number, kind):
        self.requests.ask(number, kind)
        self.done.append((number, kind))

    def meet(self, failed=False):
        while True:
            status, *_ = self.sum_scalars(self.requests.status() + FAILED * failed, 7, 7)
            if status % ASKING:
                self.requests.reset()
                raise Failed
            if not self.requests.answer(status):
                return


class Participant:
    def __init__(self, rank, number):
        self.rank, self.number = rank, number
        assert rank.requests.add(self) == number

    def serve(self, kind):
        self.rank.done.append((self.number, kind))


def together(program):
    """program(rank) on each rank, in threads; returns the ranks and their errors."""
    world = World()
    ranks = [Rank(world, number) for number in range(RANKS)]
    errors = [None] * RANKS

    def run(rank):
        try:
            program(rank)
        except Exception as error:
            errors[rank.rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ranks, errors


@pytest.mark.parametrize("seed", range(8))
def test_ranks_with_any_needs_do_the_same_in_the_same_order(seed):
    def program(rank):
        own = random.Random(10 * seed + rank.rank)
        shared = random.Random(seed)
        for _ in range(6):
            common = [(shared.randrange(4), shared.randrange(2)) for _ in range(shared.randrange(6))]
            needs = common if shared.random() < 0.5 else [need for need in common if own.random() < 0.6]
            for _ in range(shared.choice([1, 3])):  # the same again is predicted, and then not
                for need in needs:
                    rank.need(*need)
                rank.meet()

    ranks, errors = together(program)
    assert errors == [None] * RANKS
    assert ranks[0].done == ranks[1].done == ranks[2].done


@pytest.mark.parametrize("seed", range(8))
def test_ranks_with_any_passes_and_failures_end_and_agree(seed):
    """Ranks begin different numbers of passes, and one may fail at any place; the next round begins on all ranks."""

    def one_round(rank, own, shared):
        common = [(shared.randrange(3), GATHER) for _ in range(shared.randrange(4))]
        failing = shared.choice([None, None, 0, 1, 2])
        place = shared.randrange(8)
        begun = 0
        for _ in range(own.randrange(3) if shared.random() < 0.5 else 1):
            for need in [*common, (3, PASS), *reversed(common), (0, REDUCE)]:
                begun += 1
                if (failing, place) == (rank.rank, begun):
                    rank.meet(failed=True)
                if own.random() < 0.9 or need[1] == PASS:
                    rank.need(*need)
        rank.meet()

    def program(rank):
        own = random.Random(10 * seed + rank.rank)
        for k in range(10):
            with contextlib.suppress(Failed):
                one_round(rank, own, random.Random(f"{seed} {k // 3}"))
            rank.meet()

    ranks, errors = together(program)
    assert errors == [None] * RANKS
    assert ranks[0].done == ranks[1].done == ranks[2].done


def test_what_ranks_did_before_takes_no_messages():
    needs = [(0, 0), (1, 0), (1, 1), (0, 1)]
    counts = []

    def program(rank):
        for _ in range(4):
            before = rank.world.messages
            for need in needs:
                rank.need(*need)
            rank.meet()
            if rank.rank == 0:
                counts.append(rank.world.messages - before)

    ranks, errors = together(program)
    assert errors == [None] * RANKS
    assert counts == [5, 5, 2, 2]
    assert ranks[1].done == needs * 4


def test_sums_are_added_in_the_same_order_whichever_other_passes_ranks_run():
    """A rank with more forward passes than the others, in some windows, adds its part to theirs nevertheless."""

    def program(rank):
        for k in range(6):
            for _ in range(1 + (k in (1, 4)) * rank.rank):
                rank.need(0, GATHER)
            rank.need(2, PASS)
            for number in (1, 0):
                rank.need(number, GATHER)
                rank.need(number, REDUCE)
            rank.meet()

    ranks, errors = together(program)
    assert errors == [None] * RANKS
    for rank in ranks:
        assert [rank.done.count((number, REDUCE)) for number in (0, 1)] == [6, 6]


def test_collectives_that_no_rank_needs_any_more_are_left_out():
    def program(rank):
        for k in range(6):
            for need in [(0, 0), (1, 0), (2, 0)] if k < 3 else [(0, 0), (2, 0)]:
                rank.need(*need)
            rank.meet()

    ranks, _ = together(program)
    assert [ranks[1].done.count((number, 0)) for number in range(3)] == [6, 4, 6]  # once more, where it was expected


def test_the_record_of_a_segment_has_a_limit(monkeypatch):
    monkeypatch.setattr("samplewise.parallel.requests.LONGEST", 3)

    def program(rank):
        for _ in range(3):
            for number in (0, 1, 2, 3, 0, 1):
                rank.need(number, GATHER)
            assert len(rank.requests._log) <= 3
            rank.meet()

    ranks, errors = together(program)
    assert errors == [None] * RANKS
    assert ranks[0].done == ranks[1].done == [(number, GATHER) for number in (0, 1, 2, 3, 0, 1)] * 3


@pytest.mark.parametrize("after", [0, 2])
def test_a_rank_that_fails_stops_all_ranks(after):
    """Also in the middle of collectives to which it has committed itself."""

    def program(rank):
        for k in range(4):
            for number in range(4):
                if (k, number, rank.rank) == (3, after, 1):
                    rank.meet(failed=True)
                rank.need(number, 0)
            rank.meet()

    ranks, errors = together(program)
    assert [type(error) for error in errors] == [Failed] * RANKS
    assert ranks[0].done == ranks[1].done == ranks[2].done
