"""The planner behind sliders."""

from __future__ import annotations

import ipywidgets

from labkit.lab import plan_explorer
from labkit.lab.plan_explorer import explore_plans
from labkit.models.config import ModelConfig

CONFIG = ModelConfig(layers=2, width=16, heads=2, context=16, vocabulary=32)


def shown(monkeypatch, **settings):
    seen = []
    monkeypatch.setattr(plan_explorer, "display", seen.append)
    first = explore_plans(CONFIG, count=2, batch=4, **settings)
    return first, seen[0]


def test_headless_the_plan_is_shown_once_and_without_widgets(monkeypatch):
    first, page = shown(monkeypatch, headless=True)
    assert page is first and first.ranked


def test_the_button_plans_anew_with_what_the_sliders_say(monkeypatch):
    _, box = shown(monkeypatch)
    *controls, button, page = box.children
    named = {control.description: control for control in controls}
    assert isinstance(page, ipywidgets.HTML) and "2 x RTX A6000" in page.value
    named["devices"].value, named["layers"].value = 1, 3
    button.click()
    assert "up to 1 x" in page.value and "5 layers" in page.value
