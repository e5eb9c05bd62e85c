"""Findings with codes that never change their meaning, and how they print. Knows no module and no file format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

# Code -> (severity unless the check says otherwise, meaning). Codes are public: CI configurations name them.
CODES: dict[str, tuple[Severity, str]] = {
    "DUP_MODULE": ("error", "one module is registered under several paths"),
    "TIED_TENSOR": ("error", "one tensor is registered under several names (info where the tie is declared)"),
    "SHARED_STORAGE": ("error", "different tensors overlap in memory; safetensors refuses to save them"),
    "DISJOINT_VIEWS": ("info", "tensors are views of one storage that do not overlap"),
    "CYCLE": ("error", "a module contains itself; state_dict() recurses for ever"),
    "SHADOWED_REGISTRATION": ("error", "a registered entry is hidden by a class or instance attribute"),
    "ALIAS_UNRESOLVED": ("error", "an alias does not lead anywhere"),
    "ALIAS_TARGET_UNREGISTERED": ("warning", "an alias leads to a module or tensor that state_dict() omits"),
    "ALIAS_TYPE": ("error", "an alias leads to something else than the type it expects"),
    "ALIAS_UNGUARDED": ("error", "a class lets an assignment to its alias register a module"),
    "ALIAS_IS_BASE_MODEL_PREFIX": ("error", "base_model_prefix names an alias; base checkpoints load nothing"),
    "UNREGISTERED_MODULE": ("error", "a module sits in a plain attribute, list or dict"),
    "KEY_ADDED": ("error", "a key that the reference does not have"),
    "KEY_REMOVED": ("error", "a key of the reference is gone"),
    "KEY_MOVED": ("error", "keys have a new prefix"),
    "SHAPE": ("error", "a shape changed"),
    "DTYPE": ("error", "a dtype changed"),
    "KIND": ("error", "a parameter became a buffer, or a buffer stopped being saved, or the other way round"),
    "TIE_CHANGED": ("error", "names were tied and are not, or the other way round"),
    "ALIAS_CHANGED": ("error", "an alias of the wrapper appeared, vanished or leads elsewhere"),
    "CKPT_MISSING": ("error", "the checkpoint lacks a tensor (info where a tied one stands in)"),
    "CKPT_UNEXPECTED": ("error", "the checkpoint has a tensor that the module does not"),
    "CKPT_SHAPE": ("error", "the checkpoint's shape differs"),
    "CKPT_DTYPE": ("warning", "the checkpoint's dtype differs"),
    "CKPT_WRONG_KEEPER": ("error", "the checkpoint kept the alias name of a tensor, not the one to load"),
    "INDEX_SHARD_MISSING": ("error", "the index names a file that is not there"),
    "INDEX_TENSOR_MISSING": ("error", "the index names a tensor that no file holds"),
    "INDEX_TENSOR_MISPLACED": ("error", "the index names the wrong file for a tensor"),
    "INDEX_UNLISTED": ("error", "a file holds a tensor that the index does not name"),
    "INDEX_TOTAL_SIZE": ("warning", "the index's total_size is not the sum of its tensors"),
    "STRAY_FILE": ("warning", "a safetensors file that the index does not name"),
    "HEADER_BAD": ("error", "a header cannot be read"),
    "ALLOW_UNUSED": ("info", "an allow rule that nothing needed"),
    "SECOND_REGISTRATION": ("error", "lint: a submodule is assigned to a second attribute"),
    "PROPERTY_ALIAS": ("error", "lint: a property returns a submodule; nn.Module's writes go round it"),
    "SWALLOWING_SETATTR": ("error", "lint: a __setattr__ drops whatever is assigned"),
}

_BETWEEN = {"KEY_MOVED": " -> ", "CYCLE": " -> ", "SHARED_STORAGE": ", ", "DISJOINT_VIEWS": ", "}

MAX_PATHS = 8  # of one finding in text; JSON always has all
MAX_LINES = 100  # of text or annotations a code; JSON always has all


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        code: A key of `CODES`.
        paths: Names it is about; the first is the one to keep or to look at. A trailing `.*` is a whole subtree,
            `*` in the middle any number.
        detail: What was found and what was expected.
        fix: The way out; "" where there is nothing to do.
        severity: "error", "warning" or "info".
        count: Number of keys that this one finding stands for.
        file, line: Where the source is to be changed; "" and 0 where that is not known.
    """

    code: str
    paths: tuple[str, ...]
    detail: str
    fix: str = ""
    severity: Severity = field(default="error")
    count: int = 1
    file: str = ""
    line: int = 0

    def render(self) -> str:
        """Returns the finding as text: a headline, what was found, what to do."""
        where = f"{self.file}:{self.line}: " if self.file else ""
        number = f" ({self.count:,} keys)" if self.count > 1 else ""
        lines = [f"{where}{self.severity} {self.code} {self.names()}{number}", f"    {self.detail}"]
        if self.fix:
            lines.append(f"    fix: {self.fix}")
        return "\n".join(map(printable, lines))

    def names(self) -> str:
        """Returns the paths as text, the first `MAX_PATHS` of them."""
        between = _BETWEEN.get(self.code, " = ")
        more = len(self.paths) - MAX_PATHS
        return between.join(self.paths[:MAX_PATHS]) + (f" ... and {more:,} more" if more > 0 else "")


def finding(code: str, paths: Iterable[str], detail: str, fix: str = "", **rest: object) -> Finding:
    """Returns a `Finding` with its code's usual severity, unless `severity` is given.

    Raises:
        KeyError: If the code is not in `CODES`; a misspelt code would never be matched by anyone.
    """
    rest.setdefault("severity", CODES[code][0])
    return Finding(code, tuple(paths), detail, fix, **rest)  # type: ignore[arg-type]


@dataclass(slots=True)
class Report:
    """Findings of one check, most severe first, and what was looked at.

    Attributes:
        findings: All of them; none is dropped.
        stats: Counts of what was examined, e.g. `{"keys": 14, "tensors": 12}`.
    """

    findings: list[Finding] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = list(CODES)
        self.findings.sort(
            key=lambda f: (SEVERITIES.index(f.severity), f.file, f.line, order.index(f.code), f.paths)
        )

    @property
    def ok(self) -> bool:
        """Whether there is no finding of severity error."""
        return not self.at_least("error")

    def at_least(self, severity: Severity) -> list[Finding]:
        """Returns the findings of this severity or a graver one."""
        limit = SEVERITIES.index(severity)
        return [f for f in self.findings if SEVERITIES.index(f.severity) <= limit]

    def __add__(self, other: Report) -> Report:
        """Returns one report of both; the other's stats win where both have one."""
        return Report(self.findings + other.findings, self.stats | other.stats)

    def render(self) -> str:
        """Returns the report as text, at most `MAX_LINES` findings a code, with a line that says how many more."""
        lines = [f.render() for f in self._shown()]
        lines += [f"... and {n:,} more {code}; --format json has all" for code, n in self._hidden().items()]
        numbers = ", ".join(f"{n:,} {name.removesuffix('s') if n == 1 else name}" for name, n in self.stats.items())
        found = ", ".join(
            f"{n:,} {s}{'s' if n != 1 and s != 'info' else ''}"
            for s in SEVERITIES
            if (n := sum(f.severity == s for f in self.findings))
        )
        lines.append((found or "clean") + (f"; {numbers}" if numbers else ""))
        return "\n".join(lines)

    def to_json(self, **extra: object) -> str:
        """Returns the report as JSON: `{"schema": 1, "ok": ..., "stats": {...}, "findings": [...]}`, then `extra`."""
        found = [
            {
                "code": f.code,
                "severity": f.severity,
                "paths": list(f.paths),
                "count": f.count,
                "detail": f.detail,
                "fix": f.fix,
            }
            | ({"file": f.file, "line": f.line} if f.file else {})
            for f in self.findings
        ]
        head = {"schema": 1, "ok": self.ok, "stats": self.stats, "findings": found}
        return json.dumps(head | extra, indent=1)

    def to_github(self) -> str:
        """Returns the report as GitHub Actions annotations, one a line."""
        command = {"error": "error", "warning": "warning", "info": "notice"}
        lines = []
        for f in self._shown():
            where = f"file={_property(f.file)},line={f.line}," if f.file else ""
            text = printable(f"{f.names()}: {f.detail}")
            if f.fix:
                text += f"\nfix: {printable(f.fix)}"
            lines.append(f"::{command[f.severity]} {where}title=aliasmix {f.code}::{_escape(text)}")
        lines += [f"::notice title=aliasmix {c}::... and {n:,} more" for c, n in self._hidden().items()]
        return "\n".join(lines)

    def _shown(self) -> list[Finding]:
        seen: dict[str, int] = {}
        shown = []
        for f in self.findings:
            seen[f.code] = seen.get(f.code, 0) + 1
            if seen[f.code] <= MAX_LINES:
                shown.append(f)
        return shown

    def _hidden(self) -> dict[str, int]:
        number: dict[str, int] = {}
        for f in self.findings:
            number[f.code] = number.get(f.code, 0) + 1
        return {code: n - MAX_LINES for code, n in number.items() if n > MAX_LINES}


def printable(text: str) -> str:
    """Escapes what would move a terminal's cursor or begin a line: a tensor may be called anything."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _escape(text: str) -> str:
    """Escapes a workflow command's message."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escapes a workflow command's property, where `:` and `,` are separators too."""
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
