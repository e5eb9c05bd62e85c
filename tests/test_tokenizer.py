import base64
import json
import random
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aliasmix.errors import UnreadableFileError
from kimi_k25.tokenizer import (
    MAX_ENCODE_CHARS,
    MAX_RUN_CHARS,
    PAT_STR,
    Tokenizer,
    cut_text,
    load_tokenizer,
    read_ranks,
    read_special_ids,
)

ORACLE = Path(__file__).parent / "data" / "oracle"
CHECKPOINT = ORACLE / "tiny_bf16"
GOLDENS = json.loads((ORACLE / "goldens.json").read_text(encoding="utf-8"))
TOKENIZER = load_tokenizer(CHECKPOINT)
CONTROL_IDS = set(TOKENIZER.special_ids.values())


def folder(tmp_path: Path) -> Path:
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT / name, tmp_path / name)
    return tmp_path


# ------------------------------------------------------------------ against the oracle


@pytest.mark.parametrize("text", GOLDENS["encode"])
def test_encode_with_specials_equals_golden(text):
    assert TOKENIZER.encode_with_specials(text) == GOLDENS["encode"][text]


@pytest.mark.parametrize("text", GOLDENS["encode_no_special"])
def test_encode_equals_golden(text):
    assert TOKENIZER.encode(text) == GOLDENS["encode_no_special"][text]


@pytest.mark.parametrize("text", GOLDENS["regex_probe"]["allowed_special=all"])
def test_splitting_pattern_equals_regex_probe(text):
    ranks = read_ranks(ORACLE / "regex_probe" / "tiktoken.model")
    special_ids = read_special_ids_with_offset_of_tiny(len(ranks))

    ids = Tokenizer(ranks, special_ids).encode_with_specials(text)

    assert ids == GOLDENS["regex_probe"]["allowed_special=all"][text]


def read_special_ids_with_offset_of_tiny(num_ranks: int) -> dict[str, int]:
    return {name: i - 384 + num_ranks for name, i in TOKENIZER.special_ids.items()}


def test_regex_probe_notices_a_pattern_without_han():
    """The probes are only worth something if a wrong pattern fails them."""
    import tiktoken

    ranks = read_ranks(ORACLE / "regex_probe" / "tiktoken.model")
    wrong = PAT_STR.replace("&&[^\\p{Han}]", "").removeprefix("[\\p{Han}]+|")
    encoding = tiktoken.Encoding("wrong", pat_str=wrong, mergeable_ranks=ranks, special_tokens={})
    probes = GOLDENS["regex_probe"]["allowed_special=all"]

    assert any(encoding.encode_ordinary(text) != ids for text, ids in probes.items() if "<|" not in text)


# ------------------------------------------------------------------ control tokens


def test_named_control_tokens_have_the_golden_ids():
    assert {n: i for n, i in TOKENIZER.special_ids.items() if "reserved_token" not in n} == GOLDENS["special"]
    assert TOKENIZER.vocab_size == 640
    assert sorted(CONTROL_IDS) == list(range(384, 640))


def test_gaps_keep_their_ids():
    """Closing the gaps at +5, +8 and +16 shifts media_pad by three; converted tokenizers did that."""
    special_ids = TOKENIZER.special_ids

    assert special_ids["<|reserved_token_389|>"] == 389
    assert special_ids["<|reserved_token_392|>"] == 392
    assert special_ids["<|reserved_token_400|>"] == 400
    assert special_ids["<|media_end|>"] == 404
    assert special_ids["<|media_pad|>"] == 405
    assert special_ids["</think>"] == 407


def test_full_size_offsets_give_the_published_ids(tmp_path):
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    moved = {str(int(i) - 384 + 163584): token for i, token in config["added_tokens_decoder"].items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": moved}))

    special_ids = read_special_ids(tmp_path / "tokenizer_config.json", 163584)

    assert special_ids["[BOS]"] == 163584
    assert special_ids["[EOS]"] == 163585
    assert special_ids["<|im_end|>"] == 163586
    assert special_ids["<|im_middle|>"] == 163601
    assert special_ids["<|media_pad|>"] == 163605
    assert special_ids["<think>"] == 163606
    assert special_ids["</think>"] == 163607
    assert special_ids["[PAD]"] == 163839


def test_think_round_trips():
    ids = TOKENIZER.encode_with_specials("<think>x</think>")

    assert ids[0] == 406
    assert ids[-1] == 407
    assert TOKENIZER.decode(ids) == "<think>x</think>"
    assert TOKENIZER.decode([407]) == "</think>"


names_or_text = st.lists(st.one_of(st.sampled_from(sorted(TOKENIZER.special_ids)), st.text(max_size=20))).map("".join)


@given(names_or_text)
def test_encode_never_makes_a_control_token_and_decodes_back(text):
    ids = TOKENIZER.encode(text)

    assert not CONTROL_IDS & set(ids)
    assert TOKENIZER.decode(ids) == text


def test_lone_surrogates_become_replacement_characters():
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\ufffdb"
    assert TOKENIZER.decode(TOKENIZER.encode("\ud83d\ude42")) == "🙂"


# ------------------------------------------------------------------ long texts


def textbook_cut(text: str, max_chars: int, max_run: int) -> list[str]:
    """Character by character: start a new part after `max_run` characters of one class, and every `max_chars`."""
    parts: list[str] = []
    for start in range(0, len(text), max_chars):
        part, run = "", 0
        for i, char in enumerate(text[start : start + max_chars]):
            same_class = i > 0 and char.isspace() == text[start + i - 1].isspace()
            run = run + 1 if same_class else 1
            if run > max_run:
                parts.append(part)
                part, run = "", 1
            part += char
        parts.append(part)
    return parts


@settings(deadline=None)
@given(st.text(alphabet=" \n\x1cab字", max_size=80), st.integers(2, 30), st.integers(1, 7))
def test_cuts_equal_the_textbook(text, max_chars, max_run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kimi_k25.tokenizer.MAX_ENCODE_CHARS", max_chars)
        patch.setattr("kimi_k25.tokenizer.MAX_RUN_CHARS", max_run)

        assert list(cut_text(text)) == textbook_cut(text, max_chars, max_run)


def test_cut_limits_are_the_published_ones():
    lengths = [len(part) for part in cut_text("a" * 60_000 + " " + "b" * (MAX_ENCODE_CHARS - 60_001) + "c")]

    assert (MAX_ENCODE_CHARS, MAX_RUN_CHARS) == (400_000, 25_000)
    assert lengths[:2] == [25_000, 25_000]
    assert lengths[-1] == 1
    assert sum(lengths) == 400_001


def test_a_million_characters_without_a_space_encode():
    ids = TOKENIZER.encode("a" * 1_000_000)

    assert TOKENIZER.decode(ids) == "a" * 1_000_000


# ------------------------------------------------------------------ decoding


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_streamed_text_equals_decode(ids):
    decoder = TOKENIZER.stream_decoder()

    text = "".join(decoder.put(i) for i in ids) + decoder.finish()

    assert text == TOKENIZER.decode(ids)


@given(st.text(max_size=20))
def test_stream_never_emits_half_a_character(text):
    decoder = TOKENIZER.stream_decoder()
    byte_ids = [TOKENIZER.encode(chr(byte))[0] if byte < 128 else byte for byte in text.encode()]

    parts = [decoder.put(i) for i in byte_ids]

    assert "".join(parts) == text
    assert decoder.finish() == ""


def test_unfinished_character_is_reported_once():
    decoder = TOKENIZER.stream_decoder()
    first_bytes = TOKENIZER.encode("🙂")[:2]

    assert [decoder.put(i) for i in first_bytes] == ["", ""]
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""


@pytest.mark.parametrize("token_id", [-1, 640])
def test_id_outside_the_vocabulary_is_refused(token_id):
    with pytest.raises(ValueError, match=rf"token id {token_id} is outside the vocabulary \(0 to 639\)"):
        TOKENIZER.decode([token_id])


# ------------------------------------------------------------------ broken files

A = base64.b64encode(b"a").decode()
BROKEN_LINES = {
    "one field": ("QQ==", r"line 3 is 'QQ=='; `base64 rank` is expected"),
    "three fields": ("QQ== 1 2", r"line 3 is 'QQ== 1 2'; `base64 rank` is expected"),
    "negative rank": ("QQ== -2", r"line 3 is 'QQ== -2'; `base64 rank` is expected"),
    "rank in words": ("QQ== two", r"line 3 is 'QQ== two'; `base64 rank` is expected"),
    "huge rank": ("QQ== " + "9" * 5000, r"line 3 is 'QQ== 9+'…; `base64 rank` is expected"),
    "not base64": ("Q!== 2", r"line 3 has 'Q!==', which is not base64"),
    "cut base64": ("QQ= 2", r"line 3 has 'QQ=', which is not base64"),
    "empty token": ("==== 2", r"line 3 has .*"),
    "repeated token": ("AA== 2", r"line 3 repeats the token b'\\x00' of line 1"),
    "repeated rank": ("Av8= 1", r"line 3 repeats the rank 1 of line 2"),
    "rank beyond the count": ("Ag== 700", r"line 3 has rank 700; 384 tokens must have the ranks 0 to 383"),
    "binary": ("\x00\x01\x02", r"line 3 is '\\x00\\x01\\x02'; `base64 rank` is expected"),
}


@pytest.mark.parametrize("case", BROKEN_LINES)
def test_broken_line_is_named(tmp_path, case):
    line, message = BROKEN_LINES[case]
    path = folder(tmp_path) / "tiktoken.model"
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines) + "\n")

    with pytest.raises(UnreadableFileError, match=rf"tiktoken\.model: {message}"):
        load_tokenizer(tmp_path)


def test_vocabulary_without_a_byte_is_refused(tmp_path):
    path = folder(tmp_path) / "tiktoken.model"
    lines = path.read_text().splitlines()
    lines[ord("A")] = base64.b64encode(b"unlikely").decode() + " 65"
    path.write_text("\n".join(lines))

    with pytest.raises(UnreadableFileError, match="has no token for the single byte 0x41"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_missing_file_is_named(tmp_path, name):
    (folder(tmp_path) / name).unlink()

    with pytest.raises(UnreadableFileError, match=rf"{re.escape(name)}: there is no such file"):
        load_tokenizer(tmp_path)


def test_every_byte_flip_of_the_vocabulary_is_an_error_or_a_tokenizer(tmp_path):
    raw = (CHECKPOINT / "tiktoken.model").read_bytes()
    path = tmp_path / "tiktoken.model"
    rng = random.Random(3)
    for _ in range(200):
        changed = bytearray(raw)
        changed[rng.randrange(len(raw))] = rng.randrange(256)
        path.write_bytes(changed[: rng.choice([len(raw), rng.randrange(len(raw))])])
        try:
            ranks = read_ranks(path)
        except UnreadableFileError as e:
            assert str(path) in str(e)
        else:
            assert sorted(ranks.values()) == list(range(len(ranks)))


BROKEN_CONFIGS = {
    "text": ("hello", "is not JSON: Expecting value at character 0"),
    "list": ("[]", "holds a list; expected an object"),
    "latin-1": (b"\xe9", "is not UTF-8 text"),
    "deep": ("[" * 100_000, "is JSON that cannot be read"),
    "no list of names": ("{}", r"added_tokens_decoder is missing; an object of id: \{content\} is expected"),
    "names as a list": ('{"added_tokens_decoder": []}', "added_tokens_decoder is a list"),
    "id below": ('{"added_tokens_decoder": {"5": {"content": "x"}}}', "has the id '5'; 384 to 639 are the reserved"),
    "id beyond": ('{"added_tokens_decoder": {"640": {"content": "x"}}}', "has the id '640'"),
    "id in words": ('{"added_tokens_decoder": {"x": {"content": "x"}}}', "has the id 'x'"),
    "id twice": ('{"added_tokens_decoder": {"0384": {"content": "x"}}}', "has the id '0384'"),
    "lone surrogate": (r'{"added_tokens_decoder": {"384": {"content": "\ud800"}}}', "not Unicode text"),
    "no name": ('{"added_tokens_decoder": {"384": {}}}', r"added_tokens_decoder\['384'\] has no content"),
    "empty name": ('{"added_tokens_decoder": {"384": {"content": ""}}}', "has no content"),
    "name twice": (
        '{"added_tokens_decoder": {"384": {"content": "x"}, "386": {"content": "x"}}}',
        "gives 'x' to the ids 384 and 386",
    ),
}


@pytest.mark.parametrize("case", BROKEN_CONFIGS)
def test_broken_tokenizer_config_is_named(tmp_path, case):
    content, message = BROKEN_CONFIGS[case]
    path = folder(tmp_path) / "tokenizer_config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(UnreadableFileError, match=rf"tokenizer_config\.json: .*{message}"):
        load_tokenizer(tmp_path)
