"""Launch scripts as shells read them: quotes, arrays, defaults, arithmetic, conditions; nothing is run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.programs.shell import run_script

# Scripts whose `show` must get the same words from zsim as from bash.
SCRIPTS = {
    "continued lines": "show --a 1 \\\n  --b 2 # words\n",
    "a comment ends with its line": "# --x \\\n# --y \\\nA=1\nshow $A\n",
    "devices, counted": "D=4,5,6\nA=$(echo \"$D\" | awk -F',' '{print NF}')\nshow $A\n",
    "devices by lines": "D=4,5,6\nshow $(echo $D | tr ',' '\\n' | wc -l)\n",
    "devices by words": "D=4,,5,\nshow $(echo $D | tr ',' '\\n' | wc -w)\n",
    "an array": "A=(--x 1 # words\n  --y 'two words')\nshow ${A[@]}\n",
    "an array in quotes": "A=(--x 'two words')\nshow \"${A[@]}\" --z\n",
    "an array that grows": 'A=(--x)\nA+=(--y 2)\nA+=("--z 3")\nshow ${A[@]}\n',
    "an array in one word": 'A=(a b)\nshow "${A[*]}" x${A[1]}y\n',
    "a text that grows": 'A="--x 1"\nA+=" --y"\nshow $A\n',
    "a long text": 'A=" \\\n --x 1 \\\n --y 2 \\\n"\nshow $A\n',
    "defaults": "B=7\nshow ${A:-1} ${B:-1} ${C-2} ${B:+9} ${C:=4} $C\n",
    "a default with blanks": 'show ${A:-x y} "${A:-x y}"\n',
    "arithmetic": "N=8\nM=$((N*4))\nshow $(( ${N} * 2 + M / 3 - 1 ))\n",
    "an empty variable": 'E=""\nshow a $E b "$E" c\n',
    "quotes within words": "A='p q'\nshow --x=\"$A\"r 's'\"t\" u\\ v\n",
    "a lock": 'D=$(mktemp -u)\nif mkdir "$D"; then show a; rmdir "$D"; else show b; fi\n',
    "a condition": 'T=fp8\nif [[ "$T" == "fp8" ]]; then A=(--fp8); else A=(--bf16); fi\nshow ${A[@]}\n',
    "its other branch": "T=1\nif [ $T -gt 1 ]; then\n A=1\nelif [ $T = 2 ]; then A=2; else A=3; fi\nshow $A",
    "both must hold": 'A=x\nif [[ -n "$A" && "$A" != "y" ]]; then show yes; else show no; fi\n',
    "one may hold": 'A=x\nB=\nif [[ -z "$A" ]] || [[ -z "$B" ]]; then show yes; fi\n',
    "nested conditions": "if [ 1 -eq 1 ]; then if [ 1 -eq 2 ]; then show a; else show b; fi; show c; fi\n",
    "a case": "S=7b\ncase $S in\n 1b) L=1;;\n 7b|8b) L=32 ;;\n *) L=0 ;;\nesac\nshow $L\n",
    "exported": "export A=1 B=2\nshow $A $B\n",
    "set for one command": "B=1\nA=1 B=2 show x\nshow ${A:-none} $B\n",
    "a value that is demanded and there": "A=x\n: ${A:?needed}\nshow ${A:?needed} $A\n",
    "a function that is not called": "f() {\n show no\n}\nshow yes\n",
    "a function that is called": "f() {\n show $1 $2 $#\n}\nf a 'b c'\nf d\nshow end\n",
    "a function by its keyword": "function f {\n local X=$1\n show $X\n}\nf a\nif true; then f b; fi\n",
    "a function in a function": 'f() { show "$@"; }\ng() { f 1 "$@"; show $1; }\ng "x y" z\n',
    "parameters of a script": 'set -- a \'b c\'\nshow $1 "$2" ${3:-d} $#\nshift\nshow "$@" $1\n',
    "arithmetic of parameters": "set -- 8 4\nshow $(( ${1} * $2 / 3 ))\n",
    "a loop over words": 'for s in a "b c"; do\n X=$s\n show $X\ndone\nshow $s\n',
    "a loop over an array": 'A=(1 2)\nfor s in "${A[@]}"; do if [ $s = 2 ]; then show $s; fi; done\n',
    "a loop over nothing": "A=()\nfor s in ${A[@]}; do show $s; done\nshow end\n",
    "a loop in a loop": "for a in 1 2; do for b in x y; do show $a$b; done; done\n",
    "a here document that is read": "A=8\nread -d '' X <<EOF\n--x $A \\\n --y 'b'\nEOF\nshow $X\n",
    "a document as it stands": "read -r -d '' X <<'EOF'\n--x $A `b`\nEOF\nshow \"$X\"\n",
    "a document for a shell": "A=1\nexport A\nbash <<EOF\nshow $A\nEOF\n",
    "names of files": 'P=/a/b/c.sh\nshow $(dirname $P) `basename $P .sh` "$(dirname "$(dirname "$P")")"\n',
    "echoed": "A=1\nshow $(echo $A b) x$(echo c)\n",
    "another folder": 'show "$(cd -- "$(dirname /usr/bin)" &> /dev/null && pwd)"\n',
    "another folder, silently": 'show "$(cd -- "$(dirname /usr/bin)" >/dev/null 2>&1 ; pwd -P)"\n',
    "a script that it writes": "A=1\ncat > job.sh <<EOF\nshow $A \\$1\nEOF\nbash job.sh 2\n",
    "one of another name": "cat > job <<'EOF'\nshow $1\nEOF\nbash job 2\n",
    "one by another path": "cat > job <<'EOF'\nshow $1\nEOF\nbash ./job 2\n",
    "a loop as long as a condition holds": "n=0\nwhile [ $n -lt 3 ]; do\n show $n\n n=$((n+1))\ndone\n",
    "a loop until a condition fails": "set -- a b\nwhile [[ $# -gt 0 ]]; do show $1; shift; done\nshow $#\n",
    "a here document": "cat > /dev/null <<EOF\n--x $A\nEOF\nshow a\n",
    "words of a list": "IFS=', ' read -r -a A <<< '0, 1, 2'\nIFS=, read -ra B <<< '0,1,2,3,'\n"
    "IFS=, read -r C D <<< '1,2,'\nIFS=, read -r E F <<< ',1,2,'\nIFS=': ' read -ra G <<< ' a::b : c '\n"
    'show ${#A[@]} ${#B[@]} "$C" "$D" "$E" "$F" ${#G[@]} "${G[1]}" "${G[3]}"\n',
    "a here string": 'read -r A B <<< "x y z"\nread C <<<u\nD="p q"\nread E F <<< $D\nshow $A "$B" $C $F\n',
    "words behind a document's mark": "cat <<EOF > /dev/null; show a\nshow x\nEOF\nshow b\n",
    "two documents": "read X <<A; read Y <<'B'\n1\nA\n2\nB\nshow $X $Y\n",
    "redirected": "A=1\nshow $A 2>&1 > /dev/stdout\n",
    "evaluated": 'C="show --x 1"\neval $C\n',
    "a shell in a shell": "A='--x 1'\nbash -c \"show $A\"\n",
}


def words_of(script: str) -> list[list[str]]:
    return [command[1:] for command in run_script(script).commands if command[0] == "show"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    """`show` prints every word in brackets; a shell that bash starts knows it too."""
    shows = "show() { printf '<%s>' \"$@\"; echo; }\nexport -f show\n"
    command = ["bash", "-c", shows + SCRIPTS[name]]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    mine = ["".join(f"<{word}>" for word in words) for words in words_of(SCRIPTS[name])]
    assert mine == ran.stdout.splitlines()


def test_a_file_may_end_with_a_continued_line() -> None:
    """bash reads no word behind it, in a file."""
    assert words_of("show --a 1 \\") == [["--a", "1"]]


def test_unset_variables_stand_for_themselves() -> None:
    """bash would drop them, and the flag before would take the next one for its value."""
    assert words_of("show --data-path $1 --save ${DIR}/x\n") == [["--data-path", "$1", "--save", "${DIR}/x"]]
    sums = "N=4\nshow $(expr 16 / $N) `expr 2 \\* $N` '$(expr $M + 1)'\n"
    assert words_of(sums) == [["4", "8", "$(expr $M + 1)"]]
    assert words_of("A=$(hostname)\nshow $A\n") == [["$(hostname)"]]


@pytest.mark.parametrize("count", ["awk -F',' '{print NF}'", "tr ',' '\\n' | wc -l"])
def test_an_empty_list_of_devices_counts_none(count: str) -> None:
    ((word,),) = words_of(f'D=""\nshow "$(echo "$D" | {count})"\n')
    assert word.startswith("$(echo")


def test_read_cuts_words_at_the_characters_of_ifs() -> None:
    """The last variable has the rest, and IFS before a command is of this command alone."""
    text = 'X=0,1,2\nIFS=, read -ra A <<< "$X"\nIFS=: read -r B C <<< "0:1:2"\nIFS= read -r D <<< "p q"\n'
    text += 'read -r E F <<< "3 4,5"\n'
    assert words_of(f'{text}show ${{#A[@]}} ${{A[1]}} $B $C "$D" $F\n') == [
        ["3", "1", "0", "1:2", "p q", "4,5"]
    ]


def test_what_is_to_be_filled_in_is_one_word() -> None:
    """bash would take it for a redirection. An unknown output is one word as well."""
    assert words_of("export D=<path to data>\nshow --data $D --vocab <a b.json> < in > out\n") == [
        ["--data", "<path to data>", "--vocab", "<a b.json>"]
    ]
    assert words_of("N=$(scontrol show hostnames)\nshow --addr $N\nA=($N)\nshow ${A[0]}\n") == [
        ["--addr", "$(scontrol show hostnames)"], ["$(scontrol show hostnames)"]
    ]  # fmt: skip


def test_scripts_that_a_script_sources_or_starts_are_followed(tmp_path: Path) -> None:
    """A sourced one sets variables for the rest. A started one has variables, parameters, and Slurm's."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "8b.sh").write_text("LAYERS=32\n")
    (tmp_path / "job.sh").write_text("#SBATCH --ntasks-per-node=8\nshow $LAYERS $1 $SLURM_NTASKS\n")
    main = tmp_path / "main.sh"
    text = 'DIR="$(dirname "$(readlink -f "$0")")"\nsource ${DIR}/conf/${1}.sh\n'
    text += "sbatch --nodes=4 job.sh x\nshow end\n"
    commands = run_script(text, {}, ["8b"], main).commands
    assert [words[1:] for words in commands] == [["32", "x", "32"], ["end"]]
    assert run_script("source none.sh\n", path=main).notes == ["not read: none.sh, which the script sources"]


def test_a_script_that_starts_itself_again_is_followed_once(tmp_path: Path) -> None:
    """Jobs submit their successors. A chain of scripts is followed to a depth."""
    main = tmp_path / "main.sh"
    for again in ("sbatch $0", "sbatch --dependency=afterany:$SLURM_JOB_ID $0", "sbatch main.sh"):
        main.write_text(f"show a\n{again}\nshow b\n")
        script = run_script(main.read_text(), path=main)
        assert script.commands == [["show", "a"], ["show", "b"]]
        assert script.notes == ["not followed: main.sh: it is being followed already"]
    for n in range(10):
        (tmp_path / f"{n}.sh").write_text(f"show {n}\nsource {n + 1}.sh\n")
    chain = run_script("bash 0.sh\nbash 0.sh\n", path=main)
    assert [words[1] for words in chain.commands] == [*"01234567"] * 2
    assert chain.notes == ["not followed: 8.sh: nested too deep"] * 2


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("srun --container-image=x torchrun train.py --eval_script in.sh", None),
        ("srun -n 8 --label python -u train.py --eval_script in.sh", None),
        ("srun --exclusive python -m pack.train --eval_script in.sh", None),
        ("python train.py in.sh", None),
        ("./in.sh a", "a"),
        ("srun -N 2 --mpi pmix -l in.sh a", "a"),
        ("srun --new-switch --mpi pmix bash -x in.sh a", "a"),
        ("srun singularity exec --nv image bash in.sh a", "a"),
        ("sbatch -N2 --nodelist n1 in.sh a", "a"),
    ],
)
def test_a_script_among_a_programs_arguments_is_not_started(
    tmp_path: Path, command: str, expected: str | None
) -> None:
    (tmp_path / "in.sh").write_text("show $1\n")
    started = [["show", expected]] if expected else [command.split()]
    assert run_script(command, path=tmp_path / "main.sh").commands == started


def test_a_script_with_an_error_in_another_is_followed_without_it(tmp_path: Path) -> None:
    (tmp_path / "bad_env.sh").write_text('A=1\nexport B="x\n')
    for word in ("source", "bash"):
        script = run_script(f"{word} ./bad_env.sh x\nshow $A $1\n", {}, ["p"], tmp_path / "main.sh")
        assert script.commands == [["show", "$A", "p"]]
        assert script.notes == ['not read: bad_env.sh: line 2: " without its end']


def test_what_is_not_followed_is_noted() -> None:
    loops = "for i in $(ls); do show $i; done\nwhile read x; do show w; done\n"
    script = run_script(f"{loops}if [ -f x ]; then show y; fi\nsource env.sh\n")
    assert script.commands == [["show", "$i"], ["show", "w"]]
    assert script.notes == [
        "a loop is followed once: for i in $(ls)",
        "a loop is followed once: while read x",
        "condition not followed: -f x",
        "not read: env.sh, which the script sources",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("show 'a\n", "line 1: ' without its end"),
        ("A=(\n --x 1\n", r"line 1: \( without its end"),
        ("show ${A\n", "without its end"),
        ('show "a`b" c\n', "line 1: ` without its end"),
        ("A=x\n" + "A=$A$A$A$A\n" * 20 + "show $A\n", "more than 100,000 characters"),
        ("show a\n" * 3000, "more than 2,000 commands"),
        ("for a in 1 2 3 4 5 6 7 8 9; do\n" * 6 + "x=$a\n" + "done\n" * 6, "more than 10,000 rounds"),
        ("x=0\n" + "while [ $x -lt 5 ]; do\n" * 5 + "y=$x\n" + "done\n" * 5, "more than 10,000 rounds"),
        ("A=" + "$(" * 3000 + "\n", "nested too deep"),
        ('X=\'eval "$X"\'\neval "$X"\n', "nested too deep"),
    ],
)
def test_texts_that_are_no_scripts_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_script(text)


def test_a_script_has_the_parameters_that_it_is_started_with() -> None:
    text = "SIZE=$1\nshow $SIZE ${2:-4096} $#\n"
    assert run_script(text, {}, ["8B"]).commands == [["show", "8B", "4096", "1"]]
    assert run_script(text).commands == [["show", "$1", "4096", "$#"]]


def test_a_function_that_calls_itself_is_an_error() -> None:
    with pytest.raises(InputError, match="nested too deep"):
        run_script("f() { f; }\nf\n")


def test_a_script_that_looks_for_a_device_finds_a_gpu() -> None:
    """Where it asks another program, whose answer is not known."""
    script = (
        "DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}\n"
        'case "${DEVICE}" in\n npu) size=16 ;;\n gpu) size=8 ;;\n *) exit 1 ;;\nesac\n'
        'if [ "$DEVICE" == "npu" ]; then run npu; elif [ "$DEVICE" = gpu ]; then run $size; fi\n'
    )
    assert run_script(script).commands == [["run", "8"]]
    assert run_script(script, {"DEVICE": "npu"}).commands == [["run", "npu"]]


def test_a_comment_that_cuts_a_command_is_noted() -> None:
    """Bash ends the command there, whatever its author meant."""
    script = run_script("show --x 1 \\\n  # words\n  --y 2 \\\n  --z\n")
    assert script.commands[0] == ["show", "--x", "1"]
    assert script.notes == ["line 2: a comment ends the command, so what stands behind it is left out"]
    assert run_script('A=" \\\n # words\n --y 2"\nshow $A # words\n').notes == []
