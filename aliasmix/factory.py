"""Builds the module that `pkg.mod:factory` names. Knows no check and no command line."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class FactoryError(Exception):
    """A factory cannot be imported, raises, or returns no module. The cause is chained."""


def build(spec: str, arguments: Mapping[str, Any], device: str = "meta") -> nn.Module:
    """Imports and calls a factory: a function, a class, or a dotted path to one, as `pkg.mod:Class.from_tiny`.

    The current directory is importable, as under `python -m`. What the factory prints goes to stderr.

    Args:
        spec: "module:attribute".
        arguments: Keyword arguments.
        device: Where it creates its tensors; "meta" allocates nothing.

    Raises:
        ValueError: The spec is not of the form "module:attribute".
        FactoryError: See there.
    """
    module_name, colon, path = spec.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"{spec!r} is not of the form 'package.module:factory'")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    with contextlib.redirect_stdout(sys.stderr):
        factory = _import(spec, module_name, path)
        import torch

        try:
            with torch.device(device):
                module = factory(**arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also what sys.exit and pytest.skip raise
            hint = "; if it reads values while it builds, try --device cpu" if device == "meta" else ""
            raise FactoryError(f"{spec} raised {type(error).__name__}: {error}{hint}") from error
    if not isinstance(module, torch.nn.Module):
        raise FactoryError(f"{spec} returned something of type {type(module).__name__}, expected a torch.nn.Module")
    return module


def _import(spec: str, module_name: str, path: str) -> Any:
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            if not hasattr(found, name):
                raise FactoryError(f"{spec}: {getattr(found, '__name__', found)} has no {name!r}")
            found = getattr(found, name)
    except (FactoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        hint = f"; write {module_name[:-3]}:{path}" if module_name.endswith(".py") else ""
        raise FactoryError(f"{spec}: cannot import {module_name}: {type(error).__name__}: {error}{hint}") from error
    if not callable(found):
        raise FactoryError(f"{spec} is of type {type(found).__name__}, expected something to call")
    return found
