"""The pytest plugin, in test sessions of its own."""

import textwrap

import pytest
import torch  # noqa: F401  the inner sessions drop what they import first, and torch cannot be imported twice

import aliasmix.integrity
import aliasmix.trace  # noqa: F401

pytest_plugins = ["pytester"]

WRAPPERS = """
import pytest
import torch
from torch import nn
from aliasmix import GuardedSetattrMixin, ReadOnlyAlias

class Wrapper(GuardedSetattrMixin, nn.Module):
    model = ReadOnlyAlias("language_model")

    def __init__(self, width=4):
        super().__init__()
        self.language_model = nn.Linear(width, 2)

class Dup(nn.Module):
    def __init__(self):
        super().__init__()
        self.language_model = nn.Linear(4, 2)
        self.model = self.language_model

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
"""

# By name, whether or not the entry point is installed too.
PLUGIN = "-p", "no:aliasmix", "-p", "aliasmix.pytest_plugin", "-p", "no:cacheprovider"


@pytest.fixture
def session(pytester, monkeypatch, request):
    """Runs a test file that sees the wrappers above; returns the result."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath))
    monkeypatch.syspath_prepend(str(pytester.path))
    (pytester.path / "wrappers.py").write_text(WRAPPERS)

    def run(source, *argv, subprocess=False, name="test_it.py"):
        if source:
            (pytester.path / name).write_text("from wrappers import *\n" + textwrap.dedent(source))
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        return start(*PLUGIN, "--strict-markers", "-W", "error", *argv)

    return run


CHECKED = """
    def test_keys(alias_check):
        report = alias_check(Wrapper(), manifest="keys.json")
        assert report.stats["keys"] == 2
"""
WIDER = CHECKED.replace("Wrapper()", "Wrapper(width=6)")


def test_a_clean_module_passes_and_a_duplicated_one_fails_with_the_report(session):
    result = session(
        """
        def test_clean(alias_check):
            alias_check(Wrapper())

        def test_dup(alias_check):
            alias_check(Dup())
        """
    )

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["Dup is not clean", "error DUP_MODULE language_model = model"])


def test_a_manifest_is_written_on_request_and_compared_after_that(session, pytester):
    missing = session(CHECKED)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*there is no manifest *keys.json; write it with pytest --aliasmix-update"])

    session("", "--aliasmix-update").assert_outcomes(passed=1)
    written = (pytester.path / "keys.json").read_bytes()
    session("").assert_outcomes(passed=1)
    assert (pytester.path / "keys.json").read_bytes() == written


def test_a_changed_module_fails_until_its_manifest_is_updated(session):
    session(CHECKED, "--aliasmix-update")

    changed = session(WIDER)
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(
        [
            "error SHAPE language_model.weight",
            "*expected [[]2, 4[]], is now [[]2, 6[]]",
            "if this is meant: pytest --aliasmix-update*",
        ]
    )
    session("", "--aliasmix-update").assert_outcomes(passed=1)
    session("").assert_outcomes(passed=1)


@pytest.mark.parametrize("value, is_refused", [("true", True), ("1", True), ("false", False), ("", False)])
def test_an_update_is_refused_under_ci(session, pytester, monkeypatch, value, is_refused):
    monkeypatch.setenv("CI", value)

    result = session(CHECKED, "--aliasmix-update")

    assert (result.ret == pytest.ExitCode.USAGE_ERROR) == is_refused
    assert (pytester.path / "keys.json").exists() != is_refused
    if is_refused:
        result.stderr.fnmatch_lines(["ERROR: --aliasmix-update is refused under CI: *"])


def test_a_missing_manifest_fails_under_ci(session, monkeypatch):
    monkeypatch.setenv("CI", "true")

    session(CHECKED).assert_outcomes(failed=1)


def test_a_module_that_is_not_clean_is_not_written(session, pytester):
    result = session(
        """
        def test_dup(alias_check):
            alias_check(Dup(), manifest="keys.json")
        """,
        "--aliasmix-update",
    )

    result.assert_outcomes(failed=1)
    assert not (pytester.path / "keys.json").exists()


def test_a_bad_manifest_is_named(session, pytester):
    (pytester.path / "keys.json").write_text('{"aliasmix_manifest": 2}')

    result = session(CHECKED)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*keys.json: version 2, expected version 1*"])


def test_ini_settings_hold_for_every_check(session, pytester):
    (pytester.path / "pytest.ini").write_text(
        "[pytest]\naliasmix_manifest_dir = manifests\naliasmix_allow =\n    head = embed\n"
    )

    result = session(
        """
        def test_tied(alias_check):
            alias_check(Tied(), manifest="tied.json")
        """,
        "--aliasmix-update",
    )

    result.assert_outcomes(passed=1)
    assert (pytester.path / "manifests" / "tied.json").exists()


def test_options_of_a_check(session):
    session(
        """
        def test_allow(alias_check):
            alias_check(Tied(), allow=["head = embed"])

        def test_unregistered(alias_check):
            wrapper = Wrapper()
            wrapper.parts = [nn.Linear(2, 2)]
            alias_check(wrapper)
            with pytest.raises(pytest.fail.Exception, match="UNREGISTERED_MODULE"):
                alias_check(wrapper, unregistered=True)

        def test_allow_added(alias_check):
            alias_check(Wrapper(), manifest="keys.json")
            wrapper = Wrapper()
            wrapper.lora_A = nn.Linear(2, 2)
            alias_check(wrapper, manifest="keys.json", allow_added=["lora_A.*"])
        """,
        "--aliasmix-update",
    ).assert_outcomes(passed=3)


def test_a_second_registration_fails_with_file_and_line(session):
    result = session(
        """
        def test_runner(no_duplicate_registration):
            wrapper = nn.Module()
            wrapper.language_model = nn.Linear(2, 2)
            wrapper.model = wrapper.language_model

        def test_aliased(no_duplicate_registration):
            wrapper = Wrapper()
            wrapper.model = wrapper.model

        @pytest.mark.usefixtures("no_duplicate_registration")
        def test_its_own_failure_comes_first():
            assert 1 == 2
        """
    )

    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["1 second registration", "*test_it.py:6: Module.model registers a Linear that already is Module.language*"]
    )
    result.stdout.fnmatch_lines(["*assert 1 == 2"])


def test_a_marked_test_is_preceded_by_the_check(session):
    result = session(
        """
        @pytest.mark.aliasmix("wrappers:Wrapper", manifest="keys.json", arguments={"width": 3})
        def test_by_name():
            pass

        @pytest.mark.aliasmix(factory=Dup)
        def test_by_class():
            raise AssertionError("never comes here")

        @pytest.mark.aliasmix("wrappers:Gone")
        def test_gone():
            pass

        @pytest.mark.aliasmix("wrappers")
        def test_of_no_factory():
            pass
        """,
        "--aliasmix-update",
    )

    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(["error DUP_MODULE language_model = model"])
    result.stdout.fnmatch_lines(["wrappers:Gone: wrappers has no 'Gone'"])
    result.stdout.fnmatch_lines(["'wrappers' is not of the form 'package.module:factory'"])
    result.stdout.no_fnmatch_line("*above exception*")
    result.stdout.no_fnmatch_line("*never comes here*")


def test_help_and_markers_tell_of_the_plugin(session):
    result = session("", "--help")
    result.stdout.fnmatch_lines(["aliasmix:", "*--aliasmix-update*"])
    assert "aliasmix_manifest_dir" in result.stdout.str() and "aliasmix_allow" in result.stdout.str()
    session("", "--markers").stdout.fnmatch_lines(["@pytest.mark.aliasmix(factory, *"])


def test_the_plugin_alone_loads_no_torch(session, pytester):
    (pytester.path / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n    assert 'aliasmix.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )

    session("", subprocess=True).assert_outcomes(passed=1)


def test_two_workers_update_one_manifest(session, pytester):
    pytest.importorskip("xdist")
    session(CHECKED + CHECKED.replace("test_keys", "test_again"), "-n", "2", "--aliasmix-update", subprocess=True)

    session("").assert_outcomes(passed=2)
    assert [path.name for path in pytester.path.glob("*keys*")] == ["keys.json"]
