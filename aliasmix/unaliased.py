"""Unaliased: gives a name back to a subclass whose base class declares an alias of that name.

Knows nothing of the alias it hides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    def Unaliased() -> Any:
        """Any, to a type checker: it stands where the base class has an alias of a certain type."""

else:

    class Unaliased:
        """An ordinary attribute again: `model = Unaliased()` in the subclass, then `self.model = ...` registers.

        A plain `model = None` in the class body would not do: a class attribute hides the registered module.

        Example:
            >>> from torch import nn
            >>> from aliasmix import GuardedSetattrMixin, ReadOnlyAlias, Unaliased
            >>> class Base(GuardedSetattrMixin, nn.Module):
            ...     model = ReadOnlyAlias("language_model")
            >>> class Derived(Base):
            ...     model = Unaliased()
            >>> derived = Derived()
            >>> derived.model = nn.Linear(2, 2)
            >>> list(derived.state_dict())
            ['model.weight', 'model.bias']
        """

        def __set_name__(self, owner, name):
            self.name = name

        def __get__(self, obj, owner=None):
            # Without a __set__, what is in the instance's __dict__ never comes here.
            if obj is None:
                return self
            for registered in (obj._modules, obj._parameters, obj._buffers):
                if self.name in registered:
                    return registered[self.name]
            raise AttributeError(f"{type(obj).__name__!r} object has no attribute {self.name!r}")
