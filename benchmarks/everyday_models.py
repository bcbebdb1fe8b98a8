"""Hugging Face models of the everyday table, unmodified, with tiny random configurations. Nothing is downloaded."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

B, T, VOCABULARY, CLASSES = 16, 32, 128, 10
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2 * T,
    "attention_dropout": 0.0,
    "num_labels": CLASSES,
    "pad_token_id": 0,
}


class HuggingFace(nn.Module):
    """Model that maps a batch to one loss per sample, with the methods of everyday_zoo.Situation."""

    def __init__(self, kind: type[nn.Module], config: transformers.PretrainedConfig):
        super().__init__()
        torch.manual_seed(0)
        self.model = kind(config)

    def prepare(self, step: int) -> tuple[Tensor, ...]:
        return self.batch(torch.Generator().manual_seed(step))

    def around(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Tokens (B, T), padded to different lengths, and labels (B,)."""
        tokens = torch.randint(1, VOCABULARY, (B, T), generator=generator)
        lengths = torch.randint(T // 2, T + 1, (B, 1), generator=generator)
        return tokens * (torch.arange(T) < lengths), torch.randint(CLASSES, (B,), generator=generator)


class Classifier(HuggingFace):
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, attention_mask=(tokens > 0).long()).logits
        return F.cross_entropy(logits, labels, reduction="none")


class LanguageModel(HuggingFace):
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return token_losses(self.model, tokens).mean(1)


class Preferences(HuggingFace):
    """Direct preference optimization: chosen and rejected answers along the batch."""

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randint(1, VOCABULARY, (B // 2, 2, T), generator=generator),)

    def forward(self, tokens: Tensor) -> Tensor:
        losses = token_losses(self.model, torch.cat([tokens[:, 0], tokens[:, 1]])).sum(1)
        chosen, rejected = losses.chunk(2)
        return -F.logsigmoid(0.1 * (rejected - chosen))


class SlicedPreferences(Preferences):
    """The same with slices, as in TRL."""

    def forward(self, tokens: Tensor) -> Tensor:
        losses = token_losses(self.model, torch.cat([tokens[:, 0], tokens[:, 1]])).sum(1)
        half = len(tokens)
        return -F.logsigmoid(0.1 * (losses[half:] - losses[:half]))


class Packed(HuggingFace):
    """Documents of different lengths, in one row without padding."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        lengths = (tokens > 0).sum(1)
        documents = torch.repeat_interleave(torch.arange(len(tokens)), lengths)
        positions = torch.cat([torch.arange(int(length)) for length in lengths])
        packed = tokens[tokens > 0][None]
        logits = self.model(input_ids=packed, position_ids=positions[None], use_cache=False).logits
        losses = F.cross_entropy(logits[0, :-1], packed[0, 1:].masked_fill(positions[1:] == 0, -100), reduction="none")
        return losses.new_zeros(len(tokens)).index_add(0, documents[1:], losses) / lengths


class Speech(HuggingFace):
    """Connectionist temporal classification of sounds."""

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(B, 4000, generator=generator), torch.randint(1, 30, (B, 4), generator=generator)

    def forward(self, sounds: Tensor, letters: Tensor) -> Tensor:
        scores = self.model(sounds).logits.log_softmax(-1).transpose(0, 1)
        lengths = [torch.full((len(sounds),), size) for size in (len(scores), letters.shape[1])]
        return F.ctc_loss(scores, letters, *lengths, reduction="none")


class Images(HuggingFace):
    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        images = torch.randn(B, 3, 32, 32, generator=generator)
        return images, torch.randint(CLASSES, (B,), generator=generator)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images).logits, labels, reduction="none")


def token_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def llama() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**TEXT)


def gpt2() -> transformers.PretrainedConfig:
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2 * T}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2Config(num_labels=CLASSES, **tokens, **sizes, **dropouts)


def mixtral(experts: str) -> transformers.PretrainedConfig:
    config = transformers.MixtralConfig(**TEXT | {"intermediate_size": 128}, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = experts
    return config


def qwen3_moe() -> transformers.PretrainedConfig:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    return transformers.Qwen3MoeConfig(**TEXT, **sizes)


def wav2vec2() -> transformers.PretrainedConfig:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    kernels = {"conv_dim": (32, 32, 32), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 8)}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False}
    names = ("hidden", "attention", "activation", "feat_proj", "final")
    dropouts = {f"{name}_dropout": 0.0 for name in names} | {"layerdrop": 0.0}
    return transformers.Wav2Vec2Config(vocab_size=32, **sizes, **kernels, **positions, **dropouts)


def swin() -> transformers.PretrainedConfig:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
    return transformers.SwinConfig(window_size=4, num_labels=CLASSES, **sizes, **dropouts)


MODELS: dict[str, tuple[str, Callable[[], HuggingFace]]] = {
    "hf_llama_classifier": (
        "`LlamaForSequenceClassification`, padded",
        lambda: Classifier(transformers.LlamaForSequenceClassification, llama()),
    ),
    "hf_gpt2_classifier": (
        "`GPT2ForSequenceClassification`, padded",
        lambda: Classifier(transformers.GPT2ForSequenceClassification, gpt2()),
    ),
    "hf_mixtral": (
        "`MixtralForCausalLM`, experts one by one",
        lambda: LanguageModel(transformers.MixtralForCausalLM, mixtral("eager")),
    ),
    "hf_mixtral_grouped": (
        "`MixtralForCausalLM`, experts by `grouped_mm`",
        lambda: LanguageModel(transformers.MixtralForCausalLM, mixtral("grouped_mm")),
    ),
    "hf_mixtral_batched": (
        "`MixtralForCausalLM`, experts by `batched_mm`",
        lambda: LanguageModel(transformers.MixtralForCausalLM, mixtral("batched_mm")),
    ),
    "hf_qwen3_moe": (
        "`Qwen3MoeForCausalLM`, as it comes",
        lambda: LanguageModel(transformers.Qwen3MoeForCausalLM, qwen3_moe()),
    ),
    "hf_wav2vec2": ("`Wav2Vec2ForCTC`", lambda: Speech(transformers.Wav2Vec2ForCTC, wav2vec2())),
    "hf_swin": ("`SwinForImageClassification`", lambda: Images(transformers.SwinForImageClassification, swin())),
    "hf_llama_pairs": (
        "`LlamaForCausalLM`, pairs along the batch by `chunk(2)` (DPO)",
        lambda: Preferences(transformers.LlamaForCausalLM, llama()),
    ),
    "hf_llama_slices": (
        "`LlamaForCausalLM`, pairs along the batch by slices (DPO)",
        lambda: SlicedPreferences(transformers.LlamaForCausalLM, llama()),
    ),
    "hf_llama_packed": (
        "`LlamaForCausalLM`, packed documents, other lengths in each step",
        lambda: Packed(
            transformers.LlamaForCausalLM, transformers.LlamaConfig(**TEXT | {"max_position_embeddings": B * T})
        ),
    ),
}
