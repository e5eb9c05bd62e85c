"""Manifests: the keys that a module or a checkpoint is agreed to have, one a line, to be committed and reviewed.

Knows the file format and how a manifest is made; what a difference means is `aliasmix.difference`'s. Loads torch only
to describe a module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from aliasmix.collection import paused_collection
from aliasmix.difference import compare_keys
from aliasmix.errors import UnreadableFileError
from aliasmix.jsonfile import read_object
from aliasmix.names import natural_key
from aliasmix.report import Finding, Report, finding
from aliasmix.tensorinfo import TensorInfo

if TYPE_CHECKING:
    from torch import nn

VERSION = 1
StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is agreed on.

    Attributes:
        tensors: The state_dict keys, in natural order.
        class_name: The module's class with its module's name; "" for a checkpoint.
        buffers_non_persistent: Names of buffers that state_dict() leaves out.
        ties: Groups of keys that are one tensor; each in natural order.
        aliases: Alias -> what it stands for, as full paths.
    """

    tensors: Mapping[str, TensorInfo]
    class_name: str = ""
    buffers_non_persistent: Collection[str] = ()
    ties: Collection[tuple[str, ...]] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_module(cls, module: nn.Module) -> Manifest:
        """Describes a module; reads no data, so that it may be on the meta device.

        Raises:
            ValueError: A lazy parameter has no shape yet.
        """
        from aliasmix.alias import aliases
        from aliasmix.storage import extent, storage_key
        from aliasmix.walk import describe, join, state_values, walk

        found = walk(module)
        values = state_values(found)
        groups: dict[Any, list[str]] = {}
        for name, value in values.items():
            if hasattr(value, "untyped_storage"):
                place = extent(value)
                key = (storage_key(value), place[:3] if place else id(value), value.dtype)
                groups.setdefault(key, []).append(name)
        tables = {kind: aliases(kind) for kind in {type(part) for part in found.modules.values()}}
        return cls(
            {name: describe(values[name]) for name in sorted(values, key=natural_key)},
            f"{type(module).__module__}.{type(module).__qualname__}",
            sorted((slot.name for slot in found.slots if not slot.persistent), key=natural_key),
            _sorted_ties(names for names in groups.values() if len(names) > 1),
            {
                join(path, name): join(path, alias.target)
                for path, part in found.modules.items()
                for name, alias in sorted(tables[type(part)].items())
            },
        )

    @classmethod
    @paused_collection()
    def read(cls, path: StrPath) -> Manifest:
        """Reads a manifest.

        Raises:
            UnreadableFileError: It is not there, is no JSON, is of another version, or has a malformed entry.
        """
        content = read_object(Path(path))
        version = content.get("aliasmix_manifest")
        if type(version) is not int or version != VERSION:
            found = f"version {version!r}" if "aliasmix_manifest" in content else "no 'aliasmix_manifest' entry"
            raise UnreadableFileError(
                path, f"{found}, expected version {VERSION}; write it again with `aliasmix manifest`"
            )
        keys = _expect(path, content, "keys", dict)
        ties = _expect(path, content, "ties", list, [])
        buffers = _expect(path, content, "buffers_non_persistent", list, [])
        aliases = _expect(path, content, "aliases", dict, {})
        if not all(isinstance(group, list) and all(isinstance(n, str) for n in group) for group in ties):
            raise UnreadableFileError(path, "'ties' is not a list of lists of names")
        if not all(isinstance(name, str) for name in (*buffers, *aliases.values())):
            raise UnreadableFileError(path, "'buffers_non_persistent' or 'aliases' holds something else than names")
        tensors = _tensors(path, keys)
        class_name = _expect(path, content, "class", str, "")
        return cls(tensors, class_name, buffers, [tuple(group) for group in ties], aliases)

    @paused_collection()
    def to_json(self) -> str:
        """Returns the file's content: sorted, one key a line, the same for the same keys wherever it is made."""
        def block(entries: Collection[str], brackets: str) -> str:
            body = ",\n".join(f"  {entry}" for entry in entries)
            return f"{brackets[0]}\n{body}\n {brackets[1]}" if body else brackets

        keys = [
            f'{json.dumps(name)}: {{"kind": "{info.kind}", "shape": {list(info.shape)}, "dtype": "{info.dtype}"}}'
            for name, info in sorted(self.tensors.items(), key=lambda item: natural_key(item[0]))
        ]
        aliases = [f"{json.dumps(a)}: {json.dumps(b)}" for a, b in sorted(self.aliases.items())]
        return (
            f'{{\n "aliasmix_manifest": {VERSION},\n "class": {json.dumps(self.class_name)},\n'
            f' "keys": {block(keys, "{}")},\n'
            f' "buffers_non_persistent": {block([json.dumps(n) for n in self.buffers_non_persistent], "[]")},\n'
            f' "ties": {block([json.dumps(group) for group in self.ties], "[]")},\n'
            f' "aliases": {block(aliases, "{}")},\n'
            f' "meta": {{"created_with": "aliasmix manifest"}}\n}}\n'
        )

    def write(self, path: StrPath) -> None:
        """Writes the file in one step, so that a reader or a second writer never sees half of it.

        A link is followed; a device or a pipe, such as /dev/stdout, is written to and not replaced.

        Raises:
            OSError: It cannot be written; nothing is left behind.
        """
        target = Path(path)
        if target.exists() and not target.is_file():
            target.write_text(self.to_json(), encoding="utf-8")
            return
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            partial.write_text(self.to_json(), encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def write_manifest(source: nn.Module | StrPath, path: StrPath) -> None:
    """Writes the manifest of a module, or of a checkpoint's file or folder, whose keys have kind `tensor`.

    Raises:
        UnreadableFileError: The checkpoint cannot be read.
    """
    manifest_of(source).write(path)


def check_manifest(
    source: nn.Module | StrPath, path: StrPath, *, allow_added: Collection[str] = ()
) -> Report:
    """Compares a module or a checkpoint with its manifest.

    Args:
        source: The module, or a checkpoint's file or folder.
        path: The manifest.
        allow_added: Shell patterns of keys that the manifest need not have.

    Raises:
        UnreadableFileError: The manifest or the checkpoint cannot be read.
    """
    reference, current = Manifest.read(path), manifest_of(source)
    return Report(compare_manifests(reference, current, allow_added), {"keys": len(current.tensors)})


@paused_collection()
def manifest_of(source: nn.Module | StrPath) -> Manifest:
    """Returns the manifest of a module, or of a checkpoint's file or folder."""
    if isinstance(source, (str, os.PathLike)):
        from aliasmix.checkpointcheck import checkpoint_tensors

        return Manifest(checkpoint_tensors(source))
    return Manifest.of_module(source)


@paused_collection()
def compare_manifests(
    reference: Manifest, current: Manifest, allow_added: Collection[str] = ()
) -> list[Finding]:
    """Returns what changed. Ties and aliases are compared where both sides are of modules.

    A buffer that is not saved is no key: that it came or went is no finding, that it was a key or became one is.
    """
    if not (reference.class_name and current.class_name):
        return compare_keys(reference.tensors, current.tensors, allow_added)
    findings = []
    unsaved_then, unsaved_now = set(reference.buffers_non_persistent), set(current.buffers_non_persistent)
    then, now = dict(reference.tensors), dict(current.tensors)
    for name in sorted(unsaved_now & then.keys() | unsaved_then & now.keys(), key=natural_key):
        states = ("saved", "not saved") if name in then else ("not saved", "saved")
        findings.append(finding("KIND", (name,), "the buffer was {}, is now {} (persistent=...)".format(*states)))
        then.pop(name, None)
        now.pop(name, None)
    findings += compare_keys(then, now, allow_added)
    old_ties, new_ties = set(_sorted_ties(reference.ties)), set(_sorted_ties(current.ties))
    for group in sorted(old_ties ^ new_ties):
        present = [name for name in group if name in (current if group in old_ties else reference).tensors]
        if len(present) < 2:
            continue  # names came or went; that is told
        state = "were one tensor and are not any more" if group in old_ties else "are one tensor and were not"
        findings.append(finding("TIE_CHANGED", group, f"these keys {state}"))
    for name in sorted(reference.aliases.keys() | current.aliases.keys()):
        before, after = reference.aliases.get(name), current.aliases.get(name)
        if before != after:
            detail = f"stood for {before!r}, now for {after!r}" if before and after else f"a new alias of {after!r}"
            findings.append(finding("ALIAS_CHANGED", (name,), detail if after else f"stood for {before!r}, is gone"))
    return findings


def _sorted_ties(groups: Any) -> list[tuple[str, ...]]:
    return sorted(tuple(sorted(group, key=natural_key)) for group in groups)


def _expect(path: StrPath, content: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = content.get(name, default)
    if not isinstance(value, kind):
        raise UnreadableFileError(path, f"{name!r} is a {type(value).__name__}, expected a {kind.__name__}")
    return value


def _tensors(path: StrPath, keys: dict[str, Any]) -> dict[str, TensorInfo]:
    """Reads the entries; equal ones become one object, as most of a large model's are."""
    known: dict[Any, TensorInfo] = {}
    tensors = {}
    for name, entry in keys.items():
        try:
            layout = (entry["kind"], entry["dtype"], *entry["shape"])
            info = known.get(layout)
        except (KeyError, TypeError):
            _refuse_entry(path, name)
        if info is None:
            kind, dtype, *shape = layout
            if not (type(kind) is type(dtype) is str and all(type(n) is int and n >= 0 for n in shape)):
                _refuse_entry(path, name)
            info = known[layout] = TensorInfo(tuple(shape), dtype, kind)
        tensors[name] = info
    return tensors


def _refuse_entry(path: StrPath, name: str) -> NoReturn:
    raise UnreadableFileError(
        path, f'entry {name!r} is not of the form {{"kind": "param", "shape": [8, 4], "dtype": "float32"}}'
    ) from None
