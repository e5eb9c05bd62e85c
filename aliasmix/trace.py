"""trace_registrations: finds the line that gave a module its second name.

Knows nothing of aliases: it watches the registrations of nn.Module, also those that no guard saw. What is written into
`_modules` directly is not seen by nn.Module either; `aliasmix.check_module` finds it, without a line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

_NOT_THE_CAUSE = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))

Edge = tuple[int, str, int]  # id of the parent, name, id of the child


@dataclass(frozen=True, slots=True)
class Registration:
    """One write that registered a module which the same tree already had.

    Attributes:
        owner: Class of the module that was written to.
        name: The attribute.
        value: Class of the module that was assigned.
        also: The other places of that module, each as "Class.attribute".
        file, line: Where the write is, past torch's and aliasmix's own frames.
    """

    owner: str
    name: str
    value: str
    also: tuple[str, ...]
    file: str
    line: int

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line}: {self.owner}.{self.name} registers a {self.value} "
            f"that already is {', '.join(self.also)}"
        )


@contextmanager
def trace_registrations() -> Iterator[list[Registration]]:
    """Collects the second registrations that the block made and left in place.

    Modules that were registered before the block count as the first; a module that two unrelated trees share does not
    count.

    Example:
        >>> from torch import nn
        >>> from aliasmix import trace_registrations
        >>> wrapper = nn.Module()
        >>> wrapper.language_model = nn.Linear(2, 2)
        >>> with trace_registrations() as found:
        ...     wrapper.model = wrapper.language_model
        >>> print(found[0].name, found[0].also)
        model ('Module.language_model',)

    Yields:
        A list that is empty until the block ends, and then has one entry for each further name of a module.
    """
    found: list[Registration] = []
    writes: dict[Edge, tuple[nn.Module, nn.Module, str, int]] = {}

    def note(owner: nn.Module, name: str, value: nn.Module | None) -> None:
        if value is not None:
            edge = id(owner), name, id(value)
            writes.pop(edge, None)  # the latest write goes last
            writes[edge] = owner, value, *_offending_line()

    handle = register_module_module_registration_hook(note)
    try:
        yield found
    finally:
        handle.remove()
        found.extend(_second_registrations(writes))


def _second_registrations(writes: dict[Edge, tuple[nn.Module, nn.Module, str, int]]) -> Iterator[Registration]:
    order = {edge: position for position, edge in enumerate(writes)}
    also: dict[Edge, set[str]] = {}
    for root in {id(owner): owner for owner, *_ in writes.values()}.values():
        tree = _edges(root)
        places: dict[int, list[Edge]] = {}
        for edge in tree:
            places.setdefault(edge[2], []).append(edge)
        for edges in places.values():
            # The first name of a module is its home; those from before the block come first.
            for edge in sorted(edges, key=lambda edge: order.get(edge, -1))[1:]:
                if edge in writes:
                    also.setdefault(edge, set()).update(tree[other] for other in edges if other != edge)
    for edge, (owner, value, file, line) in writes.items():
        if edge in also:
            places_of_it = tuple(sorted(also[edge]))
            yield Registration(type(owner).__name__, edge[1], type(value).__name__, places_of_it, file, line)


def _edges(root: nn.Module) -> dict[Edge, str]:
    edges: dict[Edge, str] = {}
    todo, seen = [root], {id(root)}
    while todo:
        module = todo.pop()
        for name, child in module._modules.items():
            if child is None:
                continue
            edges[id(module), name, id(child)] = f"{type(module).__name__}.{name}"
            if id(child) not in seen:
                seen.add(id(child))
                todo.append(child)
    return edges


def _offending_line() -> tuple[str, int]:
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith(_NOT_THE_CAUSE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
