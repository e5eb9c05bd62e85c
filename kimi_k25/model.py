"""The whole of Kimi-K2.5: pictures and token ids in, logits out. Knows no files, no text and no sampling."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from aliasmix import GuardedSetattrMixin, ReadOnlyAlias

from .config import KimiK25Config
from .language_model import DeepseekV3ForCausalLM
from .layers.attention_batch import AttentionBatch
from .layers.parallel import WHOLE, ParallelPlan, gather_rows
from .projector import PatchMergerMLP
from .vision_tower import MoonViT3d


class KimiK25ForConditionalGeneration(GuardedSetattrMixin, nn.Module):
    """MoonViT3d, projector and decoder, under the names that the checkpoint gives them.

    `model` is what inference frameworks look for. It reads `language_model` and registers nothing: state_dict() has
    no key under it, and assigning anything but the decoder itself raises AliasWriteError.
    """

    model = ReadOnlyAlias["DeepseekV3ForCausalLM"]("language_model")

    def __init__(
        self, config: KimiK25Config, *, packed_layers: Collection[int] | None = None, plan: ParallelPlan = WHOLE
    ) -> None:
        """Builds the model in float32 with random weights; `.to(torch.bfloat16)` converts what may be converted.

        Args:
            packed_layers: MoE layers whose routed experts are int4; None: all of them if the configuration has a
                quantization_config, else none.
            plan: What of the decoder is on this rank; the vision tower and the projector are on every one.

        Raises:
            ValueError: Packed layers without a quantization_config, or that have no routed experts; a plan that does
                not divide the decoder.
        """
        super().__init__()
        moe_layers = config.text_config.moe_layers
        if packed_layers is None:
            packed_layers = moe_layers if config.quantization_config else ()
        if packed_layers and config.quantization_config is None:
            raise ValueError("there are packed layers but the configuration has no quantization_config")
        if others := sorted({*packed_layers} - {*moe_layers}):
            raise ValueError(f"packed_layers has {others}; layers with routed experts are {list(moe_layers)}")
        quantization = config.quantization_config if packed_layers else None
        plan.check(config.text_config, quantization.group_size if quantization else None)
        self.config, self.plan = config, plan
        self.vision_tower = MoonViT3d(config.vision_config)
        self.mm_projector = PatchMergerMLP(config.vision_config)
        self.language_model = DeepseekV3ForCausalLM(config, packed_layers=packed_layers, plan=plan)

    def encode_media(self, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        """Features of images and video chunks, (num_media_tokens, hidden_size), in order; see MoonViT3d.forward.

        Of several ranks, each computes some items, and all get the features of all.
        """
        if self.plan.tp == 1:
            return self.mm_projector(self.vision_tower(pixel_values, grid_thws))
        grids = self.vision_tower.checked_grids(pixel_values, grid_thws)
        owners = self.plan.owners([t * h * w for t, h, w in grids])
        mine = [item for item, owner in enumerate(owners) if owner == self.plan.rank]
        features = self.language_model.model.norm.weight.new_empty(0, self.config.text_config.hidden_size)
        if mine:
            items = pixel_values.split([t * h * w for t, h, w in grids])
            pixel_values, grid_thws = torch.cat([items[item] for item in mine]), grid_thws[mine]
            features = self.mm_projector(self.vision_tower(pixel_values, grid_thws))
        rows, columns = self.config.vision_config.merge_kernel_size
        return gather_rows(self.plan, features, owners, [h * w // (rows * columns) for _, h, w in grids])

    def embed(
        self, input_ids: Tensor, pixel_values: Tensor | None = None, grid_thws: Tensor | None = None
    ) -> Tensor:
        """Token embeddings with media features in the placeholders' places.

        Syncs with the host twice if there is media: for the grids, and to count placeholders.

        Args:
            input_ids: (num_tokens,), with one placeholder for every media token.

        Returns:
            (num_tokens, hidden_size).

        Raises:
            ValueError: pixel_values without grid_thws, or another number of placeholders than of media tokens.
        """
        embeds = self.language_model.model.embed_tokens(input_ids)
        features = None
        if pixel_values is not None and grid_thws is not None:
            features = self.encode_media(pixel_values, grid_thws)
        elif pixel_values is not None or grid_thws is not None:
            raise ValueError("pixel_values and grid_thws belong together; only one of them was given")
        is_media = input_ids == self.config.media_placeholder_token_id
        expected, found = 0 if features is None else features.shape[0], int(is_media.sum())
        if found != expected:
            raise ValueError(
                f"input_ids has {found} media placeholders (id {self.config.media_placeholder_token_id}) "
                f"but pixel_values gives {expected} media tokens"
            )
        if features is None:
            return embeds
        place = is_media.cumsum(0).sub(1).clamp(min=0)
        return torch.where(is_media[:, None], features.to(embeds.dtype).index_select(0, place), embeds)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """Logits of whole sequences, without a cache. Differentiable.

        Args:
            input_ids: (num_tokens,), sequences end to end, media placeholders expanded.
            positions: (num_tokens,); None counts from 0 in every sequence.
            pixel_values: (num_patches, 3, patch_size, patch_size), media items of all sequences in order.
            grid_thws: Frames, rows, columns of each media item, (num_media, 3).
            cu_seqlens: First token of each sequence, then num_tokens, (num_seqs + 1,); None: one sequence. A tensor
                on a GPU costs a sync.

        Returns:
            (num_tokens, vocab_size) float32.

        Raises:
            ValueError: Shapes, cu_seqlens, grids or the number of placeholders do not fit together.
        """
        if input_ids.dim() != 1 or not input_ids.shape[0]:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; expected (num_tokens,), end to end")
        num_tokens = input_ids.shape[0]
        if positions is not None and positions.shape != input_ids.shape:
            raise ValueError(f"positions has shape {tuple(positions.shape)}; expected ({num_tokens},)")
        bounds = [0, num_tokens] if cu_seqlens is None else torch.as_tensor(cu_seqlens).tolist()
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        if not lengths or bounds[0] != 0 or bounds[-1] != num_tokens or min(lengths) < 1:
            raise ValueError(f"cu_seqlens is {bounds}; expected to rise from 0 to the number of tokens, {num_tokens}")
        batch = AttentionBatch.without_cache(lengths, device=input_ids.device, positions=positions)
        embeds = self.embed(input_ids, pixel_values, grid_thws)
        return self.language_model.compute_logits(self.language_model(embeds, batch))
