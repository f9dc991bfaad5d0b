"""A script that completes the command line in bash and zsh, made from the parser. It starts no Python when a key is pressed."""

from __future__ import annotations

import argparse

from streamrl.cli.examples import example_names
from streamrl.runtime.kinds import MAINS

_BASH = """# Completion of streamrl, made by `streamrl completion {shell}`.
{head}_streamrl() {{
    local word=${{COMP_WORDS[COMP_CWORD]-}} verb=${{COMP_WORDS[1]-}} action= options= words= dir=runs i
    COMPREPLY=()
    if (( COMP_CWORD > 2 )); then action=${{COMP_WORDS[2]-}}; fi
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W "{verbs}" -- "$word"))
        return
    fi
    case "$verb $action" in
{actions}    esac
    [ -n "$options" ] || case "$verb" in
{cases}    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$options" -- "$word")); return ;;
    esac
    case "${{COMP_WORDS[COMP_CWORD-1]-}}" in
        --run) words=@run ;;
        --example) words='{examples}' ;;
        -*) words= ;;
    esac
    for (( i = 2; i < COMP_CWORD - 1; i++ )); do
        if [ "${{COMP_WORDS[i]}}" = --dir ]; then dir=${{COMP_WORDS[i+1]}}; fi
    done
    if [ "$words" = @run ]; then
        words=
        for i in "$dir"/*/config.json; do
            i=${{i%/config.json}} i=${{i##*/}}
            case "$i" in  # compgen would run what stands in other names
                *[!A-Za-z0-9_-]*) ;;
                *) words="$words $i" ;;
            esac
        done
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if (( ${{#COMPREPLY[@]}} == 0 )); then COMPREPLY=($(compgen -f -- "$word")); fi
}}
complete -o filenames -F _streamrl streamrl
"""
_HEAD = {"bash": "", "zsh": "autoload -Uz bashcompinit && bashcompinit\n"}


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The whole script: verbs and their actions, options, names of runs below --dir, file names for all else."""
    verbs = _choices(parser)
    actions = {f"{verb} {name}": below for verb, one in verbs.items() for name, below in _choices(one).items()}
    return _BASH.format(
        shell=shell,
        head=_HEAD[shell],
        verbs=" ".join(verbs),
        examples=" ".join(example_names()),
        actions="".join(_case(f"'{name}'", one) for name, one in actions.items()),
        cases="".join(_case(name, one) for name, one in verbs.items()),
    )


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands below."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in _arguments(parser):
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            found = dict(action.choices)
    return found


def _arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Argparse has no public way to ask what it takes."""
    return parser._actions  # pyright: ignore[reportPrivateUsage]


def _case(pattern: str, parser: argparse.ArgumentParser) -> str:
    options = [option for action in _arguments(parser) for option in action.option_strings if option.startswith("--")]
    words = next((found for action in _arguments(parser) if not action.option_strings and (found := _words(action))), "")
    return f"        {pattern}) options='{' '.join(options)}' words='{words}' ;;\n"


def _words(action: argparse.Action) -> str:
    if action.choices:
        return " ".join(action.choices)
    if action.metavar == "KIND":
        return " ".join(MAINS)
    return "@run" if str(action.metavar).startswith("RUN") else ""
