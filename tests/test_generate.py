"""The command line: what goes to stdout and stderr, and what bad input gets."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from oracle_media import make_image

from kimi_k25 import generate
from kimi_k25.generate import main

ORACLE = Path(__file__).parent / "data/oracle"
TINY = str(ORACLE / "tiny_bf16")
GREEDY = {name: golden["ids"] for name, golden in json.loads((ORACLE / "goldens.json").read_text())["greedy"].items()}
TEXT_PROMPT = "What is the answer? 你好世界"


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "a.png"
    make_image("A").save(path)
    return str(path)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_is_quick_and_imports_nothing_heavy(option):
    code = (
        "import sys\nfrom kimi_k25.generate import main\n"
        f"try: main(['{option}'])\nexcept SystemExit as e: assert e.code == 0\n"
        "assert not {'torch', 'numpy', 'PIL', 'jinja2', 'tiktoken'} & set(sys.modules), sorted(sys.modules)"
    )

    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)

    assert time.perf_counter() - started < 1  # 0.05 s on an idle machine


def test_json_holds_the_golden_ids_of_a_text_prompt(capsys):
    code = main([TINY, "-p", TEXT_PROMPT, "-n", "16", "--temperature", "0", "--json"])

    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert code == 0
    assert answer["token_ids"] == GREEDY["base.fp32.text"]
    assert answer["finish_reason"] == "length"
    assert answer["prompt_tokens"] == 17
    assert answer["timings"]["ttft_ms"] > 0
    assert "17 tokens in, 16 out, TTFT" in err
    assert "stopped after 16 tokens (-n), before the answer; a larger -n goes on\n" in err


def test_a_picture_is_put_before_the_prompt(capsys, picture):
    main([TINY, "-p", "Describe this picture.", "-i", picture, "-n", "16", "--temperature", "0", "--json"])

    assert json.loads(capsys.readouterr().out)["token_ids"] == GREEDY["base.fp32.image"]


def test_the_prompt_is_read_from_stdin(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT_PROMPT + "\n"))

    main([TINY, "-p", "-", "-n", "16", "--temperature", "0", "--json"])

    assert json.loads(capsys.readouterr().out)["token_ids"] == GREEDY["base.fp32.text"]


def test_stdout_has_the_answer_and_stderr_the_reasoning(capsys):
    main([TINY, "-p", TEXT_PROMPT, "-n", "16", "--temperature", "0"])
    thought = capsys.readouterr()
    main([TINY, "-p", TEXT_PROMPT, "-n", "16", "--temperature", "0", "--no-thinking"])
    said = capsys.readouterr()

    assert thought.out == ""  # 16 tokens of a random model never end the reasoning
    assert len(thought.err.splitlines()) >= 2
    assert "\nkimi_k25.generate: stopped after 16 tokens (-n), before the answer" in thought.err
    assert "stopped after 16 tokens (-n), within the answer; a larger -n goes on\n" in said.err
    assert said.out.endswith("\n") and len(said.out) > 8
    assert said.err.startswith("kimi_k25.generate: ")


@pytest.mark.parametrize("options", [["--json"], []])
def test_what_follows_the_reasoning_on_stderr_begins_a_line(capsys, options):
    main(["-p", "What is 3 plus 4?", "--temperature", "0", *options])

    last = capsys.readouterr().err.splitlines()[-2:]
    assert last[0] == "I add the numbers." and last[1].startswith("kimi_k25.generate: 18 tokens in, 8 out")


def test_a_seed_repeats_its_answer(capsys):
    answers = []
    for seed in ("7", "7", "8"):
        main([TINY, "-p", "hi", "-n", "12", "--seed", seed, "--json"])
        answers.append(json.loads(capsys.readouterr().out)["token_ids"])

    assert answers[0] == answers[1] != answers[2]


def chat(monkeypatch, *lines):
    """Runs a chat of which these lines are typed; its exit code."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main([TINY, "--chat", "-n", "4", "--temperature", "0", "--no-thinking"])


def prompt_sizes(err):
    return [int(count) for count in re.findall(r"(\d+) tokens in", err)]


def test_chat_remembers_and_takes_pictures(capsys, monkeypatch, picture):
    assert chat(monkeypatch, "hi", "", f"/image {picture}", "and this?", "/exit", "no more") == 0

    first, second = prompt_sizes(capsys.readouterr().err)
    assert second > first + 20  # The first turn, the picture, the second question.


def test_a_question_after_a_picture_that_is_not_there_is_not_asked(capsys, monkeypatch, picture):
    assert chat(monkeypatch, "/image missing.png", "what is this?", "hi") == 0
    err = capsys.readouterr().err
    assert "error: missing.png: there is no such file" in err
    assert "not asked: the picture missing.png is not there. Give another, or ask again without it" in err
    assert len(prompt_sizes(err)) == 1 and err.index("not asked") < err.index("tokens in")

    assert chat(monkeypatch, "/image missing.png", f"/image {picture}", "what is this?") == 0
    err = capsys.readouterr().err
    assert len(prompt_sizes(err)) == 1 and "not asked" not in err


def test_what_looks_like_a_command_is_no_question(capsys, monkeypatch):
    assert chat(monkeypatch, "/help", "/image", " /foo bar", "/", "/etc/hosts holds what?") == 0

    err = capsys.readouterr().err
    assert err.count("kimi_k25.generate: commands: /image FILE, /exit\n") == 4
    assert len(prompt_sizes(err)) == 1


def test_the_end_of_input_ends_the_line_of_the_prompt(capsys, monkeypatch):
    assert chat(monkeypatch) == 0

    assert capsys.readouterr().err.endswith("> \n")


def test_ctrl_c_stops_an_answer_and_at_the_prompt_the_chat():
    command = [sys.executable, "-m", "kimi_k25.generate", TINY, "--chat", "-n", "100000", "--no-thinking"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True, encoding="utf-8", bufsize=1) as process:
        for question in ("hi", "and?"):
            process.stdin.write(f"{question}\n")
            process.stdout.read(3)

            process.send_signal(signal.SIGINT)

            for line in process.stderr:
                if "the answer was stopped; Ctrl-C once more ends" in line:
                    break
        process.stderr.read(2)  # The prompt.
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert err == "\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "nothing is asked; give a prompt with -p TEXT, or --chat"),
        (["-p", ""], 2, "nothing is asked; give a prompt with -p TEXT, or --chat"),
        (["-p", " ", "-i", "missing.png"], 2, "nothing is asked; give a prompt with -p TEXT, or --chat"),
        (["-p", "hi", "--json", "--chat"], 2, "--json prints one answer"),
        (["-p", "hi", "-n", "0"], 2, "max_new_tokens is 0; expected at least 1"),
        (["-p", "hi", "--temperature", "-1"], 2, "temperature is -1.0; expected 0"),
        (["-p", "hi", "--top-p", "0"], 2, "top_p is 0.0; expected more than 0"),
        (["-p", "hi", "-i", "missing.png"], 2, "missing.png: there is no such file"),
        (["-p", "hi", "--video", "missing.mp4"], 2, "missing.mp4: there is no such file"),
        (["-p", "hi", "-i", "https://a.org/b.png"], 2, "b.png: URLs are not fetched; save it first and give the file"),
        (["-p", "hi", "--video", "http://a.org/b.mp4"], 2, "b.mp4: URLs are not fetched"),
        (["nowhere/K2", "-p", "hi"], 2, "nowhere/K2: is no folder here; a checkpoint is a local folder, and nothing"),
        (["some.png", "-p", "hi"], 2, "some.png is no checkpoint, which is a local folder; did you mean -i some.png?"),
        (["-p", "hi", "--device", "cpu", "--backend", "flashinfer"], 2, "give --device cuda, or leave --backend out"),
        (["-p", "hi", "--dtype", "float32", "--backend", "flashinfer", "--device", "cuda"], 2, "leave --dtype out"),
    ],
)
def test_unusable_input_is_one_line_and_exit_2(capsys, arguments, code, message):
    assert main(arguments) == code

    out, err = capsys.readouterr()
    assert out == ""
    *_, line = err.splitlines()
    assert line.startswith("kimi_k25.generate: error: ") and message in line
    assert all("using the embedded default" in other for other in err.splitlines()[:-1])


def test_a_text_file_is_no_picture(capsys, tmp_path):
    (tmp_path / "note.png").write_text("hello")

    assert main(["-p", "hi", "-i", str(tmp_path / "note.png")]) == 2

    assert "note.png" in capsys.readouterr().err


def test_a_prompt_beyond_the_context_is_refused(capsys, tmp_path):
    checkpoint = shutil.copytree(TINY, tmp_path / "tiny")
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 16
    (checkpoint / "config.json").write_text(json.dumps(config))

    assert main([str(checkpoint), "-p", TEXT_PROMPT]) == 1

    assert "the prompt has 17 tokens; the model's context holds 16" in capsys.readouterr().err


def test_debug_shows_the_traceback(capsys):
    assert main(["-p", "hi", "-n", "0", "--debug"]) == 2

    assert "Traceback" in capsys.readouterr().err


@contextmanager
def running(*arguments):
    command = [sys.executable, "-m", "kimi_k25.generate", TINY, "-p", "hi", "--no-thinking", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, encoding="utf-8") as process:
        yield process
        process.kill()


def test_ctrl_c_keeps_the_text_so_far():
    with running("-n", "100000") as process:
        first = process.stdout.read(3)

        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert len(first) == 3 and rest.endswith("\n")
    assert "Traceback" not in err


def test_a_closed_pipe_ends_quietly():
    with running("-n", "2000") as process:
        process.stdout.read(1)

        process.stdout.close()

        assert process.wait(timeout=60) == 1
        assert "Traceback" not in process.stderr.read()


def test_ctrl_c_while_modules_are_imported_ends_at_once():
    with running("-n", "100000") as process:
        time.sleep(0.25)

        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)

    assert process.returncode in (130, -signal.SIGINT)
    assert out == "" and "Traceback" not in err


def shell(command, **environment):
    """Runs a shell command in which $GENERATE stands for the command line on the tiny checkpoint."""
    generate = f"{sys.executable} -m kimi_k25.generate {TINY} -n 4 --no-thinking --temperature 0"
    environment = {**os.environ, "GENERATE": generate, **environment}
    return subprocess.run(["sh", "-c", command], env=environment, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("$GENERATE -p hi >/dev/full", 1, b"stdout cannot be written: No space left on device"),
        ("$GENERATE -p hi --json >/dev/full", 1, b"stdout cannot be written: No space left on device"),
        ("$GENERATE -p hi >&-", 2, b"stdout is closed; the answer goes there"),
        ("$GENERATE -p - <&-", 2, b"stdin is closed; a prompt is expected there"),
        (r"printf 'a\377' | LC_ALL=C.UTF-8 $GENERATE -p -", 2, b"stdin is not UTF-8 text (character 1)"),
        (r"printf 'a\377' | PYTHONIOENCODING=utf-8:strict $GENERATE -p -", 2, b"stdin is not utf-8 text: invalid"),
        (r"""$GENERATE -p "$(printf 'a\377')" """, 2, b"--prompt is not UTF-8 text (character 1)"),
        ("$GENERATE -p - </dev/null", 2, b"nothing is asked; give a prompt with -p TEXT, or --chat"),
        ("yes | $GENERATE -p -", 2, b"stdin has more than 16777216 characters"),
        ("$GENERATE -p hi --device cuda:99", 2, b"device is 'cuda:99'; CUDA devices that torch sees: "),
        ("$GENERATE -p hi --max-seq-len 0", 2, b"--max-seq-len is 0; expected at least 1"),
    ],
)
def test_streams_that_fail_are_one_line(command, code, message):
    ended = shell(command)

    assert ended.returncode == code
    assert message in ended.stderr and b"Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(b"kimi_k25.generate: error: ")


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_an_answer_does_not_need_stderr(stderr):
    ended = shell(f"$GENERATE -p hi {stderr}")

    assert ended.returncode == 0
    assert ended.stdout.endswith(b"\n") and len(ended.stdout) > 4


def test_stdout_of_another_encoding_shows_what_it_can():
    plain, as_json = (shell(f"$GENERATE -p hi -n 20 {flag}", PYTHONIOENCODING="ascii") for flag in ("", "--json"))

    assert plain.returncode == as_json.returncode == 0
    assert b"\\ufffd" in plain.stdout and "\ufffd" in json.loads(as_json.stdout)["text"]


def test_an_unforeseen_error_is_one_line_that_names_its_kind(capsys, monkeypatch):
    monkeypatch.setattr("kimi_k25.generate._load", lambda *_: {}["model"])

    assert main(["-p", "hi"]) == 2

    assert capsys.readouterr().err == "kimi_k25.generate: error: KeyError: 'model'\n"


def test_a_python_without_torch_is_told_what_to_do():
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from kimi_k25.generate import main\nsys.exit(main(['-p', 'hi']))"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert ended.returncode == 2
    assert ended.stderr == (
        f"kimi_k25.generate: error: torch is not installed for {sys.executable}; in the repository's folder, "
        "`pip install -e '.[kimi]'`, or run .venv/bin/python, which `make demo` sets up\n"
    )


def test_a_long_prompt_on_a_cpu_gives_a_sign_of_life(capsys, monkeypatch):
    monkeypatch.setattr("kimi_k25.generate.LONG_PROMPT", 16)

    main([TINY, "-p", TEXT_PROMPT, "-n", "1"])
    main([TINY, "-p", "hi", "-n", "1"])

    err = capsys.readouterr().err
    assert err.count("kimi_k25.generate: reading 17 tokens\n") == err.count("reading") == 1
    assert "stopped after 1 token (-n), before" in err


def test_an_answer_that_the_context_ends_says_so(capsys, tmp_path):
    checkpoint = shutil.copytree(TINY, tmp_path / "tiny")
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 20
    (checkpoint / "config.json").write_text(json.dumps(config))

    main([str(checkpoint), "-p", TEXT_PROMPT])

    assert "stopped after 3 tokens, before the answer; the context is full" in capsys.readouterr().err


def test_a_size_of_graphs_that_are_off_is_told_to_do_nothing(capsys):
    main([TINY, "-p", "hi", "-n", "1", "--device", "cpu", "--max-seq-len", "1000"])
    main([TINY, "-p", "hi", "-n", "1", "--device", "cpu"])

    line = "kimi_k25.generate: --max-seq-len sizes the graphs' cache; without graphs it does nothing\n"
    assert capsys.readouterr().err.count(line) == 1


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_broken_weights_are_told_and_not_garbage(capsys, monkeypatch, temperature):
    def load_broken(*args):
        model, processor = load(*args)
        model.language_model.lm_head.weight.data.fill_(float("nan"))
        return model, processor

    load = generate._load
    monkeypatch.setattr(generate, "_load", load_broken)

    assert main([TINY, "-p", "hi", "--temperature", temperature]) == 1

    out, err = capsys.readouterr()
    assert out == "" and "error: logits are not finite at token 1 of prompt 0: weights have NaN or infinity" in err
