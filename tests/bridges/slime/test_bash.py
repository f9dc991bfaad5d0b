"""Scripts read as text: what bash would make of the words, what only running would tell, and scripts that mean harm."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.bridges.slime.bash.arithmetic import calculate
from streamrl.bridges.slime.bash.conditions import holds
from streamrl.bridges.slime.bash.reader import read_script
from streamrl.bridges.slime.bash.syntax import Source
from streamrl.bridges.slime.bash.training import Script
from streamrl.bridges.slime.bash.values import Place, Unknown
from streamrl.errors import ConfigError
from tests.support.refusals import refused


def read(folder: Path, text: str, *arguments: str, **variables: str) -> Script:
    (folder / "run.sh").write_text(text)
    return read_script(folder / "run.sh", arguments=arguments, variables=variables, cwd=folder)


def words(folder: Path, text: str, *arguments: str, **variables: str) -> list[str | Unknown]:
    [training] = read(folder, text, *arguments, **variables).trainings
    return [word.value for word in training.words]


def known(folder: Path, text: str, *arguments: str, **variables: str) -> list[str]:
    found = words(folder, text, *arguments, **variables)
    assert [one for one in found if isinstance(one, Unknown)] == []
    return [str(one) for one in found]


def unknown(folder: Path, text: str, **variables: str) -> Unknown:
    [found] = [one for one in words(folder, text, **variables) if isinstance(one, Unknown)]
    return found


TEXTS = st.text(st.sampled_from("ab1 '\"\\$`#*?[]{}~;&|<>()=-é\t\n!"), max_size=12)


@settings(max_examples=150)
@given(st.lists(TEXTS, max_size=6))
def test_any_texts_come_back_from_quotes(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("quotes")
    double = ['"' + "".join("\\" + one if one in '$`"\\' else one for one in text) + '"' for text in texts]
    # shfmt takes no array's element that begins with a bare =.
    single = [f"'{text}'" if text.startswith("=") and text == shlex.quote(text) else shlex.quote(text) for text in texts]
    expected = [one for pair in zip(texts, texts, strict=True) for one in pair]
    quoted = [one for pair in zip(single, double, strict=True) for one in pair]
    assert known(folder, f'A=({" ".join(quoted)})\npython train.py "${{A[@]}}"\n') == expected
    lines = "\n".join(f"   {one}  # {index}: not ${{this}} nor ) that" for index, one in enumerate(quoted))
    assert known(folder, f'A=(\n{lines}\n  # --lr 1\n)\npython train.py \\\n  "${{A[@]}}" \\\n') == expected


def of_bash(folder: Path) -> list[str]:
    """What bash itself hands to the training command of the script that was read last."""
    script = f'python() {{ shift; printf "%s\\0" "$@"; }}; set -f; . {folder}/run.sh 3>&1 >/dev/null'
    real = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]})
    return real.stdout.split("\0")[:-1]


LINES = st.sampled_from(
    [
        *("A=foo", "A='x  y'", 'A="$A$B"', "A+=z", "B=${A:-none}", 'B="${U-$A b}"', "B=", "unset A", "N=$((N * 2 + 1))", "N=$(( -7 / 2 ))"),
        *("X=(1 'a b' \"\")", 'X+=($A "$B")', "X=()", "X=one", "X+=more", "Y=z", 'X=("${X[@]}" ${#X[@]})', "Y=(p${X[@]}q)"),
        *('Y=("p${X[@]}q" # no\n)', "export A=$N"),
        *("B=${P%.*}", "B=${P##*/}", "B=${P%%.*}", 'B="${P#*/}"', "A=$(dirname /a/b/c)", "X=($(seq 1 3 $N))", "A=$(basename /a/b.x .x)"),
        *("if [ $N -gt 3 ]; then A=big; else A=small; fi", '[[ $A == f* && -n "$B" ]] && B=both', '[ -z "$B" ] || B=full', "(A=sub)"),
        *('case "$A" in foo|b*) B=case;; *) B=other;; esac', "f() { A=$1; N=$#; }; f one two", "{ A=group; }", "false && A=never"),
        *('A=$(cat <<E\nx $B\n\\$N "q" don\'t )\nE\n)', "B=$(cat <<-'E'\n\t$A 'it\n\tE\n)", ": <<'E'\nA=no (\nE"),
        "cat >/dev/null <<E && B=done\n\\`\nE",
        *('[[ "$A" == "f*" ]] && B=literal', 'Y=(${X[@]:-none} "${U:-a  b}" ${U:-"a  b"} ${A:+"s t"})', "A=$'t\\ta'", 'A="\\$B \\x"'),
    ]
)


@pytest.mark.process
@settings(max_examples=60, deadline=None)
@given(st.lists(LINES, max_size=7))
def test_words_are_those_that_bash_makes(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    """bash itself is the reference: whatever is said to be known is what it hands to the training command."""
    folder = tmp_path_factory.mktemp("bash")
    text = "\n".join(["A=first; B=second; N=4; P=/d/e.f/g.tar.gz; X=(1 2); Y=()", *lines])
    text += '\npython train.py $A "$B" ${A}"$N"$B ${X[@]} "${X[@]}" "${Y[@]}" ${#X[@]} >&3\n'
    found = words(folder, text)
    real = of_bash(folder)
    if not any(isinstance(one, Unknown) for one in found):
        assert found == real


BODY = st.text(st.sampled_from("ab $`\\\"'(){}<#;\n\t"), max_size=24)


@pytest.mark.process
@settings(max_examples=80, deadline=None)
@given(BODY, st.sampled_from(["<<E", "<<'E'", "<<-E", '<<-"E"', "<< \\E", "0<<E 2>/dev/null"]), st.booleans(), st.booleans())
def test_the_body_of_a_here_document_is_that_of_bash(
    tmp_path_factory: pytest.TempPathFactory, body: str, operator: str, substituted: bool, quoted: bool
) -> None:
    folder = tmp_path_factory.mktemp("body")
    document = f"cat {operator} # it's )\n{body}\nE\n"
    lines = f"X={chr(34) * quoted}$({document}){chr(34) * quoted}" if substituted else f"{document}X=after"
    try:
        found = words(folder, f"a=1; b='2  3'; ab=; E=e\n{lines}\nf() {{ python train.py \"$X\"; }} >&3\nf\n")
    except ConfigError:
        return
    if not any(isinstance(one, Unknown) for one in found):
        assert found == of_bash(folder)


@pytest.mark.process
@pytest.mark.parametrize(
    "text",
    [
        "cat <<A <<'B' >/dev/null; X=1\n(\nA\n$(`\nB\n",
        "cat <<A; X=$(cat <<B\nA\n)\nB\n)\n(\nA\n",
        "f() {\n  if true; then\n    X=$(cat <<-EOF\n\t\tone $N\n\t\ttwo\\\n three\n\tEOF\n)\n  fi\n}\nf\n",
        "while false; do :; done <<E\n'\nE\nX=1\n",
        "X=$(cat <<'A' | tr a b\na'\nA\n)\nX=known\n",
        "cat <<E | cat >/dev/null\n)\nE\nX=1\n",
        'cat <<E >/dev/null &&\n"\nE\nX=1\n',
        "X=(1 $(cat <<E\na b )\nE\n) 2)\n",
        "X=$( (cat <<E\n(\nE\n); echo )\nX=${N:-$(cat <<E\n}\nE\n)}\n",
        'X=$(cat <<E\n{"a": "$(cat <<F\n$N\nF\n)"}\nE\n)\n',
        "X=$(cat <<E >/dev/null\nx\nE\n)\nX=1\n",
        "cat() { echo mine; }\nX=$(cat <<E\nx\nE\n)\n",
        "X=$(cat <<''\na\n\n)\n",
        "X=$(cat <<E\nE x\nxE\nE\n)$((1<<2))\n",
        "X=`cat <<E\n\\$N \\\\$N\nE\n`\n",
        "X=$(cat <<E\na\\\nE\n\\\\\nE\n)\n",
        "<<E\n'\nE\nX=1 # <<F\n",
        "cat <<E # <<F\n$(echo ')')\nE\nX='<<G'\n",
        "X=$(cat 01<<E </dev/null\nx\nE\n)\n",
        "case a in a) cat <<E >/dev/null ;;\n;; esac\nE\nesac\nX=1\n",
    ],
)
def test_here_documents_stand_where_bash_finds_them(tmp_path: Path, text: str) -> None:
    found = words(tmp_path, f'N=7\n{text}python train.py "${{X[@]}}" >&3\n')
    real = of_bash(tmp_path)
    assert found == real or any(isinstance(one, Unknown) for one in found)


def test_what_a_here_document_makes_is_known_only_by_cat(tmp_path: Path) -> None:
    env = 'ENV_JSON=$(cat <<EOF\n{"env": {"A": "$A"}}\nEOF\n)\n'
    train = 'python train.py --env "$ENV_JSON"\n'
    assert known(tmp_path, "A=1\n" + env + train) == ["--env", '{"env": {"A": "1"}}']
    assert known(tmp_path, env + "python train.py --lr 1\n") == ["--lr", "1"]
    found = unknown(tmp_path, "\n" + env + train)
    assert "A is not set" in found.why and found.place.line == 3
    found = unknown(tmp_path, "ENV_JSON=$(cat <<-EOF\n\t\\\n\tx\\\n\n$A\\\n\tB $X\nEOF\n)\nA=1\n" + train)
    assert "A is not set" in found.why and found.place.line == 5
    found = unknown(tmp_path, "A=1\n" + env.replace("cat", "envsubst") + train)
    assert "$(envsubst" in found.why and found.place.line == 2


@pytest.mark.parametrize("document", ["cat <<EOF\n{}\nEOF\n", "X=$(cat <<'EOF'\n{}\nEOF\n)\n", 'X="$(cat <<-EOF\n{}\nEOF\n)"\n'])
def test_many_and_large_here_documents_are_read_once(document: str) -> None:
    assert len(Source("f", document.format("x\\\n" * 50_000)).parse()) == 1
    assert len(Source("f", document.format("x") * 3_000).parse()) == 3_000
    assert len(Source("f", "cat" + " <<E" * 3_000 + "\n" + "E\n" * 3_000).parse()) == 1


def test_a_file_beside_the_script_is_sourced_by_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    (tmp_path / "scripts" / "models" / "m.sh").write_text("MODEL_ARGS=(\n  --num-layers 36\n)\n")
    here = 'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nROOT="$(cd -- "${HERE}/.." && pwd)"\n'
    text = here + 'source "${HERE}/../scripts/models/m.sh"\npython3 "${ROOT}/train.py" --hf-checkpoint ./m ${MODEL_ARGS[@]}\n'
    assert known(tmp_path / "examples", text) == ["--hf-checkpoint", "./m", "--num-layers", "36"]
    [training] = read(tmp_path / "examples", text).trainings
    assert (training.words[2].place.file, training.words[2].place.line) == (str(tmp_path / "scripts" / "models" / "m.sh"), 2)
    assert known(tmp_path, "cd scripts; cd models\n. m.sh\ntorchrun train.py ${MODEL_ARGS[@]}\n") == ["--num-layers", "36"]


def test_a_function_has_the_lines_of_the_file_that_defines_it(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    command = 'python train.py --at "$(dirname "${BASH_SOURCE[0]}")" --of $(basename $0)'
    text = f'\n\nlaunch() {{\n  {command} \\\n    "$@"\n}}\nOF=$(basename $0)\n'
    (tmp_path / "lib" / "launch.sh").write_text(text)
    main = "source lib/launch.sh\nlaunch --lr 1 --more $OF\n"
    assert known(tmp_path, main) == ["--at", str(tmp_path / "lib"), "--of", "run.sh", "--lr", "1", "--more", "run.sh"]
    [training] = read(tmp_path, main).trainings
    lib = str(tmp_path / "lib" / "launch.sh")
    assert [(one.place.file, one.place.line) for one in training.words[:1]] == [(lib, 4)]
    assert (training.place.file, training.place.line) == (lib, 4)


def test_defaults_stand_for_an_environment_that_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "7")
    text = 'STEPS="${STEPS:-10}"\npython train.py --num-rollout "$STEPS" --size ${1:-small} $#\n'
    assert known(tmp_path, text) == ["--num-rollout", "10", "--size", "small", "0"]
    assert read(tmp_path, text).defaults["STEPS"][0] == "10"
    assert known(tmp_path, text, "large", STEPS="20") == ["--num-rollout", "20", "--size", "large", "1"]
    assert read(tmp_path, text, STEPS="20").defaults == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("python train.py --a $HOME", "HOME is not set in the script"),
        ("python train.py --a $(hostname)", "$(hostname) is what a command prints"),
        ("A=`date`\npython train.py --a $A", "$(date) is what a command prints"),
        ("if [ -e /etc/passwd ]; then A=1; else A=2; fi\npython train.py --a $A", "the condition at"),
        ("if grep -q x /proc/cpuinfo; then\nA=1\nfi\npython train.py --a $A", "the condition at"),
        ("A=0\nfor i in 1 2; do A=$i; done\npython train.py --a $A", "the loop at"),
        ("while read -r A; do :; done < f\npython train.py --a $A", "A is set by read at"),
        ("for ((i=0; i<3; i++)); do A+=x; done\npython train.py --a $A", "the loop at"),
        ("read A < f\npython train.py --a $A", "A is set by read at"),
        ("printf -v A x\npython train.py --a $A", "A is set by printf at"),
        ("case $HOME in a) A=1;; esac\npython train.py --a $A", "the case at"),
        ("A=1\nfoo || A=2\npython train.py --a $A", "the result of the command at"),
        ("A=1\n(( A++ ))\npython train.py --a $A", "((A++)) changes A"),
        ("A=1\n(( A <<= 2 ))\npython train.py --a $A", "((A <<= 2)) changes A"),
        ("A=1\n: $((A += 2))\npython train.py --a $A", "((A += 2)) changes A"),
        ("A=${B/x/y}\npython train.py --a $A", "B is not set in the script"),
        ("B=x\nA=${B/x/y}\npython train.py --a $A", "is an expansion that is not read"),
        ("python train.py --a {1,2}", "{1,2} is a brace expansion"),
        ("A=$(( $RANDOM % 2 ))\npython train.py --a $A", "RANDOM is not set in the script"),
        ("A=$(( 1 << 3 ))\npython train.py --a $A", "is arithmetic that is not read"),
        ("source missing.sh\npython train.py --a $A", "the file that is sourced at"),
        ('eval "$(conda shell.bash hook)"\npython train.py --a $A', "what eval runs at"),
        ("A=([1]=x [0]=y)\npython train.py --a ${A[0]}", "A is set by its elements"),
        ("declare -A A=([x]=1)\npython train.py --a ${A[x]}", "A is a reference or a table"),
    ],
)
def test_what_only_running_would_tell_is_unknown_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    found = unknown(tmp_path, text.replace("/proc/cpuinfo", "/nowhere"))
    assert why in found.why.replace(" )", ")").replace("(( ", "((")
    assert found.place.file == str(tmp_path / "run.sh") and found.place.line >= 1


def test_a_variable_that_is_given_decides_a_condition(tmp_path: Path) -> None:
    text = 'ARGS=(--a)\nif [ -n "$KEY" ]; then\n  ARGS+=(--use-wandb)\nfi\npython train.py "${ARGS[@]}"\n'
    found = unknown(tmp_path, text)
    assert "KEY is not set" in found.why and "--var KEY=VALUE" in found.hint
    assert known(tmp_path, text, KEY="") == ["--a"] and known(tmp_path, text, KEY="k") == ["--a", "--use-wandb"]


def test_a_training_command_in_a_branch_is_uncertain(tmp_path: Path) -> None:
    for text in ("if foo; then python train.py; fi", "for i in 1 2; do python train.py; done", "foo || python train.py"):
        [training] = read(tmp_path, text).trainings
        assert training.uncertain is not None
    for text in (
        "cd x && python train.py",
        "foo && python train.py 2>&1 | tee log",
        "f() { python train.py; }; f",
        "nohup python train.py &",
    ):
        [training] = read(tmp_path, text).trainings
        assert training.uncertain is None and training.words == ()
    assert read(tmp_path, "pkill -f train.py; echo python; exit 1\npython train.py").trainings == ()


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    touch = f"touch {tmp_path}/ran"
    text = "\n".join(
        [touch, f"A=$({touch})", f"`{touch}`", f"eval '{touch}'", f"[ $({touch}) ]", f"$(( $({touch}) ))", f"trap '{touch}' EXIT"]
    )
    read(tmp_path, f"{text}\nprintf x > {tmp_path}/written\npython train.py <({touch})\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh"]


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("a\ncat <<EOF\nx\n EOF\n", 2, "unclosed here-document `EOF`"),
        ("a\nA=$(cat <<EOF\nx\n)\n", 2, "unclosed here-document `EOF`"),
        ("a\ncat <<EOF", 2, "unclosed here-document `EOF`"),
        ("cat <<$A\n", 1, "expansions not allowed in heredoc words"),
        ("A=$((cat <<E\n)\nE\n) )\n", 1, "reached `)` without matching `$((` with `))`"),
        ("a\nA='x\n", 2, "reached EOF without closing quote `'`"),
        ("a\n\nA=(x\n", 3, "reached EOF without matching `(` with `)`"),
        ("if a; then b\n", 1, "`if` statement must end with `fi`"),
        ("A=${x\n", 1, "not a valid parameter expansion"),
        ("a )\n", 1, "a command can only contain words and redirects"),
        ("X=" + "$(" * 3000 + "a" + ")" * 3000, 1, "exceeded max depth"),
    ],
)
def test_what_is_no_statement_is_refused_by_its_line(tmp_path: Path, text: str, line: int, expected: str) -> None:
    with refused(ConfigError, expected, line=line):
        read(tmp_path, text)


def test_without_the_parser_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with refused(ConfigError, "expected shfmt", hint="pip install", path=str(tmp_path / "run.sh")):
        read(tmp_path, "python train.py\n")


HARM = {
    "doubles": "A=xxxxxxxx\n" + "A=$A$A\n" * 60 + "python train.py $A",
    "array doubles": "A=(a a a a)\n" + "A+=(${A[@]})\n" * 60,
    "nested substitutions": "X=" + "$(" * 3000 + "a" + ")" * 3000,
    "nested documents": "X=$(cat <<A\n" * 500 + "A\n)\n" * 500 + "python train.py $X",
    "quoted substitutions": 'X="$(' * 3000,
    "nested defaults": "X=" + "${A:-" * 3000 + "a" + "}" * 3000,
    "calls itself": "f() { f; }; f\n",
    "calls itself deeply": "f() { " + "if true; then " * 40 + "f; " + "fi; " * 40 + "}; f\n",
    "many branches": "".join(f"V{i}=1\n" for i in range(4000)) + "if x; then y; fi\n" * 600,
    "sources itself": 'source "$0"\n',
    "cycle": "source b.sh\n",
    "device": "source /dev/zero\n",
    "pipe": "source pipe\n",
    "folder": "source .\n",
    "long": "a\n" * 200_000,
    "Windows": "a\r\n",
    "binary": "\x7fELF\0",
    "braces": "X={" + "," * 200_000,
    "dots": "X={" + "." * 200_000,
    "patterns": "A=" + "a" * 4000 + "\n" + "B=${A%%*q}\n" * 2000,
    "array grows": "A=($(seq 10000))\n" + "A+=(x)\n" * 3000,
}


@pytest.mark.parametrize("name", HARM)
def test_scripts_that_mean_harm_end_in_an_error(tmp_path: Path, name: str) -> None:
    """That it ends at all is a part of it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "b.sh").write_text("source run.sh\n")
    (tmp_path / "run.sh").write_bytes(HARM[name].encode())
    with pytest.raises(ConfigError):
        read_script(tmp_path / "run.sh", variables={}, cwd=tmp_path)


PIECES = [*"ab $(){}[]<>;&|'\"`\\\n#=+-!*?~:/1", "if ", "fi\n", "then ", "do ", "$((", "${", "<<", "<<a", "\na\n", "&&", "A=("]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("any")
    try:
        read(folder, text)
    except ConfigError as error:
        assert error.message


NUMBERS = st.integers(-50, 50)


@given(NUMBERS, NUMBERS, st.sampled_from(["+", "-", "*", "/", "%", "==", "<", ">="]))
def test_arithmetic_is_that_of_c(a: int, b: int, sign: str) -> None:
    found = calculate(f"(a {sign} {b})" if b >= 0 else f"(a {sign} ({b}))", {"a": a}.get)
    if sign in "/%" and b == 0:
        assert found is None
    elif sign == "/":
        assert found == int(a / b)
    elif sign == "%":
        assert found == a - b * int(a / b)
    else:
        assert found == int(eval(f"a {sign} b"))


def test_conditions_have_three_answers() -> None:
    missing = Unknown("it is not set", Place("f", 1))
    assert holds([missing, "=", "a"], patterns=False) is None
    assert holds(["", "=", "a", "&&", missing], patterns=True) is False, "whatever it is"
    assert holds(["a", "=", "a", "||", missing], patterns=True) is True
    assert holds(["!", "-z", ""], patterns=False) is False
    assert holds(["-e", "/"], patterns=False) is None, "files are not looked at"
    assert holds(["3", "-lt", "10"], patterns=False) is True and holds(["x", "-lt", "10"], patterns=False) is None
