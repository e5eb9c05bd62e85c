"""Attribute aliases that never register a module twice, and state-dict integrity checks.

Names are looked up on first use, so that `import aliasmix`, the CLI and the pytest plugin load no torch by themselves.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aliasmix.alias import ReadOnlyAlias, aliases, explain
    from aliasmix.errors import (
        AliasDefinitionError,
        AliasError,
        AliasTargetError,
        AliasWriteError,
        UnreadableFileError,
    )
    from aliasmix.fold import enable_alias_keys, fold_alias_keys
    from aliasmix.guard import GuardedSetattrMixin, is_guarded
    from aliasmix.install import install_alias
    from aliasmix.integrity import (
        Finding,
        Report,
        assert_clean,
        check_checkpoint,
        check_manifest,
        check_module,
        write_manifest,
    )
    from aliasmix.trace import Registration, trace_registrations
    from aliasmix.unaliased import Unaliased

__version__ = "0.1.0"

_HOMES = {
    "alias": ("ReadOnlyAlias", "aliases", "explain"),
    "errors": (
        "AliasDefinitionError",
        "AliasError",
        "AliasTargetError",
        "AliasWriteError",
        "UnreadableFileError",
    ),
    "fold": ("enable_alias_keys", "fold_alias_keys"),
    "guard": ("GuardedSetattrMixin", "is_guarded"),
    "install": ("install_alias",),
    "integrity": (
        "Finding",
        "Report",
        "assert_clean",
        "check_checkpoint",
        "check_manifest",
        "check_module",
        "write_manifest",
    ),
    "trace": ("Registration", "trace_registrations"),
    "unaliased": ("Unaliased",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AliasDefinitionError",
    "AliasError",
    "AliasTargetError",
    "AliasWriteError",
    "Finding",
    "GuardedSetattrMixin",
    "ReadOnlyAlias",
    "Registration",
    "Report",
    "Unaliased",
    "UnreadableFileError",
    "aliases",
    "assert_clean",
    "check_checkpoint",
    "check_manifest",
    "check_module",
    "enable_alias_keys",
    "explain",
    "fold_alias_keys",
    "install_alias",
    "is_guarded",
    "trace_registrations",
    "write_manifest",
]


if not TYPE_CHECKING:  # to a type checker, a name that is not listed above is an error

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
