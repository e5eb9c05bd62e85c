"""Where each patch of a training batch stands, as rows to be gathered. Knows no block and no graph.

A row number is worked out on the host, from the grids alone; what it points into is on the device.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..vision_tower import VisionPositionEmbedding, vision_rope

__all__ = ["GridPlaces", "Layout"]


class GridPlaces:
    """What depends on a patch's place in its grid, for every grid of training at once: rows to be gathered.

    Attributes:
        first_row: Where the rows of the grid of so many rows and columns begin.
        angles: cos | sin, (num_rows, head_dim) float32.
        sinusoids: Zeros for images, then those of a chunk's frames.
    """

    def __init__(self, pos_emb: VisionPositionEmbedding, head_dim: int) -> None:
        self._pos_emb = pos_emb
        table = pos_emb.weight
        device = table.device
        sides = range(2, 17, 2)
        grids = {(h, w) for h in sides for w in sides} | {(2, w) for w in range(2, 129, 2)}  # The latter are padding.
        basis = torch.eye(table[..., 0].numel(), device=device).view(1, -1, *table.shape[:2])
        self.first_row = np.zeros((17, 129), np.int64)
        matrices, angles, at = [], [], 0
        for height, width in sorted(grids):
            matrix = F.interpolate(basis, size=(height, width), mode="bicubic")[0].flatten(1).T
            matrices.append(basis[0].flatten(1) if table.shape[:2] == (height, width) else matrix)
            angles.append(torch.cat(vision_rope([(1, height, width)], head_dim, device), -1))
            self.first_row[height, width] = at
            at += height * width
        self._matrix, self.angles = torch.cat(matrices), torch.cat(angles)
        frames = pos_emb.frame_sinusoids(pos_emb.max_frames)[:, 0]
        self.sinusoids = torch.cat((torch.zeros_like(frames[:1]), frames))

    def embedding(self) -> Tensor:
        """The learned table resampled to every grid, (num_rows, vt_hidden_size) float32.

        Resampling is linear: as one product its gradient is one, too. In float32, as a row's gradient has many terms.
        """
        return self._matrix @ self._pos_emb.weight.flatten(0, 1).float()


class Layout:
    """Row numbers of a batch's media, whose 2 x 2 patches of one frame are a window; int64.

    Attributes:
        cu_seqlens: (num_media + 1,) int32.
        place: Each patch's row in GridPlaces.
        frame: Each patch's row in its sinusoids.
        patch: The patches in the order of windows.
        token: Which media token each window is averaged into.
        share: What it counts for there, float32.
    """

    def __init__(self, grids: np.ndarray, first_row: np.ndarray) -> None:
        t, h, w = grids.astype(np.int64).T
        lengths = t * h * w
        starts = np.cumsum(lengths) - lengths
        self.cu_seqlens = np.append(starts, lengths.sum()).astype(np.int32)
        item = np.repeat(np.arange(len(t)), lengths)
        frame, place = np.divmod(np.arange(len(item)) - starts[item], (h * w)[item])
        self.place = first_row[h, w][item] + place
        self.frame = np.where(t[item] > 1, frame + 1, 0)
        num_tokens = h * w // 4
        tokens = np.cumsum(num_tokens) - num_tokens
        self.num_tokens = int(num_tokens.sum())
        item = np.repeat(np.arange(len(t)), lengths // 4)
        frame, window = np.divmod(np.arange(len(item)) - starts[item] // 4, num_tokens[item])
        row, column = np.divmod(window, (w // 2)[item])
        first = starts[item] + frame * (h * w)[item] + 2 * row * w[item] + 2 * column
        self.patch = np.stack((first, first + 1, first + w[item], first + w[item] + 1), 1).ravel()
        self.token = tokens[item] + window
        self.share = (1 / t[item]).astype(np.float32)
