"""`sw.backward(through=)` and ledgers in loops with Accelerate and with Fabric."""

import signal
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from loops import LOOPS
from processes import rows, run, windows
from small_problem import BOUND, SAMPLES, dataset, network, one_by_one, windows_of

import samplewise as sw

run = partial(run, "loops.py")
both = pytest.mark.parametrize("framework", ["accelerate", "fabric"])


def trained(framework, directory, **arguments):
    return flat(LOOPS[framework](directory, **arguments))


def flat(parameters):
    """Names must be the model's own, without `module.` or `_forward_module.`."""
    assert list(parameters) == [name for name, _ in network().named_parameters()]
    return torch.cat([p.flatten() for p in parameters.values()])


SINGLE = {"accelerate": "no", "fabric": "32-true"}
MIXED = {"accelerate": "bf16", "fabric": "bf16-mixed"}


@both
@pytest.mark.parametrize("scalar", [False, True], ids=["losses", "outputs"])
def test_recording_is_bit_identical_with_dropout(tmp_path, framework, scalar):
    settings = dict(batch_size=2, dropout=0.3, dtype="float32", precision=SINGLE[framework])
    expected = trained(framework, tmp_path, plain=True, **settings)
    found = trained(framework, tmp_path, clip=None, scalar=scalar, **settings)
    if scalar:
        assert torch.equal(found, expected)
    else:  # their sum / B, whose last bits differ from those of the mean
        torch.testing.assert_close(found, expected)
    assert len(rows(tmp_path)) == SAMPLES


@both
@pytest.mark.parametrize("scalar", [False, True], ids=["losses", "outputs"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 3e-6)])
def test_clipping_equals_one_sample_at_a_time(tmp_path, framework, scalar, dtype, tolerance):
    precision = {} if dtype == "float64" else {"precision": SINGLE[framework]}
    found = trained(framework, tmp_path, batch_size=8, epochs=2, scalar=scalar, dtype=dtype, **precision)
    expected, norms = one_by_one(windows_of(8, epochs=2), dtype=getattr(torch, dtype))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    table = rows(tmp_path)
    torch.testing.assert_close(torch.tensor([row["norm"] for row in table]), norms.float(), rtol=1e-5, atol=1e-5)
    assert [row["update"] for row in table] == [k for k, w in enumerate(windows_of(8, 2)) for _ in w]


@both
@pytest.mark.parametrize(("batch_size", "accumulate"), [(2, 4), (3, 2), (1, 8)])
def test_accumulation_with_a_ragged_end(tmp_path, framework, batch_size, accumulate):
    for scalar in (False, True):
        directory = tmp_path / str(scalar)
        directory.mkdir()
        found = trained(framework, directory, batch_size=batch_size, accumulate=accumulate, scalar=scalar)
        expected, norms = one_by_one(windows_of(batch_size * accumulate))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert windows(rows(directory)) == [list(window) for window in windows_of(batch_size * accumulate)]
        found = torch.tensor([row["norm"] for row in rows(directory)])
        torch.testing.assert_close(found, norms.float(), rtol=1e-6, atol=1e-6)


@both
def test_bf16_mixed_precision(tmp_path, framework):
    settings = dict(batch_size=8, dtype="float32", precision=MIXED[framework])
    plain = trained(framework, tmp_path, plain=True, **settings)
    assert torch.equal(trained(framework, tmp_path, clip=None, scalar=True, **settings), plain)
    for scalar in (False, True):
        (tmp_path / str(scalar)).mkdir()
        found = trained(framework, tmp_path / str(scalar), scalar=scalar, **settings)
        torch.testing.assert_close(found.double(), one_by_one(windows_of(8))[0], rtol=0.02, atol=0.02)


def test_fabric_still_refuses_passes_outside_of_its_backward():
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = fabric.setup(network(torch.float32))
    x, y, _ = dataset(torch.float32).tensors
    with pytest.raises(RuntimeError, match=r"requires you to call `fabric\.backward"):
        sw.backward(F.cross_entropy(model(x), y, reduction="none"), model, transforms=[sw.clip(BOUND)])
    sw.backward(F.cross_entropy(model(x), y, reduction="none"), model, transforms=[sw.clip(BOUND)], through=fabric)
    with pytest.raises(RuntimeError, match=r"requires you to call `fabric\.backward"):
        F.cross_entropy(model(x), y).backward()


@pytest.mark.slow
@both
def test_killed_in_the_second_epoch_and_resumed(tmp_path, framework):
    settings = dict(framework=framework, epochs=3, accumulate=2)
    expected = run(tmp_path / "whole", **settings)
    run(tmp_path / "killed", code=-signal.SIGKILL, kill_after=9, **settings)
    found = run(tmp_path / "killed", resume=True, **settings)
    assert torch.equal(flat(found), flat(expected))
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert len(rows(tmp_path / "whole")) == 3 * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        dict(framework="accelerate", accumulate=2),
        dict(framework="accelerate", clip=None),
        dict(framework="accelerate", sharded=True),
        dict(framework="fabric", accumulate=2, strategy="ddp", devices=2),
        dict(framework="fabric", clip=None, strategy="ddp_find_unused_parameters_true", devices=2),
    ],
    ids=lambda settings: " ".join(f"{key}={value}" for key, value in settings.items()),
)
def test_two_ranks_give_the_update_of_one(tmp_path, settings):
    """The ledger says which samples each update had. 16 samples, so that no rank gets a sample twice."""
    found = run(tmp_path, ranks=2, batch_size=2, samples=16, epochs=2, scalar=True, **settings)
    table = rows(tmp_path)
    bound = BOUND if settings.get("clip", True) else torch.inf
    expected, norms = one_by_one(windows(table), bound)
    torch.testing.assert_close(flat(found), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.tensor([row["norm"] for row in table]), norms.float(), rtol=1e-6, atol=1e-6)
    assert sorted(row["id"] for row in table) == sorted([*range(16)] * 2)
    assert {len(window) for window in windows(table)} == {4 * settings.get("accumulate", 1)}
