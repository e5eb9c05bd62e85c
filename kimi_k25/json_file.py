"""One JSON object out of a checkpoint's side file. Knows nothing of what the object means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aliasmix.errors import UnreadableFileError

MAX_BYTES = 64 * 2**20  # a shard index of the full model has about 20 MB; configs have a few KB


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Returns the object in `path`.

    Raises:
        UnreadableFileError: The file is missing, too large, not UTF-8, not JSON, or not an object.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise UnreadableFileError(path, "there is no such file; a checkpoint holds one")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UnreadableFileError(path, f"holds {size} bytes; at most {MAX_BYTES} are read as JSON")
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise UnreadableFileError(path, f"cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UnreadableFileError(path, f"is not UTF-8 text (byte {e.start})") from None
    except json.JSONDecodeError as e:
        raise UnreadableFileError(path, f"is not JSON: {e.msg} in line {e.lineno}, column {e.colno}") from None
    except (RecursionError, ValueError) as e:  # ValueError: a number of more digits than Python converts
        if isinstance(e, UnreadableFileError):
            raise
        raise UnreadableFileError(path, f"is not JSON that can be read: {e}") from None
    if not isinstance(value, dict):
        raise UnreadableFileError(path, f"holds a JSON {type(value).__name__}; an object is expected")
    return value
