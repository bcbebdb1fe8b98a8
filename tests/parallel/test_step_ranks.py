"""What ranks do about NaN, errors, wrappers, buffers and odd batches; and what is refused."""

import copy
import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks, single_process
from spread_models import assert_same, data, loss_fn, net, own_batches, wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import samplewise as sw
from samplewise.parallel import collectives

OTHER = "DistributedError: rank 1 of 2 failed: {} This rank stopped because of it. See the traceback of rank 1."


CHAINS = {
    "plain": (),
    "clip": [sw.clip(0.5)],
    "drop": [sw.drop(largest=1)],
    "group": [sw.group(3), sw.clip(0.5)],
    "weight": [sw.weight(4)],
}


def sgd(model, lr=0.3):
    return torch.optim.SGD(model.parameters(), lr=lr)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# -------------------------------------------------------------------------------------------------------- NaN


def broken(model, batch):
    """The loss of sample 9 is NaN; on two ranks it is with rank 1."""
    return torch.where(batch[2] == 9, torch.nan, loss_fn(model, batch))


def skipping(transforms, samples):
    model, parallel = wrapped(net(), "plain")
    step = sw.Step(
        model,
        sgd(model),
        broken,
        samples,
        transforms=CHAINS[transforms],
        on_nonfinite="skip",
        parallel=parallel,
        recheck=False,
    )
    updates = [(u.samples, u.loss, u.grad_norm, u.skipped) for u in step.over(own_batches(9))]
    return flat(model), updates, copy.copy(step.counters), True


@pytest.mark.parametrize("transforms", ["plain", "clip", "drop"])
def test_one_ranks_nan_skips_the_update_on_all(two, transforms):
    alone = skipping(transforms, 6)
    assert alone[2].skipped == 1
    for found in two.run(skipping, transforms, 6):
        assert_same(alone, found)


def raising(transforms):
    model, parallel = wrapped(net(), "plain")
    step = sw.Step(model, sgd(model), broken, 20, transforms=CHAINS[transforms], parallel=parallel, recheck=False)
    before = flat(model)
    try:
        step.run(own_batches(3))
    finally:
        assert torch.equal(flat(model), before)
        assert not step._has_pending_samples


@pytest.mark.parametrize("transforms", ["plain", "clip", "drop"])
def test_one_ranks_nan_is_an_error_on_all(two, transforms):
    found = two.errors(raising, transforms)
    said = "losses must be finite; found nan at sample 4 of the window (1 of "
    assert found[1].startswith(f"NonFiniteLossError: {said}")
    assert found[0] == OTHER.format(found[1])


def half(overflows):
    """Gradients of rank 1 overflow float16 once."""
    model, parallel = wrapped(nn.Linear(4, 2), "plain")

    def losses(model, batch):
        factor = 1e8 if overflows.pop() and collectives.rank() == 1 else 1.0
        return model(batch).float().square().sum(1) * factor

    step = sw.Step(model, sgd(model, 1e-3), losses, precision="16-mixed", parallel=parallel, recheck=False)
    step._precision.scale = 256.0
    torch.manual_seed(collectives.rank())
    done = [step(torch.randn(3, 4))[0].skipped for _ in range(3)]
    return done, step._precision.scale, flat(model).tolist()


def test_the_loss_scale_is_the_same_on_all_ranks(two):
    one, other = two.run(half, [False, True, False])
    assert one == other
    assert one[0] == [False, True, False] and one[1] == 128.0


def relative(losses):
    """Depends on the other samples, on rank 1 only."""
    return losses / losses.mean() if collectives.rank() else torch.ones_like(losses)


def warned_on_one_rank():
    model, parallel = wrapped(net(), "plain")
    step = sw.Step(model, sgd(model), loss_fn, 8, transforms=[sw.weight(relative)], parallel=parallel, recheck=False)
    before = flat(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step.run(own_batches(4))
    finally:
        assert torch.equal(flat(model), before)


def test_a_warning_on_one_rank_that_is_an_error_stops_all(two):
    found = two.errors(warned_on_one_rank)
    assert found[1].startswith("TrainingWarning: weight(relative) gives a sample another weight")
    assert found[0] == OTHER.format(found[1])


def small_on_one_rank():
    """One rank has no samples in the window."""
    model, parallel = wrapped(net(), "plain")
    step = sw.Step(model, sgd(model), loss_fn, transforms=[sw.clip(1e-3)], parallel=parallel, recheck=False)
    if collectives.rank():
        step.accumulate(data())
    before = flat(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step.apply()
    finally:
        assert torch.equal(flat(model), before)


def test_small_weights_are_reported_on_ranks_without_samples(two):
    empty, full = two.errors(small_on_one_rank)
    assert empty.startswith("TrainingWarning: every weight of the first update is below 0.1, with chain(clip(0.001)). ")
    assert full.startswith("TrainingWarning: every weight of the first update is below 0.1, with chain(clip(0.001)); ")


# ------------------------------------------------------------------------------------------------------ errors


def failing(where, transforms):
    model, parallel = wrapped(net(), "plain")
    here = collectives.rank() == 1

    def losses(model, batch):
        if here and where == "loss" and 11 in batch[2].tolist():
            raise ValueError("sample 11 is odd")
        return loss_fn(model, batch)

    def batches():
        for number, batch in enumerate(own_batches(2)):
            if here and where == "loader" and number == 2:
                raise ValueError("sample 11 is odd")
            yield batch

    step = sw.Step(model, sgd(model), losses, 4, transforms=CHAINS[transforms], parallel=parallel, recheck=False)
    try:
        for _ in step.over(batches()):
            pass
    finally:
        collectives.barrier()  # the ranks are still in step
        assert not step._has_pending_samples


@pytest.mark.parametrize("transforms", ["plain", "clip", "drop", "group"])
@pytest.mark.parametrize("where", ["loss", "loader"])
def test_an_error_on_one_rank_ends_all(two, where, transforms):
    assert two.errors(failing, where, transforms) == [
        OTHER.format("ValueError: sample 11 is odd."),
        "ValueError: sample 11 is odd",
    ]


def dying():
    model, parallel = wrapped(net(), "plain")

    def losses(model, batch):
        if collectives.rank() == 1 and 11 in batch[2].tolist():
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_fn(model, batch)

    sw.Step(model, sgd(model), losses, 4, parallel=parallel, recheck=False).run(own_batches(2))


def test_a_rank_that_is_killed_ends_the_others():
    team = Ranks(2)
    try:
        found = team.errors(dying)
    finally:
        team.close()
    assert found[1] == "EOFError: the process is gone"
    assert found[0].startswith(
        "DistributedError: all 2 ranks must take part in every collective; found that all_reduce "
    )


# ---------------------------------------------------------------------------------------------------- refusals


def unshared():
    model = net()
    sw.Step(model, sgd(model), loss_fn)


def test_unwrapped_models_are_refused(two):
    message = (
        "DistributedError: ranks that train together must share a model; found 2 ranks and parallel=None. "
        "Use Step(..., parallel='ddp'), or pass a DistributedDataParallel."
    )
    assert two.errors(unshared) == [message] * 2


def differing(what):
    model = net()
    if what == "settings":
        sw.Step(model, sgd(model), loss_fn, samples=4 + collectives.rank(), parallel="ddp")
    elif what == "strategies":
        sw.Step(model, sgd(model), loss_fn, parallel=("ddp", sw.parallel.fsdp())[collectives.rank()])
    elif what == "models":
        model = nn.Linear(3 + collectives.rank(), 2)
        sw.Step(model, sgd(model), loss_fn, parallel="ddp")
    elif what == "orders":
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters[:: (1, -1)[collectives.rank()]], lr=0.1)
        sw.Step(model, optimizer, loss_fn, parallel="ddp")
    elif what == "rates":
        sw.Step(model, sgd(model, lr=0.1 + collectives.rank()), loss_fn, parallel="ddp")
    else:
        model = DistributedDataParallel(model)
        with torch.no_grad():
            model.module[3].bias[1] += collectives.rank()
        sw.Step(model, sgd(model), loss_fn)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("settings", "all ranks must create the same step; found other settings than on this rank, {'samples': "),
        ("strategies", "all ranks must create the same step; found other settings than on this rank, {'samples': "),
        (
            "orders",
            "all ranks must have the same optimizer, with the same parameters in the same order; found another ",
        ),
        (
            "rates",
            "all ranks must have the same optimizer, with the same parameters in the same order; found another ",
        ),
        (
            "models",
            "all ranks must have the same model; found parameters or buffers that differ in name, shape, dtype or",
        ),
        ("values", "all ranks must start with the same parameters and buffers; found that '3.bias' differs."),
    ],
)
def test_ranks_that_differ_are_refused(two, what, message):
    assert all(found.startswith(f"DistributedError: {message}") for found in two.errors(differing, what))


def made_on_one(what):
    """A step that rank 1 cannot make."""
    model, bad = net(), collectives.rank() == 1
    if what == "settings":
        sw.Step(model, sgd(model), loss_fn, -1 if bad else 4, parallel="ddp")
    elif what == "model":
        model = nn.Sequential(model, nn.SyncBatchNorm(3)) if bad else model
        sw.Step(model, sgd(model), loss_fn, parallel="ddp")
    else:
        optimizer = sgd(model)
        optimizer.param_groups = [] if bad else optimizer.param_groups
        sw.Step(model, optimizer, loss_fn, parallel="ddp")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("settings", "ValueError: samples must be a positive integer, or None for one update per batch; found -1."),
        ("model", "DistributedError: forward and backward passes must not contain collectives; found"),
        ("optimizer", "ParameterError: the optimizer must have at least one parameter; found none."),
    ],
)
def test_a_step_that_one_rank_cannot_make_ends_all(two, what, message):
    other, own = two.errors(made_on_one, what)
    assert own.startswith(message)
    assert other.startswith("DistributedError: rank 1 of 2 failed: ")
    assert message in other
    assert two.run(dist.get_world_size) == [2, 2]  # they are still in step


def refused_wrapper(what):
    model = net()
    if what == "SyncBatchNorm":
        model = nn.Sequential(model, nn.SyncBatchNorm(3))
        sw.Step(model, sgd(model), loss_fn, parallel="ddp")
    elif what == "inside":
        model = nn.Sequential(DistributedDataParallel(model), nn.Tanh())
        sw.Step(model, sgd(model), loss_fn, parallel="ddp")
    elif what == "parts":
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
        sw.Step(model, sgd(model), loss_fn, parallel="ddp")
    elif what == "hooks":
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
        sw.Step(model, sgd(model), loss_fn)
    else:
        model = DistributedDataParallel(model)
        step = sw.Step(model, sgd(model), lambda _, batch: loss_fn(model, batch))
        step(own_batches(3)[0])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("SyncBatchNorm", "forward and backward passes must not contain collectives; found SyncBatchNorm: 1."),
        ("inside", "forward and backward passes must not contain collectives; found DistributedDataParallel: 0."),
        ("parts", "every rank must have the whole model; found a shard of '0.weight'."),
        ("hooks", "a DistributedDataParallel must only sum gradients; found one with communication hooks"),
        ("closure", "loss_fn must call the model that is passed to it; found a call of the Distributed"),
    ],
)
def test_wrappers_that_would_exchange_something_else_are_refused(two, what, message):
    assert all(found.startswith(f"DistributedError: {message}") for found in two.errors(refused_wrapper, what))


def own_reference():
    model, parallel = wrapped(net(), "plain")
    mine = [part[collectives.rank() :][:3] for part in data()]
    reference = sw.align(lambda: sw.gradients(loss_fn(model, mine), model).mean())
    sw.Step(model, sgd(model), loss_fn, 6, transforms=[reference], parallel=parallel).run(own_batches(3))


def test_references_that_differ_are_refused(two):
    message = "DistributedError: the reference must be equal on all ranks; found different ones."
    assert all(found.startswith(message) for found in two.errors(own_reference))


def test_unknown_parallel_modes_are_refused():
    with pytest.raises(ValueError, match=r"parallel must be None.*found 'dpp'"):
        sw.Step(net(), sw.sgd(0.1), loss_fn, parallel="dpp")


def test_one_process_may_name_its_strategy():
    model = net()
    assert sw.Step(model, sgd(model), loss_fn, parallel="ddp").run(own_batches(5)).updates == 4


# ------------------------------------------------------------------------------------------------- the wrapper


def disturbed(options):
    """Forward passes of the wrapper, for whatever reason, make its reducer wait for a backward pass."""
    model = DistributedDataParallel(net(), **options)
    step = sw.Step(model, sgd(model), loss_fn, 6, microbatch=1, transforms=[sw.weight(4)], recheck=False)
    for _ in step.over(own_batches(3)):
        model(data()[0])
    return flat(model)


def undisturbed():
    model = net()
    sw.Step(model, sgd(model), loss_fn, 6, transforms=[sw.weight(4)], recheck=False).run(own_batches(17))
    return flat(model)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_a_wrapper_used_in_between_takes_no_part(two, options):
    for found in two.run(disturbed, options):
        torch.testing.assert_close(found, undisturbed(), rtol=1e-10, atol=1e-12)


def with_batch_norm(how):
    torch.manual_seed(collectives.rank())
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    model, parallel = (DistributedDataParallel(model), None) if how == "ddp" else (model, "ddp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.TrainingWarning)
        step = sw.Step(model, sgd(model), loss_fn, parallel=parallel)
        step.run(own_batches(3))
    return [b.tolist() for b in model.buffers()], flat(model).tolist()


@pytest.mark.parametrize("how", ["ddp", "plain"])
def test_buffers_are_those_of_rank_0(two, how):
    one, other = two.run(with_batch_norm, how)
    assert one == other
    assert one[0][2] == 3  # batches that rank 0 has seen


def batch_norm_warning():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    sw.Step(model, sgd(model), loss_fn, parallel="ddp", recheck=False).run(own_batches(3))


def test_batch_norm_sees_a_window_in_pieces(two):
    message = "TrainingWarning: BatchNorm in training mode gets a window in 2 microbatches: 1."
    assert all(found.startswith(message) for found in two.errors(batch_norm_warning))


# ----------------------------------------------------------------------------------------------- odd gradients


class Routed(nn.Module):
    """Even and odd samples have a layer each; nobody uses the third. On two ranks each rank reaches one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(5, 3) for _ in range(3)).double()

    def losses(self, batch):
        outputs = [self.layers[int(n) % 2](x) for x, n in zip(batch[0], batch[2], strict=True)]
        return F.cross_entropy(torch.stack(outputs), batch[1], reduction="none")


def routed(batch):
    model = Routed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    parallel = "ddp" if collectives.size() > 1 else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.TrainingWarning)  # of the third layer
        sw.Step(model, optimizer, lambda m, b: m.losses(b), 4, parallel=parallel).run(own_batches(batch))
    return flat(model)


def test_parameters_that_one_rank_reaches(two):
    """Those that none reaches stay as they are, without weight decay, as in one process."""
    for found in two.run(routed, 2):
        torch.testing.assert_close(found, routed(4), rtol=1e-10, atol=1e-12)


def sparse(transforms):
    torch.manual_seed(2)
    model = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True), nn.Linear(4, 3)).double()
    model, parallel = wrapped(model, "plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    words = torch.randint(0, 20, (17, 6), generator=torch.Generator().manual_seed(1))
    step = sw.Step(model, optimizer, loss_fn, 6, transforms=CHAINS[transforms], parallel=parallel, recheck=False)
    step.run(own_batches(3, [words, *data()[1:]]))
    return flat(model)


@pytest.mark.parametrize("transforms", ["plain", "weight"])
def test_sparse_gradients(two, transforms):
    for found in two.run(sparse, transforms):
        torch.testing.assert_close(found, sparse(transforms), rtol=1e-10, atol=1e-12)


# --------------------------------------------------------------------------------------------------- odd loaders


def uneven(samples):
    """Rank 0 has one sample, and rank 1 the rest."""
    model, parallel = wrapped(net(), "plain")
    step = sw.Step(model, sgd(model), loss_fn, samples, parallel=parallel, recheck=False)
    mine = slice(0, 1) if collectives.rank() == 0 else slice(1, None)
    batches = list(zip(*(part[mine].split(2) for part in data()), strict=True))
    return [(u.samples, u.local_samples) for u in step.over(batches)], flat(model).tolist()


def test_windows_have_all_their_samples_wherever_those_are(two):
    (one, parameters), (other, others) = two.run(uneven, 6)
    assert [samples for samples, _ in one] == [6, 6, 5] == [samples for samples, _ in other]
    assert [own for _, own in one] == [1, 0, 0] and [own for _, own in other] == [5, 6, 5]
    assert parameters == others


def by_hand():
    model, parallel = wrapped(net(), "plain")
    step = sw.Step(model, sgd(model), loss_fn, parallel=parallel, recheck=False)
    first = [part[:5] for part in data()]
    if collectives.rank() == 1 or collectives.size() == 1:
        step.accumulate(first)
    update = step.apply()
    told = update.samples, update.local_samples, len(update.losses), update.losses.dtype
    with pytest.raises(sw.BatchError, match="an update must have samples; found none accumulated"):
        step.apply()
    assert step.flush() is None
    return flat(model), told


def test_by_hand_a_rank_may_have_nothing(two):
    alone, _ = by_hand()
    (one, told), (other, _) = two.run(by_hand)
    assert told == (5, 0, 0, torch.float64)
    torch.testing.assert_close(one, alone)
    torch.testing.assert_close(other, alone)


def saved_while_open():
    model, parallel = wrapped(net(), "plain")
    step = sw.Step(model, sgd(model), loss_fn, 40, parallel=parallel, recheck=False)
    step(own_batches(3)[0])
    try:
        step.state_dict()
    finally:
        assert step.flush().samples == 6
    step.state_dict()


def test_an_open_window_is_in_no_state_of_all(two):
    message = (
        "DistributedError: a step with several ranks must be saved between two updates; found an open window, of which "
        "each rank holds a part. Save after an update, or use sw.Trainer, whose checkpoints contain the parts."
    )
    assert two.errors(saved_while_open) == [message] * 2


def going_on(interrupted, exchanged=False):
    """A window of 12 samples, of which each rank has computed 5 when it is saved."""
    model, parallel = wrapped(net(), "plain")

    def made():
        return sw.Step(model, sgd(model), loss_fn, 12, transforms=CHAINS["clip"], parallel=parallel, recheck=False)

    step, batches = made(), own_batches(5)
    step(batches[0])
    if interrupted:
        everyones, own = step._state_dict(window=False), step._window_state()
        own = collectives.all_gather_object(own)[1 - collectives.rank()] if exchanged else own
        step = made()
        step.load_state_dict(everyones)
        step._load_window_state(own)
    updates = [*step(batches[1]), step.flush()]
    return flat(model), [(update.samples, update.local_samples, update.loss) for update in updates], step.counters


def test_windows_are_resumed(two):
    for found, expected in zip(two.run(going_on, True), two.run(going_on, False), strict=True):
        assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]
    message = (
        "DistributedError: the state of an open window must be loaded by the same rank of the same number of ranks; "
        "found the state of rank {} of 2 on rank {} of 2. Save one file per rank."
    )
    assert two.errors(going_on, True, True) == [message.format(1, 0), message.format(0, 1)]


def made_too_early(updates, compile):
    model = net()
    with single_process():
        step = sw.Step(model, sgd(model), loss_fn, compile=compile)
        for _ in range(updates):
            step(own_batches(3)[0])
    step(own_batches(3)[0])


@pytest.mark.parametrize(
    ("updates", "compile"), [(0, False), (2, False), pytest.param(3, True, marks=pytest.mark.slow)]
)
def test_a_step_that_was_made_for_one_process(two, updates, compile):
    message = (
        "DistributedError: the process group must exist before the step is created; found 2 ranks and a step that was "
        "created for one process. Call init_process_group() before Step(...)."
    )
    assert two.errors(made_too_early, updates, compile) == [message] * 2


# --------------------------------------------------------------------------------------------------------- beside


def beside():
    model, parallel = wrapped(net(), "plain")
    step = sw.Step(model, sgd(model), loss_fn, 6, parallel=parallel, recheck=False)
    if collectives.rank() == 0:
        step.require(norms=True)  # a matter of each rank
    norms = (
        [update.norms for update in step.over(own_batches(3))] if collectives.rank() == 0 else step.run(own_batches(3))
    )
    return step.compiled, flat(model).tolist(), len(norms) if collectives.rank() == 0 else norms.samples


def test_what_ranks_may_do_on_their_own(two):
    one, other = two.run(beside)
    assert one[0] == other[0] == "compile=False"
    assert one[1] == other[1]
    assert one[2] == 3 and other[2] == 17


def noisy():
    """Noise from torch's own generator: that of rank 0, and everybody's own random numbers go on."""
    model, parallel = wrapped(net(), "plain")
    step = sw.Step(model, sgd(model), loss_fn, 6, transforms=[sw.noise(1.0)], parallel=parallel, recheck=False)
    torch.manual_seed(7 + collectives.rank())
    step.run(own_batches(3))
    return flat(model), torch.rand(1).item()


def test_noise_is_drawn_once(two):
    alone = noisy()
    one, other = two.run(noisy)
    assert torch.equal(one[0], other[0])
    torch.testing.assert_close(one[0], alone[0], rtol=1e-10, atol=1e-12)
    assert one[1] == alone[1]
    assert other[1] == torch.rand(1, generator=torch.Generator().manual_seed(8)).item()


# -------------------------------------------------------------------------------------------- settings that change


def curriculum(samples, total):
    """Two passes over `total` samples with other transforms in the second; the window between them is carried."""
    model, parallel = wrapped(net(), "plain")
    rows = data()
    batch = [values[:total] for values in rows]
    step = sw.Step(model, sgd(model), loss_fn, samples, parallel=parallel, tail="carry", recheck=False)
    for transforms in (CHAINS["plain"], CHAINS["clip"]):
        step.transforms = transforms
        step.run(own_batches(4, batch))
    step.flush()
    return flat(model)


@pytest.mark.parametrize(("samples", "total"), [(6, 13), (6, 16)])  # one sample is carried, by one rank; four by both
def test_a_carried_window_keeps_its_transforms_on_every_rank(samples, total, two):
    expected = curriculum(samples, total)
    for found in two.run(curriculum, samples, total):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def resumed_curriculum(samples, total):
    """The same, but the second pass is made by another step, and its settings come after its state is loaded."""
    model, parallel = wrapped(net(), "plain")
    batch = [values[:total] for values in data()]

    def made():
        return sw.Step(model, sgd(model), loss_fn, samples, parallel=parallel, tail="carry", recheck=False)

    first, second = made(), made()
    first.transforms = CHAINS["clip"]
    first.run(own_batches(4, batch))
    distributed = collectives.size() > 1
    state, own = first._state_dict(window=not distributed), first._window_state() if distributed else None
    second.load_state_dict(state)
    if own is not None:
        second._load_window_state(own)
    second.transforms = CHAINS["clip"]
    second.run(own_batches(4, batch))
    second.flush()
    return flat(model)


def test_a_restored_window_takes_the_settings_that_follow_on_every_rank(two):
    expected = resumed_curriculum(6, 13)
    for found in two.run(resumed_curriculum, 6, 13):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
