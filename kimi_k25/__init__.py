"""Kimi-K2.5 in plain PyTorch."""
