"""A small decoder over a paged cache, and the pieces a GraphRunner needs to run it. Every graph test starts here."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kimi_k25.graphs import BucketPolicy, GraphPlan, GraphRunner, InputSpec, break_point

HIDDEN, NUM_HEADS, NUM_SLOTS, NUM_LAYERS = 16, 2, 64, 3
HEAD_DIM = HIDDEN // NUM_HEADS


class Step:
    """What attention needs to know of a step, rewritten before each: for every sequence its query rows and slots."""

    def __init__(self) -> None:
        self.sequences: list[tuple[int, int, list[int]]] = []


@break_point
def attend(q: Tensor, keys: Tensor, values: Tensor, step: Step, *, out: Tensor) -> None:
    """Causal attention of ragged sequences over the cache; the last query sees the whole of its sequence.

    Rows of padding are left as they are, dirty.
    """
    for start, stop, slots in step.sequences:
        length, num_queries = len(slots), stop - start
        visible = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], keys[slots]) / HEAD_DIM**0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values[slots])


def attend_decode(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, seq_lens: Tensor, *, out: Tensor) -> None:
    """One query a sequence, all in tensors, so that a full graph can hold it."""
    visible = torch.arange(tables.shape[1]) < seq_lens[:, None]
    scores = torch.einsum("bhd,bkhd->bhk", q, keys[tables]) / HEAD_DIM**0.5
    weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    out.copy_(torch.einsum("bhk,bkhd->bhd", weights, values[tables]))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("keys", torch.zeros(NUM_SLOTS, NUM_HEADS, HEAD_DIM), persistent=False)
        self.register_buffer("values", torch.zeros(NUM_SLOTS, NUM_HEADS, HEAD_DIM), persistent=False)

    def forward(self, x: Tensor, inputs: Mapping[str, Tensor], step: Step) -> Tensor:
        q, k, v = (t.view(-1, NUM_HEADS, HEAD_DIM) for t in self.qkv_proj(x).chunk(3, -1))
        self.keys.index_copy_(0, inputs["slot_mapping"], k)
        self.values.index_copy_(0, inputs["slot_mapping"], v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if "seq_lens" in inputs:
            attend_decode(q, self.keys, self.values, inputs["tables"], inputs["seq_lens"], out=out)
        else:
            attend(q, self.keys, self.values, step, out=out)
        return self.o_proj(out.flatten(1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, inputs: Mapping[str, Tensor], step: Step) -> Tensor:
        x = x + self.attn(x, inputs, step)
        is_real = torch.arange(x.shape[0]) < inputs["num_tokens"]
        return x + self.mlp(x) * is_real[:, None]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, inputs: Mapping[str, Tensor], step: Step) -> Tensor:
        x = inputs["inputs_embeds"]
        for layer in self.layers:
            x = layer(x, inputs, step)
        return self.norm(x)


PREFILL_INPUTS = {"inputs_embeds": InputSpec((HIDDEN,), torch.float32), "slot_mapping": InputSpec((), torch.int64)}
DECODE_INPUTS = {"tables": InputSpec((8,), torch.int64), "seq_lens": InputSpec((), torch.int64, pad=1)}


class Toy:
    """A decoder, its step object and the functions a runner asks for. Slot 0 is the dummy slot."""

    def __init__(self, decoder: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.decoder = decoder or Decoder()
        self.step = Step()

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.decoder(inputs, self.step)

    def random(self, num_rows: int, seed: int) -> Tensor:
        generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
        return torch.randn(num_rows, HIDDEN, generator=generator)

    def prefill(self, *lengths: int, seed: int = 0, past: int = 0) -> dict[str, Tensor]:
        """A step of new sequences, or of the next chunk of one that has `past` tokens in the cache."""
        num_tokens = sum(lengths)
        self.step.sequences, start = [], 0
        for length in lengths:
            first = 1 + start
            self.step.sequences.append((start, start + length, list(range(first, first + past + length))))
            start += length
        slots = torch.arange(1 + past, 1 + past + num_tokens)
        embeds = self.random(num_tokens, seed)
        return {"inputs_embeds": embeds, "slot_mapping": slots}

    def decode(self, num_seqs: int, seed: int = 0) -> dict[str, Tensor]:
        """One token for each of `num_seqs` sequences of 3, 4, 5, ... tokens that share the first slots."""
        tables = torch.arange(1, 9).repeat(num_seqs, 1)
        seq_lens = 3 + torch.arange(num_seqs)
        embeds = self.random(num_seqs, seed)
        self.step.sequences = [(row, row + 1, list(range(1, 4 + row))) for row in range(num_seqs)]
        return {"inputs_embeds": embeds, "slot_mapping": seq_lens + 20, "tables": tables, "seq_lens": seq_lens}

    def dummy(self, phase: str, num_tokens: int) -> dict[str, Tensor]:
        return self.decode(num_tokens, seed=1) if phase == "decode" else self.prefill(num_tokens, seed=1)

    def runner(self, *, capture: bool = True, freeze: bool = True, **plan: object) -> GraphRunner:
        options = {"backend": "tape", "prefill": BucketPolicy.of((4, 8, 12)), "poison": True, **plan}
        options["poison"] = options["poison"] and options["backend"] == "tape"
        runner = GraphRunner(
            self.forward,
            self.decoder,
            inputs=PREFILL_INPUTS,
            decode_inputs=DECODE_INPUTS,
            dummy=self.dummy,
            plan=GraphPlan(**options),
        )
        if capture:
            runner.capture()
            if freeze:
                runner.freeze()
        return runner

    @torch.no_grad()
    def eager(self, inputs: Mapping[str, Tensor]) -> Tensor:
        num_tokens = torch.tensor([inputs["inputs_embeds"].shape[0]], dtype=torch.int32)
        return self.forward({**inputs, "num_tokens": num_tokens})
