"""Adapters of peft on tiny random language models, against a loop over single samples. Nothing is downloaded."""

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers

import samplewise as sw
from samplewise.testing.case import default_dtype, seeded
from samplewise.testing.compare import CORE, EXACT, HALF, SINGLE, Tolerance, assert_agrees, probe_for
from samplewise.testing.oracle import ExpectedRows, dense, wanted

B, T, VOCABULARY = 3, 5, 23
IN_FLOAT64 = Tolerance(1e-10, 1e-14)
ATTENTION = ["q_proj", "v_proj"]
CAUSAL = "CAUSAL_LM"


# ------------------------------------------------------------- base models


def llama():
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2():
    """Its projections are `Conv1D` modules, with transposed weights."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


# ------------------------------------------------------------- adapters


def lora(**options):
    return peft.LoraConfig(r=2, **{"target_modules": ATTENTION} | options)


def conv1d_lora(**options):
    return lora(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **options)


ADAPTERS = {
    "LoRA": (llama, lora),
    "LoRA on Conv1D": (gpt2, conv1d_lora),
    "DoRA": (llama, lambda: lora(use_dora=True)),
    "prompt tuning": (llama, lambda: peft.PromptTuningConfig(task_type=CAUSAL, num_virtual_tokens=4)),
}
MORE_ADAPTERS = {
    "LoRA on all linear layers": (llama, lambda: lora(target_modules="all-linear")),
    "LoRA on an embedding": (llama, lambda: lora(target_modules=["embed_tokens", "q_proj"])),
    "LoRA and a trained head": (llama, lambda: lora(modules_to_save=["lm_head"])),
    "LoRA and trained biases": (gpt2, lambda: conv1d_lora(bias="lora_only")),
    "LoRA and trained tokens": (llama, lambda: lora(trainable_token_indices=[1, 3])),
    "PiSSA, scaled by the root of the rank": (llama, lambda: lora(use_rslora=True, init_lora_weights="pissa")),
    "DoRA on Conv1D": (gpt2, lambda: conv1d_lora(use_dora=True)),
    "AdaLoRA": (llama, lambda: peft.AdaLoraConfig(init_r=2, target_modules=ATTENTION, total_step=100)),
    "IA3": (
        llama,
        lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "VeRA": (llama, lambda: peft.VeraConfig(r=2, target_modules=["q_proj"])),
    "LoHa": (llama, lambda: peft.LoHaConfig(r=2, target_modules=ATTENTION)),
    "LoKr": (llama, lambda: peft.LoKrConfig(r=2, target_modules=ATTENTION)),
    "OFT": (llama, lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=ATTENTION)),
    "HRA": (llama, lambda: peft.HRAConfig(r=2, target_modules=ATTENTION)),
    "VB-LoRA": (
        llama,
        lambda: peft.VBLoRAConfig(r=2, vector_length=4, num_vectors=8, topk=2, target_modules=ATTENTION),
    ),
    "LayerNorm tuning": (llama, lambda: peft.LNTuningConfig(target_modules=["input_layernorm"])),
    "trained tokens": (llama, lambda: peft.TrainableTokensConfig(token_indices=list(range(VOCABULARY)))),
    "P-tuning": (
        llama,
        lambda: peft.PromptEncoderConfig(task_type=CAUSAL, num_virtual_tokens=4, encoder_hidden_size=8),
    ),
    "LLaMA-Adapter": (llama, lambda: peft.AdaptionPromptConfig(task_type=CAUSAL, adapter_len=4, adapter_layers=2)),
}
IN_FLOAT32 = {
    "FourierFT": (llama, lambda: peft.FourierFTConfig(n_frequency=5, target_modules=ATTENTION)),
    "C3A": (llama, lambda: peft.C3AConfig(block_size=8, target_modules=ATTENTION)),
}
# transformers cannot checkpoint layers that use a cache, as prefix tuning does.
WITH_CACHE = {
    "prefix tuning": (llama, lambda: peft.PrefixTuningConfig(task_type=CAUSAL, num_virtual_tokens=4)),
    "prefix tuning with an encoder": (
        llama,
        lambda: peft.PrefixTuningConfig(
            task_type=CAUSAL, num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=8
        ),
    ),
}


def adapted(cases):
    """Parametrize by (base, adapter)."""
    return pytest.mark.parametrize(("base", "adapter"), [pytest.param(*case, id=name) for name, case in cases.items()])


def make(base, adapter, dtype=torch.float64, base_dtype=None):
    """Adapted model in training mode. Adapters start as the identity, with gradients of zero: they are moved away."""
    with seeded(0), default_dtype(torch.float32):
        model = peft.get_peft_model(base().to(base_dtype or torch.float32), adapter())
        for p in wanted(model).values():
            p.data += 0.1 * torch.randn_like(p)
    return model.train() if base_dtype else model.to(dtype).train()


def checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def ids():
    with seeded(1):
        return torch.randint(0, VOCABULARY, (B, T))


def losses_of(model, tokens):
    """Mean cross-entropy of each row's next tokens; logits of virtual tokens are left out."""
    logits = model(input_ids=tokens).logits[:, -tokens.shape[1] : -1]
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def rows_one_by_one(model, tokens):
    """Gradients of batches of one sample, with a forward and a backward pass for each."""
    parameters = wanted(model)
    rows = {name: [] for name in parameters}
    for sample in tokens.split(1):
        row = torch.autograd.grad(losses_of(model, sample)[0], list(parameters.values()), allow_unused=True)
        for (name, p), gradient in zip(parameters.items(), row, strict=True):
            rows[name].append(dense(gradient, p))
    return ExpectedRows({name: torch.stack(parts) for name, parts in rows.items()})


def compare(model, tolerance=IN_FLOAT64, **options):
    rows = rows_one_by_one(model, ids())
    assert rows.norms().min() > 0
    g = sw.gradients(losses_of(model, ids()), model, **options)
    assert_agrees(g, rows, probe_for(wanted(model), B), [*CORE, "sum"], tolerance)


# ------------------------------------------------------------- tests

# peft warns about layers that it does not know, such as the RMS norms of LayerNorm tuning.
pytestmark = pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning:peft.tuners.tuners_utils")


@pytest.mark.sweep(1 / 3)
@adapted(ADAPTERS | MORE_ADAPTERS | WITH_CACHE)
def test_adapters(base, adapter):
    compare(make(base, adapter))


@pytest.mark.sweep(1 / 15)
@adapted(ADAPTERS | MORE_ADAPTERS)
def test_adapters_under_gradient_checkpointing(base, adapter):
    compare(checkpointed(make(base, adapter)))


@pytest.mark.slow
@adapted(IN_FLOAT32)
def test_adapters_that_compute_in_float32(base, adapter):
    """Whatever the dtype of the model."""
    compare(make(base, adapter), SINGLE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["twice", "full"])
@adapted(ADAPTERS)
def test_other_strategies(base, adapter, strategy):
    compare(make(base, adapter), strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [lambda model: model, checkpointed], ids=["plain", "checkpointed"])
@adapted(ADAPTERS)
def test_float32(base, adapter, prepare):
    compare(prepare(make(base, adapter, torch.float32)), SINGLE)


@pytest.mark.parametrize("prepare", [lambda model: model, checkpointed], ids=["plain", "checkpointed"])
@pytest.mark.sweep(1 / 3)
@adapted({name: ADAPTERS[name] for name in ("LoRA", "DoRA", "LoRA on Conv1D")})
def test_bfloat16_base_with_float32_adapters(base, adapter, prepare):
    model = prepare(make(base, adapter, base_dtype=torch.bfloat16))
    assert {p.dtype for p in wanted(model).values()} == {torch.float32}
    compare(model, HALF)


@pytest.mark.parametrize("prepare", [lambda model: model, checkpointed], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_dropout(options, prepare):
    """The rows of the same graph, and so of the same dropout masks."""
    model = prepare(make(llama, lambda: lora(lora_dropout=0.5, **options)))
    losses = losses_of(model, ids())
    assert not torch.equal(losses, losses_of(model, ids()))
    rows = ExpectedRows(sw.gradients(losses, model, strategy="reference").full())
    assert_agrees(sw.gradients(losses, model), rows, probe_for(wanted(model), B), CORE, EXACT)


def test_new_adapters_have_a_gradient_of_zero_until_the_first_update():
    """lora_B starts at zero, so the gradients of lora_A are zero; the first update changes that."""
    with seeded(0):
        model = peft.get_peft_model(llama(), lora()).double()
    optimizer = torch.optim.SGD(wanted(model).values(), lr=1.0)
    norms = sw.gradients(losses_of(model, ids()), model).norms(by="parameter")
    assert all((norm == 0).all() == ("lora_A" in name) for name, norm in norms.items())
    compare(model)
    sw.gradients(losses_of(model, ids()), model).backward()
    optimizer.step()
    compare(model)


@pytest.mark.slow
def test_as_many_virtual_tokens_as_samples():
    """The numbers of the virtual tokens, no buffer of the model, have the shape of sample data."""
    with pytest.warns(sw.SamplesMayInteractWarning, match=r"integers of shape \(1, 3\)"):
        compare(make(llama, lambda: peft.PromptTuningConfig(task_type=CAUSAL, num_virtual_tokens=B)))


def test_two_adapters_of_which_one_is_active():
    model = make(llama, lora)
    model.add_adapter("second", lora())
    model.double().set_adapter("second")
    assert all("second" in name for name in wanted(model))
    compare(model)


@pytest.mark.slow
def test_a_merged_model_has_nothing_to_train():
    model = make(llama, lora).merge_and_unload()
    with pytest.raises(sw.ParameterError, match=r"must have a parameter with requires_grad=True; found none"):
        sw.gradients(losses_of(model, ids()), model)


def test_reentrant_checkpointing_is_refused():
    model = make(llama, lora)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    losses = losses_of(model, ids())
    with pytest.raises(sw.GraphError, match=r"found reentrant activation checkpointing.*use_reentrant=False"):
        sw.gradients(losses, model)
