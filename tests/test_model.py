"""The whole model: text and media together, packed batches, gradients, and the alias on top."""

import copy
import itertools

import expecttest
import pytest
import reference
import torch
from golden import GOLDENS, PROMPTS, TENSORS, golden_prompt, logits_of, shared_model
from random_models import make_config, make_ids, make_model, make_pixels, randomize
from torch import nn

from aliasmix.errors import AliasWriteError
from kimi_k25.model import KimiK25ForConditionalGeneration

ATOL = 1.5e-4  # float32 against another order of sums, as for the goldens.
GRIDS = [(1, 4, 2), (3, 2, 2), (1, 2, 2)]
SMALL_VISION = {"patch_size": 4, "vt_num_hidden_layers": 1, "init_pos_emb_height": 3, "init_pos_emb_width": 5}


def make_batch(config):
    """Three sequences: a picture and a video chunk, text alone, a picture; with pixels and grids."""
    ids, pad = make_ids(config, 23), config.media_placeholder_token_id
    ids[3:5] = ids[6] = ids[-1] = pad  # Two tokens of the first item, one each of the others.
    return ids, [9, 5, 9], make_pixels(GRIDS, patch_size=config.vision_config.patch_size), torch.tensor(GRIDS)


def snapshot(model):
    return list(model.state_dict()), [name for name, _ in model.named_modules(remove_duplicate=False)]


@pytest.mark.parametrize("int4", [False, True])
def test_text_and_media_equal_the_definition(int4):
    config = make_config(int4=int4, vision=SMALL_VISION, num_hidden_layers=2)
    model = make_model(config)
    ids, lengths, pixels, grids = make_batch(config)

    with torch.no_grad():
        found = model(ids, None, pixels, grids, cu_seqlens=[0, *itertools.accumulate(lengths)])

    assert found.shape == (23, 640) and found.dtype == torch.float32
    expected = reference.logits(model, ids.tolist(), lengths, pixels, GRIDS)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("weights", ["base", "int4"])
@pytest.mark.parametrize("order", [PROMPTS, PROMPTS[::-1], ("video", "text", "video", "image")])
@pytest.mark.parametrize("form", [list, tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_prompts_of_unequal_length_in_one_batch_give_each_its_goldens(weights, order, form):
    model = shared_model(f"{weights}.fp32")
    prompts = [golden_prompt(name) for name in order]
    lengths = [p.input_ids.shape[0] for p in prompts]
    media = [p for p in prompts if p.pixel_values is not None]

    with torch.no_grad():
        together = model(
            torch.cat([p.input_ids for p in prompts]),
            pixel_values=torch.cat([p.pixel_values for p in media]),
            grid_thws=torch.cat([p.grid_thws for p in media]),
            cu_seqlens=form([0, *itertools.accumulate(lengths)]),
        )

    for name, rows in zip(order, together.split(lengths), strict=True):
        golden = TENSORS[f"{weights}.fp32.{name}.logits"]
        torch.testing.assert_close(rows[-golden.shape[0] :], golden, rtol=0, atol=ATOL)


def test_text_equals_itself_beside_a_neighbour_of_other_content():
    model, prompt = shared_model("base.fp32"), golden_prompt("text")
    n = prompt.input_ids.shape[0]

    with torch.no_grad():
        first, second = (
            model(torch.cat((prompt.input_ids, torch.full((7,), other))), cu_seqlens=[0, n, n + 7])[:n]
            for other in (1, 600)
        )

    assert torch.equal(first, second)


def test_given_positions_are_used_and_those_from_zero_are_the_default():
    model, ids = shared_model("base.fp32"), golden_prompt("text").input_ids

    with torch.no_grad():
        default, counted = model(ids), model(ids, torch.arange(len(ids)))
        shifted, stretched = model(ids, torch.arange(len(ids)) + 500), model(ids, torch.arange(len(ids)) * 3)

    assert torch.equal(default, counted)
    torch.testing.assert_close(shifted, default, rtol=0, atol=2e-3)  # Only distances count; angles round.
    assert (stretched - default).abs().max() > 0.1


def test_arguments_are_left_as_they_are():
    model, prompt = shared_model("base.fp32"), golden_prompt("two_images")
    before = copy.deepcopy(prompt)

    logits_of(model, "two_images")

    assert torch.equal(prompt.input_ids, before.input_ids)
    assert torch.equal(prompt.pixel_values, before.pixel_values)
    assert torch.equal(prompt.grid_thws, before.grid_thws)


# -- refusals -----------------------------------------------------------------------------------------------------


def test_what_does_not_fit_together_is_refused_with_both_sides():
    model = shared_model("base.fp32")
    text, image = golden_prompt("text"), golden_prompt("image")
    ids, pixels, grids = image.input_ids, image.pixel_values, image.grid_thws
    fewer, more = ids[ids.ne(405) | torch.arange(29).ne(9)], torch.cat((ids, torch.tensor([405])))
    before = copy.deepcopy(model.state_dict())
    messages = []
    for arguments in (
        {"input_ids": ids[None], "pixel_values": pixels, "grid_thws": grids},
        {"input_ids": ids[:0]},
        {"input_ids": text.input_ids, "positions": torch.arange(16)},
        {"input_ids": text.input_ids, "cu_seqlens": [0, 5, 16]},
        {"input_ids": text.input_ids, "cu_seqlens": [1, 17]},
        {"input_ids": text.input_ids, "cu_seqlens": [0, 5, 5, 17]},
        {"input_ids": text.input_ids, "cu_seqlens": [0, 9, 5, 17]},
        {"input_ids": text.input_ids, "cu_seqlens": torch.tensor([0])},
        {"input_ids": text.input_ids, "cu_seqlens": []},
        {"input_ids": ids, "pixel_values": pixels},
        {"input_ids": ids, "grid_thws": grids},
        {"input_ids": ids},
        {"input_ids": fewer, "pixel_values": pixels, "grid_thws": grids},
        {"input_ids": more, "pixel_values": pixels, "grid_thws": grids},
        {"input_ids": text.input_ids, "pixel_values": pixels, "grid_thws": grids},
        {"input_ids": ids, "pixel_values": pixels[:-1], "grid_thws": grids},
    ):
        with pytest.raises(ValueError) as caught:
            model(**arguments)
        messages.append(str(caught.value))

    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    expecttest.assert_expected_inline(
        "\n".join(messages),
        """\
input_ids has shape (1, 29); expected (num_tokens,), end to end
input_ids has shape (0,); expected (num_tokens,), end to end
positions has shape (16,); expected (17,)
cu_seqlens is [0, 5, 16]; expected to rise from 0 to the number of tokens, 17
cu_seqlens is [1, 17]; expected to rise from 0 to the number of tokens, 17
cu_seqlens is [0, 5, 5, 17]; expected to rise from 0 to the number of tokens, 17
cu_seqlens is [0, 9, 5, 17]; expected to rise from 0 to the number of tokens, 17
cu_seqlens is [0]; expected to rise from 0 to the number of tokens, 17
cu_seqlens is []; expected to rise from 0 to the number of tokens, 17
pixel_values and grid_thws belong together; only one of them was given
pixel_values and grid_thws belong together; only one of them was given
input_ids has 6 media placeholders (id 405) but pixel_values gives 0 media tokens
input_ids has 5 media placeholders (id 405) but pixel_values gives 6 media tokens
input_ids has 7 media placeholders (id 405) but pixel_values gives 6 media tokens
input_ids has 0 media placeholders (id 405) but pixel_values gives 6 media tokens
pixel_values has 23 patches but grid_thws [[1, 4, 6]] describes 24.""",
    )


def test_packed_layers_that_cannot_be_are_refused():
    plain, int4 = make_config(), make_config(int4=True)

    with pytest.raises(ValueError, match=r"^there are packed layers but the configuration has no quantization_config$"):
        KimiK25ForConditionalGeneration(plain, packed_layers=[1])
    with pytest.raises(ValueError, match=r"^packed_layers has \[0, 3\]; layers with routed experts are \[1, 2\]$"):
        KimiK25ForConditionalGeneration(int4, packed_layers=[0, 1, 3])
    with pytest.raises(ValueError, match=r"^gate_up_proj has rows of 40 values; expected whole groups of 32$"):
        KimiK25ForConditionalGeneration(make_config(int4=True, hidden_size=40))


def test_layers_may_differ_in_what_is_packed():
    config = make_config(int4=True)
    model = KimiK25ForConditionalGeneration(config, packed_layers=[2])
    randomize(model)
    ids = make_ids(config, 7)

    with torch.no_grad():
        found = model(ids)

    packed = {name.split(".")[3] for name in model.state_dict() if name.endswith("_packed")}
    assert packed == {"2"}
    torch.testing.assert_close(found.double(), reference.logits(model, ids.tolist(), [7]), rtol=0, atol=ATOL)


# -- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("int4", [False, True])
def test_every_parameter_gets_a_finite_gradient(int4):
    config = make_config(int4=int4, vision=SMALL_VISION)
    model = make_model(config).train()
    ids, lengths, pixels, grids = make_batch(config)
    pixels.requires_grad_()

    logits = model(ids, None, pixels, grids, cu_seqlens=[0, *itertools.accumulate(lengths)])
    nn.functional.cross_entropy(logits, ids.roll(-1)).backward()

    for name, parameter in [*model.named_parameters(), ("pixel_values", pixels)]:
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name
    used = model.language_model.model.embed_tokens.weight.grad.any(-1).nonzero()[:, 0].tolist()
    assert used == sorted(set(ids.tolist()) - {config.media_placeholder_token_id})


def test_gradients_are_finite_in_bfloat16():
    model = make_model(make_config(vision=SMALL_VISION)).to(torch.bfloat16).train()
    ids, lengths, pixels, grids = make_batch(model.config)

    logits = model(ids, None, pixels, grids, cu_seqlens=[0, *itertools.accumulate(lengths)])
    nn.functional.cross_entropy(logits, ids.roll(-1)).backward()

    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.bfloat16, name
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_a_gradient_is_the_slope():
    config = make_config(vision=SMALL_VISION, num_hidden_layers=2)
    model = make_model(config)
    ids, lengths, pixels, grids = make_batch(config)
    bounds = [0, *itertools.accumulate(lengths)]
    loss = lambda: nn.functional.cross_entropy(model(ids, None, pixels, grids, bounds), ids.roll(-1))  # noqa: E731
    loss().backward()
    generator = torch.Generator().manual_seed(0)

    for name in (
        "vision_tower.patch_embed.pos_emb.weight",
        "mm_projector.proj.0.weight",
        "language_model.model.layers.0.self_attn.kv_b_proj.weight",
        "language_model.model.layers.1.mlp.experts.down_proj",
        "language_model.model.layers.1.mlp.shared_experts.up_proj.weight",
    ):
        parameter = model.get_parameter(name)
        direction = torch.randn(parameter.shape, generator=generator) * parameter.std()
        step, ends = 3e-3, []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.add_(direction, alpha=sign * step)
                ends.append(loss().item())
                parameter.sub_(direction, alpha=sign * step)
        slope = (parameter.grad * direction).sum().item()
        # Losses around 6 have six digits after the point: a slope over 6e-3 is good to 1e-3.
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=2e-2, abs=2e-3), name


def test_a_few_steps_of_training_reduce_the_loss():
    config = make_config(vision=SMALL_VISION, num_hidden_layers=2)
    model = make_model(config).train()
    ids, lengths, pixels, grids = make_batch(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []

    for _ in range(8):
        optimizer.zero_grad()
        logits = model(ids, None, pixels, grids, [0, *itertools.accumulate(lengths)])
        losses.append(nn.functional.cross_entropy(logits, ids.roll(-1)))
        losses[-1].backward()
        optimizer.step()

    assert losses[-1] < 0.5 * losses[0]


# -- the alias ----------------------------------------------------------------------------------------------------


def test_model_is_the_language_model_and_registers_nothing():
    model = make_model()

    assert model.model is model.language_model
    assert model.model.model is model.language_model.model
    assert not [name for name in model.state_dict() if name.startswith("model.")]
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    assert not [name for name in names if name.split(".")[0] == "model"]
    assert list(dict(model.named_children())) == ["vision_tower", "mm_projector", "language_model"]


def test_assigning_the_alias_to_itself_changes_nothing():
    model = make_model()
    before = snapshot(model)

    model.model = model.model

    assert snapshot(model) == before
    assert list(model.state_dict()) == list(KimiK25ForConditionalGeneration(model.config).state_dict())


@pytest.mark.parametrize("value", [nn.Linear(1, 1), None, 3], ids=["module", "none", "number"])
def test_a_foreign_write_is_refused_and_changes_nothing(value):
    model = make_model()
    before, language_model = snapshot(model), model.language_model

    with pytest.raises(
        AliasWriteError, match=r"KimiK25ForConditionalGeneration\.model is a read-only alias of 'language_model'"
    ):
        model.model = value

    assert snapshot(model) == before and model.model is language_model


def test_the_decoder_may_be_replaced_under_its_own_name():
    model, other = make_model(), make_model(seed=1)
    before = snapshot(model)

    model.language_model = other.language_model

    assert model.model is other.language_model and snapshot(model) == before


def test_keys_are_those_of_the_goldens_checkpoint_with_its_experts_stacked():
    keys = list(shared_model("base.fp32").state_dict())
    experts = [key for key in keys if ".experts." in key]

    assert len(keys) == len(set(keys))
    assert experts == [
        f"language_model.model.layers.{layer}.mlp.experts.{name}"
        for layer in (1, 2)
        for name in ("gate_up_proj", "down_proj")
    ]
    assert "language_model.lm_head.weight" in keys and "language_model.model.embed_tokens.weight" in keys


def test_weights_under_the_aliass_name_are_refused():
    model = make_model()
    state = {key.replace("language_model.", "model."): tensor for key, tensor in model.state_dict().items()}

    with pytest.raises(RuntimeError, match=r"Missing key.*language_model\.lm_head(.|\n)*Unexpected.*model\.lm_head"):
        model.load_state_dict(state)


def test_a_copy_is_independent_and_has_its_own_alias():
    model = make_model()

    twin = copy.deepcopy(model)

    assert twin.model is twin.language_model is not model.language_model
    with torch.no_grad():
        assert torch.equal(twin(torch.arange(5)), model(torch.arange(5)))


def test_a_model_in_bfloat16_takes_float32_pixels():
    found = logits_of(shared_model("base.bf16"), "image")

    assert found.dtype == torch.float32 and len(found) == len(GOLDENS["prompts"]["image"]["ids"])
