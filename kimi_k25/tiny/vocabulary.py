"""Byte-pair merges for the embedded default, trained on its own questions. Writes tiktoken.model; knows no model."""

from __future__ import annotations

import base64
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

# Coarser than the tokenizer's own split, and never across it: a merge found here is one that encoding can reach.
# Digits stay single, so that a number is read digit by digit.
_PIECE = re.compile(r" ?[A-Za-z]+(?:'t)?| ?[^\sA-Za-z0-9]+")


def train_merges(texts: Iterable[str], num_merges: int) -> list[bytes]:
    """Tokens of two or more bytes in the order of their ranks, the most frequent pair first.

    Raises:
        ValueError: The texts hold fewer than `num_merges` pairs to merge.
    """
    counts = Counter(piece for text in texts for piece in _PIECE.findall(text))
    words = {piece: [bytes([b]) for b in piece.encode()] for piece in counts}
    merges: list[bytes] = []
    while len(merges) < num_merges:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for piece, parts in words.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += counts[piece]
        if not pairs:
            raise ValueError(f"the corpus ran out of pairs after {len(merges)} merges; expected {num_merges}")
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        if left + right not in merges:  # Two pairs can spell the same token.
            merges.append(left + right)
        for parts in words.values():
            at = 0
            while at + 1 < len(parts):
                if parts[at] == left and parts[at + 1] == right:
                    parts[at : at + 2] = [left + right]
                at += 1
    return merges


def write_tiktoken(path: Path, merges: Iterable[bytes]) -> None:
    """Writes the 256 bytes, then the merges, each as `base64 rank`."""
    tokens = [*(bytes([b]) for b in range(256)), *merges]
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens)))
