"""Words of a shell script: its text cut at blanks and operators, and the expansion of variables in them.

The part of POSIX shell and bash that launch scripts of training runs are made of: quotes, comments,
continued lines, arrays, here documents, `${NAME:-default}`, `$((arithmetic))` (bash manual, chapter 3), and
what `expr`, `echo` and the commands that only handle names of files would print.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zsim.errors import InputError

_MAX_WORD = 100_000
_BREAKS = ("&&", "||", ";;", ";", "|", "&", "\n", "(", ")")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARRAY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)\($")
_PARAMETER = re.compile(r"[1-9][0-9]*|[@*#]")
_REDIRECTION = re.compile(r"[&\d]?(<<<|<<-?|>>|[<>])&?[ \t]*")
_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>|;&\n]*[\w.]>(?=[\s\"'/]|$)")  # `<path to data>`, to be filled in
# A word of a value. An unknown output is one, and so is what is to be filled in.
_FIELD = re.compile(rf"(?:\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|{_PLACEHOLDER.pattern}|\S)+")
# The length of a list of devices.
_COUNT = re.compile(
    r"""echo\s+(\S+)\s*\|\s*(?:awk\s+-F\s*['"]?,['"]?\s+'\{\s*print\s+NF;?\s*\}'"""
    r"""|tr\s+['"]?,['"]?\s+['"]\\n['"]\s*\|\s*wc\s+-([lw]))"""
)
_PARAMETERS = 9  # that are empty rather than unset, once there are any
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
    """A piece of a script: a word as written, an operator, an array `name=(text)`, or a here document."""

    text: str
    is_operator: bool = False
    array: str | None = None
    is_document: bool = False
    """The text is a document, in double quotes, or the word of a here string."""
    is_target: bool = False
    """The text is the file behind `>`."""


def tokenize(script: str) -> list[Token]:
    """The tokens of a script. Raises InputError for a quote or bracket without its end."""
    lines: list[str] = []
    for line in script.replace("\r", "").split("\n"):
        is_continued = bool(lines) and lines[-1].endswith("\\")
        is_comment = line.lstrip().startswith("#") and not is_continued
        lines.append(line.rstrip("\\") if is_comment else line)  # a comment ends with its line
    text = "\n".join(lines).replace("\\\n", " ")
    return list(_Lexer(text.removesuffix("\\")).run())  # nothing continues the last line


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.documents_end = 0
        """Where the documents end that begin behind the line."""

    def run(self) -> Iterator[Token]:
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in " \t":
                self.position += 1
            elif character == "#":
                self._skip_line()
            elif _PLACEHOLDER.match(self.text, self.position):
                yield self._read_word()
            elif _REDIRECTION.match(self.text, self.position):
                yield from self._read_redirection()
            elif (
                separator := next(
                    (candidate for candidate in _BREAKS if self.text.startswith(candidate, self.position)),
                    None,
                )
            ) is not None:
                self.position += len(separator)
                yield Token(separator, is_operator=True)
                if separator == "\n":
                    self.position, self.documents_end = max(self.position, self.documents_end), 0
            else:
                yield self._read_word()

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.position)
        self.position = len(self.text) if end < 0 else end

    def _read_redirection(self) -> Iterator[Token]:
        """Skip `2>&1`, `&> file` and `>> file`. The document of `<<EOF ... EOF` is a token, the word of
        `<<< word`, and the file of `> file`.
        """
        redirection = _REDIRECTION.match(self.text, self.position)
        assert redirection is not None
        self.position = redirection.end()
        start = self.position
        if self.position < len(self.text) and self.text[self.position] not in "\n;|&":
            self._read_word()
        word = self.text[start : self.position]
        if redirection[0].rstrip() in (">", "1>") and word:
            yield Token(word, is_target=True)
        if not redirection[1].startswith("<<"):
            return
        if redirection[1] == "<<<":
            yield Token(word, is_document=True)
            return
        delimiter = word.strip("'\"\\")
        begin = self.documents_end or self.text.find("\n", self.position) + 1 or len(self.text)
        end = re.compile(rf"^\s*{re.escape(delimiter)}\s*$", re.MULTILINE).search(self.text, begin)
        document = self.text[begin : len(self.text) if end is None else end.start()]
        self.documents_end = len(self.text) if end is None else end.end()
        if word != delimiter:  # quoted, so that nothing in it is expanded
            document = re.sub(r"([\\$`])", r"\\\1", document).replace('"', '\\"')
        else:
            document = re.sub(r'(\\*)"', lambda match: f'{match[1] * 2}\\"', document)
        yield Token(f'"{document}"', is_document=True)

    def _read_word(self) -> Token:
        start = self.position
        while self.position < len(self.text):
            character = self.text[self.position]
            if placeholder := _PLACEHOLDER.match(self.text, self.position):
                self.position = placeholder.end()
                continue
            if character in " \t\n;|&<>)":
                break
            if character == "(":
                match = _ARRAY.fullmatch(self.text[start : self.position + 1])
                if match is None:
                    break
                inner = self._read_bracket()[1:-1]
                return Token(inner, array=f"{match[1]}{match[2]}")
            self._skip_piece()
        return Token(self.text[start : self.position])

    def _skip_piece(self) -> None:
        """Move past one character, or past one quoted or bracketed piece."""
        character, next_character = self.text[self.position], self.text[self.position + 1 : self.position + 2]
        if character == "\\":
            self.position += 2
        elif character in "'\"`":
            self._skip_quoted(character)
        elif character == "$" and next_character and next_character in "({":
            self.position += 1
            self._read_bracket()
        else:
            self.position += 1

    def _skip_quoted(self, quote: str) -> None:
        start = self.position
        self.position += 1
        while self.position < len(self.text) and self.text[self.position] != quote:
            if quote == '"' and self.text[self.position] == "\\":
                self.position += 1
            elif quote == '"' and self.text[self.position : self.position + 2] in ("$(", "${"):
                self.position += 1
                self._read_bracket()
                continue
            elif quote == '"' and self.text[self.position] == "`":
                self._skip_quoted("`")
                continue
            self.position += 1
        if self.position >= len(self.text):
            raise InputError(f"line {self._line_number(start)}: {quote} without its end")
        self.position += 1

    def _read_bracket(self) -> str:
        start, opening = self.position, self.text[self.position]
        self.position += 1
        while self.position < len(self.text) and self.text[self.position] != _CLOSING[opening]:
            character = self.text[self.position]
            if character == "#" and self.text[self.position - 1] in " \t\n(" and opening == "(":
                self._skip_line()
            elif character == opening:
                self._read_bracket()
            else:
                self._skip_piece()
        if self.position >= len(self.text):
            raise InputError(f"line {self._line_number(start)}: {opening} without its end")
        self.position += 1
        return self.text[start : self.position]

    def _line_number(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1


@dataclass
class Variables:
    """The variables of a script. Every value is a list, which has one text for a plain variable.

    A variable that nothing sets stands for itself: `$NAME`, one word.
    """

    values: dict[str, list[str]] = field(default_factory=dict)
    demanded: dict[str, str] = field(default_factory=dict)
    """Unset variables that `${NAME:?message}` asks for, with the message."""

    def set_parameters(self, words: Sequence[str]) -> dict[str, list[str]]:
        """Set `$1`, `$2`, ..., `$#` and `$@` of a script or function. Returns those before."""
        outer = {name: value for name, value in self.values.items() if _PARAMETER.fullmatch(name)}
        self.restore_parameters({str(number): [word] for number, word in enumerate(words, 1)})
        self.values |= {"@": list(words), "*": list(words), "#": [str(len(words))]}
        for number in range(len(words) + 1, _PARAMETERS + 1):
            self.values[str(number)] = [""]
        return outer

    def restore_parameters(self, parameters: Mapping[str, list[str]]) -> None:
        """Replace the parameters by those that `set_parameters` returned."""
        for name in [name for name in self.values if _PARAMETER.fullmatch(name)]:
            del self.values[name]
        self.values |= parameters

    def shift(self, count: int) -> None:
        """Drop the first parameters, if there are any."""
        if "@" in self.values:
            self.set_parameters(self.values["@"][count:])

    def expand(self, word: str) -> list[str]:
        """The fields that a word becomes."""
        fields: list[str] = []
        current: str | None = None
        for text, is_quoted, values in self._split_pieces(word):
            if values is not None:
                words = values if is_quoted else [word for value in values for word in _FIELD.findall(value)]
                starts_with_space = not is_quoted and bool(values) and values[0][:1].isspace()
                if starts_with_space and current is not None:
                    fields.append(current)
                    current = None
                for number, value_word in enumerate(words):
                    if number and current is not None:
                        fields.append(current)
                        current = None
                    current = value_word if current is None else current + value_word
                continue
            current = text if current is None else current + text
            if len(current) > _MAX_WORD:
                raise InputError(f"a word of more than {_MAX_WORD:,} characters")
        return fields if current is None else [*fields, current]

    def expand_text(self, word: str, *, unset: str | None = None) -> str:
        """The text that a word becomes, its fields joined.

        `unset` replaces the text of a word that is only an unset variable.
        """
        expansion = " ".join(self.expand(word))
        variable = re.fullmatch(r"\$\{?([A-Za-z0-9_@*#]+)\}?", expansion)
        if unset is None or variable is None:
            return expansion
        if (name := variable[1]) in self.demanded:
            raise InputError(
                f"{name}: is not set, and the script stops without it{self.demanded[name]}; expected "
                f'--set strategy.config="{name}=VALUE SCRIPT"'
            )
        return unset

    def _split_pieces(self, word: str) -> Iterator[tuple[str, bool, list[str] | None]]:
        """(literal text, whether it was quoted, the values of an expansion or None)."""
        position, is_double_quoted = 0, False
        while position < len(word):
            character = word[position]
            if character == "'" and not is_double_quoted:
                end = _quote_end(word, "'", position + 1)
                yield word[position + 1 : end], True, None
                position = end + 1
            elif character == '"':
                is_double_quoted = not is_double_quoted
                if is_double_quoted and word[position + 1 : position + 2] == '"':
                    yield "", True, None
                position += 1
            elif character == "\\" and (not is_double_quoted or word[position + 1 : position + 2] in '$"\\`'):
                yield word[position + 1 : position + 2], True, None
                position += 2
            elif character in "$`":
                text, position = _read_expansion(word, position)
                if text == "$":
                    yield "$", is_double_quoted, None
                else:
                    yield "", is_double_quoted, self._expand_expression(text)
            else:
                end = position + 1
                while end < len(word) and word[end] not in "'\"\\$`":
                    end += 1
                yield word[position:end], is_double_quoted, None
                position = end

    def _expand_expression(self, text: str) -> list[str]:
        """The values of `$NAME`, `${...}`, `$((...))` or `$(expr ...)`. The output of any other command is
        unknown, so the command stays as written.
        """
        if text.startswith("$(("):
            number = self._evaluate_arithmetic(text[3:-2])
            return [text if number is None else str(number)]
        if text.startswith(("$(", "`")):
            output = self._output(text[2:-1] if text.startswith("$(") else text[1:-1])
            return [text if output is None else output]
        inner = text[2:-1] if text.startswith("${") else text[1:]
        if size := re.fullmatch(r"#([A-Za-z_][A-Za-z0-9_]*)(\[[@*]\])?", inner):
            words = self.values.get(size[1])
            count = words if size[2] or words is None else "".join(words[:1])
            return [text if count is None or any("$" in word for word in count) else str(len(count))]
        match = re.fullmatch(
            r"([A-Za-z_][A-Za-z0-9_]*|[0-9@*#?]+)(\[[^\]]*\])?(:?[-=+?])?(.*)", inner, re.DOTALL
        )
        if match is None or (match[4] and not match[3]):
            return [text]
        name, index, sign, word = match[1], match[2], match[3], match[4]
        values = self.values.get(name, ["."] if name == "PWD" else None)  # as `pwd`
        is_empty = values is None or (sign is not None and sign.startswith(":") and values in ([""], []))
        if sign is not None and sign.endswith("+"):
            return [] if is_empty else [" ".join(self.expand(word))]
        if is_empty and sign is not None and sign.endswith("?") and not name.isdecimal():
            message = " ".join(self.expand(word))
            self.demanded[name] = f" ({message})" if message else ""
        elif is_empty and sign is not None and not sign.endswith("?"):
            values = [" ".join(self.expand(word))]
            if sign.endswith("="):
                self.values[name] = values
        if values is None:
            return [] if index in ("[@]", "[*]") else [f"${{{name}}}" if sign else text]
        if index == "[*]" or name == "*":
            return [" ".join(values)]
        if index == "[@]" or name == "@":
            return list(values)
        number = int(index[1:-1]) if index is not None and index[1:-1].isdecimal() else 0
        return values[number : number + 1]

    def _output(self, command: str) -> str | None:
        """Text that `expr`, `echo`, `pwd` and the like print, also behind `cd FOLDER &&`.

        None for other commands, and where a word is unknown. The working folder is ".".
        """
        folder, output = "", ""
        words: list[str] = []
        if listed := _COUNT.fullmatch(command.strip()):
            devices = self.expand_text(listed[1])
            words = [word for word in devices.split(",") if word or listed[2] != "w"]
            return None if re.search(r"[$`]", devices) or not devices else str(len(words))
        try:
            tokens = [*tokenize(command), Token(";", is_operator=True)]
        except InputError:
            return None
        for token in tokens:
            if not token.is_operator:
                words += [] if token.is_target else self.expand(token.text)
                continue
            if token.text not in ("&&", ";", "\n") or any(re.search(r"[$`]", word) for word in words):
                return None
            operands = [word for word in words[1:] if not re.match(r"-[-a-zA-Z]*$", word)]
            match words[:1]:
                case []:
                    continue
                case ["cd"] if len(operands) == 1:
                    folder = os.path.join(folder, operands[0])
                case ["pwd"]:
                    output = folder or "."
                case ["dirname"] if len(operands) == 1:
                    output = os.path.dirname(operands[0]) or "."
                case ["basename"] if operands:
                    output = os.path.basename(operands[0]).removesuffix("".join(operands[1:2]))
                case ["readlink" | "realpath"] if len(operands) == 1:
                    output = os.path.normpath(os.path.join(folder, operands[0]))
                case ["echo"]:
                    output = " ".join(operands)
                case ["expr"] if (number := self._evaluate_arithmetic(" ".join(words[1:]))) is not None:
                    output = str(number)
                case _:
                    return None
            words = []
        return output

    def _evaluate_arithmetic(self, text: str) -> int | None:
        """The value of an expression of whole numbers, variables, + - * / % and brackets, or None for any
        other.
        """
        words = re.sub(r"\$\{?([0-9]+)\}?", lambda match: self.expand_text(f"${match[1]}"), text)
        words = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", words)
        words = _NAME.sub(lambda match: self.expand_text(f"${match[0]}"), words).replace("/", "//")
        try:
            return (
                _evaluate_integer(ast.parse(words.strip(), mode="eval").body) if len(words) < 1000 else None
            )
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None


def _evaluate_integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 10**15:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate_integer(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluate_integer(node.left), _evaluate_integer(node.right))
    raise ValueError("not a whole number")


def _quote_end(word: str, quote: str, start: int) -> int:
    """The index at which a quote ends, or the word's length if nothing ends it."""
    end = word.find(quote, start)
    return len(word) if end < 0 else end


def _read_expansion(word: str, start: int) -> tuple[str, int]:
    """(the expansion that begins at `start`, the index after it). A dollar sign that begins none
    gives "$".
    """
    if word[start] == "`":
        end = _quote_end(word, "`", start + 1)
        return word[start : end + 1], end + 1
    next_character = word[start + 1 : start + 2]
    if next_character and next_character in "({":
        depth, end = 0, start + 1
        while end < len(word):
            depth += (word[end] == next_character) - (word[end] == _CLOSING[next_character])
            end += 1
            if depth == 0:
                break
        return word[start:end], end
    match = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$]").match(word, start + 1)
    return ("$", start + 1) if match is None else (word[start : match.end()], match.end())
