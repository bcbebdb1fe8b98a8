"""Several ranks with the same window make the updates of one process, to rounding."""

from itertools import product

import pytest
from spread_models import SAMPLES, TRANSFORMS, assert_same, run


def compare(team, **options):
    alone = run(**{**options, "batch": SAMPLES if options.get("samples") else options["batch"] * len(team.processes)})
    for found in team.run(_run, options):
        assert_same(alone, found)


def _run(options):
    return run(**options)


@pytest.mark.sweep(1 / 8)
@pytest.mark.parametrize("how", ["ddp", "plain"])
@pytest.mark.parametrize("transforms", TRANSFORMS)
def test_every_transform(two, transforms, how):
    compare(two, transforms=transforms, how=how, samples=6, batch=4)


SOME = ["plain", "clip", "weight by place", "drop a quantile", "group and clip", "noise"]


WINDOWS = [
    dict(samples=None, batch=2),
    dict(samples=6, batch=4, microbatch=2),
    dict(samples=6, batch=4, microbatch="auto"),
    dict(samples=5, batch=1, tail="carry"),
    dict(samples=7, batch=3, tail="drop"),
    dict(samples=1, batch=2),
    dict(samples=40, batch=5),
    dict(samples=6, batch=2, losses="counted", max_grad_norm=0.1),
]


@pytest.mark.sweep(1 / 12)
@pytest.mark.parametrize(("transforms", "options"), [*product(SOME, WINDOWS)], ids=str)
def test_windows_however_they_are_filled(three, transforms, options):
    """Also with fewer samples than ranks in a window, and with ranks that have none in the last one."""
    compare(three, transforms=transforms, **options)


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize(
    "transforms", ["plain", "clip", "drop a quantile", "clip and noise", "group and clip", "align"]
)
@pytest.mark.parametrize("how", ["fsdp", "sharded"])
def test_sharded_models(two, transforms, how):
    compare(two, transforms=transforms, how=how, samples=6, batch=4, max_grad_norm=0.3)


@pytest.mark.parametrize("how", ["ddp", "fsdp", "sharded"])
def test_references_are_computed_at_different_places_of_a_window(three, how):
    """The last microbatch of some ranks is the first of others."""
    compare(three, transforms="align", how=how, samples=5, batch=2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "plain", "fsdp", "sharded"])
def test_rechecks_exchange_nothing(three, how):
    """Some ranks have nothing to recheck in a window of two."""
    compare(three, transforms="clip", how=how, samples=2, batch=4, recheck=1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "plain", "fsdp", "sharded"])
@pytest.mark.parametrize("transforms", TRANSFORMS)
@pytest.mark.parametrize(
    "options",
    [
        dict(samples=7, batch=2, microbatch=1, tail="carry"),
        dict(samples=5, batch=2, losses="counted", max_grad_norm=0.1, tail="drop"),
        dict(samples=None, batch=3, microbatch=2),
    ],
    ids=str,
)
def test_every_transform_in_every_way(three, transforms, how, options):
    compare(three, transforms=transforms, how=how, **options)
