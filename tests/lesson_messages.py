"""Lessons of the embedded default in OpenAI's chat format, as a user would send them."""

from kimi_k25.tiny.lessons import Turn, Video


def message_content(turn: Turn) -> list[dict[str, str]]:
    """Pictures and text of the turn's message, in their order."""
    media = [{"type": "video" if isinstance(item, Video) else "image"} for item in turn.media]
    text = {"type": "text", "text": turn.question.text}
    return [text, *media] if turn.text_first else [*media, text]
