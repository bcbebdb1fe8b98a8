"""The Lightning callback in processes of their own: killed and resumed, and on two ranks."""

import signal
from functools import partial

import pytest
import torch
from processes import rows, run, windows
from small_problem import SAMPLES, one_by_one, windows_of

pytestmark = pytest.mark.slow
run = partial(run, "lightning_module.py")


@pytest.mark.parametrize(
    "settings",
    [{"kill_after": 9}, {"kill_after": 10, "every": 2, "stateful": True, "accumulate_grad_batches": 2}],
    ids=["end of the epoch", "in the epoch"],
)
def test_killed_in_the_second_epoch_and_resumed(tmp_path, settings):
    """Epochs of six batches. The checkpoint is older than the last rows, which must not be there twice."""
    settings = {"max_epochs": 3, "enable_checkpointing": True, "every": None, **settings}
    kill_after = settings.pop("kill_after")
    expected = run(tmp_path / "whole", **settings)
    run(tmp_path / "killed", code=-signal.SIGKILL, kill_after=kill_after, **settings)
    last = tmp_path / "killed" / "checkpoints" / "last.ckpt"
    found = run(tmp_path / "killed", ckpt=str(last), **settings)
    assert torch.equal(found, expected)
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert len(rows(tmp_path / "whole")) == 3 * SAMPLES


@pytest.mark.parametrize(
    ("accumulate", "strategy", "clip"),
    [(1, "ddp", False), (2, "ddp", True), (3, "ddp_find_unused_parameters_true", True)],
)
def test_two_ranks_give_the_update_of_one(tmp_path, accumulate, strategy, clip):
    """Lightning shuffles the samples and gives half of them to each rank; the ledger says which update they were in."""
    settings = dict(accumulate_grad_batches=accumulate, max_epochs=2, clip=clip)
    found = run(tmp_path, ranks=2, batch_size=2, devices=2, strategy=strategy, **settings)
    table = rows(tmp_path)
    assert [len(window) for window in windows(table)] == [len(each) for each in windows_of(4 * accumulate, 2)]
    expected, norms = one_by_one(windows(table), **({} if clip else {"bound": torch.inf}))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.tensor([row["norm"] for row in table]).double(), norms, rtol=1e-6, atol=1e-6)
    assert sorted(row["id"] for row in table) == sorted([*range(SAMPLES)] * 2)
    logged = torch.load(tmp_path / "metrics.pt")  # at the end of the second epoch
    assert logged["samplewise/norm_median"] == pytest.approx(norms[SAMPLES:].quantile(0.5).item())
    assert logged["samplewise/largest_id"] == table[SAMPLES + int(norms[SAMPLES:].argmax())]["id"]
