"""The embedded default: a Kimi-K2.5 of a few megabytes that answers short questions about small pictures."""
