"""PointerFingerprint: which tensor of a module moved, whatever else is registered beside it."""

import pytest
import torch
from torch import nn

from kimi_k25.graphs import PointerMovedError
from kimi_k25.graphs.fingerprint import PointerFingerprint


def model():
    layers = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    layers[0].register_buffer("absent", None)
    return nn.ModuleDict({"layers": layers, "norm": nn.LayerNorm(2)})


def moved(fingerprint):
    with pytest.raises(PointerMovedError) as error:
        fingerprint.check()
    return list(error.value.names)


def names(module):
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


@pytest.mark.parametrize("name", names(model()))
def test_each_tensor_is_watched_alone(name):
    module = model()
    fingerprint = PointerFingerprint(module, {})
    fingerprint.check()
    path, _, key = name.rpartition(".")
    parent = module.get_submodule(path)
    before = getattr(parent, key)

    if isinstance(before, nn.Parameter):
        before.data = before.data.clone()
    else:
        setattr(parent, key, before.clone())

    assert moved(fingerprint) == [name]


@pytest.mark.parametrize("name", names(model()))
def test_a_tensor_that_is_gone_has_moved(name):
    module = model()
    fingerprint = PointerFingerprint(module, {})
    path, _, key = name.rpartition(".")

    setattr(module.get_submodule(path), key, None)

    assert moved(fingerprint) == [name]


def test_what_is_registered_later_is_no_move_and_hides_none():
    module = model()
    fingerprint = PointerFingerprint(module, {})
    module["layers"][0].register_buffer("later", torch.zeros(1))
    module["layers"][0].bias = nn.Parameter(torch.zeros(3))
    module["layers"].append(nn.Linear(2, 2))

    fingerprint.check()
    fingerprint.check()

    module["norm"].weight.data = torch.ones(2)
    assert moved(fingerprint) == ["norm.weight"]


def test_another_parameter_over_the_same_memory_has_not_moved():
    module = model()
    fingerprint = PointerFingerprint(module, {})

    module["norm"].weight = nn.Parameter(module["norm"].weight.data)

    fingerprint.check()


def test_a_watched_tensor_may_share_a_name():
    module, cache = model(), [torch.zeros(1)]
    fingerprint = PointerFingerprint(module, {"norm.weight": lambda: cache[0]})

    module["norm"].weight.data = torch.ones(2)

    assert moved(fingerprint) == ["norm.weight"]


def test_a_module_without_tensors_has_nothing_that_could_move():
    PointerFingerprint(nn.ReLU(), {}).check()
