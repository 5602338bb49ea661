"""What `--help` of each command shows, from the commands themselves: its layout differs by the version of click."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click


def commands() -> Iterator[str]:
    """All commands below `tfdist`, in the order of its help, each with its options."""
    from tfdist.launcher.command import main

    yield from command_lines(main, "tfdist")


def command_lines(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[str]:
    """A command and those below it.

    Args:
        command: the command.
        name: how it is called, with the commands above it.
        parent: of the command above it.
    """
    context = command.context_class(command, info_name=name, parent=parent, **command.context_settings)
    yield f"{name}: usage {' '.join(command.collect_usage_pieces(context))}"
    yield f"{name}: in a list: {command.get_short_help_str(limit=1000)}"
    yield from (f"{name}: {line}" for line in inspect.cleandoc(command.help or "").splitlines() if line)
    if shown := [word for word in ("hidden", "deprecated", "epilog") if getattr(command, word, None)]:
        yield f"{name}: {', '.join(shown)}"
    yield f"{name} {', '.join(context.help_option_names)}"
    for parameter in command.params:
        yield from _parameter_lines(name, parameter)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from command_lines(command.get_command(context, below), f"{name} {below}", context)


def _parameter_lines(command: str, parameter: click.Parameter) -> Iterator[str]:
    name = f"{command} {', '.join(parameter.opts)}"
    if parameter.secondary_opts:
        name += f" / {', '.join(parameter.secondary_opts)}"
    yield name if getattr(parameter, "is_flag", False) else f"{name} {_kind(parameter)}"
    default = parameter.to_info_dict()["default"]
    # Where there is none, click has a value for that, which differs by its version.
    if isinstance(default, (str, int, float)) and default is not False:
        yield f"{name}: default {default!r}{'' if getattr(parameter, 'show_default', None) else ', which is not shown'}"
    if parameter.envvar:
        yield f"{name}: by default from {parameter.envvar}"
    if words := [word for word in ("required", "multiple", "hidden", "deprecated") if getattr(parameter, word, None)]:
        yield f"{name}: {', '.join(words)}"
    if text := getattr(parameter, "help", None):
        yield f"{name}: {text}"


def _kind(parameter: click.Parameter) -> str:
    """What its values are."""
    facts = parameter.type.to_info_dict()
    limits = [f"{limit} {facts[limit]}" for limit in ("min", "max") if facts.get(limit) is not None]
    limits += [limit for limit in ("min_open", "max_open") if facts.get(limit)] + [*facts.get("choices", ())]
    return (parameter.metavar or facts["name"]) + (f" ({', '.join(limits)})" if limits else "")
