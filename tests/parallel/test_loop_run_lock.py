"""Several ranks of one job hold one lock of the run directory; another job is refused on all of its ranks."""

import json
import os
from pathlib import Path

import pytest
from test_loop_trainer import loader, trainer

from samplewise.errors import CheckpointError
from samplewise.loop.run_dir import run_lock
from samplewise.parallel import collectives


class Looks:
    """Notes the process that holds the lock, at each update."""

    def __init__(self, run):
        self.run, self.holders = Path(run), []

    def on_update(self):
        self.holders.append(json.loads((self.run / "run.lock").read_text())["pid"])


def fitted(run):
    looks = Looks(run)
    reason = trainer(run, [looks]).fit(loader(), epochs=1).reason
    collectives.barrier()
    return reason, looks.holders, os.getpid(), (Path(run) / "run.lock").exists()


def test_one_lock_for_all_ranks(two, tmp_path):
    (reason, holders, first, left), (_, others, second, _) = two.run(fitted, tmp_path)
    assert reason == "1 epoch is done" and not left
    assert set(holders) == set(others) == {first} and first != second


def test_another_job_is_refused_on_all_ranks(two, tmp_path):
    lock = run_lock(tmp_path)
    lock.acquire()
    found = two.errors(fitted, tmp_path)
    lock.verify()
    lock.release()
    assert all(f"in use by process {os.getpid()} on host" in message for message in found)
    assert found[0].startswith("CheckpointError: ") and found[1].startswith("DistributedError: ")
    assert list(tmp_path.iterdir()) == []
    assert two.run(fitted, tmp_path)[1][0] == "1 epoch is done"


def loses_it(run):
    class Loses:
        def on_update(self):
            (Path(run) / "run.lock").unlink(missing_ok=True)
            collectives.barrier()

    trainer(run, [Loses()]).fit(loader(), epochs=1)


def test_a_lost_lock_ends_all_ranks(two, tmp_path):
    found = two.errors(loses_it, tmp_path)
    assert all("must hold the lock of its run directory until it ends" in message for message in found)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def fails(run, where):
    class Fails:
        def on_update(self):
            if collectives.rank() == where:
                raise ValueError("no")

    trainer(run, [Fails()]).fit(loader(), epochs=1)


@pytest.mark.parametrize("where", [0, 1])
def test_it_is_released_when_a_rank_fails(where, two, tmp_path):
    assert all("ValueError: no" in message for message in two.errors(fails, tmp_path, where))
    assert not (tmp_path / "run.lock").exists()


def shorter(run, samples, **options):
    trainer(run).fit(loader(samples, **options), epochs=1, resume=True)


def begun(run):
    trainer(run).fit(loader(), updates=1)


def test_other_data_inside_an_epoch(two, three, tmp_path):
    two.run(begun, tmp_path)
    for team in (two, three):
        found = team.errors(shorter, tmp_path, 22)
        assert all("dataset length 22 instead of 23 and sampler length 22 instead of 23" in each for each in found)
    assert all("batch size 3 instead of 4" in each for each in two.errors(_smaller, tmp_path))
    three.run(_smaller, tmp_path)  # other ranks count in samples


def _smaller(run):
    shorter(run, 23, batch_size=3)


def test_one_process_resumes_a_run_of_two(two, tmp_path):
    two.run(begun, tmp_path)
    with pytest.raises(CheckpointError, match="sampler SequentialSampler instead of RandomSampler"):
        shorter(tmp_path, 23, shuffle=False)
    shorter(tmp_path, 23, batch_size=8)
