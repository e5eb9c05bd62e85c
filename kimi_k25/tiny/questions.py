"""What the embedded default is asked, and what it should answer: phrasings, answers, reasoning. Knows no pictures.

A `Question` is the text of one turn. `ask` picks a phrasing of a topic and fills it in; `style` varies spelling,
capitals and punctuation the way people do.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "black", "white")
SHAPES = ("circle", "square", "triangle", "star", "cross")
PLACES = (
    *("top left", "top", "top right"),
    *("left", "center", "right"),
    *("bottom left", "bottom", "bottom right"),
)
DIRECTIONS = ("left", "right", "up", "down")
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
MAX_COUNT = 6
MAX_OPERAND = 10
UNKNOWN = "I don't know"

KINDS = ("digit", "color", "shape", "count", "position", "compare", "video", "arithmetic", "unknown")

_COLOR_OF = (
    "What color is the {thing}?",
    "Which color is the {thing}?",
    "What is the color of the {thing}?",
    "What color does the {thing} have?",
    "Name the color of the {thing}.",
    "Tell me the color of the {thing} in the picture.",
)

# {thing} is a shape, {things} what is counted, {a} and {b} shapes or numbers.
PHRASINGS: dict[str, tuple[str, ...]] = {
    "digit": (
        "What digit is this?",
        "Which digit is this?",
        "What digit is it?",
        "What number is this?",
        "Which number is it?",
        "What digit do you see?",
        "Which digit is in the picture?",
        "What digit does the image show?",
        "Which number is written here?",
        "Read the digit.",
        "Name the digit in this picture.",
    ),
    "color": ("What color is it?", "What color is this?", *_COLOR_OF),
    "color_of": _COLOR_OF,
    "shape": (
        "What shape is it?",
        "What shape is this?",
        "Which shape is this?",
        "What shape do you see?",
        "Which shape is in the picture?",
        "What shape does the image show?",
        "Name the shape.",
    ),
    "shape_of_color": (
        "What shape is the {color} one?",
        "Which shape is {color}?",
        "What is the {color} shape?",
        "What shape does the {color} one have?",
        "Name the {color} shape.",
    ),
    "count": (
        "How many {things} are there?",
        "How many {things} do you see?",
        "How many {things} are in the picture?",
        "How many {things} does the image show?",
        "Count the {things}.",
        "What is the number of {things}?",
        "Tell me how many {things} there are.",
    ),
    "place": (
        "Where is the {thing}?",
        "Where is it?",
        "Where in the picture is the {thing}?",
        "In which part of the image is the {thing}?",
        "What is the position of the {thing}?",
        "Find the {thing}.",
        "Tell me where the {thing} is.",
    ),
    "side": (
        "Is the {a} left or right of the {b}?",
        "Is the {a} to the left or to the right of the {b}?",
        "Is the {a} on the left or on the right of the {b}?",
        "On which side of the {b} is the {a}, left or right?",
        "Left or right: where is the {a}, seen from the {b}?",
    ),
    "height": (
        "Is the {a} above or below the {b}?",
        "Is the {a} higher or lower than the {b}, above or below?",
        "Above or below: where is the {a}, seen from the {b}?",
        "Where is the {a}, above or below the {b}?",
        "Is the {a} placed above the {b} or below it?",
    ),
    "more": (
        "Which image has more {things}?",
        "Which picture has more {things}?",
        "Which of the two images shows more {things}?",
        "In which image are there more {things}?",
        "Are there more {things} in the first image or in the second?",
        "Where do you see more {things}, in the first picture or in the second?",
    ),
    "fewer": (
        "Which image has fewer {things}?",
        "Which picture has fewer {things}?",
        "Which of the two images shows fewer {things}?",
        "In which image are there fewer {things}?",
        "Are there fewer {things} in the first image or in the second?",
    ),
    "same_color": (
        "Do both images show the same color?",
        "Are both shapes the same color?",
        "Is the color the same in both pictures?",
        "Do the two shapes have the same color?",
        "Are the two images alike in color?",
    ),
    "same_shape": (
        "Do both images show the same shape?",
        "Are both shapes the same?",
        "Is the shape the same in both pictures?",
        "Do the two pictures have the same shape?",
        "Are the two images alike in shape?",
    ),
    "describe": (
        "Describe the picture.",
        "Describe the image.",
        "What do you see?",
        "What is in the picture?",
        "What does the image show?",
        "Tell me what you see.",
    ),
    "direction": (
        "Which way does it move?",
        "Which way does the {thing} move?",
        "In which direction does the {thing} move?",
        "Which direction is the {thing} moving?",
        "What is the direction of the {thing}?",
        "Where is the {thing} going?",
        "Where does it go in the video?",
        "Tell me which way the {thing} goes.",
    ),
    "plus": (
        "What is {a} plus {b}?",
        "How much is {a} plus {b}?",
        "What is the sum of {a} and {b}?",
        "What is {a} + {b}?",
        "{a} + {b} = ?",
        "Add {a} and {b}.",
        "Calculate {a} plus {b}.",
    ),
    "minus": (
        "What is {a} minus {b}?",
        "How much is {a} minus {b}?",
        "What is {a} - {b}?",
        "{a} - {b} = ?",
        "Take {b} away from {a}.",
        "Subtract {b} from {a}.",
        "Calculate {a} minus {b}.",
    ),
    "larger": (
        "Which is larger, {a} or {b}?",
        "Which number is larger, {a} or {b}?",
        "Which is bigger, {a} or {b}?",
        "Is {a} or {b} the larger number?",
        "Name the larger of {a} and {b}.",
    ),
    "after": (
        "What comes after {a}?",
        "Which number comes after {a}?",
        "What number follows {a}?",
        "Which number is next after {a}?",
        "What is the number after {a}?",
    ),
}

# What a question is counted under in the results. "describe" is trained, because it teaches much at once, and not
# counted: where a thing stands between two places, more than one description is right.
KIND_OF_TOPIC = {
    "digit": "digit",
    "color": "color",
    "color_of": "color",
    "shape": "shape",
    "shape_of_color": "shape",
    "count": "count",
    "place": "position",
    "side": "position",
    "height": "position",
    "more": "compare",
    "fewer": "compare",
    "same_color": "compare",
    "same_shape": "compare",
    "describe": "describe",
    "direction": "video",
    "plus": "arithmetic",
    "minus": "arithmetic",
    "larger": "arithmetic",
    "after": "arithmetic",
}

REASONING = {
    "digit": "I look at the handwritten digit.",
    "color": "I look at the color.",
    "color_of": "I look for it in the picture.",
    "shape": "I look at the outline.",
    "shape_of_color": "I look for the color.",
    "count": "I count them.",
    "place": "I look for it in the picture.",
    "side": "One is {first}, the other is {second}.",
    "height": "One is {first}, the other is {second}.",
    "more": "The first has {first}, the second has {second}.",
    "fewer": "The first has {first}, the second has {second}.",
    "same_color": "The first is {first}, the second is {second}.",
    "same_shape": "The first is a {first}, the second is a {second}.",
    "describe": "I name what I see.",
    "direction": "First it is {first}, then it is {second}.",
    "plus": "I add the numbers.",
    "minus": "I subtract the numbers.",
    "larger": "I compare the numbers.",
    "after": "I count on by one.",
    "unknown": "I can't see that here.",
}


@dataclass(frozen=True, slots=True)
class Question:
    """One turn: what is asked, the one right answer, and what is thought before it in thinking mode.

    Attributes:
        kind: One of `KINDS`; results are reported per kind.
    """

    kind: str
    text: str
    answer: str
    reasoning: str


def ask(
    topic: str, answer: str, rng: random.Random, *, reasoning: str = "", named: bool = False, **fill: str
) -> Question:
    """A question on `topic` in a random phrasing and style, `fill` put into its places.

    Args:
        reasoning: Instead of the topic's own.
        named: Only a phrasing that names the thing: there are others in the picture.
    """
    phrasings = [p for p in PHRASINGS[topic] if "{" in p] if named else PHRASINGS[topic]
    text = style(rng.choice(phrasings).format(**fill), rng)
    return Question(KIND_OF_TOPIC[topic], text, answer, reasoning or REASONING[topic])


def unanswerable(topic: str, rng: random.Random, **fill: str) -> Question:
    """A question on `topic` that the picture beside it cannot answer."""
    text = style(rng.choice(PHRASINGS[topic]).format(**fill), rng)
    return Question("unknown", text, UNKNOWN, REASONING["unknown"])


def random_fill(topic: str, rng: random.Random) -> dict[str, str]:
    """Fill for `topic` that is about no picture in particular."""
    if topic in ("plus", "minus", "larger", "after"):
        a, b = (str(rng.randint(0, MAX_OPERAND)) for _ in range(2))
    else:
        a, b = rng.sample(SHAPES, 2)
    thing = rng.choice((*SHAPES, "shape"))
    return {"thing": thing, "things": countable(rng), "color": rng.choice(COLORS), "a": a, "b": b}


def countable(rng: random.Random) -> str:
    """Something to count: "shapes", "circles", "red shapes", "red circles"."""
    shape, color = rng.choice((*SHAPES, "shape", "shape")), rng.choice((*COLORS, "", "", "", "", "", "", "", ""))
    return things(shape, color)


def things(shape: str, color: str) -> str:
    """Plural of a shape with an optional color: ("cross", "red") -> "red crosses"."""
    plural = shape + ("es" if shape.endswith("s") else "s")
    return f"{color} {plural}" if color else plural


def style(text: str, rng: random.Random) -> str:
    """The same question as another person types it."""
    if rng.random() < 0.5:
        text = text.replace("color", "colour")
    r = rng.random()
    if r < 0.12:
        text = text[0].lower() + text[1:]
    elif r < 0.16:
        text = text.lower()
    if rng.random() < 0.12:
        text = text.rstrip(".?").rstrip()
    if rng.random() < 0.04:
        text = "Please answer: " + text
    return text


def is_held_out(text: str) -> bool:
    """Whether this wording of a question without a picture is kept out of training: about one in ten."""
    return zlib.crc32(text.lower().encode()) % 10 == 0


def arithmetic(rng: random.Random, *, held_out: bool) -> Question:
    """A question on small numbers, its exact wording never (`held_out`) or always allowed in training."""
    while True:
        topic = rng.choice(("plus", "plus", "minus", "minus", "larger", "after"))
        a, b = rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
        if topic == "minus" and a < b:
            a, b = b, a
        if topic == "larger" and a == b:
            continue
        answer = {"plus": a + b, "minus": a - b, "larger": max(a, b), "after": a + 1}[topic]
        words = rng.random() < 0.15
        names = [NUMBER_WORDS[n] if words else str(n) for n in (a, b)]
        question = ask(topic, str(answer), rng, a=names[0], b=names[1])
        if is_held_out(question.text) == held_out:
            return question


def corpus() -> Iterator[str]:
    """Texts whose words the vocabulary should hold in few tokens."""
    fills = [
        *(
            {"thing": shape, "things": things(shape, ""), "a": shape, "b": shape, "color": color}
            for shape in (*SHAPES, "shape")
            for color in COLORS
        ),
        *({"a": str(n), "b": str(n)} for n in range(21)),
        *({"a": w, "b": w} for w in NUMBER_WORDS),
    ]
    for topic, phrasings in PHRASINGS.items():
        is_number = topic in ("plus", "minus", "larger", "after")
        for fill in fills:
            if is_number == ("thing" not in fill):
                for phrasing in phrasings:
                    text = phrasing.format(**fill)
                    yield text
                    if "color" in text:
                        yield text.replace("color", "colour")
    yield from (*PLACES, *DIRECTIONS, UNKNOWN, "the first", "the second", "the same", "yes", "no", "above", "below")
    for text in REASONING.values():
        yield from (text.format(first=first, second=first) for first in (*COLORS, *SHAPES))
    yield from ("Please answer: ", "user", "assistant", "system", "image", "video", "tool", "tool_declare") * 5
    yield from (ENGLISH,) * 3


# A page of plain English, so that words outside the questions do not fall apart into bytes.
ENGLISH = """
Hello, and thank you for your question. This is a small model that was trained to look at small pictures and to say what
they show. It can read a handwritten digit, name a color or a shape, count what it sees, and tell where something is. It
can say which of two images has more of a thing, and which way a thing moves in a short video. It also knows how to add
and to take away small numbers. It does not know the world: it has never read a book, a letter or a newspaper, and there
is no use in asking it about the weather, about people, cities or history. When there is nothing in a picture that it
could know, then it should say so and not make something up. Please describe the image. What is the answer, and how do
you know? Would you look again, think about it and explain your answer in one sentence? You are a helpful assistant.
"""
