"""Messages to prompt text, by the checkpoint's own chat template. Knows no token ids, no images, no model.

A prompt is one string in which the template's control tokens and other people's text stand side by side; once they
are joined, nobody can tell a control token from a user who typed its name. So the names are swapped inside the
template before it runs: each becomes a lone surrogate, a code point that no text contains (and that is taken out of
every message). What arrives as a surrogate was written by the template; whatever else the template did with the
strings it was given, everything else is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from aliasmix.errors import UnreadableFileError
from aliasmix.jsonfile import file_mode, read_object, regular_size
from kimi_k25.sandbox import MAX_DEPTH, MAX_SOURCE_CHARS, Budget, SandboxedTemplate
from kimi_k25.tokenizer import replace_surrogates
from kimi_k25.tool_declarations import declare_tools, sort_keys

_FIRST_MARK = 0xD800  # surrogates: U+D800 to U+DFFF
_MARKS = re.compile("([\ud800-\udfff])")
_NUM_MARKS = 0x800
# A template copies a message a few times on its way out: into a macro's result, that into another's, and so on.
_UNITS, _UNITS_A_CHARACTER = 1_000_000, 20


class Control(str):
    """The name of a control token, written by the template."""

    __slots__ = ()


class ChatTemplate:
    """A chat template that was read and compiled.

    Args:
        source: Its text, in jinja2's language.
        control_names: Names of the control tokens, and of the video placeholder.
        path: Where it came from; errors name it.

    Raises:
        UnreadableFileError: It is no template, or asks for what chat templates have no use for.
    """

    def __init__(self, source: str, control_names: Iterable[str], path: str | Path) -> None:
        self.path = path
        self._names = sorted(set(control_names), key=len, reverse=True)  # the longest of several that match
        if len(self._names) > _NUM_MARKS:
            raise ValueError(f"{len(self._names)} control tokens; at most {_NUM_MARKS} can be told from text")
        self._mark_of = {name: chr(_FIRST_MARK + i) for i, name in enumerate(self._names)}
        self._any_name = re.compile("|".join(re.escape(name) for name in self._names) or r"(?!)")
        try:
            self._template = SandboxedTemplate(source, self._mark)
        except jinja2.TemplateError as e:
            raise UnreadableFileError(path, f"is not a usable chat template: {self._one_line(e)}") from e

    def _mark(self, literal: str) -> str:
        return self._any_name.sub(lambda match: self._mark_of[match[0]], replace_surrogates(literal))

    def _one_line(self, error: Exception) -> str:
        shown = _MARKS.sub(lambda mark: self._names[ord(mark[0]) - _FIRST_MARK], str(error))
        return " ".join(shown.split())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[str]:
        """Returns the prompt as consecutive pieces: `Control` for a control token, `str` for text; joined, its text.

        Args:
            messages: In OpenAI's chat format: role, content (a string or a list of parts), name, tool_calls, ...
            tools: In OpenAI's format. Declared in the form of `declare_tools`, or as JSON if that has none for them.
            thinking: Whether the answer starts with reasoning; if not, the prompt ends in an empty one.
            add_generation_prompt: Whether the prompt ends where the assistant speaks.

        Raises:
            ValueError: A message holds something that is not JSON, or the template fails or exceeds its bounds.
        """
        variables: dict[str, Any] = {"messages": messages, "thinking": thinking}
        if tools:
            for i, tool in enumerate(tools):
                if not isinstance(tool, Mapping):
                    raise ValueError(f"tools[{i}] is {tool!r:.60}; an object is expected")
            variables["tools"] = sort_keys(_plain(tools, "tools"))
            if (declaration := declare_tools(variables["tools"])) is not None:
                variables["tools_ts_str"] = declaration
        return self.render_variables(variables | {"add_generation_prompt": add_generation_prompt})

    def render_variables(self, variables: Mapping[str, Any]) -> list[str]:
        """`render` for variables of the caller's choice, of which only the texts are made safe."""
        safe = {name: _plain(value, name) for name, value in variables.items()}
        budget = Budget(_UNITS + _UNITS_A_CHARACTER * _num_chars(safe))
        try:
            text = self._template.render(safe, budget)
        except jinja2.TemplateError as e:
            raise ValueError(f"{self.path}: the chat template failed: {self._one_line(e)}") from e
        pieces: list[str] = []
        for piece in _MARKS.split(text):
            if _MARKS.fullmatch(piece):
                pieces.append(Control(self._names[ord(piece) - _FIRST_MARK]))
            elif piece:
                pieces.append(piece)
        return pieces


def load_chat_template(checkpoint: str | Path, control_names: Iterable[str]) -> ChatTemplate:
    """Reads chat_template.jinja of a checkpoint folder, or tokenizer_config.json's chat_template, its older place.

    Raises:
        UnreadableFileError: Neither is there, or it is no template.
    """
    path = Path(checkpoint) / "chat_template.jinja"
    if file_mode(path) is not None:
        if (size := regular_size(path)) > 4 * MAX_SOURCE_CHARS:
            raise UnreadableFileError(path, f"holds {size} bytes; a chat template has at most {MAX_SOURCE_CHARS}")
        try:
            source = path.read_bytes().decode()
        except UnicodeDecodeError as e:
            raise UnreadableFileError(path, f"is not UTF-8 text (byte {e.start})") from None
        except OSError as e:
            raise UnreadableFileError(path, f"cannot be read: {e.strerror}") from e
        return ChatTemplate(source, control_names, path)
    config = path.with_name("tokenizer_config.json")
    stated = read_object(config, fractions=True).get("chat_template") if config.is_file() else None
    if not isinstance(stated, str):
        raise UnreadableFileError(path, "there is no such file, and tokenizer_config.json has no chat_template")
    return ChatTemplate(stated, control_names, config)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Copies JSON-like `value` into plain dicts, lists and strings without surrogates."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{where[:60]}… is nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        return replace_surrogates(str(value))
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        copy = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; a string is expected")
            copy[replace_surrogates(str(key))] = _plain(item, f"{where}[{key!r}]", depth + 1)
        return copy
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ValueError(f"{where} is a {type(value).__name__}; texts, numbers, lists and dicts are expected")


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(8 + len(key) + _num_chars(item) for key, item in value.items())
    return 8 + sum(_num_chars(item) for item in value) if isinstance(value, list) else 8

