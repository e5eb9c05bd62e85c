"""aliasmix check | manifest | inspect | diff | lint: the checks as commands for a shell or a CI step.

Parses first and imports what the command needs after that: torch only where a factory is built.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from aliasmix import __version__
from aliasmix.errors import UnreadableFileError

if TYPE_CHECKING:
    from torch import nn

    from aliasmix.manifest import Manifest
    from aliasmix.report import Report

EXIT_CODES = """\
exit codes: 0 clean, 1 findings (of the severity of --fail-on or graver), 2 usage, 3 the factory failed,
4 a checkpoint, manifest or source file cannot be read or written"""
CLEAN, FOUND, USAGE, FACTORY_FAILED, UNREADABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, except for usage errors, which exit at once.

    A reader that closes the pipe early changes no exit code.
    """
    args = _parser().parse_args(argv)
    from aliasmix.factory import FactoryError

    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a module's code prints is no result
            result: Result = args.run(args)
        _print(result[0])
        return result[1]
    except (FactoryError, OSError, ValueError) as error:
        if args.debug:
            raise
        print(f"aliasmix: error: {error}", file=sys.stderr)
        if isinstance(error, FactoryError):
            return FACTORY_FAILED
        return UNREADABLE if isinstance(error, (OSError, UnreadableFileError)) else USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def _print(text: str) -> None:
    if not text or sys.stdout is None:  # None: it was closed before the start
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know all letters of a name
    try:
        print(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit tries once more
        if not isinstance(error, BrokenPipeError):  # where the reader, such as `head`, has seen enough
            raise


Result = tuple[str, int]  # what stdout gets, exit code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"aliasmix: error: {message}\nsee: {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="aliasmix",
        description="Checks that modules have one name each, and that manifest and checkpoint agree with them.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"aliasmix {__version__}", help="print it and end")
    common = _Parser(add_help=False)
    common.add_argument("--format", choices=("text", "json", "github"), default="text", help="what stdout gets")
    common.add_argument(
        "--fail-on", choices=("error", "warning", "info"), default="error", help="gravity that exits 1"
    )
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    factory = _Parser(add_help=False)
    factory.add_argument(
        "--arg", action="append", default=[], type=_keyword, metavar="K=V", help="a keyword argument for the factory"
    )
    factory.add_argument("--device", choices=("meta", "cpu"), default="meta", help="where the factory builds")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, run: Any, summary: str, *parents: _Parser) -> _Parser:
        added = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            parents=[*parents, common],
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        return added

    check = command("check", _check, "check a module, and a manifest and a checkpoint with it", factory)
    check.add_argument(
        "factory", nargs="?", metavar="PKG.MOD:FACTORY", help="what to call; may be left out with both of the next two"
    )
    check.add_argument("--manifest", metavar="FILE", help="the keys that are agreed on")
    check.add_argument("--checkpoint", metavar="PATH", help="a .safetensors file, a folder or an index")
    check.add_argument(
        "--allow", action="append", default=[], type=_rule, metavar="A=B", help="names that are meant to share"
    )
    check.add_argument(
        "--rename",
        action="append",
        default=[],
        type=_rule,
        metavar="A=B",
        help="the checkpoint's prefix A is called B in the module",
    )
    check.add_argument(
        "--allow-added", action="append", default=[], metavar="GLOB", help="keys that the manifest need not have"
    )
    check.add_argument("--unregistered", action="store_true", help="also look for modules in plain attributes")

    manifest = command("manifest", _manifest, "write the manifest of a module or a checkpoint", factory)
    manifest.add_argument("source", metavar="PKG.MOD:FACTORY|PATH", help="a factory, or a checkpoint's file or folder")
    manifest.add_argument("-o", "--output", metavar="FILE", help="where to; stdout if left out")
    manifest.add_argument("--check", action="store_true", help="compare with FILE and write nothing")

    inspect = command("inspect", _inspect, "show what a checkpoint holds and whether its index is right")
    inspect.add_argument("path", metavar="PATH", help="a .safetensors file, a folder or an index")

    diff = command("diff", _diff, "compare two manifests, files or folders")
    diff.add_argument("a", metavar="A", help="a manifest, or a checkpoint's file or folder")
    diff.add_argument("b", metavar="B", help="what became of it")

    lint = command("lint", _lint, "find module aliases in source that will register twice")
    lint.add_argument("sources", nargs="+", metavar="SRC", help="Python files and folders")
    return parser


def _keyword(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return name, value  # a plain word is a string


def _rule(text: str) -> str:
    from aliasmix.names import parse_rule

    try:
        parse_rule(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _check(args: argparse.Namespace) -> Result:
    from aliasmix.checkpointcheck import check_checkpoint
    from aliasmix.manifest import Manifest, compare_manifests
    from aliasmix.report import Report

    if not args.factory and not (args.manifest and args.checkpoint):
        raise ValueError("check needs a factory 'package.module:factory', or both --manifest and --checkpoint")
    _refuse_unused(args, "a factory", not args.factory, "arg", "allow", "unregistered")
    _refuse_unused(args, "--checkpoint", not args.checkpoint, "rename")
    _refuse_unused(args, "a factory and --manifest", not (args.factory and args.manifest), "allow_added")
    agreed = Manifest.read(args.manifest) if args.manifest else None
    report = Report()
    if args.factory:
        module, current = _build(args, args.factory)
        report += _checked(module, args)
        if agreed is not None:
            report += Report(compare_manifests(agreed, current, args.allow_added), {"keys": len(current.tensors)})
    else:
        current = agreed  # type: ignore[assignment]
    if args.checkpoint:
        report += check_checkpoint(current, args.checkpoint, rename=args.rename)
    return _finish(report, args)


def _checked(module: nn.Module, args: argparse.Namespace) -> Report:
    from aliasmix.factory import FactoryError
    from aliasmix.modulecheck import check_module

    try:
        return check_module(module, allow=args.allow, unregistered=args.unregistered)
    except Exception as error:  # properties and _tied_weights_keys are the module's own
        raise FactoryError(f"{args.factory}: cannot be checked: {type(error).__name__}: {error}") from error


def _refuse_unused(args: argparse.Namespace, needed: str, is_absent: bool, *options: str) -> None:
    for option in options:
        if is_absent and getattr(args, option):
            raise ValueError(f"--{option.replace('_', '-')} is of no use without {needed}")


def _manifest(args: argparse.Namespace) -> Result:
    from aliasmix.manifest import Manifest, compare_manifests, manifest_of
    from aliasmix.report import Report

    if args.check and not args.output:
        raise ValueError("--check needs the file to compare with: -o FILE")
    agreed = Manifest.read(args.output) if args.check else None
    is_file = os.path.exists(args.source) or ":" not in args.source
    _refuse_unused(args, "a factory", is_file, "arg")
    current = manifest_of(args.source) if is_file else _build(args, args.source)[1]
    if agreed is not None:
        return _finish(Report(compare_manifests(agreed, current), {"keys": len(current.tensors)}), args)
    if args.output:
        current.write(args.output)
        print(f"aliasmix: wrote {args.output} with {len(current.tensors):,} keys", file=sys.stderr)
        return "", CLEAN
    return current.to_json().removesuffix("\n"), CLEAN


def _inspect(args: argparse.Namespace) -> Result:
    from aliasmix.checkpointcheck import index_findings
    from aliasmix.collection import paused_collection
    from aliasmix.report import Report, printable
    from aliasmix.tensorinfo import scan_checkpoint

    with paused_collection():
        checkpoint = scan_checkpoint(args.path)
    tables: dict[str, dict[str, list[int]]] = {"dtype": {}, "prefix": {}}
    for name, info in checkpoint.tensors.items():
        for column, key in (("dtype", info.dtype), ("prefix", ".".join(name.split(".")[:2]))):
            row = tables[column].setdefault(key, [0, 0])
            row[0] += 1
            row[1] += info.end - info.begin
    stats = {
        "files": len(checkpoint.headers),
        "tensors": len(checkpoint.tensors),
        "bytes": sum(nbytes for _, nbytes in tables["dtype"].values()),
    }
    report = Report(index_findings(checkpoint), stats)
    lines = []
    for column, rows in tables.items() if args.format == "text" else ():
        lines.append(f"{column:40} {'tensors':>10} {'bytes':>18}")
        for key, (number, nbytes) in sorted(rows.items(), key=lambda row: -row[1][1]):
            lines.append(f"{printable(key):40} {number:>10,} {nbytes:>18,}")
        lines.append("")
    extra = {
        f"by_{column}": {key: {"tensors": number, "bytes": nbytes} for key, (number, nbytes) in rows.items()}
        for column, rows in tables.items()
    }
    text, code = _finish(report, args, extra)
    return "\n".join([*lines, text]), code


def _diff(args: argparse.Namespace) -> Result:
    from aliasmix.manifest import compare_manifests
    from aliasmix.report import Report

    a, b = _listing(args.a), _listing(args.b)
    return _finish(Report(compare_manifests(a, b), {"keys": len(b.tensors)}), args)


def _lint(args: argparse.Namespace) -> Result:
    from aliasmix.lint import lint

    return _finish(lint(args.sources), args)


def _listing(path: str) -> Manifest:
    """Reads a manifest or a checkpoint, by its name: an index and a manifest both are JSON."""
    from aliasmix.manifest import Manifest, manifest_of

    is_manifest = path.endswith(".json") and not path.endswith(".index.json")
    return Manifest.read(path) if is_manifest else manifest_of(path)


def _build(args: argparse.Namespace, spec: str) -> tuple[Any, Manifest]:
    from aliasmix.factory import FactoryError, build
    from aliasmix.manifest import Manifest

    module = build(spec, dict(args.arg), args.device)
    try:
        return module, Manifest.of_module(module)
    except Exception as error:  # state_dict() and its hooks are the module's own code
        raise FactoryError(f"{spec}: its state_dict cannot be listed: {type(error).__name__}: {error}") from error


def _finish(report: Report, args: argparse.Namespace, extra: dict[str, Any] | None = None) -> Result:
    """Returns a report in the format asked for, and the exit code."""
    if args.format == "json":
        text = report.to_json(**(extra or {}))
    else:
        text = report.to_github() if args.format == "github" else report.render()
    unreadable = [f for f in report.findings if f.code in ("HEADER_BAD", "INDEX_SHARD_MISSING")]
    if unreadable:
        path = args.path if "path" in args else args.checkpoint
        for f in unreadable[:5]:
            print(f"aliasmix: error: {path}: {f.paths[0]} {f.detail}", file=sys.stderr)
        return text, UNREADABLE
    return text, FOUND if report.at_least(args.fail_on) else CLEAN


if __name__ == "__main__":
    sys.exit(main())
