"""Per-sample gradients of every architecture in transformers that can be built small, against rows of the Jacobian.

python benchmarks/evidence/architectures.py [--write docs/evidence.md] [--tasks "causal language model" ...]

The list is that of transformers itself (its `MODEL_FOR_..._MAPPING_NAMES`), not a choice of ours. Each model has random
weights in float64 and two layers: the sizes of `NAMES` are set, in nested configurations too.
A model that transformers cannot build with these sizes, or whose own backward pass fails, is counted as "not built".
"""

from __future__ import annotations

import copy
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from record import Record, Values, machine, parser, show
from tables import Table
from torch.nn.functional import cross_entropy
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import samplewise as sw

SECONDS = 60  # of one model
LARGEST = 30_000_000  # parameters
EXACT = 1e-6  # relative to the largest element; some models normalize or compute positions in float32

# Sizes of all configurations: value -> names in the configurations of transformers
NAMES = {
    60: "vocab_size text_vocab_size",
    32: "hidden_size pooler_hidden_size n_embd d_model embedding_size word_embed_proj_dim embed_dim dim image_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers eos_token_id "
    "num_key_value_heads moe_topk num_experts_per_tok n_group topk_group",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_decoder_layers num_experts num_local_experts n_routed_experts state_size ssm_state_size rotary_dim "
    "mamba_d_state time_step_rank attention_window",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner",
    16: "moe_intermediate_size q_lora_rank kv_lora_rank head_dim qk_head_dim",
    8: "qk_nope_head_dim qk_rope_head_dim v_head_dim d_kv d_head mamba_d_head mamba_n_heads patch_size sliding_window",
    1: "n_shared_experts first_k_dense_replace mamba_n_groups bos_token_id decoder_start_token_id",
    64: "max_position_embeddings n_positions",
    0: "pad_token_id",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()} | {"use_cache": False}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def tokens() -> torch.Tensor:
    return torch.cat([torch.randint(3, 60, (3, 11)), torch.full((3, 1), SIZES["eos_token_id"])], 1)


def causal(model: Any) -> Callable[[], torch.Tensor]:
    text = tokens()
    return lambda: of_tokens(model(input_ids=text).logits[:, :-1], text[:, 1:])


def masked(model: Any) -> Callable[[], torch.Tensor]:
    text = tokens()
    return lambda: of_tokens(model(input_ids=text).logits, text)


def translation(model: Any) -> Callable[[], torch.Tensor]:
    source, target = tokens(), tokens()
    return lambda: of_tokens(model(input_ids=source, decoder_input_ids=target).logits, target)


def text_class(model: Any) -> Callable[[], torch.Tensor]:
    text = tokens()
    return lambda: cross_entropy(model(input_ids=text).logits, torch.tensor([0, 1, 0]), reduction="none")


def image_class(model: Any) -> Callable[[], torch.Tensor]:
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    return lambda: cross_entropy(model(pixel_values=images).logits, torch.tensor([0, 1, 0]), reduction="none")


def of_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss of each text, (B,)."""
    return cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)


# task -> (table of transformers, function that makes the losses)
TASKS: dict[str, tuple[str, Callable[[Any], Callable[[], torch.Tensor]]]] = {
    "causal language model": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", causal),
    "masked language model": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", masked),
    "sequence to sequence": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", translation),
    "text classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", text_class),
    "image classification": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", image_class),
}


def main() -> None:
    arguments = parser(__doc__, "architectures")
    arguments.add_argument("--names", nargs="+", default=[], metavar="NAME", help="only these architectures")
    arguments.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, stop)
    record = Record(options.results)
    rows = [["task", "architectures", "exact", "refused", "wrong", "error", "not built"]]
    notes = []
    for task in options.tasks:
        names = [name for name in getattr(modeling_auto, TASKS[task][0]) if name in CONFIG_MAPPING]
        names = [name for name in names if name in options.names or not options.names]
        results = {name: record.run(f"{task}: {name}", partial(result, task, name)) for name in names}
        counts = Counter(values["result"] for values in results.values())
        rows.append([task, str(len(names)), *(str(counts[kind]) for kind in rows[0][2:])])
        notes += [
            f"{task}, {name}: {values['result']}. {values['why']}"
            for name, values in results.items()
            if values["result"] not in ("exact", "not built")
        ]
    caption = f"transformers {transformers.__version__}, float64, seed 0; {machine()}."
    show(Table("architectures", "Architectures of transformers", rows, caption, tuple(notes)), options.write)


def result(task: str, name: str) -> Values:
    """Compare all per-sample gradients of one architecture with the rows of the Jacobian."""
    mapping, losses_of = TASKS[task]
    try:
        with time_limit():
            model = built(name, getattr(modeling_auto, mapping)[name])
            torch.manual_seed(1)
            forward = losses_of(model)
            losses = forward()
            losses.sum().backward()
            if not losses.isfinite().all():
                raise ValueError(f"the losses are {losses.tolist()}")
    except Exception as why:
        return {"result": "not built", "why": in_one_line(why)}
    try:
        with time_limit():
            torch.manual_seed(2)
            error = difference(model, forward())
    except sw.SamplewiseError as why:
        return {"result": "refused", "why": in_one_line(why)}
    except Exception as why:
        return {"result": "error", "why": in_one_line(why)}
    return {"result": "exact" if error < EXACT else "wrong", "why": f"difference {error:.1e}"}


def built(name: str, classes: str | tuple[str, ...]) -> torch.nn.Module:
    """The model with two small layers, random weights, float64, evaluation mode."""
    values = CONFIG_MAPPING[name]().to_dict()
    shrink(values)
    if "kv_lora_rank" in values:  # latent attention has keys of its own in each head
        values["num_key_value_heads"] = SIZES["num_attention_heads"]
    config = CONFIG_MAPPING[name].from_dict(values)
    config._experts_implementation = "eager"  # the fused products of experts have no float64
    torch.manual_seed(0)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model_class(classes)(copy.deepcopy(config)).parameters())
    if parameters > LARGEST:
        raise ValueError(f"{parameters:,} parameters with these sizes")
    return model_class(classes)(config).double().eval()


def model_class(classes: str | tuple[str, ...]) -> Any:
    return getattr(transformers, classes if isinstance(classes, str) else classes[0])


def shrink(values: dict[str, Any]) -> None:
    """Set the sizes of a configuration, and of those inside it. Lists with an entry per layer keep the outer two, and
    names of layers are left to the class.
    """
    for key in ("out_features", "out_indices", "stage_names", "per_layer_config"):
        values.pop(key, None)
    layers = next((values[key] for key in LAYERS if isinstance(values.get(key), int)), None)
    for key, value in values.items():
        if isinstance(value, dict) and key not in ("id2label", "label2id"):
            shrink(value)
        elif isinstance(value, list) and len(value) == layers:
            values[key] = [value[0], value[-1]]
        elif key in SIZES and isinstance(value, int | None):
            values[key] = SIZES[key]
        elif key.endswith(("dropout", "drop", "dropout_prob", "pdrop", "drop_path_rate")) and isinstance(value, float):
            values[key] = 0.0


def difference(model: torch.nn.Module, losses: torch.Tensor) -> float:
    """Largest difference between an element of samplewise's rows and the Jacobian, over the largest element."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    rows = sw.gradients(losses, model).full()
    largest = error = 0.0
    for sample, loss in enumerate(losses):
        expected = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        for (name, p), gradient in zip(parameters.items(), expected, strict=True):
            gradient = torch.zeros_like(p) if gradient is None else gradient
            row = rows[name][sample] if name in rows else torch.zeros_like(p)
            largest = max(largest, gradient.abs().max().item())
            error = max(error, (row - gradient).abs().max().item())
    return error / largest


class Timeout(Exception):
    """A model took longer than SECONDS."""


def stop(*_: Any) -> None:
    raise Timeout(f"more than {SECONDS} s")


@contextmanager
def time_limit() -> Iterator[None]:
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def in_one_line(why: Exception) -> str:
    return f"{type(why).__name__}: {' '.join(str(why).split())[:200]}"


if __name__ == "__main__":
    main()
