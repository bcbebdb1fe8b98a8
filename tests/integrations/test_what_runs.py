"""The table "What runs" of docs/integrations.md: each cell is tried with a small training."""

import re
from functools import partial
from pathlib import Path

import huggingface_models as hf
import pytest
import test_huggingface_pairs as trl_models
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer
from trl import SFTTrainer

import samplewise as sw
from samplewise.errors import SamplewiseError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # peft
    pytest.mark.filterwarnings("ignore:per-sample gradients of this model are computed in a slow way"),
]

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
PLAN = {"noise_multiplier": 1.0, "delta": 1e-3, "updates": 2, "sample_rate": 0.5, "clip": 0.1, "seed": 1}
FEATURES = {
    "clip, weights": lambda: {"transforms": [sw.clip(1e6)]},  # changes nothing: equal to the plain trainer
    "ledger": lambda: {"ledger": sw.Ledger()},
    "`aggregate=`": lambda: {"aggregate": sw.per("sample")},
    "`privacy=`": lambda: {"privacy": sw.Privacy(**PLAN, accountant="rdp")},
}


def transformers_trainer(model, data, directory, plain, **keywords):
    options = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant"}
    return (Trainer if plain else hf.PerSampleTrainer)(
        model(),
        hf.arguments(directory, 3, **options),
        train_dataset=data if plain else sw.Indexed(data),
        **keywords,
    )


def adapted():
    torch.manual_seed(0)
    return get_peft_model(hf.llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian"))


def trl_trainer(make, base, data, options, directory, plain, **keywords):
    if plain:
        return make(directory, base, data(), options=options, **keywords)
    return make(directory, trl_models.mixed(base), sw.Indexed(data()), options=options, **keywords)


SFT = partial(trl_trainer, trl_models.sft, SFTTrainer, trl_models.texts)
TRAINERS = {
    "`Trainer`, classifier": partial(transformers_trainer, hf.bert, hf.classes(6)),
    "`Trainer`, language model": partial(transformers_trainer, hf.llama, hf.texts(6)),
    "`Trainer`, LoRA": partial(transformers_trainer, adapted, hf.texts(6)),
    "`SFTTrainer`, full": partial(SFT, {}),
    "`SFTTrainer`, LoRA": partial(SFT, {}, adapters=True),
    "`SFTTrainer`, packing": partial(SFT, trl_models.PACKED["packed"]),
    "`SFTTrainer`, padding-free": partial(SFT, trl_models.PACKED["padding-free"]),
    "`DPOTrainer`": partial(trl_trainer, *trl_models.TRAINERS["dpo"], {}),
    "`RewardTrainer`": partial(trl_trainer, *trl_models.TRAINERS["reward"], {}),
    "`KTOTrainer`": partial(trl_trainer, *trl_models.TRAINERS["kto"], {}),
    "`ORPOTrainer`, `CPOTrainer`": partial(trl_trainer, *trl_models.TRAINERS["orpo"], {}),
    "`GRPOTrainer`, `RLOOTrainer`": partial(trl_trainer, *trl_models.ONLINE["grpo"], trl_models.prompts, {}, batch=4),
}


def table():
    """(trainer, feature) -> cell"""
    section = PAGE.read_text().split("\n## What runs\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)]
    header, _, *lines = rows
    return {(row[0], name): cell for row in lines for name, cell in zip(header[1:], row[1:], strict=True)}


CELLS = table()


def test_every_row_is_tried():
    assert {trainer for trainer, _ in CELLS} == set(TRAINERS)
    assert {feature for _, feature in CELLS} == {*FEATURES, "a sample is", "cost of clip"}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_cell_is_true(trainer, feature, tmp_path):
    make = TRAINERS[trainer]
    cell = CELLS[trainer, feature]
    assert cell in ("exact", "refused")
    if cell == "refused":
        with pytest.raises(SamplewiseError):
            make(tmp_path / "ours", False, **FEATURES[feature]()).train()
        return
    ours = make(tmp_path / "ours", False, **FEATURES[feature]())
    ours.train()
    if feature in ("clip, weights", "ledger"):
        plain = make(tmp_path / "plain", True)
        plain.train()
        start = hf.vector(make(tmp_path / "start", True).model)
        moved = (hf.vector(plain.model) - start).norm()
        assert (hf.vector(ours.model) - hf.vector(plain.model)).norm() <= 1e-4 * moved
