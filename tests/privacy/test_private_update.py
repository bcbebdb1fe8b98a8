"""The hooks of an update: the same for ordinary and private updates, and in the order that docs/privacy.md says."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from private_runs import make

from samplewise.privacy import private_update
from samplewise.privacy.private_update import PrivateUpdate
from samplewise.step.policy import OrdinaryUpdate

pytest.importorskip("dp_accounting")
DOCS = Path(__file__).parents[2] / "docs" / "privacy.md"
SEQUENCE = ["admit", "begin", "check_model", "_add_noise", "before_apply", "divisor", "after_apply"]


def hooks(policy):
    return {name: value for name, value in vars(policy).items() if not name.startswith("_") and callable(value)}


def test_both_policies_have_the_same_hooks():
    ordinary = hooks(OrdinaryUpdate)
    assert ordinary.keys() == hooks(PrivateUpdate).keys()
    for name, hook in ordinary.items():
        assert [*inspect.signature(hook).parameters] == [*inspect.signature(getattr(PrivateUpdate, name)).parameters]
    _, _, step = make()
    # Not __slotnames__, which Python adds to a class when an instance is copied.
    assert all(hasattr(step.config.policy, name) for name in vars(OrdinaryUpdate) if not name.startswith("__"))


def test_the_order_of_an_update(monkeypatch):
    """Before the noisy sum is logged nothing has changed; the parameters change between `divisor` and `after_apply`."""
    calls = []
    for name in SEQUENCE:
        exact = getattr(PrivateUpdate, name)

        def recording(self, *arguments, name=name, exact=exact):
            calls.append((name, torch.cat([p.detach().flatten() for p in model.parameters()])))
            return exact(self, *arguments)

        monkeypatch.setattr(PrivateUpdate, name, recording)
    model, loader, step = make()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    step(next(iter(loader)))
    assert [name for name, _ in calls] == SEQUENCE
    assert [torch.equal(parameters, before) for _, parameters in calls] == [True] * 6 + [False]


@pytest.mark.parametrize("text", [DOCS.read_text(), private_update.__doc__], ids=["docs", "docstring"])
def test_the_written_order_is_that_of_the_file(text):
    """Names in the last column of the table, and in the docstring of the module."""
    cells = re.findall(r"\| ((?:`\w+`(?:, )?)+) \|$", text, re.MULTILINE) or re.findall(
        r"^    (\w+) ", text, re.MULTILINE
    )
    names = [name for cell in cells for name in re.findall(r"\w+", cell)]
    assert [name for name in names if name in SEQUENCE] == [name for name in SEQUENCE if name in names]
    source = inspect.getsource(PrivateUpdate)
    assert len(names) >= 8 and all(f"def {name}(" in source or f"self.{name} =" in source for name in names)
    places = [source.index(f"def {name}(") for name in SEQUENCE]
    assert places == sorted(places)
