import pytest

from kimi_k25.tool_declarations import declare_tools, sort_keys


def declare(parameters, **function):
    tool = {"type": "function", "function": {"name": "f", **function, "parameters": parameters}}
    return declare_tools(sort_keys([tool]))


def body(parameters) -> str:
    """The declaration without what is the same around every function."""
    text = declare(parameters)
    start, end = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(start)
    assert text.endswith(end)
    return text.removeprefix(start).removesuffix(end)


def test_one_function_with_everything_common():
    parameters = {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            "city": {"type": "string", "description": "Name of the city\n\nin English", "maxLength": 40},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "points": {"type": "array", "items": {"type": "object", "description": "A point", "properties": {}}},
        },
        "required": ["city"],
        "additionalProperties": False,
    }

    assert declare(parameters, description="Weather\nof a city") == (
        "# Tools\n"
        "\n"
        "## functions\n"
        "namespace functions {\n"
        "// Weather\n"
        "// of a city\n"
        "type f = (_: {\n"
        "  // Name of the city\n"
        "\n"
        "  // in English\n"
        "  // maxLength: 40\n"
        "  city: string,\n"
        "  // maximum: 7, minimum: 1\n"
        "  days?: number,\n"
        "  points?: Array<\n"
        "    // A point\n"
        "    {}\n"
        "  >,\n"
        '  // Default: "celsius"\n'
        '  unit?: "celsius" | "fahrenheit",\n'
        "  [k: string]: never\n"
        "}) => any;\n"
        "}\n"
    )


@pytest.mark.parametrize(
    "schema, text",
    [
        ({}, "any"),
        (True, "any"),
        (False, "null"),
        ({"type": "integer"}, "number"),
        ({"type": ["string", "null"]}, "string | null"),
        ({"type": ["array", "object"]}, "Array<any> | {}"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "string | number"),
        ({"enum": ["a", 1, None, True]}, '"a" | 1 | None | True'),
        ({"type": "array"}, "Array<any>"),
        ({"type": "array", "items": {"type": "number"}}, "Array<number>"),
        ({"type": "object"}, "{}"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "{\n    [k: string]: string\n  }"),
    ],
)
def test_type(schema, text):
    assert body({"type": "object", "properties": {"x": schema}}) == f"type f = (_: {{\n  x?: {text}\n}}) => any;"


@pytest.mark.parametrize(
    "default, text", [(True, "True"), (2.5, "2.5"), ("é", '"é"'), ([1], "[1]"), ({"a": 1}, '{"a": 1}')]
)
def test_default(default, text):
    properties = {"x": {"type": "string", "default": default}}

    assert f"  // Default: {text}\n" in body({"type": "object", "properties": properties})


def test_references_become_interfaces():
    parameters = {
        "type": "object",
        "properties": {"node": {"$ref": "#/$defs/Node"}, "again": {"$ref": "#"}},
        "$defs": {
            "Node": {"type": "object", "description": "A node", "properties": {"next": {"$ref": "#/$defs/Node"}}}
        },
    }

    assert body(parameters) == (
        "interface parameters {\n"
        "  again?: parameters,\n"
        "  node?: Node\n"
        "}\n"
        "// A node\n"
        "interface Node {\n"
        "  next?: Node\n"
        "}\n"
        "type f = (_: parameters) => any;"
    )


def test_other_kinds_of_tools_are_left_out_as_in_the_original():
    assert declare_tools([{"type": "_plugin"}]) == ""


@pytest.mark.parametrize(
    "schema",
    [
        {"description": "no type"},
        {"$ref": "#/$defs/Nobody"},
        {"$ref": "other.json"},
        {"type": "string", "enum": [1]},
        {"type": ["string", "integer"], "enum": ["a"]},
        {"type": ["tuple"]},
        {"type": "object", "additionalProperties": "yes"},
        {"type": "string", "description": 5},
    ],
)
def test_schema_without_a_form_is_none_with_a_warning(schema):
    with pytest.warns(UserWarning, match="the tools are declared as JSON; they have no TypeScript form"):
        assert declare({"type": "object", "properties": {"x": schema}}) is None


def test_sort_keys_reaches_into_lists():
    assert list(sort_keys({"b": 1, "a": [{"d": 1, "c": 2}]})) == ["a", "b"]
    assert list(sort_keys({"b": 1, "a": [{"d": 1, "c": 2}]})["a"][0]) == ["c", "d"]
