"""A jinja2 environment for templates that come with a checkpoint: few names, and a bound on work and memory.

jinja2's own sandbox keeps a template from Python's internals, not from looping a billion times or growing a string
without end. Here only the filters, methods and operators that chat templates use exist, and whatever a template can
do again or make more of (a loop step, a call, a piece of text, a list) is paid for from one `Budget`, before the next.
Knows nothing of chats or tokens.
"""

from __future__ import annotations

import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 2**16  # the published template has 4,000; compiling takes a second and 100 MB at this size
MAX_SECONDS = 5.0
MAX_DEPTH = 100  # of lists and objects inside one another
MAX_NUMBER = 2**63  # factors of a product; bounded numbers cannot be multiplied into long ones
_ELEMENT_UNITS = 8  # an element of a list takes the memory of several characters

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "startswith endswith strip lstrip rstrip removeprefix removesuffix split rsplit partition rpartition "
        "splitlines find rfind count upper lower capitalize isdigit isspace".split()
    ),
    dict: frozenset("get items keys values".split()),
    list: frozenset("index count".split()),
    tuple: frozenset("index count".split()),
}
_LOOP_ATTRIBUTES = frozenset("index index0 revindex revindex0 first last length depth previtem nextitem".split())
_FILTERS_OF_OLD_VALUES = "count d default first int items last length".split()
_FILTERS_OF_NEW_VALUES = "capitalize list lower upper".split()


class TemplateLimitError(SecurityError):
    """A template did more work, or made more text, than any chat needs."""


class Budget:
    """What one rendering may still spend: a unit is a loop step, a call, or a character that was made.

    Args:
        units: The allowance. It bounds the memory too, since every new value is paid for.
    """

    def __init__(self, units: int) -> None:
        self.units = self._left = units
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, units: int) -> None:
        """Takes `units` off.

        Raises:
            TemplateLimitError: They are used up, or MAX_SECONDS have passed.
        """
        self._left -= units
        if self._left < 0:
            raise TemplateLimitError(f"it loops or grows without end (more than {self.units} steps and characters)")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"it runs for more than {MAX_SECONDS:g} seconds")

    def pay_for(self, value: Any) -> Any:
        """Spends the memory of a new string or list, and returns it.

        A list's elements existed before, so they cost little; but a list of the same list twice, over and over, is a
        tree that takes forever to print or compare. Such a tree may not be larger than the allowance either.
        """
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, dict | list | tuple):
            self.spend(_ELEMENT_UNITS * (1 + len(value)))
            if self.size_of(value) > self.units:
                raise TemplateLimitError(f"it builds a value of more than {self.units} parts")
        return value

    def size_of(self, value: Any, depth: int = 0) -> int:
        """Returns how many characters and elements printing `value` would walk, or some number above `units`.

        Raises:
            TemplateLimitError: It holds what may be endless to print, such as a namespace that holds itself.
        """
        if isinstance(value, str):
            return len(value)
        if value is None or isinstance(value, bool | int | float | Undefined):
            return 1
        if not isinstance(value, dict | list | tuple):
            raise TemplateLimitError(f"prints or collects a {type(value).__name__}; plain values are expected")
        if depth > MAX_DEPTH:
            raise TemplateLimitError(f"it nests values more than {MAX_DEPTH} deep")
        size = 1 + len(value)
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            size += self.size_of(item, depth + 1)
            if size > self.units:
                break
        return size

    def text(self, value: Any) -> str:
        """Returns `str(value)`, paid for."""
        if not isinstance(value, str):
            self.spend(self.size_of(value))
            value = str(value)
        self.spend(1 + len(value))
        return value


class SandboxedTemplate:
    """A compiled template.

    Args:
        source: Its text.
        literal: Applied to every text that the template itself may write: its plain text and its string constants,
            but not to those that it only compares with or searches for.

    Raises:
        jinja2.TemplateError: The source is too long, is not a template, or uses what chat templates have no use for.
    """

    def __init__(self, source: str, literal: Callable[[str], str] = str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise jinja2.TemplateError(f"it has {len(source)} characters; at most {MAX_SOURCE_CHARS} are read")
        environment = _Environment(Budget(1_000_000))
        try:
            tree = environment.parse(source)
            _Metering(literal).visit(tree)
            tree.set_environment(environment)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # of 1[:2] and the like; running it says so better
                self._code = environment.compile(tree)
        except jinja2.TemplateSyntaxError as e:
            raise jinja2.TemplateError(f"line {e.lineno}: {e.message}") from None
        except (RecursionError, MemoryError):
            raise jinja2.TemplateError("it is nested too deeply") from None
        except Exception as e:  # what Python says of the code made from it, or of a number of too many digits
            raise jinja2.TemplateError(f"{type(e).__name__}: {e}") from None

    def render(self, variables: Mapping[str, Any], budget: Budget) -> str:
        """Returns the text.

        Args:
            variables: Plain data: str, int, float, bool, None, and dicts and lists of them.

        Raises:
            jinja2.TemplateError: The template fails, says so itself (raise_exception), or exceeds the budget.
        """
        environment = _Environment(budget)
        template = jinja2.Template.from_code(environment, self._code, dict(environment.globals))
        try:
            return template.render(variables)
        except RecursionError:
            raise TemplateLimitError("it calls itself without end") from None
        except Exception as e:  # also what its expressions raise: a missing key, a list added to a number, ...
            lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == "<template>"]
            kind = type(e) if isinstance(e, jinja2.TemplateError) else jinja2.TemplateError
            what = str(e) if isinstance(e, jinja2.TemplateError) else f"{type(e).__name__}: {e}"
            raise kind(f"line {lines[-1]}: {what}" if lines else what) from e


class _Environment(ImmutableSandboxedEnvironment):
    """One for each rendering, since it holds the budget. Compiled code is shared."""

    intercepted_binops = frozenset("+ - * / // % **".split())

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension], finalize=_finalize, cache_size=0
        )
        self.budget = budget
        self.globals = {"range": safe_range, "namespace": Namespace, "dict": dict, "raise_exception": _raise_exception}
        self.filters = {name: FILTERS[name] for name in _FILTERS_OF_OLD_VALUES}
        self.filters |= {name: self._paid(FILTERS[name]) for name in _FILTERS_OF_NEW_VALUES}
        self.filters |= {"string": budget.text, "tojson": self._tojson, "join": self._join, "replace": self._replace}
        self.filters["trim"] = self._trim
        self.filters |= _METERS

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether `obj.attr`, or `obj["attr"]` where there is no such key, may be read."""
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        if isinstance(obj, LoopContext):
            return attr in _LOOP_ATTRIBUTES
        return attr in _METHODS.get(type(obj), ())

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """jinja2 fails when such a value is used, but prints it as nothing; reaching for it is enough to refuse."""
        raise SecurityError(f"reaches for the attribute {attribute!r} of a {type(obj).__name__}, which it may not")

    def wrap_str_format(self, value: Any) -> None:
        """jinja2 would hand out a `str.format` of its own here; formats make long strings of short ones."""

    def call(__self, __context: Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        __self.budget.spend(1)
        if isinstance(__obj, Undefined):
            __obj()  # raises, with the name that is not there
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", type(__obj).__name__)
        is_known = isinstance(__obj, Macro) or any(__obj is value for value in __self.globals.values())
        if not is_known and name not in _METHODS.get(type(owner), ()):
            raise SecurityError(f"calls {name!r}, which chat templates may not")
        if isinstance(owner, str):
            __self.budget.spend(_search_units(owner, *args, *kwargs.values()))
        result = __context.call(__obj, *args, **kwargs)
        return result if isinstance(owner, dict | list | tuple) else __self.budget.pay_for(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        is_arithmetic = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "+" and not is_arithmetic:
            return self.budget.pay_for(left + right)
        if operator == "**" or not is_arithmetic or max(abs(left), abs(right)) > MAX_NUMBER:
            kinds = f"{type(left).__name__} {operator} {type(right).__name__}"
            raise SecurityError(f"computes {kinds}; sums, and numbers below 2**63, are expected")
        return self.binop_table[operator](left, right)

    def _paid(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # also carries over whether jinja2 passes the environment
        def paid(*args: Any, **kwargs: Any) -> Any:
            return self.budget.pay_for(function(*args, **kwargs))

        return paid

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers has it for chat templates: plain JSON, not escaped for HTML as jinja2's is."""
        if indent is not None and indent not in range(17):
            raise TemplateLimitError(f"asks tojson for an indent of {indent}; 0 to 16 are expected")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return "".join([self.budget.text(chunk) for chunk in encoder.iterencode(value)])

    def _join(self, value: Iterable[Any], d: str = "") -> str:
        parts = [self.budget.text(item) for item in value]
        self.budget.spend(len(d) * len(parts))
        return d.join(parts)

    def _trim(self, value: Any, chars: str | None = None) -> str:
        text = self.budget.text(value)
        self.budget.spend(_search_units(text, chars))
        return text.strip(chars)

    def _replace(self, value: Any, old: str, new: str) -> str:
        text = self.budget.text(value)
        self.budget.spend(len(new) * text.count(old))  # count of "" is one more than the characters, as replace has it
        return text.replace(old, new)


def _search_units(text: str, *arguments: Any) -> int:
    """What a method of `text` costs: strip, rfind and rsplit may compare all of an argument at every character."""
    longest = max([len(argument) for argument in arguments if isinstance(argument, str)], default=0)
    return len(text) * (1 + longest // 64)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(f"refuses these messages: {message}")


# A rendering's budget reaches these through the context, so that jinja2 never runs them while it compiles.
def _budget(context: Context) -> Budget:
    environment = context.environment
    assert isinstance(environment, _Environment)
    return environment.budget


@pass_context
def _finalize(context: Context, value: Any) -> str:
    return _budget(context).text(value)


@pass_context
def _steps(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    budget = _budget(context)
    for item in iterable:
        budget.spend(1)
        yield item


@pass_context
def _new(context: Context, value: Any) -> Any:
    return _budget(context).pay_for(value)


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    return "".join([_budget(context).text(value) for value in values])


_METERS = {"steps ": _steps, "new ": _new, "concat ": _concat}  # the space keeps templates from naming them


class _Metering(NodeTransformer):
    """Sends through the budget what jinja2 compiles to plain Python, where no method of the environment is asked.

    That is loops, `~`, displays of lists and objects, slices, and plain text. Applies `literal` on the way.
    """

    def __init__(self, literal: Callable[[str], str]) -> None:
        self._literal = literal
        self._searched: set[int] = set()

    def _keep(self, *searched: nodes.Node) -> None:
        self._searched.update(id(node) for node in searched)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:
        return nodes.Const(self._literal(node.data), lineno=node.lineno)  # finalize sees constants, not TemplateData

    def visit_Const(self, node: nodes.Const) -> nodes.Const:
        if isinstance(node.value, str) and id(node) not in self._searched:
            node.value = self._literal(node.value)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self._keep(node.expr, *(operand.expr for operand in node.ops))
        return self.generic_visit(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self._keep(*node.args or ())
        return self.generic_visit(node)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise jinja2.TemplateSyntaxError("calls with * or ** are not available to chat templates", node.lineno)
        if isinstance(node.node, nodes.Getattr) and node.node.attr in _METHODS[str]:
            self._keep(*node.args)
        return self.generic_visit(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.name == "replace":
            self._keep(*node.args[:1])
        return self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self._keep(node.arg)
        self.generic_visit(node)
        return _through("new ", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not available to chat templates", node.lineno)
        self.generic_visit(node)
        node.iter = _through("steps ", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("concat ", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through("new ", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _through("new ", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through("new ", node) if node.ctx == "load" else node


def _through(meter: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, meter, [], [], None, None, lineno=node.lineno)
