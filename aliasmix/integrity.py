"""Integrity checks in one place: what a CI step or a loader imports. Knows nothing that its parts do not."""

from aliasmix.difference import compare_keys, compare_tensors
from aliasmix.report import CODES, Finding, Report

__all__ = ["CODES", "Finding", "Report", "compare_keys", "compare_tensors"]
