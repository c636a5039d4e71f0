"""Training and test data."""

IGNORE = -100
"""Target where there is no loss (the default `ignore_index` of PyTorch's cross-entropy)."""
