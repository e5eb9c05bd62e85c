"""GuardedSetattrMixin: makes nn.Module's attribute writes ask the alias of that name first.

Knows nothing of what an alias answers; that is `aliasmix.alias`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from aliasmix.alias import ReadOnlyAlias, aliases
from aliasmix.errors import AliasDefinitionError

# To a type checker the mixin is a module, so that a wrong order of bases is an error there too.
if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object


class GuardedSetattrMixin(_Base):
    """Keeps what is assigned to an alias out of the registration. Goes before nn.Module in the bases.

    nn.Module.__setattr__ looks at the value first, and registers a module under the alias's name without asking any
    property or descriptor. With this mixin `setattr`, `add_module`, `register_module` and `set_submodule` obey the
    alias's policy. What writes around them (`nn.Module.__setattr__(w, ...)`, `w._modules[...] = ...`,
    `register_parameter`, `register_buffer`) is left to nn.Module; `aliasmix.check_module` finds what it did.

    Raises:
        AliasDefinitionError: When a subclass is made whose aliases cannot work; the message has the corrected line.
    """

    _alias_table: ClassVar[Mapping[str, ReadOnlyAlias[Any]]] = {}
    _guard_next: ClassVar[Any] = object  # whose __setattr__ super() would find; super() itself takes another 0.06 us

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_order(cls)
        check_table(cls, aliases(cls))
        look_up_once(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        table = type(self)._alias_table
        if name in table:
            table[name].__set__(self, value)
        else:
            type(self)._guard_next.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        # What nn.Module.__getattr__ does, with `_modules` first. Calling it for parameters and buffers would add
        # 0.25 us to each read of one; this adds 0.05 us at most, and reads a submodule faster than nn.Module does.
        state = self.__dict__
        if "_modules" in state:
            if name in (modules := state["_modules"]):
                return modules[name]  # type: ignore[no-any-return]
            if name in (parameters := state["_parameters"]):
                return parameters[name]  # type: ignore[no-any-return]
            if name in (buffers := state["_buffers"]):
                return buffers[name]  # type: ignore[no-any-return]
        table = type(self)._alias_table
        if name in table:  # the alias has failed, and Python has dropped its AttributeError
            raise AttributeError(table[name].explain(self))
        return super().__getattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """nn.Module.add_module, where an alias of that name decides first. `register_module` comes here too."""
        table = type(self)._alias_table
        if name in table:
            table[name].__set__(self, module)
        else:
            super().add_module(name, module)


def look_up_once(cls: type[GuardedSetattrMixin]) -> None:
    """Looks up what every write needs, when the class is made or has changed."""
    cls._alias_table = aliases(cls)
    after = cls.__mro__[cls.__mro__.index(GuardedSetattrMixin) + 1 :]
    cls._guard_next = next(base for base in after if "__setattr__" in vars(base))


def check_order(cls: type) -> None:
    """Raises AliasDefinitionError where nn.Module comes before the guard, so that its __setattr__ would run instead."""
    mro = cls.__mro__
    if nn.Module in mro and mro.index(nn.Module) < mro.index(GuardedSetattrMixin):
        given = ", ".join(base.__name__ for base in cls.__bases__)
        guarded_first = sorted(cls.__bases__, key=lambda base: not issubclass(base, GuardedSetattrMixin))
        needed = ", ".join(base.__name__ for base in guarded_first)
        raise AliasDefinitionError(
            f"`class {cls.__name__}({given})`: nn.Module.__setattr__ runs first and the guard never does; "
            f"write `class {cls.__name__}({needed})`"
        )


def check_table(cls: type, table: Mapping[str, ReadOnlyAlias[Any]]) -> None:
    """Raises AliasDefinitionError where an alias of a class has a name or a target that cannot work."""
    for name, alias in table.items():
        line = f"{cls.__name__}.{name} = ReadOnlyAlias({alias.target!r})"
        if hasattr(nn.Module, name) or name in nn.Module().__dict__:
            raise AliasDefinitionError(f"{line}: nn.Module has an attribute {name!r} itself; choose another name")
        if alias.name is None:
            raise AliasDefinitionError(
                f"{line} was set after its class was made, where no guard knows of it; "
                f"write `install_alias({cls.__name__}, {name!r}, {alias.target!r})`"
            )
        if alias.name != name:
            raise AliasDefinitionError(
                f"{line}: this alias already is {alias.name!r}; write a ReadOnlyAlias({alias.target!r}) for each name"
            )
        path = [name]
        while path[-1] in table and path.count(path[-1]) == 1:
            path.append(table[path[-1]].parts[0])
        if path[-1] == name:
            loop = " -> ".join(path)
            example = f"{name} = ReadOnlyAlias('language_model')"
            raise AliasDefinitionError(
                f"{line}: an alias cannot lead back to itself ({loop}); point it at a registered attribute, "
                f"for example `{example}`"
            )


def is_guarded(cls: type[nn.Module], name: str) -> bool:
    """Whether a module assigned to `name` stays out of the registration, tried out on a bare instance of the class.

    Only trying tells: a subclass's own __setattr__ may call nn.Module's and pass the guard by.
    """
    bare = object.__new__(cls)
    nn.Module.__init__(bare)
    alias = aliases(cls).get(name)
    has_warned = alias is not None and alias._has_warned
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        setattr(bare, name, nn.Module())
    if alias is not None:
        alias._has_warned = has_warned
    return name not in bare._modules
