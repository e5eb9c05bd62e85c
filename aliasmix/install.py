"""install_alias: an alias and its guard for a class that somebody else wrote.

Knows nothing of any library; the class is changed in place, and no other class but its subclasses sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from aliasmix.alias import OnWrite, ReadOnlyAlias, aliases
from aliasmix.errors import AliasDefinitionError
from aliasmix.guard import GuardedSetattrMixin, check_table, look_up_once


def install_alias(
    cls: type[nn.Module],
    name: str,
    target: str,
    *,
    on_write: OnWrite = "error",
    none_is_missing: bool = False,
    expect: type[Any] | None = None,
    doc: str | None = None,
) -> ReadOnlyAlias[Any]:
    """Gives a class an alias as if its body declared `name = ReadOnlyAlias(target)` under a GuardedSetattrMixin.

    The mixin becomes the class's first base, so subclasses, earlier and later ones, and existing instances are
    guarded too. A __setattr__ or add_module of the class's own is asked only about names that are no alias.

    Example:
        >>> from torch import nn
        >>> from aliasmix import install_alias
        >>> class TheirWrapper(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.language_model = nn.Linear(2, 2)
        >>> alias = install_alias(TheirWrapper, "model", "language_model")
        >>> wrapper = TheirWrapper()
        >>> wrapper.model = wrapper.model
        >>> list(wrapper.state_dict())
        ['language_model.weight', 'language_model.bias']

    Args:
        cls: The class; a property of that name in it is replaced.
        name: The alias's name.
        target, on_write, none_is_missing, expect, doc: As for `ReadOnlyAlias`.

    Returns:
        The alias.

    Raises:
        AliasDefinitionError: The class is nn.Module itself, has something else of that name, or the alias cannot
            work. The class is unchanged then.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise AliasDefinitionError(f"install_alias expects a class derived from nn.Module, not {cls!r}")
    if cls is nn.Module:
        raise AliasDefinitionError(
            "an alias on nn.Module would be one on every module; give install_alias the wrapper's class"
        )
    hidden = getattr(cls, name, None)
    if hidden is not None and not isinstance(hidden, (property, ReadOnlyAlias)) and not hasattr(nn.Module, name):
        raise AliasDefinitionError(
            f"install_alias({cls.__name__}, {name!r}, ...) would hide {cls.__name__}.{name}, "
            f"a {type(hidden).__name__}; choose another name"
        )
    alias = ReadOnlyAlias[Any](
        target, on_write=on_write, none_is_missing=none_is_missing, expect=expect, doc=doc
    )
    alias.owner, alias.name = cls, name
    check_table(cls, {**aliases(cls), name: alias})
    if not issubclass(cls, GuardedSetattrMixin):
        try:
            cls.__bases__ = (GuardedSetattrMixin, *cls.__bases__)
        except TypeError as error:
            raise AliasDefinitionError(
                f"{cls.__name__} cannot take the guard as its first base ({' '.join(str(error).split())}); where a "
                f"subclass of it has GuardedSetattrMixin already, declare the alias there: "
                f"`{name} = ReadOnlyAlias({target!r})`"
            ) from None
        for method in ("__setattr__", "add_module"):
            if method in vars(cls):
                setattr(cls, method, _alias_first(vars(cls)[method]))
    setattr(cls, name, alias)
    for changed in _with_subclasses(cls):
        look_up_once(changed)
    return alias


def _alias_first(method: Callable[..., None]) -> Callable[..., None]:
    def guarded(self: Any, name: str, value: Any) -> None:
        table = type(self)._alias_table
        if name in table:
            table[name].__set__(self, value)
        else:
            method(self, name, value)

    guarded.__name__, guarded.__qualname__, guarded.__doc__ = method.__name__, method.__qualname__, method.__doc__
    return guarded


def _with_subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)
