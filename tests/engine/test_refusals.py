"""What cannot be answered is refused: what must hold, what was found, what to do."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import CASES

import samplewise as sw
from samplewise.testing.case import Net, noise, squared_loss
from samplewise.testing.compare import SINGLE, assert_agrees, assert_same, probe_for
from samplewise.testing.oracle import rows_of, wanted


def small():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), noise(5, 6)


def wide():
    model, x = small()
    return model.double(), x.double()


def refuses(error, message, losses, parameters, ask=lambda g: g.norms(), **options):
    """Refused when built or when first asked."""
    with pytest.raises(error, match=message) as caught:
        ask(sw.gradients(losses, parameters, **options))
    assert isinstance(caught.value, sw.SamplewiseError)
    assert isinstance(caught.value, ValueError | RuntimeError)
    return str(caught.value)


# ------------------------------------------------------------- losses


def test_message_for_scalar_losses_names_reduction():
    model, x = small()
    refuses(sw.LossesError, r"(?s)1-D.*reduction=.none", squared_loss(model(x)).mean(), model)


@pytest.mark.parametrize("shape", [(5, 1), (5, 3), (1, 5)])
def test_losses_with_two_dims(shape):
    model, x = small()
    losses = model(x).sum(1)[:, None].expand(5, 3) if shape == (5, 3) else squared_loss(model(x)).view(shape)
    refuses(sw.LossesError, rf"(?s)1-D.*{shape[0]}, {shape[1]}", losses, model)


def test_losses_without_samples():
    model, x = small()
    refuses(sw.LossesError, "sample", squared_loss(model(x))[:0], model)


def test_losses_made_under_no_grad():
    model, x = small()
    with torch.no_grad():
        losses = squared_loss(model(x))
    refuses(sw.LossesError, "no_grad", losses, model)


def test_losses_made_in_inference_mode():
    model, x = small()
    with torch.inference_mode():
        losses = squared_loss(model(x))
    refuses(sw.LossesError, "no_grad|inference", losses, model)


def test_detached_losses():
    model, x = small()
    refuses(sw.LossesError, "detach", squared_loss(model(x)).detach(), model)


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "(?i)nan|finite"), (float("inf"), "(?i)inf|finite")])
def test_losses_that_are_not_finite(value, word):
    model, x = small()
    losses = squared_loss(model(x)) + torch.tensor([0.0, 0, value, 0, 0])
    message = refuses(sw.LossesError, word, losses, model)
    assert "2" in message  # which sample


def test_integer_losses():
    model, _ = small()
    refuses(sw.LossesError, "(?i)float|int", torch.arange(5), model)


@pytest.mark.parametrize("losses", [[1.0, 2.0], 3.0, None])
def test_losses_that_are_no_tensor(losses):
    model, _ = small()
    refuses(sw.LossesError, "(?i)tensor", losses, model)


# ------------------------------------------------------------- parameters


def test_integer_parameter():
    model, x = small()
    refuses(sw.ParameterError, "(?i)int|float", squared_loss(model(x)), {"ids": torch.arange(3)})


def test_tensor_that_is_not_a_leaf():
    model, x = small()
    hidden = model[0](x)
    refuses(sw.ParameterError, "(?s)leaf", squared_loss(model[2](hidden)), {"hidden": hidden})


def test_tensor_that_needs_no_gradient():
    model, x = small()
    refuses(sw.ParameterError, "requires_grad", squared_loss(model(x)), {"x": x})


def test_something_that_is_no_parameter():
    model, x = small()
    refuses(sw.ParameterError, "(?i)tensor|module", squared_loss(model(x)), {"w": "weight"})


def test_all_parameters_frozen():
    model, x = small()
    losses = squared_loss(model(x))
    refuses(sw.ParameterError, "(?i)requires_grad|frozen|no parameter", losses, nn.Linear(3, 2).requires_grad_(False))


def test_no_parameters_at_all():
    model, x = small()
    refuses(sw.ParameterError, "(?i)parameter", squared_loss(model(x)), nn.Tanh())


def test_no_parameter_is_reached():
    """Zeros would look like an answer."""
    model, x = small()
    other, _ = small()
    refuses(sw.GraphError, "(?i)reach|depend|found none", squared_loss(model(x)), other)


def test_unknown_strategy_and_unknown_word_for_interacting():
    model, x = small()
    for options in ({"strategy": "fast"}, {"interacting": "maybe"}):
        with pytest.raises(ValueError, match=r"fused|refuse"):
            sw.gradients(squared_loss(model(x)), model, **options).norms()


def test_swapped_arguments():
    model, x = small()
    found = refuses(sw.LossesError, "losses must be the first argument", model, squared_loss(model(x)))
    assert found.endswith("found a module (Sequential) in its place. Write sw.gradients(losses, model).")


def test_an_optimizer_in_place_of_the_model():
    model, x = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refuses(sw.ParameterError, r"found SGD\. Pass the model", squared_loss(model(x)), optimizer)


@pytest.mark.parametrize("given", [None, "0.weight", 3, nn.Linear], ids=str)
def test_something_that_holds_no_parameters(given):
    model, x = small()
    refuses(
        sw.ParameterError, r"parameters must be a module, .*; found .*\. Pass the model", squared_loss(model(x)), given
    )


def test_named_parameters_as_an_iterator_of_pairs():
    model, x = wide()
    g = sw.gradients(squared_loss(model(x)), model.named_parameters())
    assert g.names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert_agrees(g, rows_of(squared_loss(model(x)), wanted(model)), probe_for(wanted(model), 5))


def test_one_name_for_two_parameters():
    model, x = small()
    pairs = [("w", model[0].weight), ("w", model[2].weight)]
    refuses(sw.ParameterError, "each parameter must have its own name", squared_loss(model(x)), pairs)


def test_an_iterator_that_was_used_before():
    model, x = small()
    used = model.parameters()
    list(used)
    refuses(sw.ParameterError, "empty after its first use", squared_loss(model(x)), used)


# ------------------------------------------------------------- what is asked


def test_a_number_is_the_weight_of_all_samples():
    model, x = wide()
    rows = rows_of(squared_loss(model(x)), wanted(model))
    g = sw.gradients(squared_loss(model(x)), model)
    assert_same(g.sum(1 / len(g)), rows.mean(), what="sum with a number")
    assert_same(g.sum(dict.fromkeys(g.names, 2)), rows.sum(2 * torch.ones(5)), what="a number for each parameter")
    g.backward(1 / len(g))
    assert_same({name: p.grad for name, p in wanted(model).items()}, rows.mean(), what=".grad")


def test_a_number_is_the_weight_of_all_samples_in_an_ordinary_backward():
    model, x = wide()
    rows = rows_of(squared_loss(model(x)), wanted(model))
    g = sw.gradients(squared_loss(model(x)), model, strategy="twice")
    g.backward(1 / len(g))
    assert_same({name: p.grad for name, p in wanted(model).items()}, rows.mean(), what=".grad")


@pytest.mark.parametrize("weights", [True, "mean", [1.0] * 5, torch.tensor(0.5)], ids=str)
def test_weights_that_are_neither_a_tensor_nor_a_number(weights):
    model, x = small()
    message = r"weights must be a tensor of shape \(5,\), one value per sample, or a number for all samples; found"
    refuses(sw.ParameterError, message, squared_loss(model(x)), model, lambda g: g.sum(weights))
    refuses(sw.ParameterError, message, squared_loss(model(x)), model, lambda g: g.backward(weights))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda g: g.gram(torch.ones(5)), "gram needs another Gradients, .*; found Tensor"),
        (lambda g: g.dot([torch.ones(5)]), "direction must be a dict name -> tensor, .*; found list"),
        (lambda g: g.dot(dict.fromkeys(g.names, 1)), "must be a tensor of the parameter's shape .*; found int"),
        (lambda g: g[[1, 2]], "the index must be a parameter's name, .*; found list"),
        (lambda g: g[1.5], "the index must be a parameter's name, .*; found float"),
    ],
)
def test_arguments_of_other_types(ask, message):
    model, x = small()
    refuses(sw.ParameterError, message, squared_loss(model(x)), model, ask)


@pytest.mark.parametrize("ask", [lambda g: g.project("8"), lambda g: g.project(0), lambda g: g.chunks(0)])
def test_numbers_that_are_not_positive_integers(ask):
    model, x = small()
    with pytest.raises(ValueError, match="must be a positive integer; found"):
        ask(sw.gradients(squared_loss(model(x)), model))


def test_fisher_is_the_mean_of_the_squares():
    model, x = wide()
    squares = sw.gradients(squared_loss(model(x)), model).sum_of_squares()
    rows = rows_of(squared_loss(model(x)), wanted(model))
    assert_same(squares, {name: row.square().sum(0) for name, row in rows.full().items()}, what="sum of squares")
    means = sw.fisher(model, lambda model, batch: squared_loss(model(batch)), [x[:2], x[2:]])
    assert_same(means, {name: t / 5 for name, t in squares.items()}, what="fisher")


def test_weights_of_another_length():
    model, x = small()
    for ask in (lambda g: g.sum(torch.ones(4)), lambda g: g.sum(torch.ones(5, 2)), lambda g: g.backward(torch.ones(6))):
        refuses(sw.ParameterError, r"(?s)weights.*5", squared_loss(model(x)), model, ask)


def test_weights_by_parameter_with_unknown_or_missing_names():
    model, x = small()
    right = {name: torch.ones(5) for name in wanted(model)}
    wrong_name, wrong_shape = right | {"nose": torch.ones(5)}, right | {"0.bias": torch.ones(4)}
    missing = {k: v for k, v in right.items() if k != "2.weight"}
    refuses(sw.ParameterError, "nose", squared_loss(model(x)), model, lambda g: g.sum(wrong_name))
    refuses(sw.ParameterError, r"2\.weight", squared_loss(model(x)), model, lambda g: g.sum(missing))
    refuses(sw.ParameterError, r"0\.bias", squared_loss(model(x)), model, lambda g: g.sum(wrong_shape))


def test_direction_with_unknown_or_missing_names_or_another_shape():
    model, x = small()
    right = {name: torch.randn_like(p) for name, p in wanted(model).items()}
    wrong_name, wrong_shape = right | {"nose": torch.ones(5)}, right | {"0.weight": torch.ones(6, 8)}
    missing = {k: v for k, v in right.items() if k != "2.weight"}
    refuses(sw.ParameterError, "nose", squared_loss(model(x)), model, lambda g: g.dot(wrong_name))
    refuses(sw.ParameterError, r"2\.weight", squared_loss(model(x)), model, lambda g: g.dot(missing))
    refuses(sw.ParameterError, r"(?s)0\.weight.*8, 6", squared_loss(model(x)), model, lambda g: g.dot(wrong_shape))


def test_gram_with_gradients_of_other_parameters():
    (model, x), (other, y) = small(), small()
    strange = sw.gradients(squared_loss(nn.Sequential(*other, nn.Linear(3, 3))(y)), other[0])
    refuses(sw.ParameterError, "(?i)parameter|name", squared_loss(model(x)), model, lambda g: g.gram(strange))


def test_name_or_sample_that_does_not_exist():
    model, x = small()
    g = sw.gradients(squared_loss(model(x)), model)
    with pytest.raises((KeyError, sw.ParameterError), match="nose"):
        g["nose"]
    with pytest.raises(IndexError):
        g[5]


def test_non_finite_gradients_of_finite_losses():
    """The root at zero: the loss is 0 and its slope is not finite."""
    model = nn.Linear(6, 1, bias=False)
    x = noise(5, 6)
    x[2] = 0
    losses = model(x).squeeze(1).square().sqrt()
    assert losses.isfinite().all()
    refuses(sw.NonFiniteGradientError, "(?i)nan|inf|finite", losses, model)


def test_overflowing_gradients_of_finite_losses():
    model = nn.Linear(6, 1, bias=False)
    model.weight.data.fill_(1e-30)
    losses = (model(torch.ones(5, 6)) * 1e30).squeeze(1) * 1e30
    refuses(sw.NonFiniteGradientError, "(?i)inf|finite|overflow", losses * 1e-10, model)


# ------------------------------------------------------------- graphs


@pytest.mark.parametrize("strategy", [None, "twice", "full", "reference"])
def test_graph_already_freed(strategy):
    model, x = small()
    losses = squared_loss(model(x))
    losses.sum().backward()
    refuses(sw.GraphError, "(?i)freed|retain_graph|before", losses, model, strategy=strategy)


def test_graph_freed_between_the_call_and_the_first_question():
    model, x = small()
    losses = squared_loss(model(x))
    g = sw.gradients(losses, model)
    losses.sum().backward()
    with pytest.raises(sw.GraphError, match=r"(?i)freed|retain_graph|before"):
        g.norms()


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_module_with_a_readable_graph():
    torch.compiler.reset()
    model, x = small()
    compiled = torch.compile(model, backend="eager")
    rows = rows_of(squared_loss(model(x)), wanted(model))
    g = sw.gradients(squared_loss(compiled(x)), model)
    assert_agrees(g, rows.to(torch.float64), probe_for(wanted(model), 5), tolerance=SINGLE)


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("strategy", [None, "twice", "full"])
def test_compiled_module_with_an_opaque_graph(strategy):
    """One node for the whole net: samples cannot be told apart inside."""
    torch.compiler.reset()
    model, x = small()
    compiled = torch.compile(model, backend="aot_eager")
    refuses(sw.GraphError, "(?is)compile", squared_loss(compiled(x)), model, strategy=strategy)


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_part_of_a_model():
    torch.compiler.reset()
    model, x = small()
    model[0] = torch.compile(model[0], backend="aot_eager")
    refuses(sw.GraphError, "(?is)compile", squared_loss(model(x)), model)


@pytest.mark.parametrize("strategy", [None, "twice", "full"])
def test_reentrant_checkpoint(strategy):
    """Its parameters are not in the graph at all."""
    model, x = small()
    head = nn.Linear(3, 3)
    whole = nn.ModuleList([model, head])
    losses = squared_loss(head(checkpoint(model, x.requires_grad_(), use_reentrant=True)))
    refuses(sw.GraphError, "use_reentrant=False", losses, whole, strategy=strategy)


# ------------------------------------------------------------- samples that interact


def test_batch_norm_is_named_with_its_module():
    model = nn.ModuleDict({"stem": nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), "head": nn.Linear(8, 3)})
    x = noise(5, 6)
    message = refuses(sw.SamplesInteractError, "(?i)batch.?norm", squared_loss(model["head"](model["stem"](x))), model)
    assert "stem.1" in message
    assert "eval()" in message or "GroupNorm" in message


def test_one_of_two_batch_norms_in_eval_mode():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].eval()
    message = refuses(sw.SamplesInteractError, "(?i)batch.?norm", squared_loss(model(noise(5, 6))), model)
    assert "'3'" in message or "3" in message


@pytest.mark.parametrize("name", ["batch_mean_subtracted", "contrast_within_the_batch", "attention_across_the_batch"])
def test_interaction_is_named_with_its_remedy(name):
    case = CASES[name]
    model, inputs = case.build()
    refuses(sw.SamplesInteractError, r"(?s)Backward|mean|softmax|mm", case.losses(model, inputs), model)
    refuses(sw.SamplesInteractError, r"interacting=.allow", case.losses(model, inputs), model)


def test_input_gradients():
    model, x = small()
    x.requires_grad_()
    losses = squared_loss(model(x))
    each = torch.stack([torch.autograd.grad(loss, x, retain_graph=True)[0][i] for i, loss in enumerate(losses)])
    torch.testing.assert_close(sw.input_gradients(losses, x), each, rtol=1e-5, atol=1e-7)


def test_input_gradients_with_swapped_or_other_arguments():
    model, x = small()
    x.requires_grad_()
    losses = squared_loss(model(x))
    with pytest.raises(
        sw.LossesError, match=r"found shapes \(5, 6\) and \(5,\)\. Write sw\.input_gradients\(losses, x\)"
    ):
        sw.input_gradients(x, losses)
    with pytest.raises(sw.ParameterError, match=r"found Sequential\. .* use sw\.gradients\(losses, model\)"):
        sw.input_gradients(losses, model)
    with pytest.raises(
        sw.LossesError, match=r"found a module \(Sequential\) .* Write sw\.input_gradients\(losses, x\)"
    ):
        sw.input_gradients(model, x)


def test_input_gradients_under_create_graph():
    model, x = small()
    x.requires_grad_()
    found = sw.input_gradients(squared_loss(model(x)), x, create_graph=True).square().sum()
    (plain,) = torch.autograd.grad(squared_loss(model(x)).sum(), x, create_graph=True)
    for ours, right in zip(
        *(torch.autograd.grad(y, list(model.parameters()), allow_unused=True) for y in (found, plain.square().sum())),
        strict=True,
    ):
        if right is not None:
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-6)


def test_input_gradients_of_mixed_samples_are_refused():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    x = noise(5, 6).requires_grad_()
    with pytest.raises(sw.SamplesInteractError):
        sw.input_gradients(squared_loss(model(x)), x)


def test_input_gradients_of_rows_in_another_order():
    """Row 0 of x feeds loss 4: 'd losses_i / d x_i' has no such row, and zeros would be a lie."""
    model, x = small()
    x.requires_grad_()
    losses = squared_loss(model(x)).flip(0)
    try:
        found = sw.input_gradients(losses, x)
    except sw.SamplewiseError:
        return
    (right,) = torch.autograd.grad(losses.sum(), x)
    torch.testing.assert_close(found, right)


def test_input_that_needs_no_gradient():
    model, x = small()
    with pytest.raises(sw.SamplewiseError, match="requires_grad"):
        sw.input_gradients(squared_loss(model(x)), x)


def test_refusals_leave_the_losses_usable():
    model = Net(lambda m, x: m.f(x) - m.f(x).mean(0), f=nn.Linear(6, 3))
    losses = squared_loss(model(noise(5, 6)))
    refuses(sw.SamplesInteractError, "mean", losses, model)
    losses.sum().backward()
    assert model.f.weight.grad is not None


def test_gradients_in_inference_mode():
    """Neither these fail nor later ones, also if a hook was registered since the last call."""
    model = nn.Linear(3, 2).double()
    losses = model(torch.eye(3).double()).square().sum(1)
    torch.ones(1, requires_grad=True).register_hook(lambda g: None)
    with torch.inference_mode():
        inside = sw.gradients(losses, model).norms()
    torch.testing.assert_close(inside.clone(), sw.gradients(losses, model).norms())


# ------------------------------------------------------------- models of other libraries


def keras_model():
    """A model of Keras with the JAX or TensorFlow backend, as far as its classes show."""
    layer = type("Layer", (), {"__module__": "keras.src.layers.layer"})
    return type("Sequential", (layer,), {"__module__": "keras.src.models.sequential"})()


@pytest.mark.parametrize(
    "call",
    [
        lambda m, f, d: sw.gradients(torch.ones(3, requires_grad=True) * 2, m),
        lambda m, f, d: sw.gradients(m, m),
        lambda m, f, d: sw.backward(torch.ones(3, requires_grad=True) * 2, m),
        lambda m, f, d: sw.Step(m, sw.sgd(0.1), f),
        lambda m, f, d: sw.scan(m, f, d),
        lambda m, f, d: sw.check(m, f, d[0]),
        lambda m, f, d: sw.suspects(m, f, d),
        lambda m, f, d: sw.fisher(m, f, d),
        lambda m, f, d: sw.influence(m, f, d, d),
        lambda m, f, d: sw.trak([m], f, d, d, dim=4),
        lambda m, f, d: sw.ekfac(m, f, d),
        lambda m, f, d: sw.freeze_batchnorm(m),
    ],
    ids="gradients swapped backward Step scan check suspects fisher influence trak ekfac freeze_batchnorm".split(),
)
def test_a_keras_model_of_another_backend_names_the_integration(call):
    loader = [(noise(3, 2), noise(3, 2))]
    message = (
        r"must be a torch.nn.Module; found a Keras model \(Sequential\) of another backend. Use "
        r"samplewise.integrations.keras.gradients\(model, x, y\); or set KERAS_BACKEND=torch"
    )
    with pytest.raises(TypeError, match=message):
        call(keras_model(), lambda model, batch: squared_loss(model(batch[0])), loader)


def test_another_object_than_a_model_is_named():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module; found dict. Pass the model."):
        sw.fisher({}, lambda model, batch: batch, [noise(3, 2)])


def test_the_output_of_a_hugging_face_model_is_no_loss():
    out = type("Output", (), {"loss": torch.ones(()), "logits": torch.ones(3, 2)})()
    with pytest.raises(sw.LossesError, match=r"found Output\. Pass its loss, .*out\.loss, model, outputs=out\.logits"):
        sw.gradients(out, small()[0])


@pytest.mark.parametrize("weights", [[1.0] * 5, torch.ones(5).numpy()], ids=["list", "array"])
def test_weights_that_are_no_tensor(weights):
    model, x = small()
    with pytest.raises(sw.ParameterError, match=r"found (list|ndarray)\. Use torch\.as_tensor for arrays and lists"):
        sw.gradients(squared_loss(model(x)), model).sum(weights)
