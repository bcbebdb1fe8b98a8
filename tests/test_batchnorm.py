"""`sw.freeze_batchnorm`, and each sentence of advice about BatchNorm, followed."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.engine.strategies import jacobian_rows

CLIP = [sw.clip(1.0)]


def net(**options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8, **options),
        nn.Dropout(0.0),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 1),
    ).double()
    model(torch.randn(20, 6).double())  # running statistics other than 0 and 1
    return model


def batches(updates=2):
    torch.manual_seed(1)
    return [(torch.randn(8, 6).double(), torch.randn(8).double()) for _ in range(updates)]


def squares(model, batch):
    return (model(batch[0]).squeeze(1) - batch[1]).square()


def refusal(model, **options):
    with pytest.raises(sw.SamplesInteractError) as caught:
        sw.gradients(squares(model, batches()[0]), model, **options).norms()
    return str(caught.value)


def said(model, loss_fn=squares, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, **options).run(batches())
    return [str(warning.message) for warning in caught]


def modes(model):
    return [module.training for module in model]


FROZEN = [True, False, True, True, False, True]


def test_layers_stay_in_eval_mode():
    model = net()
    assert sw.freeze_batchnorm(model) is model
    assert modes(model) == FROZEN
    assert modes(model.train()) == FROZEN
    assert not any(modes(model.eval()))
    assert modes(model.train()) == FROZEN
    assert model[1].train() is model[1] and model[1].eval() is model[1]
    assert modes(sw.freeze_batchnorm(model)) == FROZEN


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_frozen_and_independent(duplicate):
    model = sw.freeze_batchnorm(net())
    other = duplicate(model)
    assert modes(other.train()) == FROZEN
    sw.freeze_batchnorm(other, False)
    assert all(modes(other.train()))
    assert modes(model.train()) == FROZEN


def test_undo_gives_the_mode_of_the_model():
    model = sw.freeze_batchnorm(net())
    keys = set(vars(net()[1]))
    assert all(modes(sw.freeze_batchnorm(model, False)))
    assert set(vars(model[1])) == keys
    sw.freeze_batchnorm(model).eval()
    assert not any(modes(sw.freeze_batchnorm(model, False)))
    assert all(modes(model.train()))


def test_the_state_dict_is_that_of_the_model():
    model, twin = sw.freeze_batchnorm(net()), net()
    assert list(model.state_dict()) == list(twin.state_dict())
    twin.load_state_dict(model.state_dict())
    assert modes(model.train()) == FROZEN and all(modes(twin))
    assert type(model[1]) is nn.BatchNorm1d


def test_gradients_are_those_of_eval_mode_and_statistics_do_not_change():
    model = sw.freeze_batchnorm(net()).train()
    buffers = copy.deepcopy(dict(model.named_buffers()))
    batch = batches()[0]
    twin = net_in_eval(model)
    rows = jacobian_rows(squares(twin, batch), dict(twin.named_parameters()))
    for name, row in sw.gradients(squares(model, batch), model).full().items():
        torch.testing.assert_close(row, rows[name], rtol=1e-9, atol=1e-12)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def net_in_eval(model):
    twin = net().eval()
    twin.load_state_dict(model.state_dict())
    return twin


def test_a_model_without_batch_norm_is_returned_unchanged():
    model = nn.Linear(2, 2)
    assert sw.freeze_batchnorm(model) is model and model.training


def test_a_layer_alone():
    layer = sw.freeze_batchnorm(nn.BatchNorm1d(3))
    assert not layer.train().training


def test_layers_without_running_statistics_are_refused_and_nothing_is_changed():
    model = net(track_running_stats=False)
    with pytest.raises(
        sw.ParameterError, match=r"track_running_stats=False in 1\. Create them with .*=True, or use GroupN"
    ):
        sw.freeze_batchnorm(model)
    assert all(modes(model.train()))


# ------------------------------------------------------------- training


@pytest.mark.sweep(2 / 3)
@pytest.mark.parametrize("options", [dict(), dict(compile=True), dict(microbatch=3)], ids=str)
@pytest.mark.usefixtures("backend")
def test_training_with_frozen_layers(options):
    """As with layers put in eval mode by hand; weight and bias are trained, without a warning."""
    model, twin = sw.freeze_batchnorm(net()), net()
    for layer in (twin[1], twin[4]):
        layer.eval()
    before = model[1].weight.clone()
    model.train()
    assert said(model, transforms=CLIP, **options) == []
    assert said(twin, transforms=CLIP) == []
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert not torch.equal(model[1].weight, before)


def test_a_trainer_does_not_undo_it(tmp_path):
    model = sw.freeze_batchnorm(net())
    step = sw.Step(model, sw.sgd(0.01), squares, transforms=CLIP)
    sw.Trainer(step, tmp_path / "run").fit(batches(), validate=batches(), epochs=2)
    assert step.counters.updates == 4
    assert not model[1].training and not model[4].training


def test_a_model_in_eval_mode_is_still_reported():
    (warning,) = said(sw.freeze_batchnorm(net()).eval(), transforms=CLIP)
    assert warning.startswith("modules are in eval mode while training: the model.")


# ------------------------------------------------------------- advice


def test_all_layers_are_named():
    message = refusal(net(affine=False))
    assert "found BatchNorm in training mode: module '1', module '4'." in message


def test_more_than_five_layers():
    model = nn.Sequential(nn.Linear(6, 8), *(nn.BatchNorm1d(8) for _ in range(7)), nn.Linear(8, 1)).double()
    assert "module '1', module '2', module '3', module '4', module '5' and 2 more." in refusal(model)


ADVICE = (
    "Call sw.freeze_batchnorm(model), which keeps BatchNorm in eval mode after model.train(), use GroupNorm, or pass "
)


def test_advice_to_freeze():
    model = net()
    assert ADVICE in refusal(model)
    sw.freeze_batchnorm(model).train()
    sw.gradients(squares(model, batches()[0]), model).norms()


def test_advice_to_use_group_norm():
    model = net()
    model[1], model[4] = nn.GroupNorm(2, 8).double(), nn.GroupNorm(2, 8).double()
    assert said(model, transforms=CLIP) == []


def test_advice_to_allow():
    model = net()
    losses = squares(model, batches()[0])
    rows = jacobian_rows(losses, dict(model.named_parameters()))
    for name, row in sw.gradients(losses, model, interacting="allow").full().items():
        torch.testing.assert_close(row, rows[name], rtol=1e-8, atol=1e-11)


def test_advice_for_norms_that_are_only_recorded(tmp_path):
    """A ledger without norms is named first. It trains unchanged."""
    with pytest.raises(sw.SamplesInteractError) as caught:
        said(net(), record=["norms"])
    assert (
        "whole batch. No transform uses per-sample gradients here: sw.Ledger(norms=False), on the command line "
        "--ledger losses, records the losses and trains this model unchanged. To record norms, call sw.freeze_batchnorm"
    ) in str(caught.value)
    model, twin = net(), net()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), with_ids)
    ledger = sw.Ledger(tmp_path, norms=False, id=2)
    ledger.listen(step)
    for update in step.over([(x, y, torch.arange(8)) for x, y in batches()]):
        ledger.add(update)
    assert said(twin) == []
    assert torch.equal(model[0].weight, twin[0].weight)
    assert len(ledger.read()) == 16


def with_ids(model, batch):
    return squares(model, batch[:2])


def test_advice_if_a_transform_uses_per_sample_gradients():
    with pytest.raises(sw.SamplesInteractError) as caught:
        said(net(), transforms=CLIP, record=["norms"])
    assert "Ledger" not in str(caught.value) and ADVICE in str(caught.value)


@pytest.mark.parametrize("record", [["norms"], ()])
def test_a_broadcast_is_not_hidden_in_a_ledger_without_norms(record):
    def broadcast(model, batch):
        return (model(batch[0]) - batch[1]).square().mean(1)

    model = nn.Linear(6, 1).double()
    with pytest.raises((sw.SamplesInteractError, sw.LossesError)) as caught:
        said(model, broadcast, record=record)
    assert "Ledger" not in str(caught.value)


def test_advice_in_private_training():
    """interacting='allow' is refused there, and is not offered."""
    data = torch.utils.data.TensorDataset(*batches()[0])
    privacy = sw.Privacy(noise_multiplier=1.0, delta=1e-3, updates=2, sample_rate=0.9, clip=1.0)
    model = net()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), squares, privacy=privacy)
    with pytest.raises(sw.SamplesInteractError) as caught:
        step.run(privacy.loader(data))
    assert str(caught.value).endswith(
        "Call sw.freeze_batchnorm(model), which keeps BatchNorm in eval mode after model.train(), or use GroupNorm."
    )


def test_advice_for_layers_without_running_statistics():
    """In eval mode they use batch statistics, too."""
    model = net(track_running_stats=False).eval()
    message = refusal(model)
    assert "found BatchNorm with batch statistics: module '1'." in message
    assert (
        "(track_running_stats=False), module '1' would use those of the batch in eval mode, too: create it" in message
    )
    model = sw.freeze_batchnorm(net(track_running_stats=True))
    sw.gradients(squares(model, batches()[0]), model).norms()


def test_check_gives_the_same_advice():
    found = sw.check(net(), squares, batches()[0])
    assert not found.ok and ADVICE in str(found)
    assert sw.check(sw.freeze_batchnorm(net()), squares, batches()[0]).ok


def test_input_gradients():
    model = net()
    x = batches()[0][0].requires_grad_()
    with pytest.raises(sw.SamplesInteractError, match=r"Call sw\.freeze_batchnorm\(model\)"):
        sw.input_gradients(model(x).squeeze(1), x)
    sw.freeze_batchnorm(model)
    sw.input_gradients(model(x).squeeze(1), x)


@pytest.mark.parametrize("options", [dict(microbatch=4), dict(samples=4, microbatch=1)], ids=str)
def test_advice_for_windows_in_pieces(options):
    model = nn.Sequential(nn.Unflatten(1, (3, 2)), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(6, 1)).double()
    (warning,) = said(model, **options)
    assert "call sw.freeze_batchnorm(model), or use GroupNorm." in warning
    assert said(sw.freeze_batchnorm(model), **options) == []


def test_advice_for_groups():
    model = net()
    chain = [sw.group(lambda batch: [int(v > 0) for v in batch[1]]), sw.clip(1.0)]
    with pytest.raises(
        sw.SamplesInteractError, match=r"mode: 1, 4\. Call sw\.freeze_batchnorm\(model\), use GroupNorm, or"
    ):
        said(model, transforms=chain, microbatch=4)
    assert said(sw.freeze_batchnorm(model), transforms=chain, microbatch=4) == []


def test_something_else_than_a_model():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; found generator\. Pass the model\."):
        sw.freeze_batchnorm(nn.Linear(2, 2).parameters())
