"""The messages that docs/scaling.py counts with are those that two ranks exchange."""

import pickle
import runpy
from pathlib import Path
from unittest import mock

import pytest
from spread_models import TRANSFORMS, data, loss_fn, net, own_batches, wrapped

import samplewise as sw
from samplewise.parallel import collectives

SCRIPT = Path(__file__).parents[2] / "docs" / "scaling.py"
PAGE = SCRIPT.with_suffix(".md")


@pytest.fixture(scope="module")
def scaling():
    return runpy.run_path(str(SCRIPT))


def exchanged(transforms, how, before=1):
    """By an update after others: the first looks for mistakes, too, and those of sharded models agree on passes."""
    model, parallel = wrapped(net(), how)
    made = TRANSFORMS[transforms](getattr(model, "module", model))
    step = sw.Step(model, sw.sgd(0.1), loss_fn, 6, transforms=made, parallel=parallel, recheck=False)
    for _ in range(before):
        step([part[:3] for part in own_batches(17)[0]])
    with collectives.counted() as traffic:
        step([part[3:6] for part in own_batches(17)[0]])
    return dict(traffic.calls), dict(traffic.bytes)


def keys_said():
    """Of the second window: places, and the users of samples 6 to 11."""
    users = data()[3].tolist()
    return max(len(pickle.dumps([(place, users[6 + place]) for place in range(rank, 6, 2)])) for rank in (0, 1))


def spanning():
    users = data()[3].tolist()
    return len(set(users[6:12:2]) & set(users[7:12:2]))


KINDS = {
    "plain": {},
    "clip": {},
    "weight": {},
    "weight by place": dict(by_place=True),
    "drop a quantile": dict(window_transforms=[5]),  # place, loss, count, norm, share
    "normalize to the mean": dict(window_transforms=[5]),
    "weight, drop, normalize to the mean, weight": dict(window_transforms=[6, 6]),  # and the coefficient
    "align": dict(references=True, said=len(pickle.dumps([1.0, 2.0] * 6))),
    "noise": dict(noise=True),
    "group and clip": dict(groups=True, spanning=spanning(), said=keys_said()),
}


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("how", ["ddp", "plain"])
@pytest.mark.parametrize("transforms", KINDS)
def test_the_bytes_are_those_that_ranks_exchange(two, scaling, transforms, how):
    model = scaling["Model"]([tuple(p.shape) for p in net().parameters()], element=8)
    calls, sizes = scaling["added_up"](scaling["Update"](model, 2, 6, **KINDS[transforms]).messages())
    tolerance = 2 if transforms == "noise" else 0  # torch pickles a generator's state with its address: 14 or 15 digits
    assert two.run(exchanged, transforms, how) == [(calls, pytest.approx(sizes, abs=tolerance, rel=0))] * 2


def exchanged_in_buckets(transforms):
    with mock.patch.object(collectives, "BUCKET", 64):
        return exchanged(transforms, "plain")


@pytest.mark.parametrize("transforms", ["plain", "align", "drop a quantile"])
def test_the_bytes_of_models_with_several_buckets(two, scaling, transforms, monkeypatch):
    monkeypatch.setattr(collectives, "BUCKET", 64)
    model = scaling["Model"]([tuple(p.shape) for p in net().parameters()], element=8)
    expected = scaling["added_up"](scaling["Update"](model, 2, 6, **KINDS[transforms]).messages())
    assert expected[0]["all_reduce"] > 7
    assert two.run(exchanged_in_buckets, transforms) == [expected] * 2


@pytest.mark.parametrize("transforms", ["plain", "drop a quantile"])
def test_the_bytes_of_sharded_models(two, scaling, transforms):
    layers = [[tuple(p.shape) for p in net()[k].parameters()] for k in (2, 0, 3)]  # the root has what is left
    model = scaling["Model"]([tuple(p.shape) for p in net().parameters()], element=8, groups=layers, first=1)
    update = scaling["Update"](model, 2, 6, sharded=True, measures=transforms != "plain", **KINDS[transforms])
    assert two.run(exchanged, transforms, "fsdp", 4) == [scaling["added_up"](update.messages())] * 2


def test_large_models_go_in_buckets(scaling):
    assert scaling["buckets"]([10 * 2**20] * 5) == [20 * 2**20, 20 * 2**20, 10 * 2**20]
    assert scaling["buckets"]([60 * 2**20, 4]) == [60 * 2**20, 4]


def test_the_page_has_the_tables_of_the_script(scaling):
    page = PAGE.read_text()
    for table in scaling["tables"]().split("\n\n"):
        assert table in page, "docs/scaling.md must have the tables that docs/scaling.py prints: copy them"
