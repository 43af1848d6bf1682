"""The instructor's guide: routes through the labs, and what each lab's instructor cell says, as Markdown and printable HTML.

An instructor cell ends in a table of the lab's sections: minutes, section, and the shortest route that has it.
"""

import functools
import re
from collections import namedtuple
from dataclasses import dataclass

from nbconvert.filters import markdown2html

from labkit import build, charts, experiments, launch_model, report

ROUTES = {"90 minutes": 90, "half a day": 210, "a full day": 420, "self-study": None}  # how long it lasts, in minutes; each has all of the one before
GUIDE = build.NOTEBOOKS / "solutions" / "GUIDE.md"
README = build.NOTEBOOKS.parent / "README.md"
IMAGES = build.NOTEBOOKS / "images"
Section = namedtuple("Section", "minutes title route")  # of a lab, as its instructor cell lists it; route: the shortest that has it
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \|$", re.M)


@dataclass(frozen=True)
class Lab:
    """One lab as a teacher sees it: `minutes` as its opening says, what its instructor cell says, and its sections in order."""

    stem: str
    title: str
    minutes: int
    teacher: str
    sections: tuple

    @property
    def number(self):
        """Return the number that the lab's file name begins with, a text: 10."""
        return self.stem.partition("_")[0]

    def on(self, route):
        """Return the sections that a route has."""
        longest = list(ROUTES).index(route)
        return tuple(section for section in self.sections if list(ROUTES).index(section.route) <= longest)


@functools.cache
def labs():
    """Return every lab as a Lab; one that a guide cannot be made of is a BuildError that says what is missing."""
    return [lab(path) for path in build.solutions()]


def lab(path):
    """Return a solution notebook as a Lab; BuildError says what a guide needs and it has not."""
    cells = [cell for cell in build.read(path).cells if cell.cell_type == "markdown"]
    words = "\n".join(cell.source for cell in cells)
    told = [cell.source for cell in cells if "instructor" in cell.metadata.get("tags", ())]
    minutes = re.search(r"\*\*Minutes:\*\* (\d+)", words)
    sections = tuple(Section(int(minutes), title, route) for minutes, title, route in ROW.findall("\n".join(told)))
    if not minutes or not sections or not {section.route for section in sections} <= ROUTES.keys():
        raise build.BuildError(f"{path.name}: a guide needs **Minutes:** N and an instructor cell with a table: minutes, section, "
                               f"and one of {', '.join(ROUTES)}")
    teacher = re.sub(r"^\*\*For the teacher\*\*\n|^\|.*\n?", "", "\n\n".join(told), flags=re.M).strip()
    return Lab(path.stem, words.partition("# ")[2].partition("\n")[0], int(minutes[1]), teacher, sections)


def plan(route):
    """Return a route, one of ROUTES, as [(lab, its sections, their minutes)], labs with none left out."""
    chosen = [(lab, sections) for lab in labs() if (sections := lab.on(route))]
    return [(lab, sections, sum(section.minutes for section in sections)) for lab, sections in chosen]


def taught(route):
    """Return how many minutes of a route are labs; the rest is for breaks and questions."""
    return sum(minutes for _, _, minutes in plan(route))


def table():
    """Return the table of routes as Markdown, for the README."""
    rows = ["| route | minutes of labs | and for breaks and questions | labs, with the minutes for each |", "|---|---|---|---|"]
    for route, lasts in ROUTES.items():
        parts = [f"{lab.number} ({minutes}{'' if minutes == lab.minutes else f' of {lab.minutes}'})" for lab, _, minutes in plan(route)]
        rows.append(f"| {route} | {taught(route)} | {lasts - taught(route) if lasts else 'as you like'} | {', '.join(parts)} |")
    return "\n".join(rows)


def markdown():
    """Return the whole guide as Markdown."""
    return report.TEMPLATES.get_template("guide.md").render(labs=labs(), routes=ROUTES, plan=plan, table=table(), clock=clock) + "\n"


def clock(minutes):
    """Write minutes since the beginning as hours and minutes: 1:05."""
    return f"{minutes // 60}:{minutes % 60:02}"


def html():
    """Return the guide as one HTML page to print, a lab on each sheet."""
    return (report.PAGES / "guide.html").read_text("utf-8").replace("{{ guide }}", markdown2html(markdown()))


def readme(text):
    """Return the README's text with the table of routes as it is now."""
    return re.sub(r"(<!-- routes: .*?-->\n).*?(<!-- end of routes -->)", lambda found: f"{found[1]}{table()}\n{found[2]}", text, flags=re.S)


def pictures():
    """Draw the README's pictures from the recordings: {path: Chart}."""
    sweep = experiments.as_recorded("sweep_transformer")
    curve = launch_model.add_predictions(sweep[(sweep.width == 512) & (sweep.precision == "float16")],
                                         launch_model.fit(experiments.as_recorded("launch_constants")))
    curve.attrs = sweep.attrs
    return {IMAGES / "one_step.png": charts.timeline(experiments.as_recorded("step_trace")), IMAGES / "explorer.png": charts.sweep(curve)}


def write():
    """Bring the guide and the README's table and pictures up to date and return the paths that changed."""
    wanted = {GUIDE: markdown(), README: readme(README.read_text("utf-8"))}
    drawn = [chart.save(path) for path, chart in pictures().items() if path.read_bytes() != chart.png]
    return [path for path, text in wanted.items() if build.write(path, text)] + drawn
