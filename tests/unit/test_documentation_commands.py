"""Commands that the documentation shows exist, with the options that they are given."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from tests.unit.pages import PAGES, ROOT, blocks_of, prose, read
from tfdist.launcher.command import main

CONSOLES = [block for page in PAGES for block in blocks_of(page, "console", "bash")]
_ENDS = {"|", "&&", ";", "&", "||"}


def commands(text: str) -> list[list[str]]:
    """The words of each command of tfdist in a shell's text, without prompts, comments and variables."""
    found = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if "tfdist" not in line or not (line.startswith("$ ") or "$" not in text):
            continue
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in _ENDS:
                words.append(word)
                continue
            # Also behind srun and its options, and what `tfdist run -- ...` starts.
            starts = [i for i, name in enumerate(words) if name == "tfdist"]
            found += [words[start + 1 :] for start in starts]
            words = []
    return found


def parse(words: list[str]) -> click.Command:
    """Parses a command as click does before it runs it; returns what would be run.

    Raises:
        click.UsageError: if a command, option or argument does not exist.
    """
    command: click.Command = main
    context, rest = click.Context(main), words
    while isinstance(command, click.Group):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, list(rest), parent=context)
    return command


@pytest.mark.parametrize("block", CONSOLES, ids=lambda block: block.place)
def test_commands_of_blocks_parse(block):
    for words in commands(block.text):
        try:
            parse(words)
        except click.UsageError as error:
            pytest.fail(f"tfdist {' '.join(words)}: {error.format_message()}")


def test_there_are_commands_to_parse():
    found = [words for block in CONSOLES for words in commands(block.text)]
    assert len(found) > 30
    assert {words[0] for words in found} >= {"run", "drill", "submit", "status", "logs", "cancel", "check", "env"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("$ tfdist rum -n 2 train.py", "No such command 'rum'"),
        ("$ srun -N4 tfdist check --quick", "No such option"),
        ("$ X=1 tfdist logs", "Missing argument"),
    ],
)
def test_wrong_commands_are_found(text, words):
    ((command),) = commands(text)
    with pytest.raises(click.UsageError) as caught:
        parse(command)
    assert words in caught.value.format_message()


def options(words: list[str]) -> set[str]:
    """The options of a command that is named in running text, where arguments are left out."""
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group) and words:
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"there is no command {name}"
        command = found
    return {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]} | {"--help"}


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_exist(page):
    for text in re.findall(r"`tfdist ([a-z][^`]*)`", prose(page)):
        words = shlex.split(text)
        script = next((i for i, word in enumerate(words) if word.endswith(".py") or word == "--"), len(words))
        names = [word for word in words[:script] if re.fullmatch(r"[a-z]+", word)]
        names = names[:2] if names[0] == "horovod" else names[:1]
        known = options(names)
        for word in words[:script]:
            assert not word.startswith("-") or word in known, f"tfdist {text}: no option {word}"


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    for block in CONSOLES:
        for target in re.findall(r"^\$ make ([a-z-]+)", block.text, re.MULTILINE):
            assert target in targets, block.place
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", prose(page)):
            assert target in targets, page


def test_programs_of_this_repository_exist():
    for block in CONSOLES:
        for path in re.findall(r"\b(?:examples|tools|docker)/[\w./]+", block.text):
            assert (ROOT / path).exists(), f"{block.place}: {path}"
