"""Tiny random models of real architectures, unmodified, against rows of the Jacobian. Nothing is downloaded."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSequenceClassification

import samplewise as sw
from samplewise.testing.case import default_dtype, seeded
from samplewise.testing.compare import CORE, EXACT, SINGLE, Tolerance, assert_agrees, probe_for
from samplewise.testing.oracle import rows_of, wanted

B, T, VOCABULARY = 4, 6, 23
TEXT = dict(
    vocab_size=VOCABULARY,
    hidden_size=12,
    intermediate_size=10,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
)
QUIET = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
GROUPED = TEXT | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=4, attention_dropout=0.0)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


# ------------------------------------------------------------- one loss per sample


def next_words(model, ids):
    """Mean cross-entropy of each row's next tokens."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def classes(model, inputs):
    return F.cross_entropy(model(inputs).logits, torch.arange(len(inputs)) % 3, reduction="none")


def padded_classes(model, ids):
    """Rows of different lengths."""
    mask = (torch.arange(ids.shape[1]) < torch.arange(2, 2 + len(ids))[:, None]).long()
    return F.cross_entropy(
        model(input_ids=ids, attention_mask=mask).logits, torch.arange(len(ids)) % 3, reduction="none"
    )


def translations(model, ids):
    logits = model(input_ids=ids, decoder_input_ids=ids.flip(1)[:, :4], use_cache=False).logits
    return F.cross_entropy(logits.transpose(1, 2), ids[:, :4], reduction="none").mean(1)


# ------------------------------------------------------------- the models


def mixtral(experts):
    config = transformers.MixtralConfig(
        **GROUPED | {"intermediate_size": 16}, num_local_experts=3, num_experts_per_tok=2
    )
    config._experts_implementation = experts
    return config


CAUSAL = {
    "gpt2 (tied head)": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=12,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **TOKENS,
    ),
    "llama (grouped queries, rotary)": lambda: transformers.LlamaConfig(**GROUPED),
    "llama (tied head)": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED, **TOKENS),
    "mixtral (experts)": lambda: mixtral("eager"),
    "mixtral (experts as one product)": lambda: mixtral("batched_mm"),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**TEXT, hidden_dropout=0.0, attention_dropout=0.0),
}
CLASSIFIERS = {
    "bert": lambda: transformers.BertConfig(**TEXT, **QUIET, num_labels=3),
    "roberta": lambda: transformers.RobertaConfig(**TEXT, **QUIET, num_labels=3),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=12,
        hidden_dim=10,
        n_layers=2,
        n_heads=2,
        max_position_embeddings=16,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        num_labels=3,
    ),
    "electra": lambda: transformers.ElectraConfig(**TEXT, **QUIET, embedding_size=8, num_labels=3),
}
VISION = {
    "vit": lambda: transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=3,
        hidden_size=12,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=3,
        **QUIET,
    ),
}
CONVOLUTIONAL = {
    "convnext": lambda: transformers.ConvNextConfig(
        num_channels=3,
        patch_size=2,
        hidden_sizes=[8, 12],
        depths=[1, 1],
        num_stages=2,
        image_size=16,
        num_labels=3,
        layer_scale_init_value=0.5,
    ),
    "resnet in eval mode": lambda: transformers.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], num_labels=3, layer_type="basic"
    ),
}


def make(kind, config, attention=None):
    """Weights larger than the usual 0.02: attention that is not uniform tests more."""
    options = {} if attention is None else {"attn_implementation": attention}
    with seeded(0), default_dtype(torch.float32):
        build = getattr(kind, "from_config", None) or kind._from_config  # an Auto class, or a model's own
        model = build(config, **options)
        for p in model.parameters():
            p.data += 0.2 * torch.randn_like(p)
    return model.double().eval()


def ids():
    with seeded(1):
        return torch.randint(3, VOCABULARY, (B, T))


def images(size):
    with seeded(1):
        return torch.randn(B, 3, size, size, dtype=torch.float64)


def compare(model, losses_of, inputs, tolerance=EXACT, **options):
    losses = losses_of(model, inputs)
    assert losses.shape == (B,)
    rows = rows_of(losses, wanted(model))
    g = sw.gradients(losses_of(model, inputs), model, **options)
    assert_agrees(g, rows, probe_for(wanted(model), B), CORE, tolerance)


def each(configs):
    return pytest.mark.parametrize("config", list(configs.values()), ids=list(configs))


attention_kinds = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@attention_kinds
@each(CAUSAL)
def test_causal_language_models(config, attention):
    compare(make(AutoModelForCausalLM, config(), attention), next_words, ids())


@attention_kinds
def test_norms_that_pass_through_float32(attention):
    """Gemma multiplies by its norms' weights in float32, whatever the model's precision."""
    config = transformers.GemmaConfig(**GROUPED, **TOKENS)
    compare(make(AutoModelForCausalLM, config, attention), next_words, ids(), Tolerance(1e-6, 1e-8))


@attention_kinds
@each(CLASSIFIERS)
@pytest.mark.parametrize("losses_of", [classes, padded_classes])
def test_encoders(config, attention, losses_of):
    compare(make(AutoModelForSequenceClassification, config(), attention), losses_of, ids())


@attention_kinds
@each(VISION)
def test_vision_transformers(config, attention):
    compare(make(AutoModelForImageClassification, config(), attention), classes, images(8))


@each(CONVOLUTIONAL)
def test_convolutional_networks(config):
    compare(make(AutoModelForImageClassification, config()), classes, images(16))


def t5(**options):
    sizes = dict(vocab_size=VOCABULARY, d_model=12, d_kv=6, d_ff=10, num_layers=2, num_heads=2)
    config = transformers.T5Config(**sizes, relative_attention_num_buckets=8, dropout_rate=0.0, **options)
    config.decoder_start_token_id = 0
    return make(transformers.T5ForConditionalGeneration, config)


@pytest.mark.filterwarnings("ignore::samplewise.SamplesMayInteractWarning")
@pytest.mark.parametrize(
    "options",
    [{}, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}],
    ids=["relu, tied", "gated, untied"],
)
def test_encoder_decoder(options):
    compare(t5(**options), translations, ids())


@pytest.mark.filterwarnings("ignore::samplewise.SamplesMayInteractWarning")
def test_encoder_decoder_with_as_many_tokens_as_samples():
    """Relative positions are (T, T) with T = B."""
    compare(t5(), translations, ids()[:, :B])


@attention_kinds
def test_encoder_decoder_with_learned_positions(attention):
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=12,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=10,
        decoder_ffn_dim=10,
        max_position_embeddings=16,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    compare(make(transformers.BartForConditionalGeneration, config, attention), translations, ids())


@pytest.mark.parametrize("strategy", ["twice", "full"])
@pytest.mark.parametrize("name", ["gpt2 (tied head)", "mixtral (experts)", "llama (grouped queries, rotary)"])
def test_other_strategies(name, strategy):
    compare(make(AutoModelForCausalLM, CAUSAL[name](), "sdpa"), next_words, ids(), strategy=strategy)


def test_experts_in_a_grouped_kernel():
    """The default of transformers, which has no float64: float32 against the rows of plain float64 experts."""
    exact = make(AutoModelForCausalLM, mixtral("eager"), "sdpa")
    model = make(AutoModelForCausalLM, mixtral("grouped_mm"), "sdpa").float()
    rows = rows_of(next_words(exact, ids()), wanted(exact))
    g = sw.gradients(next_words(model, ids()), model)
    assert_agrees(g, rows, probe_for(wanted(model), B), CORE, SINGLE)


# ------------------------------------------------------------- several steps, with other data in each


def padded_ids(step):
    """Rows of other lengths in each step; id 0 is padding."""
    with seeded(step):
        return torch.randint(3, VOCABULARY, (B, T)) * (torch.arange(T) < torch.randint(2, T + 1, (B, 1)))


def last_token_classes(model, ids):
    logits = model(input_ids=ids, attention_mask=(ids > 0).long()).logits
    return F.cross_entropy(logits, torch.arange(len(ids)) % 3, reduction="none")


def pairs(model, ids):
    """Preferences: chosen and rejected answers are the halves of the batch."""
    losses = next_words(model, torch.cat([ids, ids.flip(1)]))
    return F.softplus(losses[: len(ids)] - losses[len(ids) :])


def small_swin():
    sizes = dict(image_size=8, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=2)
    dropouts = dict(drop_path_rate=0.0, **QUIET)
    return transformers.SwinConfig(num_channels=3, num_labels=3, **sizes, **dropouts)


LABELS = dict(num_labels=3, pad_token_id=0)
STEPS = {
    "llama, last token": (
        transformers.LlamaForSequenceClassification,
        lambda: transformers.LlamaConfig(**GROUPED, **LABELS),
        last_token_classes,
        padded_ids,
    ),
    "gpt2, last token": (
        transformers.GPT2ForSequenceClassification,
        lambda: transformers.GPT2Config.from_dict(CAUSAL["gpt2 (tied head)"]().to_dict() | LABELS),
        last_token_classes,
        padded_ids,
    ),
    "mixtral": (AutoModelForCausalLM, lambda: mixtral("eager"), next_words, padded_ids),
    "gpt2, pairs": (AutoModelForCausalLM, CAUSAL["gpt2 (tied head)"], pairs, padded_ids),
    "swin": (AutoModelForImageClassification, small_swin, classes, lambda step: images(8) + step),
}


@pytest.mark.parametrize("name", STEPS)
def test_several_steps(name):
    kind, config, losses_of, data = STEPS[name]
    model = make(kind, config())
    for step in (0, 0, 1, 2, 3):
        compare(model, losses_of, data(step))


def test_gradient_checkpointing():
    model = make(AutoModelForCausalLM, CAUSAL["llama (grouped queries, rotary)"](), "eager").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compare(model, next_words, ids())


def test_batch_norm_of_a_resnet_in_training_mode_is_refused():
    model = make(AutoModelForImageClassification, CONVOLUTIONAL["resnet in eval mode"]()).train()
    with pytest.raises(sw.SamplesInteractError, match=r"(?i)batch.?norm"):
        sw.gradients(classes(model, images(16)), model).norms()
