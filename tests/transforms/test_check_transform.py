"""check_transform passes what keeps the rules, and says which one is broken."""

import pytest
import torch

import samplewise as sw
from samplewise.transforms.transform import Grouping, SampleTransform, SumTransform

BATCH = {"x": torch.rand(6, 2), "w": torch.rand(6), "i": torch.arange(6), "user": [1, 2, 1, 3, 2, 1]}


def soft(losses, norms, counts):
    return torch.exp(-losses) / (1 + norms) * counts


def ranks(losses):
    return losses.argsort().argsort().double()


GOOD = [
    sw.clip(1.0),
    sw.clip(0.0),
    sw.clip(1.0, by="parameter"),
    sw.clip(1.0, mode="automatic"),
    sw.clip(1.0, by="parameter", mode="automatic"),
    sw.weight(soft),
    soft,
    sw.weight(soft, renormalize=True),
    sw.weight(ranks, window=True),
    sw.weight(torch.rand(9)),
    sw.drop(largest=2),
    sw.drop(smallest=1, score="losses"),
    sw.drop(quantile=0.5),
    sw.normalize(),
    sw.normalize(2.0),
    sw.normalize("mean"),
    sw.align({}),
    sw.align({}, kind="dot", renormalize=True),
    sw.noise(0.5),
    sw.noise(0.0),
]
GOOD_WITH_BATCH = [
    sw.weight("w"),
    sw.weight("w", renormalize=True),
    sw.weight(torch.rand(9), index="i"),
    sw.weight(lambda batch, losses: batch["w"] * losses),
    sw.group("user"),
    sw.group("i"),
    sw.group(lambda batch: [user % 2 for user in batch["user"]]),
]


@pytest.mark.parametrize("transform", GOOD, ids=lambda t: getattr(t, "__name__", repr(t)))
def test_what_ships_passes(transform):
    sw.testing.check_transform(transform)
    sw.testing.check_transform(transform, BATCH)


@pytest.mark.parametrize("transform", GOOD_WITH_BATCH, ids=repr)
def test_what_looks_into_the_batch_passes(transform):
    sw.testing.check_transform(transform, BATCH)


def test_a_short_table_passes():
    """As long as the batch it is checked with; or as whatever is made up where there is none."""
    sw.testing.check_transform(sw.weight(torch.rand(6)), BATCH)
    sw.testing.check_transform(sw.weight(torch.rand(4)))


# ------------------------------------------------------------- what does not keep the rules


def half(losses):
    return losses[: len(losses) // 2]


def table(losses):
    return losses[:, None].expand(-1, 2)


def number(losses):
    return 0.5


def infinite(losses):
    return losses / 0


def infinite_at_zero(norms):
    return 1 / norms


def share(losses):
    return losses / losses.sum()


def sample_by_sample(losses):
    return losses / len(losses)


def first(losses):
    return losses / losses[0]


def middle(losses):
    return losses / losses[len(losses) // 2]


def running(losses):
    return losses.cumsum(0)


def random(losses):
    return torch.rand_like(losses)


def doubling(losses):
    losses *= 2
    return torch.ones_like(losses)


def doubling_counts(losses, counts):
    counts *= 2
    return losses


def doubling_norms(norms, losses):
    norms *= 2
    return losses


BAD = [
    (half, r"weight\(half\) must return one coefficient per sample, a tensor of shape \(7,\); found shape \(3,\)"),
    (table, r"found shape \(7, 2\)"),
    (number, "found float"),
    (infinite, r"weight\(infinite\) must return finite coefficients; found inf at sample 0"),
    (infinite_at_zero, "must return finite coefficients; found inf"),
    (share, r"weight\(share\) must return the same coefficients for a subset of the samples; found"),
    (sample_by_sample, "must return the same coefficients for a subset of the samples"),
    (
        sw.weight(first, window=True),
        r"weight\(first, window=True\) must return the same coefficients for any order of samples; found",
    ),
    (sw.weight(middle, window=True), "must return the same coefficients for any order of samples"),
    (running, "must return the same coefficients for any order of samples"),
    (random, r"weight\(random\) must return the same coefficients when it is called again; found"),
    (doubling, r"weight\(doubling\) must not modify its input; found changed values"),
    (doubling_counts, r"weight\(doubling_counts\) must not modify its input"),
    (
        SampleTransform("own()", "c", lambda numbers: numbers.losses, by_parameter=True),
        r"own\(\) must return a dict of parameter names and tensors \(B,\); found Tensor",
    ),
    (
        SampleTransform("own()", "c", lambda numbers: {"weight": numbers.losses[:1]}, by_parameter=True),
        r"one coefficient per sample for 'weight', a tensor of shape \(7,\); found shape \(1,\)",
    ),
    (SampleTransform("own()", "c", lambda numbers: numbers.norms), "must declare the values it reads"),
    (3.0, "a transform must be one of clip, weight.*found float"),
]


@pytest.mark.parametrize(("transform", "message"), BAD)
def test_what_breaks_a_rule(transform, message):
    with pytest.raises(sw.TransformError, match=message):
        sw.testing.check_transform(transform)


def test_changing_what_one_was_handed_a_copy_of():
    """Norms are scaled for each transform anew: changing them changes nothing."""
    sw.testing.check_transform(doubling_norms)


def test_a_window_function_need_not_answer_for_parts():
    sw.testing.check_transform(sw.weight(share, window=True))


def test_changing_the_batch():
    def bad(batch, losses):
        batch["w"].add_(1)
        return losses

    batch = {**BATCH, "w": BATCH["w"].clone()}
    with pytest.raises(sw.TransformError, match="must not modify its input"):
        sw.testing.check_transform(sw.weight(bad), batch)


@pytest.mark.parametrize("transform", [sw.weight("w"), sw.weight(torch.ones(9), index="i")], ids=repr)
def test_a_batch_is_needed(transform):
    with pytest.raises(
        sw.TransformError, match=r"reads the batch and needs one; found none\. Call check_transform\(transform, batch\)"
    ):
        sw.testing.check_transform(transform)


def test_a_batch_is_needed_for_keys():
    with pytest.raises(sw.SamplewiseError, match="batch"):
        sw.testing.check_transform(sw.group("user"))


# ------------------------------------------------------------- on the sum


def replacing(sums):
    sums[:] = [s + 1 for s in sums]


def returning(sums):
    return [s + 1 for s in sums]


def shortening(sums):
    sums.pop()


def breaking(sums):
    for total in sums:
        total.div_(0)


@pytest.mark.parametrize("act", [replacing, returning, shortening, breaking])
def test_sums_that_are_not_changed_in_place(act):
    transform = SumTransform("own()", "x", act)
    with pytest.raises(sw.TransformError, match=r"own\(\) must change the sums in place and keep them finite; found"):
        sw.testing.check_transform(transform)


def test_sums_that_are():
    sw.testing.check_transform(SumTransform("own()", "x", lambda sums: [s.add_(1) for s in sums] and None))


# ------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (lambda batch: ["a"], r"group\(.*\) must return one key per sample; found 1 for 6 samples"),
        (lambda batch: list(range(len(batch["x"]))), "must return the same key for a sample in any part of a batch"),
    ],
)
def test_keys_that_break_a_rule(keys, message):
    with pytest.raises(sw.TransformError, match=message):
        sw.testing.check_transform(sw.group(keys), BATCH)


def test_custom_keys():
    sw.testing.check_transform(Grouping("own()", lambda batch: batch["user"]), BATCH)
