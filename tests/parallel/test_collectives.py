"""What ranks say to each other, counted; and what becomes of one that fails or does not come."""

import pytest
import torch
from ranks import Ranks, give_up_after

from samplewise.errors import DistributedError
from samplewise.parallel import collectives

# ------------------------------------------------------------------------------------------------------------ alone


def test_one_process_talks_to_itself():
    assert (collectives.size() > 1, collectives.rank(), collectives.size()) == (False, 0, 1)
    tensor = torch.tensor([1.0, 2.0])
    with collectives.counted() as traffic:
        assert collectives.all_reduce_(tensor) is tensor and collectives.broadcast_(tensor) is tensor
        assert collectives.all_gather_rows(tensor).tolist() == [1.0, 2.0]
        assert (
            collectives.all_gather_object("a") == ["a"]
            and collectives.broadcast_object("a") == "a"
            and collectives.all_equal("a")
        )
        assert collectives.all_reduce_scalars(2, torch.tensor(3.0)) == [2.0, 3.0]
        collectives.barrier()
        collectives.barrier()
    assert not traffic.calls
    with pytest.raises(ValueError, match="mine"):
        collectives.barrier(ValueError("mine"))


# --------------------------------------------------------------------------------------------------------- together


def exchanged():
    me = collectives.rank()
    return (
        (collectives.size() > 1, me, collectives.size()),
        collectives.all_reduce_(torch.tensor([float(me), 1.0])).tolist(),
        collectives.all_gather_rows(torch.arange(me * 2).reshape(me, 2) + 10 * me).tolist(),
        [len(part) for part in collectives.all_gather_tensors(torch.zeros(me))],
        len(collectives.all_gather_rows(torch.zeros(0))),
        collectives.broadcast_(torch.tensor([me]), source=1).item(),
        collectives.all_gather_object({"rank": me, "text": "x" * me}),
        collectives.broadcast_object("from 0" if me == 0 else "nothing"),
        collectives.broadcast_object(["from", me], source=1),
        (collectives.all_equal("equal"), collectives.all_equal(me)),
        collectives.all_reduce_scalars(me, torch.tensor(0.5), 1),
    )


def test_what_is_exchanged(three):
    for me, found in enumerate(three.run(exchanged)):
        assert found == (
            (True, me, 3),
            [3.0, 3.0],
            [[10, 11], [20, 21], [22, 23]],
            [0, 1, 2],
            0,
            1,
            [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}, {"rank": 2, "text": "xx"}],
            "from 0",
            ["from", 1],
            (True, False),
            [3.0, 1.5, 3.0],
        )


def counted():
    with collectives.counted() as traffic:
        collectives.all_reduce_(torch.zeros(10))
        collectives.all_reduce_(torch.zeros(3, dtype=torch.float64))
        collectives.all_gather_rows(torch.zeros(collectives.rank()))
        collectives.all_reduce_scalars(1)
    collectives.all_reduce_(torch.zeros(1000))
    return dict(traffic.calls), dict(traffic.bytes)


def test_collectives_and_their_bytes_are_counted(two):
    meeting = 8 * collectives.ROOM
    expected = {"all_reduce": 3, "all_gather": 2}, {"all_reduce": 40 + 24 + meeting, "all_gather": 8 + 4}
    assert two.run(counted) == [expected] * 2


# --------------------------------------------------------------------------------------------------------- failures


def one_fails():
    problem = ValueError("a bad batch") if collectives.rank() == 1 else None
    try:
        collectives.all_reduce_scalars(7, error=problem)
    except Exception as error:
        collectives.barrier()  # the ranks are still in step
        collectives.barrier(error)  # whoever tells of it again does not meet anybody
    return "went on"


def test_an_error_of_one_rank_is_raised_on_all(three):
    found = three.errors(one_fails)
    other = (
        "DistributedError: rank 1 of 3 failed: ValueError: a bad batch. This rank stopped because of it. "
        "See the traceback of rank 1."
    )
    assert found == [other, "ValueError: a bad batch", other]


def one_stays_away():
    give_up_after(1.0)
    if collectives.rank() == 0:
        collectives.all_reduce_(torch.zeros(1))


def test_a_rank_that_does_not_come_is_not_waited_for_ever():
    team = Ranks(2)
    try:
        found = team.errors(one_stays_away)
    finally:
        team.close()
    assert found[1] == ""
    assert found[0].startswith(
        "DistributedError: all 2 ranks must take part in every collective; found that all_reduce failed on rank 0: "
    )
    assert found[0].endswith(
        ". Look for a rank that died, left its loop early, or is blocked in another call; "
        "init_process_group(timeout=...) sets how long ranks wait for each other."
    )


def test_the_error_is_one_of_ours_and_a_runtime_error():
    assert issubclass(DistributedError, RuntimeError)
