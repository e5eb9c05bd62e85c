"""lint: module aliases that will register twice, found in source text. Imports nothing that it reads, nor torch.

What an attribute holds is inferred from how the class assigns it; where that cannot be seen (another file, a
parameter), from the names that submodules commonly have. A line that ends in `# aliasmix: allow` is left alone.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from aliasmix.errors import UnreadableFileError
from aliasmix.report import Finding, Report, finding

ALLOW = re.compile(r"#\s*aliasmix:\s*allow\b")

# Attributes and classes that are modules in practically every model file.
_MODULE_NAME = re.compile(
    r"(.*_)?(model|lm|llm|decoder|encoder|transformer|backbone|thinker|talker|tower|visual|projector|connector|"
    r"layers?|blocks?|embeddings?|embed_tokens|head|norm|layernorm|attn|attention|mlp|experts|proj|module)"
)
_NO_MODULE_NAME = re.compile(r"(.*_)?(config|cfg|args|options)|(num|max|min|n)_.*")
_MODULE_CLASS = re.compile(
    r".*(Module(List|Dict)?|Model|LM|LLM|ForCausalLM|ForConditionalGeneration|Decoder|Encoder|Transformer|Embeddings?|"
    r"Head|Linear|Norm|Layer|Block|Tower|Projector|Attention|MLP|Backbone|Net|Network|Sequential|Parameter|Conv\dd)"
)
_BASE_CLASS = re.compile(
    r"Module|ModuleList|ModuleDict|Sequential|.*(Model|ForCausalLM|ForConditionalGeneration|Module)"
)


def lint(paths: Iterable[str | os.PathLike[str]]) -> Report:
    """Reads Python files, and all that lie in folders.

    Raises:
        UnreadableFileError: A path that is not there, a file whose name does not end in .py, or that is no Python.
    """
    findings: list[Finding] = []
    files = list(_files(paths))
    for file in files:
        findings += lint_source(_read(file), str(file))
    return Report(findings, {"files": len(files)})


def lint_source(source: str | bytes, file: str) -> list[Finding]:
    """Returns the findings in one file's text: SECOND_REGISTRATION, PROPERTY_ALIAS and SWALLOWING_SETATTR.

    Raises:
        UnreadableFileError: It is no Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as the escapes of someone's regular expression
            tree = ast.parse(source, file)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        # A SyntaxError's own text repeats file and line.
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise UnreadableFileError(file, f"not Python{f' (line {line})' if line else ''}: {reason}") from None
    text = source if isinstance(source, str) else source.decode("utf-8", "replace")
    allowed = {number for number, line in enumerate(text.splitlines(), 1) if ALLOW.search(line)}
    statements = [_Class(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    classes = {cls.node.name: cls for cls in statements}  # of one name, as in two branches, the last is a base
    found = []
    for cls in statements:
        view = _View(cls, classes)
        if view.is_module:
            found += [*view.second_registrations(), *view.property_aliases(), *view.swallowing_setattr()]
    return [
        finding(code, (path,), detail, fix, file=file, line=line, **rest)
        for code, path, line, detail, fix, rest in found
        if line not in allowed
    ]


Found = tuple[str, str, int, str, str, dict[str, str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class _Class:
    """What one class statement says.

    Attributes:
        values: Attribute -> the expressions assigned to it anywhere in the class, with locals put in.
        writes: (attribute, expression, line, tests of the ifs around it), in order.
    """

    node: ast.ClassDef
    values: dict[str, list[ast.expr]] = field(default_factory=dict)
    writes: list[tuple[str, ast.expr, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for function in self.functions():
            if args := function.args.posonlyargs + function.args.args:
                self._collect(function.body, args[0].arg, {}, "")

    @property
    def bases(self) -> list[str]:
        return [name for base in self.node.bases if (name := _last_name(base))]

    def functions(self) -> Iterator[Function]:
        return (node for node in self.node.body if isinstance(node, Function))

    def _collect(self, body: list[ast.stmt], me: str, local: dict[str, ast.expr], tests: str) -> None:
        for statement in body:
            for target, value, line in _assignments(statement, me):
                value = local.get(value.id, value) if isinstance(value, ast.Name) else value
                if isinstance(target, str):
                    self.writes.append((target, value, line, tests))
                    self.values.setdefault(target, []).append(value)
                else:
                    local[target.id] = value
            inner = tests + (f" {ast.unparse(statement.test)}" if isinstance(statement, ast.If) else "")
            for name in ("body", "orelse", "finalbody"):
                self._collect(getattr(statement, name, []), me, local, inner)
            for handler in getattr(statement, "handlers", []):
                self._collect(handler.body, me, local, inner)


class _View:
    """One class with its bases in the same file."""

    def __init__(self, cls: _Class, classes: dict[str, _Class]) -> None:
        self.cls, self.classes = cls, classes
        self.lineage = [cls]
        todo = cls.bases
        while todo:
            base = classes.get(todo.pop(0))
            if base is not None and base not in self.lineage:
                self.lineage.append(base)
                todo += base.bases
        self.is_module = any(_BASE_CLASS.fullmatch(base) for c in self.lineage for base in c.bases)

    @property
    def is_guarded(self) -> bool:
        return any("GuardedSetattrMixin" in c.bases for c in self.lineage)

    def second_registrations(self) -> Iterator[Found]:
        """Finds `self.a = self.b`, `self.a = self.b.c`, `self.a = self.b = Module()`, also by way of a local."""
        homes: dict[int, str] = {}
        for name, value, line, tests in self.cls.writes:
            if path := _self_path(value):
                if path == [name] or not self._is_module_path(path) or self._is_alias(name):
                    continue
            elif self._builds_module(value, name):
                home = homes.setdefault(id(value), name)
                if home == name or self._is_alias(name):
                    continue
                path = [home]
            else:
                continue
            target = _dotted(path)
            is_tie = "tie" in tests
            yield (
                "SECOND_REGISTRATION",
                f"{self.cls.node.name}.{name}",
                line,
                f"self.{name} is self.{target}: nn.Module registers it under both names"
                + (", here as a tie" if is_tie else ", and every key is there twice"),
                _declare(name, path),
                {"severity": "info"} if is_tie else {},
            )

    def property_aliases(self) -> Iterator[Found]:
        """Finds properties that return a submodule, in a class whose writes no one guards."""
        if self.is_guarded or any(f.name == "__setattr__" for c in self.lineage for f in c.functions()):
            return
        for function in self.cls.functions():
            if not any(_last_name(decorator) == "property" for decorator in function.decorator_list):
                continue
            for node in ast.walk(function):
                path = _self_path(node.value) if isinstance(node, ast.Return) and node.value else []
                if path and path != [function.name] and self._is_module_path(path):
                    yield (
                        "PROPERTY_ALIAS",
                        f"{self.cls.node.name}.{function.name}",
                        function.lineno,
                        f"the property returns self.{_dotted(path)}; assigning a module to it goes round the property "
                        "and registers a second name",
                        _declare(function.name, path),
                        {},
                    )
                    break

    def swallowing_setattr(self) -> Iterator[Found]:
        """Finds a `__setattr__` that drops any value for some name without a word."""
        for function in self.cls.functions():
            args = [arg.arg for arg in function.args.posonlyargs + function.args.args]
            if function.name != "__setattr__" or len(args) < 3:
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.If) and _drops(node, args[1], args[2]):
                    yield (
                        "SWALLOWING_SETATTR",
                        f"{self.cls.node.name}.__setattr__",
                        node.lineno,
                        f"`if {ast.unparse(node.test)}` drops whatever is assigned, also another module or a "
                        "compiled one",
                        "ReadOnlyAlias under GuardedSetattrMixin drops the current target only, and refuses the rest",
                        {},
                    )

    def _is_alias(self, name: str) -> bool:
        """Whether a ReadOnlyAlias of that name stands in a class body."""
        for c in self.lineage:
            for statement in c.node.body:
                if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, ast.Call):
                    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                    function = statement.value.func
                    function = function.value if isinstance(function, ast.Subscript) else function
                    if _last_name(function) == "ReadOnlyAlias" and any(
                        isinstance(target, ast.Name) and target.id == name for target in targets
                    ):
                        return True
        return False

    def _is_module_path(self, path: list[str], seen: tuple[str, ...] = ()) -> bool:
        """Whether `self.a.b` is a module, as far as the file tells, or else by its name."""
        if path[0] in seen:
            return False  # self.a = self.b; self.b = self.a
        seen = (*seen, path[0])
        if any(_NO_MODULE_NAME.fullmatch(part) for part in path):
            return False
        values = [value for c in self.lineage for value in c.values.get(path[0], [])]
        known = [value for value in values if not isinstance(value, ast.Name)]
        if path[1:] in ([], ["[]"]):
            if known:
                return any(self._is_module_value(value, path[0], seen) for value in known)
            return bool(_MODULE_NAME.fullmatch(path[0]))
        for value in known:
            inner = self.classes.get(_last_name(value.func) or "") if isinstance(value, ast.Call) else None
            if inner is not None and path[1] != "[]":
                return _View(inner, self.classes)._is_module_path(path[1:])
        last = next((part for part in reversed(path) if part != "[]"), "")
        return bool(_MODULE_NAME.fullmatch(last))

    def _is_module_value(self, value: ast.expr, name: str, seen: tuple[str, ...]) -> bool:
        if path := _self_path(value):
            return self._is_module_path(path, seen)
        return self._builds_module(value, name)

    def _builds_module(self, value: ast.expr, name: str) -> bool:
        """Whether an expression makes a module: a call of a class that is one, or of a function for a name of one."""
        if isinstance(value, ast.IfExp):
            return self._builds_module(value.body, name) or self._builds_module(value.orelse, name)
        if not isinstance(value, ast.Call):
            return False
        called = _last_name(value.func) or ""
        if called in self.classes:
            return _View(self.classes[called], self.classes).is_module
        if called[:1].isupper():
            return bool(_MODULE_CLASS.fullmatch(called))
        return bool(_MODULE_NAME.fullmatch(name)) and called not in {"getattr", "len", "str", "int", "get", "pop"}


def _assignments(statement: ast.stmt, me: str) -> Iterator[tuple[str | ast.Name, ast.expr, int]]:
    """Yields (attribute of self or local name, value, line) for each thing that a statement assigns."""
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            if isinstance(target, ast.Name):
                yield target, statement.value, statement.lineno
            elif isinstance(target, ast.Attribute) and _is_name(target.value, me):
                yield target.attr, statement.value, statement.lineno
            elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                for one, value in zip(target.elts, statement.value.elts, strict=False):
                    if isinstance(one, ast.Attribute) and _is_name(one.value, me):
                        yield one.attr, value, statement.lineno
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        args = call.args
        if _is_name(call.func, "setattr") and args and _is_name(args[0], me):
            args = args[1:]
        elif not (
            isinstance(call.func, ast.Attribute)
            and call.func.attr in ("add_module", "register_module")
            and _is_name(call.func.value, me)
        ):
            return
        if len(args) == 2 and isinstance(args[0], ast.Constant) and isinstance(args[0].value, str):
            yield args[0].value, args[1], statement.lineno


def _self_path(node: ast.expr) -> list[str]:
    """Returns ["a", "b"] for self.a.b, with "[]" for an index; [] for anything else."""
    path: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            path.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript):
            path.append("[]")
            node = node.value
        else:
            return path[::-1] if _is_name(node, "self") else []


def _dotted(path: list[str]) -> str:
    return ".".join(path).replace(".[]", "[...]")


def _declare(name: str, path: list[str]) -> str:
    if "[]" in path:
        return f"index self.{_dotted(path)} where it is used"
    return f"{name} = ReadOnlyAlias({_dotted(path)!r}) in the class body, under GuardedSetattrMixin"


def _drops(node: ast.If, name: str, value: str) -> bool:
    """Whether an if of a __setattr__ drops the value for some names, without asking which value it is."""
    used = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
    if name not in used or _asks_identity(node.test, value):
        return False
    if all(_does_nothing(statement) for statement in node.body):
        return isinstance(node.body[-1], ast.Return) or bool(node.orelse)
    writes = any(isinstance(part, ast.Attribute) and part.attr == "__setattr__" for part in ast.walk(node))
    compares = [part for part in ast.walk(node.test) if isinstance(part, ast.Compare)]
    negative = any(isinstance(part.ops[0], (ast.NotEq, ast.NotIn)) for part in compares)
    return writes and negative and all(_does_nothing(statement) for statement in node.orelse)


def _asks_identity(test: ast.expr, value: str) -> bool:
    return any(
        isinstance(part, ast.Compare)
        and any(isinstance(op, (ast.Is, ast.IsNot)) for op in part.ops)
        and any(_is_name(side, value) for side in (part.left, *part.comparators))
        for part in ast.walk(test)
    )


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Return):
        return statement.value is None or (
            isinstance(statement.value, ast.Constant) and statement.value.value is None
        )
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _last_name(node: ast.expr) -> str | None:
    """Returns `Module` for nn.Module, and for nn.Module[T]."""
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            for folder, names, files in os.walk(path, onerror=_refuse):
                names[:] = sorted(
                    n
                    for n in names
                    if not n.startswith((".", "__pycache__")) and not Path(folder, n, "pyvenv.cfg").exists()
                )
                yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))
        else:
            yield path


def _read(file: Path) -> bytes:
    if not file.exists():
        raise UnreadableFileError(file, "there is no such file or folder")
    if not file.is_file():
        raise UnreadableFileError(file, "is not a regular file")  # a pipe would be waited on for ever
    if file.suffix != ".py":
        raise UnreadableFileError(file, "is no .py file; Python files and folders of them are read")
    try:
        return file.read_bytes()
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    raise UnreadableFileError(error.filename, error.strerror or str(error)) from None
