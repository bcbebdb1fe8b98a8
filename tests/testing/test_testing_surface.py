"""Public names of samplewise.testing."""

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise import testing
from samplewise.testing import CASES, CaseResult, check_rule, check_transform, rows_of, run_case


def test_all_names_can_be_imported():
    for name in testing.__all__:
        assert getattr(testing, name) is not None
    assert sw.testing.check_transform is check_transform


def test_unknown_names_are_an_error():
    with pytest.raises(AttributeError, match=r"module 'samplewise\.testing' has no attribute 'nothing'"):
        testing.nothing  # noqa: B018


def test_check_rule_passes_for_a_rule_of_the_engine():
    inputs = torch.randn(5, 4, dtype=torch.float64)
    model = nn.Linear(4, 3).double()
    check_rule(("Addmm", 2), model, lambda m: m(inputs).square().sum(1))


def test_run_case_and_oracle():
    case = CASES["linear_on_vectors"]
    assert run_case(case) == CaseResult(case, "right")
    model, inputs = case.build()
    losses = case.losses(model, inputs)
    parameters = dict(model.named_parameters())
    torch.testing.assert_close(rows_of(losses, parameters).norms(), sw.gradients(losses, model).norms())
