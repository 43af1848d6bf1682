"""One point of a table, picked by the values of some columns: values in, the rows of that point out. No widgets."""

from numbers import Number

from traitlets import Any, Dict, HasTraits


class PickModel(HasTraits):
    """The rows of a table at one point: where its columns `by` have the values of `picked`.

    What a column offers depends on those before it in `by`; a value that was not measured moves to the nearest one.
    Raises ValueError for an empty table, or one without these columns.
    """
    picked, options, rows = Dict(), Dict(), Any()

    def __init__(self, table, by, **wishes):
        missing = [name for name in by if name not in table]
        if missing or table.empty:
            raise ValueError(f"this explorer needs a table with {', '.join(by)}: no {', '.join(missing) or 'rows'} here")
        self.table, self.by = table, tuple(by)
        super().__init__()
        self.pick(**wishes)

    def pick(self, **values):
        """Pick values of some columns; the others stay as they are, or as near to it as was measured; ValueError for one that is none."""
        if unknown := values.keys() - set(self.by):
            raise ValueError(f"no column to pick by is called {', '.join(unknown)}; there are: {', '.join(self.by)}")
        wanted, picked, options, rows = self.picked | values, {}, {}, self.table
        for name in self.by:
            options[name] = tuple(rows[name].drop_duplicates().tolist())
            if isinstance(options[name][0], Number):
                options[name] = tuple(sorted(options[name]))
            picked[name] = _nearest(options[name], wanted.get(name))
            rows = rows[rows[name] == picked[name]]
        self.rows = rows
        self.options, self.picked = options, picked


def _nearest(options, wanted):
    if wanted in options or not isinstance(wanted, Number) or not isinstance(options[0], Number):
        return wanted if wanted in options else options[0]
    return min(options, key=lambda option: abs(option - wanted))
