"""float32 master weights behind a model of any dtype, updated by AdamW; routed experts can be held on the int4 grid.

The model computes with what a checkpoint will hold: rounded weights. Small updates survive in the masters. Gradients
pass through rounding as if it were not there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimi_k25.tiny.quantize import on_grid

BETAS, EPS, WEIGHT_DECAY, MAX_GRAD_NORM = (0.9, 0.98), 1e-10, 0.05, 1.0


class MasterWeights:
    """AdamW over float32 copies of a model's parameters.

    Attributes:
        experts_on_grid: Whether the model's routed experts are rounded to int4 groups after each step.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.names: list[str] = list(named)
        self.params: list[Tensor] = list(named.values())
        self.masters = [p.detach().float().clone() for p in self.params]
        self.experts_on_grid = False
        self._experts_by_shape: dict[torch.Size, list[int]] = {}
        for number, name in enumerate(self.names):
            if ".mlp.experts." in name:
                self._experts_by_shape.setdefault(self.params[number].shape, []).append(number)
        matrices = [m for m in self.masters if m.dim() > 1]
        vectors = [m for m in self.masters if m.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
            betas=BETAS,
            eps=EPS,
            lr=torch.zeros((), device=self.masters[0].device),
            fused=True,
        )
        self._grads = [torch.zeros_like(master) for master in self.masters]
        for master, grad in zip(self.masters, self._grads, strict=True):
            master.grad = grad

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        """One update from the parameters' gradients, which are cleared. Returns the gradients' norm, 0-d.

        No host sync, and nothing is skipped: a step with gradients that are not finite spoils the model, visibly.
        """
        torch._foreach_copy_(self._grads, [p.grad for p in self.params if p.grad is not None])  # None: it raises.
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self._grads)))
        torch._foreach_mul_(self._grads, (MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0))
        for group in self.optimizer.param_groups:
            group["lr"].fill_(learning_rate)
        self.optimizer.step()
        self.write_back()
        for p in self.params:
            p.grad = None
        return norm

    @torch.no_grad()
    def write_back(self) -> None:
        """Rounds the masters into the model."""
        torch._foreach_copy_(self.params, self.masters)
        if self.experts_on_grid:
            for numbers in self._experts_by_shape.values():
                rounded = on_grid(torch.stack([self.masters[n] for n in numbers]))
                torch._foreach_copy_([self.params[n] for n in numbers], list(rounded.unbind()))

    def state(self) -> dict[str, Tensor]:
        """Masters and both moments by parameter name."""
        out = {}
        for name, master in zip(self.names, self.masters, strict=True):
            out[f"master.{name}"] = master
            for key, value in self.optimizer.state[master].items():
                out[f"{key}.{name}"] = value
        return out

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restores what `state` gave, in place.

        Raises:
            KeyError: The state is of another model.
        """
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(state[f"master.{name}"])
            keys = ("step", "exp_avg", "exp_avg_sq")
            self.optimizer.state[master] = {k: state[f"{k}.{name}"].to(master.device).clone() for k in keys}
        self.write_back()
