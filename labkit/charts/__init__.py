"""Charts: a table in, a picture with a description in words and a line saying where its numbers come from out."""

from labkit.charts.canvas import BLUE, DPI, PIXELS, Chart, time
from labkit.charts.drawing import bars, compare, durations, graph_drawing, lines, outcomes, timeline

__all__ = ["BLUE", "DPI", "PIXELS", "Chart", "bars", "compare", "durations", "graph_drawing", "lines", "outcomes", "time",
           "timeline"]
