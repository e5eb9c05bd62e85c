"""The wrapper that most alias tests are about, once for each way to give its language model a second name."""

import os
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

from aliasmix import GuardedSetattrMixin, ReadOnlyAlias

try:
    from expecttest import assert_expected_inline as assert_text
except ImportError:  # on a machine without it the texts are still held, only not rewritten by EXPECTTEST_ACCEPT=1

    def assert_text(actual: str, expected: str) -> None:
        assert actual == expected


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, input_ids):
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class LanguageModel(nn.Module):
    """8 keys: 1 of the embedding, 4 of the layers, 1 buffer, 2 of the head; the scratch buffer is none."""

    def __init__(self):
        super().__init__()
        self.model = Backbone()
        self.lm_head = nn.Linear(4, 8)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, input_ids):
        return self.lm_head(self.model(input_ids)) * self.scale


class Plain(nn.Module):
    """The wrapper before anybody asks it for `.model`: 10 keys."""

    def __init__(self):
        super().__init__()
        self.vision_tower = nn.Linear(4, 4)
        self.language_model = LanguageModel()

    def forward(self, input_ids):
        return self.language_model(input_ids)


class Duplicate(Plain):
    def __init__(self):
        super().__init__()
        self.model = self.language_model


class PropertyOnly(Plain):
    @property
    def model(self):
        return self.language_model


class HandWritten(PropertyOnly):
    """The shape of the property that engines wrote by hand: any value that is assigned is dropped."""

    def __setattr__(self, name, value):
        if name == "model":
            return
        super().__setattr__(name, value)


class Guarded(GuardedSetattrMixin, Plain):
    model = ReadOnlyAlias("language_model")
    layers = ReadOnlyAlias("language_model.model.layers")

    def forward(self, input_ids):
        return self.model(input_ids)


NUM_KEYS = 10


def keys(module):
    return list(module.state_dict())


def walk(module):
    """Every traversal that torch offers, with duplicates in it."""
    return {
        "state_dict": keys(module),
        "modules": [name for name, _ in module.named_modules(remove_duplicate=False)],
        "parameters": [name for name, _ in module.named_parameters(remove_duplicate=False)],
        "buffers": [name for name, _ in module.named_buffers(remove_duplicate=False)],
        "children": [name for name, _ in module.named_children()],
        "registered": list(module._modules),
    }


@contextmanager
def one_gloo_rank():
    """A process group of this process alone, on the loopback device and without a port; yields its mesh."""
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()
