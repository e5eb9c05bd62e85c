import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aliasmix.errors import UnreadableFileError
from kimi_k25.chat import ChatTemplate, Control, load_chat_template
from kimi_k25.tokenizer import load_tokenizer

ORACLE = Path(__file__).parent / "data" / "oracle"
CHECKPOINT = ORACLE / "tiny_bf16"
GOLDENS = json.loads((ORACLE / "goldens.json").read_text(encoding="utf-8"))
TOKENIZER = load_tokenizer(CHECKPOINT)
VIDEO = "<|kimi_k25_video_placeholder|>"
NAMES = [*TOKENIZER.special_ids, VIDEO]
TEMPLATE = load_chat_template(CHECKPOINT, NAMES)

# The other way of writing the same prompt: control tokens as plain text between the tags, split loops, a break.
PLAIN_TEXT_TEMPLATE = ChatTemplate(
    """{%- macro content_of(m) -%}
  {%- if m.content is string -%}{{ m.content }}
  {%- elif m.content -%}
    {%- for part in m.content -%}
      {%- if part['type'] == 'image' or part['type'] == 'image_url' -%}
        <|media_begin|>image<|media_content|><|media_pad|><|media_end|>
      {% elif part['type'] == 'text' -%}
        {{ part['text'] }}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for i in range(messages|length - 1, -1, -1) -%}
  {%- if messages[i]['role'] == 'assistant' and not messages[i].get('tool_calls') -%}
    {%- set ns.last = i -%}
    {%- break -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>
  {%- if tools_ts_str -%}{{ tools_ts_str }}{%- else -%}{{ tools | tojson(separators=(',', ':')) }}{%- endif -%}
  <|im_end|>
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}<|im_user|>{%- elif m.role == 'assistant' -%}<|im_assistant|>{%- else -%}<|im_system|>
  {%- endif -%}
  {{ m.get('name') or m.role }}<|im_middle|>
  {%- if m.role == 'assistant' -%}
    {%- if loop.index0 <= ns.last or (thinking is defined and thinking is false) -%}<think></think>
    {%- else -%}<think>{{ m.get('reasoning_content', '') }}</think>
    {%- endif -%}
    {{ content_of(m) }}
    {%- if m.get('tool_calls') -%}
      <|tool_calls_section_begin|>
      {%- for call in m.tool_calls -%}
        <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
        {%- if call.function.arguments is string -%}{{ call.function.arguments }}
        {%- else -%}{{ call.function.arguments | tojson }}
        {%- endif -%}
        <|tool_call_end|>
      {%- endfor -%}
      <|tool_calls_section_end|>
    {%- endif -%}
  {%- elif m.role == 'tool' -%}
    ## Return of {{ m.tool_call_id }}
{{ content_of(m) }}
  {%- else -%}{{ content_of(m) }}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>
  {%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}
{%- endif -%}
""",
    NAMES,
    "plain_text.jinja",
)

# Everything that a template can do to the strings it is given.
MANGLING_TEMPLATE = ChatTemplate(
    """{%- for m in messages -%}
<|im_user|>{{ m | tojson }}{{ m }}{{ '<|' ~ m.role ~ '|>' }}{{ '[' + m.role + ']' }}<{{ m.name }}|>
{{ m.content | string | upper }}{{ (m.content | string).split('>') | join('|>') }}{{ m.content | string | trim }}
{{ (m.content | string).replace if false else (m.content | string) | replace('#', '|') }}
{{ m.content | tojson(ensure_ascii=true) }}<|im_end|>
{%- endfor -%}""",
    NAMES,
    "mangling.jinja",
)
TEMPLATES = {"tiny": TEMPLATE, "plain text": PLAIN_TEXT_TEMPLATE, "mangling": MANGLING_TEMPLATE}


def ids_of(pieces: list[str]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        ids += [TOKENIZER.special_ids[piece]] if isinstance(piece, Control) else TOKENIZER.encode(piece)
    return ids


def controls_of(pieces: list[str]) -> list[str]:
    return [piece for piece in pieces if isinstance(piece, Control)]


def user(content):
    return [{"role": "user", "content": content}]


# ------------------------------------------------------------------ against the oracle


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN_TEXT_TEMPLATE], ids=["tiny", "plain text"])
@pytest.mark.parametrize("name", GOLDENS["chat"])
def test_rendering_equals_golden(name, template):
    golden = GOLDENS["chat"][name]

    pieces = template.render_variables(golden["args"])

    assert "".join(pieces) == golden["text"]
    assert ids_of(pieces) == golden["ids"]


@pytest.mark.parametrize("name", ["user", "user_instant", "system_image", "history"])
def test_render_states_thinking_and_the_generation_prompt(name):
    golden = GOLDENS["chat"][name]
    thinking = golden["args"].get("thinking", True)

    assert "".join(TEMPLATE.render(golden["args"]["messages"], thinking=thinking)) == golden["text"]


def test_without_generation_prompt():
    text = "".join(TEMPLATE.render(user("hi"), add_generation_prompt=False))

    assert text == "<|im_user|>user<|im_middle|>hi<|im_end|>"


def test_no_default_system_prompt():
    assert controls_of(TEMPLATE.render(user("hi")))[0] == "<|im_user|>"


def test_loopcontrols_trim_and_lstrip_leave_no_space_after_an_image():
    pieces = PLAIN_TEXT_TEMPLATE.render(user([{"type": "image"}, {"type": "text", "text": "x"}]))

    assert "<|media_end|>\nx<|im_end|>" in "".join(pieces)


def test_tools_are_declared_in_typescript_with_sorted_keys():
    tool = {"function": {"parameters": {}, "name": "f", "description": "d"}, "type": "function"}

    text = "".join(TEMPLATE.render(user("hi"), tools=[tool]))

    declaration = "# Tools\n\n## functions\nnamespace functions {\n// d\ntype f = (_: {}) => any;\n}\n"
    assert text.startswith(f"<|im_system|>tool_declare<|im_middle|>{declaration}<|im_end|>")


def test_tools_without_a_typescript_form_are_json():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"$ref": "?"}}}}}

    with pytest.warns(UserWarning, match="the tools are declared as JSON"):
        text = "".join(TEMPLATE.render(user("hi"), tools=[tool]))

    expected = '[{"function":{"name":"f","parameters":{"properties":{"x":{"$ref":"?"}}}},"type":"function"}]'
    assert text.startswith(f"<|im_system|>tool_declare<|im_middle|>{expected}<|im_end|>")


# ------------------------------------------------------------------ nobody but the template makes control tokens

HALVES = ["<|im_", "end|>", "<|", "|>", "<", "think>", "[EO", "S]", "im_end", "\ud800", "\udc05"]
fragments = st.sampled_from([*NAMES, *HALVES])
any_text = st.one_of(
    st.text(max_size=12),
    st.lists(st.one_of(fragments, st.text(max_size=3)), max_size=6).map("".join),
    st.lists(st.integers(0xD800, 0xDFFF).map(chr), max_size=4).map("".join),
)


def conversation(texts):
    """Puts texts wherever a conversation can hold them; each may be the other half of its neighbour."""
    text = iter(texts)
    return {
        "messages": [
            {"role": "system", "content": next(text), "name": next(text) or "x"},
            {"role": next(text) or "x", "content": [{"type": "text", "text": next(text)}, {"type": "image"}]},
            {"role": "user", "content": [{"type": "text", "text": next(text)}, {"type": "text", "text": next(text)}]},
            {
                "role": "assistant",
                "reasoning_content": next(text),
                "content": next(text),
                "tool_calls": [
                    {"id": next(text), "function": {"name": next(text), "arguments": next(text)}},
                    {"id": "b", "function": {"arguments": {next(text): [next(text), {"k": next(text)}]}}},
                ],
            },
            {"role": "tool", "tool_call_id": next(text), "content": next(text), "name": next(text) or "x"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": next(text),
                    "description": next(text),
                    "parameters": {
                        "type": "object",
                        "properties": {next(text): {"type": "string", "description": next(text), "enum": [next(text)]}},
                    },
                },
            }
        ],
    }


NUM_TEXTS = 22


@settings(deadline=None, max_examples=200)
@given(st.lists(any_text, min_size=NUM_TEXTS, max_size=NUM_TEXTS))
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_anywhere_changes_the_control_tokens(name, texts):
    harmless = TEMPLATES[name].render(**conversation(["x"] * NUM_TEXTS))

    pieces = TEMPLATES[name].render(**conversation(texts))

    assert controls_of(pieces) == controls_of(harmless)
    for piece in pieces:
        if not isinstance(piece, Control):
            ids = TOKENIZER.encode(piece)
            assert max(ids) < 384
            assert TOKENIZER.decode(ids) == piece


@settings(deadline=None)
@given(any_text.filter(lambda text: text.isprintable()))
def test_user_text_comes_back_whole_between_its_control_tokens(text):
    pieces = TEMPLATE.render([{"role": "user", "content": "name: "}, {"role": "user", "content": text}])

    start = [i for i, piece in enumerate(pieces) if piece == "<|im_middle|>" and isinstance(piece, Control)][1]
    span = pieces[start + 1 : start + 2] if text else []
    assert TOKENIZER.decode(ids_of(span)) == text
    assert not set(ids_of(span)) & set(TOKENIZER.special_ids.values())


def test_the_template_may_look_for_names_in_user_text():
    template = ChatTemplate("{{ messages[0].content.split('</think>')[-1] }}</think>", NAMES, "t")

    assert template.render(user("a</think>b<|im_end|>")) == ["b<|im_end|>", Control("</think>")]


def test_typed_video_placeholder_is_text():
    parts = [{"type": "text", "text": VIDEO}, {"type": "video"}]

    assert controls_of(TEMPLATE.render(user(parts))).count(VIDEO) == 1


def test_longest_name_wins():
    template = ChatTemplate("<a><a>b", ["<a>", "<a>b"], "t")

    assert template.render(user("x")) == ["<a>", "<a>b"]


# ------------------------------------------------------------------ errors name the template or the message


@pytest.mark.parametrize(
    "source, message",
    [
        ("{% for i in range(1000000000) %}{% endfor %}", "the chat template failed: line 1: .*Range too big"),
        ("{{ 'a' * 10**9 }}", "the chat template failed: line 1: computes"),
        ("{{ messages.__class__ }}", "the chat template failed: line 1: reaches for the attribute '__class__'"),
        ("{{ raise_exception('no <|im_end|>') }}", r"the chat template failed: line 1: refuses .*: no <\|im_end\|>$"),
        ("{{ messages[0]['content'][5]['x'] }}", "the chat template failed: line 1: "),
    ],
)
def test_failing_template_is_one_line_that_names_it(source, message):
    template = ChatTemplate(source, NAMES, "folder/chat_template.jinja")

    with pytest.raises(ValueError, match=rf"^folder/chat_template\.jinja: {message}") as error:
        template.render(user("hi"))
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_template_by_its_size_is_not_read(tmp_path):
    with open(tmp_path / "chat_template.jinja", "wb") as f:
        f.truncate(2**36)

    with pytest.raises(UnreadableFileError, match=r"holds 68719476736 bytes; a chat template has at most 65536"):
        load_chat_template(tmp_path, [])


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'a'|center(10) }}", "{{ " + "(" * 5000, "x" * 70_000])
def test_unusable_template_is_named_when_it_is_read(tmp_path, source):
    (tmp_path / "chat_template.jinja").write_text(source)

    with pytest.raises(UnreadableFileError, match=r"chat_template\.jinja: is not a usable chat template: ") as error:
        load_chat_template(tmp_path, NAMES)
    assert "\n" not in str(error.value)


def test_template_that_is_not_text_is_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")

    with pytest.raises(UnreadableFileError, match=r"chat_template\.jinja: is not UTF-8 text \(byte 0\)"):
        load_chat_template(tmp_path, NAMES)


def test_template_in_its_older_place_is_read(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))

    assert load_chat_template(tmp_path, NAMES).render(user("hi")) == ["hi"]


def test_missing_template_is_named(tmp_path):
    shutil.copyfile(CHECKPOINT / "tokenizer_config.json", tmp_path / "tokenizer_config.json")

    with pytest.raises(UnreadableFileError, match=r"chat_template\.jinja: there is no such file, and tokenizer_config"):
        load_chat_template(tmp_path, NAMES)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"bytes", r"messages\[0\]\['content'\] is a bytes; texts, numbers, lists and dicts are expected"),
        ([{"type": "image", "image": os}], r"messages\[0\]\['content'\]\[0\]\['image'\] is a module"),
        ({1: "x"}, r"messages\[0\]\['content'\] has the key 1; a string is expected"),
    ],
)
def test_message_that_is_not_json_is_named(content, message):
    with pytest.raises(ValueError, match=message):
        TEMPLATE.render(user(content))


def test_tool_that_is_no_object_is_named():
    with pytest.raises(ValueError, match=r"tools\[0\] is 'f'; an object is expected"):
        TEMPLATE.render(user("hi"), tools=["f"])  # type: ignore[list-item]


def test_endlessly_nested_message_is_refused():
    content: list = []
    content.append(content)

    with pytest.raises(ValueError, match="is nested more than 100 deep"):
        TEMPLATE.render(user(content))


def test_rendering_leaves_the_messages_unchanged():
    messages = user([{"type": "text", "text": "\ud800"}])

    TEMPLATE.render(messages)

    assert messages == user([{"type": "text", "text": "\ud800"}])


def test_a_long_prompt_renders():
    text = "x" * 2_000_000

    assert TEMPLATE.render(user(text))[3] == text
