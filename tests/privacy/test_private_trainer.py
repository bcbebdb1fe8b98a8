"""Private trainings with files: killed and resumed runs, spending, key, and what log and checkpoints must not hold."""

import json
import os
import re
import shutil
import signal
import stat
import sys
import warnings
from pathlib import Path

import forks
import pytest
import torch
from killed_private import UPDATES, make, trainer
from private_runs import data, plan
from private_runs import make as make_small
from torch.utils.data import TensorDataset

import samplewise as sw
from samplewise.errors import CheckpointError, PrivacyError
from samplewise.privacy.release_log import KEY_FILE, LOG_FILE
from samplewise.privacy.rng import Secret

pytest.importorskip("dp_accounting")

SCRIPT = Path(__file__).with_name("killed_private.py")
SPENT = f"all {UPDATES} updates that are paid for are made"


def parameters(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def lines(directory):
    """Releases in the log; the first line has its version, the settings, and the place of the log."""
    first, *rest = [json.loads(line) for line in (directory / LOG_FILE).read_text().splitlines()]
    assert list(first) == ["format_version", "settings", "place"]
    return rest


class Interrupt:
    def __init__(self, at):
        self.at = at

    def on_update(self, update):
        if update.index == self.at:
            raise KeyboardInterrupt


def interrupted(directory, at, keep=None, **options):
    """Run that is interrupted after an update. `keep`: update of the only checkpoint that stays."""
    _, loader, step = make(**options)
    with pytest.raises(KeyboardInterrupt):
        trainer(step, directory, Interrupt(at)).fit(loader)
    if keep is not None:
        for path in directory.rglob("*.ckpt"):
            if f"{keep}" not in path.name:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return step


def resumed(directory, lr=0.2, **options):
    model, loader, step = make(lr=lr, **options)
    trainer(step, directory).fit(loader, resume=True)
    return model, step


def uninterrupted(directory, key):
    """Parameters of a run that is not interrupted, with the key of another."""
    model, loader, step = make()
    step.privacy.plan._state.secret = Secret(key)
    trainer(step, directory).fit(loader)
    return parameters(model)


def checkpoints(directory):
    return sorted(path.name for path in directory.rglob("*.ckpt"))


# ---------------------------------------------------------------------------------------------------------- killed


def killed_and_resumed(directory, kills):
    key = None
    for kill in kills:
        done = forks.run([sys.executable, str(SCRIPT), str(directory), *map(str, kill)], capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        assert stat.S_IMODE((directory / KEY_FILE).stat().st_mode) == 0o600
        key = key or (directory / KEY_FILE).read_bytes()
        made = [line["update"] for line in lines(directory)]
        assert made == list(range(kill[0] + 1))  # recorded once, also the one that was not applied
        assert (directory / KEY_FILE).read_bytes() == key
    forks.run([sys.executable, str(SCRIPT), str(directory), "-1"], check=True)
    assert [line["update"] for line in lines(directory)] == list(range(UPDATES))
    assert not (directory / KEY_FILE).exists()
    other = directory.with_name("uninterrupted")  # a process of its own: this one may round differently
    other.mkdir()
    (other / KEY_FILE).write_bytes(key)
    first = json.loads((directory / LOG_FILE).read_text().splitlines()[0])
    del first["place"]
    (other / LOG_FILE).write_text(json.dumps(first) + "\n")  # a key without its log is not used
    forks.run([sys.executable, str(SCRIPT), str(other), "-1"], check=True)
    found, expected = (torch.load(each / "parameters.pt") for each in (directory, other))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow  # test_spending_is_recorded_before_the_update: the same without processes
def test_killed_before_the_first_checkpoint_and_inside_an_update(tmp_path):
    killed_and_resumed(tmp_path / "run", [(3, "before")])


@pytest.mark.slow
def test_killed_twice(tmp_path):
    killed_and_resumed(tmp_path / "run", [(2, "after"), (13, "before")])


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("update", [0, 4, 5, 9, 10, 17, 22])
def test_killed_at_any_update(tmp_path, update, when):
    killed_and_resumed(tmp_path / "run", [(update, when)])


# --------------------------------------------------------------------------------------------------- spending, key


def test_spending_is_recorded_before_the_update(tmp_path):
    model, loader, step = make()
    apply = step.optimizer.step

    def fail():
        step.optimizer.step = apply
        raise OSError("the machine stops here")

    class Fail:
        def on_update(self, update):
            if update.index == 6:
                step.optimizer.step = fail

    with pytest.raises(OSError, match="stops here"):
        trainer(step, tmp_path, Fail()).fit(loader)
    assert [line["update"] for line in lines(tmp_path)] == list(range(8))
    assert step.privacy.spent().updates == 8 and step.counters.updates == 7
    key = (tmp_path / KEY_FILE).read_bytes()
    model, step = resumed(tmp_path)
    assert step.privacy.spent().updates == UPDATES
    assert torch.equal(parameters(model), uninterrupted(tmp_path / "other", key))


def test_a_line_that_cannot_be_written_is_not_forgotten(tmp_path):
    _, loader, step = make_small()
    step.privacy.open(tmp_path)
    spending = step.privacy.plan._release_log
    file = spending._file

    class Full:
        """File on a full disk: writes a part of each line."""

        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, text):
            return file.write(text[:10])

    spending._file = Full()
    with pytest.raises(OSError, match="written in part"):
        next(iter(step.over(loader)))
    spending._file = file
    assert step.privacy.spent().updates == 0
    next(iter(step.over(loader)))
    step.privacy.close()
    assert [line["update"] for line in lines(tmp_path)] == [0]


def test_the_key_is_kept_until_all_updates_are_made(tmp_path):
    model, loader, step = make()
    trainer(step, tmp_path).fit(loader, updates=7)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    key = (tmp_path / KEY_FILE).read_bytes()
    trainer(step, tmp_path).fit(loader, resume=True)
    assert step.privacy.left == 0 and step.counters.updates == UPDATES
    assert not (tmp_path / KEY_FILE).exists()
    assert torch.equal(parameters(model), uninterrupted(tmp_path / "other", key))
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert key not in everything and key.hex().encode() not in everything


def test_a_key_file_that_others_can_read_is_restricted(tmp_path):
    (tmp_path / KEY_FILE).touch(mode=0o644)
    os.chmod(tmp_path / KEY_FILE, 0o644)
    from samplewise.privacy.release_log import save_secret

    save_secret(tmp_path, Secret.from_seed(1))
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600


def test_no_key_file_with_a_seed(tmp_path):
    interrupted(tmp_path, 3, seed=5)
    assert not (tmp_path / KEY_FILE).exists()
    _, step = resumed(tmp_path, seed=5)
    assert step.privacy.spent().updates == UPDATES
    assert len(lines(tmp_path)) == UPDATES


def test_a_last_line_that_is_cut_off(tmp_path):
    interrupted(tmp_path, 8)
    path = tmp_path / LOG_FILE
    path.write_bytes(path.read_bytes()[:-9])
    key = (tmp_path / KEY_FILE).read_bytes()
    model, _ = resumed(tmp_path)
    assert [line["update"] for line in lines(tmp_path)] == list(range(UPDATES))
    assert torch.equal(parameters(model), uninterrupted(tmp_path / "other", key))


def test_a_log_that_is_damaged(tmp_path):
    interrupted(tmp_path, 8)
    path = tmp_path / LOG_FILE
    path.write_bytes(path.read_bytes().replace(b'"update": 3', b'"update" 3'))
    with pytest.raises(
        PrivacyError, match=r"privacy.jsonl must have one JSON object per line.*Restore it from a backup"
    ):
        resumed(tmp_path)


def test_a_log_that_is_lost(tmp_path):
    """The checkpoint knows how many updates were made before it."""
    interrupted(tmp_path, 8)
    (tmp_path / LOG_FILE).unlink()
    _, step = resumed(tmp_path)
    assert step.privacy.spent().updates >= UPDATES


# ---------------------------------------------------------------------------------------------- older checkpoints


def test_an_identical_replay_is_free(tmp_path):
    interrupted(tmp_path, 18, keep=5)
    assert len(lines(tmp_path)) == 19 and len(checkpoints(tmp_path)) == 1
    key = (tmp_path / KEY_FILE).read_bytes()
    model, step = resumed(tmp_path)
    assert [line["update"] for line in lines(tmp_path)] == list(range(UPDATES))
    assert step.privacy.spent().updates == UPDATES
    assert torch.equal(parameters(model), uninterrupted(tmp_path / "other", key))


def resume_with_another_rate(directory):
    model, loader, step = make()
    training = trainer(step, directory, Faster())
    return model, step, training.fit(loader, resume=True).reason


class Faster:
    """Another learning rate than that of the run."""

    def on_fit_start(self, trainer):
        for group in trainer.step.optimizer.param_groups:
            group["lr"] = 0.7


def test_another_learning_rate_is_counted_twice_with_new_noise(tmp_path):
    interrupted(tmp_path, 12, keep=5)
    before = lines(tmp_path)
    message = (
        r"update (\d+) must be repeated exactly, because its noise was used before; found another sum of gradients"
    )
    with warnings.catch_warnings(action="ignore"), pytest.raises(PrivacyError, match=message):
        resume_with_another_rate(tmp_path)
    *first, note = lines(tmp_path)
    assert first == before and note["diverged"] == 6 and note["branch"] == 0
    for _ in range(3):  # it ends at the same place, and is ended from then on
        with warnings.catch_warnings(action="ignore"):
            _, step, reason = resume_with_another_rate(tmp_path)
        assert reason == SPENT and step.privacy.left == 0 and step.counters.updates == 5 + UPDATES - 13
    assert not (tmp_path / KEY_FILE).exists()
    again = [line for line in lines(tmp_path) if "update" in line][len(first) :]
    assert len(again) == UPDATES - 13  # all that was left
    assert [line["update"] for line in again] == list(range(5, 5 + UPDATES - 13))
    assert all(line["branch"] == 1 for line in again)
    assert {line["digest"] for line in again}.isdisjoint(line["digest"] for line in first)


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("duration", [{}, {"updates": UPDATES}, {"epochs": 2}], ids=str)
def test_the_same_trainer_after_a_divergence(tmp_path, resume, duration):
    """The second call of fit goes on with new noise, and each call ends without an error."""
    interrupted(tmp_path, 12, keep=5)
    _, loader, step = make()
    training = trainer(step, tmp_path, Faster())
    with warnings.catch_warnings(action="ignore"):
        with pytest.raises(PrivacyError, match="must be repeated exactly"):
            training.fit(loader, resume=True, **duration)
        for _ in range(2):
            assert training.fit(loader, resume=resume, **duration).reason == SPENT
    assert step.privacy.spent().updates == UPDATES and step.privacy.left == 0
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()][-1]["reason"] == SPENT


def test_a_training_by_epochs_is_resumed_inside_an_epoch(tmp_path):
    interrupted(tmp_path, 12, updates=20)
    _, loader, step = make(updates=20)
    assert trainer(step, tmp_path).fit(loader, epochs=2, resume=True).reason == "2 epochs are done"
    assert step.privacy.spent().updates == 20
    with pytest.raises(PrivacyError, match="at most the 20 updates that are paid for; found 30"):
        trainer(step, tmp_path).fit(loader, epochs=3, resume=True)


def test_a_training_that_makes_all_its_updates_ends_with_its_epoch(tmp_path):
    """Nothing is cut off at the end: the last epoch is validated."""
    _, loader, step = make(updates=20)
    validation = torch.utils.data.DataLoader(loader.dataset.dataset, 20)
    assert trainer(step, tmp_path).fit(loader, validation, epochs=2).reason == "2 epochs are done"
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in log].count("validation") == 2


def test_branches_have_other_draws_and_noise():
    _, loader, step = make_small()
    sampler = loader.batch_sampler
    assert any(list(sampler.draw(t, 0)) != list(sampler.draw(t, 1)) for t in range(3))
    state = step.privacy.plan._state
    noises = []
    for branch in (0, 1):
        state.branch = branch
        step.config.policy._pay()
        noises.append(step.config.policy._stream.normal((100,), torch.float64))
    assert (noises[0] - noises[1]).abs().min() > 0
    assert abs(torch.corrcoef(torch.stack(noises))[0, 1]) < 0.4


def test_a_lost_key_is_replaced_and_the_updates_are_counted_again(tmp_path):
    interrupted(tmp_path, 9, keep=5)
    (tmp_path / KEY_FILE).unlink()
    _, loader, step = make()
    assert trainer(step, tmp_path).fit(loader, resume=True).reason == SPENT
    assert len(lines(tmp_path)) == UPDATES  # 10 with the old key, the rest with the new one
    assert len({line["key"] for line in lines(tmp_path)}) == 2
    assert not (tmp_path / KEY_FILE).exists()


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": 0.6}, r"found clip='clip\(0.6\)' after 'clip\(0.5\)'"),
        ({"clip": sw.clip(0.5, by="parameter")}, r"found clip=\"clip\(0.5, by='parameter'\)\" after 'clip\(0.5\)'"),
        ({"noise_multiplier": 1.1}, "found noise_multiplier=1.1 after 1.0"),
        ({"sample_rate": 0.2}, "found sample_rate=0.2 after 0.1"),
        ({"updates": 30}, "found updates=30 after 24"),
        ({"delta": 1e-4, "secure": True}, "found delta=0.0001 after 0.001, secure=True after False"),
    ],
    ids=str,
)
def test_changed_settings(tmp_path, change, message):
    interrupted(tmp_path, 6)
    before = (tmp_path / LOG_FILE).read_bytes()
    rule = "a run must be continued with the privacy settings it was started with; "
    with pytest.raises(PrivacyError, match=rule + message):
        resumed(tmp_path, **change)
    assert (tmp_path / LOG_FILE).read_bytes() == before


def test_another_data_set(tmp_path):
    _, loader, step = make_small()
    training = sw.Trainer(step, tmp_path, [sw.callbacks.ModelCheckpoint(every="1up"), Interrupt(3)], progress=False)
    with pytest.raises(KeyboardInterrupt):
        training.fit(loader)
    _, loader, step = make_small(dataset=TensorDataset(*data(39)))
    with pytest.raises((PrivacyError, CheckpointError), match=r"(?s)39.*40"):
        sw.Trainer(step, tmp_path, progress=False).fit(loader, resume=True)


def test_a_run_without_privacy_is_not_continued_with_it(tmp_path):
    _, loader, step = make_small()
    training = sw.Trainer(step, tmp_path, [sw.callbacks.ModelCheckpoint(every="1up"), Interrupt(3)], progress=False)
    with pytest.raises(KeyboardInterrupt):
        training.fit(loader)
    state = step.state_dict()
    model, _, _ = make_small()
    plain = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.CrossEntropyLoss())
    with pytest.raises(PrivacyError, match="must be continued as one; found a step without privacy"):
        plain.load_state_dict(state)
    with pytest.raises(PrivacyError, match="must be continued as one; found a state without privacy"):
        step.load_state_dict(plain.state_dict())


# ---------------------------------------------------------------------------------------------------- side channels


def run_with(directory, capsys, **options):
    _, loader, step = make(**options)
    trainer(step, directory, progress=True).fit(loader)
    log = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return step, log, "".join(capsys.readouterr())


def numbers_in(state, found=None):
    """All ints of a nested state, by path."""
    found = {} if found is None else found

    def walk(value, path):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, (*path, str(key)))
        elif isinstance(value, (list, tuple)):
            for key, inner in enumerate(value):
                walk(inner, (*path, str(key)))
        elif isinstance(value, (int, float)):
            found[path] = value

    walk(state, ())
    return found


def test_log_and_checkpoints_hold_no_losses_and_no_sizes(tmp_path, capsys):
    step, log, printed = run_with(tmp_path, capsys, seed=2)
    kinds = {line["kind"] for line in log}
    assert {"train", "epoch"} <= kinds
    for line in log:
        assert not {"loss", "samples", "samples_per_second", "train_loss"} & set(line)
    assert "loss not shown (private)" in printed and "samples/s" not in printed
    (newest,) = checkpoints(tmp_path)[-1:]
    state = sw.load_checkpoint(next(tmp_path.rglob(newest)))
    hidden = {path: n for path, n in numbers_in(state).items() if {"samples", "microbatches", "loss"} & set(path)}
    assert hidden and not any(hidden.values()), hidden
    assert step.counters.samples == 0


def test_an_observed_run_shows_them(tmp_path, capsys):
    step, log, printed = run_with(tmp_path, capsys, seed=2, observe=True)
    assert all(line["loss"] > 0 and line["samples"] > 0 for line in log if line["kind"] == "train")
    assert "loss 1." in printed and "samples/s" in printed
    assert step.counters.samples > 0
    assert "observed: losses, norms and batch sizes are shown" in (tmp_path / "run.json").read_text()


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("at", [9, 19, 12, 23])
def test_no_loss_in_the_log_of_a_resumed_run(tmp_path, at):
    """Also if the first thing after the resume is the end of a pass of 10 draws, or of the run."""

    class Stop:
        def on_update(self, trainer, update):
            if update.index == at:
                trainer.stop("here")

    _, loader, step = make()
    trainer(step, tmp_path, Stop()).fit(loader)
    resumed(tmp_path)
    text = (tmp_path / "log.jsonl").read_text()
    kinds = [json.loads(line)["kind"] for line in text.splitlines()]
    assert kinds.count("epoch") >= 2
    assert "NaN" not in text and "loss" not in text and "samples" not in text


def values_in(directory):
    """All numbers in checkpoints, log, run.json and privacy.jsonl."""
    found = []
    for path in directory.rglob("*.ckpt"):
        found += [*numbers_in(sw.load_checkpoint(path)).values()]
    for name in ("log.jsonl", "run.json", LOG_FILE):
        for line in (
            (directory / name).read_text().splitlines() if name != "run.json" else [(directory / name).read_text()]
        ):
            found += [*numbers_in(json.loads(line)).values()]
    return found


SIZE = 4711


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"divide_by": 9.0}, False),
        ({"divide_by": 9.0, "observe": True}, False),
        ({"divide_by": 9.0, "mode": "automatic"}, False),
        ({"divide_by": 9.0, "users": [i % SIZE for i in range(2 * SIZE)]}, False),
        ({}, True),
        ({"divide_by": 9.0, "adaptive": 0.5}, True),
        pytest.param(
            {"divide_by": 9.0, "max_batch": 40, "dataset_size": SIZE, "accountant": "pld", "updates": 4},
            True,
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_the_number_of_samples_is_in_files_only_if_it_is_public(tmp_path, options, shown):
    size = len(options.get("users", range(SIZE)))
    privacy = plan(**{"sample_rate": 0.002, "updates": 6, "delta": 1e-5, **options})
    _, loader, step = make_small(privacy, dataset=TensorDataset(*data(size)))
    training = sw.Trainer(step, tmp_path, [sw.callbacks.ModelCheckpoint(every="1up")], progress=False, log_every="1up")
    training.fit(loader, updates=3)
    found = values_in(tmp_path)
    assert (SIZE in found) == shown
    assert shown or size not in found
    texts = [path.read_text() for path in tmp_path.rglob("*.json*")]
    assert shown or not any(re.search(rf"(?<![\d.])({SIZE}|{size})(?![\d.])", text) for text in texts)


def test_another_data_set_is_refused_if_its_size_is_secret(tmp_path):
    for name, seed in (("seed", 3), ("key", None)):
        directory = tmp_path / name
        _, loader, step = make_small(plan(divide_by=9.0, seed=seed))
        callbacks = [sw.callbacks.ModelCheckpoint(every="1up"), Interrupt(3)]
        with pytest.raises(KeyboardInterrupt):
            sw.Trainer(step, directory, callbacks, progress=False).fit(loader)
        _, loader, step = make_small(plan(divide_by=9.0, seed=seed), dataset=TensorDataset(*data(39)))
        with pytest.raises(PrivacyError, match="the same dataset; found 39 samples in place of another number"):
            sw.Trainer(step, directory, progress=False).fit(loader, resume=True)
        _, loader, step = make_small(plan(divide_by=9.0, seed=seed))
        assert "done" in sw.Trainer(step, directory, progress=False).fit(loader, resume=True).reason


def test_the_size_cannot_be_compared_without_the_key(tmp_path):
    _, loader, step = make_small(plan(divide_by=9.0, seed=None))
    callbacks = [sw.callbacks.ModelCheckpoint(every="1up"), Interrupt(3)]
    with pytest.raises(KeyboardInterrupt):
        sw.Trainer(step, tmp_path, callbacks, progress=False).fit(loader)
    (tmp_path / KEY_FILE).unlink()
    _, loader, step = make_small(plan(divide_by=9.0, seed=None))
    sw.Trainer(step, tmp_path, progress=False).fit(loader, resume=True)


# ---------------------------------------------------------------------------------------------- before it is spent


def test_callbacks_that_need_hidden_losses_are_refused_before_an_update(tmp_path):
    validation = torch.utils.data.DataLoader(TensorDataset(*data()), 10)
    for callback, validate in (
        (sw.callbacks.EarlyStopping(), None),
        (sw.callbacks.EarlyStopping("train_loss"), validation),
        (sw.callbacks.ModelCheckpoint(best=2), None),
    ):
        _, loader, step = make_small()
        with pytest.raises(
            PrivacyError, match=r"must monitor a value of the validation with privacy=.* Pass validate="
        ):
            sw.Trainer(step, tmp_path, [callback], progress=False).fit(loader, validate)
        assert step.privacy.spent().updates == 0
    _, loader, step = make_small()
    training = sw.Trainer(step, None, [sw.callbacks.EarlyStopping()], progress=False)
    assert "done" in training.fit(loader, validation).reason


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (dict(log_every="9samples"), "log_every"),
        (dict(callbacks=[sw.callbacks.LRMonitor("9samples")]), "every of LRMonitor"),
        (dict(callbacks=[sw.callbacks.ModelCheckpoint("9samples")]), "every of ModelCheckpoint"),
    ],
    ids=["log lines", "learning rates", "checkpoints"],
)
def test_intervals_in_samples_are_refused_before_an_update(tmp_path, options, name):
    _, loader, step = make_small()
    message = (
        f"^{name} must be a number of updates with privacy=, .* hidden; found '9samples'. Write for example '50up'"
    )
    with pytest.raises(PrivacyError, match=message):
        sw.Trainer(step, tmp_path, progress=False, **options).fit(loader)
    assert step.privacy.spent().updates == 0


def test_draws_in_place_of_validation_data_are_refused_before_an_update(tmp_path):
    _, loader, step = make_small()
    with pytest.raises(PrivacyError, match=r"validate must be a plain loader, .* found one of privacy\.loader"):
        sw.Trainer(step, tmp_path, progress=False).fit(loader, loader)
    assert step.privacy.spent().updates == 0


def test_the_number_of_zeroed_samples_is_not_saved():
    x, y = data()
    x[::2] = float("nan")
    _, loader, step = make_small(dataset=TensorDataset(x, y))
    for _ in step.over(loader):
        pass
    assert step.privacy.zeroed > 0
    assert step.state_dict()["privacy"]["zeroed"] == 0


# ------------------------------------------------------------------------------------------------------ hand loops


def test_state_of_a_loop_by_hand():
    model, loader, step = make_small()
    for count, _ in enumerate(step.over(loader), 1):
        if count == 3:
            break
    saved = step.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    assert saved[0]["privacy"]["update"] == saved[0]["privacy"]["spent"] == 3
    while step.privacy.left:
        list(step.over(loader))

    again, loader, step2 = make_small()
    again.load_state_dict(saved[1])
    step2.load_state_dict(saved[0])
    assert step2.privacy.spent().updates == 3
    while step2.privacy.left:
        list(step2.over(loader))
    assert torch.equal(parameters(again), parameters(model))
    assert step2.privacy.spent() == step.privacy.spent()


def test_spending_of_a_loop_by_hand_in_a_directory(tmp_path):
    _, loader, step = make_small()
    step.privacy.open(tmp_path)
    for count, _ in enumerate(step.over(loader), 1):
        if count == 3:
            break
    step.privacy.close()
    _, loader, again = make_small()
    again.privacy.open(tmp_path)
    assert again.privacy.spent().updates == 3
    for count, _ in enumerate(again.over(loader), 1):  # the same updates: nothing new is released
        if count == 4:
            break
    assert again.privacy.spent().updates == 4
    again.privacy.close()


def test_the_log_shows_no_loss_after_a_resume_at_the_end_of_a_pass(tmp_path):
    """The checkpoint was saved after the last update of the pass, before its line was written."""
    for more in (0, 1):
        _, loader, step = make(seed=3)
        trainer(step, tmp_path).fit(loader, updates=len(loader) + more, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any(line["kind"] == "epoch" for line in lines)
    assert not any("loss" in line for line in lines)
