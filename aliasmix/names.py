"""Many dotted names told in few lines: natural order, whole subtrees, renamed prefixes. Knows names, no tensors.

Everything here is near-linear in the number of names, for checkpoints of hundreds of thousands of them.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass

FOLD_FROM = 4  # fewer names than this are listed one by one: they can be searched for as they stand
NEIGHBOURS = 32  # candidates looked at on each side of a name when a rename is sought, and names tried in vain

_NUMBER = re.compile(r"\d+")
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def natural_key(name: str) -> str:
    """Returns a sort key that puts `layers.2` before `layers.10`."""
    return _NUMBER.sub(lambda number: number[0].zfill(8), name)


def pattern(name: str) -> str:
    """Returns the name with every all-digit segment replaced by `*`."""
    return _INDEX.sub("*", name)


def is_under(name: str, prefix: str) -> bool:
    """Whether the name is the prefix, or lies below it; `a.bc` does not lie below `a.b`."""
    return not prefix or name == prefix or name.startswith(prefix + ".")


def replace_prefix(name: str, old: str, new: str) -> str:
    """Returns the name with prefix `old` replaced by `new`, or the name itself if it is not under `old`."""
    if not is_under(name, old):
        return name
    rest = name[len(old) :].lstrip(".")
    return ".".join(part for part in (new, rest) if part)


def parse_rule(rule: str) -> tuple[str, str]:
    """Splits a rule `left = right`, as in `lm_head = model.embed_tokens`.

    Raises:
        ValueError: If the rule has no two sides.
    """
    left, equals, right = (part.strip() for part in rule.partition("="))
    if not (left and equals and right) or "=" in right:
        raise ValueError(f"rule {rule!r} is not of the form 'name = name', as in 'lm_head = model.embed_tokens'")
    return left, right


@dataclass(frozen=True, slots=True)
class Group:
    """Names that share a label.

    Attributes:
        path: The name; `prefix.*` where all names under a prefix are in the group; `a.*.b` for any numbers.
        label: What they share.
        names: The members, in the order given.
    """

    path: str
    label: Hashable
    names: tuple[str, ...]


def fold(labels: Mapping[str, Hashable], universe: Collection[str]) -> list[Group]:
    """Groups labelled names into whole subtrees, then those that differ only in their numbers.

    Args:
        labels: The names to tell, each with what is to be told of it.
        universe: All names there are; a subtree is folded only if every name of it has the same label.

    Returns:
        Groups that together hold each labelled name once, in natural order of their paths.
    """
    if len(labels) < FOLD_FROM:
        return [Group(name, label, (name,)) for name, label in labels.items()]
    mixed = object()
    counts: dict[str, int] = {}
    shared: dict[str, Hashable] = {}
    for name, label in labels.items():
        for prefix in prefixes(name):
            counts[prefix] = counts.get(prefix, 0) + 1
            if shared.setdefault(prefix, label) != label:
                shared[prefix] = mixed
    totals = dict.fromkeys(counts, 0)
    for name in universe:
        for prefix in prefixes(name):
            if prefix not in totals:
                break  # nor is anything below it
            totals[prefix] += 1
    subtrees: dict[tuple[str, Hashable], list[str]] = {}
    for name, label in labels.items():
        path, size = name, 0
        for prefix in prefixes(name):
            if FOLD_FROM <= counts[prefix] == totals[prefix] and shared[prefix] is not mixed:
                if size not in (0, counts[prefix]):
                    break  # deeper only while it says more and loses nothing
                path, size = f"{prefix}.*" if prefix else "*", counts[prefix]
        subtrees.setdefault((path, label), []).append(name)
    numbered: dict[tuple[str, Hashable], list[tuple[str, list[str]]]] = {}
    for (path, label), names in subtrees.items():
        numbered.setdefault((pattern(path), label), []).append((path, names))
    groups = []
    for (path, label), members in numbered.items():
        if len(members) >= FOLD_FROM:
            groups.append(Group(path, label, tuple(name for _, names in members for name in names)))
        else:
            groups += [Group(one, label, tuple(names)) for one, names in members]
    return sorted(groups, key=lambda group: natural_key(group.path))


def prefixes(name: str) -> Iterable[str]:
    """Yields the dotted prefixes of a name, shortest (empty) first, without the name itself."""
    yield ""
    dot = name.find(".")
    while dot >= 0:
        yield name[:dot]
        dot = name.find(".", dot + 1)


@dataclass(frozen=True, slots=True)
class Move:
    """Names that changed their prefix.

    Attributes:
        old, new: The prefixes with `.*`, or the names where there is only one.
        pairs: Every (old name, new name).
    """

    old: str
    new: str
    pairs: tuple[tuple[str, str], ...]


def find_moves(
    removed: Iterable[str], added: Iterable[str], is_same: Callable[[str, str], bool]
) -> list[Move]:
    """Pairs removed names with added ones that differ in a prefix only, one `Move` for each such prefix.

    Names are compared first with their numbers left out, so that 70,000 experts are a handful of comparisons;
    what remains is compared name by name, and paired only where one partner fits best.

    Args:
        removed: Names of the reference only.
        added: Names of the other side only.
        is_same: Whether the two names stand for tensors of the same shape and dtype.
    """
    old_by_pattern, new_by_pattern = _by_pattern(removed), _by_pattern(added)
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    index = _SuffixIndex(new_by_pattern)
    for old, old_names in old_by_pattern.items():
        for new, _ in index.nearest(old):
            if new.count("*") != old.count("*"):
                continue
            new_names = new_by_pattern[new]
            for numbers in [n for n, name in old_names.items() if n in new_names and is_same(name, new_names[n])]:
                pairs.setdefault((old, new), []).append((old_names.pop(numbers), new_names.pop(numbers)))
            if not old_names:
                break
    rest = {name for names in new_by_pattern.values() for name in names.values()}
    index = _SuffixIndex(rest)
    for old_names in old_by_pattern.values() if rest else ():
        num_misses = 0
        for name in old_names.values():
            fits = [(new, score) for new, score in index.nearest(name) if new in rest and is_same(name, new)]
            if fits and (len(fits) == 1 or fits[0][1] != fits[1][1]):
                rest.remove(fits[0][0])
                pairs[name, fits[0][0]] = [(name, fits[0][0])]
            elif (num_misses := num_misses + 1) == NEIGHBOURS:
                break  # names of one pattern are alike: the others will not fit either
    return _by_prefix(pairs)


def _by_pattern(names: Iterable[str]) -> dict[str, dict[tuple[str, ...], str]]:
    """Groups names by pattern, and in each by their numbers."""
    groups: dict[str, dict[tuple[str, ...], str]] = {}
    for name in names:
        groups.setdefault(pattern(name), {})[tuple(_INDEX.findall(name))] = name
    return groups


class _SuffixIndex:
    """Finds the names that share the longest dotted suffix with a name."""

    def __init__(self, names: Iterable[str]) -> None:
        self.reversed = sorted(tuple(reversed(name.split("."))) for name in names)

    def nearest(self, name: str) -> list[tuple[str, tuple[int, int]]]:
        """Returns (name, (shared suffix, shared prefix) in segments), best first; all share the last segment."""
        key = tuple(reversed(name.split(".")))
        at = bisect.bisect_left(self.reversed, key)
        scored = []
        for other in self.reversed[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]:
            if suffix := _shared(key, other):
                scored.append((".".join(reversed(other)), (suffix, _shared(key[::-1], other[::-1]))))
        return sorted(scored, key=lambda item: item[1], reverse=True)


def _shared(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    """Returns how many leading segments are equal."""
    for number, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return number
    return min(len(a), len(b))


def _by_prefix(pairs: Mapping[tuple[str, str], list[tuple[str, str]]]) -> list[Move]:
    """Puts together the pairs whose names differ in the same prefix."""
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[tuple[tuple[str, ...], list[tuple[str, str]]]]] = {}
    for (old, new), names in pairs.items():
        a, b = tuple(old.split(".")), tuple(new.split("."))
        suffix = _shared(a[::-1], b[::-1])
        groups.setdefault((a[: len(a) - suffix], b[: len(b) - suffix]), []).append((a[len(a) - suffix :], names))
    moves = []
    for (before, after), members in groups.items():
        tail = members[0][0]
        if len(members) > 1:
            for suffix_segments, _ in members:
                tail = tail[: _shared(tail, suffix_segments)]
            while tail[-1:] == ("*",):
                tail = tail[:-1]
            tail = (*tail, "*")
        moves.append(
            Move(
                ".".join(before + tail),
                ".".join(after + tail),
                tuple(pair for _, names in members for pair in names),
            )
        )
    return sorted(moves, key=lambda move: natural_key(move.old))
