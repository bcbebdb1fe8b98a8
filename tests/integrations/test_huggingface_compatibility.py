"""Settings of a Hugging Face Trainer that are refused, each with a sentence; and a missing installation."""

import importlib
import sys
from types import SimpleNamespace

import pytest
from huggingface_models import PerSampleTrainer, arguments, bert, classes
from transformers import Trainer

from samplewise.errors import DistributedError, GraphError, SamplewiseError
from samplewise.integrations.huggingface import PerSample


def trainer(tmp_path, kind=PerSampleTrainer, options=None):
    return kind(bert(), arguments(tmp_path, **(options or {})), train_dataset=classes(4))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (lambda t: setattr(t, "is_deepspeed_enabled", True), "found DeepSpeed, which runs its own backward pass. Use"),
        (lambda t: setattr(t.args, "_n_gpu", 2), "found nn.DataParallel, whose replicas are .* torchrun or accelerate"),
        (
            lambda t: setattr(t.accelerator.state, "parallelism_config", SimpleNamespace(cp_size=2, sp_size=1)),
            "found context or sequence parallelism, in which a rank has parts of samples. Leave out parallelism_config",
        ),
        (lambda t: setattr(t.model, "_tp_size", 2), "found a model that transformers has sharded when it was loaded"),
        (
            lambda t: (
                setattr(t, "is_fsdp_enabled", True)
                or setattr(t.accelerator.state, "fsdp_plugin", SimpleNamespace(fsdp_version=1))
            ),
            "found FSDP version 1, which flattens parameters. Set fsdp_version=2 in fsdp_config",
        ),
    ],
    ids=["deepspeed", "data parallel", "context parallel", "tensor parallel", "fsdp 1"],
)
def test_kinds_of_parallelism(changed, sentence, tmp_path):
    made = trainer(tmp_path)
    state = vars(made.accelerator.state)
    before = {key: state.get(key) for key in ("parallelism_config", "fsdp_plugin")}
    try:
        changed(made)
        with pytest.raises(SamplewiseError, match=f"PerSample must get the gradient of each sample; {sentence}"):
            made.train()
    finally:
        state.update(before)  # shared by all accelerators of the process


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"torch_compile": True}, "found torch_compile=True, after which the graph cannot be read. Leave it out."),
        ({"optim": "lomo"}, "found optim='lomo', which updates parameters during the backward pass. Use another"),
    ],
    ids=["compile", "lomo"],
)
def test_settings(options, sentence, tmp_path):
    with pytest.raises(GraphError, match=sentence):
        trainer(tmp_path, options=options)


def test_the_order_of_the_bases():
    with pytest.raises(TypeError, match=r"PerSample must come before Trainer .*; found Mine\(Trainer, PerSample\)"):
        type("Mine", (Trainer, PerSample), {})


def test_trainers_of_trl_whose_samples_are_not_known(tmp_path):
    other = type("OtherTrainer", (Trainer,), {"__module__": "trl.trainer.other_trainer"})
    with pytest.raises(DistributedError, match=r"found OtherTrainer, whose samples in the loss are not known. Use SFT"):
        trainer(tmp_path, type("Mine", (PerSample, other), {}))


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_a_missing_installation(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "samplewise.integrations.huggingface")
    with pytest.raises(ImportError) as raised:
        importlib.import_module("samplewise.integrations.huggingface")
    assert str(raised.value) == (
        "samplewise.integrations.huggingface needs transformers and accelerate: pip install 'samplewise[huggingface]'"
    )
