"""Outcomes of zoo cases: right, wrong, refused, not run."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from zoo import CASES

from samplewise.engine.rules import RULES, Rule, broadcast
from samplewise.testing.case import Case, noise, squared_loss
from samplewise.testing.compare import Disagreement
from samplewise.testing.runner import BF16, FP32, FP64, PRECISIONS, count_outcomes, prepare_comparison, run_case

CPU = torch.device("cpu")
OFF = {("Addmm", 0): Rule(lambda use: broadcast.summed(use, 1.5 * use.gradient))}
each_precision = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)


@each_precision
def test_right(precision):
    assert run_case(CASES["linear_on_vectors"], precision).outcome == "right"


@each_precision
def test_refused_if_samples_interact(precision):
    assert run_case(CASES["batch_mean_subtracted"], precision).outcome == "refused"


@each_precision
def test_a_wrong_rule(precision):
    with mock.patch.dict(RULES, OFF):
        result = run_case(CASES["linear_on_vectors"], precision)
    assert result.outcome == "wrong"
    assert result.reason.startswith("norms: off by ")
    assert "\n" not in result.reason


def test_a_rule_that_fails():
    def broken(use):
        raise RuntimeError("no such luck\nand more of it")

    with mock.patch.dict(RULES, {("Addmm", 0): Rule(broken)}):
        result = run_case(CASES["linear_on_vectors"])
    assert (result.outcome, result.reason) == ("wrong", "RuntimeError: no such luck")


def test_an_unnecessary_refusal():
    result = run_case(replace(CASES["batch_mean_subtracted"], interacts=False))
    assert result.outcome == "wrong"
    assert result.reason.startswith(
        "SamplesInteractError: the loss of a sample must not depend on other samples; found"
    )


def test_a_missing_refusal():
    result = run_case(replace(CASES["linear_on_vectors"], interacts=True))
    assert (result.outcome, result.reason) == (
        "wrong",
        "samples interact, so SamplesInteractError must be raised; found a result",
    )


def test_a_case_that_pytorch_cannot_run():
    result = run_case(Case("mismatched", lambda B: (nn.Linear(6, 3), noise(B, 5)), squared_loss))
    assert result.outcome == "not run"
    assert result.reason.startswith("RuntimeError: ") and "mat1 and mat2 shapes cannot be multiplied" in result.reason


def test_count_outcomes():
    names = ("linear_on_vectors", "conv1d", "batch_mean_subtracted")
    assert count_outcomes(run_case(CASES[name]) for name in names) == {
        "right": 2,
        "refused": 1,
        "wrong": 0,
        "not run": 0,
    }


def test_precision_of_the_reference_rows():
    """float32 on the CPU against float64; everything else against its own graph."""
    rows = {
        name: prepare_comparison(CASES["linear_on_vectors"], precision).rows for name, precision in PRECISIONS.items()
    }
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
    prepared = prepare_comparison(CASES["linear_on_vectors"])
    with mock.patch.dict(RULES, OFF), pytest.raises(Disagreement, match=r"^norms: off by .*, allowed "):
        prepared.compare()


def test_tf32_setting_is_restored(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    run_case(CASES["conv1d"], FP32)
    assert torch.backends.cudnn.allow_tf32
