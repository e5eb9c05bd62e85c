"""Differences of two mappings of names to `TensorInfo`, as findings. Knows not where either side comes from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from operator import attrgetter

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
    missing = {name: info for name, info in expected.items() if name not in found}
    unexpected = {name: info for name, info in found.items() if name not in expected}
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
    findings += _changed("CKPT_SHAPE", expected, found, "shape", "checkpoint has")
    findings += _changed("CKPT_DTYPE", expected, found, "dtype", "checkpoint has")
    return findings


def compare_keys(reference: Tensors, current: Tensors, allow_added: Collection[str] = ()) -> list[Finding]:
    """Compares a reference with what is there now; the kind `tensor` of either side matches any kind.

    Args:
        reference: What was agreed on, e.g. a manifest's.
        current: What there is.
        allow_added: Shell patterns of names that may be added, such as `*.lora_A.*`; these become info.

    Returns:
        KEY_MOVED, KEY_ADDED, KEY_REMOVED, SHAPE, DTYPE and KIND findings, each moved prefix and whole subtree once.
    """
    removed = {name: info for name, info in reference.items() if name not in current}
    added = {name: info for name, info in current.items() if name not in reference}
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
    findings += _changed("SHAPE", reference, current, "shape", "is now")
    findings += _changed("DTYPE", reference, current, "dtype", "is now")
    known = {n: info for n, info in reference.items() if info.kind != "tensor" and n in current}
    now = {n: current[n] for n in known if current[n].kind != "tensor"}
    findings += _changed("KIND", known, now, "kind", "is now")
    return findings


def _changed(code: str, reference: Tensors, current: Tensors, attribute: str, verb: str) -> list[Finding]:
    """Returns a finding for each subtree or name whose attribute changed in the same way."""
    value = attrgetter(attribute)
    changed = {}
    for name, info in reference.items():
        other = current.get(name)
        if other is not None and (a := value(info)) != (b := value(other)):
            changed[name] = f"expected {_plain(a)}, {verb} {_plain(b)}"
    return [_grouped(code, group, str(group.label)) for group in fold(changed, reference)]


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


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
