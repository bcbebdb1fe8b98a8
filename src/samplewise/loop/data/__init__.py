"""Data loading that can be resumed: loaders, adapters, sharding over ranks, random state."""
