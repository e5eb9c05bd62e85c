"""Attribute aliases that never register a module twice, and state-dict integrity checks."""
