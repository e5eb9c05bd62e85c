"""Every integrity check in one place, for a CI step, a test or a loader. Adds nothing to its parts."""

from aliasmix.checkpointcheck import check_checkpoint
from aliasmix.difference import compare_keys, compare_tensors
from aliasmix.errors import UnreadableFileError
from aliasmix.manifest import Manifest, check_manifest, compare_manifests, write_manifest
from aliasmix.modulecheck import assert_clean, check_module
from aliasmix.report import CODES, Finding, Report

__all__ = [
    "CODES",
    "Finding",
    "Manifest",
    "Report",
    "UnreadableFileError",
    "assert_clean",
    "check_checkpoint",
    "check_manifest",
    "check_module",
    "compare_keys",
    "compare_manifests",
    "compare_tensors",
    "write_manifest",
]
