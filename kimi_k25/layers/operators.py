"""Torch operators of kernels, with little between the call and the launch: `custom_op` costs a decode step 60 us each,
and the first of a process a second, in which it imports torch's compiler.

An operator is what a graph tape sees; a raw Triton launch it would not. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

__all__ = ["kernel_op"]

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("kimi_k25", "FRAGMENT")


class _KernelOp(Generic[P, R]):
    """An operator of this package, called as the function that implements it."""

    def __init__(self, name: str, fn: Callable[P, R], mutates_args: Sequence[str]) -> None:
        self._name = name
        _LIBRARY.define(name + torch.library.infer_schema(fn, mutates_args=mutates_args))
        # One implementation for all devices, and no gradient but what register_autograd adds.
        _LIBRARY.impl(name, fn, "CompositeExplicitAutograd")
        self._op: Any = getattr(torch.ops.kimi_k25, name).default
        self.__doc__ = fn.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._op(*args, **kwargs)
        return result

    def register_fake(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Says what shapes come out, without running."""
        torch.library.register_fake(f"kimi_k25::{self._name}", fn, lib=_LIBRARY)
        return fn

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Says how gradients flow; both as torch.library.register_autograd takes them."""
        torch.library.register_autograd(
            f"kimi_k25::{self._name}", backward, setup_context=setup_context, lib=_LIBRARY
        )


def kernel_op(*, mutates_args: Sequence[str] = ()) -> Callable[[Callable[P, R]], _KernelOp[P, R]]:
    """Decorates a kernel's launcher; its type annotations are the operator's schema.

    Args:
        mutates_args: Names of the tensors that it writes.
    """
    return lambda fn: _KernelOp(fn.__name__, fn, mutates_args)
