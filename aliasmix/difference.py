"""Differences of two mappings of names to `TensorInfo`, as findings. Knows not where either side comes from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from aliasmix.names import Group, find_moves, fold
from aliasmix.report import Finding, finding
from aliasmix.tensorinfo import TensorInfo

Tensors = Mapping[str, TensorInfo]


def compare_tensors(expected: Tensors, found: Tensors) -> list[Finding]:
    """Compares what a checkpoint should hold with what it holds. Kinds are not compared: a file has none.

    Args:
        expected: Names to load, e.g. a module's.
        found: Names in the checkpoint.

    Returns:
        CKPT_MISSING, CKPT_UNEXPECTED, CKPT_SHAPE and CKPT_DTYPE findings, whole subtrees folded into one each.
    """
    missing, unexpected = _apart(expected, found)
    findings = []
    moves = find_moves(unexpected, missing, lambda a, b: _is_same(unexpected[a], missing[b])) if missing else []
    renames = {
        new: f"{_prefix(move.old)} = {_prefix(move.new)}"
        for move in moves
        if "*" not in _prefix(move.old)
        for _, new in move.pairs
    }
    for group in fold({name: renames.get(name) for name in missing}, expected):
        fix = f"if only the prefix differs, check with the rename '{group.label}'" if group.label else ""
        info = missing[group.names[0]]
        findings.append(
            _grouped("CKPT_MISSING", group, f"not in the checkpoint; expected {_spell(info)}", fix)
        )
    for group in fold(dict.fromkeys(unexpected), found):
        info = unexpected[group.names[0]]
        where = f" ({info.file})" if info.file else ""
        findings.append(
            _grouped("CKPT_UNEXPECTED", group, f"in the checkpoint{where} but not expected: {_spell(info)}")
        )
    return findings + _changed("CKPT_", expected, found, "checkpoint has")


def compare_keys(reference: Tensors, current: Tensors, allow_added: Collection[str] = ()) -> list[Finding]:
    """Compares a reference with what is there now; the kind `tensor` of either side matches any kind.

    Args:
        reference: What was agreed on, e.g. a manifest's.
        current: What there is.
        allow_added: Shell patterns of names that may be added, such as `*.lora_A.*`; these become info.

    Returns:
        KEY_MOVED, KEY_ADDED, KEY_REMOVED, SHAPE, DTYPE and KIND findings, each moved prefix and whole subtree once.
    """
    removed, added = _apart(reference, current)
    findings = []
    moves = find_moves(removed, added, lambda a, b: _is_same(removed[a], added[b])) if removed and added else []
    for move in moves:
        findings.append(
            finding(
                "KEY_MOVED",
                (move.old, move.new),
                f"moved, with shape and dtype unchanged; e.g. {' -> '.join(move.pairs[0])}",
                count=len(move.pairs),
            )
        )
        for old, new in move.pairs:
            del removed[old], added[new]
    for group in fold(dict.fromkeys(removed), reference):
        findings.append(_grouped("KEY_REMOVED", group, f"gone; was {_spell(removed[group.names[0]])}"))
    allowed = {name: any(fnmatchcase(name, pattern) for pattern in allow_added) for name in added}
    for group in fold(allowed, current):
        detail = f"added: {_spell(added[group.names[0]])}"
        severity = {"severity": "info"} if group.label else {}
        findings.append(_grouped("KEY_ADDED", group, detail + (", as allowed" if severity else ""), **severity))
    return findings + _changed("", reference, current, "is now")


def _apart(a: Tensors, b: Tensors) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """Returns what only the one has and what only the other has."""
    if a.keys() == b.keys():  # as a rule, and a fifth of the time of looking
        return {}, {}
    return {name: a[name] for name in a if name not in b}, {name: b[name] for name in b if name not in a}


def _changed(prefix: str, reference: Tensors, current: Tensors, verb: str) -> list[Finding]:
    """Returns a SHAPE, DTYPE or KIND finding for each subtree or name that changed in the same way."""
    changed: dict[str, dict[str, str]] = {"SHAPE": {}, "DTYPE": {}, "KIND": {}}
    for name, info in reference.items():
        other = current.get(name)
        if other is None or (info.shape == other.shape and info.dtype == other.dtype and info.kind == other.kind):
            continue
        for code, before, now in (
            ("SHAPE", list(info.shape), list(other.shape)),
            ("DTYPE", info.dtype, other.dtype),
            ("KIND", info.kind, other.kind),
        ):
            if before != now and not (code == "KIND" and (prefix or "tensor" in (before, now))):
                changed[code][name] = f"expected {before}, {verb} {now}"
    return [
        _grouped(prefix + code, group, str(group.label))
        for code, names in changed.items()
        for group in fold(names, reference)
    ]


def _grouped(code: str, group: Group, detail: str, fix: str = "", **rest: object) -> Finding:
    count = len(group.names)
    if count > 1:
        detail = f"e.g. {group.names[0]}: {detail}"
    return finding(code, (group.path,), detail, fix, count=count, **rest)


def _is_same(a: TensorInfo, b: TensorInfo) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _prefix(path: str) -> str:
    return path.removesuffix("*").removesuffix(".")


def _spell(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}" if info.dtype else info.kind
