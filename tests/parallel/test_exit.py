"""Ranks end as they should while the threads of the process group still release the tensors of collectives."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import forks
import pytest
import torch
import torch.distributed as dist

from samplewise.parallel import collectives, release

SCRIPT = Path(__file__).with_name("leaving.py")
# torch 2.8 imports a package while the process ends, after which Python forgets the KeyboardInterrupt.
CODES = {"fails": {1}, "is interrupted": {-signal.SIGINT, 1}}
linux = pytest.mark.skipif(sys.platform != "linux", reason="threads of other systems are not seen")


def ends(store, *how):
    """Exit codes and error messages of two ranks."""
    ranks = []
    # A fork of the server ends with code 1 after a KeyboardInterrupt, not by the signal.
    popen = subprocess.Popen if "is interrupted" in how else forks.Popen
    with ExitStack() as stack:
        for rank in range(2):
            command = [sys.executable, SCRIPT, rank, store, *how]
            ranks.append(stack.enter_context(popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)))
        messages = [process.communicate(timeout=600)[1] for process in ranks]
    return [process.returncode for process in ranks], messages


def held_until_all_came():
    """Rank 1 comes when rank 0 has counted: until then the group of rank 0 holds on to what nobody else does."""
    release.drain_pending()
    store = dist.distributed_c10d._get_default_store()
    if collectives.rank() == 1:
        store.wait(["rank 0 has counted"])
    dist.all_reduce(release.handed_over(torch.zeros(3)), async_op=True)
    held = len(release._held)
    store.set("rank 0 has counted", "")
    release.drain_pending(60.0)
    return held, len(release._held)


def test_ranks_end_after_the_group_has_released_its_tensors(two):
    assert two.run(held_until_all_came)[0] == (1, 0)


@pytest.mark.sweep(1 / 5)
@linux
@pytest.mark.parametrize(
    "how",
    [
        ("none", "is interrupted"),
        ("ddp", "exits"),
        ("wrapped", "destroys"),
        ("fsdp", "destroys"),
        ("sharded", "fails"),
    ],
    ids=" ".join,
)
def test_a_tensor_that_is_released_late_does_not_abort_the_process(tmp_path, how):
    codes, messages = ends(tmp_path / "store", *how)
    assert set(codes) <= CODES.get(how[1], {0}), messages


@linux
@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp", "sharded"])
def test_ranks_end_on_a_busy_machine(tmp_path, how):
    """The release is not delayed on purpose; busy processes keep the threads of the process group from running."""
    with ExitStack() as stack:
        for _ in range(2):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        for repeat in range(5):
            codes, messages = ends(tmp_path / f"store-{repeat}", how, "starves")
            assert codes == [0, 0], messages
