import time
import tracemalloc

import jinja2
import pytest

from kimi_k25 import sandbox
from kimi_k25.sandbox import Budget, SandboxedTemplate, TemplateLimitError


def render(source, units=2_000_000, **variables):
    return SandboxedTemplate(source).render(variables, Budget(units))


# ------------------------------------------------------------------ what chat templates do


@pytest.mark.parametrize(
    "source, text",
    [
        ("{% for m in messages %}{{ loop.index0 }}{{ m.role }}{{ ',' if not loop.last }}{% endfor %}", "0user,1tool"),
        ("{% for i in range(3) %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}", "0"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v ~ ';' }}{% endfor %}", "role=user;content=hé;"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{{ messages[:1] | tojson }}", '[{"role": "user", "content": "hé"}]'),
        ("{{ messages[0] | tojson(separators=(',', ':'), indent=1) }}", '{\n "role":"user",\n "content":"hé"\n}'),
        ("{{ messages[1].get('name') or messages[1]['role'] }}", "tool"),
        ("{{ '<' + messages[0]['content'].upper().strip() + '>' }}", "<HÉ>"),
        ("{{ 'a,b'.split(',')[-1] }}{{ 'x' in ('x', 'y') }}{{ messages|length }}", "bTrue2"),
        ("{{ ['a', 1]|join('-') }}{{ 'abc'|replace('b', 'x') }}{{ missing|default('d') }}", "a-1axcd"),
        ("{% macro tag(a, b='') %}[{{ a }}{{ b }}]{% endmacro %}{{ tag('x') }}{{ tag('y', b=2) }}", "[x][y2]"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x ~ x }}", "a1a1"),
        ("{% if x is defined %}no{% elif messages[0].content is string %}yes{% endif %}", "yes"),
        ("{{ 7 // 2 }} {{ 7 % 2 }} {{ 2 * 3 }} {{ 1 - 2 }} {{ [1] + [2] }}", "3 1 6 -1 [1, 2]"),
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc", "a\n  b\nc"),
    ],
)
def test_common_template_language(source, text):
    messages = [{"role": "user", "content": "hé"}, {"role": "tool"}]

    assert render(source, messages=messages) == text


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.l|length }}",
        "{% for m in messages %}{{ m.content if loop.index == messages|length }}{% endfor %}",
        "{% for m in messages %}{% if m == messages[-1] %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_long_conversation_fits_its_budget(source):
    messages = [{"role": "user", "content": "x" * 1000 + str(i)} for i in range(300)]

    assert render(source, units=2_000_000 + 20 * 300_000, messages=messages)


# ------------------------------------------------------------------ what they may not

GROWING = {
    "a loop over a billion": "{% for i in range(1000000000) %}{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that keeps nothing": "{% for i in range(999) %}{% for j in range(9999) if j < 0 %}{% endfor %}{% endfor %}",
    "repeated string": "{{ 'a' * 1000000000 }}",
    "repeated string by power": "{{ 'a' * 10**9 }}",
    "repeated list": "{{ [1, 2] * 1000000000 }}",
    "a power": "{{ 10 ** 10 ** 10 }}",
    "products": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by blocks": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
        "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}"
    ),
    "doubling by join": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = [n.x, n.x]|join %}{% endfor %}"
    ),
    "doubling by replace": (
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x|replace('a', 'aaa') %}{% endfor %}"
    ),
    "one replacement": "{{ '" + "a" * 9000 + "'|replace('a', '" + "b" * 9000 + "') }}",
    "one join": "{{ range(99999)|join('" + "b" * 9000 + "') }}",
    "doubling by lists": (
        "{% set n = namespace(x=['a']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"
    ),
    "lists made to be compared": (
        "{% set n = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}"
        "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}"
    ),
    "doubling by objects": (
        "{% set n = namespace(x={}) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}"
    ),
    "doubling by dict()": (
        "{% set n = namespace(x={}) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}"
    ),
    "namespaces in each other": "{% set n = namespace() %}{% set n.x = [n, n] %}{{ n }}",
    "nesting": "{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = [n.x] %}{% endfor %}",
    "plain text again and again": "{% for i in range(99999) %}" + "y" * 9000 + "{% endfor %}",
    "many lists": "{% set a = range(99999)|list %}" * 900,
    "copies": "{% set a = range(99999)|list %}" + "{% set b = a[:] %}" * 900,
    "split": "{% for i in range(9999) %}{% set a = ('" + "a " * 4000 + "').split() %}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "indented json": "{{ {'a': 1}|tojson(indent=1000000000) }}",
    "a format": "{{ '{:>1000000000}'.format(1) }}",
    "a % format": "{{ '%1000000000d' % 1 }}",
    "padding": "{{ 'a'.ljust(1000000000) }}",
    "padding by a filter": "{{ 'a'|center(1000000000) }}",
    "lorem ipsum": "{{ lipsum(n=1000000) }}",
    "long division": "{{ ('" + "f" * 30_000 + "'|int(0, 16)) // ('" + "e" * 15_000 + "'|int(0, 16)) }}",
    "sums": "{% set n = namespace(x=1) %}{% for i in range(999) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "unpacked arguments": "{% macro f() %}{% endmacro %}{{ f(*range(99999)) }}",
    "deep source": "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "many blocks in each other": "{% if true %}" * 500 + "{% endif %}" * 500,
    "elifs": "{% if a %}" + "{% elif a %}" * 5000 + "{% endif %}",
    "a number of too many digits": "{{ " + "1" * 50_000 + " }}",
    "long source": "a" * 300_000,
}


@pytest.mark.parametrize("case", GROWING)
def test_growing_without_end_is_an_error_in_seconds_and_megabytes(case):
    begin = time.process_time()
    tracemalloc.start()

    try:
        with pytest.raises(jinja2.TemplateError):
            render(GROWING[case], units=300_000)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert time.process_time() - begin < 10  # tracing makes it several times slower
    assert peak_bytes < 60e6


@pytest.mark.parametrize("search", [".strip(b)", ".rfind(b)", ".rsplit(b)", "|trim(b)"])
def test_searches_that_compare_everything_with_everything_are_paid_for(search):
    # Plain strip() takes 90 s here, in one call that no clock interrupts.
    with pytest.raises(TemplateLimitError, match="without end"):
        render("{{ a" + search + " }}", units=20 * 6_000_000, a="b" * 3_000_000, b="a" * 3_000_000 + "b")


def test_branching_recursion_ends_by_the_clock(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.3)
    source = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"

    with pytest.raises(TemplateLimitError, match=r"line 1: it runs for more than 0\.3 seconds"):
        render(source, units=10**12)


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ ''.__class__ }}", "reaches for the attribute '__class__' of a str"),
        ("{{ ''['__class__'] }}", "reaches for the attribute '__class__' of a str"),
        ("{% if m.__class__ is defined %}{% endif %}", "reaches for the attribute '__class__' of a dict"),
        ("{{ namespace.__init__ }}", "reaches for the attribute '__init__' of a type"),
        ("{{ range.__globals__ }}", "reaches for the attribute '__globals__' of a function"),
        ("{{ self._TemplateReference__context }}", "reaches for the attribute '_TemplateReference__context'"),
        ("{{ namespace(a=1)._Namespace__attrs }}", "reaches for the attribute '_Namespace__attrs' of a Namespace"),
        ("{% for i in [1] %}{{ loop._iterator }}{% endfor %}", "reaches for the attribute '_iterator'"),
        ("{% for i in [1] %}{{ loop([1]) }}{% endfor %}", "calls 'LoopContext', which chat templates may not"),
        ("{% block b %}{{ self.b() }}{% endblock %}", "calls 'BlockReference', which chat templates may not"),
        ("{{ m.update(a=1) }}", "reaches for the attribute 'update' of a dict"),
        ("{{ m.pop('a') }}", "reaches for the attribute 'pop' of a dict"),
        ("{{ ''.join(['a']) }}", "reaches for the attribute 'join' of a str"),
        ("{{ m.missing.further }}", "'dict object' has no attribute 'missing'"),
        ("{{ nobody() }}", "'nobody' is undefined"),
        ("{% include 'other' %}", "no loader for this environment"),
        ("{% for i in [1] recursive %}{% endfor %}", "recursive loops are not available"),
        ("{{ 'a'|attr('upper') }}", "No filter named 'attr'"),
        ("a\n{{ 1 + 'a' }}", "line 2: TypeError: unsupported operand"),
        ("a\n{{ raise_exception('roles must alternate') }}", "line 2: refuses these messages: roles must alternate"),
        ("a\n{% for %}", "line 2: "),
        ("{{ 1[:2] }}", "TypeError: 'int' object is not subscriptable"),
        ("{{ range }}", "prints or collects a function; plain values are expected"),
        ("{{ m.items() }}", "prints or collects a dict_items; plain values are expected"),
    ],
)
def test_refusal_says_what_the_template_did(source, message):
    with pytest.raises(jinja2.TemplateError, match=message):
        render(source, m={"a": 1})


def test_rendering_changes_no_variable():
    messages = [{"role": "user", "content": ["a"]}]

    with pytest.raises(jinja2.TemplateError):
        render("{{ messages[0].content.append('b') }}", messages=messages)

    assert messages == [{"role": "user", "content": ["a"]}]


# ------------------------------------------------------------------ literals


def test_literal_is_applied_to_what_a_template_writes_and_not_to_what_it_looks_for():
    source = (
        "MARK{{ 'MARK' }}{{ 'x' ~ 'MARK' }}{{ {'a': 'MARK'}.a }}{{ 'MARK' in m }}{{ m.split('MARK')|length }}"
        "{{ m == 'MARK' }}{{ m is eq('MARK') }}{{ m|replace('MARK', 'y') }}{{ d['MARK'] }}{{ m }}"
    )

    text = SandboxedTemplate(source, lambda s: s.replace("MARK", "*")).render(
        {"m": "MARK", "d": {"MARK": "d"}}, Budget(10_000)
    )

    assert text == "**x**True2TrueTrueydMARK"
