"""From logits to token ids. Knows no model."""

from __future__ import annotations

import torch
from torch import Tensor

NOT_FINITE = -1


def sample(logits: Tensor, *, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """One token id a row; NOT_FINITE where the row's largest logit is NaN or infinite.

    Raising there would wait for the device. Whoever fetches the ids looks.

    Args:
        logits: (num_seqs, vocab_size) float32; an id with -inf is never drawn.
        temperature: 0 takes the likeliest id.
        top_p: Draws among the likeliest ids that together have this probability; the likeliest is always one of them.
        generator: On the logits' device; None uses torch's own.

    Returns:
        (num_seqs,) int64.
    """
    peak, likeliest = logits.max(-1, keepdim=True)  # NaN counts as the largest.
    is_broken = (peak - peak != 0).squeeze(-1)
    if temperature == 0:
        return likeliest.squeeze(-1).masked_fill_(is_broken, NOT_FINITE)
    limits = torch.finfo(logits.dtype)
    temperature = min(max(temperature, limits.tiny), limits.max)  # In float32 neither 0 nor infinity,
    logits = (logits - peak) / temperature  # and no quotient above 0: nothing becomes NaN.
    probs, ids = logits.softmax(-1).sort(-1, descending=True)
    before = probs.cumsum(-1) - probs
    probs = probs.where(before < top_p, 0.0)  # Not of NaN: multinomial would end the CUDA context.
    probs[:, 0].clamp_(min=torch.finfo(probs.dtype).tiny)
    drawn = ids.gather(-1, torch.multinomial(probs, 1, generator=generator)).squeeze(-1)
    return drawn.masked_fill_(is_broken, NOT_FINITE)
