"""State of `Online`: a resumed stream is bit-identical, files are written atomically and load safely."""

import copy
import json
import math

import pytest
import torch
from test_online_learning import OPTIMIZERS, Noisy, assert_same, make, net, snapshot, stream
from torch import nn

import samplewise as sw
from samplewise import Online
from samplewise.errors import CheckpointError
from samplewise.online.growth import CompileDelay


def samples(number, start=0):
    """Samples with new features and classes, and with losses that get larger."""
    x, y = stream(400, columns=8)
    for k in range(start, start + number):
        names = "abcdefgh"[: 2 + min(k // 40, 6)]
        yield dict(zip(names, x[k].tolist(), strict=False)), f"class {int(y[k]) + 1 + (k > 120 and k % 5 == 0)}"


def build(compile=False, noisy=False, scheduler=False):
    model = Noisy().double() if noisy else net(inputs=2, outputs=2)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step = sw.Step(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        samples=1,
        compile=compile,
        transforms=[sw.clip(1.0)],
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.7) if scheduler else None,
    )
    return Online(step)


@pytest.mark.sweep(1 / 8)
@pytest.mark.parametrize("where", [0, 1, 100, 256])
@pytest.mark.parametrize("kind", ["growing", "noisy"])
def test_a_resumed_stream_gives_bit_identical_results(where, kind, tmp_path):
    def make_online():
        torch.manual_seed(3)
        return build(noisy=kind == "noisy", scheduler=True)

    def rows(number, start=0):
        if kind == "growing":
            return samples(number, start)
        x, y = stream(400)
        return zip(x[start : start + number], y[start : start + number].tolist(), strict=True)

    whole = make_online()
    updates = [whole.learn_one(x, y) for x, y in rows(400)]
    first = make_online()
    for x, y in rows(where):
        first.learn_one(x, y)
    first.save(tmp_path / "online")
    second = make_online()
    for x, y in rows(150 if where else 0):  # loading replaces what was learned, also larger layers
        second.learn_one(x, y)
    second.load(tmp_path / "online")
    resumed = [second.learn_one(x, y) for x, y in rows(400 - where, where)]
    assert repr(resumed) == repr(updates[where:])
    assert_same(whole.state_dict(), second.state_dict())


@pytest.mark.usefixtures("backend")
def test_a_resumed_stream_compiles_the_same_updates(monkeypatch, tmp_path):
    monkeypatch.setattr(CompileDelay, "STABLE", 20)
    x, y = stream(400, columns=2)
    labels = [2 if k > 100 and k % 3 == 0 else int(value > 0) for k, value in enumerate(y)]
    whole = build(compile=True)
    updates = [whole.learn_one(row, label) for row, label in zip(x, labels, strict=True)]
    for where in (110, 300):
        first = build(compile=True)
        first.step._runner.cache._tried.add(
            next(iter(whole.step._runner.cache._tried))
        )  # no decision by measured times
        for k in range(where):
            first.learn_one(x[k], labels[k])
        second = build(compile=True)
        second.load_state_dict(first.state_dict())
        resumed = [second.learn_one(x[k], labels[k]) for k in range(where, 400)]
        assert second.step.compiled == whole.step.compiled == "compiled"
        assert repr(resumed) == repr(updates[where:])
        assert_same(whole.step.model.state_dict(), second.step.model.state_dict())


def test_a_state_is_a_copy():
    online = build()
    for x, y in samples(50):
        online.learn_one(x, y)
    state = online.state_dict()
    results = []
    for _ in range(2):
        online.load_state_dict(state)
        results.append([online.learn_one(x, y) for x, y in samples(100, 50)])
    assert results[0] == results[1]


def test_copies_and_clones():
    online = build()
    for x, y in samples(50):
        online.learn_one(x, y)
    twin = copy.deepcopy(online)
    assert twin.step.model is not online.step.model
    assert_same(twin.state_dict(), online.state_dict())
    assert [twin.learn_one(x, y) for x, y in samples(50, 50)] == [online.learn_one(x, y) for x, y in samples(50, 50)]
    fresh = online.clone()
    assert fresh.samples == 0 and fresh.classes == [] and fresh.step.model[0].in_features == 2
    assert_same(fresh.state_dict(), build().state_dict())
    assert online.clone(include_attributes=True).samples == 100
    assert online.clone({"classes": ["a", "b"]}).classes == ["a", "b"]


@pytest.mark.parametrize(
    "damage", ["bytes", "missing", "json", "checkpoint of another kind", "another model", "another task"]
)
def test_a_bad_file_changes_nothing(damage, tmp_path):
    online = build()
    for x, y in samples(100):
        online.learn_one(x, y)
    path = tmp_path / "online"
    online.save(path)
    if damage == "bytes":
        file = path / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        (path / "rank-0.safetensors").unlink()
    elif damage == "json":
        state = json.loads((path / "state.json").read_text())
        state["state"] = {"dict": []}
        (path / "state.json").write_text(json.dumps(state))
    elif damage == "checkpoint of another kind":
        from samplewise.loop.checkpoint import io

        io.write(path, {"model": online.step.model.state_dict()})
    elif damage == "another model":
        other = make(net(hidden=7))
        other.learn_one([1.0, 2.0, 3.0, 4.0], "a")
        other.save(path)
    else:
        other = make(net(outputs=1), criterion=nn.MSELoss())
        other.learn_one([1.0, 2.0, 3.0, 4.0], 1.0)
        other.save(path)
    before, _ = snapshot(online)
    with pytest.raises(CheckpointError):
        online.load(path)
    assert_same(before, snapshot(online)[0])
    other = build()
    for x, y in samples(120):
        other.learn_one(x, y)
    for x, y in samples(20, 100):
        online.learn_one(x, y)
    assert_same(online.state_dict(), other.state_dict())


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    online = build()
    for x, y in samples(10):
        online.learn_one(x, y)
    path = tmp_path / "online"
    online.save(path)
    online.learn_one({"a": 1.0}, object())
    with pytest.raises(TypeError, match="found object"):
        online.save(path)
    build().load(path)


def test_a_state_of_another_task_is_refused():
    with pytest.raises(ValueError, match="for classification; found format None and task None"):
        build().load_state_dict({})


# --- drift detectors -------------------------------------------------------------------------------------------------


class Counter:
    """A detector with attributes only."""

    def __init__(self):
        self.values: list[float] = []
        self.total = 0.0

    def update(self, x):
        self.values = [*self.values[-3:], x]
        self.total += x

    @property
    def drift_detected(self):
        return len(self.values) == 4 and min(self.values) > 5


class Stateful(Counter):
    def state_dict(self):
        return {"values": list(self.values), "total": self.total}

    def load_state_dict(self, state):
        self.values, self.total = list(state["values"]), state["total"]


class Function:
    drift_detected = False

    def __init__(self):
        self.function = [math.sin]

    def update(self, x): ...


@pytest.mark.parametrize("kind", [Counter, Stateful])
def test_the_state_of_a_detector_is_saved(kind, tmp_path):
    def make_online():
        return make(net(outputs=1), criterion=nn.MSELoss(), drift=kind())

    online = make_online()
    x, _ = stream(30)
    for row in x:
        online.learn_one(row, 1.0)
    online.save(tmp_path / "online")
    other = make_online()
    other.load(tmp_path / "online")
    assert vars(other.drift_detector) == vars(online.drift_detector)
    assert [online.learn_one(x[0], 10.0 * k).drift for k in range(8)] == [
        other.learn_one(x[0], 10.0 * k).drift for k in range(8)
    ]
    assert other.drift


def test_a_detector_without_a_plain_state_is_refused_when_it_is_saved():
    online = make(net(), drift=Function())
    online.learn_one([1.0, 2.0, 3.0, 4.0], 0)
    with pytest.raises(TypeError, match=r"found Function.function, list. Add both methods"):
        online.state_dict()
