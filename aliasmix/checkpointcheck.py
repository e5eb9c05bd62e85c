"""check_checkpoint: does a checkpoint hold what a module or a manifest expects? Reads headers, never a tensor's data.

Knows not how a header is read, nor how two listings are compared. Loads no torch, unless it is given a module.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from aliasmix.collection import paused_collection
from aliasmix.difference import compare_tensors
from aliasmix.manifest import Manifest, StrPath
from aliasmix.names import fold, is_under, parse_rule, replace_prefix
from aliasmix.report import Finding, Report, Severity, finding
from aliasmix.tensorinfo import Checkpoint, TensorInfo, read_checkpoint, scan_checkpoint

if TYPE_CHECKING:
    from torch import nn

Tensors = Mapping[str, TensorInfo]


@paused_collection()
def check_checkpoint(
    reference: nn.Module | Manifest | StrPath, path: StrPath, *, rename: Collection[str] = ()
) -> Report:
    """Compares a checkpoint with what is to be loaded from it.

    A tensor that is missing is accepted where it is tied to one that is there, or where the file's metadata says
    under which name it was kept, as safetensors' save_model does.

    Args:
        reference: A module, a manifest, or the path of a manifest.
        path: A .safetensors file, a folder, or an index.
        rename: Rules `a = b`: the checkpoint's prefix `a` is called `b` in the reference.

    Raises:
        UnreadableFileError: The manifest or the index cannot be read, or there is no checkpoint. A bad header or a
            missing shard beside good ones is a finding.
        ValueError: A rule is not of the form `a = b`, or two tensors get the same name by one.
    """
    if isinstance(reference, (str, os.PathLike)):
        reference = Manifest.read(reference)
    elif not isinstance(reference, Manifest):
        reference = Manifest.of_module(reference)
    checkpoint = scan_checkpoint(path)
    findings = index_findings(checkpoint)
    rules = [parse_rule(rule) for rule in rename]
    found = _renamed(checkpoint.tensors, rules)
    expected = dict(reference.tensors)
    if expected.keys() != found.keys():
        expected = {name: info for name, info in expected.items() if info.kind != "extra"}
        stand_ins = list(_stand_ins(expected, found, reference, _kept(checkpoint)))
        for name, other, why in stand_ins:
            if _WHY[why][0] == "CKPT_WRONG_KEEPER" and other in found:
                found[name] = found.pop(other)
            else:
                del expected[name]
        findings += _told(stand_ins)
        for name in _renamed(dict.fromkeys(_lost(checkpoint), TensorInfo((), "")), rules):
            expected.pop(name, None)  # told once, as a file
    differences = compare_tensors(expected, found)
    findings += [_with_fix(difference, reference.aliases) for difference in differences]
    return Report(
        findings,
        {"expected": len(reference.tensors), "tensors": len(checkpoint.tensors), "files": len(checkpoint.headers)},
    )


def index_findings(checkpoint: Checkpoint) -> list[Finding]:
    """Returns a checkpoint's problems, those that are alike folded into one each."""
    alike: dict[str, dict[str, str]] = {}
    findings = []
    for problem in checkpoint.problems:
        if problem.code in ("INDEX_TENSOR_MISSING", "INDEX_TENSOR_MISPLACED", "INDEX_UNLISTED"):
            alike.setdefault(problem.code, {})[problem.paths[0]] = problem.detail
        else:
            findings.append(problem)
    universe: dict[str, object] = dict.fromkeys(checkpoint.tensors)
    if alike and checkpoint.index is not None:
        universe |= dict.fromkeys(checkpoint.index.weight_map)
    for code, details in alike.items():
        for group in fold(details, universe):
            findings.append(finding(code, (group.path,), str(group.label), count=len(group.names)))
    return findings


def checkpoint_tensors(path: StrPath) -> dict[str, TensorInfo]:
    """Returns what a checkpoint holds.

    Raises:
        UnreadableFileError: Something in it cannot be read, or its index is wrong.
    """
    return read_checkpoint(path).tensors


def _renamed(found: Tensors, rules: list[tuple[str, str]]) -> dict[str, TensorInfo]:
    if not rules:
        return dict(found)
    renamed: dict[str, TensorInfo] = {}
    for name, info in found.items():
        new = name
        for old_prefix, new_prefix in rules:
            if is_under(name, old_prefix):
                new = replace_prefix(name, old_prefix, new_prefix)
                break
        if new in renamed:
            raise ValueError(f"by the rename rules two tensors of the checkpoint are called {new!r}; one is {name!r}")
        renamed[new] = info
    return renamed


# Why one name stands in for another -> (code, severity, what to say).
_WHY: dict[str, tuple[str, Severity, str]] = {
    "tied": ("CKPT_MISSING", "info", "{0} is not in the checkpoint and need not be: it is tied to {1}, which is"),
    "kept": ("CKPT_MISSING", "info", "{0} is not in the checkpoint; its metadata says that it is kept as {1}"),
    "keeper": (
        "CKPT_WRONG_KEEPER",
        "error",
        "the checkpoint has {1}, the name of the two that comes first in the alphabet; {0} is to be loaded",
    ),
    "alias": ("CKPT_WRONG_KEEPER", "error", "the checkpoint has {1}, by way of an alias; {0} is to be loaded"),
}
StandIn = tuple[str, str, str]  # missing name, the name that is there, a key of _WHY


def _stand_ins(expected: Tensors, found: Tensors, reference: Manifest, kept: Mapping[str, str]) -> Iterator[StandIn]:
    """Yields the missing names for which another one is there."""
    tied = {name: group for group in reference.ties for name in group}
    for name in expected.keys() - found.keys():
        twin = next((other for other in tied.get(name, ()) if other in found), None)
        through_alias = (replace_prefix(name, target, alias) for alias, target in reference.aliases.items())
        alias_name = next((o for o in through_alias if o != name and o in found and o not in expected), None)
        other = kept.get(name)
        if twin is not None:
            yield name, twin, "tied"
        elif other is not None and other in found:
            yield name, other, "kept" if other in expected else "keeper"
        elif alias_name is not None:
            yield name, alias_name, "alias"


def _kept(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns what save_model notes in a file's metadata: a name that was left out -> the one that was kept."""
    return {name: kept for header in checkpoint.headers.values() for name, kept in header.metadata.items()}


def _lost(checkpoint: Checkpoint) -> list[str]:
    """Returns the names in files that are not there or cannot be read, so far as no other file has them."""
    if checkpoint.index is None:
        return []
    read = checkpoint.headers.keys()
    lost = (name for name, file in checkpoint.index.weight_map.items() if file not in read)
    return [name for name in lost if name not in checkpoint.tensors]


def _told(stand_ins: list[StandIn]) -> Iterator[Finding]:
    """Yields one finding for each prefix whose names another prefix stands in for."""
    groups: dict[tuple[str, str, str], list[StandIn]] = {}
    for name, other, why in stand_ins:
        a, b = name.split("."), other.split(".")
        while len(a) > 1 and len(b) > 1 and a[-1] == b[-1]:
            del a[-1], b[-1]
        groups.setdefault((".".join(a), ".".join(b), why), []).append((name, other, why))
    for (wanted, there, why), members in groups.items():
        code, severity, detail = _WHY[why]
        paths = members[0][:2] if len(members) == 1 else (f"{wanted}.*", f"{there}.*")
        fix = f"rename '{there} = {wanted}', or load through aliasmix.fold_alias_keys" if severity == "error" else ""
        yield finding(code, paths, detail.format(*paths), fix, severity=severity, count=len(members))


def _with_fix(difference: Finding, aliases: Mapping[str, str]) -> Finding:
    """Adds the way out where a checkpoint has keys under an alias beside the real ones."""
    name = difference.paths[0].removesuffix("*").removesuffix(".")
    alias = next((alias for alias in aliases if is_under(name, alias)), None)
    if difference.code != "CKPT_UNEXPECTED" or alias is None:
        return difference
    fix = f"{alias!r} is an alias of {aliases[alias]!r}: load through aliasmix.fold_alias_keys"
    return replace(difference, fix=fix)
