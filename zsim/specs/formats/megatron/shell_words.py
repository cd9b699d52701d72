"""Words of a shell script: its text cut at blanks and operators, and the expansion of variables in them.

The part of POSIX shell and bash that launch scripts of training runs are made of: quotes, comments,
continued lines, arrays, `${NAME:-default}` and `$((arithmetic))` (bash manual, chapter 3).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field

from zsim.dataclass import dataclass
from zsim.errors import InputError

_MAX_WORD = 100_000
_BREAKS = ("&&", "||", ";;", ";", "|", "&", "\n", "(", ")")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARRAY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)\($")
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a script: a word as written, an operator, or an array `name=(text)`."""

    text: str
    is_operator: bool = False
    array: str | None = None


def tokens(script: str) -> list[Token]:
    """The tokens of a script. Raises InputError for a quote or bracket without its end."""
    return list(_Lexer(script.replace("\\\r\n", " ").replace("\\\n", " ").replace("\r", "")).run())


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def run(self) -> Iterator[Token]:
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in " \t":
                self.at += 1
            elif here == "#":
                self._skip_line()
            elif here in "<>" or re.match(r"\d?>", self.text[self.at : self.at + 2]):
                self._skip_redirection()
            elif (
                found := next((one for one in _BREAKS if self.text.startswith(one, self.at)), None)
            ) is not None:
                self.at += len(found)
                yield Token(found, is_operator=True)
            else:
                yield self._word()

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _skip_redirection(self) -> None:
        """Skip `2>&1`, `> file` and `<<EOF ... EOF`."""
        found = re.compile(r"\d?(<<-?|>>|[<>])&?[ \t]*").match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        start = self.at
        if self.at < len(self.text) and self.text[self.at] not in "\n;|&":
            self._word()
        if found[1].startswith("<<"):
            mark = self.text[start : self.at].strip("'\"")
            end = re.compile(rf"^\s*{re.escape(mark)}\s*$", re.MULTILINE).search(self.text, self.at)
            self.at = len(self.text) if end is None else end.end()

    def _word(self) -> Token:
        start = self.at
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in " \t\n;|&<>)":
                break
            if here == "(":
                found = _ARRAY.fullmatch(self.text[start : self.at + 1])
                if found is None:
                    break
                inner = self._bracket()[1:-1]
                return Token(inner, array=f"{found[1]}{found[2]}")
            self._piece()
        return Token(self.text[start : self.at])

    def _piece(self) -> None:
        """Move past one character, or past one quoted or bracketed piece."""
        here, after = self.text[self.at], self.text[self.at + 1 : self.at + 2]
        if here == "\\":
            self.at += 2
        elif here in "'\"`":
            self._quoted(here)
        elif here == "$" and after and after in "({":
            self.at += 1
            self._bracket()
        else:
            self.at += 1

    def _quoted(self, quote: str) -> None:
        start = self.at
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != quote:
            if quote == '"' and self.text[self.at] == "\\":
                self.at += 1
            elif quote == '"' and self.text[self.at : self.at + 2] in ("$(", "${"):
                self.at += 1
                self._bracket()
                continue
            elif quote == '"' and self.text[self.at] == "`":
                self._quoted("`")
                continue
            self.at += 1
        if self.at >= len(self.text):
            raise InputError(f"line {self._line(start)}: {quote} without its end")
        self.at += 1

    def _bracket(self) -> str:
        start, opening = self.at, self.text[self.at]
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != _CLOSING[opening]:
            here = self.text[self.at]
            if here == "#" and self.text[self.at - 1] in " \t\n(" and opening == "(":
                self._skip_line()
            elif here == opening:
                self._bracket()
            else:
                self._piece()
        if self.at >= len(self.text):
            raise InputError(f"line {self._line(start)}: {opening} without its end")
        self.at += 1
        return self.text[start : self.at]

    def _line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1


@dataclass
class Variables:
    """The variables of a script. Every value is a list, which has one text for a plain variable.

    A variable that nothing sets stands for itself: `$NAME`, one word.
    """

    values: dict[str, list[str]] = field(default_factory=dict)

    def expand(self, word: str) -> list[str]:
        """The fields that a word becomes."""
        fields: list[str] = []
        current: str | None = None
        for text, is_quoted, parts in self._pieces(word):
            if parts is not None:
                words = parts if is_quoted else [one for part in parts for one in part.split()]
                starts = not is_quoted and bool(parts) and parts[0][:1].isspace()
                if starts and current is not None:
                    fields.append(current)
                    current = None
                for number, one in enumerate(words):
                    if number and current is not None:
                        fields.append(current)
                        current = None
                    current = one if current is None else current + one
                continue
            current = text if current is None else current + text
            if len(current) > _MAX_WORD:
                raise InputError(f"a word of more than {_MAX_WORD:,} characters")
        return fields if current is None else [*fields, current]

    def one(self, word: str, *, unset: str | None = None) -> str:
        """The text that a word becomes, its fields joined.

        `unset` replaces the text of a word that is only an unset variable.
        """
        found = " ".join(self.expand(word))
        if unset is not None and re.fullmatch(r"\$\{?[A-Za-z0-9_@*#]+\}?", found):
            return unset
        return found

    def _pieces(self, word: str) -> Iterator[tuple[str, bool, list[str] | None]]:
        """(literal text, whether it was quoted, the values of an expansion or None)."""
        at, in_double = 0, False
        while at < len(word):
            here = word[at]
            if here == "'" and not in_double:
                end = _end(word, "'", at + 1)
                yield word[at + 1 : end], True, None
                at = end + 1
            elif here == '"':
                in_double = not in_double
                if in_double and word[at + 1 : at + 2] == '"':
                    yield "", True, None
                at += 1
            elif here == "\\" and (not in_double or word[at + 1 : at + 2] in '$"\\`'):
                yield word[at + 1 : at + 2], True, None
                at += 2
            elif here in "$`":
                text, at = _expansion(word, at)
                if text == "$":
                    yield "$", in_double, None
                else:
                    yield "", in_double, self._values(text)
            else:
                end = at + 1
                while end < len(word) and word[end] not in "'\"\\$`":
                    end += 1
                yield word[at:end], in_double, None
                at = end

    def _values(self, text: str) -> list[str]:
        """The values of `$NAME`, `${...}` or `$((...))`. The output of a command is unknown, so the command
        stays as written.
        """
        if text.startswith("$(("):
            number = self._arithmetic(text[3:-2])
            return [text if number is None else str(number)]
        if text.startswith(("$(", "`")):
            return [text]
        inner = text[2:-1] if text.startswith("${") else text[1:]
        found = re.fullmatch(
            r"([A-Za-z_][A-Za-z0-9_]*|[0-9@*#?]+)(\[[^\]]*\])?(:?[-=+])?(.*)", inner, re.DOTALL
        )
        if found is None or (found[4] and not found[3]):
            return [text]
        name, index, sign, word = found[1], found[2], found[3], found[4]
        values = self.values.get(name)
        is_empty = values is None or (sign is not None and sign.startswith(":") and values in ([""], []))
        if sign is not None and sign.endswith("+"):
            return [] if is_empty else [" ".join(self.expand(word))]
        if is_empty and sign is not None:
            values = [" ".join(self.expand(word))]
            if sign.endswith("="):
                self.values[name] = values
        if values is None:
            return [] if index in ("[@]", "[*]") else [text]
        if index == "[*]":
            return [" ".join(values)]
        if index == "[@]":
            return list(values)
        number = int(index[1:-1]) if index is not None and index[1:-1].isdecimal() else 0
        return values[number : number + 1]

    def _arithmetic(self, text: str) -> int | None:
        """The value of an expression of whole numbers, variables, + - * / % and brackets, or None for any
        other.
        """
        words = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
        words = _NAME.sub(lambda found: self.one(f"${found[0]}"), words).replace("/", "//")
        try:
            return _whole(ast.parse(words.strip(), mode="eval").body) if len(words) < 1000 else None
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 10**15:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_whole(node.left), _whole(node.right))
    raise ValueError("not a whole number")


def _end(word: str, quote: str, start: int) -> int:
    """The index at which a quote ends, or the word's length if nothing ends it."""
    end = word.find(quote, start)
    return len(word) if end < 0 else end


def _expansion(word: str, at: int) -> tuple[str, int]:
    """(the expansion that begins at `start`, the index after it). A dollar sign that begins none
    gives "$".
    """
    if word[at] == "`":
        end = _end(word, "`", at + 1)
        return word[at : end + 1], end + 1
    after = word[at + 1 : at + 2]
    if after and after in "({":
        depth, end = 0, at + 1
        while end < len(word):
            depth += (word[end] == after) - (word[end] == _CLOSING[after])
            end += 1
            if depth == 0:
                break
        return word[at:end], end
    found = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$]").match(word, at + 1)
    return ("$", at + 1) if found is None else (word[at : found.end()], found.end())
