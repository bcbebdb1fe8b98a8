"""Faults of hand-written loops are found, and right loops cause no false alarm."""

import pytest
import torch
from audited_loops import FAULTS, RIGHT, Task

import samplewise as sw


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    loop, code = FAULTS[name]
    task = Task()
    with sw.audit(None) as audit:
        loop(task)
    assert not audit.ok
    assert code in [finding.code for finding in audit.findings], str(audit)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_causes_no_false_alarm(name):
    task = Task()
    with sw.audit(None) as audit:
        RIGHT[name](task)
    assert audit.ok, str(audit)


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("name", [*FAULTS, *RIGHT])
def test_parameters_are_bit_identical_with_and_without_an_audit(name):
    loop = RIGHT[name] if name in RIGHT else FAULTS[name][0]
    states = []
    for audited in (False, True):
        task = Task()
        if audited:
            with sw.audit(None):
                loop(task)
        else:
            loop(task)
        states.append([*task.model.state_dict().values(), torch.rand(3)])
    assert all(torch.equal(a, b) or bool(a.isnan().any()) for a, b in zip(*states, strict=True))
