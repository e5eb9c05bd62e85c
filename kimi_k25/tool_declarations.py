"""Tools as the TypeScript text that Kimi-K2.5 was trained to read. Knows nothing of chats or templates.

Source: the published tool_declaration_ts.py; the form is part of the training data, so its oddities (a default of
true is written True, a description's empty lines lose their slashes) are kept.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

_INDENT = "  "
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION_NAMES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


def sort_keys(value: Any) -> Any:
    """Returns `value` with the keys of every object in it sorted, as the model saw them."""
    if isinstance(value, Mapping):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    return [sort_keys(item) for item in value] if isinstance(value, list | tuple) else value


def declare_tools(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the declaration of `tools` (OpenAI's format, keys sorted), or None, with a warning, if it has no form.

    A schema may say what the form cannot express; the chat template then writes all tools as JSON, as the original
    does.
    """
    try:
        functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
        declarations = [_declare_function(function) for function in functions if function]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        reason = f"{type(e).__name__}: {e}"
        warnings.warn(f"the tools are declared as JSON; they have no TypeScript form ({reason})", stacklevel=3)
        return None
    if not declarations:
        return ""
    return "\n".join(["# Tools\n", "## functions", "namespace functions {", *declarations, "}\n"])


def _declare_function(function: Mapping[str, Any]) -> str:
    schemas = _Schemas()
    parameters = function.get("parameters") or {}
    parameters_type = schemas.object_type(parameters, "")
    parts: list[str] = []
    if schemas.refers_to_root:
        fields = ",\n".join(schemas.fields(parameters, _INDENT, required_first=False))
        parts.append(f"interface parameters {{\n{fields}\n}}" if fields else "interface parameters {}")
        parameters_type = "parameters"
    for name, schema in list(schemas.definitions.items()):
        description = schema.get("description", "")
        comment = _comment(description, "") + "\n" if description else ""
        parts.append(f"{comment}interface {name} {schemas.type_text(schema, '')}")
    if description := function.get("description"):
        parts.append(_comment(description, ""))
    parts.append(f"type {function.get('name', 'function')} = (_: {parameters_type}) => any;")
    return "\n".join(parts)


def _comment(description: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in description.split("\n"))


class _Schemas:
    """One function's JSON schemas, with what `$ref` can refer to."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.refers_to_root = False

    def type_text(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.type_text(choice, indent) for choice in schema["anyOf"])
        if "enum" in schema:
            return self._enum(schema)
        kind = schema.get("type", "any" if not schema else None)
        match kind:
            case None:
                raise ValueError(f"the schema {dict(schema)!r} has no type")
            case list():
                return " | ".join(_UNION_NAMES[name] for name in kind)
            case "object":
                return self.object_type(schema, indent)
            case "array":
                return self._array(schema, indent)
            case "integer":
                return "number"
        return str(kind)

    def comments(self, schema: Any, indent: str) -> str:
        """The comment lines above a type: its description, then its constraints."""
        if isinstance(schema, bool):
            return ""
        lines = [_comment(schema["description"], indent)] if schema.get("description") else []
        kind = schema.get("type") if not {"$ref", "anyOf", "enum"} & set(schema) else None
        names = _CONSTRAINTS.get(kind, ()) if isinstance(kind, str) else ()
        if constraints := ", ".join(f"{name}: {schema[name]}" for name in names if name in schema):
            lines.append(f"{indent}// {constraints}")
        return "".join(line + "\n" for line in lines)

    def object_type(self, schema: Mapping[str, Any], indent: str) -> str:
        self.definitions.update(schema.get("$defs") or {})
        inner = indent + _INDENT
        fields = self.fields(schema, inner, required_first=True)
        match schema.get("additionalProperties"):
            case None:
                pass
            case True:
                fields.append(f"{inner}[k: string]: any")
            case False:
                fields.append(f"{inner}[k: string]: never")
            case Mapping() as others:
                fields.append(f"{inner}[k: string]: {self.type_text(others, inner)}")
            case other:
                raise ValueError(f"additionalProperties is {other!r}")
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"

    def fields(self, schema: Mapping[str, Any], indent: str, *, required_first: bool) -> list[str]:
        properties = schema.get("properties", {})
        required = set(schema.get("required", []))
        names = sorted(properties, key=lambda name: (name not in required, name)) if required_first else properties
        return [self._field(name, properties[name], name in required, indent) for name in names]

    def _field(self, name: str, schema: Any, is_required: bool, indent: str) -> str:
        comments = self.comments(schema, indent)
        default = schema.get("default") if isinstance(schema, Mapping) else None
        if default is not None:
            is_number = isinstance(default, int | float)
            comments += f"{indent}// Default: {default if is_number else json.dumps(default, ensure_ascii=False)}\n"
        return f"{comments}{indent}{name}{'' if is_required else '?'}: {self.type_text(schema, indent)}"

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        items, inner = schema.get("items") or {}, indent + _INDENT
        if comments := self.comments(items, inner):
            return f"Array<\n{comments}{inner}{self.type_text(items, inner)}\n{indent}>"
        return f"Array<{self.type_text(items, indent)}>"

    def _enum(self, schema: Mapping[str, Any]) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            kinds = [name for name in kind if name != "null"] or ["null"]
            if len(kinds) > 1 or len(kind) > 2:
                raise ValueError(f"an enum of the types {kind} is not expressible")
            kind = kinds[0]
        for value in schema["enum"]:
            if value is not None and kind in _PYTHON_TYPES and not isinstance(value, _PYTHON_TYPES[kind]):
                raise ValueError(f"the enum value {value!r} is not a {kind}")
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self.refers_to_root = True
            return "parameters"
        name = reference.removeprefix("#/$defs/").split("/")[-1]
        if not reference.startswith("#/$defs/") or name not in self.definitions:
            raise ValueError(f"nothing is found at the reference {reference!r}")
        return name
