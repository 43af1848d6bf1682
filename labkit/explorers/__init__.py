"""Explorers: `_model.py` turns inputs into tables, charts and sentences, `_view.py` has the widgets, `app.py` the page for a projector."""
