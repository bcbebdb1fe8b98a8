"""Number of samples per update over time: ramps by samples seen, and sizes that follow the noise scale."""

import copy
import io
import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.report.page import write_report
from samplewise.step.noise import Noise
from samplewise.step.sizes import NoiseFollower, WindowSizes
from samplewise.step.window import Counters

N = 97
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 5, generator=GENERATOR, dtype=torch.float64)
Y = torch.arange(N) % 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def losses_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def loader(batch=7, n=N, shuffle=False):
    return DataLoader(TensorDataset(X[:n], Y[:n]), batch_size=batch, shuffle=shuffle)


def step_of(samples, model=None, lr=0.1, **options):
    model = model or net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return sw.Step(model, optimizer, options.pop("loss_fn", losses_of), samples=samples, **options)


def planned(sizes, n, epochs, tail):
    """Sizes of all updates, by a loop over samples. `sizes`: samples seen -> samples per update."""
    windows, seen, window = [], 0, 0
    for _ in range(epochs):
        for _ in range(n):
            if window == 0:
                size = next(value for start, value in reversed(sizes.items()) if start <= seen)
            window += 1
            seen += 1
            if window == size:
                windows.append(window)
                window = 0
        if window and tail == "update":
            windows.append(window)
        window = window if tail == "carry" else 0
    return windows


def vector(step):
    return parameters_to_vector(step.model.parameters()).detach().clone()


# --- ramps ------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("tail", ["update", "drop", "carry"])
@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize("batch", [7, 50])
def test_a_ramp_is_the_textbook_loop(batch, microbatch, tail):
    sizes = {0: 4, 10: 6, 40: 13, 130: 5}
    step = step_of(sw.ramp(sizes), tail=tail, microbatch=microbatch)
    found = [update.samples for _ in range(2) for update in step.over(loader(batch))]
    expected = planned(sizes, N, 2, tail)
    assert found == expected
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    used = {"update": 2 * N, "carry": 2 * N, "drop": N}[tail]
    rows = [k % N for k in range(used)]
    if tail == "drop":  # windows of the second epoch begin with its first sample
        first = planned(sizes, N, 1, tail)
        rows = [*range(sum(first)), *range(N)]
    for size in expected:
        window, rows = rows[:size], rows[size:]
        optimizer.zero_grad()
        losses_of(model, (X[window], Y[window])).mean().backward()
        optimizer.step()
    torch.testing.assert_close(vector(step), parameters_to_vector(model.parameters()), rtol=0, atol=1e-12)


@given(
    starts=st.lists(st.integers(1, 60), max_size=3, unique=True),
    sizes=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    batch=st.integers(1, 15),
    tail=st.sampled_from(["update", "drop", "carry"]),
)
def test_totals_are_exact_for_every_ramp(starts, sizes, batch, tail):
    ramp = dict(zip([0, *sorted(starts)], sizes, strict=False))
    step = step_of(sw.ramp(ramp), tail=tail, recheck=False)
    found = [update.samples for _ in range(2) for update in step.over(loader(batch, 30))]
    assert found == planned(ramp, 30, 2, tail)
    assert step.counters.samples == 60
    assert step.counters.updates == len(found)


def test_a_window_across_a_start_keeps_its_size():
    step = step_of(sw.ramp({0: 4, 6: 10}))
    assert [update.samples for update in step.over(loader(batch=3, n=28))] == [4, 4, 10, 10]
    assert step.samples == 10


def test_samples_of_skipped_updates_count():
    step = step_of(sw.ramp({0: 4, 8: 8}), on_nonfinite="skip", lr=0.1)
    bad = X.clone()
    bad[5] = torch.nan
    updates = [u for batch in (bad[:24].split(4)) for u in step((batch, Y[: len(batch)]))]
    assert [(update.samples, update.skipped) for update in updates] == [(4, False), (4, True), (8, False), (8, False)]
    assert step.counters.samples == 24


def test_samples_is_the_number_of_the_open_window():
    step = step_of(sw.ramp({0: 4, 6: 10}))
    assert step.samples == 4
    step((X[:4], Y[:4]))
    step((X[4:8], Y[4:8]))
    assert step.samples == 10
    step((X[8:17], Y[8:17]))
    assert (step.samples, step.counters.updates) == (10, 2)
    step.samples = 9  # also the open window
    assert [u.samples for u in step((X[17:30], Y[17:30]))] == [9, 9]
    step.samples = sw.ramp({0: 2, 100: 50})
    assert step.samples == 2
    assert repr(step.config.settings()["samples"]) == "ramp({0: 2, 100: 50})"
    assert "samples=ramp({0: 2, 100: 50})" in repr(step)


def test_transforms_of_the_whole_window_see_the_size_of_the_window():
    lengths = []

    def rank(losses):
        lengths.append(len(losses))
        return torch.ones_like(losses)

    step = step_of(sw.ramp({0: 3, 3: 8}), transforms=[sw.weight(rank, window=True)], microbatch=2, recheck=False)
    step.run(loader(batch=5, n=19))
    assert [n for n in lengths if n > 1][-2:] == [8, 8]


# --- resume -----------------------------------------------------------------------------------------------------------


def saved(step):
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (step.model, step.optimizer, step)], file)
    file.seek(0)
    return file


def resumed(step, file):
    for part, state in zip((step.model, step.optimizer, step), torch.load(file), strict=True):
        part.load_state_dict(state)
    return step


SCHEDULES = {
    "ramp": lambda: sw.ramp({0: 4, 10: 9, 40: 16}),
    "noise": lambda: sw.follow_noise(at_least=2, at_most=16, patience=2, decay=0.5),
}


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("at", [2, 5, 9, 20])
def test_resume_is_bit_identical_also_in_an_open_window(kind, at):
    batches = [(X[k : k + 3], Y[k : k + 3]) for k in range(0, 93, 3)]
    whole = step_of(SCHEDULES[kind]())
    expected = [u.samples for batch in batches for u in whole(batch)]
    first = step_of(SCHEDULES[kind]())
    sizes = [u.samples for batch in batches[:at] for u in first(batch)]
    second = resumed(step_of(SCHEDULES[kind]()), saved(first))
    sizes += [u.samples for batch in batches[at:] for u in second(batch)]
    assert sizes == expected
    assert len(set(expected)) > 2
    assert torch.equal(vector(whole), vector(second))


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_trainer_resumes_bit_identical_with_the_same_log(kind, tmp_path):
    class Stop:
        def on_update(self, trainer, update):
            if update.index == 7:
                trainer.stop("test")

    def trainer(name, callbacks=()):
        step = step_of(SCHEDULES[kind](), tail="carry")
        checkpoint = sw.callbacks.ModelCheckpoint(every="1up")
        return sw.Trainer(step, tmp_path / name, [*callbacks, checkpoint], progress=False, device="cpu", log_every=1)

    def log(name):
        lines = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        fields = ("kind", "update", "samples", "samples_per_update", "batch", "scale", "loss")
        return [{name: line[name] for name in fields if name in line} for line in lines if line["kind"] != "end"]

    data = loader(batch=11, shuffle=True)
    whole = trainer("whole")
    whole.fit(data, epochs=2)
    trainer("parts", [Stop()]).fit(data, epochs=2)
    second = trainer("parts")
    second.fit(data, epochs=2, resume=True)
    assert torch.equal(vector(whole.step), vector(second.step))
    assert log("whole") == log("parts")
    train = [line for line in log("whole") if line["kind"] == "train"]
    assert {line["samples_per_update"] for line in train} >= {4, 9, 16} if kind == "ramp" else {4, 8, 16}
    noise = [line for line in log("whole") if line["kind"] == "noise"]
    assert bool(noise) == (kind == "noise")
    assert all(math.isfinite(line["scale"]) and line["batch"] in (2, 4, 8, 16) for line in noise)
    assert whole.expected_updates is None
    settings = json.loads((tmp_path / "whole" / "run.json").read_text())["settings"]
    assert settings["samples"] == repr(SCHEDULES[kind]())
    page = write_report(tmp_path / "whole", tmp_path / "report.html").read_text()
    assert "Samples per update" in page
    assert ("Noise scale and batch size over updates" in page) == (kind == "noise")


def test_a_state_of_another_schedule_continues_with_the_one_of_the_step():
    fixed = step_of(8)
    fixed.run(loader(n=24))
    follow = resumed(step_of(sw.follow_noise(4, 64)), saved(fixed))
    assert follow.samples == 4
    follow._windows.sizes.follower.size = 32
    assert resumed(step_of(sw.follow_noise(3, 24)), saved(follow)).samples == 24
    assert resumed(step_of(sw.follow_noise(3, 40)), saved(follow)).samples == 24
    assert resumed(step_of(sw.follow_noise(64, 128)), saved(follow)).samples == 64
    assert resumed(step_of(8), saved(follow)).samples == 8
    assert resumed(step_of(sw.ramp({0: 2, 24: 7})), saved(follow)).samples == 7


# --- follow_noise -----------------------------------------------------------------------------------------------------


def follower(at_least=4, at_most=40, **options):
    return NoiseFollower(sw.follow_noise(at_least, at_most, **{"ratio": 1.0, "patience": 3, "decay": 0.0, **options}))


def feed(sizes, scale, times, monkeypatch):
    """Sizes after updates with this noise scale."""
    noise = scale if isinstance(scale, Noise) else Noise(trace=scale, signal=1.0)
    monkeypatch.setattr("samplewise.step.sizes.noise_of_update", lambda update, norms: noise)
    update = type("Update", (), {"_was_skipped": False, "_parts": [], "norms": None})()
    found = []
    for _ in range(times):
        sizes.record(update)
        found.append(sizes.size)
    return found


def test_sizes_change_after_patience_updates_beyond_the_next_size(monkeypatch):
    sizes = follower()
    assert sizes.schedule.sizes == [4, 8, 16, 32, 40]
    assert feed(sizes, 8.0, 4, monkeypatch) == [4, 4, 8, 8]
    assert feed(sizes, 15.9, 9, monkeypatch) == [8] * 9  # below the next size
    assert feed(sizes, 4.1, 9, monkeypatch) == [8] * 9  # above the previous one
    assert feed(sizes, 4.0, 3, monkeypatch) == [8, 8, 4]
    assert feed(sizes, 1e9, 13, monkeypatch) == [4, 4, 8, 8, 8, 16, 16, 16, 32, 32, 32, 40, 40]
    assert feed(sizes, 0.1, 30, monkeypatch)[-1] == 4


def test_updates_in_a_row(monkeypatch):
    sizes = follower()
    for scale in (100.0, 100.0, 5.0, 100.0, 100.0, 0.1, 100.0, 100.0):
        assert feed(sizes, scale, 1, monkeypatch) == [4]
    assert feed(sizes, 100.0, 1, monkeypatch) == [8]


def test_ratio_multiplies_the_noise_scale(monkeypatch):
    assert feed(follower(ratio=0.25), 31.0, 9, monkeypatch) == [4] * 9
    assert feed(follower(ratio=0.25), 32.0, 3, monkeypatch)[-1] == 8


@pytest.mark.parametrize("noise", [Noise(4.0, 0.0), Noise(4.0, -1.0)])
def test_a_signal_hidden_by_noise_counts_as_an_infinite_scale(noise, monkeypatch):
    assert feed(follower(), noise, 30, monkeypatch)[-1] == 40


def test_no_noise_counts_as_scale_zero_and_no_values_as_no_update(monkeypatch):
    sizes = follower()
    feed(sizes, 100.0, 6, monkeypatch)
    assert feed(sizes, Noise(math.nan, 1.0), 9, monkeypatch) == [16] * 9
    assert feed(sizes, Noise(1.0, math.inf), 9, monkeypatch) == [16] * 9
    monkeypatch.setattr("samplewise.step.sizes.noise_of_update", lambda update, norms: None)
    assert feed(sizes, Noise(0.0, 0.0), 9, monkeypatch) == [16] * 9
    assert feed(sizes, Noise(-1.0, 2.0), 3, monkeypatch)[-1] == 8


def test_estimates_are_those_of_the_callback():
    """Also with weights and counts; the average is that of the gradients, sample by sample."""

    def counted(model, batch):
        counts = (batch[1] + 1).double()
        return losses_of(model, batch) * counts, counts

    step = step_of(sw.follow_noise(6, 48, decay=0.9), lr=0.0, loss_fn=counted, transforms=[sw.clip(0.5)], microbatch=4)
    noise = sw.NoiseScale(decay=0.9)
    for update in step.over(loader(batch=10)):
        if update.samples < 2:
            continue
        noise.on_update(update)
        average = step._windows.sizes.follower.average.value
        assert average.scale == pytest.approx(noise.value.scale, rel=1e-12)
        assert average.trace == pytest.approx(noise.value.trace, rel=1e-12)


def test_the_size_follows_noise_that_grows():
    """Gradients with a common part that becomes smaller: y = w·x has noise of its own."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6000, 10, generator=generator, dtype=torch.float64)
    y = x @ torch.ones(10, 1).double() + 0.5 * torch.randn(6000, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(10, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    step = sw.Step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.02),
        lambda model, batch: (model(batch[0]) - batch[1]).square().sum(1),
        samples=sw.follow_noise(at_least=8, at_most=256, decay=0.9),
    )
    sizes = [update.samples for update in step.over(DataLoader(TensorDataset(x, y), batch_size=64))]
    assert sizes[0] == 8
    assert sizes[-2] == 256
    assert sorted(sizes[:-1]) == sizes[:-1]


def test_norms_are_recorded_and_an_assigned_schedule_begins_at_once():
    step = step_of(8)
    step((X[:12], Y[:12]))
    step.samples = sw.follow_noise(6, 24, patience=1, decay=0.0)  # the open window has no norms
    assert step.samples == 6
    (update,) = step((X[12:14], Y[12:14]))
    assert update.samples == 6
    assert not step._windows.sizes.follower.average.weight
    (update,) = step((X[14:20], Y[14:20]))
    assert len(update.norms) == 6
    assert step._windows.sizes.follower.average.weight == 1.0


# --- compiled updates -------------------------------------------------------------------------------------------------


@pytest.mark.sweep(1 / 2)
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("way", ["over", "run"])
def test_compiled_updates_have_the_same_sizes(kind, way):
    steps = [step_of(SCHEDULES[kind](), compile=compile, recheck=False) for compile in (False, True)]
    sizes = []
    for step in steps:
        if way == "run":
            step.run(loader(batch=N))
            sizes.append(step.counters.updates)
        else:
            sizes.append([update.samples for update in step.over(loader(batch=N))])
    assert sizes[0] == sizes[1]
    assert steps[1].compiled == "compiled"
    torch.testing.assert_close(vector(steps[0]), vector(steps[1]), rtol=1e-9, atol=1e-9)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "starts of a ramp must begin with 0 and increase; found none"),
        ({5: 2}, "must begin with 0 and increase; found 5"),
        ({0: 2, 9: 3, 5: 4}, "must begin with 0 and increase; found 0, 9, 5"),
        ({0: 2, 5: 0}, "sizes of a ramp must be positive; found 0"),
        ({0: 2.0}, r"must map whole numbers of samples seen to whole numbers of samples per update; found {0: 2.0}"),
        ({0: True}, "must map whole numbers"),
        ({-1: 2, 0: 3}, "must map whole numbers"),
        ([32, 64], r"must map whole numbers .*; found \[32, 64\]\. Write sw\.ramp"),
    ],
)
def test_bad_ramps(sizes, message):
    with pytest.raises(ValueError, match=message):
        sw.ramp(sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 8), "at_least must be 2 or more, because one sample shows no noise"),
        ((16, 8), "at_most not smaller; found at_least=16 and at_most=8"),
        ((4, 8.0), "at_most must be a positive whole number; found 8.0"),
        ((4, 8, {"patience": 0}), "patience must be a positive whole number; found 0"),
        ((4, 8, {"ratio": 0}), "ratio must be positive and finite; found 0"),
        ((4, 8, {"ratio": math.inf}), "ratio must be positive and finite; found inf"),
        ((4, 8, {"decay": 1}), r"decay must lie in \[0, 1\); found 1"),
        ((4, 8, {"decay": "slow"}), r"decay must lie in \[0, 1\); found .slow."),
    ],
)
def test_bad_arguments_of_follow_noise(arguments, message):
    *sizes, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ValueError, match=message):
        sw.follow_noise(*sizes, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"transforms": [sw.noise(0.1)]},
            "found noise.*, which adds to the sum .* Use a number of samples, or sw.ramp",
        ),
        ({"transforms": [sw.drop(largest=1)]}, "which depends on the other samples of the window"),
        ({"transforms": [sw.clip(1.0, by="parameter")]}, "which weighs each parameter by itself"),
        ({"aggregate": sw.per(10)}, "means over tokens or samples; found aggregate=per"),
    ],
)
def test_follow_noise_refuses_updates_without_a_noise_scale(options, message):
    with pytest.raises(ValueError, match=message):
        step_of(sw.follow_noise(4, 8), **options)
    step = step_of(4, **options)
    with pytest.raises(ValueError, match=message):
        step.samples = sw.follow_noise(4, 8)
    assert step.samples == 4


def test_where_schedules_are_refused():
    with pytest.raises(ValueError, match=r"samples must be a positive integer.*; found {0: 4}\. .*pass sw\.ramp"):
        step_of({0: 4})
    plan = sw.Privacy(noise_multiplier=1.0, delta=1e-5, updates=3, sample_rate=0.1, clip=1.0)
    with pytest.raises(sw.PrivacyError, match=r"samples must have its default with privacy=.*; found ramp\({0: 4}\)"):
        step_of(sw.ramp({0: 4}), privacy=plan)
    with pytest.raises(ValueError, match=r"Online needs a step with samples=1, .*; found samples=ramp\({0: 1, 9: 2}\)"):
        sw.Online(step_of(sw.ramp({0: 1, 9: 2}), loss_fn=nn.CrossEntropyLoss()))
    model = nn.Linear(5, 3)
    step = step_of(sw.ramp({0: 1}), model=model, loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(sw.ExportError, match=r"a fixed number of samples; found samples=ramp\({0: 1}\)"):
        sw.export_update(step, "none.pt2", (torch.zeros(1, 5), torch.zeros(1, dtype=torch.long)))


def test_values():
    assert sw.ramp({0: 4, 9: 5}) == sw.ramp({0: 4, 9: 5}) != sw.ramp({0: 4})
    assert copy.deepcopy(sw.follow_noise(2, 9)) == sw.follow_noise(2, 9)
    options = "at_least=2, at_most=9, ratio=2.0, decay=0.5, patience=10"
    assert repr(sw.follow_noise(2, 9, decay=0.5, ratio=2)) == f"follow_noise({options})"
    assert WindowSizes(None, Counters()).is_fixed
