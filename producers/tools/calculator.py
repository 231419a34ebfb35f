"""A calculator for arithmetic: the tool `calculator`.

Guarantees: the expression is parsed, never executed; only numbers, + - * / // % **, unary signs and parentheses are
allowed; results and intermediate numbers have at most `MAX_DIGITS` digits.

>>> calculator("2 * (3 + 4)"), calculator("7 / 2"), calculator("2 ** 10")
('14', '3.5', '1024')
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from producers.tools.base import ToolError

MAX_DIGITS = 300
MAX_LETTERS = 1000
_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, such as 12 * (3 + 4)
    """
    if len(expression) > MAX_LETTERS:
        raise ToolError(f"the expression is longer than {MAX_LETTERS} letters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ToolError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"not an arithmetic expression: {expression[:80]}") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the number is too large") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _check_size(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _check_size(_UNARY[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _check_size(_BINARY[type(node.op)](left, right))
    raise ToolError(f"only numbers and + - * / // % ** are known, not {ast.unparse(node)[:40]}")


def _check_power(base: float, exponent: float) -> None:
    digits = abs(exponent) * math.log10(max(abs(base), 2))
    if digits > MAX_DIGITS or (base < 0 and not float(exponent).is_integer()):
        raise ToolError("the power is too large, or not a real number")


def _check_size(value: Any) -> int | float:
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the number is too large")
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise ToolError("the number is too large")
    found: int | float = value
    return found
