"""EK-FAC of models of transformers and adapters of peft, unmodified, against explicit matrices in float64."""

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers

import samplewise as sw
from samplewise.integrations.transformers_losses import ModelLoss
from samplewise.testing.case import default_dtype, seeded

VOCABULARY = 11
QUIET = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def bert():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        num_labels=3,
        **QUIET,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2():
    """Its projections are `Conv1D` modules, with transposed weights."""
    quiet = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=2, **quiet
    )
    return transformers.GPT2LMHeadModel(config)


def gpt2_with_lora():
    config = peft.LoraConfig(
        target_modules=["c_attn"], r=2, fan_in_fan_out=True, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(gpt2(), config)


def classes(samples=20):
    ids = torch.arange(samples * 5).view(samples, 5) * 7 % VOCABULARY
    return {"input_ids": ids, "labels": torch.arange(samples) % 3}


def words(samples=20):
    ids = (torch.arange(samples * 5).view(samples, 5) ** 2) % VOCABULARY
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 9, -100)}


def some(batch, *samples):
    return {name: value[slice(*samples)] for name, value in batch.items()}


def made(build):
    with seeded(0), default_dtype(torch.float64):
        return build().eval()


def losses_of(model, batch):
    return ModelLoss()(model, batch)[0]


def rows_of(model, batch):
    """Rows of each parameter, name -> (n, *shape), by one backward pass per sample."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(batch["labels"])):
        loss = losses_of(model, some(batch, i, i + 1)).sum()
        rows.append(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))
    return {name: torch.stack(each) for name, each in zip(names, zip(*rows, strict=True), strict=True)}


def seen_by_hooks(model, module, batch):
    """Inputs (n, t, i) and output gradients (n, t, o) of a module, one sample at a time."""
    inputs, gradients = [], []

    def hook(module, args, output):
        inputs.append(args[0].detach()[0])
        output.register_hook(lambda gradient: gradients.append(gradient.detach()[0]))

    handle = module.register_forward_hook(hook)
    for i in range(len(batch["labels"])):
        losses_of(model, some(batch, i, i + 1)).sum().backward()
    handle.remove()
    model.zero_grad()
    a, g = (torch.stack([each.reshape(-1, each.shape[-1]) for each in seen]) for seen in (inputs, gradients))
    return a * (g != 0).any(2, keepdim=True), g


def explicit_solution(model, name, batch, rows, damping):
    """Solved rows of a linear layer's or Conv1D's weight and bias, name -> rows."""
    module = model.get_submodule(name)
    a, g = seen_by_hooks(model, module, batch)
    weight, bias = rows[f"{name}.weight"], rows.get(f"{name}.bias")
    is_transposed = isinstance(module, transformers.pytorch_utils.Conv1D)
    matrices = weight.transpose(1, 2) if is_transposed else weight
    if bias is not None:
        a = torch.cat([a, (g != 0).any(2, keepdim=True).double()], 2)
        matrices = torch.cat([matrices, bias[:, :, None]], 2)
    left = torch.linalg.eigh(torch.einsum("nto,ntp->op", g, g))[1]
    right = torch.linalg.eigh(torch.einsum("nti,ntj->ij", a, a))[1]
    rotated = left.T @ matrices @ right
    solved = left @ (rotated / ((values := rotated.square().mean(0)) + damping * values.mean())) @ right.T
    weight = solved[:, :, :-1] if bias is not None else solved
    found = {f"{name}.weight": weight.transpose(1, 2) if is_transposed else weight}
    return found | ({f"{name}.bias": solved[:, :, -1]} if bias is not None else {})


RETAIN = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
CASES = {
    "bert": (bert, classes, ["bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.0.output.dense"]),
    "gpt2": (gpt2, words, ["transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj", "transformer.h.0.mlp.c_proj"]),
    "lora": (gpt2_with_lora, words, [f"base_model.model.transformer.h.0.attn.c_attn.lora_{n}.default" for n in "AB"]),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_equal_explicit_matrices(case):
    build, data, layers = CASES[case]
    model, batch = made(build), data()
    rows = rows_of(model, batch)
    curvature = sw.ekfac(model, ModelLoss(), [some(batch, 0, 8), some(batch, 8, None)], labels="data")
    solved = curvature.solve(rows, 0.01)
    assert set(solved) == set(rows)
    for layer in layers:
        for name, wanted in explicit_solution(model, layer, batch, rows, 0.01).items():
            torch.testing.assert_close(solved[name], wanted, rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("case", CASES)
def test_refined_scores_equal_the_exact_solution(case):
    """The models compute losses from labels in the batch, with fused attention; adapters of LoRA."""
    build, data, _ = CASES[case]
    model, batch = made(build), data(samples=6)
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = 0
    for k in range(6):
        sample = some(batch, k, k + 1)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            logits = model(input_ids=sample["input_ids"]).logits
        jacobian = torch.stack(
            [torch.cat([g.flatten() for g in torch.autograd.grad(z, parameters, **RETAIN)]) for z in logits.flatten()]
        )

        def loss(z, shape=logits.shape, sample=sample):
            labels = sample["labels"]
            z = z.view(shape)
            return (
                F.cross_entropy(z, labels)
                if z.dim() == 2
                else F.cross_entropy(z[0, :-1], labels[0, 1:], reduction="sum")
            )

        total = total + jacobian.T @ torch.autograd.functional.hessian(loss, logits.detach().flatten()) @ jacobian
    curvature = sw.ekfac(model, ModelLoss(), [some(batch, 0, 4), some(batch, 4, None)])
    shift = 20 * curvature.mean_eigenvalue * torch.eye(len(total)).double()
    flat = torch.cat([each.flatten(1) for each in rows_of(model, batch).values()], 1)
    found = sw.influence(
        *(model, ModelLoss(), [some(batch, 0, 4), some(batch, 4, None)], [some(batch, 0, 2)]),
        curvature=curvature,
        refine=400,
        damping=20.0,
    )
    wanted = flat[:2] @ torch.linalg.solve(total / 6 + shift, flat.T)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_labels_are_sampled_and_queries_scored(case):
    build, data, _ = CASES[case]
    model, batch = made(build), data()
    curvature = sw.ekfac(model, ModelLoss(), [batch])
    scores = sw.influence(model, ModelLoss(), [batch], [some(batch, 0, 3)], curvature=curvature)
    rows = rows_of(model, batch)
    solved = curvature.solve({name: each[:3] for name, each in rows.items()})
    wanted = sum(solved[name].flatten(1) @ rows[name].flatten(1).T for name in rows)
    torch.testing.assert_close(scores, wanted, rtol=1e-8, atol=1e-9)


def test_which_layers_have_factors():
    assert repr(sw.ekfac(made(gpt2_with_lora), ModelLoss(), [words()])) == (
        "EKFAC(2 by Kronecker factors: base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight, "
        "base_model.model.transformer.h.0.attn.c_attn.lora_B.default.weight)"
    )
    text = repr(sw.ekfac(made(gpt2), ModelLoss(), [words()]))
    assert "EKFAC(4 by Kronecker factors: transformer.h.0.attn.c_attn.weight, " in text
    assert "; 1 by one factor: transformer.wpe.weight; " in text
    assert "7 by the diagonal: transformer.wte.weight, transformer.h.0.ln_1.weight" in text  # tied to the head


def test_tokens_by_a_function():
    """Means over tokens are recognized, too."""
    model, batch = made(gpt2), words()
    batch["labels"] = batch["input_ids"]

    def mean_loss(model, batch):
        logits = model(batch["input_ids"]).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none").mean(1)

    of_mean = sw.ekfac(model, mean_loss, [batch])
    of_sum = sw.ekfac(model, ModelLoss(), [batch])
    for mine, other in zip(of_mean.blocks, of_sum.blocks, strict=True):
        torch.testing.assert_close(mine.eigenvalues, other.eigenvalues / 4, rtol=1e-6, atol=1e-9)
