"""The exceptions that aliasmix raises; each also is the builtin that a caller would already catch."""


class AliasError(Exception):
    """Base of everything that is about an alias."""


class AliasWriteError(AliasError, AttributeError):
    """Something other than the current target was assigned to an alias, or the alias was deleted."""


class AliasTargetError(AliasError, AttributeError):
    """An alias does not resolve; raised where the reason can be told (`ReadOnlyAlias.resolve`)."""


class AliasDefinitionError(AliasError, TypeError):
    """A class declares an alias that cannot work."""


class UnreadableFileError(ValueError):
    """A checkpoint, index or manifest that cannot be trusted.

    Attributes:
        path: The file.
        reason: What was found in it, and what was expected.
    """

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
