"""Templates to CUDA source, and the tables' expressions to values. Strict: a name that is not defined is an error.

Deterministic: nothing in the environment depends on time, chance or the machine. Sandboxed: a table is data, and an
expression in it reaches no Python but the operators, filters and functions of Jinja.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chord.errors import TableError
from chord.registry.schema import Constant

SOURCE_ENDINGS = (".cu.j2", ".cuh")
"""Files under templates/ that are sources: recorded in the manifest, and carried by wheels."""


_MOST_CHARACTERS = 400
_FILTERS = ("abs", "int", "length", "max", "min", "sum")
_ARITHMETIC = (
    nodes.Template, nodes.Output, nodes.Const, nodes.Name, nodes.List, nodes.Tuple, nodes.Filter, nodes.CondExpr,
    nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Neg, nodes.Pos,
    nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.TemplateData,
)  # fmt: skip
"""What an expression of a table may consist of."""


class RenderError(TableError):
    """A template that cannot be rendered with a program's constants; names the template and the line."""


class _Loader(jinja2.FileSystemLoader):
    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        if not template.endswith(SOURCE_ENDINGS):
            raise RenderError(
                f"templates/{template}: expected a name that ends in {' or '.join(SOURCE_ENDINGS)}: "
                "no other file is recorded and packaged"
            )
        text, found, is_current = super().get_source(environment, template)
        folder = Path(self.searchpath[0]).resolve()
        if not Path(found).resolve().is_relative_to(folder):
            raise RenderError(f"templates/{template}: a link out of templates/, to {Path(found).resolve()}")
        return text, found, is_current


class _Environment(ImmutableSandboxedEnvironment):
    """Multiplies numbers alone: a repeated text or list can be of any size."""

    intercepted_binops = frozenset(("*", "%"))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if not (isinstance(left, int | float) and isinstance(right, int | float)):
            given = left if isinstance(right, int | float) else right
            if isinstance(given, jinja2.Undefined):
                str(given)  # raises
            raise TypeError(f"{operator} takes numbers, got {type(given).__name__}")
        return super().call_binop(context, operator, left, right)


class Renderer:
    """Renders the templates of one folder."""

    def __init__(self, templates: Path) -> None:
        self._folder = templates
        self._environment = _Environment(
            loader=_Loader(templates, encoding="utf-8"),
            undefined=jinja2.StrictUndefined,
            autoescape=False,
            keep_trailing_newline=True,
            newline_sequence="\n",
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        del self._environment.filters["random"], self._environment.globals["lipsum"]

    def render(self, template: str, constants: Mapping[str, Constant], symbol: str) -> str:
        """The CUDA source of one program. `template` is a path under the templates folder. Raises RenderError."""
        try:
            return self._environment.get_template(template).render(**constants, symbol=symbol)
        except jinja2.TemplateNotFound as error:
            user = self._place(error)
            raise RenderError(f"{user}{': ' if user else ''}templates/{error.name}: no such template") from error
        except jinja2.TemplateSyntaxError as error:
            raise RenderError(f"templates/{error.name or template}:{error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, ArithmeticError, TypeError, ValueError, RecursionError) as error:
            place = self._place(error) or f"templates/{template}:?"
            raise RenderError(f"{place}: {error}; given are {_given(constants)}") from error

    def evaluate(self, expression: Constant, constants: Mapping[str, Constant]) -> Constant:
        """The value of a table's expression: numbers are themselves. Raises ValueError that says what went wrong."""
        if isinstance(expression, int):
            return expression
        self._refuse_more_than_arithmetic(expression)
        try:
            compiled = self._environment.compile_expression(expression, undefined_to_none=False)
            value = compiled(**constants)
            if isinstance(value, jinja2.Undefined):
                str(value)  # raises: a bare undefined name is returned rather than used
        except (jinja2.TemplateError, ArithmeticError, TypeError, RecursionError) as error:
            raise ValueError(f"expression {expression!r}: {error}; given are {_given(constants)}") from error
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"expression {expression!r}: expected a whole number, got {value!r}")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(
                f"expression {expression!r}: expected a number of 64 bits, got one of {value.bit_length()}"
            )
        return value

    def _refuse_more_than_arithmetic(self, expression: str) -> None:
        """Whole-number arithmetic, comparisons and a few filters: nothing that can take long, or long memory.

        Raises ValueError.
        """
        fault = ""
        if len(expression) > _MOST_CHARACTERS:
            fault = f"expected at most {_MOST_CHARACTERS} characters, got {len(expression)}"
        else:
            try:
                tree = self._environment.parse("{{ " + expression + " }}")
            except (jinja2.TemplateSyntaxError, RecursionError):
                return  # compiling says it better
            for node in tree.find_all(nodes.Node):
                if not isinstance(node, _ARITHMETIC) or (isinstance(node, nodes.Filter) and node.name not in _FILTERS):
                    name = getattr(node, "name", type(node).__name__.lower())
                    fault = f"{name} is not arithmetic: expected + - * // %, comparisons, `a if b else c`, lists, " + (
                        f"and the filters {', '.join(_FILTERS)}"
                    )
                    break
        if fault:
            shown = expression if len(expression) <= _MOST_CHARACTERS else expression[:50] + "..."
            raise ValueError(f"expression {shown!r}: {fault}")

    def _place(self, error: BaseException) -> str:
        """`templates/file:line` of the innermost template in which `error` was raised; empty when it was in none.

        Jinja rewrites its frames to the templates' files and lines.
        """
        place = ""
        trace = error.__traceback__
        while trace is not None:
            file = Path(trace.tb_frame.f_code.co_filename)
            if file.is_relative_to(self._folder):
                place = f"templates/{file.relative_to(self._folder).as_posix()}:{trace.tb_lineno}"
            trace = trace.tb_next
        return place


def _given(constants: Mapping[str, Constant]) -> str:
    return ", ".join(f"{key}={value}" for key, value in constants.items()) or "no constants"
