"""clip, normalize, drop, align, noise: coefficients from numbers, and arguments that make no sense."""

import math

import pytest
import torch

import samplewise as sw
from samplewise.transforms.stats import SampleStats
from samplewise.transforms.transform import Reference


def given(*norms, losses=None, **options):
    norms = torch.tensor(norms, dtype=torch.float64)
    losses = torch.arange(len(norms)).double() if losses is None else torch.tensor(losses, dtype=torch.float64)
    return SampleStats(losses, torch.ones_like(losses), raw_norms=norms, **options)


def exactly(found, *wanted):
    assert found.tolist() == list(wanted)


# ------------------------------------------------------------- clip


def test_clip_is_the_smaller_of_one_and_bound_by_norm():
    exactly(sw.clip(2.0)(given(0.0, 1e-300, 1.0, 2.0, 3.0, 1e300)), 1, 1, 1, 1, 2 / 3, 2 / 1e300)


def test_clip_to_nothing():
    """min(1, 0/norm), where 0/0 is 0."""
    exactly(sw.clip(0.0)(given(1.0, 3.0)), 0, 0)
    exactly(sw.clip(0.0)(given(0.0)), 0)


def test_clip_to_infinity():
    exactly(sw.clip(math.inf)(given(0.0, 1.0, 1e300)), 1, 1, 1)


def test_clip_takes_whole_numbers():
    exactly(sw.clip(2)(given(1.0, 4.0)), 1, 0.5)


def test_clip_automatic():
    exactly(sw.clip(2.0, mode="automatic")(given(0.0, 3.99)), 2.0 / 0.01, 0.5)
    exactly(sw.clip(2.0, mode="automatic", gamma=1.0)(given(0.0, 3.0)), 2.0, 0.5)


def test_clip_by_parameter():
    numbers = SampleStats(torch.zeros(2), torch.ones(2), raw_norms={"a": torch.tensor([3.0, 1.0]), "b": torch.zeros(2)})
    found = sw.clip(2.0, by="parameter")(numbers)
    assert list(found) == ["a", "b"]
    torch.testing.assert_close(found["a"], torch.tensor([2 / 3, 1.0]))
    exactly(found["b"], 1, 1)


def test_clip_after_a_negative_weight():
    """A norm has no sign."""
    exactly(sw.clip(2.0)(given(4.0, 1.0, coefficients=torch.tensor([-1.0, -3.0]))), 0.5, 2 / 3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sw.clip(-1.0), "max_norm must be a number, zero or positive; found -1.0"),
        (lambda: sw.clip(torch.tensor(1.0)), r"max_norm must be a number, zero or positive; found tensor\(1.\)"),
        (lambda: sw.clip(math.nan), "max_norm must be a number, zero or positive; found nan"),
        (lambda: sw.clip(1.0, by="layer"), "by must be None or 'parameter'; found 'layer'"),
        (lambda: sw.clip(1.0, mode="soft"), "mode must be 'flat' or 'automatic'; found 'soft'"),
        (lambda: sw.clip(1.0, mode="automatic", gamma=0.0), "gamma must be positive; found 0.0"),
        (lambda: sw.normalize(0), "norm must be positive; found 0"),
        (lambda: sw.normalize(-2.0), "norm must be positive; found -2.0"),
        (lambda: sw.normalize("max"), "norm must be a positive number or 'mean'; found 'max'"),
        (lambda: sw.drop(), "drop needs one of largest=, smallest= or quantile=; found none"),
        (lambda: sw.drop(largest=0), "drop needs one of"),
        (lambda: sw.drop(largest=-1), "largest must be an integer number of samples, 0 or more; found -1"),
        (lambda: sw.drop(smallest=0.5), "smallest must be an integer number of samples, 0 or more; found 0.5"),
        (lambda: sw.drop(quantile=1.0), "quantile must lie between 0 and 1; found 1.0"),
        (lambda: sw.drop(quantile=0.0), "quantile must lie between 0 and 1; found 0.0"),
        (lambda: sw.drop(largest=1, score="counts"), "score must be 'norms' or 'losses'; found 'counts'"),
        (lambda: sw.noise(-0.1), "std must be zero or positive; found -0.1"),
        (lambda: sw.align({}, kind="angle"), "kind must be 'cosine' or 'dot'; found 'angle'"),
        (lambda: sw.align(3), "reference must be a dict name -> tensor, or a function that returns one; found int"),
    ],
)
def test_arguments_that_make_no_sense(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# ------------------------------------------------------------- normalize


def test_normalize_leaves_zero_alone():
    exactly(sw.normalize()(given(0.0, 0.5, 4.0)), 0, 2, 0.25)
    exactly(sw.normalize(2)(given(0.0, 0.5, 4.0)), 0, 4, 0.5)


def test_normalize_to_the_mean_of_all():
    exactly(sw.normalize("mean")(given(0.0, 2.0, 4.0)), 0, 1, 0.5)
    exactly(sw.normalize("mean")(given(0.0, 0.0)), 0, 0)


# ------------------------------------------------------------- drop


def test_drop_counts_from_either_end():
    numbers = given(5.0, 1.0, 3.0, 4.0, 2.0)
    exactly(sw.drop(largest=2)(numbers), 0, 1, 1, 0, 1)
    exactly(sw.drop(smallest=2)(numbers), 1, 0, 1, 1, 0)
    exactly(sw.drop(largest=1, smallest=1)(numbers), 0, 0, 1, 1, 1)


def test_drop_of_more_than_there_are():
    exactly(sw.drop(largest=9)(given(1.0, 2.0)), 0, 0)
    exactly(sw.drop(smallest=9)(given(1.0, 2.0)), 0, 0)


def test_drop_of_ties_drops_the_stated_number():
    assert sw.drop(largest=2)(given(1.0, 1.0, 1.0, 1.0)).sum() == 2
    assert sw.drop(smallest=3)(given(1.0, 1.0, 1.0, 1.0)).sum() == 1


@pytest.mark.parametrize("quantile", [0.01, 0.25, 0.5, 0.6, 0.99])
@pytest.mark.parametrize("samples", [1, 2, 7, 10])
def test_drop_above_a_quantile(quantile, samples):
    values = torch.rand(samples, dtype=torch.float64)
    wanted = (values <= values.quantile(quantile)).double()
    exactly(sw.drop(quantile=quantile)(given(*values.tolist())), *wanted.tolist())


def test_drop_of_a_quantile_and_the_smallest():
    exactly(sw.drop(smallest=1, quantile=0.5)(given(5.0, 1.0, 3.0, 4.0, 2.0)), 0, 0, 1, 0, 1)


def test_drop_by_losses():
    exactly(sw.drop(largest=1, score="losses")(given(1.0, 2.0, 3.0, losses=(9.0, 1.0, 2.0))), 0, 1, 1)


def test_what_was_dropped_before_is_the_smallest():
    """Each transform sees norms as left by the one before."""
    numbers = given(5.0, 1.0, 3.0)
    numbers = numbers.scaled(sw.drop(largest=1)(numbers), renormalizes=True)
    exactly(sw.drop(smallest=1)(numbers), 0, 1, 1)


# ------------------------------------------------------------- align


def with_dots(transform, norms, dots):
    return given(*norms, raw_dots={transform.reference: torch.tensor(dots, dtype=torch.float64)})


def test_align_by_cosine_and_by_dot():
    by_cosine, by_dot = sw.align({}), sw.align({}, kind="dot")
    exactly(by_cosine(with_dots(by_cosine, (2.0, 2.0, 0.0), (1.0, -1.0, 0.0))), 0.5, 0, 0)
    exactly(by_dot(with_dots(by_dot, (2.0, 2.0, 0.0), (1.0, -1.0, 0.0))), 1, 0, 0)


def test_align_does_not_compute_norms_in_vain():
    assert sw.align({}, kind="dot").needs == frozenset()
    assert sw.align({}).needs == {"norms"}


def test_the_direction_has_length_one_or_its_own():
    given = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0), "other": torch.ones(9)}
    parameters = {"a": torch.zeros(2), "b": torch.zeros(())}
    torch.testing.assert_close(
        Reference(given, unit=True).direction(parameters), {"a": torch.tensor([0.6, 0.0]), "b": torch.tensor(0.8)}
    )
    own = Reference(lambda: given, unit=False).direction(parameters)
    assert own["a"].tolist() == [3.0, 0.0] and list(own) == ["a", "b"]


# ------------------------------------------------------------- noise


def test_noise_of_nothing():
    sums = [torch.ones(3)]
    sw.noise(0.0).apply_(sums)
    exactly(sums[0], 1, 1, 1)


def test_noise_has_the_type_and_shape_of_each_sum():
    sums = [torch.zeros(20000), torch.zeros(100, 200, dtype=torch.float64), torch.zeros(())]
    sw.noise(3.0).apply_(sums)
    assert [s.dtype for s in sums] == [torch.float32, torch.float64, torch.float32]
    for total in sums[:2]:
        assert float(total.std()) == pytest.approx(3.0, rel=0.05)
        assert abs(float(total.mean())) < 0.1
