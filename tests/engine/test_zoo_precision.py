"""float32, bf16 autocast, and losses that are confident, huge or tiny."""

from dataclasses import replace

import pytest
import torch
from plain_pytorch import not_run_reason
from zoo import CASES, INDEPENDENT

import samplewise as sw
from samplewise.testing.case import DEFAULT_B, confident_loss
from samplewise.testing.compare import CORE, HALF, SINGLE, Tolerance, assert_agrees, probe_for
from samplewise.testing.oracle import rows_of, wanted
from samplewise.testing.runner import BF16, FP32, prepare_comparison, run_case

CONFIDENT = [case for case in INDEPENDENT if case.has_outputs and "complex" not in case.name]
REPRESENTATIVE = (
    "linear_on_sequences",
    "conv2d",
    "group_norm",
    "embedding_with_padding",
    "lstm_batch_first",
    "multihead_attention",
    "transformer_encoder_layer",
    "causal_language_model_with_tied_head",
    "experts_chosen_per_token",
    "weight_norm",
    "module_used_twice",
    "checkpointed_block",
)


def named(cases):
    return pytest.mark.parametrize("case", list(cases), ids=lambda case: case.name)


@pytest.mark.sweep(1 / 5)
@named(case for case in INDEPENDENT if case.traits.float32)
def test_float32_against_float64_rows(case):
    prepare_comparison(case, FP32).compare()


@pytest.mark.slow
@named(case for case in INDEPENDENT if case.traits.float32)
@pytest.mark.parametrize("strategy", ["twice", "full"])
def test_float32_of_other_strategies(case, strategy):
    prepare_comparison(case, replace(FP32, quantities=CORE)).compare(strategy=strategy)


def compare_or_not_run(case, precision, record_property):
    """Compare with the rows. If PyTorch has no kernel for the case on this machine: expect the verdict "not run"."""
    reason = not_run_reason(case, precision)
    if not reason:
        prepare_comparison(case, precision).compare()
        return
    result = run_case(case, precision)
    assert (result.outcome, result.reason) == ("not run", reason)
    record_property("not run", reason)


@named(CASES[name] for name in REPRESENTATIVE)
def test_bf16_autocast(case, record_property):
    """Against rows of the same bf16 graph."""
    compare_or_not_run(case, BF16, record_property)


@pytest.mark.slow
@named(case for case in INDEPENDENT if case.traits.autocast and case.name not in REPRESENTATIVE)
def test_bf16_autocast_of_all(case, record_property):
    compare_or_not_run(case, BF16, record_property)


@named(CASES[name] for name in ("linear_on_sequences", "conv2d", "layer_norm"))
def test_models_held_in_bf16(case):
    """Parameters in bf16: norms, dots and sums accumulate in float32 at least."""
    model, inputs = case.build(dtype=torch.bfloat16)
    losses = case.losses(model, inputs)
    g = sw.gradients(losses, model)
    assert g.norms().dtype == torch.float32
    assert_agrees(
        g, rows_of(losses, wanted(model)).to(torch.float32), probe_for(wanted(model), len(losses)), CORE, HALF
    )


@pytest.mark.sweep(1 / 4)
@named(CONFIDENT)
def test_confident_logits(case):
    """Logits a hundred times as large: most softmaxes are 0 or 1, and gradients 0 or denormal."""
    model, inputs = case.build()
    losses = confident_loss(case.output(model, inputs))
    rows = rows_of(losses, wanted(model))
    assert_agrees(sw.gradients(losses, model), rows, probe_for(wanted(model), len(rows)))


@pytest.mark.slow
@named(case for case in CONFIDENT if case.traits.float32)
def test_confident_logits_in_float32(case):
    """Against rows of the same float32 graph: what the softmax lost in float32 is not the engine's to find."""
    model, inputs = case.build(dtype=torch.float32)
    losses = confident_loss(case.output(model, inputs))
    rows = rows_of(losses, wanted(model))
    assert_agrees(sw.gradients(losses, model), rows, probe_for(wanted(model), len(rows)), CORE, SINGLE)


@pytest.mark.slow
@named(INDEPENDENT)
def test_losses_a_hundred_times_as_large(case):
    model, inputs = case.build()
    rows = rows_of(100 * case.losses(model, inputs), wanted(model))
    g = sw.gradients(100 * case.losses(model, inputs), model)
    assert_agrees(g, rows, probe_for(wanted(model), len(rows)), ["norms", "weighted sum"])


@pytest.mark.sweep(1 / 3)
@named(CASES[name] for name in REPRESENTATIVE)
@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e-9, 1e9, 1e18, 1e30])
def test_scaled_losses_in_float32(case, scale):
    """Gradients near both ends of float32, where codes, and then squares, under- or overflow."""
    model, inputs = case.build(dtype=torch.float32)
    losses = scale * case.losses(model, inputs)
    rows, probe = rows_of(losses, wanted(model)).to(torch.float64), probe_for(wanted(model), len(losses))
    g = sw.gradients(losses, model)
    names = ["norms", "weighted sum", "full"] if 1e-20 < scale < 1e20 else ["weighted sum", "full"]
    assert_agrees(g, rows, probe, names, Tolerance(1e-3, 1e-5))


@pytest.mark.sweep(1 / 12)
@named(INDEPENDENT)
@pytest.mark.parametrize("loud", [0, 3])
def test_small_gradients_beside_large_ones(case, loud):
    """In a sum, a sample 1e-20 as large as another is lost in rounding, and the sum looks as if it had one owner.
    Norms are compared sample by sample here, not with the largest."""
    model, inputs = case.build()
    scale = torch.full((DEFAULT_B,), 1e-20, dtype=torch.float64)
    scale[loud] = 1.0
    expected = rows_of(scale * case.losses(model, inputs), wanted(model)).norms()
    found = sw.gradients(scale * case.losses(model, inputs), model).norms()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
