"""chain: the only order there is, the formula it prints, and the call it was."""

import pytest
import torch

import samplewise as sw
from samplewise.transforms.chain import as_chain
from samplewise.transforms.stats import SampleStats


def soft(losses):
    return torch.exp(-losses)


def soft_by_norm(losses, norms):
    return torch.exp(-losses) / norms


# ------------------------------------------------------------- order


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (
            [sw.noise(0.5), sw.clip(1.0)],
            r"clip\(1.0\) acts on per-sample gradients and must come before the sum; found it after noise\(0.5\). Swap",
        ),
        ([sw.clip(1.0), sw.noise(0.5), soft], r"weight\(soft\) acts on per-sample gradients .* found it after noise"),
        ([sw.noise(0.5), sw.group("user")], r"group\('user'\) acts on per-sample gradients"),
        (
            [sw.group("user"), sw.clip(1.0), sw.group("team")],
            r"a chain must have at most one group\(\); found group\('user'\) and group\('team'\). Keep one",
        ),
        (
            [sw.clip(1.0, by="parameter"), sw.group("user")],
            r"transforms before group\('user'\) must give one coefficient per sample; found one per parameter. Put",
        ),
        (
            [sw.group("user"), sw.weight("w")],
            r"weight\('w'\) reads the batch and must come before group\('user'\); found it after. Swap them",
        ),
        ([sw.group("user"), lambda batch, norms: norms], r"weight\(function\) reads the batch"),
        ([sw.group("user"), sw.weight(torch.ones(3), index="i")], "reads the batch"),
        ([1.0], "a transform must be one of clip, weight, .*, or a function; found float"),
        (["clip"], "found str"),
        ([None], "found NoneType"),
    ],
)
def test_what_cannot_be_chained(transforms, message):
    with pytest.raises(sw.TransformError, match=message):
        sw.chain(*transforms)
    with pytest.raises(sw.TransformError, match=message):
        as_chain(transforms)


def test_what_is_no_transform():
    with pytest.raises(sw.TransformError, match="found float"):
        as_chain(1.0)


def test_nested_chains_are_one_chain():
    nested = sw.chain(sw.chain(sw.clip(1.0), sw.chain(soft)), sw.chain(sw.group("user")), sw.noise(0.5))
    flat = sw.chain(sw.clip(1.0), soft, sw.group("user"), sw.noise(0.5))
    assert repr(nested) == repr(flat) == "chain(clip(1.0), weight(soft), group('user'), noise(0.5))"
    assert str(nested) == str(flat)
    with pytest.raises(sw.TransformError, match="must come before the sum"):
        sw.chain(sw.chain(sw.noise(0.5)), sw.chain(sw.clip(1.0)))


@pytest.mark.parametrize("given", [sw.clip(1.0), [sw.clip(1.0)], (sw.clip(1.0),), sw.chain(sw.clip(1.0))])
def test_one_or_many(given):
    assert repr(as_chain(given)) == "chain(clip(1.0))"


def test_nothing():
    assert str(sw.chain()) == "(Σ g) / Σ count"
    assert repr(sw.chain()) == "chain()"


def test_nothing_is_computed_in_vain():
    assert sw.chain(soft).samples.needs == {"losses"}
    assert not sw.chain(soft).window
    assert sw.chain(soft, sw.drop(largest=1, score="losses")).samples.needs == {"losses"}
    assert sw.chain(soft, sw.drop(largest=1)).window
    assert sw.chain(sw.group("user"), sw.clip(1.0)).samples.needs == frozenset()


# ------------------------------------------------------------- each sees what the one before left


def numbers(*norms, counts=None, **options):
    norms = torch.tensor(norms, dtype=torch.float64)
    counts = torch.ones_like(norms) if counts is None else torch.tensor(counts)
    return SampleStats(torch.zeros_like(norms), counts, raw_norms=norms, **options)


def test_norms_as_left_by_the_one_before():
    seen = []

    def look(norms):
        seen.append(norms.tolist())
        return norms

    (found,) = sw.chain(look, sw.clip(8.0), look, look).samples.weigh([numbers(1.0, 4.0)])
    # 1, 16 -> clipped to 1, 8 -> times themselves 1, 64 -> times themselves
    assert seen == [[1, 4], [1, 8], [1, 64]]
    assert found.weights.tolist() == [1, 4 * 0.5 * 8 * 64]
    assert found.unscaled_norms.tolist() == [1, 4]


def test_a_window_in_parts_is_seen_as_one():
    chain = sw.chain(sw.weight(lambda norms: 8 - norms), sw.drop(largest=2))
    found = chain.samples.weigh([numbers(1.0, 5.0), numbers(2.5), numbers(2.0, 4.0)])
    # left by the weights: 7, 15; 13.75; 12, 16
    assert [p.weights.tolist() for p in found] == [[7, 0], [5.5], [6, 0]]
    assert [p.denominators.tolist() for p in found] == [[1, 0], [1], [1, 0]]


def test_each_renormalizing_transform_multiplies_the_share():
    """Σ over samples of the product of their own coefficients × count; those that do not renormalize stay out."""
    twice = sw.weight(lambda losses: losses + 2, renormalize=True)
    half = sw.weight(lambda losses: losses + 0.5)
    (found,) = sw.chain(half, twice, sw.clip(1.0), sw.drop(largest=1), twice).samples.weigh(
        [numbers(5.0, 0.5, counts=[3, 7])]
    )
    # after half, twice: 5, 0.5; clipped: 1, 0.5; dropped: 0, 0.5
    assert found.denominators.tolist() == [0, 2 * 1 * 2 * 7]
    assert found.weights.tolist() == [0, 0.5 * 2 * 1 * 1 * 2]
    assert found.counts.tolist() == [3, 7]


def test_coefficients_by_parameter_go_on_by_parameter():
    lengths = {"a": torch.tensor([3.0, 1.0]).double(), "b": torch.tensor([4.0, 1.0]).double()}
    given = SampleStats(torch.zeros(2), torch.ones(2), raw_norms=lengths)
    chain = sw.chain(sw.weight(lambda norms: norms / 5), sw.clip(1.0, by="parameter"), sw.weight(lambda norms: norms))
    (found,) = chain.samples.weigh([given])
    small = 2**0.5 / 5
    left = 2**0.5  # (3, 4) of length 5 weighs 1, and then both parts are clipped to 1
    torch.testing.assert_close(found.coefficients["a"], torch.tensor([left / 3, small * small * 2**0.5]).double())
    torch.testing.assert_close(found.coefficients["b"], torch.tensor([left / 4, small * small * 2**0.5]).double())
    torch.testing.assert_close(found.unscaled_norms, torch.tensor([5.0, 2**0.5]).double())


# ------------------------------------------------------------- as a formula


@pytest.mark.parametrize(
    ("chain", "formula"),
    [
        (sw.chain(sw.clip(1.0)), "(Σ c1·g) / Σ count\nc1 = min(1, 1.0/‖g‖)"),
        (sw.chain(sw.clip(2.0, by="parameter")), "(Σ c1·g) / Σ count\nc1 = min(1, 2.0/‖g of p‖)"),
        (sw.chain(sw.clip(1.0, mode="automatic", gamma=0.1)), "(Σ c1·g) / Σ count\nc1 = 1.0/(‖g‖ + 0.1)"),
        (
            sw.chain(sw.clip(1.0), sw.noise(0.5)),
            "(Σ c1·g + N(0, 0.5²)) / Σ count\nc1 = min(1, 1.0/‖g‖)",
        ),
        (
            sw.chain(sw.clip(1.0), sw.weight("w", renormalize=True), sw.drop(largest=2)),
            "(Σ c3·c2·c1·g) / Σ c3·c2·count\nc1 = min(1, 1.0/‖g‖)\nc2 = w['w']\nc3 = [‖c2·c1·g‖ kept by largest=2]",
        ),
        (
            sw.chain(soft, sw.group("user"), sw.clip(1.0), sw.noise(0.5)),
            "(Σ c2·s + N(0, 0.5²)) / Σ count\n"
            "c1 = soft(loss)\n"
            "s = Σ c1·g over each group('user')\n"
            "c2 = min(1, 1.0/‖s‖)",
        ),
        (sw.chain(sw.normalize(), soft_by_norm), "(Σ c2·c1·g) / Σ count\nc1 = 1/‖g‖\nc2 = soft_by_norm(loss, ‖c1·g‖)"),
        (sw.chain(sw.normalize("mean")), "(Σ c1·g) / Σ count\nc1 = mean‖g‖/‖g‖"),
        (sw.chain(sw.align({})), "(Σ c1·g) / Σ count\nc1 = max(0, ⟨g, r⟩/‖g‖‖r‖)"),
        (sw.chain(sw.align({}, kind="dot")), "(Σ c1·g) / Σ count\nc1 = max(0, ⟨g, r⟩)"),
        (sw.chain(sw.weight(torch.ones(3))), "(Σ c1·g) / Σ count\nc1 = w[tensor of 3]"),
        (sw.chain(sw.weight(torch.ones(3), index="i")), "(Σ c1·g) / Σ count\nc1 = w[tensor of 3, index='i']"),
        (sw.chain(lambda batch: batch["w"]), "(Σ c1·g) / Σ count\nc1 = w[function]"),
        (
            sw.chain(sw.drop(quantile=0.9, score="losses")),
            "(Σ c1·g) / Σ c1·count\nc1 = [loss kept by quantile=0.9, score='losses']",
        ),
    ],
    ids=repr,
)
def test_as_a_formula(chain, formula):
    assert str(chain) == formula


def test_keys_with_braces():
    assert "w['{x}']" in str(sw.chain(sw.weight("{x}")))


# ------------------------------------------------------------- as the call


def by_team(batch):
    return batch["team"]


@pytest.mark.parametrize(
    ("transform", "call"),
    [
        (sw.clip(1.0), "clip(1.0)"),
        (sw.clip(1.0, by="parameter"), "clip(1.0, by='parameter')"),
        (sw.clip(1.0, mode="automatic", gamma=0.1), "clip(1.0, mode='automatic', gamma=0.1)"),
        (sw.weight(soft), "weight(soft)"),
        (sw.weight(soft, renormalize=True, window=True), "weight(soft, renormalize=True, window=True)"),
        (sw.weight(lambda norms: norms), "weight(function)"),
        (sw.weight("w"), "weight('w')"),
        (sw.weight(2), "weight(2)"),
        (sw.weight(torch.ones(3)), "weight(tensor of 3)"),
        (sw.weight(torch.ones(3), index="i", renormalize=True), "weight(tensor of 3, index='i', renormalize=True)"),
        (sw.drop(largest=1), "drop(largest=1)"),
        (
            sw.drop(largest=1, smallest=2, quantile=0.9, score="losses"),
            "drop(largest=1, smallest=2, quantile=0.9, score='losses')",
        ),
        (sw.normalize(), "normalize()"),
        (sw.normalize(2.0), "normalize(2.0)"),
        (sw.normalize("mean"), "normalize('mean')"),
        (sw.align({}), "align(reference)"),
        (sw.align({}, kind="dot", renormalize=True), "align(reference, kind='dot', renormalize=True)"),
        (sw.group("user"), "group('user')"),
        (sw.group(by_team), "group(by_team)"),
        (sw.group(lambda batch: batch), "group(function)"),
        (sw.noise(0.5), "noise(0.5)"),
        (sw.chain(soft, sw.noise(0.5)), "chain(weight(soft), noise(0.5))"),
    ],
    ids=repr,
)
def test_as_the_call(transform, call):
    assert repr(transform) == call


def test_a_step_says_its_formula():
    model = torch.nn.Linear(1, 1)
    step = sw.Step(model, sw.sgd(0.1), lambda m, b: m(b)[:, 0], transforms=[sw.clip(1.0), sw.noise(0.5)])
    assert str(step.transforms).startswith("(Σ c1·g + N(0, 0.5²)) / Σ count")
