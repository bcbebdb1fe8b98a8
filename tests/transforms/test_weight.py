"""weight: a function that asks by argument names, a tensor, or something in the batch."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import samplewise as sw
from samplewise.transforms.stats import SampleStats

LOSSES = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
BATCH = {"x": torch.zeros(3, 2), "w": torch.tensor([0.5, 0.25, 4.0]), "i": torch.tensor([4, 0, 2])}
NUMBERS = SampleStats(LOSSES, 2 * LOSSES, BATCH, raw_norms=3 * LOSSES, coefficients=torch.full((3,), -2.0).double())


def exactly(found, *wanted):
    assert found.tolist() == list(wanted)


# ------------------------------------------------------------- functions


@pytest.mark.parametrize(
    ("function", "needs", "wanted"),
    [
        (lambda losses: losses, {"losses"}, [1, 2, 3]),
        (lambda counts: counts, {"counts"}, [2, 4, 6]),
        (lambda norms: norms, {"norms"}, [6, 12, 18]),  # as left by the coefficients so far
        (lambda batch: batch["w"], {"batch"}, [0.5, 0.25, 4]),
        (lambda norms, losses: norms - losses, {"norms", "losses"}, [5, 10, 15]),
        (lambda *, batch, counts: batch["w"] * counts, {"batch", "counts"}, [1, 1, 24]),
    ],
)
def test_functions_receive_the_arguments_they_name(function, needs, wanted):
    transform = sw.weight(function)
    assert transform.needs == needs
    exactly(transform(NUMBERS), *wanted)


def test_objects_that_can_be_called():
    class Soft:
        def __call__(self, losses):
            return -losses

    transform = sw.weight(Soft())
    exactly(transform(NUMBERS), -1, -2, -3)
    assert repr(transform) == "weight(Soft)"


def test_coefficients_do_not_carry_a_graph():
    scale = torch.ones((), requires_grad=True)
    assert not sw.weight(lambda losses: losses * scale)(NUMBERS).requires_grad


def test_truth_values_and_whole_numbers():
    exactly(sw.weight(lambda losses: losses > 1)(NUMBERS), 0, 1, 1)
    exactly(sw.weight("i")(NUMBERS), 4, 0, 2)
    assert sw.weight("i")(NUMBERS).is_floating_point()


def plain(loss):
    return loss


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (plain, "'loss'"),
        (lambda losses, temperature: losses, "'temperature'"),
        (lambda *args: None, "'args'"),
        (lambda **numbers: None, "'numbers'"),
        (lambda: None, "no argument"),
    ],
)
def test_argument_names_that_are_unknown(function, found):
    message = f"the arguments of a weight function must be among losses, counts, norms, batch; found {found}. Write"
    with pytest.raises(sw.TransformError, match=message):
        sw.weight(function)


def test_a_function_of_the_window_sees_no_batch():
    with pytest.raises(sw.TransformError, match="must not use batches; found the argument 'batch'"):
        sw.weight(lambda losses, batch: losses, window=True)


# ------------------------------------------------------------- tensors


def test_a_tensor_by_place_in_the_window():
    transform = sw.weight(torch.arange(5.0))
    exactly(transform(NUMBERS), 0, 1, 2)
    exactly(transform(replace(NUMBERS, positions=torch.tensor([4, 2, 3]))), 4, 2, 3)
    with pytest.raises(sw.TransformError, match=r"weight\(tensor of 5\) must have one value .* at least 6"):
        transform(replace(NUMBERS, positions=torch.tensor([5, 0, 1])))


def test_a_tensor_by_number():
    exactly(sw.weight(torch.arange(5.0), index="i")(NUMBERS), 4, 0, 2)


def test_numbers_in_a_list():
    batch = {**BATCH, "i": [4, 0, 2]}
    exactly(sw.weight(torch.arange(5.0), index="i")(replace(NUMBERS, batch=batch)), 4, 0, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sw.weight("w", index="i"), "index= must be used with a tensor of weights; found no tensor"),
        (lambda: sw.weight(plain_losses, index="i"), "index= must be used with a tensor of weights; found no tensor"),
        (lambda: sw.weight([1.0, 2.0]), "found list. Pass torch.as_tensor"),
        (lambda: sw.weight(np.ones(3)), "found ndarray. Pass torch.as_tensor"),
        (lambda: sw.weight("w", window=True), "window=True must be used with a function; found none"),
        (lambda: sw.weight(torch.ones(3), window=True), "window=True must be used with a function; found none"),
    ],
)
def test_options_that_do_not_belong(build, message):
    with pytest.raises(sw.TransformError, match=message):
        build()


def plain_losses(losses):
    return losses


@pytest.mark.parametrize("values", [torch.tensor(2.0), torch.ones(3, 2)], ids=["a number", "a table"])
def test_tensors_that_are_no_list_of_weights(values):
    with pytest.raises(sw.TransformError, match=r"weights must be one number per sample; found a tensor of shape \("):
        sw.weight(values)


@pytest.mark.parametrize("places", [[5, 0, 1], [-1, 0, 1], ["a", "b", "c"]], ids=str)
def test_numbers_that_are_not_in_the_table(places):
    with pytest.raises(sw.TransformError, match=r"batch\['i'\] must hold sample indices from 0 to 4; found"):
        sw.weight(torch.arange(5.0), index="i")(replace(NUMBERS, batch={**BATCH, "i": places}))


def test_a_table_whose_index_is_not_in_the_batch():
    with pytest.raises(
        sw.BatchError, match=r"^the batch must hold 'label'; found keys .* Return it from the dataset\.$"
    ):
        sw.weight(torch.arange(5.0), index="label")(NUMBERS)


# ------------------------------------------------------------- keys


@dataclass
class Record:
    w: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "key"),
    [(BATCH, "w"), ((BATCH["x"], BATCH["w"]), 1), ([BATCH["x"], BATCH["w"]], -1), (Record(BATCH["w"]), "w")],
    ids=["dict", "tuple", "list", "dataclass"],
)
def test_keys_of_batches(batch, key):
    transform = sw.weight(key)
    exactly(transform(replace(NUMBERS, batch=batch)), 0.5, 0.25, 4)
    assert transform.needs == {"batch"}


@pytest.mark.parametrize(
    ("batch", "key", "found"),
    [(BATCH, "v", "keys 'x', 'w', 'i'"), ((BATCH["w"],), 1, "a tuple of 1 entry"), (Record(BATCH["w"]), "v", "Record")],
    ids=["dict", "tuple", "dataclass"],
)
def test_keys_that_are_not_there(batch, key, found):
    with pytest.raises(sw.BatchError, match=f"the batch must hold {key!r}; found {found}"):
        sw.weight(key)(replace(NUMBERS, batch=batch))


def test_texts_are_no_weights():
    with pytest.raises(sw.TransformError, match=r"batch\['t'\] must hold one weight per sample; found list"):
        sw.weight("t")(replace(NUMBERS, batch={"t": ["a", "b", "c"]}))


def test_a_transform_must_declare_what_it_reads():
    with pytest.raises(sw.TransformError, match="must declare the values it reads; found that it reads norms without"):
        sw.weight(lambda norms: norms)(SampleStats(LOSSES, LOSSES))
