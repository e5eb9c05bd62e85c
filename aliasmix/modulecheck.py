"""check_module: what is registered twice, shared, cyclic, hidden, or aliased wrongly. Knows no file and no manifest."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from aliasmix.alias import ReadOnlyAlias
from aliasmix.alias import aliases as aliases_of
from aliasmix.guard import is_guarded
from aliasmix.names import is_under, parse_rule, prefixes, replace_prefix
from aliasmix.report import Finding, Report, finding
from aliasmix.storage import extent, overlap, span, storage_key
from aliasmix.walk import Slot, Walk, join, walk


def check_module(
    module: nn.Module, *, allow: Collection[str] = (), aliases: bool = True, unregistered: bool = False
) -> Report:
    """Checks that every module and tensor has one name, and that aliases lead where they should.

    Reads no data: the module may be on the meta device, fake, quantised or sharded, and may contain itself.

    Args:
        module: The root.
        allow: Rules `a = b` for names that are meant to share, e.g. "lm_head = model.embed_tokens"; whatever
            lies below `a` may be the same as what lies below `b`. Hugging Face's `_tied_weights_keys` is read too.
        aliases: Whether to follow the aliases of each class, and to try out their guards.
        unregistered: Whether to look for modules in plain attributes, lists, tuples and dicts.

    Returns:
        A report with one finding for each duplicated module, set of tied tensors, cycle, and so on.

    Raises:
        ValueError: A rule is not of the form `a = b`.
    """
    found = walk(module)
    ties = _Ties(allow, found)
    findings = [
        finding(
            "CYCLE",
            (path, ancestor or "(root)"),
            f"{path!r} is {ancestor!r} again, one of its own parents; state_dict() and named_modules() recurse",
            "keep the link out of the registration: `self.__dict__['parent'] = parent`, or a weakref",
        )
        for path, ancestor in found.cycles
    ]
    findings += _duplicates(found, ties)
    findings += _shared_tensors(found, ties)
    findings += _shadowed(found)
    if aliases:
        findings += _alias_findings(found)
    if unregistered:
        findings += _unregistered(found)
    findings += [
        finding("ALLOW_UNUSED", (f"{a} = {b}",), "this rule allows nothing that was found")
        for a, b in ties.rules
        if (a, b) not in ties.used
    ]
    stats = {"modules": len(found.modules), "tensors": len(found.slots)}
    return Report(findings, stats)


def assert_clean(module: nn.Module, **options: Any) -> None:
    """Raises AssertionError with the rendered report if `check_module(module, **options)` finds an error."""
    report = check_module(module, **options)
    if not report.ok:
        raise AssertionError(f"{type(module).__name__} is not clean\n{report.render()}")


class _Ties:
    """Which names are meant to share: the caller's rules, and what Hugging Face classes declare."""

    def __init__(self, rules: Iterable[str], found: Walk) -> None:
        self.rules = [parse_rule(rule) for rule in rules]
        self.used: set[tuple[str, str]] = set()
        self.declared: list[tuple[str, Any]] = [
            (path, keys)
            for path, module in found.modules.items()
            if (keys := getattr(module, "_tied_weights_keys", None))
        ]

    def reason(self, names: list[str]) -> str:
        """Returns why these names may share, or "" if nothing says so of all of them."""
        parent = {name: name for name in names}

        def top(name: str) -> str:
            while parent[name] != name:
                name = parent[name]
            return name

        used = []
        for rule in self.rules:
            for name in names:
                for a, b in (rule, rule[::-1]):
                    if is_under(name, a) and (other := replace_prefix(name, a, b)) in parent:
                        parent[top(name)] = top(other)
                        used.append(rule)
        by_rule = dict.fromkeys(used)
        by_class = []
        for prefix, keys in self.declared:
            declared = [name for name in names if is_under(name, prefix) and _declares(keys, name[len(prefix) :])]
            if declared and not isinstance(keys, Mapping):  # the targets only: any one name may be their source
                declared += [name for name in names if name not in declared][:1]
            for name in declared[1:]:
                if top(name) != top(declared[0]):
                    parent[top(name)] = top(declared[0])
                    by_class.append(prefix or "the root")
        if len({top(name) for name in names}) > 1:
            return ""
        self.used.update(by_rule)
        reasons = [f"allowed by '{a} = {b}'" for a, b in by_rule]
        reasons += [f"declared by _tied_weights_keys of {owner}" for owner in dict.fromkeys(by_class)]
        return ", ".join(reasons)


def _declares(keys: Mapping[str, str] | Iterable[str], name: str) -> bool:
    """Whether a class's `_tied_weights_keys`, target -> source since transformers 5, speak of a name."""
    patterns = [*keys.keys(), *keys.values()] if isinstance(keys, Mapping) else keys
    return any(re.match(pattern, name.lstrip(".")) for pattern in patterns)


def _duplicates(found: Walk, ties: _Ties) -> Iterator[Finding]:
    duplicates = [paths for paths in found.paths.values() if len(paths) > 1]
    saved: dict[str, list[str]] = {paths[0]: [] for paths in duplicates}
    for slot in found.slots if saved else ():
        for prefix in prefixes(slot.name):
            if slot.persistent and prefix in saved:
                saved[prefix].append(slot.name[len(prefix) :])
    for paths in duplicates:
        module = found.modules[paths[0]]
        below = saved[paths[0]]
        detail = f"one {type(module).__name__} is registered under {len(paths)} names"
        if not below:
            yield finding("DUP_MODULE", paths, f"{detail}; it adds no state_dict key", severity="info")
            continue
        reason = ties.reason(paths)
        if not reason:
            reasons = {ties.reason([path + rest for path in paths]) for rest in below}
            reason = "" if "" in reasons else ", ".join(sorted(reasons))
        if reason:
            yield finding("DUP_MODULE", paths, f"{detail}, {reason}", severity="info")
            continue
        extra = len(below) * (len(paths) - 1)
        detail += f": {extra:,} state_dict key{'s' if extra > 1 else ''} too many"
        for path in paths[1:]:
            if hidden_by := _hidden_by(found, path):
                detail += f"; {path!r} is hidden by {hidden_by} and cannot be read back"
        yield finding("DUP_MODULE", paths, detail, _one_name(paths))


def _one_name(paths: list[str]) -> str:
    """Says how to get rid of the second name."""
    parent, _, name = paths[1].rpartition(".")
    allow = f"or allow '{paths[1]} = {paths[0]}'"
    if is_under(paths[0], parent) and not name.isdigit():
        target = paths[0][len(parent) :].lstrip(".")
        return f"declare `{name} = ReadOnlyAlias({target!r})` instead of assigning, {allow}"
    return f"register it once, {allow}"


def _hidden_by(found: Walk, path: str) -> str:
    """Returns what hides a registered name from a read, or ""."""
    parent, _, name = path.rpartition(".")
    owner = found.modules[parent]
    for cls in type(owner).__mro__:
        if name in vars(cls):
            return f"{cls.__name__}.{name} ({type(vars(cls)[name]).__name__})"
    return f"an entry of __dict__ of {parent or 'the root'}" if name in owner.__dict__ else ""


def _shared_tensors(found: Walk, ties: _Ties) -> Iterator[Finding]:
    by_storage: dict[int, list[Slot]] = {}
    for slot in found.slots:
        by_storage.setdefault(storage_key(slot.tensor), []).append(slot)
    for slots in by_storage.values():
        if len(slots) == 1:
            continue
        same: dict[Any, list[Slot]] = {}
        for slot in slots:
            place = extent(slot.tensor)
            key = (place[:3], slot.tensor.dtype) if place else id(slot.tensor)
            same.setdefault(key, []).append(slot)
        for tied in same.values():
            if len(tied) > 1:
                yield _tied([slot.name for slot in tied], ties)
        yield from _views([tied[0] for tied in same.values()], ties)


def _tied(names: list[str], ties: _Ties) -> Finding:
    if reason := ties.reason(names):
        return finding("TIED_TENSOR", names, f"one tensor under {len(names)} names, {reason}", severity="info")
    return finding(
        "TIED_TENSOR",
        names,
        f"one tensor under {len(names)} names; safetensors' save_file refuses to save it",
        f"if the tie is meant, allow '{names[1]} = {names[0]}'",
    )


def _views(slots: list[Slot], ties: _Ties) -> Iterator[Finding]:
    """Tells views of one storage that overlap from those that do not, by a sweep over their spans."""
    if len(slots) < 2:
        return
    parent = list(range(len(slots)))

    def top(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    open_views: list[tuple[int, int]] = []
    for begin, end, i in sorted((*span(slot.tensor), i) for i, slot in enumerate(slots)):
        open_views = [(other_end, j) for other_end, j in open_views if other_end > begin]
        for _, j in open_views:
            if top(i) != top(j) and overlap(slots[i].tensor, slots[j].tensor):
                parent[top(i)] = top(j)
        open_views.append((end, i))
    groups: dict[int, list[str]] = {}
    for i, slot in enumerate(slots):
        groups.setdefault(top(i), []).append(slot.name)
    for names in groups.values():
        if len(names) > 1:
            reason = ties.reason(names)
            yield finding(
                "SHARED_STORAGE",
                names,
                f"tensors of different layout overlap in one storage{', ' + reason if reason else ''}; "
                "a write to one changes the others, and safetensors' save_file refuses them",
                "" if reason else "clone() all but one of them",
                severity="info" if reason else "error",
            )
    if len(groups) > 1:
        names = [names[0] for names in groups.values()]
        yield finding("DISJOINT_VIEWS", names, f"{len(names):,} tensors are slices of one storage and do not overlap")


def _shadowed(found: Walk) -> Iterator[Finding]:
    classes = {type(module) for module in found.modules.values()}
    attributes = {cls: {name for base in cls.__mro__ for name in vars(base)} for cls in classes}
    alias_names = {cls: set(aliases_of(cls)) for cls in classes}
    for path, module in found.modules.items():
        cls = type(module)
        for kind in ("_modules", "_parameters", "_buffers"):
            for name, value in getattr(module, kind).items():
                if value is None or not (name in attributes[cls] or name in module.__dict__):
                    continue
                if _reads_as(module, name, value):
                    continue
                if isinstance(value, nn.Module) and len(found.paths[id(value)]) > 1:
                    continue  # told as a duplicate
                yield finding(
                    "SHADOWED_REGISTRATION",
                    (join(path, name),),
                    f"a {type(value).__name__} in {kind} is hidden by {_hidden_by(found, join(path, name))}: "
                    "state_dict() has it, no read reaches it",
                    f"rename one of them, or `del` the entry from {kind}",
                )
        for name in alias_names[cls] & module.__dict__.keys():
            yield finding(
                "SHADOWED_REGISTRATION",
                (join(path, name),),
                f"a {type(module.__dict__[name]).__name__} in __dict__ is hidden by the alias {cls.__name__}.{name}",
                f"`del module.{name}` removes it",
            )


def _reads_as(module: nn.Module, name: str, value: object) -> bool:
    try:
        return getattr(module, name) is value
    except Exception:  # a property is anyone's code
        return False


def _alias_findings(found: Walk) -> Iterator[Finding]:
    parameters = {id(slot.tensor) for slot in found.slots}
    tables = {cls: aliases_of(cls) for cls in {type(module) for module in found.modules.values()}}
    tried: set[type] = set()
    for path, module in found.modules.items():
        cls = type(module)
        for name, alias in tables[cls].items():
            yield from _alias(join(path, name), module, alias, found, parameters)
            if cls not in tried and not is_guarded(cls, name):
                yield finding(
                    "ALIAS_UNGUARDED",
                    (join(path, name),),
                    f"assigning a module to {cls.__name__}.{name} registers it a second time; "
                    f"{_setattr_owner(cls)}.__setattr__ does not come to the guard",
                    "call super().__setattr__ in it, and put GuardedSetattrMixin before nn.Module",
                )
            if getattr(cls, "base_model_prefix", "") == name:
                yield finding(
                    "ALIAS_IS_BASE_MODEL_PREFIX",
                    (join(path, name),),
                    f"{cls.__name__}.base_model_prefix = {name!r} names an alias; from_pretrained looks for it in the "
                    "keys, and loads nothing from a base model's checkpoint",
                    f"base_model_prefix = {alias.target!r}",
                )
        tried.add(cls)


def _alias(
    path: str, module: nn.Module, alias: ReadOnlyAlias[Any], found: Walk, parameters: set[int]
) -> Iterator[Finding]:
    try:
        value: Any = ReadOnlyAlias[Any](alias.target).__get__(module)
    except Exception:  # a property on the way is anyone's code
        yield finding("ALIAS_UNRESOLVED", (path,), alias.explain(module), f"set .{alias.target}, or drop the alias")
        return
    if value is None:
        if not alias.none_is_missing:
            yield finding(
                "ALIAS_UNRESOLVED",
                (path,),
                f"{alias.target!r} is None, yet hasattr() says that the alias is there",
                f"ReadOnlyAlias({alias.target!r}, none_is_missing=True)",
                severity="warning",
            )
        return
    inner = getattr(value, "_orig_mod", value)  # torch.compile's wrapper stands for what it wraps
    if alias.expect is not None and not isinstance(inner, alias.expect):
        yield finding(
            "ALIAS_TYPE",
            (path,),
            f"{alias.target!r} is a {type(value).__name__}, expected a {alias.expect.__name__}",
        )
    registered = found.paths if isinstance(value, nn.Module) else parameters
    if isinstance(value, (nn.Module, nn.Parameter)) and id(value) not in registered:
        yield finding(
            "ALIAS_TARGET_UNREGISTERED",
            (path,),
            f"{alias.target!r} is a {type(value).__name__} that nothing registers; state_dict() does not have it",
            f"assign it to a plain attribute of a module: self.{alias.parts[0]} = ...",
        )


def _setattr_owner(cls: type) -> str:
    return next(base.__name__ for base in cls.__mro__ if "__setattr__" in vars(base))


def _unregistered(found: Walk) -> Iterator[Finding]:
    for path, module in found.modules.items():
        for name, value in module.__dict__.items():
            if name in ("_modules", "_parameters", "_buffers"):
                continue
            for where, child in _modules_in(name, value):
                if id(child) not in found.paths:
                    yield finding(
                        "UNREGISTERED_MODULE",
                        (join(path, where),),
                        f"a {type(child).__name__} in {type(module).__name__}.{name} ({type(value).__name__}) is not "
                        "registered: no state_dict() key, no .to(), no optimizer",
                        "use nn.ModuleList or nn.ModuleDict, or assign it to an attribute",
                    )


def _modules_in(name: str, value: object) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            if isinstance(item, nn.Module):
                yield f"{name}[{i}]", item
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, nn.Module):
                yield f"{name}[{key!r}]", item
