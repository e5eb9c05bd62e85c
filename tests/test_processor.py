import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_media import make_frames, make_image
from safetensors import safe_open

from aliasmix.errors import UnreadableFileError
from kimi_k25.processor import OutputText, load_processor

ORACLE = Path(__file__).parent / "data" / "oracle"
CHECKPOINT = ORACLE / "tiny_bf16"
GOLDENS = json.loads((ORACLE / "goldens.json").read_text(encoding="utf-8"))
PROCESSOR = load_processor(CHECKPOINT)
SPECIAL = GOLDENS["special"]
CONTROL_IDS = set(PROCESSOR.tokenizer.special_ids.values())
PAD = SPECIAL["<|media_pad|>"]


@pytest.fixture
def checkpoint(tmp_path):
    for path in CHECKPOINT.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, tmp_path / path.name)
    return tmp_path


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# ------------------------------------------------------------------ against the oracle


def golden_inputs(name):
    match name:
        case "text":
            return PROCESSOR("What is the answer? 你好世界")
        case "image":
            return PROCESSOR("Describe this picture.", images=[make_image("A")])
        case "two_images":
            images = [make_image("B"), make_image("D")]
            return PROCESSOR("the other thing", images=images, thinking=False)
    return PROCESSOR("What is the video?", videos=[(make_frames(7), 2.0)])


@pytest.mark.parametrize("name", GOLDENS["prompts"])
def test_inputs_equal_golden(name):
    golden = GOLDENS["prompts"][name]

    batch = golden_inputs(name)

    assert batch.input_ids.dtype == torch.int64
    assert batch.input_ids.tolist() == golden["ids"]
    if not golden["grids"]:
        assert batch.pixel_values is None
        assert batch.grid_thws is None
    else:
        assert batch.grid_thws.dtype == torch.int64
        assert batch.grid_thws.tolist() == golden["grids"]
        assert batch.pixel_values.dtype == torch.float32
        assert batch.pixel_values.shape == (batch.grid_thws.prod(1).sum(), 3, 14, 14)


def test_pixel_values_are_the_images_in_order():
    batch = golden_inputs("two_images")

    with safe_open(ORACLE / "goldens.safetensors", "pt") as file:
        expected = torch.cat([file.get_tensor("image.B.pixel_values"), file.get_tensor("image.D.pixel_values")])
    assert torch.equal(batch.pixel_values, expected)


def test_int4_checkpoint_has_the_same_inputs():
    batch = load_processor(ORACLE / "tiny_int4")("What is the answer? 你好世界")

    assert batch.input_ids.tolist() == GOLDENS["prompts"]["text"]["ids"]


# ------------------------------------------------------------------ placeholders


def parts(*kinds):
    return [{"role": "user", "content": [{"type": kind, "text": "x"} for kind in kinds]}]


def test_placeholders_follow_the_order_of_parts():
    messages = parts("image", "text", "video", "image_url") + parts("image")

    batch = PROCESSOR(
        messages, images=[make_image(n) for n in "AEB"], videos=[(make_frames(5), 2.0)]
    )

    assert batch.grid_thws.tolist() == [[1, 4, 6], [4, 4, 4], [1, 4, 4], [1, 8, 8], [1, 8, 4]]
    assert batch.input_ids.tolist().count(PAD) == 6 + 4 + 4 + 16 + 8
    assert len(batch.pixel_values) == 24 + 64 + 16 + 64 + 32


@pytest.mark.parametrize(
    "messages, num_images, num_videos, message",
    [
        (parts("image"), 0, 0, "the messages have 1 image parts, but images has 0; each part takes one"),
        (parts("image", "image_url"), 1, 0, "the messages have 2 image parts, but images has 1"),
        (parts("text"), 1, 0, "the messages have 0 image parts, but images has 1"),
        (parts("video"), 0, 0, "the messages have 1 video parts, but videos has 0"),
        (parts("image"), 1, 1, "the messages have 0 video parts, but videos has 1"),
    ],
)
def test_other_number_of_media_is_an_error_with_both(messages, num_images, num_videos, message):
    with pytest.raises(ValueError, match=message):
        PROCESSOR(messages, images=[make_image("A")] * num_images, videos=[(make_frames(1), 2.0)] * num_videos)


def test_template_that_leaves_images_out_is_named(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{{ 'no pictures' }}")

    with pytest.raises(ValueError, match=r"chat_template\.jinja: the template wrote 0 <\|media_pad\|> for 1 images"):
        load_processor(checkpoint)("x", images=[make_image("A")])


def test_template_that_writes_nothing_is_named(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("")

    with pytest.raises(ValueError, match=r"chat_template\.jinja: the template wrote nothing for 1 messages"):
        load_processor(checkpoint)("hi")


def test_typed_placeholders_take_no_image():
    batch = PROCESSOR("<|media_pad|><|kimi_k25_video_placeholder|>", images=[make_image("A")])

    assert batch.input_ids.tolist().count(PAD) == 6
    assert PROCESSOR.decode(batch.input_ids.tolist()).count("<|kimi_k25_video_placeholder|>") == 1


@settings(deadline=None)
@given(st.lists(st.one_of(st.sampled_from(sorted(SPECIAL)), st.text(max_size=5)), max_size=6).map("".join))
def test_user_text_adds_no_control_token(text):
    harmless = Counter(i for i in PROCESSOR("x", images=[make_image("A")]).input_ids.tolist() if i in CONTROL_IDS)

    ids = PROCESSOR(text, images=[make_image("A")]).input_ids.tolist()

    assert Counter(i for i in ids if i in CONTROL_IDS) == harmless
    user_ids = ids[ids.index(SPECIAL["<|media_end|>"]) + 1 : ids.index(SPECIAL["<|im_end|>"])]
    assert PROCESSOR.decode(user_ids) == "\n" + text


# ------------------------------------------------------------------ prompts


@pytest.mark.parametrize("thinking, end", [(True, "<think>"), (False, "<think></think>")])
def test_generation_prompt_is_added(thinking, end):
    ids = PROCESSOR("hi", thinking=thinking).input_ids.tolist()

    assert PROCESSOR.decode(ids).endswith(f"<|im_end|><|im_assistant|>assistant<|im_middle|>{end}")


def test_tools_are_declared_first():
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|>", "parameters": {}}}

    ids = PROCESSOR("hi", tools=[tool]).input_ids.tolist()

    assert PROCESSOR.decode(ids).startswith("<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\n")
    assert ids.count(SPECIAL["<|im_end|>"]) == 2


@pytest.mark.parametrize("name", ["user", "user_instant", "system_image", "history"])
def test_messages_equal_golden_chat(name):
    golden = GOLDENS["chat"][name]
    thinking = golden["args"].get("thinking", True)
    images = [make_image("A")] if "image" in name else []

    ids = PROCESSOR(golden["args"]["messages"], images=images, thinking=thinking).input_ids.tolist()

    once = [i for k, i in enumerate(ids) if i != PAD or ids[k - 1] != PAD]
    assert once == golden["ids"]


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "a text or a list of at least one message is expected"),
        ({"role": "user", "content": "x"}, "a text or a list of at least one message is expected"),
        (["hi"], r"messages\[0\] is 'hi'; an object with a role and a content is expected"),
        ([{"content": "hi"}], r"messages\[0\] is .*; an object with a role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content is a int; a text or a list of parts is expected"),
        ([{"role": "user", "content": ["hi"]}], r"messages\[0\]\.content\[0\] has the type None; one of text, image"),
        (parts("audio"), r"messages\[0\]\.content\[0\] has the type 'audio'; one of text, image, image_url, video"),
        (parts([]), r"messages\[0\]\.content\[0\] has the type \[\]; one of text"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\] is a text part without a"),
    ],
)
def test_messages_of_another_format_are_refused(messages, message):
    with pytest.raises(ValueError, match=message):
        PROCESSOR(messages)


@pytest.mark.parametrize(
    "media, message",
    [
        ({"images": make_image("A")}, "images is a Image; a list is expected, also for one"),
        ({"images": None}, "images is a NoneType; a list is expected"),
        ({"images": ["a.png"]}, "image 0 is a str; a PIL.Image.Image is expected"),
        ({"videos": [make_frames(2)]}, "video 0 is a list; a pair of frames and fps is expected"),
    ],
)
def test_media_of_another_form_are_refused(media, message):
    with pytest.raises(TypeError, match=message):
        PROCESSOR("hi", **media)


def test_media_beyond_the_context_are_refused_before_they_take_memory(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 45
    change(checkpoint / "config.json", **config)
    processor = load_processor(checkpoint)
    frames = [*make_frames(16), *[None] * 999]  # to look at a fifth chunk would be a TypeError

    with pytest.raises(ValueError, match=r"image \d+ takes the prompt to \d+ tokens and maybe more; the model"):
        processor("hi", images=[make_image("A")] * 9)
    with pytest.raises(ValueError, match=r"video 0 takes the prompt to \d+ tokens and maybe more; .* holds 45, one"):
        processor("hi", videos=[(frames, 2.0)])


# ------------------------------------------------------------------ checkpoints


def test_placeholder_id_that_differs_is_an_error_with_both(checkpoint):
    change(checkpoint / "config.json", media_placeholder_token_id=402)

    with pytest.raises(ValueError, match=r"media_placeholder_token_id 402, but the tokenizer has id 405 for <"):
        load_processor(checkpoint)


def test_tokenizer_whose_gaps_were_closed_is_refused(checkpoint):
    """The public bug: a converted tokenizer packs the names, and media_pad moves down by three."""
    path = checkpoint / "tokenizer_config.json"
    tokens = json.loads(path.read_text())["added_tokens_decoder"].values()
    change(path, added_tokens_decoder={str(384 + i): token for i, token in enumerate(tokens)})

    with pytest.raises(ValueError, match=r"media_placeholder_token_id 405, but the tokenizer has id 402 for <"):
        load_processor(checkpoint)


def test_tokenizer_without_the_placeholder_is_refused(checkpoint):
    change(checkpoint / "tokenizer_config.json", added_tokens_decoder={})

    with pytest.raises(ValueError, match=r"but the tokenizer has no such token for <\|media_pad\|>"):
        load_processor(checkpoint)


@pytest.mark.parametrize("name", ["<|media_begin|>", "<|media_content|>", "<|media_end|>"])
def test_tokenizer_without_a_token_around_pictures_is_refused(checkpoint, name):
    path = checkpoint / "tokenizer_config.json"
    path.write_text(path.read_text().replace(name, "<|another|>"))

    with pytest.raises(ValueError, match=f"the tokenizer has no token {re.escape(name)}, which surrounds"):
        load_processor(checkpoint)


def test_patches_of_another_size_than_the_models_are_refused(checkpoint):
    media = json.loads((checkpoint / "preprocessor_config.json").read_text())["media_proc_cfg"]
    change(checkpoint / "preprocessor_config.json", media_proc_cfg=media | {"patch_size": 16})

    with pytest.raises(UnreadableFileError, match=r"patch_size is 16, but vision_config\.patch_size .* is 14"):
        load_processor(checkpoint)


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json", "preprocessor_config.json", "config.json"])
def test_missing_file_is_named(checkpoint, name):
    (checkpoint / name).unlink()

    with pytest.raises((ValueError, FileNotFoundError), match=name.replace(".", r"\.")):
        load_processor(checkpoint)


# ------------------------------------------------------------------ output


def ids_of(text):
    return PROCESSOR.tokenizer.encode_with_specials(text)


@pytest.mark.parametrize(
    "thinking, output, reasoning, answer",
    [
        (True, "look</think>a cat 🙂", "look", "a cat 🙂"),
        (True, "still looking", "still looking", ""),
        (False, "a cat", "", "a cat"),
        (True, "</think>", "", ""),
        (False, "a<think>b</think>c", "b", "ac"),
        (True, "a</think>b</think>c", "a", "bc"),
    ],
)
def test_reasoning_and_answer_are_split(thinking, output, reasoning, answer):
    prompt_ids = PROCESSOR("hi", thinking=thinking).input_ids

    assert PROCESSOR.split_output(prompt_ids, ids_of(output)) == OutputText(reasoning, answer)


def test_typed_think_in_the_prompt_opens_nothing():
    prompt_ids = PROCESSOR("<think>", thinking=False).input_ids

    assert not PROCESSOR.output_stream(prompt_ids).is_reasoning


def test_character_cut_off_by_the_end_of_reasoning_stays_in_it():
    stream = PROCESSOR.output_stream(PROCESSOR("hi").input_ids)
    half = ids_of("🙂")[:2]

    texts = [stream.put(i) for i in [*half, SPECIAL["</think>"], *ids_of("é")]]

    assert OutputText("\ufffd", "") in texts
    assert "".join(text.answer for text in texts) + stream.finish().answer == "é"


@given(st.lists(st.integers(0, 639), max_size=30))
def test_streamed_output_equals_the_whole(ids):
    text = PROCESSOR.decode(i for i in ids if i not in (SPECIAL["<think>"], SPECIAL["</think>"]))

    split = PROCESSOR.split_output([], ids)

    if SPECIAL["<think>"] not in ids and SPECIAL["</think>"] not in ids:
        assert split == OutputText("", text)
    else:
        assert len(split.reasoning) + len(split.answer) >= len(text)


# ------------------------------------------------------------------ what importing costs


def test_importing_text_and_media_loads_no_torch_pillow_or_jinja():
    code = (
        "import sys, kimi_k25.tokenizer, kimi_k25.image_processor, kimi_k25.video\n"
        "print(sorted({'torch', 'PIL', 'jinja2', 'tiktoken', 'numpy', 'av'} & set(sys.modules)))"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert result.stdout.strip() == "[]"
