"""``python -m labkit``: one subcommand for each make target that needs Python."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _execute(subcommands) -> None:
    command = subcommands.add_parser("execute", help="run the notebooks and check their claims")
    command.add_argument("--preset", default="tiny", help="tiny, workshop or workstation")
    command.add_argument("--devices", default="auto", help="auto, cpu, cuda or virtual")
    command.add_argument("--only", nargs="+", default=[], help="numbers or names: 12,13")
    command.add_argument("--keep-going", action=argparse.BooleanOptionalAction, default=True)
    command.add_argument("--cell-timeout", type=float, default=300, help="seconds")
    command.add_argument("--notebook-timeout", type=float, default=600, help="seconds")
    _add_folders(command, notebooks=True, build=True)
    command.set_defaults(run=_run_execute)


def _run_execute(options: argparse.Namespace) -> int:
    from labkit.lab.headless.runner import Settings, execute

    return execute(
        Settings(
            notebooks=options.notebooks,
            build=options.build,
            preset=options.preset,
            devices=options.devices,
            only=tuple(" ".join(options.only).replace(",", " ").split()),
            keep_going=options.keep_going,
            cell_timeout_s=options.cell_timeout,
            notebook_timeout_s=options.notebook_timeout,
        )
    )


def _report(subcommands) -> None:
    command = subcommands.add_parser("report", help="make one page of the latest run's results")
    command.add_argument("--run-name", default=None, help="such as tiny-auto; default: the latest")
    _add_folders(command, build=True)
    command.set_defaults(run=_run_report)


def _run_report(options: argparse.Namespace) -> int:
    from labkit.lab.headless.report import write_report

    print(write_report(options.build, options.run_name))
    return 0


def _clean_notebooks(subcommands) -> None:
    command = subcommands.add_parser("clean-notebooks", help="strip outputs, keep cell ids")
    _add_folders(command, notebooks=True)
    command.set_defaults(run=_run_clean_notebooks)


def _run_clean_notebooks(options: argparse.Namespace) -> int:
    from labkit.lab.headless.clean import clean_folder

    for path in clean_folder(options.notebooks):
        print(f"stripped {path}")
    return 0


def _doctor(subcommands) -> None:
    command = subcommands.add_parser(
        "doctor", help="examine the machine: its devices, what they may claim, what is wrong"
    )
    command.add_argument("--devices", default="auto", help="auto, cpu, cuda or virtual")
    command.add_argument("--json", action="store_true", help="print the checks as JSON only")
    command.set_defaults(run=_run_doctor)


def _run_doctor(options: argparse.Namespace) -> int:
    from labkit.devices.doctor.doctor import examine, exit_status, report_json
    from labkit.lab.doctor_table import doctor_reasons, doctor_table
    from labkit.lab.machine_tables import devices_table, support_table, versions_table

    findings = examine()
    if options.json:
        print(json.dumps(report_json(findings), indent=2))
        return exit_status(findings)
    for table in (devices_table(options.devices), support_table(options.devices), versions_table()):
        print(table, end="\n\n")
    print(doctor_table(findings), doctor_reasons(findings), sep="\n\n")
    return exit_status(findings)


def _tune(subcommands) -> None:
    command = subcommands.add_parser(
        "tune", help="clocks, fans and power of GPUs: show, hold, restore"
    )
    command.add_argument("action", choices=("show", "hold", "restore"))
    command.add_argument("--power", type=float, help="most power of each card, watts")
    command.add_argument("--clocks", type=int, nargs=2, metavar=("LEAST", "MOST"), help="MHz")
    command.add_argument("--fan", type=int, help="speed of all fans, percent; only upwards")
    command.add_argument("--seconds", type=float, help="hold: how long; default: until Ctrl-C")
    command.add_argument("--apply", action="store_true", help="hold: really change it; takes root")
    command.add_argument("--manifest", type=Path, help="where the settings before are kept")
    command.set_defaults(run=_run_tune)


def _run_tune(options: argparse.Namespace) -> int:
    from labkit.lab.tune_command import run

    return run(options)


def _gpu_check(subcommands) -> None:
    command = subcommands.add_parser(
        "gpu-check", help="check a machine with real GPUs; writes one JSON file"
    )
    command.add_argument("--minutes", type=float, default=5, help="time limit of all of it")
    _add_folders(command, notebooks=True, build=True)
    command.set_defaults(run=_run_gpu_check)


def _run_gpu_check(options: argparse.Namespace) -> int:
    from labkit.lab.gpu_check import check_gpus

    return check_gpus(options.notebooks, options.build, options.minutes * 60)


# A new subcommand is one more function here; it imports what it runs only when it runs.
SUBCOMMANDS: tuple[Callable, ...] = (
    _execute,
    _report,
    _doctor,
    _tune,
    _gpu_check,
    _clean_notebooks,
)


def _add_folders(
    command: argparse.ArgumentParser, notebooks: bool = False, build: bool = False
) -> None:
    if notebooks:
        command.add_argument("--notebooks", type=Path, default=ROOT / "notebooks", help="folder")
    if build:
        command.add_argument("--build", type=Path, default=ROOT / "build", help="folder of runs")


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand.

    Returns:
        Its exit status; 2 for what cannot be done as asked, with the reason on stderr.
    """
    parser = argparse.ArgumentParser(prog="python -m labkit", description=__doc__)
    subcommands = parser.add_subparsers(required=True)
    for add in SUBCOMMANDS:
        add(subcommands)
    options = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="replace")  # claims speak of ×; some terminals have none
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 2
