"""The pytest plugin: alias_check, no_duplicate_registration, @pytest.mark.aliasmix, --aliasmix-update.

Knows pytest and calls the checks; loads torch only when a test asks for one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import nn

    from aliasmix.report import Report
    from aliasmix.trace import Registration

_TRACE: pytest.StashKey[tuple[ExitStack, list[Registration]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("aliasmix").addoption(
        "--aliasmix-update", action="store_true", help="rewrite manifests instead of comparing (never under CI)"
    )
    parser.addini("aliasmix_manifest_dir", "where manifests lie, from the root directory; beside each test if not set")
    parser.addini("aliasmix_allow", "rules 'a = b' for names that are meant to share, one a line", type="linelist")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "aliasmix(factory, arguments={}, device='meta', manifest=None, allow=(), ...): before the test runs, check "
        "what 'pkg.mod:factory', or a callable given as factory=, builds; options as for alias_check",
    )
    if config.getoption("aliasmix_update") and _is_ci():
        raise pytest.UsageError(
            "--aliasmix-update is refused under CI: a manifest that CI rewrites checks nothing; run it on your own "
            "machine and commit what it wrote"
        )


@pytest.fixture
def alias_check(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """A function that fails the test unless a module is clean and has the keys of its manifest.

    `alias_check(module, manifest="keys.json", allow=["lm_head = model.embed_tokens"], allow_added=["*.lora_A.*"],
    unregistered=False)` returns the report. Everything but the module may be left out.
    """

    def check(module: nn.Module, **options: Any) -> Report:
        return _check(request.node, module, **options)

    return check


@pytest.fixture
def no_duplicate_registration(request: pytest.FixtureRequest) -> Generator[None]:
    """Fails the test if it registers a module that the same tree already has, with file and line of the write."""
    from aliasmix.trace import trace_registrations

    with ExitStack() as stack:
        request.node.stash[_TRACE] = (stack, stack.enter_context(trace_registrations()))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    for mark in item.iter_markers("aliasmix"):
        _check_marked(item, *mark.args, **mark.kwargs)
    result = yield
    if _TRACE in item.stash:
        stack, found = item.stash[_TRACE]
        stack.close()  # fills the list
        if found:
            lines = "\n".join(map(str, found))
            pytest.fail(f"{len(found)} second registration{'s' if len(found) > 1 else ''}\n{lines}", pytrace=False)
    return result


def _check_marked(
    item: pytest.Item,
    factory: str | Callable[[], nn.Module],
    *,
    device: str = "meta",
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    import torch

    from aliasmix.factory import FactoryError, build

    if isinstance(factory, str):
        try:
            module = build(factory, arguments or {}, device)
        except (FactoryError, ValueError) as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
    else:
        with torch.device(device):
            module = factory(**(arguments or {}))
    _check(item, module, **options)


def _check(
    item: pytest.Item,
    module: nn.Module,
    *,
    manifest: str | os.PathLike[str] | None = None,
    allow: Collection[str] = (),
    allow_added: Collection[str] = (),
    unregistered: bool = False,
) -> Report:
    from aliasmix.integrity import Manifest, UnreadableFileError, check_manifest, check_module

    report = check_module(module, allow=[*item.config.getini("aliasmix_allow"), *allow], unregistered=unregistered)
    if manifest is not None and report.ok:
        path = _manifest_path(item, manifest)
        if item.config.getoption("aliasmix_update"):
            current = Manifest.of_module(module)
            if not path.exists() or path.read_text(encoding="utf-8") != current.to_json():
                current.write(path)
        elif not path.exists():
            pytest.fail(f"there is no manifest {path}; write it with pytest --aliasmix-update", pytrace=False)
        try:
            report += check_manifest(module, path, allow_added=allow_added)
        except UnreadableFileError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
    if not report.ok:
        again = "\nif this is meant: pytest --aliasmix-update, then review the manifest's diff" if manifest else ""
        pytest.fail(f"{type(module).__name__} is not clean\n{report.render()}{again}", pytrace=False)
    return report


def _manifest_path(item: pytest.Item, manifest: str | os.PathLike[str]) -> Path:
    folder = item.config.getini("aliasmix_manifest_dir")
    return (item.config.rootpath / folder if folder else item.path.parent) / manifest


def _is_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
