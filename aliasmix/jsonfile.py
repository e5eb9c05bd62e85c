"""JSON objects from files that nobody vouches for. Knows no checkpoint and no manifest.

A length is compared with what is there before it is used, and whatever is wrong is an UnreadableFileError.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from aliasmix.errors import UnreadableFileError

MAX_JSON_BYTES = 100_000_000  # Of a safetensors header (the format's own limit); 208,550 tensors need 30 MB.


def read_object(path: Path, *, fractions: bool = False) -> dict[str, Any]:
    """Reads a whole file that holds one object.

    Raises:
        UnreadableFileError: It is not there, no regular file, too long, or not what `parse_object` takes.
    """
    return parse_object(path, read_bytes(path, 0, regular_size(path)), fractions=fractions)


class _MalformedError(ValueError):
    """What a hook of the JSON parser refuses; the caller knows the file."""


def parse_object(path: Path, text: bytes, *, fractions: bool = False) -> dict[str, Any]:
    """Parses strictly: UTF-8, no repeated key, and no fractions, NaN or infinity where the format has none."""
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_float=float if fractions else _not_an_integer,
            parse_constant=float if fractions else _not_an_integer,
        )
    except UnicodeDecodeError as e:
        refuse(path, f"is not UTF-8 text (byte {e.start} of the JSON)")
    except json.JSONDecodeError as e:
        refuse(path, f"is not JSON: {e.msg} at character {e.pos}")
    except _MalformedError as e:
        refuse(path, f"is JSON that makes no sense here: {e}")
    except (ValueError, RecursionError, MemoryError):  # ValueError: an integer of over 4,300 digits
        refuse(path, "is JSON that cannot be read: nested too deeply, or a number of thousands of digits")
    if not isinstance(value, dict):
        refuse(path, f"holds {kind_of(value)}; expected an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        count = Counter(key for key, _ in pairs)
        raise _MalformedError(f"key {quote(count.most_common(1)[0][0])} is there twice")
    for key in result:
        if not key.isascii():
            try:
                key.encode()
            except UnicodeEncodeError:
                raise _MalformedError(f"key {quote(key)} is not Unicode text") from None
    return result


def _not_an_integer(text: str) -> NoReturn:
    raise _MalformedError(f"{quote(text)} is not an integer")


def file_mode(path: Path) -> int | None:
    """The file's mode with links followed; None where there is nothing."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        refuse(path, f"cannot be opened: {getattr(e, 'strerror', None) or e}")


def regular_size(path: Path) -> int:
    """The size of a regular file; a pipe would be waited on for ever."""
    mode = file_mode(path)
    if mode is None:
        refuse(path, "there is no such file")
    if not stat.S_ISREG(mode):
        refuse(path, "is not a regular file")
    return os.stat(path).st_size


def read_bytes(path: Path, begin: int, length: int) -> bytes:
    if length > MAX_JSON_BYTES:
        refuse(path, f"is {length:,} bytes long; at most {MAX_JSON_BYTES:,} are read as JSON")
    try:
        with open(path, "rb") as f:
            f.seek(begin)
            data = f.read(length)
    except OSError as e:
        refuse(path, f"cannot be read: {e.strerror}")
    if len(data) != length:
        refuse(path, f"ended after {begin + len(data)} bytes while it was read")
    return data


def quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


def kind_of(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", bool: "a truth value"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def refuse(path: Path, reason: str) -> NoReturn:
    raise UnreadableFileError(path, reason)
