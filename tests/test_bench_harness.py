"""What benchmarks say where they can't run, one line each and exit 2, and how they time."""

import subprocess
import sys
from pathlib import Path

import harness
import pytest
import rank_share
import share
import torch

BENCH = Path(__file__).parent.parent / "bench"
EVERYTHING = (("flashinfer-python", "flashinfer"), ("triton", "triton"), ("humming-kernels", "humming.layer"))


@pytest.fixture
def card(monkeypatch):
    """A card of this capability with so much free memory, in place of none."""

    def put(capability, free_gib):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * 2**30), 2**37))

    return put


@pytest.fixture
def broken_cuda(monkeypatch):
    """A CUDA build of torch whose first use of the driver says this."""

    def put(reason):
        def init():
            if reason:
                raise RuntimeError(reason)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
        monkeypatch.setattr(torch.cuda, "init", init)

    return put


def refusal(capsys, call, *args, **kwargs):
    with pytest.raises(SystemExit) as e:
        call(*args, **kwargs)

    shown = capsys.readouterr()
    assert e.value.code == 2 and not shown.out
    assert shown.err.count("\n") == 1
    return shown.err.split("error: ")[1].rstrip()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_script_ends_with_one_line():
    done = subprocess.run([sys.executable, str(BENCH / "rank_share.py")], capture_output=True, text=True)

    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("rank_share.py: error: needs a CUDA device of compute capability 9.0 (H100, H200); ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("", "torch sees none"),
        ("No CUDA GPUs are available", "No CUDA GPUs are available"),
        (
            "The NVIDIA driver on your system is too old (found version 12020).\nPlease update your GPU driver",
            "the NVIDIA driver (12.2) is too old for torch 2.11.0+cu130, which needs CUDA 13.0's: "
            "update the driver, or install a torch built for it",
        ),
    ],
)
def test_no_gpu_says_what_the_driver_says(broken_cuda, capsys, reason, expected):
    broken_cuda(reason)

    line = refusal(capsys, harness.require_hopper, 1, lambda free: "")

    assert line == f"needs a CUDA device of compute capability 9.0 (H100, H200); {expected}"


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_a_torch_without_cuda_is_named(capsys):
    line = refusal(capsys, harness.require_hopper, 1, lambda free: "")

    assert line.endswith(f"torch {torch.__version__} is built without CUDA; install a CUDA build of it")


def test_an_older_gpu_is_named_with_what_is_needed(card, capsys):
    card((8, 0), 80)

    line = refusal(capsys, harness.require_hopper, 1, lambda free: "")

    assert line == "needs compute capability 9.0 (H100, H200); A card has 8.0"


def test_a_missing_extra_is_named_with_the_command_that_installs_it(capsys):
    line = refusal(capsys, harness.require_extras, *EVERYTHING[1:2], ("humming-kernels", "no_such_module_as_this"))

    assert line.startswith("humming-kernels is not usable (ModuleNotFoundError: ")
    assert line.endswith("install it with: pip install 'aliasmix[kimi,gpu]'")


@pytest.mark.parametrize(
    ("free", "layers", "expected"),
    [
        (79.6, 61, "needs 101.9 GiB of GPU memory, 79.6 are free; --layers 46 or --tp 16 fits"),
        (13, 61, "needs 101.9 GiB of GPU memory, 13.0 are free; no --layers fits at any --tp"),
        (24, 61, "needs 101.9 GiB of GPU memory, 24.0 are free; --layers 8 fits"),
    ],
)
def test_too_little_memory_names_the_options_that_fit(card, capsys, free, layers, expected):
    card((9, 0), free)

    assert refusal(capsys, share.require_room, 8, layers, spare_gib=12) == expected


def test_the_option_that_is_named_fits():
    for free in (20.0, 40.0, 60.0):
        layers = int(share.what_fits(8, 61, free).split()[1])
        assert share.share_gib(8, layers) <= free < share.share_gib(8, layers + 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tp", "3"], "--tp 3 does not divide 64 heads; choose 1, 2, 4, 8, 16, 32 or 64"),
        (["--tp", "0"], "--tp 0 does not divide 64 heads; choose 1, 2, 4, 8, 16, 32 or 64"),
        (["--tokens", "64,many"], "--tokens is '64,many'; expected sizes, as 64,256"),
        (["--layers", "1"], "--layers 1 is too few; one dense layer and one of experts are needed"),
    ],
)
def test_arguments_are_judged_before_any_device(capsys, arguments, expected):
    assert refusal(capsys, rank_share.parse_args, arguments) == expected


def test_calls_in_turns_are_timed_a_round_each():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}

    timings = harness.measure_in_turns(calls, rounds=3, warmup=1)

    assert "".join(order) == "ab" + "ababab"
    assert set(timings) == {"a", "b"} and timings["a"].median_ms >= 0


def test_percentiles_are_those_of_the_rounds():
    timing = harness.Timing.of([float(n) for n in range(1, 12)])

    assert timing == harness.Timing(6.0, 2.0, 10.0)


def test_ceilings_are_measured_on_a_cpu_too():
    ceilings = harness.Ceilings.measure()

    assert ceilings.tb_per_s > 0 and ceilings.tflop_per_s > 0
