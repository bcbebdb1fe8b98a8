"""Per-sample gradients, transforms and the ledger inside the trainers of Hugging Face and TRL."""

try:
    import accelerate  # noqa: F401 - the Trainer needs it
    import transformers  # noqa: F401
except ImportError:
    raise ImportError(
        "samplewise.integrations.huggingface needs transformers and accelerate: pip install 'samplewise[huggingface]'"
    ) from None

from samplewise.integrations.huggingface.trainer import PerSample

__all__ = ["PerSample"]
