"""Filters that keep everything."""

from limner.data.filters import Filters

NO_FILTERS = Filters(min_words=None, english=None, boilerplate=None, aspect_ratio=None)
