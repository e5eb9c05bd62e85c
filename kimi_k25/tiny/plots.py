"""The training's plots: loss and accuracy, and the load of the experts. Knows no model. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_training(history: dict[str, Any], path: Path) -> None:
    """Loss (logarithmic) and exact answers of each kind over the steps, side by side."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), dpi=100, layout="constrained")
    left.plot(history["steps"], history["loss"], linewidth=1)
    left.set(yscale="log", xlabel="step", ylabel="loss (nats a token)", title="training loss")
    for kind in history["accuracy"]:
        right.plot(history["eval_steps"], [100 * a for a in history["accuracy"][kind]], linewidth=1, label=kind)
    right.set(xlabel="step", ylabel="% exact", title="held-out questions, teacher forced", ylim=(0, 101))
    right.legend(fontsize=7, ncols=2, loc="lower right")
    figure.savefig(path)
    plt.close(figure)


def plot_router(history: dict[str, Any], path: Path) -> None:
    """The load of every expert over the steps, one panel a layer; 1 is an even share."""
    plt = _pyplot()
    layers = len(history["load"][0])
    figure, panels = plt.subplots(1, layers, figsize=(10, 3), dpi=100, layout="constrained", sharey=True)
    for layer, panel in enumerate(panels):
        for expert in range(len(history["load"][0][layer])):
            panel.plot(history["steps"], [load[layer][expert] for load in history["load"]], linewidth=0.7)
        panel.axhline(1, color="black", linewidth=0.5)
        panel.set(xlabel="step", title=f"layer {layer + 1}", ylim=(0, 3))
    panels[0].set_ylabel("load (1 = even share)")
    figure.savefig(path)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
