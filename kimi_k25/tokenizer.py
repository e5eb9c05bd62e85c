"""Text to token ids and back, by the checkpoint's tiktoken.model and tokenizer_config.json.

Knows nothing of chats, templates, images or stopping. `Tokenizer.encode` cannot produce a control token, whatever
the text says; control ids are reached by name, through `Tokenizer.special_ids`.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from aliasmix.errors import UnreadableFileError
from aliasmix.jsonfile import quote, read_object, regular_size

if TYPE_CHECKING:
    import tiktoken

MAX_RANKS_BYTES = 2**26  # of tiktoken.model; the published one has 2.8 MB
NUM_RESERVED_TOKENS = 256  # ids after the ranks; the checkpoint names some, the others are <|reserved_token_N|>

# tiktoken overflows its stack on longer inputs or runs; cut where the model's own tokenizer cuts, ids stay equal.
MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_RUNS = re.compile(r"\s+|\S+")

# A word may take one leading non-letter and a trailing English contraction. Han characters are letters to Unicode,
# but they form runs of their own, so both kinds of word exclude them (`&&` is an intersection, as in Rust's regex).
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEADING = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PAT_STR = "|".join(
    [
        r"[\p{Han}]+",
        f"{_LEADING}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEADING}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def replace_surrogates(text: str) -> str:
    """Returns `text` with surrogate pairs joined and lone surrogates replaced by U+FFFD, so that it is Unicode text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def cut_text(text: str) -> Iterator[str]:
    """Yields the consecutive parts of `text` that are encoded on their own; only very long texts have several."""
    for start in range(0, len(text), MAX_ENCODE_CHARS):
        window = text[start : start + MAX_ENCODE_CHARS]
        begin = 0
        for run in _RUNS.finditer(window):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield window[begin:cut]
                begin = cut
        yield window[begin:]


class Tokenizer:
    """Byte-level BPE with 256 reserved control tokens after the ranks.

    Attributes:
        special_ids: Name to id of every control token; also of the ones the checkpoint left unnamed.
        vocab_size: Number of ids, control tokens included.
    """

    def __init__(self, ranks: dict[bytes, int], special_ids: dict[str, int]) -> None:
        import tiktoken

        self.special_ids = special_ids
        self.vocab_size = len(ranks) + len(special_ids)
        self._encoding: tiktoken.Encoding = tiktoken.Encoding(
            name="kimi_k25", pat_str=PAT_STR, mergeable_ranks=ranks, special_tokens=special_ids
        )

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` as plain text; the names of control tokens in it are characters like any other."""
        text = replace_surrogates(text)
        return [i for part in cut_text(text) for i in self._encoding.encode_ordinary(part)]

    def encode_with_specials(self, text: str) -> list[int]:
        """Returns the ids of a text that we wrote ourselves: names of control tokens in it become control tokens.

        Never for text that a user, a tool or a file had a hand in.
        """
        text = replace_surrogates(text)
        return [i for part in cut_text(text) for i in self._encoding.encode(part, allowed_special="all")]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token; a control token's are its name.

        Raises:
            ValueError: There is no such id.
        """
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary (0 to {self.vocab_size - 1})")
        return self._encoding.decode_single_token_bytes(token_id)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Returns the text of `token_ids`; bytes that are not UTF-8 become U+FFFD, control tokens their names."""
        return b"".join(self.token_bytes(int(i)) for i in token_ids).decode("utf-8", "replace")

    def stream_decoder(self) -> StreamDecoder:
        """Returns a decoder that takes ids one by one."""
        return StreamDecoder(self)


class StreamDecoder:
    """Decodes ids one by one; text comes out when its last byte has come in, so no character is ever split.

    The texts of all `put` calls and of `finish`, joined, equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, token_id: int) -> str:
        """Takes one id, returns the text that it completes; often "" in the middle of a character."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Returns what is left of an unfinished character (U+FFFD, or ""), and starts over."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def read_ranks(path: str | Path) -> dict[bytes, int]:
    """Reads tiktoken.model: a line `base64(token) rank` for each token.

    Raises:
        UnreadableFileError: Names the line that is broken, repeated or out of range, or the byte that has no token.
    """
    path = Path(path)
    if (size := regular_size(path)) > MAX_RANKS_BYTES:
        raise UnreadableFileError(path, f"holds {size} bytes; at most {MAX_RANKS_BYTES} are read")
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise UnreadableFileError(path, f"cannot be read: {e.strerror}") from e

    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        match line.split():
            case [encoded, digits] if digits.isdigit() and len(digits) < 10:
                rank = int(digits)
            case _:
                reason = f"line {number} is {_shown(line)}; `base64 rank` is expected"
                raise UnreadableFileError(path, reason)
        try:
            token = base64.b64decode(encoded, validate=True)
        except binascii.Error as e:
            reason = f"line {number} has {_shown(encoded)}, which is not base64 ({e})"
            raise UnreadableFileError(path, reason) from None
        if not token:
            raise UnreadableFileError(path, f"line {number} has an empty token")
        if token in ranks:
            first = line_of_rank[ranks[token]]
            raise UnreadableFileError(path, f"line {number} repeats the token {token!r} of line {first}")
        if rank in line_of_rank:
            reason = f"line {number} repeats the rank {rank} of line {line_of_rank[rank]}"
            raise UnreadableFileError(path, reason)
        ranks[token] = rank
        line_of_rank[rank] = number

    for rank, number in line_of_rank.items():
        if rank >= len(ranks):
            reason = f"line {number} has rank {rank}; {len(ranks)} tokens must have the ranks 0 to {len(ranks) - 1}"
            raise UnreadableFileError(path, reason)
    for byte in range(256):  # a byte without a token would make some texts impossible to encode
        if bytes([byte]) not in ranks:
            raise UnreadableFileError(path, f"has no token for the single byte 0x{byte:02x}; all 256 are needed")
    return ranks


def _shown(raw: bytes) -> str:
    return repr(raw[:40].decode("latin-1")) + ("…" if len(raw) > 40 else "")


def read_special_ids(path: str | Path, num_ranks: int) -> dict[str, int]:
    """Reads the names of the 256 reserved ids from tokenizer_config.json's added_tokens_decoder.

    The list has gaps. A gap keeps its id and gets the name <|reserved_token_ID|>: whoever closes the gaps shifts
    every later id, as fast tokenizers converted from this one did.

    Raises:
        UnreadableFileError: An id is outside the reserved range, a name is missing or given twice.
    """
    path = Path(path)
    named = read_object(path, fractions=True).get("added_tokens_decoder")
    if not isinstance(named, dict):
        found = "is missing" if named is None else f"is a {type(named).__name__}"
        raise UnreadableFileError(path, f"added_tokens_decoder {found}; an object of id: {{content}} is expected")

    end = num_ranks + NUM_RESERVED_TOKENS
    names: dict[int, str] = {}
    for key, token in named.items():
        if not (key.isascii() and key.isdigit() and key[0] != "0" and num_ranks <= int(key[:10]) < end):
            reason = f"added_tokens_decoder has the id {quote(key)}; {num_ranks} to {end - 1} are the reserved ids"
            raise UnreadableFileError(path, reason)
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not content:
            raise UnreadableFileError(path, f"added_tokens_decoder[{key!r}] has no content; a name is expected")
        if replace_surrogates(content) != content:
            raise UnreadableFileError(path, f"added_tokens_decoder[{key!r}] is {quote(content)}, not Unicode text")
        names[int(key)] = content

    special_ids: dict[str, int] = {}
    for token_id in range(num_ranks, end):
        name = names.get(token_id, f"<|reserved_token_{token_id}|>")
        if name in special_ids:
            reason = f"added_tokens_decoder gives {quote(name)} to the ids {special_ids[name]} and {token_id}"
            raise UnreadableFileError(path, reason)
        special_ids[name] = token_id
    return special_ids


def load_tokenizer(checkpoint: str | Path) -> Tokenizer:
    """Loads the tokenizer of a checkpoint folder.

    Raises:
        UnreadableFileError: tiktoken.model or tokenizer_config.json is missing or broken; names the line or the key.
    """
    ranks = read_ranks(Path(checkpoint) / "tiktoken.model")
    return Tokenizer(ranks, read_special_ids(Path(checkpoint) / "tokenizer_config.json", len(ranks)))
