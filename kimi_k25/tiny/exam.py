"""The held-out questions: the same two thousand for every model. Knows no model and no answers but the right ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

from .lessons import Lesson, Teacher

EXAM_SEED = 7
EXAM = {
    "digit": 450,
    "color": 200,
    "shape": 200,
    "count": 250,
    "position": 250,
    "compare": 250,
    "video": 150,
    "arithmetic": 100,
    "unknown": 150,
}


def exam(num_questions: int = 2000) -> Iterator[Lesson]:
    """The held-out questions, always the same ones: every kind in its share, on pictures no training lesson shows.

    A smaller exam is a subset in the same shares.
    """
    total = sum(EXAM.values())
    for k, (kind, share) in enumerate(EXAM.items()):
        teacher = Teacher(random.Random(f"exam {EXAM_SEED} {k}"), "test")
        for _ in range(round(share * num_questions / total)):
            yield teacher.single_question(kind)
