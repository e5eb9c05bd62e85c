"""Libraries of the `gpu` extra: imported where first needed, or missing by name. Knows none of their calls."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["INSTALL", "MissingLibraryError", "import_gpu_library"]

INSTALL = "pip install 'aliasmix[kimi,gpu]'"


class MissingLibraryError(ImportError):
    """A library of the `gpu` extra that is not there, or does not import.

    Attributes:
        name: Of the library, as ImportError has it.
    """


def import_gpu_library(package: str, module: str) -> Any:
    """Imports `module`, which `package` on PyPI provides.

    Raises:
        MissingLibraryError: With the reason and the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except Exception as e:  # A broken installation raises AssertionError and RuntimeError too.
        reason = f"{package} is not usable ({type(e).__name__}: {e}); install it with: {INSTALL}"
        raise MissingLibraryError(reason, name=package) from e
