"""Conversations about pictures, made from a random generator. Knows no tokens.

A `Lesson` is one conversation; its user turns carry pictures, its assistant turns the right answers. One picture is
asked about several times, which costs little (its patches are encoded once) and is how a chat goes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from . import digits, scenes
from .questions import (
    COLORS,
    DIRECTIONS,
    KINDS,
    MAX_COUNT,
    PLACES,
    REASONING,
    SHAPES,
    Question,
    arithmetic,
    ask,
    random_fill,
    style,
    things,
    unanswerable,
)

IMAGE_TOPICS = ("digit", "color", "shape", "count", "place", "side", "height", "direction", "describe")
DESCRIBED = 0.4  # Share of training's pictures of shapes that are described in the end.
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You are Kimi, an AI assistant.")


@dataclass(frozen=True, slots=True)
class Video:
    """Frames at a steady rate."""

    frames: list[Image.Image]
    fps: float


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message and its answer.

    Attributes:
        media: Pictures and videos of the message.
        text_first: Whether the text stands before them.
    """

    question: Question
    media: Sequence[Image.Image | Video] = ()
    text_first: bool = False


@dataclass(frozen=True, slots=True)
class Lesson:
    """A conversation whose last answer is thought about first, if `thinking`; earlier answers never are."""

    turns: Sequence[Turn]
    thinking: bool
    system: str | None = None


@dataclass(slots=True)
class Teacher:
    """Makes lessons from a random generator.

    Attributes:
        part: "train" or "test": which scans of digits, and which wordings of arithmetic. Training scans are distorted.
        most_things: In one picture.
    """

    rng: random.Random
    part: str = "train"
    sizes: scenes.Sizes = field(default_factory=scenes.Sizes)
    most_things: int = MAX_COUNT
    _labels: Any = field(init=False)
    _scans: Any = field(init=False)
    _order: Iterator[int] = field(init=False, default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._scans, self._labels = digits.split(self.part)

    def lesson(self) -> Lesson:
        """One to six questions on a picture, sometimes its description, sometimes one more on a second picture."""
        rng = self.rng
        turns = self._turns(rng.choices(KINDS, _TRAINING_WEIGHTS)[0], rng.choice((1, 2, 4, 5, 6)))
        if rng.random() < 0.08:
            turns += self._turns(rng.choices(KINDS, _TRAINING_WEIGHTS)[0], 1)
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.05 else None
        # Nothing is to be thought before a description.
        return Lesson(turns, turns[-1].question.kind != "describe" and rng.random() < 0.55, system)

    def single_question(self, kind: str) -> Lesson:
        """One question of a reported kind, the pictures first."""
        while True:
            turns = self._turns(kind, 1)
            if turns[0].question.kind == kind and not turns[0].text_first:
                return Lesson(turns, self.rng.random() < 0.5)

    def _turns(self, kind: str, count: int) -> list[Turn]:
        media, questions = getattr(self, f"_{kind}")(count)
        first, *rest = questions
        return [Turn(first, media, self.rng.random() < 0.1), *(Turn(question) for question in rest)]

    def _digit(self, count: int) -> tuple[list[Image.Image], list[Question]]:
        rng = self.rng
        # Every test scan gets its turn.
        k = rng.randrange(len(self._labels)) if self.part == "train" else next(self._order) % len(self._labels)
        scan = digits.distort(self._scans[k], rng) if self.part == "train" else self._scans[k]
        picture = digits.draw(scan, *self._size(), rng)
        questions = [ask("digit", str(self._labels[k]), rng)]
        if self.part == "train":
            picture = scenes.camera(picture, rng)
            if count > 1:
                topic = rng.choice(("shape", "count", "place", "direction"))
                questions.append(unanswerable(topic, rng, **random_fill(topic, rng)))
                rng.shuffle(questions)
            if rng.random() < 0.1:
                questions.append(ask("describe", f"digit {self._labels[k]}", rng))
        return [picture], questions

    def _color(self, count: int) -> tuple[list[Image.Image], list[Question]]:
        scene = self._single()
        picture = scenes.draw(scene, self.rng)
        return [picture], self._about_single(scene, ["color", *self._sample(("color", "shape", "count"), count - 1)])

    def _shape(self, count: int) -> tuple[list[Image.Image], list[Question]]:
        if self.rng.random() < 0.3:
            return self._scene("shape_of_color", count)
        scene = self._single()
        picture = scenes.draw(scene, self.rng)
        return [picture], self._about_single(scene, ["shape", *self._sample(("color", "shape", "digit"), count - 1)])

    def _count(self, count: int) -> tuple[list[Image.Image], list[Question]]:
        return self._scene("count", count)

    def _position(self, count: int) -> tuple[list[Image.Image], list[Question]]:
        rng = self.rng
        if rng.random() < 0.5:
            return self._scene(rng.choice(("side", "height")), count)
        if self.part == "train" and rng.random() < 0.6:  # One thing among several, on the way to comparing two.
            return self._scene(rng.choice(("place", "distance")), count)
        place = rng.choice(PLACES)
        scene = self._single(place)
        thing = scene.things[0]
        rest = self._about_single(scene, self._sample(("color", "shape", "count"), count - 1))
        return [scenes.draw(scene, rng)], [ask("place", place, rng, thing=self._name(thing.shape)), *rest]

    def _compare(self, count: int) -> tuple[list[Image.Image], list[Question]]:
        rng = self.rng
        topic = rng.choice(("more", "more", "fewer", "same_color", "same_shape"))
        if topic in ("same_color", "same_shape"):
            pair = [self._single(), self._single()]
            if rng.random() < 0.5:  # Otherwise they would seldom agree.
                pair[1] = _recast(pair[1], pair[0], topic)
            a, b = (scene.things[0] for scene in pair)
            shown = {"same_color": (a.color, b.color), "same_shape": (a.shape, b.shape)}
            questions = [
                ask(t, "yes" if x == y else "no", rng, reasoning=REASONING[t].format(first=x, second=y))
                for t, (x, y) in [(topic, shown.pop(topic)), *shown.items()]
            ]
            return [scenes.draw(scene, rng) for scene in pair], questions[:count]
        shape, color = rng.choice((*SHAPES, "shape")), rng.choice((*COLORS, *[""] * 12))
        numbers = _numbers(rng, min(5, self.most_things))
        pair = [self._several(self._exactly(shape, color, number)) for number in numbers]
        questions = [self._more(topic, pair, shape, color)]
        for _ in range(count - 1):  # Other questions on the same pictures, a count in one of them among them.
            kind = self._kind(rng.choice(pair))
            if rng.random() < 0.5:
                questions.append(self._more(rng.choice(("more", "fewer")), pair, *kind))
            else:
                questions.append(self._how_many_in_one(pair, *kind))
        return [scenes.draw(scene, rng) for scene in pair], questions

    def _video(self, count: int) -> tuple[list[Video], list[Question]]:
        rng = self.rng
        direction = rng.choice(DIRECTIONS)
        shape, places, frames = scenes.moving(direction, rng, self._size(most=scenes.MAX_FRAME_SIDE))
        track = REASONING["direction"].format(first=places[0], second=places[-1])
        question = ask("direction", direction, rng, reasoning=track, thing=self._name(shape))
        return [Video(frames, rng.choice((1.0, 2.0)))], [question]

    def _arithmetic(self, count: int) -> tuple[list[Image.Image], list[Question]]:
        held_out = self.part == "test"
        return [], [arithmetic(self.rng, held_out=held_out) for _ in range(count)]

    def _unknown(self, count: int) -> tuple[list[Image.Image], list[Question]]:
        """Pictures of nothing, and questions that miss the picture; in training, also questions without a picture."""
        rng = self.rng
        r = rng.random()
        topics: Sequence[str] = IMAGE_TOPICS
        if r < 0.65:
            pictures = [scenes.outside(rng, self._size())]
        elif r < 0.75:
            pictures = [scenes.outside(rng, self._size()), scenes.outside(rng, self._size())]
            topics = ("more", "fewer", "same_color", "same_shape")
        elif r < 0.9 or self.part == "test":
            pictures, topics = [scenes.draw(self._single(), rng)], ("digit", "direction")
        else:
            pictures = []
        chosen = [rng.choice(topics) for _ in range(min(count, 2))]
        return pictures, [unanswerable(topic, rng, **random_fill(topic, rng)) for topic in chosen]

    def _scene(self, topic: str, count: int) -> tuple[list[Image.Image], list[Question]]:
        """A picture of several shapes, asked about `topic` first."""
        rng = self.rng
        while True:
            number = rng.randint(1 if topic == "count" else 2, self.most_things)
            scene = self._several(scenes.random_kinds(rng, number))
            found = self._about_several(scene, topic)
            if found is not None:
                break
        asked: dict[str, Question] = {}
        for t, question in [(topic, found), *((t, self._about_several(scene, t)) for t in self._others(count - 1))]:
            if question is not None:  # The same two things compared again, either way around, would be read off.
                asked.setdefault("".join(sorted(question.reasoning)) if t in _ORIGIN else question.text, question)
        return [scenes.draw(scene, rng)], [*asked.values(), *self._describe(scene)]

    def _others(self, count: int) -> list[str]:
        return self.rng.choices(_SCENE_TOPICS, k=count)

    def _describe(self, scene: scenes.Scene) -> list[Question]:
        """Sometimes, in training: everything in the picture, from left to right."""
        if self.part == "test" or self.rng.random() >= DESCRIBED:
            return []
        named = (f"{t.color} {t.shape} {_place(t)}" for t in sorted(scene.things, key=lambda t: t.x))
        return [ask("describe", ", ".join(named), self.rng)]

    def _about_single(self, scene: scenes.Scene, topics: Sequence[str]) -> list[Question]:
        rng, thing = self.rng, scene.things[0]
        questions = []
        for topic in topics:
            if topic == "color":
                questions.append(ask("color", thing.color, rng, thing=self._name(thing.shape)))
            elif topic == "shape":
                questions.append(ask("shape", thing.shape, rng))
            elif topic == "count":
                questions.append(self._how_many(scene, *self._kind(scene)))
            else:
                questions.append(unanswerable(topic, rng, **random_fill(topic, rng)))
        return questions + self._describe(scene)

    def _about_several(self, scene: scenes.Scene, topic: str) -> Question | None:
        """A question with one right answer, or None if the picture allows none on this topic."""
        rng = self.rng
        if topic == "count":
            return self._how_many(scene, *self._kind(scene))
        if topic == "color":
            lone = [t for t in scene.things if scene.count(t.shape, "") == 1]
            return ask("color_of", lone[0].color, rng, thing=lone[0].shape) if lone else None
        if topic == "shape_of_color":
            lone = [t for t in scene.things if scene.count("shape", t.color) == 1]
            return ask(topic, lone[0].shape, rng, color=lone[0].color) if lone else None
        names = _unique_names(scene)
        rng.shuffle(names)
        if topic == "place":
            clear = [(name, thing) for name, thing in names if _is_clear(thing.x) and _is_clear(thing.y)]
            return ask(topic, _place(clear[0][1]), rng, named=True, thing=clear[0][0]) if clear else None
        if topic == "distance":  # For training only: half the way to comparing two.
            if not names:
                return None
            (name, thing), (axis, origin) = names[0], rng.choice([*_ORIGIN.items()])
            text = style(f"How far from the {origin} is the {name}, from 0 to 9?", rng)
            distance = _tenth(thing.x if axis == "side" else thing.y)
            return Question("position", text, distance, REASONING["place"])
        for (a, first), (b, second) in itertools.pairwise(names):
            at, other = (first.x, second.x) if topic == "side" else (first.y, second.y)
            if abs(at - other) > MIN_GAP:
                answer = ("left", "right") if topic == "side" else ("above", "below")
                places = f"From the {_ORIGIN[topic]}: the {a} {_tenth(at)}, the {b} {_tenth(other)}."
                return ask(topic, answer[at > other], rng, reasoning=places, a=a, b=b)
        return None

    def _how_many(self, scene: scenes.Scene, shape: str, color: str) -> Question:
        found = sorted((t for t in scene.things if t.matches(shape, color)), key=lambda t: t.x)
        places = ", ".join(f"{number} {_place(t)}" for number, t in enumerate(found, start=1)) or "none"
        return ask("count", str(len(found)), self.rng, reasoning=f"I see: {places}.", things=things(shape, color))

    def _how_many_in_one(self, pair: Sequence[scenes.Scene], shape: str, color: str) -> Question:
        """A count in one of two pictures: half the way to comparing them. For training only."""
        which = self.rng.randrange(2)
        text = f"How many {things(shape, color)} are in the {('first', 'second')[which]} image?"
        number = str(pair[which].count(shape, color))
        return Question("count", style(text, self.rng), number, REASONING["count"])

    def _kind(self, scene: scenes.Scene) -> tuple[str, str]:
        """Something to count: mostly what the picture has."""
        rng = self.rng
        thing = rng.choice(scene.things)
        return rng.choice(
            [
                ("shape", ""),
                ("shape", ""),
                (thing.shape, ""),
                (thing.shape, ""),
                ("shape", thing.color),
                (thing.shape, thing.color),
                (rng.choice(SHAPES), ""),
                ("shape", rng.choice(COLORS)),
            ]
        )

    def _more(self, topic: str, pair: Sequence[scenes.Scene], shape: str, color: str) -> Question:
        first, second = (scene.count(shape, color) for scene in pair)
        wins = (first > second) == (topic == "more")
        answer = "the same" if first == second else "the first" if wins else "the second"
        reasoning = REASONING[topic].format(first=first, second=second)
        return ask(topic, answer, self.rng, reasoning=reasoning, things=things(shape, color))

    def _exactly(self, shape: str, color: str, number: int) -> list[tuple[str, str]]:
        """Kinds of which exactly `number` match, and up to two that don't; at least one in all."""
        rng = self.rng
        if shape == "shape" and not color:
            return [(rng.choice(SHAPES), rng.choice(COLORS)) for _ in range(max(1, number))]
        others = [(s, c) for s in SHAPES for c in COLORS if not (shape in ("shape", s) and color in ("", c))]
        shapes, colors = SHAPES if shape == "shape" else (shape,), (color,) if color else COLORS
        match = [(rng.choice(shapes), rng.choice(colors)) for _ in range(number)]
        num_others = rng.randint(0 if number else 1, min(2, MAX_COUNT - number))
        return match + [rng.choice(others) for _ in range(num_others)]

    def _size(self, least: int = scenes.MIN_SIDE, most: int = scenes.MAX_SIDE) -> tuple[int, int]:
        return self.sizes.draw(self.rng, least, most)

    def _single(self, place: str | None = None) -> scenes.Scene:
        return scenes.single(self.rng, self._size(), place=place)

    def _several(self, kinds: Sequence[tuple[str, str]]) -> scenes.Scene:
        least = scenes.MIN_SEVERAL_SIDE if len(kinds) < scenes.CROWD else scenes.MIN_CROWD_SIDE
        return scenes.several(self.rng, self._size(least), kinds)

    def _name(self, shape: str) -> str:
        return shape if self.rng.random() < 0.6 else "shape"

    def _sample(self, topics: Sequence[str], count: int) -> list[str]:
        return self.rng.sample(topics, min(count, len(topics)))


# How often a lesson begins with each kind; in KINDS' order, which the seed's draws depend on.
_TRAINING_WEIGHTS = (22, 3, 6, 17, 22, 16, 7, 3, 4)
# What else is asked about several shapes; what is hard is asked more often.
_SCENE_TOPICS = ("count", "count", "count", "color", "shape_of_color", "place", "distance", *("side", "height") * 2)
_ORIGIN = {"side": "left", "height": "top"}
MIN_GAP = 0.2  # Of the picture's width or height, between two things one of which is left of or above the other.


def _place(thing: scenes.Thing) -> str:
    return scenes.place_name(thing.x, thing.y)


def _tenth(fraction: float) -> str:
    """How far from the left or the top, from 0 to 9."""
    return str(min(9, int(10 * fraction)))


def _is_clear(fraction: float) -> bool:
    """Whether this stands well inside its third of the picture."""
    return abs(fraction - 1 / 3) > 0.07 and abs(fraction - 2 / 3) > 0.07


def _unique_names(scene: scenes.Scene) -> list[tuple[str, scenes.Thing]]:
    """A name for each thing that one name singles out: by shape alone, or by color and shape."""
    named = []
    for thing in scene.things:
        if scene.count(thing.shape, "") == 1:
            named.append((thing.shape, thing))
        elif scene.count(thing.shape, thing.color) == 1:
            named.append((f"{thing.color} {thing.shape}", thing))
    return named


def _numbers(rng: random.Random, most: int) -> tuple[int, int]:
    """Two counts from 1 to `most`, equal in a third of all cases."""
    first = rng.randint(1, most)
    if rng.random() < 1 / 3:
        return first, first
    second = rng.choice([n for n in range(1, most + 1) if n != first])
    return first, second


def _recast(scene: scenes.Scene, like: scenes.Scene, topic: str) -> scenes.Scene:
    """The scene with its thing given the color or the shape of the other's."""
    thing, model = scene.things[0], like.things[0]
    color = model.color if topic == "same_color" else thing.color
    shape = model.shape if topic == "same_shape" else thing.shape
    return scenes.Scene(scene.width, scene.height, (scenes.Thing(shape, color, thing.x, thing.y, thing.radius),))
