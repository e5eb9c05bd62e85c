"""Findings and reports: order, formats, and that long ones stay readable without losing anything."""

import json

import pytest
from expecttest import assert_expected_inline

from aliasmix.report import MAX_LINES, Report, finding


def test_a_code_brings_its_severity_and_may_be_softened():
    assert finding("CKPT_DTYPE", ["a"], "differs").severity == "warning"
    assert finding("TIED_TENSOR", ["a", "b"], "declared", severity="info").severity == "info"


def test_a_code_that_is_not_public_cannot_be_made():
    with pytest.raises(KeyError, match="DUP_MODUL"):
        finding("DUP_MODUL", ["a"], "misspelt")


def test_the_gravest_comes_first_and_sums_keep_everything():
    warning, error = finding("CKPT_DTYPE", ["a"], "w"), finding("CKPT_SHAPE", ["b"], "e")

    report = Report([warning], {"keys": 1}) + Report([error], {"files": 2})

    assert report.findings == [error, warning]
    assert report.stats == {"keys": 1, "files": 2}
    assert not report.ok and report.at_least("warning") == report.findings and report.at_least("error") == [error]
    assert Report([warning]).ok


def test_text():
    report = Report(
        [
            finding("KEY_MOVED", ["a.*", "b.*"], "moved", count=1200),
            finding("SECOND_REGISTRATION", ["W.b"], "twice", "once", file="w.py", line=3),
            finding("DISJOINT_VIEWS", [f"p{n}" for n in range(12)], "12 slices"),
        ],
        {"keys": 1, "files": 2000},
    )

    assert_expected_inline(
        report.render(),
        """\
error KEY_MOVED a.* -> b.* (1,200 keys)
    moved
w.py:3: error SECOND_REGISTRATION W.b
    twice
    fix: once
info DISJOINT_VIEWS p0, p1, p2, p3, p4, p5, p6, p7 ... and 4 more
    12 slices
2 errors, 1 info; 1 key, 2,000 files""",
    )
    assert Report().render() == "clean"


def test_annotations():
    report = Report(
        [
            finding("SECOND_REGISTRATION", ["W.b"], "100% twice", "once", file="a,b:c.py", line=3),
            finding("CKPT_DTYPE", ["a"], "differs"),
            finding("DISJOINT_VIEWS", ["p", "q"], "slices"),
        ]
    )

    assert_expected_inline(
        report.to_github(),
        """\
::error file=a%2Cb%3Ac.py,line=3,title=aliasmix SECOND_REGISTRATION::W.b: 100%25 twice%0Afix: once
::warning title=aliasmix CKPT_DTYPE::a: differs
::notice title=aliasmix DISJOINT_VIEWS::p, q: slices""",
    )


def test_long_reports_say_how_much_they_leave_out_and_json_leaves_out_nothing():
    report = Report([finding("SHAPE", [f"w{n}"], "changed") for n in range(MAX_LINES + 7)])

    assert "... and 7 more SHAPE; --format json has all" in report.render()
    assert report.to_github().endswith("::notice title=aliasmix SHAPE::... and 7 more")
    assert len(json.loads(report.to_json())["findings"]) == MAX_LINES + 7
