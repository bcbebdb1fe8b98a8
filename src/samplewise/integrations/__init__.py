"""Adapters to other libraries. No other package imports them."""
