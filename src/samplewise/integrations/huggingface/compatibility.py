"""Settings of a trainer that cannot be combined with per-sample gradients."""

from __future__ import annotations

from typing import Any

from samplewise.errors import DistributedError, GraphError, SamplewiseError


def check_supported(trainer: Any) -> None:
    """Raise an error for settings with which the samples' gradients are not known."""
    args = trainer.args
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if trainer.is_deepspeed_enabled:
        raise _unsupported("DeepSpeed, which runs its own backward pass", "Use DDP or FSDP2")
    if args.n_gpu > 1:
        raise _unsupported(
            "nn.DataParallel, whose replicas are not the model's parameters",
            "Start one process per device with torchrun or accelerate launch",
        )
    if parallelism is not None and (parallelism.cp_size > 1 or parallelism.sp_size > 1):
        raise _unsupported(
            "context or sequence parallelism, in which a rank has parts of samples", "Leave out parallelism_config"
        )
    if trainer.get_tp_size() > 1 or getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise _unsupported("a model that transformers has sharded when it was loaded", "Use DDP or FSDP2")
    if args.torch_compile:
        raise _unsupported("torch_compile=True, after which the graph cannot be read", "Leave it out", GraphError)
    if str(getattr(args.optim, "value", args.optim)) in ("lomo", "adalomo"):
        raise _unsupported(
            f"optim={str(getattr(args.optim, 'value', args.optim))!r}, which updates parameters during the backward "
            "pass",
            "Use another optimizer",
            GraphError,
        )
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise _unsupported("FSDP version 1, which flattens parameters", "Set fsdp_version=2 in fsdp_config")
    _check_rows(trainer)


def _check_rows(trainer: Any) -> None:
    """Raise an error if rows of the outputs are not samples of the dataset."""
    packing = getattr(trainer.args, "packing", False)
    flattened = getattr(trainer, "padding_free", False) or type(trainer.data_collator).__name__.endswith("Flattening")
    if packing or flattened:
        raise _unsupported(
            f"{'packing' if packing else 'padding-free batches'}, in which a row has tokens of several samples",
            "Set packing=False and padding_free=False, and use a collator that pads",
            GraphError,
        )
    for kind in type(trainer).__mro__:
        if kind.__module__.startswith("trl.") and kind.__name__ not in ("SFTTrainer", "_BaseTrainer"):
            raise _unsupported(
                f"{kind.__name__}, whose loss compares or generates several rows per sample", "Use trl.SFTTrainer"
            )


def _unsupported(found: str, remedy: str, error: type[SamplewiseError] = DistributedError) -> SamplewiseError:
    return error(f"PerSample must get the gradient of each sample; found {found}. {remedy}.")
