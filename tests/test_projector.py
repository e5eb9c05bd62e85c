"""The projector against the slow definition."""

import pytest
import reference
import torch
from random_models import make_config, randomize

from kimi_k25.projector import PatchMergerMLP


@pytest.mark.parametrize("merge", [[2, 2], [1, 3]])
def test_equals_the_definition(merge):
    config = make_config(vision={"merge_kernel_size": merge, "projector_ln_eps": 1e-2}).vision_config
    module = randomize(PatchMergerMLP(config))
    x = torch.randn(5, config.patches_per_token, 48, generator=torch.Generator().manual_seed(0)) * 0.1

    with torch.no_grad():
        found = module(x)

    assert found.shape == (5, 64)
    torch.testing.assert_close(found.double(), reference.projector(module, config, x), rtol=1e-5, atol=1e-5)
