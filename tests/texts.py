"""Extract the texts that people read: docstrings, errors, log lines and translated strings."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
GETTEXT = {"_", "_now", "gettext", "gettext_lazy", "ngettext", "ngettext_lazy", "pgettext", "pgettext_lazy"}
LABELS = {"help_text", "verbose_name", "verbose_name_plural", "help"}
"""Keyword arguments whose strings are shown to users."""
TAG = re.compile(r"{%.*?%}|{{.*?}}|{#.*?#}|<[^>]*>", re.DOTALL)
TRANSLATED = re.compile(r"""{%\s*(?:translate|trans)\s+(?:"([^"]*)"|'([^']*)')""")
CODE = re.compile(r"{% comment.*?endcomment %}|<(script|style)\b.*?</\1>|{#.*?#}", re.DOTALL)


@dataclass(frozen=True)
class Text:
    """One text, and the line where it begins."""

    kind: str
    line: int
    text: str


def in_python(path: Path) -> Iterator[Text]:
    """Yield the docstrings, errors, log lines and translated strings of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    of_functions = {node.body[0] for node in ast.walk(tree) if _is_function(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and (text := _literal(node.value)):
            yield Text("function" if node in of_functions else "docstring", node.lineno, text)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _arguments("error", node.exc)
        elif isinstance(node, ast.Call):
            name = _name(node.func)
            if (
                name in LEVELS
                and isinstance(node.func, ast.Attribute)
                and "log" in ast.unparse(node.func.value)
            ):
                yield from _arguments("log", node)
            elif name in GETTEXT:
                yield from _arguments("label", node)
            for keyword in node.keywords:
                if keyword.arg in LABELS and (text := _literal(keyword.value)):
                    yield Text("label", keyword.value.lineno, text)


def in_template(path: Path) -> Iterator[Text]:
    """Yield a template's translated strings and its own text."""
    source = CODE.sub("", path.read_text(encoding="utf-8"))
    for match in TRANSLATED.finditer(source):
        yield Text("label", source.count("\n", 0, match.start()) + 1, match[1] or match[2] or "")
    for number, line in enumerate(TAG.sub("\n", source).splitlines(), start=1):
        if text := line.strip():
            yield Text("label", number, text)


def _arguments(kind: str, call: ast.Call) -> Iterator[Text]:
    for argument in call.args:
        if text := _literal(argument):
            yield Text(kind, argument.lineno, text)


def _is_function(node: ast.AST) -> bool:
    """Return whether the node is a function whose docstring says what a call does; a property is a value."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    return not any("property" in ast.unparse(one) for one in node.decorator_list)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _literal(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else ""
    if isinstance(value, ast.JoinedStr):
        return "".join(_literal(part) or "…" for part in value.values)
    if isinstance(value, ast.BinOp):
        return _literal(value.left) + _literal(value.right)
    return ""
