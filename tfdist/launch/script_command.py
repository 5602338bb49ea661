"""Commands that end with a script and its arguments: `tfdist run`, `tfdist drill` and `tfdist submit`."""

from __future__ import annotations

import click

from tfdist.launch.arguments import split

# Where a command finds its `Target`, in the meta of click's context.
TARGET = "tfdist.launch.target"


class ScriptCommand(click.Command):
    """Leaves everything from the script on to the script, options included."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with_value = {
            name
            for option in self.params
            if isinstance(option, click.Option) and not option.is_flag
            for name in option.opts
        }
        own, target = split(args, with_value)
        ctx.meta[TARGET] = target
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "SCRIPT", "[ARGS]..."]


def read_env(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """The variables of a repeatable option KEY=VALUE."""
    env = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"{text!r}: expected KEY=VALUE, for example --env TF_CPP_MIN_LOG_LEVEL=0.")
        env[name] = value
    return env
