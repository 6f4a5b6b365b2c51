"""The cell magic ``%%ranks``: run a cell on the ranks."""

from __future__ import annotations

import argparse
import shlex

from IPython import get_ipython

from labkit.devices.ranks.rank_errors import RanksUseError

USAGE = "write %%ranks, %%ranks --only 0,2 or %%ranks --show 1"


def ranks_magic(line: str, cell: str) -> None:
    """Run this cell on the newest living ranks.

    ``%%ranks [--only 0,2] [--show 1]``: only these ranks run it; only these ranks' output appears.
    """
    from labkit.devices.ranks.ranks import current  # torch is loaded only when ranks are used

    options = _parse(line)
    current().run(cell, only=options.only, show=options.show)


def register_magic() -> None:
    """Make ``%%ranks`` known to the running IPython; without one there is nothing to do."""
    shell = get_ipython()
    if shell is not None:
        shell.register_magic_function(ranks_magic, "cell", "ranks")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise RanksUseError(f"%%ranks: {message}; {USAGE}")


def _parse(line: str) -> argparse.Namespace:
    parser = _Parser(prog="%%ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("--only", type=_ranks)
    parser.add_argument("--show", type=_ranks)
    return parser.parse_args(shlex.split(line))


def _ranks(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,2") from None
