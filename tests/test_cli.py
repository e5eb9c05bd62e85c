"""The command line: what each command prints, and the exit code that a CI step sees."""

import json
import os
import subprocess
import sys
import textwrap
import tomllib

import pytest
import torch
from safetensors.torch import save_file

from aliasmix.cli import main

FACTORIES = """
import sys
import torch
from torch import nn
from aliasmix import GuardedSetattrMixin, ReadOnlyAlias

class LM(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, width)
        self.lm_head = nn.Linear(width, 8, bias=False)

class Wrapper(GuardedSetattrMixin, nn.Module):
    model = ReadOnlyAlias("language_model")

    def __init__(self, width=4, tied=False):
        super().__init__()
        self.language_model = LM(width)
        if tied:
            self.language_model.lm_head.weight = self.language_model.embed_tokens.weight

    @classmethod
    def wide(cls):
        return cls(8)

def loud():
    print("building")
    return Wrapper()

class Dup(nn.Module):
    def __init__(self):
        super().__init__()
        self.language_model = LM(4)
        self.model = self.language_model

def reads_values():
    return nn.Linear(int(torch.ones(()).item()), 1)

def raises():
    raise KeyError("no such thing")

def leaves():
    sys.exit("gone")

def no_module():
    return 3

def lazy():
    return nn.LazyLinear(3)

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A directory with a module of factories in it, as a user's checkout would be."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("factories", None)
    yield tmp_path
    sys.modules.pop("factories", None)


@pytest.fixture
def run(capsys):
    def call(*argv):
        try:
            code = main(argv)
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return call


def save(path, **options):
    import factories

    save_file(factories.Wrapper(**options).state_dict(), path)


# check


def test_a_clean_module_exits_0_and_its_prints_stay_off_stdout(run):
    code, out, err = run("check", "factories:loud")

    assert (code, out, err) == (0, "clean; 4 modules, 2 tensors\n", "building\n")


def test_a_duplicated_module_exits_1(run):
    code, out, _ = run("check", "factories:Dup")

    assert code == 1
    assert out.startswith("error DUP_MODULE language_model = model\n")


def test_arguments_and_dotted_factories(run):
    assert run("check", "factories:Wrapper.wide")[0] == 0
    assert run("check", "factories:Wrapper", "--arg", "width=2", "--arg", "tied=True")[0] == 1
    assert run("check", "factories:Wrapper", "--arg", "width=two")[0] == 3  # a plain word is a string


def test_an_allowed_tie_exits_0_and_1_with_fail_on_info(run):
    argv = "check", "factories:Wrapper", "--arg", "tied=True"
    rule = "language_model.lm_head = language_model.embed_tokens"

    assert run(*argv, "--allow", rule)[0] == 0
    assert run(*argv, "--allow", rule, "--fail-on", "info")[0] == 1


def test_module_manifest_and_checkpoint_in_one_step(run, here):
    run("manifest", "factories:Wrapper", "-o", "keys.json")
    save("model.safetensors")

    argv = "check", "factories:Wrapper", "--manifest", "keys.json", "--checkpoint", "model.safetensors"
    assert run(*argv)[0] == 0
    code, out, _ = run(*argv, "--arg", "width=6")
    assert code == 1
    errors = [line.split()[1] for line in out.splitlines() if line.startswith("error")]
    assert errors == ["SHAPE", "SHAPE", "CKPT_SHAPE", "CKPT_SHAPE"]


def test_manifest_and_checkpoint_need_no_factory(run, here):
    run("manifest", "factories:Wrapper", "-o", "keys.json")
    save("model.safetensors")

    code, out, _ = run("check", "--manifest", "keys.json", "--checkpoint", "model.safetensors")

    assert (code, out) == (0, "clean; 2 expected, 2 tensors, 1 file\n")


def test_allow_added_and_rename(run, here):
    import factories

    run("manifest", "factories:Wrapper", "-o", "keys.json")
    tensors = {f"base.{name}": t for name, t in factories.LM(4).state_dict().items()}
    save_file(tensors, "model.safetensors")
    argv = "check", "--manifest", "keys.json", "--checkpoint", "model.safetensors"

    assert run(*argv)[0] == 1
    assert run(*argv, "--rename", "base = language_model")[0] == 0
    assert run("check", "factories:Dup", "--manifest", "keys.json", "--allow", "model=language_model")[0] == 1
    argv = "check", "factories:Dup", "--manifest", "keys.json", "--allow", "model=language_model"
    assert '"KEY_ADDED"' in run(*argv, "--allow-added", "model.*", "--format", "json")[1]


# formats


def test_json_has_the_documented_shape(run):
    code, out, _ = run("check", "factories:Dup", "--format", "json")
    report = json.loads(out)

    assert code == 1
    assert report["schema"] == 1 and report["ok"] is False
    assert report["stats"] == {"modules": 4, "tensors": 2}
    (found,) = report["findings"]
    assert found.keys() == {"code", "severity", "paths", "count", "detail", "fix"}
    assert found["code"] == "DUP_MODULE" and found["paths"] == ["language_model", "model"]


def test_github_annotations_are_escaped_and_alone_on_stdout(run, here):
    source = "class W(nn.Module):\n def __init__(self):\n  self.a = nn.Linear(2, 2); self.b = self.a\n"
    (here / "bad,name.py").write_text(source)

    code, out, _ = run("check", "factories:Dup", "--format", "github")
    assert code == 1
    assert out.startswith("::error title=aliasmix DUP_MODULE::language_model = model: ")
    assert "%0Afix: " in out and out.count("\n") == 1

    _, out, _ = run("lint", "bad,name.py", "--format", "github")
    assert out.startswith("::error file=bad%2Cname.py,line=3,title=aliasmix SECOND_REGISTRATION::W.b: ")

    assert run("check", "factories:Wrapper", "--format", "github")[1] == ""


# manifest, inspect, diff, lint


def test_a_manifest_goes_to_stdout_or_a_file_and_is_checked(run, here):
    code, out, _ = run("manifest", "factories:Wrapper")
    assert code == 0 and json.loads(out)["aliasmix_manifest"] == 1

    code, shown, err = run("manifest", "factories:Wrapper", "-o", "sub/keys.json")
    assert (code, shown) == (0, "") and "wrote sub/keys.json with 2 keys" in err
    assert (here / "sub/keys.json").read_text() == out

    assert run("manifest", "factories:Wrapper", "-o", "sub/keys.json", "--check")[0] == 0
    code, shown, _ = run("manifest", "factories:Wrapper.wide", "-o", "sub/keys.json", "--check")
    assert code == 1 and "error SHAPE" in shown
    assert (here / "sub/keys.json").read_text() == out


def test_inspect_shows_dtypes_and_prefixes(run):
    save("model.safetensors")

    code, out, _ = run("inspect", "model.safetensors")

    assert code == 0
    assert "float32                                           2                256" in out
    assert out.endswith("clean; 1 file, 2 tensors, 256 bytes\n")
    assert json.loads(run("inspect", "model.safetensors", "--format", "json")[1])["by_dtype"] == {
        "float32": {"tensors": 2, "bytes": 256}
    }


def test_diff_compares_manifests_files_and_folders(run, here):
    save("model.safetensors")
    save("wide.safetensors", width=8)
    run("manifest", "factories:Wrapper", "-o", "keys.json")

    assert run("diff", "keys.json", "model.safetensors")[0] == 0
    assert run("diff", ".", "keys.json")[0] == 0
    code, out, _ = run("diff", "model.safetensors", "wide.safetensors")
    assert code == 1 and "expected [8, 4], is now [8, 8]" in out


def test_lint_names_file_and_line(run, here):
    (here / "wrapper.py").write_text(
        textwrap.dedent(
            """\
            class Wrapper(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.language_model = LM()
                    self.model = self.language_model
            """
        )
    )

    code, out, _ = run("lint", "wrapper.py")

    assert code == 1
    assert out.startswith("wrapper.py:5: error SECOND_REGISTRATION Wrapper.model\n")
    assert run("lint", "factories.py")[0] == 1  # Dup


# Bad input: named, the right exit code, no traceback


@pytest.mark.parametrize(
    "argv, code, message",
    [
        ((), 2, "the following arguments are required: COMMAND"),
        (("check",), 2, "check needs a factory 'package.module:factory', or both"),
        (("check", "factories"), 2, "'factories' is not of the form 'package.module:factory'"),
        (("check", "factories:Wrapper", "--arg", "width"), 2, "'width' is not of the form name=value"),
        (("check", "factories:Wrapper", "--allow", "a"), 2, "rule 'a' is not of the form 'name = name'"),
        (("check", "factories:Wrapper", "--device", "cuda"), 2, "invalid choice: 'cuda'"),
        (("manifest", "factories:Wrapper", "--check"), 2, "--check needs the file to compare with: -o FILE"),
        (("check", "--manifest", "a", "--checkpoint", "b", "--arg", "a=1"), 2, "--arg is of no use without a factory"),
        (("check", "factories:Wrapper", "--rename", "a=b"), 2, "--rename is of no use without --checkpoint"),
        (("check", "factories:Wrapper", "--allow-added", "a"), 2, "is of no use without a factory and --manifest"),
        (("manifest", "gone", "--arg", "a=1"), 2, "--arg is of no use without a factory"),
        (("frobnicate",), 2, "invalid choice: 'frobnicate'"),
        (("check", "gone_module:Wrapper"), 3, "cannot import gone_module: ModuleNotFoundError"),
        (("check", "factories:Gone"), 3, "factories has no 'Gone'"),
        (("check", "factories:NUMBER"), 3, "is of type int, expected something to call"),
        (("check", "factories:raises"), 3, "factories:raises raised KeyError: 'no such thing'"),
        (("check", "factories:leaves"), 3, "factories:leaves raised SystemExit: gone"),
        (("check", "factories:no_module"), 3, "returned something of type int, expected a torch.nn.Module"),
        (("check", "factories:reads_values"), 3, "if it reads values while it builds, try --device cpu"),
        (("check", "factories:lazy"), 3, "a lazy module has no shapes before its first forward"),
        (("check", "factories:Wrapper", "--manifest", "gone.json"), 4, "gone.json: there is no such file"),
        (("check", "factories:Wrapper", "--manifest", "newer.json"), 4, "newer.json: version 2, expected version 1"),
        (("check", "factories:Wrapper", "--checkpoint", "gone"), 4, "gone: there is no such file or folder"),
        (("inspect", "truncated.safetensors"), 4, "it is truncated"),
        (("inspect", "."), 4, "holds safetensors files but no index over them"),
        (("inspect", "lost"), 4, "lost: model-00001.safetensors is not there; the index puts 2 tensors in it"),
        (("manifest", "lost", "-o", "keys.json"), 4, "model-00001.safetensors: is not there"),
        (("manifest", "gone", "-o", "keys.json"), 4, "gone: there is no such file or folder"),
        (("diff", "newer.json", "newer.json"), 4, "version 2"),
        (("lint", "broken.py"), 4, "broken.py: not Python (line 1)"),
        (("lint", "gone.py"), 4, "gone.py: there is no such file or folder"),
    ],
)
def test_bad_input_is_named_without_a_traceback(run, here, argv, code, message):
    (here / "newer.json").write_text('{"aliasmix_manifest": 2, "keys": {}}')
    (here / "broken.py").write_text("class (:\n")
    save("truncated.safetensors")
    content = (here / "truncated.safetensors").read_bytes()
    (here / "truncated.safetensors").write_bytes(content[:40])
    (here / "lost").mkdir()
    weight_map = {"a": "model-00001.safetensors", "b": "model-00001.safetensors"}
    (here / "lost" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    found, out, err = run(*argv)

    assert found == code
    assert "aliasmix: error: " in err and message in err
    assert "Traceback" not in err + out
    assert not (here / "keys.json").exists()


def test_debug_shows_the_traceback(run):
    with pytest.raises(Exception, match="no such thing") as caught:
        run("check", "factories:raises", "--debug")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_missing_shard_is_a_finding_too(run, here):
    (here / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')

    code, out, _ = run("inspect", ".", "--format", "json")

    assert code == 4
    assert [f["code"] for f in json.loads(out)["findings"]] == ["INDEX_SHARD_MISSING"]


# No torch


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["check", "--help"],
        ["inspect", "model.safetensors"],
        ["manifest", "model.safetensors"],
        ["diff", "model.safetensors", "model.safetensors"],
        ["lint", "factories.py"],
        ["--version"],
    ],
)
def test_commands_without_a_factory_load_no_torch(here, request, argv):
    save("model.safetensors")
    script = (
        "import sys, time; from aliasmix.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "loaded = {'torch', 'numpy', 'safetensors'} & set(sys.modules)\n"
        "print(time.process_time(), *loaded, file=sys.stderr)"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, *argv],
        env={"PYTHONPATH": str(request.config.rootpath)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    cpu_s, *loaded = done.stderr.splitlines()[-1].split()
    assert done.stdout and loaded == []
    assert float(cpu_s) < 0.3  # measured 0.06, with the interpreter's own start


def test_a_reader_that_leaves_early_is_no_error(here, request):
    save("model.safetensors")
    command = f"{sys.executable} -m aliasmix manifest model.safetensors | true"

    done = subprocess.run(
        ["bash", "-c", command], env={"PYTHONPATH": str(request.config.rootpath)}, capture_output=True, timeout=60
    )

    assert done.stderr == b""


@pytest.mark.parametrize("module", ["aliasmix", "aliasmix.cli"])
def test_python_dash_m_is_the_command(here, request, module):
    done = subprocess.run(
        [sys.executable, "-m", module, "check", "factories:Dup"],
        env={"PYTHONPATH": str(request.config.rootpath)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("error DUP_MODULE")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Left(BaseException): pass\ndef build(): raise Left('gone')", "mine:build raised Left: gone"),
        ("import pytest\npytest.skip('no gpu', allow_module_level=True)", "cannot import mine: Skipped: "),
        ("def __getattr__(name): raise RuntimeError('no ' + name)", "cannot import mine: RuntimeError: no build"),
        (
            "from factories import *\nclass build(Wrapper):\n    model = ReadOnlyAlias('lm')\n"
            "    _tied_weights_keys = ['[']\n    def __init__(self):\n        super().__init__()\n"
            "        self.a = self.b = nn.Linear(1, 1)",
            "mine:build: cannot be checked: error: unterminated character set",
        ),
    ],
)
def test_a_factory_that_fails_in_an_odd_way_is_named_and_exits_3(run, here, monkeypatch, source, message):
    (here / "mine.py").write_text(source)
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    code, out, err = run("check", "mine:build")

    assert (code, out) == (3, "")
    assert err.startswith("aliasmix: error: mine:build")
    assert message in err


def test_a_file_name_in_place_of_a_module_gets_the_module_as_hint(run):
    code, _, err = run("check", "factories.py:Wrapper")

    assert code == 3
    assert err.endswith("; write factories:Wrapper\n")


def test_what_a_module_prints_later_stays_off_stdout(run, here, monkeypatch):
    (here / "talks.py").write_text(
        "from torch import nn\nclass Talks(nn.Linear):\n    def state_dict(self, *args, **kwargs):\n"
        "        print('saving')\n        return super().state_dict(*args, **kwargs)\n"
    )
    monkeypatch.delitem(sys.modules, "talks", raising=False)

    code, out, err = run("manifest", "talks:Talks", "--arg", "in_features=1", "--arg", "out_features=1")

    assert (code, err) == (0, "saving\n")
    assert json.loads(out)["class"] == "talks.Talks"


def test_a_name_moves_no_cursor_and_starts_no_line(run):
    save_file({"a\n::error::\x1b[31m.weight": torch.ones(1)}, "odd.safetensors")

    out = run("inspect", "odd.safetensors")[1]

    assert "\na\\n::error::\\x1b[31m.weight" in out


@pytest.mark.parametrize("target", [".", "model.safetensors/keys.json", "x" * 300])
def test_a_manifest_that_cannot_be_written_is_an_error_and_leaves_nothing(run, here, target):
    save("model.safetensors")
    before = sorted(here.iterdir())

    code, out, err = run("manifest", "model.safetensors", "-o", target)

    assert (code, out) == (4, "")
    assert err.startswith("aliasmix: error: [Errno")
    assert sorted(here.iterdir()) == before


def command(request, *argv, **options):
    env = {"PYTHONPATH": str(request.config.rootpath), "PATH": "", "PYTHONIOENCODING": "ascii"}
    return subprocess.run([sys.executable, "-m", "aliasmix", *argv], env=env, timeout=60, **options)


def test_the_version_is_the_packages(run, request):
    stated = tomllib.loads((request.config.rootpath / "pyproject.toml").read_text())["project"]["version"]

    assert run("--version") == (0, f"aliasmix {stated}\n", "")


def test_a_terminal_without_the_letters_of_a_name_gets_escapes(here, request):
    save_file({"größe.weight": torch.ones(1)}, "m.safetensors")

    done = command(request, "inspect", "m.safetensors", stdout=subprocess.PIPE)

    assert done.returncode == 0
    assert b"gr\\xf6\\xdfe.weight" in done.stdout


def test_a_full_disk_is_an_error_of_one_line(here, request):
    save("m.safetensors")

    with open("/dev/full", "w") as full:
        done = command(request, "inspect", "m.safetensors", stdout=full, stderr=subprocess.PIPE, text=True)

    assert (done.returncode, done.stderr) == (4, "aliasmix: error: [Errno 28] No space left on device\n")


def test_an_output_that_is_no_file_is_written_to_and_stays_what_it_is(here, request):
    save("m.safetensors")

    done = command(request, "manifest", "m.safetensors", "-o", "/dev/stdout", stdout=subprocess.PIPE)

    assert json.loads(done.stdout)["aliasmix_manifest"] == 1


def test_a_pipe_in_place_of_a_file_is_refused_at_once(run, here):
    os.mkfifo(here / "pipe.json")
    os.mkfifo(here / "pipe.py")

    assert run("diff", "pipe.json", "pipe.json")[::2] == (4, "aliasmix: error: pipe.json: is not a regular file\n")
    assert run("lint", "pipe.py")[::2] == (4, "aliasmix: error: pipe.py: is not a regular file\n")
