"""Lightning: the callback `PerSample` clips, weights and records single samples in the training of a module."""

try:
    import lightning.pytorch  # noqa: F401
except ImportError:
    raise ImportError(
        "samplewise.integrations.lightning needs lightning: pip install 'samplewise[lightning]'"
    ) from None

from samplewise.integrations.lightning.per_sample import PerSample

__all__ = ["PerSample"]
