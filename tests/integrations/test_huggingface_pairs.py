"""`PerSample` with the trainers of TRL whose samples are pairs, completions or packed documents."""

import math
import os
from functools import partial

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from test_huggingface_trl import TEXTS, WORDS, llama, lora, tokenizer, trained
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import samplewise as sw
from samplewise.errors import GraphError, SamplesInteractError
from samplewise.integrations.huggingface import PerSample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # peft
    pytest.mark.filterwarnings("ignore:per-sample gradients of this model are computed in a slow way"),
]
disable_progress_bars()

RATE = 0.5


def pairs(n=9):
    prompts = ["the cat", "a dog", "the big red cat"]
    return Dataset.from_dict(
        {
            "prompt": [prompts[i % 3] for i in range(n)],
            "chosen": [" " + TEXTS[i] for i in range(n)],
            "rejected": [f" {' '.join(reversed(TEXTS[i].split()))} {WORDS[i % 4]}" for i in range(n)],
        }
    )


def rewarder():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = LlamaConfig(
        vocab_size=13, max_position_embeddings=32, eos_token_id=1, pad_token_id=0, num_labels=1, **sizes
    )
    return LlamaForSequenceClassification(config)


def mixed(base):
    return type(f"PerSample{base.__name__}", (PerSample, base), {})


def made(kind, config, model, directory, data, batch=3, accumulate=1, options=None, **keywords):
    defaults = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulate,
        "learning_rate": RATE,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "num_train_epochs": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    args = config(str(directory), **{**defaults, **(options or {})})
    torch.manual_seed(0)
    return kind(model(), args=args, train_dataset=data, processing_class=tokenizer(), **keywords)


def dpo(directory, kind=DPOTrainer, data=None, adapters=False, **keywords):
    extra = {"peft_config": lora()} if adapters else {"ref_model": llama()}
    return made(kind, DPOConfig, llama, directory, pairs() if data is None else data, **extra, **keywords)


def reward(directory, kind=RewardTrainer, data=None, adapters=False, **keywords):
    extra = {"peft_config": lora()} if adapters else {}
    return made(kind, RewardConfig, rewarder, directory, pairs() if data is None else data, **extra, **keywords)


def judged(n=9):
    """Completions with labels, for KTO."""
    rows = pairs(n)
    completions = [rows[i]["chosen" if i % 3 else "rejected"] for i in range(n)]
    return Dataset.from_dict(
        {"prompt": rows["prompt"], "completion": completions, "label": [i % 3 > 0 for i in range(n)]}
    )


def kto(directory, kind=KTOTrainer, data=None, adapters=False, options=None, **keywords):
    extra = {"peft_config": lora()} if adapters else {"ref_model": llama()}
    options = {"loss_type": "apo_zero_unpaired", **(options or {})}  # of which the loss has no terms of other samples
    return made(
        kind, KTOConfig, llama, directory, judged() if data is None else data, options=options, **extra, **keywords
    )


def even_pairs(n=9):
    """Pairs whose chosen completions have the same number of tokens: ORPO and CPO take the mean over all of them."""
    words = [[WORDS[(i * k + k) % 10] for k in range(4)] for i in range(n)]
    return Dataset.from_dict(
        {
            "prompt": ["the cat"] * n,
            "chosen": [" " + " ".join(w) for w in words],
            "rejected": [f" {w[2]} {w[1]}" for w in words],
        }
    )


def of_pairs(base, config):
    def make(directory, kind=base, data=None, adapters=False, options=None, **keywords):
        extra = {"peft_config": lora()} if adapters else {}
        options = {"max_length": 32, **(options or {})}
        data = even_pairs() if data is None else data
        return made(kind, config, llama, directory, data, options=options, **extra, **keywords)

    return make, base, even_pairs


TRAINERS = {
    "dpo": (dpo, DPOTrainer, pairs),
    "reward": (reward, RewardTrainer, pairs),
    "kto": (kto, KTOTrainer, judged),
    "orpo": of_pairs(ORPOTrainer, ORPOConfig),
    "cpo": of_pairs(CPOTrainer, CPOConfig),
}


def alone(plain, i):
    """Loss of a batch of one sample, as the trainer of TRL computes it."""
    plain.model.train()
    batch = plain._prepare_inputs(plain.data_collator([plain.train_dataset[i]]))
    return plain.compute_loss(plain.model, batch)


def gradient(plain, i, losses=alone):
    """Gradient of a sample's own loss, and its norm."""
    parameters = [p for p in plain.model.parameters() if p.requires_grad]
    row = torch.autograd.grad(losses(plain, i), parameters, materialize_grads=True)
    return row, float(torch.stack([g.norm() for g in row]).norm())


def clipped_epoch(plain, windows, bound, losses=alone, count=lambda i: 1):
    """Clipped updates by hand, one backward pass per sample. Returns the norms by id.

    count: function of an id, tokens in a loss that is a mean over tokens
    """
    parameters = [p for p in plain.model.parameters() if p.requires_grad]
    norms = {}
    for window in windows:
        total = [torch.zeros_like(p) for p in parameters]
        for i in window:
            row, norms[i] = gradient(plain, i, losses)
            for t, g in zip(total, row, strict=True):
                t += g * min(1, bound / norms[i]) / sum(map(count, window))
        with torch.no_grad():
            for p, t in zip(parameters, total, strict=True):
                p -= RATE * t
    return norms


def windows(directory):
    """The ids of each update."""
    found = {}
    for row in sw.read_ledger(directory).to_pylist():
        found.setdefault(row["update"], []).append(row["id"])
    return list(found.values())


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", TRAINERS)
def test_recording_leaves_training_bit_identical(name, adapters, tmp_path):
    make, base, data = TRAINERS[name]
    plain = make(tmp_path / "plain", adapters=adapters, batch=2, accumulate=2, data=data(8))
    plain.train()
    ours = make(
        tmp_path / "ours", mixed(base), sw.Indexed(data(8)), adapters, batch=2, accumulate=2, ledger=sw.Ledger()
    )
    ours.train()
    assert torch.equal(trained(plain), trained(ours))
    metrics = [{k: v for k, v in t.state.log_history[-1].items() if "rewards" in k} for t in (plain, ours)]
    assert metrics[0] == metrics[1]
    assert sorted(sw.read_ledger(tmp_path / "ours")["id"].to_pylist()) == list(range(8))


@pytest.mark.parametrize("sizes", [(3, 1), (2, 2), (4, 3)], ids=str)
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", TRAINERS)
def test_clipped_training_equals_one_backward_pass_per_pair(name, adapters, sizes, tmp_path):
    """Batches of different sizes are accumulated at the end of the epoch."""
    make, base, data = TRAINERS[name]
    batch, accumulate = sizes
    plain = make(tmp_path / "plain", adapters=adapters)
    start = trained(plain)
    bound = sorted(norm for _, norm in map(partial(gradient, plain), range(3)))[1]
    ours = make(
        tmp_path, mixed(base), sw.Indexed(data()), adapters, batch=batch, accumulate=accumulate,
        transforms=[sw.clip(bound)], ledger=sw.Ledger(),
    )  # fmt: skip
    ours.train()
    first = windows(tmp_path)[0]
    losses = {i: alone(plain, i).item() for i in first}
    norms = clipped_epoch(plain, windows(tmp_path), bound)
    update = (trained(plain) - start).norm()
    assert update > 0
    assert (trained(ours) - trained(plain)).norm() <= 1e-5 * update + 1e-7 * start.norm()
    rows = sw.read_ledger(tmp_path).to_pylist()
    assert len(rows) == 9
    for row in rows:
        assert row["norm"] == pytest.approx(norms[row["id"]], rel=1e-4)
        assert row["weight"] == pytest.approx(min(1, bound / norms[row["id"]]), rel=1e-4)
    if name not in ("orpo", "cpo"):  # whose losses have a term that is a mean over all tokens
        assert {row["id"]: row["loss"] for row in rows[: len(first)]} == pytest.approx(losses, rel=1e-4)
    assert any(row["weight"] < 1 for row in rows)


# --- packed documents -------------------------------------------------------------------------------------------------

PACKED = {
    "packed": {"packing": True, "max_length": 12},
    "packed and split": {"packing": True, "max_length": 12, "packing_strategy": "bfd_split"},
    "padding-free": {"padding_free": True, "max_length": None},
    "padded to a multiple": {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8},
}


def texts(**columns):
    return Dataset.from_dict({"text": TEXTS, **columns})


def sft(directory, kind=SFTTrainer, data=None, adapters=False, **keywords):
    extra = {"peft_config": lora()} if adapters else {}
    return made(kind, SFTConfig, llama, directory, texts() if data is None else data, **extra, **keywords)


def text_alone(plain, i):
    """Sum over the tokens of a text."""
    ids = torch.tensor([tokenizer()(TEXTS[i] + "<eos>")["input_ids"]])
    return plain.model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1)


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", PACKED)
def test_recording_of_packed_documents_leaves_training_bit_identical(name, adapters, tmp_path):
    sizes = {"batch": 2, "accumulate": 2, "options": PACKED[name]}
    plain = sft(tmp_path / "plain", adapters=adapters, **sizes)
    plain.train()
    ours = sft(tmp_path / "ours", mixed(SFTTrainer), sw.Indexed(texts()), adapters, ledger=sw.Ledger(), **sizes)
    ours.train()
    assert torch.equal(trained(plain), trained(ours))
    assert ours.state.log_history[-1]["entropy"] == plain.state.log_history[-1]["entropy"]
    rows = sw.read_ledger(tmp_path / "ours").to_pylist()
    assert {row["id"]: row["count"] for row in rows} == {i: len(text.split()) for i, text in enumerate(TEXTS)}


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", PACKED)
def test_clipped_packed_training_equals_one_backward_pass_per_document(name, adapters, tmp_path):
    """Packed training is the same as that with padding: an update divides by all tokens of the accumulated batches."""
    bound = 0.5 if adapters else 4.0
    ours = sft(
        tmp_path, mixed(SFTTrainer), sw.Indexed(texts()), adapters, batch=2, accumulate=2, options=PACKED[name],
        transforms=[sw.clip(bound)], ledger=sw.Ledger(),
    )  # fmt: skip
    ours.train()
    plain = sft(tmp_path / "plain", adapters=adapters)
    start = trained(plain)
    norms = clipped_epoch(plain, windows(tmp_path), bound, text_alone, lambda i: len(TEXTS[i].split()))
    assert (trained(ours) - trained(plain)).norm() <= 1e-5 * (trained(plain) - start).norm() + 1e-7 * start.norm()
    rows = sw.read_ledger(tmp_path).to_pylist()
    assert sorted(row["id"] for row in rows) == list(range(len(TEXTS)))
    for row in rows:
        assert row["norm"] == pytest.approx(norms[row["id"]], rel=1e-4)
        assert 0 < row["loss"] < 3 * row["count"]
    assert any(row["weight"] < 1 for row in rows)


def test_documents_of_the_plain_trainer(tmp_path):
    """DataCollatorWithFlattening, whose rows have no attention mask."""
    data = [{"input_ids": tokenizer()(text + "<eos>")["input_ids"]} for text in TEXTS]
    collator = DataCollatorWithFlattening()
    options = {"model": llama, "config": TrainingArguments, "batch": 3, "accumulate": 2, "data_collator": collator}
    plain = made(Trainer, directory=tmp_path / "plain", data=data, **options)
    plain.train()
    ours = made(mixed(Trainer), directory=tmp_path / "ours", data=sw.Indexed(data), ledger=sw.Ledger(), **options)
    ours.train()
    assert torch.equal(trained(plain), trained(ours))
    clipped = made(
        mixed(Trainer), directory=tmp_path, data=sw.Indexed(data), ledger=sw.Ledger(), transforms=[sw.clip(4.0)],
        **options,
    )  # fmt: skip
    clipped.train()
    plain = made(Trainer, directory=tmp_path / "by hand", data=data, **options)
    start = trained(plain)
    norms = clipped_epoch(plain, windows(tmp_path), 4.0, text_alone, lambda i: len(TEXTS[i].split()))
    assert (trained(clipped) - trained(plain)).norm() <= 1e-5 * (trained(plain) - start).norm() + 1e-7 * start.norm()
    rows = sw.read_ledger(tmp_path).to_pylist()
    assert {row["id"]: row["norm"] for row in rows} == pytest.approx(norms, rel=1e-4)
    assert not any(math.isnan(row["loss"]) for row in rows)


def test_parts_of_a_split_document_have_its_id(tmp_path):
    """Ids are a column of the dataset, of strings."""
    options = {"packing": True, "max_length": 4, "packing_strategy": "bfd_split"}
    sft(
        tmp_path,
        mixed(SFTTrainer),
        texts(key=[f"text {i}" for i in range(9)]),
        ledger=sw.Ledger(id="key"),
        options=options,
    ).train()
    counts = {}
    for row in sw.read_ledger(tmp_path).to_pylist():
        counts.setdefault(row["id"], []).append(int(row["count"]))
    words = {f"text {i}": len(text.split()) + 1 for i, text in enumerate(TEXTS)}  # and <eos>
    expected = {i: sorted(min(4, n - k) - 1 for k in range(0, n, 4)) for i, n in words.items()}
    assert {i: sorted(values) for i, values in counts.items()} == expected


def test_documents_that_attend_to_each_other_are_refused(tmp_path):
    class WithMask(mixed(SFTTrainer)):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return super().compute_loss(
                model, {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}, *args, **kwargs
            )

    trainer = sft(tmp_path, WithMask, options=PACKED["packed"], transforms=[sw.clip(1.0)])
    with pytest.raises(SamplesInteractError, match="found that the loss of one changes with the tokens of another"):
        trainer.train()


def test_packing_that_cuts_documents_is_refused(tmp_path):
    options = {"packing": True, "max_length": 12, "packing_strategy": "wrapped"}
    with pytest.raises(
        GraphError, match=r"found packing that cuts documents at the ends of rows.* Set packing_strategy='bfd'"
    ):
        sft(tmp_path, mixed(SFTTrainer), options=options)


# --- completions that are generated -----------------------------------------------------------------------------------

PROMPTS = ["the cat", "a dog", "the big red", "on a"]


def prompts():
    return Dataset.from_dict({"prompt": PROMPTS})


def reward_of_tokens(completion_ids, **columns):
    return [float(sum(k * k % 7 for k in ids)) for ids in completion_ids]


def online(base, config):
    def make(directory, kind=base, data=None, adapters=False, options=None, **keywords):
        extra = {"peft_config": lora()} if adapters else {}
        defaults = {"num_generations": 2, "max_completion_length": 5, "beta": 0.0}
        options = {**defaults, **(options or {})}
        return made(
            kind, config, llama, directory, prompts() if data is None else data, options=options,
            reward_funcs=reward_of_tokens, **extra, **keywords,
        )  # fmt: skip

    return make


grpo = online(GRPOTrainer, GRPOConfig)
rloo = online(RLOOTrainer, RLOOConfig)
ONLINE = {"grpo": (grpo, GRPOTrainer), "rloo": (rloo, RLOOTrainer)}
STEPS = {
    "one batch": {"batch": 4, "accumulate": 1},
    "accumulated": {"batch": 2, "accumulate": 2},
    "reused": {"batch": 4, "accumulate": 1, "options": {"num_iterations": 2, "steps_per_generation": 2}},
}


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", ONLINE)
def test_recording_of_completions_leaves_training_bit_identical(name, steps, adapters, tmp_path):
    make, base = ONLINE[name]
    plain = make(tmp_path / "plain", adapters=adapters, **STEPS[steps])
    plain.train()
    ours = make(tmp_path / "ours", mixed(base), sw.Indexed(prompts()), adapters, ledger=sw.Ledger(), **STEPS[steps])
    ours.train()
    assert torch.equal(trained(plain), trained(ours))
    rows = sw.read_ledger(tmp_path / "ours").to_pylist()
    visits = 4 if steps == "reused" else 2
    assert sorted(row["id"] for row in rows) == sorted(list(range(4)) * visits)


def recording(base, seen):
    """The trainer, which appends the prepared batch of each step to a list."""

    class Recording(mixed(base)):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append((inputs, self.current_gradient_accumulation_steps))
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Recording


def completions_one_at_a_time(plain, seen, bound, accumulate):
    """Clipped updates by hand, from the batches of completions. Returns the norms and losses in their order."""
    parameters = [p for p in plain.model.parameters() if p.requires_grad]
    plain.model.train()
    kind = getattr(plain, "loss_type", "rloo")
    norms, losses = [], []
    for k in range(0, len(seen), accumulate):
        total = [torch.zeros_like(p) for p in parameters]
        for batch, steps in seen[k : k + accumulate]:
            plain.current_gradient_accumulation_steps = steps
            rows = len(batch["completion_ids"])
            mask = batch["completion_mask"].sum(1)
            for i in range(rows):
                row = {key: v[i : i + 1] if isinstance(v, torch.Tensor) and v.dim() else v for key, v in batch.items()}
                loss = plain.compute_loss(plain.model, row)
                if kind == "rloo":
                    denominator = rows * steps
                elif kind == "bnpo":  # the mean over the tokens of a batch
                    loss = loss * steps * mask[i]
                    denominator = float(mask.sum()) * steps
                elif kind == "dapo":  # the mean over the tokens of all batches for which completions are generated
                    denominator = float(batch["num_items_in_batch"]) * steps / plain.args.steps_per_generation
                    loss = loss * denominator
                else:
                    loss = loss * steps
                    denominator = rows * steps
                g = torch.autograd.grad(loss, parameters, materialize_grads=True)
                norms.append(float(torch.stack([x.norm() for x in g]).norm()))
                losses.append(loss.item())
                for t, x in zip(total, g, strict=True):
                    t += x * min(1, bound / max(norms[-1], 1e-12)) / denominator
        with torch.no_grad():
            for p, t in zip(parameters, total, strict=True):
                p -= RATE * t
    return norms, losses


KINDS = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo"]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_clipped_training_equals_one_backward_pass_per_completion(kind, steps, tmp_path):
    make, base = ONLINE["rloo" if kind == "rloo" else "grpo"]
    options = {"beta": 0.1} if kind == "rloo" else {"beta": 0.1, "loss_type": kind}
    sizes = {**STEPS[steps], "options": {**STEPS[steps].get("options", {}), **options}}
    seen = []
    bound = {"dr_grpo": 0.5, "bnpo": 2.0, "dapo": 2.0, "luspo": 2.0}.get(kind, 0.5)
    ours = make(
        tmp_path, recording(base, seen), sw.Indexed(prompts()), True, transforms=[sw.clip(bound)], ledger=sw.Ledger(),
        **sizes,
    )  # fmt: skip
    ours.train()
    plain = make(tmp_path / "plain", adapters=True, **sizes)
    start = trained(plain)
    norms, losses = completions_one_at_a_time(plain, seen, bound, sizes["accumulate"])
    update = (trained(plain) - start).norm()
    assert (trained(ours) - trained(plain)).norm() <= 1e-5 * update + 1e-7 * start.norm()
    rows = sw.read_ledger(tmp_path).to_pylist()
    assert [row["norm"] for row in rows] == pytest.approx(norms, rel=1e-3, abs=1e-6)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-3, abs=1e-5)
    ids = [int(i) for batch, _ in seen for i in batch["id"]]
    assert [row["id"] for row in rows] == ids
    assert any(row["weight"] < 1 for row in rows)
    assert any(row["weight"] == 1 for row in rows)


# --- losses of routers ------------------------------------------------------------------------------------------------


def experts():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    routing = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=13, max_position_embeddings=32, eos_token_id=1, intermediate_size=32, **sizes, **routing
        )
    )


def test_the_loss_of_routers_gets_its_ordinary_gradient(tmp_path):
    """TRL adds it by default. It belongs to no sample."""

    def trainer(directory, kind=SFTTrainer, data=None, **keywords):
        return made(kind, SFTConfig, experts, tmp_path / directory, data or texts(), batch=3, **keywords)

    plain = trainer("plain")
    assert plain.aux_loss_enabled
    plain.train()
    refused = trainer("refused", mixed(SFTTrainer), transforms=[sw.clip(1.0)])
    with pytest.raises(GraphError, match=r"an auxiliary loss .* or pass rest='plain' to sw.backward or PerSample"):
        refused.train()
    recorded = trainer("recorded", mixed(SFTTrainer), sw.Indexed(texts()), ledger=sw.Ledger(), rest="plain")
    recorded.train()
    assert torch.equal(trained(plain), trained(recorded))
    unclipped = trainer("unclipped", mixed(SFTTrainer), transforms=[sw.clip(1e9)], rest="plain")
    unclipped.train()
    assert (trained(unclipped) - trained(plain)).norm() <= 1e-6 * trained(plain).norm()
    with pytest.raises(ValueError, match="rest must be 'refuse' or 'plain'; found 'some'"):
        trainer("invalid", mixed(SFTTrainer), rest="some")


@pytest.mark.parametrize("name", ["packed", "padding-free"])
def test_an_aggregate_of_packed_documents(name, tmp_path):
    """The mean over documents of their means over tokens, in one update."""
    sizes = {"batch": 3, "accumulate": 4, "aggregate": sw.per("sample"), "ledger": sw.Ledger()}
    packed = sft(tmp_path / "packed", mixed(SFTTrainer), sw.Indexed(texts()), options=PACKED[name], **sizes)
    packed.train()
    sizes["ledger"] = sw.Ledger()
    padded = sft(tmp_path / "padded", mixed(SFTTrainer), sw.Indexed(texts()), **sizes)
    start = trained(padded)
    padded.train()
    assert packed.state.global_step == padded.state.global_step == 1
    assert (trained(packed) - trained(padded)).norm() <= 1e-5 * (trained(padded) - start).norm()


def test_columns_of_packed_documents_and_of_prompts(tmp_path):
    """Weights in a column of the dataset."""
    weights = [0.0, 1.0, 0.5] * 3
    data = texts(id=list(range(9)), importance=weights)
    packed = sft(
        tmp_path / "packed", mixed(SFTTrainer), data, options=PACKED["packed"], ledger=sw.Ledger(),
        transforms=[sw.weight("importance")],
    )  # fmt: skip
    packed.train()
    rows = sw.read_ledger(tmp_path / "packed").to_pylist()
    assert {row["id"]: row["weight"] for row in rows} == dict(enumerate(weights))
    asked = Dataset.from_dict({"prompt": PROMPTS, "id": list("abcd"), "importance": weights[:4]})
    grpo(
        tmp_path / "grpo", mixed(GRPOTrainer), asked, batch=4, ledger=sw.Ledger(), transforms=[sw.weight("importance")]
    ).train()
    rows = sw.read_ledger(tmp_path / "grpo").to_pylist()
    assert {row["id"]: row["weight"] for row in rows} == dict(zip("abcd", weights[:4], strict=True))
