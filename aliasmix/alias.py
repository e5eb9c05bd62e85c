"""ReadOnlyAlias: a descriptor that reads a dotted path on the module it is declared on.

Knows nothing of how nn.Module stores things away: nn.Module hands modules and parameters to no descriptor,
so a class that declares an alias also needs `aliasmix.GuardedSetattrMixin`, which asks the alias first.
"""

from __future__ import annotations

import warnings
from types import MethodType
from typing import Any, Generic, Literal, Self, cast, overload

from torch import nn
from typing_extensions import TypeVar  # a default (PEP 696) before Python 3.13; torch depends on it

from aliasmix.errors import AliasDefinitionError, AliasTargetError, AliasWriteError

T = TypeVar("T", default=nn.Module)
OnWrite = Literal["error", "ignore", "forward"]

_UNRESOLVED = object()  # stands for the value of an alias whose target is missing


class ReadOnlyAlias(Generic[T]):
    """A second name for something inside a module, which never is a second registration.

    Example:
        >>> from torch import nn
        >>> from aliasmix import GuardedSetattrMixin, ReadOnlyAlias
        >>> class Wrapper(GuardedSetattrMixin, nn.Module):
        ...     model = ReadOnlyAlias("language_model")
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.language_model = nn.Linear(2, 2)
        >>> wrapper = Wrapper()
        >>> wrapper.model = wrapper.model  # as serving engines do: nothing happens
        >>> list(wrapper.state_dict())
        ['language_model.weight', 'language_model.bias']

    Attributes:
        name, owner: Where the alias is declared; None until a class body or `install_alias` says so.
        target, parts: The path as it was given, and split at its dots.
        on_write, none_is_missing, expect: The options as they were given.
    """

    name: str | None = None
    owner: type | None = None

    def __init__(
        self,
        target: str,
        *,
        on_write: OnWrite = "error",
        none_is_missing: bool = False,
        expect: type[T] | None = None,
        doc: str | None = None,
    ) -> None:
        """Declares an alias.

        Args:
            target: Attributes to follow from the module, with dots between them.
            on_write: What becomes of an assigned value that is not the current target. "error" refuses it,
                "ignore" drops it and warns once, "forward" replaces the target by it. The current target
                itself may always be assigned, and nothing happens.
            none_is_missing: Read a target of None as a missing attribute, so that `hasattr` is False.
            expect: The target's type, for type checkers, `resolve` and `explain`; a plain read does not check.
            doc: The attribute's docstring.

        Raises:
            AliasDefinitionError: The target has an empty part, the policy does not exist, or `expect` is no class.
        """
        parts = tuple(target.split(".")) if isinstance(target, str) else ("",)
        if not all(parts):
            raise AliasDefinitionError(
                f"ReadOnlyAlias({target!r}): a target is attribute names with dots between them, "
                "such as 'language_model' or 'language_model.model'"
            )
        if on_write not in ("error", "ignore", "forward"):
            raise AliasDefinitionError(
                f"ReadOnlyAlias({target!r}, on_write={on_write!r}): expected 'error', 'ignore' or 'forward'"
            )
        if expect is not None and not isinstance(expect, type):
            raise AliasDefinitionError(f"ReadOnlyAlias({target!r}, expect={expect!r}): expected one class")
        self.target, self.parts = target, parts
        self.on_write, self.none_is_missing, self.expect = on_write, none_is_missing, expect
        self.__doc__ = doc or f"Read-only alias of {target!r}."
        self._has_warned = False

    def __set_name__(self, owner: type, name: str) -> None:
        if not hasattr(owner, "_alias_table"):
            bases = ", ".join(base.__name__ for base in owner.__bases__ if base is not object)
            guarded = f"class {owner.__name__}(GuardedSetattrMixin{bases and ', '}{bases})"
            raise AliasDefinitionError(
                f"{owner.__name__}.{name} is an alias without a guard: `self.{name} = self.{self.target}` would "
                f"register the module twice; write `{guarded}`"
            )
        self.owner, self.name = owner, name

    @overload
    def __get__(self, obj: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, obj: nn.Module, owner: type | None = None) -> T: ...
    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        # Three rules of torch.compile hold in here: no free variable, no operator.attrgetter, and nothing raised but
        # a plain AttributeError. nn.Module and the guard replace that error by their own, see explain().
        if obj is None:
            return self
        value = obj
        for part in self.parts:
            value = _step(value, part)
        if value is None and self.none_is_missing:
            raise AttributeError(f"{self.target} is None")
        return value

    def __set__(self, obj: nn.Module, value: T) -> None:
        try:
            current: Any = self.__get__(obj)
        except AttributeError:
            current = _UNRESOLVED
        if _is_same(current, value):
            return
        if self.on_write == "forward":
            parent, problem = _follow(obj, self.parts[:-1])
            if problem or parent is None:
                raise AliasWriteError(
                    f"{type(obj).__name__}.{self.name} = ... cannot be forwarded to {self.target!r}: "
                    f"{problem or f'hop {len(self.parts) - 1} {self.parts[-2]!r} is None'}"
                )
            setattr(parent, self.parts[-1], value)
        elif self.on_write == "error":
            raise AliasWriteError(self._refusal(obj, current, value))
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(obj).__name__}.{self.name} is a read-only alias of {self.target!r}: "
                f"the assigned {_describe(value)} is dropped, and later ones without a warning",
                stacklevel=3,  # past the guard, to the line that assigned
            )

    def __delete__(self, obj: nn.Module) -> None:
        # nn.Module has already removed a registration that the alias hides; what is left to repair is __dict__.
        if self.name in obj.__dict__:
            del obj.__dict__[self.name]
        else:
            raise AliasWriteError(
                f"{type(obj).__name__}.{self.name} is a read-only alias of {self.target!r} and cannot be deleted; "
                f"delete .{self.target}, or declare `{self.name} = Unaliased()` in a subclass"
            )

    def resolve(self, obj: nn.Module) -> T:
        """The target, or an error that says which hop is missing (a plain read of an attribute cannot say it all).

        Raises:
            AliasTargetError: A hop is missing or None, or the target is not an instance of `expect`.
        """
        value, problem = self._examine(obj)
        if problem:
            raise AliasTargetError(self.explain(obj))
        return cast(T, value)

    def explain(self, obj: nn.Module) -> str:
        """One line: what the alias resolves to, or why it does not."""
        value, problem = self._examine(obj)
        return f"{type(obj).__name__}.{self.name} -> {self.target!r}: {problem or _describe(value)}"

    def _examine(self, obj: object) -> tuple[object, str | None]:
        value, problem = _follow(obj, self.parts)
        if problem is None and value is None and self.none_is_missing:
            problem = "the target is None"
        elif problem is None and self.expect is not None and not isinstance(value, self.expect):
            problem = f"{_describe(value)}, expected {self.expect.__name__}"
        return value, problem

    def _refusal(self, obj: nn.Module, current: object, value: object) -> str:
        cls, is_set = type(obj).__name__, current is not _UNRESOLVED
        target = _describe(current) if is_set else f"none ({self._examine(obj)[1]})"
        assigned = f"another {_describe(value)}" if type(value) is type(current) else _describe(value)
        lines = [
            f"{cls}.{self.name} is a read-only alias of {self.target!r}",
            f"  current target: {target}   assigned: {assigned}",
        ]
        # nn.Module refuses a parameter or buffer by itself where the attribute already has a value.
        num_keys = _num_keys(value) if isinstance(value, nn.Module) or not is_set else 0
        if num_keys:
            lines.append(
                f"  nn.Module would register it as {self.name!r}, where no read finds it: "
                f"{num_keys} more state_dict key{'s' * (num_keys > 1)}"
            )
        lines.append(f"  fix: assign to .{self.target} instead")
        if isinstance(value, nn.Module) and "_orig_mod" in _registered(value):
            lines[-1] += f"; to compile in place, call .{self.target}.compile()"
        if not is_set:
            lines[-1] += f", before anything assigns {self.name!r} (does the __init__ of a base class?)"
        forward = f"ReadOnlyAlias({self.target!r}, on_write=\"forward\")"
        lines.append(f"       or declare {forward}, which replaces the target")
        lines.append(f"       or declare {self.name} = Unaliased() in a subclass, for an attribute of its own")
        return "\n".join(lines)


def aliases(obj_or_cls: object) -> dict[str, ReadOnlyAlias[Any]]:
    """The aliases in force on a class or on an object's class, by name, inherited ones included.

    An alias that a subclass hides behind an attribute of its own is not in force.
    """
    cls = obj_or_cls if isinstance(obj_or_cls, type) else type(obj_or_cls)
    found: dict[str, ReadOnlyAlias[Any]] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, ReadOnlyAlias):
                found[name] = value
            else:
                found.pop(name, None)
    return found


def explain(obj: nn.Module, name: str) -> str:
    """One line: what the alias `name` of a module resolves to, or which hop of it is missing, None or of a wrong type.

    Raises:
        AliasTargetError: The module's class has no such alias.
    """
    found = aliases(obj)
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise AliasTargetError(f"{type(obj).__name__} has no alias {name!r}; its aliases: {known}")
    return found[name].explain(obj)


def _step(value: Any, part: str) -> Any:
    # `_modules` first: getattr on a submodule builds and drops an AttributeError before it finds anything.
    modules = getattr(value, "_modules", None)
    return modules[part] if type(modules) is dict and part in modules else getattr(value, part)


def _follow(obj: object, parts: tuple[str, ...]) -> tuple[object, str | None]:
    """What a path leads to, or what is wrong with which hop."""
    if isinstance(obj, nn.Module) and "_modules" not in obj.__dict__:
        return None, "nn.Module.__init__ has not run yet"
    value: Any = obj
    for hop, part in enumerate(parts, 1):
        if value is None:
            return None, f"hop {hop - 1} {parts[hop - 2]!r} is None"
        try:
            value = _step(value, part)
        except AttributeError:
            inner = aliases(value).get(part)
            missing = f"hop {hop} {part!r} missing on {type(value).__name__}"
            return None, f"{missing} ({inner.explain(value)})" if inner else missing
        except Exception as error:  # a property is anyone's code
            return None, f"hop {hop} {part!r} of {type(value).__name__} raises {type(error).__name__}: {error}"
    return value, None


def _is_same(current: object, value: object) -> bool:
    # Identity alone: == and bool of a tensor are tensors. A bound method is a new object at every read.
    if type(current) is MethodType and type(value) is MethodType:
        return current.__self__ is value.__self__ and current.__func__ is value.__func__
    return current is value


def _describe(value: object) -> str:
    name = type(value).__name__
    if isinstance(value, nn.Module) and "_orig_mod" in _registered(value):  # what torch.compile(module) returns
        return f"{name} (wrapping {type(value._modules['_orig_mod']).__name__})"
    return "None" if value is None else name


def _registered(module: nn.Module) -> dict[str, Any]:
    return getattr(module, "_modules", {})  # a module whose __init__ has not run has none


def _num_keys(value: object) -> int:
    """How many state_dict keys a value adds; counted in a loop since state_dict() may gather, or recurse for ever.

    What is shared inside the value counts once.
    """
    if not isinstance(value, nn.Module):
        return int(isinstance(value, nn.Parameter) or (isinstance(value, nn.Buffer) and value.persistent))
    num_keys, todo, seen = 0, [value], {id(value)}
    while todo:
        module = todo.pop()
        unsaved = getattr(module, "_non_persistent_buffers_set", ())
        for kind in ("_parameters", "_buffers"):
            entries = getattr(module, kind, {})
            num_keys += sum(entries[name] is not None and name not in unsaved for name in entries)
        for child in _registered(module).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                todo.append(child)
    return num_keys
