"""One sample, two, many, and as many as there are tokens, features or outputs."""

import contextlib

import pytest
import torch
from zoo import CASES, INDEPENDENT

import samplewise as sw
from samplewise.testing.compare import CORE, EXACT, SINGLE, assert_agrees, probe_for
from samplewise.testing.oracle import rows_of, wanted

REPRESENTATIVE = (
    "linear_on_sequences",
    "tokens_flattened_to_rows",
    "depthwise_separable",
    "layer_norm",
    "embedding",
    "gru_batch_first",
    "multihead_attention_sequence_first",
    "rows_sorted_by_value_and_put_back",
    "experts_chosen_per_token",
    "packed_documents_in_mixed_order",
    "tied_embedding_and_head",
    "regularizer_added_to_every_sample",
    "position_ids_of_one_row",
    "checkpointed_block",
    "hardest_losses_only",
)


def compare(case, B, names=CORE, dtype=torch.float64, tolerance=EXACT):
    model, inputs = case.build(B, dtype)
    rows = rows_of(case.losses(model, inputs), wanted(model))
    g = sw.gradients(case.losses(model, inputs), model)
    assert_agrees(g, rows, probe_for(wanted(model), B), names, tolerance)


def sized(*sizes, cases=INDEPENDENT):
    """Every case at every size that it allows."""
    pairs = [(case, B) for B in sizes for case in cases if case.allows(B)]
    return pytest.mark.parametrize(("case", "B"), pairs, ids=[f"{case.name}-{B}" for case, B in pairs])


FEW = [CASES[name] for name in REPRESENTATIVE]
REST = [case for case in INDEPENDENT if case.name not in REPRESENTATIVE]


@pytest.mark.sweep(1 / 4)
@sized(1)
def test_one_sample(case, B):
    compare(case, B)


@pytest.mark.slow
@sized(2)
def test_two_samples(case, B):
    compare(case, B)


@pytest.mark.filterwarnings("ignore::samplewise.SamplesMayInteractWarning")
@pytest.mark.sweep(1 / 4)
@sized(7)
def test_as_many_samples_as_tokens(case, B):
    compare(case, B, ["norms", "weighted sum", "full"])


@pytest.mark.filterwarnings("ignore::samplewise.SamplesMayInteractWarning")
@sized(6, cases=FEW)
def test_as_many_samples_as_features(case, B):
    compare(case, B, ["norms", "weighted sum", "full"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::samplewise.SamplesMayInteractWarning")
@sized(6, cases=REST)
def test_as_many_samples_as_features_of_all(case, B):
    compare(case, B, ["norms", "weighted sum", "full"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::samplewise.SamplesMayInteractWarning")
@sized(3, 4, 8, 9, 11)
def test_as_many_samples_as_other_sizes(case, B):
    compare(case, B, ["norms", "weighted sum", "full"])


@sized(64, cases=FEW)
def test_64_samples(case, B):
    compare(case, B)


@pytest.mark.slow
@sized(64, cases=REST)
def test_64_samples_of_all(case, B):
    compare(case, B)


@sized(64, cases=FEW)
def test_64_samples_in_float32(case, B):
    """More samples than one pass of float32 codes can tell apart."""
    model, inputs = case.build(B, torch.float32)
    g = sw.gradients(case.losses(model, inputs), model)
    assert_agrees(g, double_rows(case, B), probe_for(wanted(model), B), CORE, SINGLE)


def double_rows(case, B):
    model, inputs = case.build(B)
    return rows_of(case.losses(model, inputs), wanted(model))


@sized(1024, cases=[CASES["rows_sorted_by_value_and_put_back"]])
def test_1024_samples(case, B):
    compare(case, B, ["norms", "weighted sum"])


@pytest.mark.slow
@sized(1024, cases=FEW)
def test_1024_samples_of_more(case, B):
    compare(case, B, ["norms", "weighted sum"])


@pytest.mark.slow
@sized(1024, cases=FEW)
def test_1024_samples_in_float32(case, B):
    model, inputs = case.build(B, torch.float32)
    g = sw.gradients(case.losses(model, inputs), model)
    assert_agrees(g, double_rows(case, B), probe_for(wanted(model), B), ["norms", "weighted sum"], SINGLE)


@pytest.mark.parametrize("case", [case for case in INDEPENDENT if case.traits.shared], ids=lambda case: case.name)
def test_shared_data_with_as_many_rows_as_samples_is_refused_or_right(case):
    """Nobody can tell such data from samples by its shape: exact, or a clear word."""
    for B in case.traits.shared:
        with contextlib.suppress(sw.SamplesInteractError):
            compare(case, B)


@pytest.mark.filterwarnings("ignore::samplewise.SamplesMayInteractWarning")
def test_one_model_with_changing_batch_sizes():
    """The last batch of an epoch is smaller; plans are kept per signature."""
    case = CASES["causal_language_model_with_tied_head"]
    model, inputs = case.build(9)
    for B in (9, 9, 4, 9, 7, 7, 1):
        part = tuple(x[:B] for x in inputs)
        rows = rows_of(case.losses(model, part), wanted(model))
        assert_agrees(sw.gradients(case.losses(model, part), model), rows, probe_for(wanted(model), B))
