"""Charts: a table in, a picture with a description in words and a line saying where its numbers come from out.

Each raises ValueError, in words, for a table that it cannot draw (see canvas.require).
"""

from labkit.charts.canvas import BLUE, DPI, INCHES, ORANGE, PIXELS, SERIES, Chart, time
from labkit.charts.drawing import bars, compare, durations, graph_drawing, lines, outcomes, timeline
from labkit.charts.sweeps import (MODELS, curve_name, first_low_overhead, floors_of, measured, predictions, roofline,
                                  say_overhead, step_of, sweep)

__all__ = ["BLUE", "DPI", "INCHES", "MODELS", "ORANGE", "PIXELS", "SERIES", "Chart", "bars", "compare", "curve_name",
           "durations", "first_low_overhead", "floors_of", "graph_drawing", "lines", "measured", "outcomes", "predictions", "roofline",
           "say_overhead", "step_of", "sweep", "time", "timeline"]
