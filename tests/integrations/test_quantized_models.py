"""Language models with quantized layers and adapters of peft (QLoRA), against a loop over single samples."""

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import samplewise as sw

B, T, V = 3, 6, 23
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, max_position_embeddings=16, use_cache=False, **sizes))
    return model.requires_grad_(False)


def bitsandbytes(make, keep):
    bnb = pytest.importorskip("bitsandbytes")
    model = llama()
    for name, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear):
            quantized = make(bnb)(layer.in_features, layer.out_features)
            quantized.weight = keep(bnb)(layer.weight.data, requires_grad=False)
            parent, _, attribute = name.rpartition(".")
            setattr(model.model.get_submodule(parent), attribute, quantized.to("cpu"))
    return model


def nf4():
    return bitsandbytes(
        lambda bnb: lambda i, o: bnb.nn.Linear4bit(i, o, bias=False, quant_type="nf4"),
        lambda bnb: lambda data, **options: bnb.nn.Params4bit(data, quant_type="nf4", **options),
    )


def int8():
    return bitsandbytes(
        lambda bnb: lambda i, o: bnb.nn.Linear8bitLt(i, o, bias=False, has_fp16_weights=False),
        lambda bnb: lambda data, **options: bnb.nn.Int8Params(data, has_fp16_weights=False, **options),
    )


def torchao():
    quantization = pytest.importorskip("torchao.quantization")
    model = llama()
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    return model


@pytest.mark.filterwarnings("ignore")  # of the libraries about themselves
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("base", [nf4, int8, torchao])
def test_adapters_of_quantized_models(base, checkpointed):
    config = peft.LoraConfig(r=2, target_modules=LAYERS, init_lora_weights="gaussian", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base(), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.1)
    if checkpointed:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def losses(tokens):
        logits = model(input_ids=tokens).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(1)

    for step in range(3):
        batch = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(step))
        rows = [torch.autograd.grad(losses(batch[i : i + 1]).sum(), list(trained.values())) for i in range(B)]
        norms = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in rows])
        bound = norms.median().item()
        g = sw.gradients(losses(batch), model)
        torch.testing.assert_close(g.norms(), norms, rtol=1e-5, atol=0)
        sums = g.sum((bound / norms).clamp_max(1))
        for k, name in enumerate(trained):
            expected = sum(row[k] * min(1.0, bound / n.item()) for row, n in zip(rows, norms, strict=True))
            torch.testing.assert_close(sums[name], expected, rtol=1e-4, atol=1e-6 * norms.max().item())
