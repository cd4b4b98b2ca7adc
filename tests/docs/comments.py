"""Comments that say what a line gives, ``x.sum()  # 6.0``, compared with what it gives.

The comment of a line that ends a statement is compared if its first part (up to ``;``), or what stands after its last
`` = ``, is a number, or a list or tuple of numbers, written out or as fractions: ``# [1/4, 1/13]``.  A tuple beside a tensor
is its shape, where a name (``# (batch, 64)``) stands for any number; anything else is its values, to the last digit written.
What is compared is the expression, what ``print`` is given, or what the statement assigns.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable
from typing import Any

HOOK = "__told__"
ARITHMETIC = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)


def said(comment: str) -> ast.expr | None:
    """The numbers that a comment begins with or ends in; ``None`` if it is prose."""
    first = comment.split(";")[0]
    for text in (first, first.rpartition(" = ")[2]):
        try:
            found = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:
            continue
        parts = found.elts if isinstance(found, (ast.List, ast.Tuple)) else [found]
        names = isinstance(found, ast.Tuple)
        if parts and all(_is_number(part) or (names and isinstance(part, ast.Name)) for part in parts):
            return found
    return None


def _is_number(node: ast.expr) -> bool:
    return all(isinstance(n, ARITHMETIC) for n in ast.walk(node)) and not any(
        isinstance(n, ast.Constant) and not isinstance(n.value, (int, float)) for n in ast.walk(node)
    )


def hooked(code: str, name: str, line: int = 1) -> tuple[Any, int]:
    """The compiled code, which calls ``HOOK(what the comment says, value)`` where a comment says something; how often."""
    tree = ast.parse(code)
    notes = {
        token.start[0]: token.string[1:].strip()
        for token in tokenize.generate_tokens(io.StringIO(code + "\n").readline)
        if token.type == tokenize.COMMENT
    }
    count = 0
    body: list[ast.stmt] = []
    for statement in tree.body:
        body.append(statement)
        found = said(notes.get(statement.end_lineno or 0, ""))
        if found is None:
            continue
        text = ast.unparse(found)
        if isinstance(statement, ast.Expr):
            call = statement.value
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print" and call.args:
                call.args[0] = _call(text, call.args[0])
            else:
                statement.value = _call(text, call)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            body.append(ast.Expr(_call(text, ast.Name(statement.targets[0].id, ast.Load()))))
        else:
            continue
        count += 1
    tree.body = body
    ast.increment_lineno(ast.fix_missing_locations(tree), line - 1)
    return compile(tree, name, "exec"), count


def _call(text: str, value: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(HOOK, ast.Load()), [ast.Constant(text), value], [])


def hook(wrong: list[str]) -> Callable[[str, Any], Any]:
    """What ``HOOK`` is bound to: notes a comment that is not true, and returns the value."""

    def told(text: str, value: Any) -> Any:
        if not true(text, value):
            wrong.append(f"a comment says {text}, but it is {value}")
        return value

    return told


def true(text: str, value: Any) -> bool:
    """Whether a value is what the text says."""
    import torch

    said = ast.parse(text, mode="eval").body
    parts = said.elts if isinstance(said, (ast.List, ast.Tuple)) else [said]
    if isinstance(said, ast.Tuple) and isinstance(value, torch.Tensor):
        sizes = [None if isinstance(part, ast.Name) else _value(part) for part in parts]
        return len(sizes) == value.ndim and all(s in (None, v) for s, v in zip(sizes, value.shape, strict=True))
    got = torch.as_tensor(value).detach().double().flatten()
    want = torch.tensor([_value(part) for part in parts], dtype=torch.float64)
    if isinstance(said, (ast.List, ast.Tuple)) and len(got) != len(want):
        return False
    room = torch.tensor([_room(part) for part in parts], dtype=torch.float64)
    return bool(((got - want).abs() <= room).all())


def _room(node: ast.expr) -> float:
    """Half a unit of the last digit that is written; a millionth of whole numbers and fractions."""
    digits = ast.unparse(node).partition(".")[2]
    return 0.51 * 10.0 ** -len(digits) if digits.isdigit() else 1e-6 * max(1.0, abs(_value(node)))


def _value(node: ast.expr) -> float:
    return eval(compile(ast.Expression(node), "comment", "eval"), {"__builtins__": {}})
