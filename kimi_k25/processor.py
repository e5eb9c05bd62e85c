"""A conversation with pictures to the model's inputs, and the model's ids to reasoning and answer.

Brings tokenizer, chat template and image processor together. Knows no weights and no sampling.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aliasmix.errors import UnreadableFileError
from kimi_k25.chat import ChatTemplate, Control, load_chat_template
from kimi_k25.config import VisionConfig, load_config
from kimi_k25.image_processor import ImageProcessor, MediaConfig, MediaItem, load_image_processor, timestamp
from kimi_k25.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

MEDIA_PAD = "<|media_pad|>"
END_OF_TURN = "<|im_end|>"
_VIDEO_CHUNK = [
    Control("<|media_begin|>"), "video", Control("<|media_content|>"), Control(MEDIA_PAD), Control("<|media_end|>")
]  # fmt: skip
_MEDIA_KINDS = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}


@dataclass(frozen=True, slots=True)
class ProcessorOutput:
    """The model's inputs for one prompt.

    Attributes:
        input_ids: (num_tokens,) int64; every media item's placeholder repeated once for each of its tokens.
        pixel_values: (num_patches, 3, patch_size, patch_size) float32, items in the order of their placeholders.
        grid_thws: (num_media, 3) int64: frames, and patches down and across. Both None without media.
    """

    input_ids: torch.Tensor
    pixel_values: torch.Tensor | None = None
    grid_thws: torch.Tensor | None = None


class OutputText(NamedTuple):
    """What one id added; at most one of the two is not empty."""

    reasoning: str
    answer: str


class OutputStream:
    """Decodes what the model writes, id by id, and tells reasoning from answer.

    The prompt already opened the reasoning, so the output has only its end, the </think> token. <think> and </think>
    themselves are not part of either text. Characters are never split; see `StreamDecoder`.
    """

    def __init__(self, tokenizer: Tokenizer, *, is_reasoning: bool) -> None:
        self.is_reasoning = is_reasoning
        self._decoder = tokenizer.stream_decoder()
        self._think = {tokenizer.special_ids.get("<think>"): True, tokenizer.special_ids.get("</think>"): False}
        self._think.pop(None, None)

    def put(self, token_id: int) -> OutputText:
        """Takes one id, returns the text that it completes."""
        if token_id not in self._think:
            return self._output(self._decoder.put(token_id))
        rest = self.finish()
        self.is_reasoning = self._think[token_id]
        return rest

    def finish(self) -> OutputText:
        """Returns what is left of an unfinished character."""
        return self._output(self._decoder.finish())

    def _output(self, text: str) -> OutputText:
        return OutputText(text, "") if self.is_reasoning else OutputText("", text)


class Processor:
    """Makes prompts; usually from `load_processor`.

    Args:
        media_placeholder_token_id: What config.json calls the placeholder's id.
        video_placeholder: What the template writes for a video; its chunks take that place.
        max_tokens: The model's context; media beyond it are refused before they take memory. None: no limit.

    Attributes:
        stop_token_ids: What ends a turn of the chat; config.json alone knows only the end of a document.

    Raises:
        ValueError: The tokenizer has another id for <|media_pad|>: one of the two files is of another model, or the
            tokenizer was converted and its gaps were closed. Images would be put in the place of other tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        image_processor: ImageProcessor,
        *,
        media_placeholder_token_id: int,
        video_placeholder: str,
        max_tokens: int | None = None,
    ) -> None:
        special_ids = tokenizer.special_ids
        pad_id = special_ids.get(MEDIA_PAD)
        if pad_id != media_placeholder_token_id:
            found = "no such token" if pad_id is None else f"id {pad_id}"
            raise ValueError(
                f"config.json has media_placeholder_token_id {media_placeholder_token_id}, but the tokenizer has "
                f"{found} for {MEDIA_PAD}; both must come from the same, unconverted checkpoint"
            )
        if missing := [piece for piece in _VIDEO_CHUNK if isinstance(piece, Control) and piece not in special_ids]:
            raise ValueError(f"the tokenizer has no token {missing[0]}, which surrounds every picture")
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.image_processor = image_processor
        self.stop_token_ids = frozenset(i for name, i in special_ids.items() if name == END_OF_TURN)
        self._video_placeholder = video_placeholder
        self._max_tokens = max_tokens

    def __call__(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        images: Sequence[Image] = (),
        videos: Sequence[tuple[Sequence[Image], float]] = (),
        *,
        thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ProcessorOutput:
        """Returns the inputs for a prompt that ends where the assistant speaks.

        Args:
            messages: In OpenAI's chat format; parts {"type": "image"} and {"type": "video"} take the images and
                videos in order. A string is one user message with all images, then all videos, before the text.
            images: Pictures of any size and mode; see `open_image`.
            videos: (frames, fps) each; frames is a list of pictures, or `video.open_video` of a file.
            thinking: Whether the answer starts with reasoning.
            tools: In OpenAI's format.

        Raises:
            TypeError: Pictures or videos that are no list, or something else in it.
            ValueError: The messages are not in the format, hold more or fewer media parts than were given, or the
                media exceed the model's context.
        """
        for name, media in (("images", images), ("videos", videos)):
            if not isinstance(media, Sequence) or isinstance(media, str):
                raise TypeError(f"{name} is a {type(media).__name__}; a list is expected, also for one")
        for i, video in enumerate(videos):
            if not isinstance(video, tuple) or len(video) != 2:
                raise TypeError(f"video {i} is a {type(video).__name__}; a pair of frames and fps is expected")
        if isinstance(messages, str):
            parts = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
            content = [*parts, {"type": "text", "text": messages}] if parts else messages
            messages = [{"role": "user", "content": content}]
        num_parts = _count_media_parts(messages)
        for kind, given in (("image", len(images)), ("video", len(videos))):
            if num_parts[kind] != given:
                raise ValueError(
                    f"the messages have {num_parts[kind]} {kind} parts, but {kind}s has {given}; each part takes one"
                )
        pieces = self.chat_template.render(messages, tools=tools, thinking=thinking)
        input_ids, items = self._expand(pieces, images, videos)
        if not input_ids:
            raise ValueError(f"{self.chat_template.path}: the template wrote nothing for {len(messages)} messages")

        import torch

        ids = torch.tensor(input_ids, dtype=torch.int64)
        if not items:
            return ProcessorOutput(ids)
        pixel_values = torch.cat([torch.from_numpy(item.pixel_values) for item in items])
        return ProcessorOutput(ids, pixel_values, torch.tensor([item.grid_thw for item in items], dtype=torch.int64))

    def _expand(
        self, pieces: list[str], images: Sequence[Image], videos: Sequence[tuple[Sequence[Image], float]]
    ) -> tuple[list[int], list[MediaItem]]:
        """Returns the ids of `pieces`, and the media items in the order of their placeholders in the ids."""
        written: list[str] = [piece for piece in pieces if isinstance(piece, Control)]
        for kind, name, given in (("image", MEDIA_PAD, images), ("video", self._video_placeholder, videos)):
            if (num_written := written.count(name)) != len(given):
                raise ValueError(
                    f"{self.chat_template.path}: the template wrote {num_written} {name} for {len(given)} {kind}s; "
                    "one for each is expected"
                )
        input_ids: list[int] = []
        items: list[MediaItem] = []
        num_images = num_videos = 0
        for piece in pieces:
            if not isinstance(piece, Control):
                input_ids += self.tokenizer.encode(piece)
            elif piece == MEDIA_PAD:
                items.append(self.image_processor.image(images[num_images], f"image {num_images}"))
                input_ids += self._placeholders(items[-1])
                self._check_room(input_ids, f"image {num_images}")
                num_images += 1
            elif piece == self._video_placeholder:
                frames, fps = videos[num_videos]
                for chunk in self.image_processor.video(frames, fps, f"video {num_videos}"):
                    items.append(chunk)
                    input_ids += self._chunk_ids(chunk)
                    self._check_room(input_ids, f"video {num_videos}")
                num_videos += 1
            else:
                input_ids.append(self.tokenizer.special_ids[piece])
        return input_ids, items

    def _check_room(self, input_ids: list[int], name: str) -> None:
        """Stops before the pixels of an hour of video, 70 GB, are made for a prompt that the model cannot take."""
        if self._max_tokens is not None and len(input_ids) >= self._max_tokens:
            context = f"the model's context holds {self._max_tokens}, one of them for the answer"
            raise ValueError(f"{name} takes the prompt to {len(input_ids)} tokens and maybe more; {context}")

    def _placeholders(self, item: MediaItem) -> list[int]:
        return [self.tokenizer.special_ids[MEDIA_PAD]] * item.num_tokens

    def _chunk_ids(self, chunk: MediaItem) -> list[int]:
        assert chunk.start_seconds is not None
        ids = self.tokenizer.encode(timestamp(chunk.start_seconds))
        for piece in _VIDEO_CHUNK:
            if piece == MEDIA_PAD:
                ids += self._placeholders(chunk)
            else:
                is_control = isinstance(piece, Control)
                ids += [self.tokenizer.special_ids[piece]] if is_control else self.tokenizer.encode(piece)
        return ids

    def decode(self, token_ids: Iterable[int] | torch.Tensor) -> str:
        """Returns the text of ids, control tokens by their names."""
        return self.tokenizer.decode(map(int, token_ids))

    def output_stream(self, prompt_ids: Iterable[int] | torch.Tensor) -> OutputStream:
        """Returns a stream for what follows `prompt_ids`: it starts in the reasoning if they left one open."""
        special_ids = self.tokenizer.special_ids
        thinks = [i for i in map(int, prompt_ids) if i in (special_ids.get("<think>"), special_ids.get("</think>"))]
        return OutputStream(self.tokenizer, is_reasoning=bool(thinks) and thinks[-1] == special_ids.get("<think>"))

    def split_output(
        self, prompt_ids: Iterable[int] | torch.Tensor, output_ids: Iterable[int] | torch.Tensor
    ) -> OutputText:
        """Returns reasoning and answer of a whole output; a stop token in it is text as any control token is."""
        stream = self.output_stream(prompt_ids)
        texts = [*(stream.put(int(i)) for i in output_ids), stream.finish()]
        return OutputText("".join(text.reasoning for text in texts), "".join(text.answer for text in texts))


def _count_media_parts(messages: Any) -> dict[str, int]:
    """Counts image and video parts, on the way checking that messages are in OpenAI's format."""
    counts = {"image": 0, "video": 0}
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages is {messages!r:.60}; a text or a list of at least one message is expected")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where} is {message!r:.60}; an object with a role and a content is expected")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise ValueError(f"{where} has no content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list | tuple):
            raise ValueError(f"{where}.content is a {type(content).__name__}; a text or a list of parts is expected")
        for j, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind in _MEDIA_KINDS:
                counts[_MEDIA_KINDS[kind]] += 1
            elif kind != "text":
                expected = ", ".join(["text", *_MEDIA_KINDS])
                raise ValueError(f"{where}.content[{j}] has the type {kind!r:.60}; one of {expected} is expected")
            elif not isinstance(part.get("text"), str):
                raise ValueError(f"{where}.content[{j}] is a text part without a text")
    return counts


def _check_patches(media: MediaConfig, vision: VisionConfig, folder: Path) -> None:
    """Patches of another size than the vision tower's would be an error far from here, or none at all."""
    merge = (media.merge_kernel_size, media.merge_kernel_size)
    for field, stated, expected in (
        ("patch_size", media.patch_size, vision.patch_size),
        ("merge_kernel_size", merge, vision.merge_kernel_size),
    ):
        if stated != expected:
            reason = f"media_proc_cfg.{field} is {stated}, but vision_config.{field} in config.json is {expected}"
            raise UnreadableFileError(folder / "preprocessor_config.json", reason)


def load_processor(checkpoint: str | os.PathLike[str]) -> Processor:
    """Loads tokenizer, chat template and image processor of a checkpoint folder.

    Raises:
        UnreadableFileError, ConfigError, FileNotFoundError: A file is missing or broken.
        ValueError: config.json and the tokenizer disagree on the placeholder.
    """
    folder = Path(checkpoint)
    config = load_config(folder)
    tokenizer = load_tokenizer(folder)
    image_processor = load_image_processor(folder)
    _check_patches(image_processor.config, config.vision_config, folder)
    names = [*tokenizer.special_ids, config.video_placeholder]
    try:
        return Processor(
            tokenizer,
            load_chat_template(folder, names),
            image_processor,
            media_placeholder_token_id=config.media_placeholder_token_id,
            video_placeholder=config.video_placeholder,
            max_tokens=config.text_config.max_position_embeddings,
        )
    except UnreadableFileError:
        raise
    except ValueError as e:
        raise ValueError(f"{folder}: {e}") from None
