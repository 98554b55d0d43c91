"""Figures of studies."""

from __future__ import annotations

import pytest

from bilevel_recipes import plots


@pytest.mark.parametrize("steps", [[1, 2, 3, 4], [2, 4], [5], [100, 250, 400]])
def test_an_axis_of_steps_has_no_fractions(steps: list[float]) -> None:
    figure, (ax,) = plots.panels(["a study"])
    plots.curves(ax, {"gd": [(steps, [50.0] * len(steps))]}, "outer step", "accuracy")
    figure.canvas.draw()
    assert all(tick.is_integer() for tick in map(float, ax.get_xticks()))
    plots.plt.close(figure)


def test_an_axis_of_seconds_has_fractions() -> None:
    figure, (ax,) = plots.panels(["a study"])
    plots.curves(ax, {"gd": [([0.2, 1.3], [50.0, 60.0])]}, "seconds", "accuracy")
    figure.canvas.draw()
    assert not all(tick.is_integer() for tick in map(float, ax.get_xticks()))
    plots.plt.close(figure)
