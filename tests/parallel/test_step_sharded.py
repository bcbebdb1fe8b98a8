"""Models that `fully_shard` has spread over ranks: what happens around updates, what is refused, and `sw.gradients`."""

import copy

import pytest
import torch
from ranks import Ranks, give_up_after
from spread_models import assert_same, data, flat, loss_fn, net, own_batches, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import samplewise as sw
from samplewise.parallel import collectives


def sharded(how=(0, 3)):
    model = net()
    for place in how:
        fully_shard(model[place])
    return fully_shard(model)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _run(options):
    return run(**options)


@pytest.mark.slow
@pytest.mark.parametrize("transforms", ["plain", "clip", "weight by place"])
@pytest.mark.parametrize(
    "options", [dict(samples=1, batch=2), dict(samples=6, batch=4, microbatch=2), dict(samples=None, batch=2)], ids=str
)
def test_ranks_may_have_nothing_and_any_number_of_pieces(three, transforms, options):
    alone = run(transforms, **{**options, "batch": 17 if options["samples"] else 6})
    for found in three.run(_run, dict(transforms=transforms, how="fsdp", **options)):
        assert_same(alone, found)


class Tied(nn.Module):
    """The embedding is the head, and a list of blocks stands between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def next_token(model, tokens):
    logits = model(tokens[:, :-1]).transpose(1, 2)
    return nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)


def tied(parallel):
    model = Tied()
    tokens = torch.randint(0, 11, (13, 5), generator=torch.Generator().manual_seed(1))
    step = sw.Step(model, adam(model), next_token, 6, transforms=[sw.clip(1.0)], parallel=parallel, recheck=False)
    step.run(own_batches(4, [tokens])[k][0] for k in range(len(own_batches(4, [tokens]))))
    g = sw.gradients(next_token(model, tokens), model)
    return flat(model), g.names, g.norms()


def test_a_tied_head_is_one_parameter(two):
    parameters, names, norms = tied(None)
    for found in two.run(tied, "fsdp"):
        torch.testing.assert_close(found[0], parameters, rtol=1e-10, atol=1e-12)
        assert found[1] == names
        torch.testing.assert_close(found[2], norms, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------------------------ in between


class Experts(nn.Module):
    """The first input of a sample selects its expert; an expert without samples is not called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.inner = nn.Linear(5, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        outputs = hidden.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            chosen = (x[:, 0] > 0) == bool(k)
            if chosen.any():
                outputs = torch.where(chosen[:, None], expert(hidden), outputs)
        return outputs


def experts(clips):
    """Rank 0 has the samples of one expert, rank 1 those of the other one."""
    model, (x, y) = Experts(), data()[:2]
    own = (x[:, 0] > 0) == bool(collectives.rank())
    parallel = None if collectives.size() == 1 else "fsdp"
    step = sw.Step(model, sw.sgd(0.1), loss_fn, transforms=[sw.clip(0.2)] if clips else (), parallel=parallel)
    step.run([(x[own], y[own]) if parallel else (x, y)] * 2)
    return flat(model)


@pytest.mark.parametrize("clips", [False, True])
def test_modules_may_be_used_on_one_rank_only(two, clips):
    """The collectives of torch alone would hang."""
    alone = experts(clips)
    for found in two.run(experts, clips):
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)


def saved_in_between():
    """A state dict has the parts, and lets the whole parameters go; a forward pass in between changes nothing."""
    model = sharded()
    optimizer = adam(model)
    step = sw.Step(model, optimizer, loss_fn, 6, transforms=[sw.clip(0.5)], recheck=False)
    states = []
    for _ in step.over(own_batches(2)):
        states.append(copy.deepcopy(model.state_dict()))
        assert all(isinstance(value, DTensor) for value in states[-1].values())
        with torch.no_grad():
            model.eval()(data()[0])
            model.train()
    moments = [optimizer.state[p]["exp_avg"] for group in optimizer.param_groups for p in group["params"]]
    last = torch.cat([value.full_tensor().flatten() for value in states[-1].values()])
    return last, [isinstance(m, DTensor) for m in moments], sum(m.to_local().numel() for m in moments)


def alone_in_between():
    model = net()
    sw.Step(model, adam(model), loss_fn, 6, transforms=[sw.clip(0.5)], recheck=False).run(own_batches(17))
    return flat(model)


def test_the_parts_are_what_is_saved_and_what_the_optimizer_has(two):
    found = two.run(saved_in_between)
    for parameters, is_dtensor, _ in found:
        torch.testing.assert_close(parameters, alone_in_between(), rtol=1e-10, atol=1e-12)
        assert all(is_dtensor)
    assert sum(elements for *_, elements in found) == len(alone_in_between())


def pieces(rows, k):
    """Batches of this rank in turn k: rank 0 has all rows, then rank 1, then both; one process has all."""
    if collectives.size() == 1:
        return [rows]
    cut = (len(rows[0]), 0, 2)[k]
    mine = [t[:cut] if collectives.rank() == 0 else t[cut:] for t in rows]
    return [mine] if len(mine[0]) else []


def whole(model):
    """Parameters; a state dict releases whole ones, which ranks with and without samples would have otherwise."""
    values = model.state_dict().values()
    return torch.cat([(v.full_tensor() if isinstance(v, DTensor) else v).flatten() for v in values])


def two_steps():
    model = sharded() if collectives.size() > 1 else net()
    clipped = sw.Step(model, adam(model), loss_fn, transforms=[sw.clip(0.5)], recheck=False)
    plain = sw.Step(model, adam(model), loss_fn, recheck=False)
    for k in range(3):
        rows = [t[4 * k : 4 * k + 4] for t in data()]
        clipped.run(pieces(rows, k))
        plain.run(pieces(rows, k))
    return whole(model)


def test_two_steps_of_one_model_have_their_own_windows(two):
    alone = two_steps()
    for found in two.run(two_steps):
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)


def adversaries(freezes):
    """Each of two models occurs in the loss of the other one, where it may be frozen."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    judge = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    if collectives.size() > 1:
        for model in (generator, judge):
            fully_shard(model[0])
            fully_shard(model)

    def judged(model, batch):
        with torch.no_grad():
            fakes = generator(batch[0])
        return nn.functional.softplus(model(fakes) - model(batch[1])).squeeze(1)

    def generated(model, batch):
        judge.requires_grad_(not freezes)
        losses = nn.functional.softplus(-judge(model(batch[0]))).squeeze(1)
        judge.requires_grad_(True)
        return losses

    steps = [
        sw.Step(judge, adam(judge), judged, transforms=[sw.clip(0.5)], recheck=False),
        sw.Step(generator, adam(generator), generated, transforms=[sw.clip(0.5)], recheck=False),
    ]
    source = torch.Generator().manual_seed(2)
    for k in (2, 0, 1, 2):
        rows = [torch.randn(5, n, generator=source, dtype=torch.float64) for n in (3, 4)]
        for step in steps:
            step.run(pieces(rows, k))
    return torch.cat([whole(generator), whole(judge)])


@pytest.mark.parametrize("freezes", [False, True])
def test_sharded_models_in_the_losses_of_each_other(two, freezes):
    alone = adversaries(freezes)
    for found in two.run(adversaries, freezes):
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)


def frozen_later():
    model = sharded() if collectives.size() > 1 else net()
    step = sw.Step(model, adam(model), loss_fn, 4, recheck=False)
    for freezes in (False, False, True):
        model[3].requires_grad_(not freezes)
        step.run(own_batches(2 if collectives.size() > 1 else 4))
    return whole(model)


def test_a_module_may_be_frozen_between_updates(two):
    alone = frozen_later()
    for found in two.run(frozen_later):
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)


def plain_afterwards():
    model = sharded() if collectives.size() > 1 else net()
    optimizer = adam(model)
    sw.Step(model, optimizer, loss_fn, 6, transforms=[sw.clip(0.5)], recheck=False).run(own_batches(17))
    rank, size = collectives.rank(), collectives.size()
    for _ in range(3):
        optimizer.zero_grad()
        loss_fn(model, [t[:16][rank::size] for t in data()]).mean().backward()
        optimizer.step()
    sw.Step(model, optimizer, loss_fn, 6, transforms=[sw.clip(0.5)], recheck=False).run(own_batches(17))
    return whole(model)


def test_a_model_may_be_trained_without_a_step_afterwards(two):
    alone = plain_afterwards()
    for found in two.run(plain_afterwards):
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)


def skipping():
    def broken(model, batch):
        return torch.where(batch[2] == 9, torch.nan, loss_fn(model, batch))

    model = sharded() if collectives.size() > 1 else net()
    step = sw.Step(model, adam(model), broken, 6, on_nonfinite="skip", recheck=False)
    return [update.skipped for update in step.over(own_batches(17))], flat(model)


def test_one_ranks_nan_skips_the_update(two):
    alone = skipping()
    for skipped, parameters in two.run(skipping):
        assert skipped == alone[0] == [False, True, False]
        torch.testing.assert_close(parameters, alone[1], rtol=1e-10, atol=1e-12)


def explosive(scale):
    """The gradient of one part is infinite, or too large to be squared."""
    model = nn.Linear(4, 3, bias=False)
    model = fully_shard(model) if collectives.size() > 1 else model
    batch = torch.zeros(2, 4)
    batch[:, 1] = 1
    step = sw.Step(model, sw.sgd(0.0), lambda m, b: m(b)[:, 2] * scale, recheck=False)
    return step(batch)[0].grad_norm


def test_gradients_that_are_large_in_one_part(two):
    assert two.run(explosive, 1e30) == pytest.approx([1e30] * 2)
    found = two.errors(explosive, 3e38)
    message = "NonFiniteGradientError: gradients must be finite; found NaN or infinity in "
    assert found[0].startswith(message) and found[1].startswith(message)
    assert "the part of another rank" in found[0] or "the part of another rank" in found[1]


def raises(*_):
    raise ValueError("sample 11 is odd")


def failing(where):
    model = sharded()
    optimizer = adam(model)
    change = optimizer.step

    def losses(model, batch):
        if where == "loss" and 11 in batch[2].tolist():
            raise ValueError("sample 11 is odd")
        losses = loss_fn(model, batch)
        if where == "backward" and 11 in batch[2].tolist():
            losses.register_hook(raises)
        return losses

    def changed():
        change()
        if where == "optimizer" and collectives.rank() == 1:
            raise ValueError("sample 11 is odd")

    def in_the_middle(*_):
        if where == "model" and collectives.rank() == 1 and step.counters.updates == 2:
            raises()

    model[2].register_forward_hook(in_the_middle)
    optimizer.step = changed
    step = sw.Step(model, optimizer, losses, 4, recheck=False)
    try:
        step.run(own_batches(2))
    finally:
        collectives.barrier()


@pytest.mark.parametrize("where", ["loss", "model", "backward", "optimizer"])
def test_an_error_on_one_rank_ends_all(two, where):
    found = two.errors(failing, where)
    assert found[1] == "ValueError: sample 11 is odd"
    assert found[0].startswith("DistributedError: rank 1 of 2 failed: ")


def looking_alone():
    """A forward pass takes all ranks."""
    model = sharded()
    step = sw.Step(model, adam(model), loss_fn, 4, recheck=False)
    step.run(own_batches(2))
    give_up_after(1.0)
    if collectives.rank() == 0:
        model(data()[0])


def test_a_rank_that_needs_the_others_and_is_alone():
    team = Ranks(2)
    try:
        found = team.errors(looking_alone)
    finally:
        team.close()
    assert found[0].startswith(
        "DistributedError: all 2 ranks must take part in every collective; found that all_reduce "
    )
    assert found[1] == ""


# -------------------------------------------------------------------------------------------------------- refusals


def refused(what):
    model = net()
    if what == "whole":
        fully_shard(model[0])
    elif what == "offload":
        fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    elif what == "parallel":
        mesh = init_device_mesh("cpu", (1, collectives.size()), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
    elif what == "auto":
        fully_shard(model)
        sw.Step(model, adam(model), loss_fn, microbatch="auto")
    elif what == "used":
        optimizer = adam(model)
        loss_fn(model, data()).mean().backward()
        optimizer.step()
        sw.Step(model, optimizer, loss_fn, parallel="fsdp")
    elif what == "whole optimizer":
        fully_shard(model)
        model(data()[0])  # after which a root module is not resharded
        optimizer = adam(model)
        sw.Step(model, optimizer, loss_fn)
    elif what == "early optimizer":
        optimizer = adam(model)
        fully_shard(model)
        sw.Step(model, optimizer, loss_fn)
    elif what == "other parallel":
        fully_shard(model)
        sw.Step(model, adam(model), loss_fn, parallel="ddp")
    elif what == "replicated":
        model = nn.parallel.DistributedDataParallel(model)
        sw.Step(model, adam(model), loss_fn, parallel="fsdp")
    elif what == "sum":
        fully_shard(model)
        halved = sw.transforms.transform.SumTransform("halved", "-Σ/2", lambda sums: torch._foreach_mul_(sums, 0.5))
        sw.Step(model, adam(model), loss_fn, transforms=[halved], recheck=False).run(own_batches(3))
    if what in ("whole", "offload", "parallel"):
        sw.Step(model, adam(model), loss_fn)


CUT = "DistributedError: every parameter must be sharded by fully_shard alone, over all ranks; found "


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("whole", CUT + "that '2.weight' is not sharded. Call fully_shard on the model itself, too."),
        ("offload", CUT + "an offload policy. Leave it out."),
        ("parallel", CUT + "tensor parallelism of '0.weight'. Leave out parallelize_module."),
        ("auto", "DistributedError: microbatch must be a number or None for a sharded model, because its passes are"),
        (
            "used",
            "ParameterError: the optimizer must be new when its model is sharded; found one that already has a state.",
        ),
        (
            "whole optimizer",
            "ParameterError: the optimizer of a sharded model must hold sharded parameters of this model only; found",
        ),
        (
            "early optimizer",
            "ParameterError: the optimizer of a sharded model must hold sharded parameters of this model only; found",
        ),
        (
            "other parallel",
            "DistributedError: parallel must be None for a model that is already distributed; found parallel='ddp' and "
            "a model that fully_shard has sharded.",
        ),
        (
            "replicated",
            "DistributedError: parallel must be None for a model that is already distributed; found parallel='fsdp' "
            "and a DistributedDataParallel.",
        ),
        ("sum", "DistributedError: a transform of the sum must be additive, independent of the sum, if gradients are"),
    ],
)
def test_what_cannot_be_exact_is_refused(two, what, message):
    assert all(found.startswith(message) for found in two.errors(refused, what))


# -------------------------------------------------------------------------------------------------------- gradients


def asked():
    model = sharded()
    mine = own_batches(8)[0]  # as many on each rank: the engine verifies a graph in passes whose number depends on it
    with pytest.raises(
        sw.GraphError, match=r"the losses must be computed with the sharded model; found that it never gather"
    ):
        sw.gradients(loss_fn(net(), mine), model)
    g = sw.gradients(loss_fn(model, mine), model)
    told = g.names, g.norms(), g.sum(), g.full()
    g = sw.gradients(loss_fn(model, mine), model)
    g.norms()
    with pytest.raises(sw.ParameterError, match="must be a tensor with one number per sample for a sharded model"):
        g.backward(dict.fromkeys(g.names, torch.ones(len(g))))
    g.backward()
    return *told, [p.grad.full_tensor() for p in model.parameters()]


def test_gradients_have_the_names_and_shapes_of_the_model(two):
    model = net()
    g = sw.gradients(loss_fn(model, data()), model)
    for rank, (names, norms, own, full, grads) in enumerate(two.run(asked)):
        mine = torch.zeros(17, dtype=torch.float64)
        mine[rank:16:2] = 1
        assert names == g.names
        torch.testing.assert_close(norms, g.norms()[rank:16:2])
        torch.testing.assert_close(own, g.sum(mine))
        torch.testing.assert_close(full["0.weight"], g["0.weight"][rank:16:2])
        of_both = g.sum((torch.arange(17) < 16).double())
        torch.testing.assert_close(grads, [total / 2 for total in of_both.values()])  # fully_shard takes the mean


def asked_unequally():
    model = sharded()
    sw.gradients(loss_fn(model, own_batches(9)[0]), model)


def test_gradients_of_unequal_numbers_of_samples_are_refused(two):
    message = (
        "DistributedError: all ranks must have the same number of samples in sw.gradients and sw.backward of a model "
        "sharded with fully_shard; found 8 to 9. Use sw.Step"
    )
    assert all(error.startswith(message) for error in two.errors(asked_unequally))


def elsewhere():
    """Losses of a model that is not the sharded one."""
    model, mine = sharded(), own_batches(17)[0]
    loss_fn(model, mine)
    sw.gradients(loss_fn(net(), mine), model)


def test_leaves_that_are_not_in_the_graph_are_no_zeros(two):
    message = "GraphError: the losses must depend on at least one of the parameters; found none of them in the graph"
    assert all(found.startswith(message) for found in two.errors(elsewhere))


def one_rank():
    model = sharded()
    step = sw.Step(model, adam(model), loss_fn, 6, transforms=[sw.clip(0.5)], recheck=False)
    step.run(own_batches(17))
    return flat(model)


@pytest.mark.slow
def test_one_rank_may_have_all_parts():
    team = Ranks(1)
    try:
        (found,) = team.run(one_rank)
    finally:
        team.close()
    torch.testing.assert_close(found, alone_in_between(), rtol=1e-10, atol=1e-12)
