"""Supervised fine-tuning with LoRA: `trl.SFTTrainer` with per-sample clipping and a ledger.

    python examples/sft_lora.py

A tiny Llama with random weights and a tokenizer made here are fine-tuned on short sentences. Some sentences are
shuffled words; the ledger ranks them among the samples with the largest loss per token. Nothing is downloaded. Needs
trl, which installs transformers and datasets, and peft: pip install trl peft.
"""

import random
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import samplewise as sw
from samplewise.integrations.huggingface import PerSample

NAMES = "Ada Bo Cleo Dan Eve".split()
VERBS = "sees likes paints finds".split()
THINGS = "apples boats clouds doors engines".split()
SENTENCES = 160
SHUFFLED = 12


class PerSampleSFTTrainer(PerSample, SFTTrainer):
    pass


def make_sentences() -> list[str]:
    """Sentences of the form "Ada likes red apples .", of which the first few have shuffled words."""
    generator = random.Random(0)
    sentences = []
    for k in range(SENTENCES):
        words = [generator.choice(NAMES), generator.choice(VERBS), "red", generator.choice(THINGS), "."]
        if k < SHUFFLED:
            while words[2] == "red" or words[4] == ".":
                generator.shuffle(words)
        sentences.append(" ".join(words))
    return sentences


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *NAMES, *VERBS, *THINGS, "red", "."]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_model(vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    torch.manual_seed(0)
    disable_progress_bars()
    data = Dataset.from_dict({"text": make_sentences()})
    tokenizer = make_tokenizer()
    with TemporaryDirectory() as output:
        args = SFTConfig(
            output,
            num_train_epochs=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=2e-2,
            max_grad_norm=0,  # sw.clip bounds the gradient of each sample instead
            bf16=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = PerSampleSFTTrainer(
            make_model(len(tokenizer)),
            args,
            train_dataset=sw.Indexed(data),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
            transforms=[sw.clip(1.0, per_count=True)],  # of the mean loss per token
            ledger=sw.Ledger(),
        )
        trainer.train()
        table = sw.read_ledger(output)
        suspects = sw.suspects(table).top(SHUFFLED).tolist()
    found = sum(sample < SHUFFLED for sample in suspects)
    print(f"{table.num_rows} visits of {SENTENCES} sentences, {int(sum(table['count'].to_pylist()))} tokens")
    print(f"{found} of the {SHUFFLED} most suspicious sentences have shuffled words, for example:")
    for sample in suspects[:3]:
        print(f"  {data[sample]['text']}")


if __name__ == "__main__":
    main()
