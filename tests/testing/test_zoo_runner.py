"""Outcomes of zoo cases: right, wrong, refused, not run."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from samplewise.engine.rules import RULES, Rule, elementwise
from samplewise.testing.zoo import (
    BF16,
    CASES,
    FP32,
    FP64,
    PRECISIONS,
    Case,
    Disagreement,
    judge,
    noise,
    squared_loss,
    trial,
)
from samplewise.testing.zoo.judge import tally

CPU = torch.device("cpu")
OFF = {("Addmm", 0): Rule(lambda use: elementwise.summed(use, 1.5 * use.gradient))}
each_precision = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)


@each_precision
def test_right(precision):
    assert judge(CASES["linear_on_vectors"], precision).outcome == "right"


@each_precision
def test_refused_if_samples_interact(precision):
    assert judge(CASES["batch_mean_subtracted"], precision).outcome == "refused"


@each_precision
def test_a_wrong_rule(precision):
    with mock.patch.dict(RULES, OFF):
        verdict = judge(CASES["linear_on_vectors"], precision)
    assert verdict.outcome == "wrong"
    assert verdict.why.startswith("norms: off by ")
    assert "\n" not in verdict.why


def test_a_rule_that_fails():
    def broken(use):
        raise RuntimeError("no such luck\nand more of it")

    with mock.patch.dict(RULES, {("Addmm", 0): Rule(broken)}):
        verdict = judge(CASES["linear_on_vectors"])
    assert (verdict.outcome, verdict.why) == ("wrong", "RuntimeError: no such luck")


def test_an_unnecessary_refusal():
    verdict = judge(replace(CASES["batch_mean_subtracted"], interacts=False))
    assert verdict.outcome == "wrong"
    assert verdict.why.startswith("SamplesInteractError: the loss of a sample must not depend on other samples; found")


def test_a_missing_refusal():
    verdict = judge(replace(CASES["linear_on_vectors"], interacts=True))
    assert (verdict.outcome, verdict.why) == (
        "wrong",
        "samples interact, so SamplesInteractError must be raised; found a result",
    )


def test_a_case_that_pytorch_cannot_run():
    verdict = judge(Case("mismatched", lambda B: (nn.Linear(6, 3), noise(B, 5)), squared_loss))
    assert verdict.outcome == "not run"
    assert verdict.why.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_a_tally_counts_every_outcome():
    names = ("linear_on_vectors", "conv1d", "batch_mean_subtracted")
    assert tally(judge(CASES[name]) for name in names) == {"right": 2, "refused": 1, "wrong": 0, "not run": 0}


def test_precision_of_the_reference_rows():
    """float32 on the CPU against float64; everything else against its own graph."""
    rows = {name: trial(CASES["linear_on_vectors"], precision).rows for name, precision in PRECISIONS.items()}
    assert {name: r.dtype for name, r in rows.items()} == {
        "fp64": torch.float64,
        "fp32": torch.float64,
        "bf16": torch.float32,
    }
    assert not torch.equal(rows["bf16"].flat().double(), rows["fp32"].flat())
    elsewhere = torch.device("cuda")
    assert "backward pass per sample in float64. Tolerance: " in FP32.describe(CPU).replace("\n", " ")
    assert "in the same precision, on the same device. Tolerance: " in FP32.describe(elsewhere)
    assert FP32.describe(elsewhere).startswith("float32 without TF32.")
    assert BF16.describe(CPU).startswith("float32 under bf16 autocast.")
    assert FP64.describe(elsewhere).startswith("float64.")


def test_disagreement_is_an_assertion_that_optimised_python_keeps():
    prepared = trial(CASES["linear_on_vectors"])
    with mock.patch.dict(RULES, OFF), pytest.raises(Disagreement, match=r"^norms: off by .*, allowed "):
        prepared.compare()


def test_tf32_setting_is_restored(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    judge(CASES["conv1d"], FP32)
    assert torch.backends.cudnn.allow_tf32
