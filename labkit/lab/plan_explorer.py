"""Sliders in front of the planner: model, devices and batch, and the table follows."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets
from IPython.display import display

from labkit.devices.machines import machine, machine_names
from labkit.models.config import ModelConfig
from labkit.parallel.planning.levers import Levers
from labkit.parallel.planning.planner import DEFAULT_LEVERS, Plan, plan

COUNTS = (1, 2, 4, 8)


def explore_plans(
    config: ModelConfig,
    *,
    machine_name: str = "lab",
    count: int = 4,
    batch: int = 16,
    counts: Sequence[int] = COUNTS,
    first: Plan | None = None,
    headless: bool = False,
) -> Plan:
    """Show the plan, and sliders that change it; a click on the button plans anew.

    Args:
        machine_name, count, batch: to begin with.
        counts: of devices, to choose from.
        first: the plan for these settings, where it is known already.
        headless: nobody moves a slider: the plan is shown once, without widgets.

    Returns:
        The first plan.
    """
    first = first or plan(config, machine(machine_name, count), batch=batch)
    if headless:
        display(first)
        return first
    controls = {
        "machine": ipywidgets.Dropdown(options=machine_names(), value=machine_name),
        "devices": ipywidgets.SelectionSlider(options=counts, value=count),
        "layers": ipywidgets.IntSlider(config.layers, 1, 96),
        "width x": ipywidgets.SelectionSlider(options=[1, 2, 4, 8, 16, 32], value=1),
        "batch": ipywidgets.SelectionSlider(
            options=sorted({batch, *(1 << i for i in range(9))}), value=batch
        ),
        "autocast": ipywidgets.Checkbox(False),
    }
    for name, control in controls.items():
        control.description = name
    page = ipywidgets.HTML(first._repr_html_())
    button = ipywidgets.Button(description="plan")

    def show(_: object) -> None:
        page.value = "planning ..."
        values = {name: control.value for name, control in controls.items()}
        page.value = _planned(config, values)

    button.on_click(show)
    display(ipywidgets.VBox([*controls.values(), button, page]))
    return first


def _planned(config: ModelConfig, values: dict) -> str:
    """The page for these settings, or the reason why there is none."""
    changed = config.with_(layers=values["layers"], width=config.width * values["width x"])
    levers = DEFAULT_LEVERS
    if values["autocast"]:
        levers = tuple(Levers(lever.checkpointing, autocast=True) for lever in levers)
    try:
        devices = machine(values["machine"], values["devices"])
        return plan(changed, devices, batch=values["batch"], levers=levers)._repr_html_()
    except ValueError as error:
        return f"<p>{error}</p>"
