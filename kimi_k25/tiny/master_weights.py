"""float32 master weights behind a model of any dtype, updated by Muon and AdamW; routed experts can be held on int4's
grid.

The model computes with what a checkpoint will hold: rounded weights. Small updates survive in the masters. Gradients
pass through rounding as if it were not there. Everything lies in flat buffers: an update is a handful of kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .muon import Muon
from .quantize import on_grid

BETAS, EPS, WEIGHT_DECAY, MAX_GRAD_NORM = (0.9, 0.98), 1e-10, 0.05, 1.0
MUON_RATE = 2.0  # Muon's learning rate over AdamW's.


# Not matrices that act between hidden states: Muon's users leave these to AdamW.
_NOT_FOR_MUON = ("embed_tokens.weight", "lm_head.weight", "pos_emb.weight", "patch_embed.proj.weight", ".gate.weight")


class MasterWeights:
    """Muon for matrices and AdamW for the rest, over float32 copies of a model's parameters.

    The parameters become views of one buffer.

    Attributes:
        experts_on_grid: Whether the model's routed experts are rounded to int4 groups after each step.
    """

    def __init__(self, model: nn.Module) -> None:
        # Three parts: Muon's, routed experts first; AdamW's matrices, which decay; vectors, which don't.
        named = sorted(model.named_parameters(), key=lambda pair: (_part(*pair), not _is_expert(pair[0])))
        params = [p for _, p in named]
        lengths = [sum(p.numel() for name, p in named if _part(name, p) == part) for part in range(3)]
        self._values = torch.cat([p.detach().flatten() for p in params])
        self._grads = torch.zeros_like(self._values)
        masters = self._values.float()
        self._master_grads = torch.zeros_like(masters)
        for_muon, *self._masters = masters.split(lengths)
        muon_grads, *grads = self._master_grads.split(lengths)
        self._muon = Muon(for_muon, muon_grads, [s for name, p in named for s in _matrices(name, p)])
        for part, grad in zip(self._masters, grads, strict=True):
            part.grad = grad
        self._all_masters = masters
        self.experts_on_grid = False
        self._num_in_experts = sum(p.numel() for name, p in named if _is_expert(name))
        sizes = [p.numel() for p in params]
        views = zip(params, self._values.split(sizes), self._grads.split(sizes), strict=True)
        for p, value, grad in views:
            p.data, p.grad = value.view(p.shape), grad.view(p.shape)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [self._masters[0]], "weight_decay": WEIGHT_DECAY},
                {"params": [self._masters[1]], "weight_decay": 0.0},
            ],
            betas=BETAS,
            eps=EPS,
            lr=torch.zeros((), device=masters.device),
            fused=True,
        )

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update from the parameters' gradients, which are then zero again.

        No host sync, and nothing is skipped: a step with gradients that are not finite spoils the model, visibly.
        """
        self._master_grads.copy_(self._grads)
        norm = torch.linalg.vector_norm(self._master_grads)
        self._master_grads.mul_((MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0))
        for group in self.optimizer.param_groups:
            group["lr"].fill_(learning_rate)
        self.optimizer.step()
        self._muon.step(learning_rate * MUON_RATE)
        self.write_back()
        self._grads.zero_()

    @torch.no_grad()
    def write_back(self) -> None:
        """Rounds the masters into the model."""
        self._values.copy_(self._all_masters)
        if self.experts_on_grid:
            n = self._num_in_experts  # Their rows are whole groups: one after another they are one long row.
            self._values[:n].copy_(on_grid(self._all_masters[:n]))

    def state(self) -> dict[str, Tensor]:
        """Masters and moments, flat."""
        out = {"masters": self._all_masters, "momentum": self._muon.momentum}
        for k, part in enumerate(self._masters):
            out |= {f"{key}.{k}": value for key, value in self.optimizer.state[part].items()}
        return out

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restores what `state` gave, in place.

        Raises:
            KeyError, RuntimeError: The state is of another model.
        """
        self._all_masters.copy_(state["masters"])
        self._muon.momentum.copy_(state["momentum"])
        for k, part in enumerate(self._masters):
            keys = ("step", "exp_avg", "exp_avg_sq")
            self.optimizer.state[part] = {key: state[f"{key}.{k}"].to(part.device).clone() for key in keys}
        self.write_back()


def _is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def _part(name: str, p: Tensor) -> int:
    """0: Muon's. 1: AdamW's matrices. 2: vectors."""
    return 2 if p.dim() <= 1 else int(name.endswith(_NOT_FOR_MUON))


def _matrices(name: str, p: Tensor) -> list[tuple[int, int, int]]:
    """What Muon takes as matrices of this parameter: (number, rows, columns); none of other parts."""
    if _part(name, p):
        return []
    rows, columns = p.shape[-2:]
    stacked = 3 if name.endswith("wqkv.weight") else 2 if name.endswith("gate_up_proj") else 1
    return [(p.numel() // (rows * columns) * stacked, rows // stacked, columns)]
