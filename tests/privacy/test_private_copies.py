"""One noise is used once: by one process, in one directory. Copies get a new key, or are refused."""

import copy
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
from pathlib import Path

import forks
import pytest
import torch
from private_runs import UPDATES, data, loss_fn, make, net, plan, train
from torch.utils.data import TensorDataset

import samplewise as sw
from samplewise.errors import PrivacyError
from samplewise.privacy.release_log import KEY_FILE, LOCK_FILE, LOG_FILE

pytest.importorskip("dp_accounting")

ONE_AT_A_TIME = "a directory of a private run must be used by one private training at a time; found that .* in use by "
COPIED = "a private step must not be copied, because the copy would use the same noise"
ONE_DIRECTORY = "the updates of one sw.Privacy must be recorded in one directory"


def secret_of(step):
    return step.privacy.plan._state.secret


def opened(directory, updates=0, **options):
    """Step without a seed, that records in a directory."""
    _, loader, step = make(plan(seed=None), **options)
    step.privacy.open(directory)
    if updates:
        train(step, loader, updates)
    return loader, step


# -------------------------------------------------------------------------------------------------------------- lock


def test_two_steps_cannot_use_a_directory(tmp_path):
    loader, step = opened(tmp_path, 2)
    _, _, other = make(plan(seed=None))
    with pytest.raises(PrivacyError, match=f"{ONE_AT_A_TIME}this process, process {os.getpid()} on host"):
        other.privacy.open(tmp_path)
    assert other.privacy.plan._state.secret != secret_of(step)
    train(step, loader, 1)
    step.privacy.close()
    other.privacy.open(tmp_path)
    assert other.privacy.plan._state.secret == secret_of(step)
    assert other.privacy.spent().updates == 3
    other.privacy.close()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_step_that_is_no_longer_used_does_not_hold_the_lock(tmp_path):
    opened(tmp_path, 2)
    _, step = opened(tmp_path)
    assert step.privacy.spent().updates == 2


HOLD = """
import sys
sys.path[:0] = {tests!r}
import test_private_copies as t
loader, step = t.opened(t.Path({directory!r}), 2)
print("open", flush=True)
sys.stdin.read()
"""


def test_another_process_holds_the_lock_until_it_is_killed(tmp_path):
    script = tmp_path / "hold.py"
    run = tmp_path / "run"
    script.write_text(HOLD.format(tests=[str(folder) for folder in Path(__file__).parents[:2]], directory=str(run)))
    holder = forks.Popen([sys.executable, str(script)], stdin=forks.subprocess.PIPE, stdout=forks.subprocess.PIPE)
    try:
        assert holder.stdout.readline().strip() == b"open"
        _, _, step = make(plan(seed=None))
        with pytest.raises(PrivacyError, match=f"{ONE_AT_A_TIME}process {holder.pid} on host"):
            step.privacy.open(run)
        with pytest.raises(PrivacyError, match=f"{ONE_AT_A_TIME}process {holder.pid} on host"):
            sw.Trainer(make(plan(seed=None))[2], run, progress=False).fit(make(plan(seed=None))[1])
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    step.privacy.open(run)
    assert step.privacy.spent().updates == 2
    step.privacy.close()


def test_a_lock_that_is_lost_stops_the_training(tmp_path):
    loader, step = opened(tmp_path, 1)
    (tmp_path / LOCK_FILE).write_text("{}")
    with pytest.raises(PrivacyError, match=r"must hold the lock of its directory of a private run until it ends"):
        train(step, loader, 1)
    assert step.privacy.spent().updates == 1
    step.privacy.close()


def test_steps_of_one_plan_share_the_log(tmp_path):
    privacy = plan(seed=None)
    _, loader, first = make(privacy)
    _, _, second = make(privacy)
    for step in (first, second):
        step.privacy.open(tmp_path)
    train(first, loader, 2)
    first.privacy.close()
    train(second, loader, 2)
    second.privacy.close()
    assert len((tmp_path / LOG_FILE).read_text().splitlines()) == 5
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_refused_directory_is_left_alone(tmp_path):
    _, step = opened(tmp_path, 1)
    step.privacy.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    _, _, other = make(plan(seed=None, clip=0.25))
    with pytest.raises(PrivacyError, match="must be continued with the privacy settings it was started with"):
        other.privacy.open(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# ------------------------------------------------------------------------------------------------------- directories


def resumed(directory):
    _, _, step = make(plan(seed=None))
    step.privacy.open(directory)
    step.privacy.close()
    return secret_of(step)


def test_the_same_directory_has_the_same_key(tmp_path):
    _, step = opened(tmp_path / "run", 2)
    step.privacy.close()
    assert resumed(tmp_path / "run") == secret_of(step)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert resumed(tmp_path / "moved") == secret_of(step)


def hard_links(source, target):
    shutil.copytree(source, target, copy_function=os.link)


def one_by_one(source, target):
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize("copied", [shutil.copytree, hard_links, one_by_one])
@pytest.mark.parametrize("updates", [0, 3])
def test_a_copy_of_a_directory_has_another_key(tmp_path, copied, updates):
    _, step = opened(tmp_path / "run", updates)
    step.privacy.close()
    copied(tmp_path / "run", tmp_path / "copy")
    _, _, other = make(plan(seed=None))
    other.privacy.open(tmp_path / "copy")
    assert secret_of(other) != secret_of(step)
    assert other.privacy.spent().updates == updates  # what its model has spent
    other.privacy.close()
    assert resumed(tmp_path / "copy") == secret_of(other)
    assert resumed(tmp_path / "run") == secret_of(step)


def log_lost(run, other):
    (run / LOG_FILE).unlink()
    return run


def key_copied(run, other):
    other.mkdir()
    shutil.copy(run / KEY_FILE, other)
    return other


def key_moved(run, other):
    other.mkdir()
    (run / KEY_FILE).rename(other / KEY_FILE)
    return other


def log_of_another_run(run, other):
    _, step = opened(other, 1)
    step.privacy.close()
    (other / LOG_FILE).rename(run / LOG_FILE)
    return run


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("change", [log_lost, key_copied, key_moved, log_of_another_run])
@pytest.mark.parametrize("updates", [0, 3])
def test_a_key_without_its_log_is_not_used(tmp_path, change, updates):
    """The updates that were made with it are not known."""
    _, step = opened(tmp_path / "run", updates)
    step.privacy.close()
    directory = change(tmp_path / "run", tmp_path / "other")
    _, again = opened(directory, 1)
    assert secret_of(again) != secret_of(step)
    again.privacy.close()
    assert resumed(directory) == secret_of(again)


def test_a_copy_of_a_training_repeats_no_noise(tmp_path):
    _, loader, step = make(plan(seed=None))
    sw.Trainer(step, tmp_path / "run", progress=False).fit(loader, updates=4)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for name, expected in (("run", UPDATES), ("copy", UPDATES)):
        _, loader, again = make(plan(seed=None))
        sw.Trainer(again, tmp_path / name, progress=False).fit(loader, resume=True)
        assert again.privacy.spent().updates == expected
        assert (secret_of(again) == secret_of(step)) == (name == "run")
    digests = [line for name in ("run", "copy") for line in (tmp_path / name / LOG_FILE).read_text().splitlines()[5:]]
    assert len(set(digests)) == 2 * (UPDATES - 4)


def test_a_second_directory_of_a_plan(tmp_path):
    loader, step = opened(tmp_path / "a")
    with pytest.raises(PrivacyError, match=f"{ONE_DIRECTORY}.*found {tmp_path / 'b'} after {tmp_path / 'a'}"):
        step.privacy.open(tmp_path / "b")
    step.privacy.open(tmp_path / "a")  # the same
    step.privacy.close()
    step.privacy.open(tmp_path / "b")  # nothing was spent in the first
    assert (tmp_path / "a" / KEY_FILE).read_bytes() != (tmp_path / "b" / KEY_FILE).read_bytes()
    train(step, loader, 2)
    step.privacy.close()
    for again in (step, make(step.privacy.plan)[2]):
        with pytest.raises(PrivacyError, match=ONE_DIRECTORY):
            again.privacy.open(tmp_path / "a")
        with pytest.raises(PrivacyError, match=ONE_DIRECTORY):
            sw.Trainer(again, tmp_path / "c", progress=False).fit(loader)
    step.privacy.open(tmp_path / "b")
    assert step.privacy.spent().updates == 2
    step.privacy.close()


def test_updates_before_the_log_was_opened_are_in_it(tmp_path):
    _, loader, step = make(plan(seed=None))
    train(step, loader, 3)
    step.privacy.open(tmp_path)
    train(step, loader, 1)
    step.privacy.close()
    _, _, again = make(plan(seed=None))
    again.privacy.open(tmp_path)
    assert again.privacy.spent().updates == 4
    again.privacy.close()


# ----------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("updates", [0, 3])
def test_a_deep_copy_of_a_plan_is_a_new_plan(updates):
    privacy = plan(seed=None)
    _, loader, step = make(privacy)
    if updates:
        train(step, loader, updates)
    other = copy.deepcopy(privacy)
    assert other._state.secret != privacy._state.secret
    assert repr(other) == repr(privacy) and other._settings == privacy._settings
    _, loader, step = make(other)
    assert step.privacy.spent().updates == 0
    train(step, loader)
    assert step.privacy.left == 0 and privacy._release_log.count == updates
    assert copy.deepcopy([privacy])[0]._state.secret not in (privacy._state.secret, other._state.secret)


def test_a_shallow_copy_of_a_plan_shares_its_position():
    privacy = plan(seed=None)
    same = copy.copy(privacy)
    assert same._state is privacy._state and same._release_log is privacy._release_log


@pytest.mark.parametrize("thing", ["step", "meter", "in a dict"])
def test_a_step_is_not_copied(thing):
    _, loader, step = make(plan(seed=None))
    train(step, loader, 1)
    with pytest.raises(PrivacyError, match=COPIED):
        copy.deepcopy({"step": step, "meter": step.privacy, "in a dict": {"step": step}}[thing])


def test_a_copied_loader_belongs_to_its_plan():
    privacy, other = plan(seed=None), plan(seed=None)
    _, loader, step = make(privacy)
    train(step, copy.deepcopy(loader), 1)
    with pytest.raises(PrivacyError, match="found one of another Privacy"):
        train(make(other)[2], copy.deepcopy(loader), 1)


@pytest.mark.parametrize("thing", ["plan", "step", "meter"])
def test_pickles_are_refused(thing):
    privacy = plan(seed=None)
    _, _, step = make(privacy, losses=loss_fn)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as caught:
        pickle.dumps({"plan": privacy, "step": step, "meter": step.privacy}[thing])
    if thing == "plan":
        assert "Create the sw.Privacy in the process that trains" in str(caught.value)


# ------------------------------------------------------------------------------------------------------------ forks


def in_a_fork(function):
    """Result of a function in a forked process, or its error as text."""
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # a fork does not have the other threads of OpenMP, and would wait for them
        try:
            result = function()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        theirs.send(result)
        os._exit(0)
    result = ours.recv() if ours.poll(120) else None
    os.kill(child, signal.SIGKILL)  # it has ended, or does not answer
    os.waitpid(child, 0)
    return result


def trained(privacy, loader=None, updates=2):
    """Key and first noisy sum of a training run."""
    model = net()
    loader = privacy.loader(TensorDataset(*data())) if loader is None else loader
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, privacy=privacy)
    train(step, loader, updates)
    return secret_of(step).bytes


def test_a_fork_before_the_first_update_has_another_key():
    privacy = plan(seed=None)
    before = privacy._state.secret.bytes
    keys = [in_a_fork(lambda: trained(privacy)) for _ in range(2)] + [trained(privacy)]
    assert all(isinstance(key, bytes) for key in keys) and len(set(keys)) == 3
    assert keys[2] == before


def test_a_fork_with_loader_and_step():
    privacy = plan(seed=None)
    _, loader, step = make(privacy)
    before = secret_of(step).bytes

    def child():
        train(step, loader, 2)
        return secret_of(step).bytes

    assert child() == before
    refused = in_a_fork(child)
    assert "PrivacyError" in refused and "is a fork of process" in refused

    other = plan(seed=None)
    _, loader, step = make(other)
    found = in_a_fork(child)
    assert isinstance(found, bytes) and found != secret_of(step).bytes


@pytest.mark.parametrize("closed", [False, True])
def test_a_fork_of_a_run_with_a_directory_is_refused(tmp_path, closed):
    loader, step = opened(tmp_path)
    if closed:
        train(step, loader, 1)
        step.privacy.close()
    log = (tmp_path / LOG_FILE).read_bytes()

    def child():
        train(step, loader, 1)

    assert "is a fork of process" in in_a_fork(child)
    assert "is a fork of process" in in_a_fork(lambda: step.privacy.open(tmp_path))
    assert (tmp_path / LOG_FILE).read_bytes() == log
    step.privacy.open(tmp_path)
    train(step, loader, 1)
    step.privacy.close()
    assert not (tmp_path / LOCK_FILE).exists()


def test_workers_may_be_forks():
    privacy = plan(seed=None)
    _, loader, step = make(privacy, loader={"num_workers": 1})
    before = secret_of(step)
    train(step, loader, 3)
    assert secret_of(step) == before


def test_seeded_plans_are_reproducible_everywhere(tmp_path):
    """They are not private, and say so."""
    privacy = plan(seed=3)
    assert in_a_fork(lambda: trained(privacy)) == privacy._state.secret.bytes
    assert copy.deepcopy(privacy)._state.secret == privacy._state.secret
