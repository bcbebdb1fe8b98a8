"""Updates divided by tokens, samples, groups or a constant: several ranks make those of one process, to rounding."""

import pytest
import spread_models
from spread_models import SAMPLES, assert_same, run

import samplewise as sw
from samplewise.parallel import collectives

UNITS = {
    "token": sw.per("token"),
    "sample": sw.per("sample"),
    "group": sw.per("group", key=3),
    "constant": sw.per(40.0),
}
SPLITS = [
    dict(samples=6, batch=SAMPLES),
    dict(samples=6, batch=4, microbatch=2),
    dict(samples=None, batch=3),
    dict(samples=5, batch=1, tail="carry"),
    dict(samples=6, batch=4, microbatch=sw.auto(memory=600)),
]


def compare(team, unit, batch, **options):
    options = {"losses": "counted", "aggregate": UNITS[unit], **options}
    alone = run(batch=SAMPLES if options["samples"] else batch * len(team.processes), **options)
    for found in team.run(_run, options | {"batch": batch}):
        assert_same(alone, found)


def _run(options):
    return run(**options)


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("transforms", ["plain", "clip"])
@pytest.mark.parametrize("split", SPLITS[:3], ids=str)
@pytest.mark.parametrize("unit", UNITS)
def test_two_ranks(two, unit, split, transforms):
    compare(two, unit, transforms=transforms, **split)


@pytest.mark.sweep(1 / 16)
@pytest.mark.parametrize("transforms", ["drop a quantile", "group and clip", "align", "clip by parameter"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("unit", ["sample", "group"])
def test_transforms_on_three_ranks(three, unit, split, transforms):
    compare(three, unit, transforms=transforms, **split)


@pytest.mark.sweep(1 / 18)
@pytest.mark.parametrize("transforms", ["plain", "clip", "group and clip"])
@pytest.mark.parametrize("how", ["fsdp", "sharded"])
@pytest.mark.parametrize("unit", ["sample", "group", "constant"])
def test_sharded_models(two, unit, how, transforms):
    compare(two, unit, transforms=transforms, how=how, samples=6, batch=4, microbatch=2)


def test_ranks_must_have_the_same_aggregate(two):
    for error in two.errors(_another):
        assert error.startswith("DistributedError: all ranks must create the same step")


def _another():
    run(aggregate=sw.per(3 + collectives.rank()))


def test_all_ranks_skip_an_update_that_is_not_finite_on_one(two):
    for case in ("plain", "clip", "group and clip"):
        for updates in two.run(_with_nan, case):
            assert [skipped for _, _, _, skipped in updates] == [False, True, False] * 2


def _with_nan(case):
    before = spread_models.counted

    def broken(model, batch):
        losses, counts = before(model, batch)
        return losses.masked_fill(batch[2] == 7, float("nan")), counts

    spread_models.counted = broken  # sample 7 is on rank 1
    try:
        options = {"samples": 6, "microbatch": 2, "on_nonfinite": "skip", "aggregate": UNITS["group"]}
        return run(case, batch=4, losses="counted", **options)[1]
    finally:
        spread_models.counted = before
