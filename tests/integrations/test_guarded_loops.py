"""sw.guard in the loops of Hugging Face and Lightning: its state changes once per update, and is saved by them."""

import pytest
import torch
from huggingface_models import PerSampleTrainer, arguments, bert, classes, vector
from lightning_module import Module, loader, trainer
from small_problem import SAMPLES, flat
from transformers import TrainerCallback

import samplewise as sw
from samplewise.integrations.lightning import PerSample
from samplewise.transforms.stats import SampleStats


def assert_bounds_of_earlier_updates(table, **settings):
    """Weights of a ledger are those of a guard that gets the norms of one update after the other."""
    rows = table.to_pandas()
    guard = sw.guard(**settings)
    clipped = 0
    for _, update in rows.groupby("update", sort=True):
        norms = torch.tensor(update["norm"].to_numpy(dtype="float64"))
        stats = SampleStats(torch.zeros_like(norms), raw_norms=norms)
        expected = guard(stats)
        torch.testing.assert_close(
            torch.tensor(update["weight"].to_numpy(dtype="float64")), expected, rtol=3e-2, atol=0
        )
        clipped += int((expected < 1).sum())
        guard.state.commit(guard.state.values(stats))
    assert clipped > 10
    return guard


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 23:
            raise KeyboardInterrupt


def test_hugging_face(tmp_path):
    options = {"num_train_epochs": 5, "save_strategy": "steps", "save_steps": 20, "optim": "adamw_torch"}
    settings = {"clip": 0.6, "window": "30up"}

    def made(name, *callbacks):
        args = arguments(tmp_path / name, 4, 2, learning_rate=0.01, **options)
        data = sw.Indexed(classes(40))
        transforms = [sw.guard(**settings)]
        return PerSampleTrainer(
            bert(dropout=0.2),
            args,
            train_dataset=data,
            ledger=sw.Ledger(),
            transforms=transforms,
            callbacks=[*callbacks],
        )

    whole = made("whole")
    whole.train()
    guard = assert_bounds_of_earlier_updates(sw.read_ledger(tmp_path / "whole"), **settings)
    (state,) = whole._adapter.chain.states
    assert state.state_dict()["progress"] == guard.state.state_dict()["progress"] == 25 % 15
    with pytest.raises(KeyboardInterrupt):
        made("resumed", Interrupt()).train()
    resumed = made("resumed")
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(vector(whole.model), vector(resumed.model))
    assert resumed._adapter.chain.state_dict() == whole._adapter.chain.state_dict()


def test_lightning(tmp_path):
    settings = {"clip": 0.6, "window": "20up"}

    def fitted(epochs, callback, path=None, **options):
        module = Module("losses", torch.float64)
        made = trainer([callback], max_epochs=epochs, accumulate_grad_batches=2, **options)
        made.fit(module, loader(4), ckpt_path=path)
        return made, module

    whole = PerSample([sw.guard(**settings)], sw.Ledger(tmp_path / "whole"))
    _, module = fitted(10, whole)
    guard = assert_bounds_of_earlier_updates(sw.read_ledger(tmp_path / "whole"), **settings)
    updates = 10 * -(-SAMPLES // 8)
    assert whole.transforms.state_dict()[0]["progress"] == guard.state.state_dict()["progress"] == updates % 10

    first = PerSample([sw.guard(**settings)])
    made, _ = fitted(6, first)
    made.save_checkpoint(tmp_path / "epoch.ckpt")
    second = PerSample([sw.guard(**settings)])
    _, resumed = fitted(10, second, tmp_path / "epoch.ckpt")
    assert torch.equal(flat(resumed), flat(module))
    assert second.transforms.state_dict() == whole.transforms.state_dict()
