"""The engine on a torch version that does not show the hooks of saved tensors, as 2.8: slower, but right."""

import pytest
import torch
from zoo import CASES

from samplewise.engine.graph import saved
from samplewise.testing.runner import PRECISIONS, REFUSED, RIGHT, run_case

CHECKPOINTED = [name for name in CASES if "checkpoint" in name]
OTHERS = [name for name in CASES if name not in CHECKPOINTED]


@pytest.mark.sweep(1 / 38)
@pytest.mark.parametrize("name", [*CHECKPOINTED, *OTHERS])
def test_zoo(name, monkeypatch):
    monkeypatch.setattr(saved, "HOOKS_ARE_VISIBLE", False)
    result = run_case(CASES[name], PRECISIONS["fp64"], torch.device("cpu"))
    assert result.outcome in (RIGHT, REFUSED), result.reason


def test_hooks_are_visible_where_torch_shows_them():
    raw = torch.ones(2, requires_grad=True).exp().grad_fn._raw_saved_result
    assert hasattr(raw, "unpack_hook") == saved.HOOKS_ARE_VISIBLE
