"""Launch scripts, interpreted without running a program: the commands that they would start."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from zsim.errors import InputError
from zsim.programs.shell_words import Token, Variables, tokenize
from zsim.reading import parse_whole_number, read_text
from zsim.specs.formats.config_file import locate_named_file

SCRIPT_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
_SHELLS = ("bash", "sh", "source", ".", "sbatch")
_STARTERS = ("bash", "sh", "sbatch", "srun")
# sbatch's options -> the variables that a job has by them (sbatch(1), Slurm 24.05).
_SBATCH = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE",),
}  # fmt: skip
# Options of srun and sbatch without a word behind them (Slurm 24.05; container-* of pyxis 0.20).
_SWITCHES = {
    "--exclusive", "--label", "-l", "--unbuffered", "-u", "--overlap", "--exact", "--no-kill", "-k",
    "--requeue", "--no-requeue", "--contiguous", "--overcommit", "-O", "--oversubscribe", "-s",
    "--kill-on-bad-exit", "-K", "--immediate", "-I", "--pty", "--verbose", "-v", "--quiet", "-Q", "--hold",
    "-H", "--disable-status", "-X", "--preserve-env", "-E", "--spread-job", "--use-min-nodes", "--parsable",
    "--container-mount-home", "--no-container-mount-home", "--container-writable", "--container-readonly",
    "--container-remap-root", "--no-container-remap-root", "--container-entrypoint",
    "--no-container-entrypoint",
}  # fmt: skip

_MAX_COMMANDS, _MAX_DEPTH, _MAX_ROUNDS = 2_000, 8, 100
_MAX_ALL_ROUNDS = 10_000  # of all loops together
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)(.*)", re.DOTALL)
# A comment behind a continued line, with flags or overrides behind it.
_CUT = re.compile(r"\\\n[ \t]*#[^\n]*\n(?:[ \t]*#[^\n]*\n)*(?=[ \t]*(?:--[A-Za-z]|[\w+]+\.[\w.]+=))")
_SUBSTITUTION = re.compile(r"s([/|#,])(\w+)\1(.*?)\1(g?)")  # of a word, as templates are filled in
_FILTERS = ("cat", "sed", "tee")  # programs whose output is their input, or of it
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_NUMBERS = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b, "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip
_DEVICES = ("gpu", "cuda", "nvidia")  # what a script finds out of its machine, where it asks another program
_LOOPS = ("for", "while", "until", "select")


@dataclass
class Script:
    """The commands that a launch script would start, and its variables at its end.

    Functions are followed where they are called, and scripts that it sources or starts. A loop over known
    words is followed for every word, one with a known condition as long as it holds, and any other once.
    Conditions that depend on files or on the output of other programs count as false.
    """

    commands: list[list[str]] = field(default_factory=list)
    """The words of each command."""
    environments: list[dict[str, str]] = field(default_factory=list)
    """The variables when each command started."""
    variables: Variables = field(default_factory=Variables)
    functions: dict[str, list[Token]] = field(default_factory=dict)
    """The body of each function that is defined."""
    notes: list[str] = field(default_factory=list)
    """The loops and conditions that were not followed, where they might matter."""
    path: Path | None = None
    """The script's file, from whose folder those are looked for that it names."""
    rounds: Iterator[int] = field(default_factory=itertools.count)
    """The number of rounds of loops that have run."""
    running: set[Path] = field(default_factory=set)
    """The files that are being followed, this one and those that lead to it."""
    documents: dict[str, str] = field(default_factory=dict)
    """{file: text} that it writes by `cat`, `sed` and `tee` of a here document or of another file."""


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A script that a command line names."""

    path: str
    environment: Mapping[str, str]
    """Variables that stand before it."""
    parameters: tuple[str, ...]
    """Words that stand behind it."""

    def run(self, parameters: Sequence[str]) -> Script:
        """The commands of the script with `parameters`. Raises OSError and UnicodeDecodeError for a file that
        cannot be read, InputError for one that is no script.
        """
        return run_script(read_text(Path(self.path)), self.environment, parameters, Path(self.path))


def script_call(words: Sequence[str], suffixes: Sequence[str] = SCRIPT_SUFFIXES) -> ScriptCall | None:
    """The script among the words, or None if they name none. Variables and a shell may stand before it."""
    indices = (number for number, word in enumerate(words) if "=" not in word and word not in _SHELLS)
    index = next(indices, None)
    if index is None or Path(words[index]).suffix not in suffixes:
        return None
    environment = dict(word.partition("=")[::2] for word in words[:index] if "=" in word)
    return ScriptCall(words[index], environment, tuple(words[index + 1 :]))


def run_script(
    text: str,
    environment: Mapping[str, str] | None = None,
    parameters: Sequence[str] = (),
    path: Path | None = None,
) -> Script:
    """The commands of a script under the variables of `environment`, started with `parameters`.

    Without parameters `$1` and the like stand for themselves. Raises InputError for text that is no shell
    script.
    """
    values = {**_job_variables(_sbatch_options(text)), **(environment or {})}
    script = Script(variables=Variables({key: [value] for key, value in values.items()}), path=path)
    if parameters:
        script.variables.set_parameters(parameters)
    if path is not None:
        script.variables.values |= {"0": [str(path)], "BASH_SOURCE": [str(path)]}
        script.running.add(path.resolve())
    for match in _CUT.finditer(text):
        if text.count('"', 0, match.start()) % 2 == 0:
            line = text.count("\n", 0, match.start()) + 2
            script.notes.append(
                f"line {line}: a comment ends the command, so what stands behind it is left out"
            )
    try:
        _Runner(script, 0).run(tokenize(text))
    except RecursionError:
        raise InputError("brackets or blocks, nested too deep") from None
    return script


def _sbatch_options(text: str) -> str:
    """The options of sbatch that stand in a script."""
    return " ".join(re.findall(r"^#SBATCH\s+([^#\n]*)", text, re.MULTILINE))


def _job_variables(options: str) -> dict[str, str]:
    """The variables that Slurm sets by options of sbatch."""
    pairs = re.findall(r"(?:^|\s)--?([A-Za-z][\w-]*)[= ]\s*([^\s-]\S*)", options)
    numbers = {name: parse_whole_number(value.rpartition(":")[2]) for name, value in pairs}
    counts = {name: number for name, number in numbers.items() if number is not None}
    variables = {variable: str(n) for name, n in counts.items() for variable in _SBATCH.get(name, ())}
    nodes, tasks = variables.get("SLURM_NNODES"), variables.get("SLURM_NTASKS_PER_NODE")
    if nodes and tasks:
        variables["SLURM_NTASKS"] = str(int(nodes) * int(tasks))
    return variables


def _partition(pattern: str, text: str) -> tuple[str, str]:
    """The text before and behind the first match, of which there may be none."""
    word, *rest = re.split(pattern, text, maxsplit=1)
    return word, "".join(rest)


def _matches(text: str, pattern: str) -> bool:
    """Whether a text is of a shell pattern. What another program says of the machine is that it has GPUs."""
    if text.startswith("$(") and pattern != "*":
        return pattern in _DEVICES
    return fnmatchcase(text, pattern)


class _Runner:
    def __init__(self, script: Script, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise InputError("scripts within scripts, nested too deep")
        self.script = script
        self.depth = depth
        self.tokens: list[Token] = []
        self.position = 0
        self.output: str | None = None  # of the last command, if that is known
        self.is_piped = False  # whether the next command reads it

    def run(self, script_tokens: list[Token]) -> None:
        self.tokens, self.position = script_tokens, 0
        while self.position < len(self.tokens):
            self._run_statements(is_active=True)
            self.position += 1  # over a stray end of a block

    def _run_statements(self, *, is_active: bool, ends: tuple[str, ...] = ()) -> None:
        """Run statements until one of `ends` begins a statement, which is not consumed."""
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token.text in ends and token.array is None:
                return
            if token.is_operator:
                self.is_piped = token.text == "|" or (self.is_piped and token.text == "\n")
                self.position += 1
            elif token.text == "if":
                self._if(is_active=is_active)
            elif token.text == "case":
                self._case(is_active=is_active)
            elif token.text in _LOOPS:
                self._loop(is_active=is_active)
            elif token.text in ("{", "}", "then", "do", "!", "time", "exec"):
                self.position += 1
            elif token.text == "function" or self._is_function():
                self._define_function(is_active=is_active)
            else:
                words = self._take_command()
                if is_active:
                    self._start_command(words)
                self.is_piped = False

    def _take_command(self) -> list[Token]:
        """The tokens up to the next operator. The tokens of `[[ ]]` extend to its end."""
        start = self.position
        while self.position < len(self.tokens) and not self.tokens[self.position].is_operator:
            self.position += 1
            if self.tokens[self.position - 1].text == "[[":
                while self.position < len(self.tokens) and self.tokens[self.position - 1].text != "]]":
                    self.position += 1
        return self.tokens[start : self.position]

    def _if(self, *, is_active: bool) -> None:
        is_done = False
        while self.position < len(self.tokens) and self.tokens[self.position].text in ("if", "elif", "else"):
            keyword = self.tokens[self.position].text
            self.position += 1
            condition_value: bool | None = True
            if keyword != "else":
                condition = self._take_until("then")
                condition_value = self._evaluate_condition(condition) if is_active and not is_done else False
            is_taken = is_active and not is_done and bool(condition_value)
            self._run_statements(is_active=is_taken, ends=("elif", "else", "fi"))
            is_done = is_done or is_taken
        self.position += 1  # fi

    def _take_until(self, word: str) -> list[Token]:
        start = self.position
        while self.position < len(self.tokens) and self.tokens[self.position].text != word:
            self.position += 1
        self.position += 1
        return self.tokens[start : self.position - 1]

    def _evaluate_condition(self, condition: list[Token], *, is_noted: bool = True) -> bool | None:
        """Whether a condition holds, or None if that depends on more than the script's variables."""
        clauses: list[tuple[str, list[str]]] = [("&&", [])]
        for token in condition:
            if token.text in ("&&", "||"):
                clauses.append((token.text, []))
            elif (
                token.text not in ("[", "]", "[[", "]]", "test", ";", "\n", "(", ")") and not token.is_target
            ):
                clauses[-1][1].append(token.text)
        condition_value: bool | None = True
        for connective, words in clauses:
            outcome = words[:1] == ["mkdir"] or self._test(words)  # a lock that the first node has
            if outcome is None and is_noted:
                self.script.notes.append(f"condition not followed: {' '.join(words)[:60]}")
            condition_value = (
                (condition_value and outcome) if connective == "&&" else (condition_value or outcome)
            )
        return condition_value

    def _test(self, words: list[str]) -> bool | None:
        if words and words[0] == "!":
            inner = self._test(words[1:])
            return None if inner is None else not inner
        texts = [self.script.variables.expand_text(word, unset="") for word in words]
        if len(texts) == 1:
            return bool(texts[0]) if words[0][:1] in "$\"'" else {"true": True, "false": False}.get(texts[0])
        if len(texts) == 2 and texts[0] in ("-z", "-n"):
            return (texts[0] == "-z") == (not texts[1])
        if len(texts) != 3:
            return None
        left, sign, right = texts
        if sign in ("=", "==", "!="):
            return _matches(left, right) == (sign != "!=")
        if sign in _NUMBERS and all(re.fullmatch(r"-?\d{1,15}", operand) for operand in (left, right)):
            return bool(_NUMBERS[sign](int(left), int(right)))
        return None

    def _case(self, *, is_active: bool) -> None:
        self.position += 1
        value = " ".join(
            self.script.variables.expand_text(token.text, unset="") for token in self._take_until("in")
        )
        is_done = not is_active
        while self.position < len(self.tokens) and self.tokens[self.position].text != "esac":
            if self.tokens[self.position].is_operator:
                self.position += 1
                continue
            patterns = [token.text for token in self._take_until(")") if token.text != "|"]
            is_taken = not is_done and any(_matches(value, pattern.strip("'\"")) for pattern in patterns)
            self._run_statements(is_active=is_taken, ends=(";;", "esac"))
            is_done = is_done or is_taken
        self.position += 1

    def _loop(self, *, is_active: bool) -> None:
        """Run the body for every word of a `for`, if all are known, and of a `while` as long as a known
        condition holds. Otherwise once, with a note.
        """
        start = self.position
        while self.position < len(self.tokens) and self.tokens[self.position].text != "do":
            self.position += 1
        head = self.tokens[start : self.position]
        words = [token.text for token in head if not token.is_operator]
        self.position += 1
        body_start, num_rounds = self.position, 0
        for value in self._rounds(head, words) if is_active else ():
            num_rounds += 1
            if next(self.script.rounds) >= _MAX_ALL_ROUNDS:
                raise InputError(f"loops of more than {_MAX_ALL_ROUNDS:,} rounds")
            self.position = body_start
            if value is not None:
                self.script.variables.values[words[1]] = [value]
            self._run_statements(is_active=True, ends=("done",))
        if not num_rounds:
            self._run_statements(is_active=False, ends=("done",))
        self.position += 1

    def _rounds(self, head: list[Token], words: list[str]) -> Iterator[str | None]:
        """A value for each time that the body of a loop runs, None for a loop without a variable."""
        values = self._loop_values(words)
        if values is not None:
            yield from values
            return
        is_while = words[0] == "while" and any("$" in word for word in words)
        state = self._evaluate_condition(head[1:], is_noted=False) if is_while else None
        if state is None:
            self.script.notes.append(f"a loop is followed once: {' '.join(words)[:60]}")
            yield None
            return
        for _ in range(_MAX_ROUNDS):
            if not self._evaluate_condition(head[1:], is_noted=False):
                return
            yield None

    def _loop_values(self, words: list[str]) -> list[str] | None:
        """The words that a `for` runs over, or None if they depend on more than the script's variables."""
        if len(words) < 3 or words[0] != "for" or words[2] != "in":
            return None
        values = [value for word in words[3:] for value in self.script.variables.expand(word)]
        is_known = all(not re.search(r"[$`*?{]", value) for value in values)
        return values if is_known and len(values) <= _MAX_ROUNDS else None

    def _is_function(self) -> bool:
        texts = [token.text for token in self.tokens[self.position : self.position + 3]]
        return texts[1:] == ["(", ")"] and not self.tokens[self.position].is_operator

    def _define_function(self, *, is_active: bool) -> None:
        """Keep a function's body, and move past it."""
        tokens = self.tokens[self.position :]
        name = tokens[1].text if tokens[0].text == "function" and len(tokens) > 1 else tokens[0].text
        while self.position < len(self.tokens) and self.tokens[self.position].text != "{":
            self.position += 1
        start, depth = self.position + 1, 0
        while self.position < len(self.tokens):
            text = self.tokens[self.position].text
            depth += (text == "{") - (text == "}")
            self.position += 1
            if depth == 0:
                break
        if is_active:
            self.script.functions[name] = self.tokens[start : self.position - 1]

    def _call(self, fields: list[str]) -> None:
        """Run a function's body with the words behind its name as its parameters."""
        variables = self.script.variables
        outer = variables.set_parameters(fields[1:])
        _Runner(self.script, self.depth + 1).run(self.script.functions[fields[0]])
        variables.restore_parameters(outer)

    def _start_command(self, words: list[Token]) -> None:
        """Assign, or record the command with its words expanded."""
        documents = [word.text for word in words if word.is_document]
        targets = [word.text for word in words if word.is_target]
        words = [word for word in words if not (word.is_document or word.is_target)]
        text, self.output = self.output if self.is_piped else None, None
        is_declaring = bool(words) and words[0].text in _DECLARATIONS
        remaining_tokens = words[1:] if is_declaring else words
        values = self.script.variables.values
        before = dict(values)
        while remaining_tokens and self._assign(remaining_tokens[0]):
            remaining_tokens = remaining_tokens[1:]
        if not remaining_tokens or is_declaring:
            list(map(self._assign, remaining_tokens))
            return
        changed = [name for name, value in values.items() if before.get(name) is not value]
        expand = self.script.variables.expand
        if fields := [field_text for token in remaining_tokens for field_text in expand(token.text)]:
            self._run_command(fields, documents, targets, text)
        for name in changed:  # before a command assignments hold for it alone
            values[name] = before.get(name, [])
            if name not in before:
                del values[name]

    def _run_command(
        self, fields: list[str], documents: list[str], targets: list[str], text: str | None
    ) -> None:
        """Run a builtin or a script, or record a command of another program."""
        values = self.script.variables.values
        if len(self.script.commands) >= _MAX_COMMANDS:
            raise InputError(f"more than {_MAX_COMMANDS:,} commands")
        inner = _inner_script(fields)
        document = ""
        if documents and fields[0] in ("read", *_FILTERS, *_STARTERS):
            document = " ".join(self.script.variables.expand(documents[-1]))
        if fields[0] in _FILTERS:
            self.output = self._filter(fields, document or text)
            for target in targets:
                self._write(" ".join(self.script.variables.expand(target)), self.output)
        if inner is None and document and fields[0] in _STARTERS and _script_index(fields) is None:
            inner = document
        if inner is not None:
            _Runner(self.script, self.depth + 1).run(tokenize(inner))
        elif fields[0] == "read" and document:
            self._read(fields[1:], document, "".join(values.get("IFS", [" \t\n"])))
        elif fields[0] in self.script.functions:
            self._call(fields)
        elif fields[0] == "set" and fields[1:2] == ["--"]:
            self.script.variables.set_parameters(fields[2:])
        elif fields[0] == "shift":
            self.script.variables.shift(int(fields[1]) if fields[1:] and fields[1].isdecimal() else 1)
        elif fields[0] in ("source", "."):
            self._source(fields[1:])
        elif not self._start_script(fields):
            self.script.commands.append(fields)
            self.script.environments.append({name: words[0] for name, words in values.items() if words})

    def _filter(self, fields: list[str], text: str | None) -> str | None:
        """The output of `cat`, `sed` or `tee` on a file that it names or on `text`, None if not known."""
        name = fields[-1]
        if fields[0] == "tee":
            self._write(name, text)
            return text
        if text is None:
            path, text = self._locate(name), self.script.documents.get(os.path.normpath(name))
            text = read_text(path) if text is None and path is not None else text
        if text is None:
            return None
        for field_text in fields[1:]:
            if match := _SUBSTITUTION.fullmatch(field_text):
                count = -1 if match[4] else 1
                text = "\n".join(line.replace(match[2], match[3], count) for line in text.split("\n"))
            elif re.match(r"s[/|#,]", field_text):
                self.script.notes.append(f"not followed: sed {field_text}")
        if any(option.startswith(("-i", "--in-place")) for option in fields):
            self._write(name, text)
        return text

    def _write(self, name: str, text: str | None) -> None:
        """Keep the text of a file, which is as it was if the text is not known."""
        if text is not None:
            self.script.documents[os.path.normpath(name)] = text

    def _read(self, fields: list[str], document: str, separators: str) -> None:
        """Set the variables of `read`, whose text is cut at the characters of IFS. The last has the rest.

        Blanks among them count once, also around another one, and no word follows the last of them (POSIX
        2.6.5).
        """
        values = self.script.variables.values
        names = [word for word in fields if re.fullmatch(r"[A-Za-z_]\w*", word)]
        is_array = any(re.match(r"-\w*a", word) for word in fields)
        blanks = "".join(filter(str.isspace, separators))
        others = "".join(character for character in separators if not character.isspace())
        around = f"[{re.escape(blanks)}]*" if blanks else ""
        patterns = [f"{around}[{re.escape(others)}]{around}"] if others else []
        patterns += [f"[{re.escape(blanks)}]+"] if blanks else []
        pattern = "|".join(patterns) or r"(?!)"
        text, words = document.strip(blanks), list[str]()
        while text and (is_array or len(words) < len(names) - 1):
            word, text = _partition(pattern, text)
            words.append(word)
        if text:
            word, rest = _partition(pattern, text)
            words.append(text if rest else word)
        for number, name in enumerate(names):
            values[name] = words if is_array else words[number : number + 1] or [""]

    def _source(self, fields: list[str]) -> None:
        """Run a script that this one sources, which sees and sets the same variables."""
        name = "".join(fields[:1])
        path, variables = self._locate(name), self.script.variables
        if path is None:
            self.script.notes.append(f"not read: {name}, which the script sources")
            return
        outer_source = variables.values.get("BASH_SOURCE", [])
        outer_parameters = variables.set_parameters(fields[1:]) if fields[1:] else None
        variables.values["BASH_SOURCE"] = [str(path)]
        self._follow(path, self.script, read_text(path))
        variables.values["BASH_SOURCE"] = outer_source
        if outer_parameters is not None:
            variables.restore_parameters(outer_parameters)

    def _start_script(self, fields: list[str]) -> bool:
        """Run a script that this one starts, which sees its variables. False if the words start none."""
        index = _script_index(fields, self.script.documents)
        if index is None:
            return False
        name = fields[index]
        text = self.script.documents.get(os.path.normpath(name))
        path = self._locate(name) if text is None else Path(self.script.path or ".").parent / name
        if path is None:
            return False
        text = read_text(path) if text is None else text
        variables = _job_variables(f"{_sbatch_options(text)} {' '.join(fields[1:index])}")
        values = {name: [value] for name, value in variables.items()}
        values |= {**self.script.variables.values, "0": [str(path)], "BASH_SOURCE": [str(path)]}
        outer = self.script
        started = Script(
            outer.commands, outer.environments, Variables(values), {}, outer.notes, path, outer.rounds,
            outer.running, outer.documents,
        )  # fmt: skip
        started.variables.set_parameters(fields[index + 1 :])
        self._follow(path, started, text)
        return True

    def _follow(self, path: Path, script: Script, text: str) -> None:
        """Run a file's text within `script`. One that is running already, as a job that submits itself
        again, one too deep and one that is no script are left, with a note.
        """
        file = path.resolve()
        if file in script.running or self.depth >= _MAX_DEPTH:
            reason = "it is being followed already" if file in script.running else "nested too deep"
            script.notes.append(f"not followed: {path.name}: {reason}")
            return
        script.running.add(file)
        try:
            _Runner(script, self.depth + 1).run(tokenize(text))
        except InputError as error:
            script.notes.append(f"not read: {path.name}: {error}")
        script.running.remove(file)

    def _locate(self, name: str) -> Path | None:
        """The file that the script names, or None if it is not here."""
        if self.script.path is None or not name or re.search(r"[$`]", name):
            return None
        try:
            path = locate_named_file(name, self.script.path.parent, "", "")
            read_text(path)
        except (InputError, OSError, UnicodeDecodeError):
            return None
        return path

    def _assign(self, token: Token) -> bool:
        """Set a variable if the token is an assignment."""
        variables = self.script.variables
        if token.array is not None:
            name, sign = token.array.removesuffix("=").removesuffix("+"), token.array
            inner = [element for element in tokenize(token.text) if not element.is_operator]
            values = [field for element in inner for field in variables.expand(element.text)]
            old_values = variables.values.get(name, []) if sign.endswith("+=") else []
            variables.values[name] = [*old_values, *values]
            return True
        match = _ASSIGNMENT.fullmatch(token.text)
        if match is None:
            return False
        value = " ".join(variables.expand(match[3]))
        if match[2] == "+=":
            value = "".join(variables.values.get(match[1], [""])[:1]) + value
        if len(value) > 100_000:
            raise InputError(f"{match[1]}: a value of more than 100,000 characters")
        variables.values[match[1]] = [value]
        return True


def _script_index(words: Sequence[str], written: Container[str] = ()) -> int | None:
    """The index of the script that the words start: the first, the one behind a starter's options, or the
    one behind `bash`. Others are arguments of a program. A file that was `written` needs no ending.
    """
    names = [os.path.basename(word) for word in words]
    indices = [0]
    if names[0] in _STARTERS:
        shell = next((n for n, name in enumerate(names) if name in ("bash", "sh")), 0)
        indices = [_skip_options(words, start + 1) for start in dict.fromkeys((0, shell))]
    named = ((n, os.path.normpath(words[n])) for n in indices if n < len(words))
    return next((n for n, word in named if word in written or Path(word).suffix in SCRIPT_SUFFIXES), None)


def _skip_options(words: Sequence[str], position: int) -> int:
    """The index after options and their values. A script is no value of one that zsim does not know."""
    while position < len(words) and words[position].startswith("-"):
        option = words[position]
        position += 1
        is_switch = "=" in option or option in _SWITCHES or (len(option) > 2 and option[1] != "-")
        value = words[position] if position < len(words) and not is_switch else "-"
        is_script = Path(value).suffix in SCRIPT_SUFFIXES or os.path.basename(value) in _STARTERS
        position += not (value.startswith("-") or is_script)
    return position


def _inner_script(words: list[str]) -> str | None:
    """The script that `eval` or `bash -c` would run."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for number, word in enumerate(words[:-2]):
        if word.rpartition("/")[2] in ("bash", "sh") and words[number + 1] in ("-c", "-lc"):
            return words[number + 2]
    return None
