"""How the embedded default is made: its files, lessons and training. Its answers are in test_tiny_answers."""

import itertools
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lesson_messages import message_content
from PIL import Image

from kimi_k25.checkpoint import load_model
from kimi_k25.config import KimiK25Config, load_config
from kimi_k25.layers.int4 import dequantize_int4, pack_int4
from kimi_k25.layers.packed import packed_attention
from kimi_k25.processor import load_processor
from kimi_k25.tiny import architecture, captured, digits, evaluate, scenes, train
from kimi_k25.tiny.exam import EXAM, exam
from kimi_k25.tiny.lessons import Lesson, Teacher, Turn, Video
from kimi_k25.tiny.master_weights import MasterWeights
from kimi_k25.tiny.muon import RMS, WEIGHT_DECAY, Muon, orthogonal
from kimi_k25.tiny.packing import NO_TARGET, BatchShape, LessonBatches, Packer
from kimi_k25.tiny.quantize import on_grid, quantize
from kimi_k25.tiny.questions import KINDS, PHRASINGS, UNKNOWN, corpus, is_held_out, style
from kimi_k25.tiny.router_balance import RouterBalance
from kimi_k25.tiny.vocabulary import train_merges
from kimi_k25.tokenizer import load_tokenizer, read_ranks

FOLDERS = {"bfloat16": architecture.FOLDER, "int4": architecture.INT4_FOLDER}


@pytest.fixture(scope="module")
def packer() -> Packer:
    return Packer(load_tokenizer(architecture.FOLDER))


@pytest.mark.parametrize(("variant", "megabytes"), [("bfloat16", 8), ("int4", 4)])
def test_size_of_a_variant_with_all_its_files(variant: str, megabytes: int) -> None:
    files = [f for f in FOLDERS[variant].iterdir() if f.is_file() and f.suffix not in (".py", ".png")]

    assert sum(f.stat().st_size for f in files) <= megabytes * 1_000_000


@pytest.mark.parametrize("variant", FOLDERS)
def test_config_splits_over_four_ranks(variant: str) -> None:
    text = load_config(FOLDERS[variant]).text_config

    assert text.moe_intermediate_size % 128 == 0
    assert text.num_attention_heads % 4 == text.n_routed_experts % 4 == 0
    assert text.rope_scaling is not None and text.rope_scaling.factor == 64


@pytest.mark.parametrize("variant", FOLDERS)
def test_files_beside_the_weights_are_those_that_training_writes(variant: str, tmp_path: Path) -> None:
    architecture.write_side_files(tmp_path, int4=variant == "int4")

    for written in tmp_path.iterdir():
        assert written.read_bytes() == (FOLDERS[variant] / written.name).read_bytes(), written.name


def test_merges_are_reachable_and_known_words_are_short() -> None:
    tokenizer = load_tokenizer(architecture.FOLDER)
    ranks = read_ranks(architecture.FOLDER / "tiktoken.model")

    assert [t for t in ranks if len(t) > 1] == train_merges(corpus(), architecture.NUM_MERGES)
    assert len(tokenizer.encode("What digit is this?")) == 5
    assert len(tokenizer.encode("12")) == 2


def test_every_topic_has_five_phrasings_and_both_spellings_occur() -> None:
    assert all(len(set(phrasings)) >= 5 for phrasings in PHRASINGS.values())
    assert "What digit is this?" in PHRASINGS["digit"]
    assert "What shape is it?" in PHRASINGS["shape"]
    assert "What color is it?" in PHRASINGS["color"]
    styled = {style("What color is it?", random.Random(k)) for k in range(50)}
    assert {"What color is it?", "What colour is it?"} <= styled


def test_digits_are_split_without_overlap() -> None:
    (train_scans, train_labels), (test_scans, test_labels) = digits.split("train"), digits.split("test")

    assert len(train_labels) + len(test_labels) == 1797
    assert len(test_labels) == 359
    assert set(test_labels) == set(range(10))
    assert not {s.tobytes() for s in train_scans} & {s.tobytes() for s in test_scans}


@pytest.mark.parametrize("command", [train, evaluate])
def test_without_scikit_learn_a_line_says_how_to_get_it(command, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)

    with pytest.raises(SystemExit, match="2"):
        command.main([])

    out, err = capsys.readouterr()
    name = command.__name__
    assert (out, err) == ("", f"python -m {name}: error: the digits are scikit-learn's: `pip install scikit-learn`\n")


def test_demo_picture_is_a_test_scan() -> None:
    scans, labels = digits.split("test")
    scan = Image.fromarray(scans[74]).resize((96, 96), Image.Resampling.BICUBIC)

    picture = np.asarray(Image.open(architecture.FOLDER / "demo.png"))

    assert labels[74] == 7
    assert np.array_equal(picture[8:104, 8:104], np.asarray(scan))


def test_exam_is_always_the_same_and_covers_every_kind() -> None:
    lessons = list(exam())
    questions = [lesson.turns[-1].question for lesson in lessons]

    assert len(lessons) == 2000
    assert questions == [lesson.turns[-1].question for lesson in exam()]
    assert {kind: sum(q.kind == kind for q in questions) for kind in KINDS} == EXAM
    assert {q.answer for q in questions if q.kind == "unknown"} == {UNKNOWN}
    assert {lesson.thinking for lesson in lessons} == {True, False}
    sizes = [m.size for lesson in lessons for m in lesson.turns[0].media if isinstance(m, Image.Image)]
    assert min(map(min, sizes)) == scenes.MIN_SIDE and max(map(max, sizes)) > 200


def test_exam_wordings_of_arithmetic_are_never_trained() -> None:
    teacher = Teacher(random.Random(0))

    trained = [teacher._turns("arithmetic", 4) for _ in range(300)]

    assert not any(is_held_out(turn.question.text) for turns in trained for turn in turns)
    assert all(is_held_out(q.turns[-1].question.text) for q in exam() if q.turns[-1].question.kind == "arithmetic")


@pytest.mark.parametrize("seed", range(3))
def test_counts_in_questions_agree_with_the_scene(seed: int) -> None:
    teacher = Teacher(random.Random(seed))
    scene = scenes.several(teacher.rng, (150, 120), scenes.random_kinds(teacher.rng, 5))

    for shape, color in itertools.product((*scenes.SHAPES, "shape"), ("", *scenes.COLORS)):
        slow = [t for t in scene.things if (shape == "shape" or t.shape == shape) and (not color or t.color == color)]
        assert scene.count(shape, color) == len(slow)


def test_packed_prompts_equal_the_processors(packer: Packer) -> None:
    processor = load_processor(architecture.FOLDER)
    teacher = Teacher(random.Random(5))
    lessons = [teacher.lesson() for _ in range(60)]
    assert any(isinstance(m, Video) for lesson in lessons for turn in lesson.turns for m in turn.media)

    for lesson in lessons:
        *earlier, last = lesson.turns
        messages = [{"role": "system", "content": lesson.system}] if lesson.system is not None else []
        for turn in earlier:
            messages.append({"role": "user", "content": message_content(turn)})
            messages.append({"role": "assistant", "content": turn.question.answer})
        messages.append({"role": "user", "content": message_content(last)})
        media = [item for turn in lesson.turns for item in turn.media]
        expected = processor(
            messages,
            images=[m for m in media if isinstance(m, Image.Image)],
            videos=[(m.frames, m.fps) for m in media if isinstance(m, Video)],
            thinking=lesson.thinking,
        )

        packed = packer.join([packer.pack_one(lesson, with_last_answer=False)])

        assert packed.input_ids.tolist() == expected.input_ids.tolist()
        if expected.pixel_values is not None:
            assert packed.grid_thws.tolist() == expected.grid_thws.tolist()
            # One rounding apart: the processor divides in float64.
            torch.testing.assert_close(packed.pixel_values(torch.float32), expected.pixel_values, rtol=0, atol=2e-7)


def test_only_answers_are_learned(packer: Packer) -> None:
    teacher = Teacher(random.Random(1))
    lesson = Lesson([Turn(teacher._turns("arithmetic", 1)[0].question)], thinking=True)
    question = lesson.turns[0].question

    batch = packer.pack([lesson])

    learned = [t for t in batch.targets.tolist() if t != NO_TARGET]
    tokenizer = load_tokenizer(architecture.FOLDER)
    assert tokenizer.decode(learned) == f"{question.reasoning}</think>{question.answer}<|im_end|>"


def test_training_batches_have_one_shape_and_do_not_depend_on_order(packer: Packer) -> None:
    shape = BatchShape.of(24)
    batches = LessonBatches(packer, shape, seed=3, num_batches=100)

    for k in (0, 50, 99):
        batch = batches[k]
        assert batch.input_ids.shape == batch.targets.shape == batch.positions.shape == (shape.num_tokens,)
        assert batch.cu_seqlens.shape == (shape.num_seqs + 1,) and batch.cu_seqlens.diff().max() <= shape.max_seqlen
        assert batch.patches.shape[0] == shape.num_patches == batch.grid_thws.prod(1).sum()
        assert batch.grid_thws.shape[0] == shape.num_media
    again = LessonBatches(packer, shape, seed=3, num_batches=100)[99]
    assert torch.equal(again.input_ids, batch.input_ids) and torch.equal(again.patches, batch.patches)


def small_training(shape: BatchShape, steps: int) -> train.Training:
    return train.Training(torch.device("cpu"), shape, steps=steps)


def test_twenty_steps_reach_every_parameter_and_lower_the_loss(
    packer: Packer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "WARMUP_STEPS", 5)
    shape = BatchShape.of(3)
    training = small_training(shape, 20)
    started = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    batches = LessonBatches(packer, shape, seed=1, num_batches=20)

    losses = []
    for k in range(20):
        before = training._loss.item()
        training.learn(batches[k])
        losses.append(training._loss.item() - before)

    still = [name for name, p in training.model.named_parameters() if torch.equal(p, started[name])]
    assert not still, f"no gradient reached {still}"
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    assert training.masters.experts_on_grid  # The last steps are on the int4 grid.
    experts = training.model.language_model.model.layers[1].mlp.experts.down_proj
    assert torch.equal(experts.bfloat16(), on_grid(experts))


def test_what_training_replays_computes_what_the_model_does(packer: Packer) -> None:
    shape = BatchShape.of(12)
    batch = LessonBatches(packer, shape, seed=2, num_batches=9001)[9000]
    assert set(batch.grid_thws[:, 0].tolist()) > {1}  # There are videos.
    model = train.build_model(0, torch.float32, torch.device("cpu"))
    expected = train.batch_logits(model, batch)
    train.answer_loss(model, batch).backward()
    expected_grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    captured.install(model, *captured.stacks(model, shape))

    torch.testing.assert_close(train.batch_logits(model, batch), expected, rtol=1e-4, atol=1e-4)
    train.answer_loss(model, batch).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected_grads[name], rtol=1e-3, atol=1e-5, msg=name)
    assert torch.equal(train.batch_logits(model.eval(), batch), expected)


def test_another_attention_is_used_while_it_is_asked_for_and_no_longer(packer: Packer) -> None:
    shape = BatchShape.of(3)
    batch = LessonBatches(packer, shape, seed=2, num_batches=1)[0]
    model = train.build_model(0, torch.float32, torch.device("cpu"))
    calls = []

    def attention(q: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(q.shape)
        return packed_attention(q, *args, **kwargs)

    with captured.attention_by(attention):
        inside = train.batch_logits(model, batch)
    outside = train.batch_logits(model, batch)

    assert torch.equal(inside, outside)
    layers = model.config.vision_config.vt_num_hidden_layers, model.config.text_config.num_hidden_layers
    assert len(calls) == sum(layers)


@pytest.mark.gpu
@pytest.mark.parametrize(("causal", "v_head_dim", "head_dim"), [(False, 24, 24), (True, 32, 48)])
def test_attention_of_many_lengths_on_a_gpu(causal: bool, v_head_dim: int, head_dim: int) -> None:
    lengths = torch.tensor([0, 16, 200, 3, 256, 64])
    bounds = lengths.cumsum(0).int().cuda()
    sizes = [head_dim, head_dim, v_head_dim]
    q, k, v = (torch.randn(539, 4, n, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in sizes)
    grad = torch.randn(539, 4, v_head_dim, device="cuda", dtype=torch.bfloat16)

    for attention in (packed_attention, captured.varlen_attention):
        out = attention(q, k, v, bounds, 256, causal=causal, scale=0.2)
        grads = torch.autograd.grad(out, (q, k, v), grad)
        if attention is packed_attention:
            expected = out, *grads
    for found, right in zip((out, *grads), expected, strict=True):
        assert (found - right).norm() < 0.02 * right.norm()


def test_a_saved_state_continues_where_it_was(packer: Packer, tmp_path: Path) -> None:
    shape = BatchShape.of(3)
    batches = LessonBatches(packer, shape, seed=1, num_batches=4)
    straight, first = small_training(shape, 4), small_training(shape, 4)
    for k in range(2):
        straight.learn(batches[k])
        first.learn(batches[k])
    first.save(tmp_path / "state.safetensors")

    second = small_training(shape, 4)
    second.load(tmp_path / "state.safetensors")
    straight.learn(batches[2])
    second.learn(batches[2])

    assert second.step == 3
    for (name, a), b in zip(straight.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_state_past_its_plateau_refuses_another_number_of_steps(tmp_path: Path) -> None:
    shape = BatchShape.of(3)
    training = small_training(shape, 4)
    training.step = 3
    training.masters.optimizer.step()  # Makes the moments that are saved.
    training.save(tmp_path / "state.safetensors")

    with pytest.raises(ValueError, match=r"a run with 4 steps whose learning rate has begun to fall"):
        small_training(shape, 8).load(tmp_path / "state.safetensors")


def test_router_bias_moves_against_the_load() -> None:
    model = train.build_model(0, torch.float32, torch.device("cpu"))
    balance = RouterBalance(model)
    router = balance.routers[0]
    x = torch.randn(1, 128).expand(40, -1)  # All tokens alike: two experts get everything.

    _, ids = router(x)
    balance.update(0.5)

    chosen = ids[0].tolist()
    bias = router.e_score_correction_bias
    assert bias.dtype == torch.float32 and bias[chosen].max() < bias.mean()
    assert balance.take_load()[0][chosen[0]] == 4.0  # Half of all choices, in eighths.
    assert router(x)[1][0].sort().values.tolist() != sorted(chosen)


def test_master_weights_keep_updates_that_bfloat16_would_lose() -> None:
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    masters = MasterWeights(model)

    for _ in range(30):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        masters.step(1e-4)

    # A step of 1e-4 alone is under half of bfloat16's spacing.
    assert 0.995 < model.bias.float().mean() < 0.998


def test_orthogonal_matrices_keep_their_directions() -> None:
    x = torch.randn(3, 96, 40, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(x, full_matrices=False)

    singular = torch.einsum("nij,nik,nkj->nj", u, orthogonal(x), v.mT)

    assert singular.min() > 0.6 and singular.max() < 1.3


def test_muon_treats_every_matrix_as_if_it_were_alone() -> None:
    shapes = [(1, 96, 30), (3, 20, 40), (2, 200, 64)]
    sizes = [n * rows * columns for n, rows, columns in shapes]
    generator = torch.Generator().manual_seed(0)
    values, grads = torch.randn(2, sum(sizes), generator=generator)
    started = values.clone()

    Muon(values, grads, shapes).step(0.1)

    moved = (started * (1 - 0.1 * WEIGHT_DECAY) - values) / 0.1
    for part, grad, (n, rows, columns) in zip(moved.split(sizes), grads.split(sizes), shapes, strict=True):
        g = grad.view(n, rows, columns)
        expected = orthogonal(g) if rows >= columns else orthogonal(g.mT).mT
        torch.testing.assert_close(part.view_as(g), expected * RMS * max(rows, columns) ** 0.5, rtol=1e-3, atol=1e-3)


def test_grid_values_are_found_again_and_zero_groups_are_fine() -> None:
    weight = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(0)) * 0.1
    weight[0, 0, :32] = 0

    grid = on_grid(weight)

    assert (grid.float() - weight).abs().max() < weight.abs().amax() / 7
    assert torch.equal(grid[0, 0, :32], torch.zeros(32, dtype=torch.bfloat16))
    q, scale = quantize(grid)
    assert torch.equal(dequantize_int4(pack_int4(q), scale), grid)


def test_int4_variant_holds_the_weights_of_the_other() -> None:
    plain = load_model(architecture.FOLDER).state_dict()
    packed = load_model(architecture.INT4_FOLDER).state_dict()

    assert KimiK25Config.from_dict(architecture.config(int4=True)).quantization_config is not None
    for name, tensor in plain.items():
        if ".mlp.experts." not in name:
            assert torch.equal(packed[name], tensor), name
            continue
        weight = dequantize_int4(packed[f"{name}_packed"], packed[f"{name}_scale"])
        assert torch.equal(weight.float(), tensor), name
