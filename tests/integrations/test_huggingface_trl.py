"""`PerSample` with trl.SFTTrainer, and with tables of the package datasets."""

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from huggingface_models import PerSampleTrainer, arguments, bert, classes, train, vector
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOTrainer, SFTConfig, SFTTrainer
from trl.kernels import ChunkedLogProbFunction

import samplewise as sw
from samplewise.errors import LossesError
from samplewise.integrations.huggingface import PerSample
from samplewise.integrations.huggingface.denominators import check_aggregate
from samplewise.integrations.huggingface.outputs import before_fused_head

pytestmark = pytest.mark.slow
disable_progress_bars()

WORDS = "the a cat dog sat on mat ran big red".split()
TEXTS = [" ".join(WORDS[(3 * i + k * k) % len(WORDS)] for k in range(2 + i % 5)) for i in range(9)]


class PerSampleSFTTrainer(PerSample, SFTTrainer):
    pass


def tokenizer():
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    made = Tokenizer(models.WordLevel({word: k for k, word in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=13, max_position_embeddings=32, eos_token_id=1, **sizes))


def lora(dropout=0.0):
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=dropout, init_lora_weights="gaussian")


def sft(directory, kind=PerSampleSFTTrainer, data=None, batch=4, accumulate=1, adapters=None, options=None, **keywords):
    defaults = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulate,
        "learning_rate": 0.5,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "num_train_epochs": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    args = SFTConfig(str(directory), **{**defaults, **(options or {})})
    data = sw.Indexed(Dataset.from_dict({"text": TEXTS})) if data is None else data
    torch.manual_seed(0)
    return kind(llama(), args, train_dataset=data, processing_class=tokenizer(), peft_config=adapters, **keywords)


def trained(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_recording_leaves_training_bit_identical(adapters, tmp_path):
    def adapter():
        return lora(dropout=0.2) if adapters else None

    table = Dataset.from_dict({"text": TEXTS})
    plain = sft(tmp_path / "plain", SFTTrainer, table, 2, 2, adapter())
    plain.train()
    ours = sft(tmp_path / "ours", batch=2, accumulate=2, adapters=adapter(), ledger=sw.Ledger())
    ours.train()
    assert torch.equal(trained(plain), trained(ours))
    ledger = sw.read_ledger(tmp_path / "ours")
    assert sorted(ledger["id"].to_pylist()) == list(range(len(TEXTS)))
    assert plain.state.log_history[-1]["mean_token_accuracy"] == ours.state.log_history[-1]["mean_token_accuracy"]
    counts = dict(zip(ledger["id"].to_pylist(), ledger["count"].to_pylist(), strict=True))
    assert counts == {i: len(text.split()) for i, text in enumerate(TEXTS)}  # and <eos>, without the first token


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": False}], ids=["checkpointing", "plain"])
def test_clipped_fine_tuning_equals_one_backward_pass_per_sample(adapters, options, tmp_path):
    """An epoch of one update, with batches of different sizes."""
    bound = 0.5 if adapters else 4.0
    made = sft(
        tmp_path, batch=3, accumulate=4, adapters=lora() if adapters else None, options=options,
        transforms=[sw.clip(bound)], ledger=sw.Ledger(),
    )  # fmt: skip
    before = sft(tmp_path / "by hand", adapters=lora() if adapters else None)
    assert (before_fused_head(made.model) is made.model) == (not adapters)
    made.train()
    rows = {row["id"]: row for row in sw.read_ledger(tmp_path).to_pylist()}
    assert {row["update"] for row in rows.values()} == {0}
    model = before.model
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    tokens = tokenizer()
    for i, text in enumerate(TEXTS):
        ids = torch.tensor([tokens(text + "<eos>")["input_ids"]])
        loss = model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1)
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.stack([g.norm() for g in gradients]).norm()
        assert rows[i]["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert rows[i]["norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert rows[i]["count"] == ids.shape[1] - 1
        for t, g in zip(total, gradients, strict=True):
            t += g * min(1.0, bound / norm.item())
    count = sum(row["count"] for row in rows.values())
    expected = torch.cat([(p - 0.5 * t / count).detach().flatten() for p, t in zip(parameters, total, strict=True)])
    update = (expected - trained(before)).norm()
    assert (trained(made) - expected).norm() <= 3e-6 * update + 1e-7 * expected.norm()
    assert any(row["weight"] < 1 for row in rows.values())


def test_a_trained_head_that_is_fused_is_called_with_the_rows_of_each_sample(tmp_path, monkeypatch):
    """Its backward never gets the rows of the whole batch after the first step, in which the calls are verified."""
    rows = []
    backward = ChunkedLogProbFunction.backward

    def counted(ctx, *gradients):
        rows.append(len(gradients[0]))
        return backward(ctx, *gradients)

    monkeypatch.setattr(ChunkedLogProbFunction, "backward", staticmethod(counted))
    table = Dataset.from_dict({"text": [TEXTS[4]] * 8})
    made = sft(tmp_path, data=sw.Indexed(table), options={"gradient_checkpointing": False}, transforms=[sw.clip(1.0)])
    made.train()
    tokens = len(TEXTS[4].split())
    assert rows[-7:] == [2, 1, 1, *[tokens] * 4]


def test_prompts_and_completions(tmp_path):
    """The tokens of a prompt do not count; ids are a column of the table."""
    table = Dataset.from_dict(
        {"prompt": ["the cat"] * 4, "completion": [" sat", " sat on", " ran big red", " ran"], "key": list("abcd")}
    )
    sft(tmp_path, data=table, ledger=sw.Ledger(id="key")).train()
    rows = sw.read_ledger(tmp_path).to_pylist()
    assert {row["id"]: row["count"] for row in rows} == {"a": 2, "b": 3, "c": 4, "d": 2}


@pytest.mark.parametrize("aggregate", [sw.per("sample"), sw.per("group", key="source"), sw.per(20)], ids=str)
def test_aggregates_and_columns_that_transforms_name(aggregate, tmp_path):
    """An update of batches of different sizes, with weights and groups from columns of the table."""
    sources = ["a", "b", "a", "c", "b", "a", "c", "c", "d"]
    weights = [0.5 * k for k in range(9)]
    table = Dataset.from_dict({"text": TEXTS, "weight": weights, "source": sources, "id": list(range(9))})
    made = sft(
        tmp_path, data=table, batch=2, accumulate=5, adapters=lora(), transforms=[sw.weight("weight"), sw.clip(0.2)],
        aggregate=aggregate, ledger=sw.Ledger(),
    )  # fmt: skip
    before = sft(tmp_path / "by hand", adapters=lora())
    made.train()
    parameters = [p for p in before.model.parameters() if p.requires_grad]
    counts = [len(text.split()) for text in TEXTS]
    of_group = [sum(n for n, s in zip(counts, sources, strict=True) if s == source) for source in sources]
    units = {"sample": counts, "group": of_group}.get(aggregate.unit, [1] * 9)
    divisor = {"sample": 9, "group": 4}.get(aggregate.unit, 20)
    total = [torch.zeros_like(p) for p in parameters]
    rows = {row["id"]: row for row in sw.read_ledger(tmp_path).to_pylist()}
    for i, text in enumerate(TEXTS):
        ids = torch.tensor([tokenizer()(text + "<eos>")["input_ids"]])
        loss = before.model(input_ids=ids, labels=ids).loss * counts[i] / units[i]
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.stack([g.norm() for g in gradients]).norm().item()
        assert rows[i]["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert rows[i]["norm"] == pytest.approx(norm, rel=1e-4)
        scale = weights[i] * min(1.0, 0.2 / max(weights[i] * norm, 1e-9))
        assert rows[i]["weight"] == pytest.approx(scale, rel=1e-4)
        for t, g in zip(total, gradients, strict=True):
            t += g * scale / divisor
    expected = torch.cat([(p - 0.5 * t).detach().flatten() for p, t in zip(parameters, total, strict=True)])
    update = (expected - trained(before)).norm()
    assert (trained(made) - expected).norm() <= 3e-6 * update + 1e-7 * expected.norm()


def test_groups_are_the_prompts_of_the_table(tmp_path):
    """Their column is that which TRL reads, too."""
    prompts, completions = ["the cat", "the cat", "a dog", "the cat"], [" sat", " sat on", " ran big red", " ran"]
    table = Dataset.from_dict({"prompt": prompts, "completion": completions})
    made = sft(tmp_path, data=table, batch=3, accumulate=2, adapters=lora(), aggregate=sw.per("group", key="prompt"))
    before = sft(tmp_path / "by hand", adapters=lora())
    made.train()
    means = []
    for name in ("the cat", "a dog"):
        total = count = 0
        for completion in (c for p, c in zip(prompts, completions, strict=True) if p == name):
            prompt, tokens = (tokenizer()(text)["input_ids"] for text in (name, completion + "<eos>"))
            labels = torch.tensor([[-100] * len(prompt) + tokens])
            loss = before.model(input_ids=torch.tensor([prompt + tokens]), labels=labels).loss
            total = total + loss * len(tokens)
            count += len(tokens)
        means.append(total / count)
    parameters = [p for p in before.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(torch.stack(means).mean(), parameters)
    expected = torch.cat([(p - 0.5 * g).detach().flatten() for p, g in zip(parameters, gradients, strict=True)])
    update = (expected - trained(before)).norm()
    assert (trained(made) - expected).norm() <= 3e-6 * update + 1e-7 * expected.norm()


def test_aggregates_of_other_trainers_are_refused():
    class PerSampleDPO(PerSample, DPOTrainer):
        pass

    with pytest.raises(LossesError, match="found DPOTrainer, whose loss has a divisor of its own"):
        check_aggregate(PerSampleDPO.__new__(PerSampleDPO), sw.per("sample"))


def test_a_table_with_the_plain_trainer(tmp_path):
    """The index becomes a column of the table; the training is that of the list."""
    table = Dataset.from_list(classes(6))
    ours = train(bert(), sw.Indexed(table), tmp_path / "table", ledger=sw.Ledger())
    plain = train(bert(), sw.Indexed(classes(6)), tmp_path / "list", ledger=sw.Ledger())
    assert torch.equal(vector(ours.model), vector(plain.model))
    assert sw.read_ledger(tmp_path / "table").equals(sw.read_ledger(tmp_path / "list"))


def test_a_table_whose_items_a_function_computes(tmp_path):
    table = Dataset.from_list(classes(6)).with_transform(lambda rows: {k: rows[k] for k in ("input_ids", "labels")})
    train(bert(), sw.Indexed(table), tmp_path, ledger=sw.Ledger(), options={"remove_unused_columns": False})
    assert sorted(sw.read_ledger(tmp_path)["id"].to_pylist()) == list(range(6))


def test_an_indexed_table_that_has_ids(tmp_path):
    table = Dataset.from_list([{**sample, "id": 7} for sample in classes(4)])
    with pytest.raises(TypeError, match=r"found one that has it. Pass the dataset without sw\.Indexed"):
        PerSampleTrainer(bert(), arguments(tmp_path), train_dataset=sw.Indexed(table))
