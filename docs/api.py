"""The API reference, from the docstrings: `python docs/api.py OUT`. A warning of pdoc is an error.

pdoc was chosen over Sphinx with autodoc and over mkdocstrings: it needs no configuration and no page of ours.
"""

import pkgutil
import sys
import warnings
from pathlib import Path

import pdoc
import pdoc.render

import limner

for name in limner.__all__:  # are imported when they are first asked for, and pdoc looks without asking
    setattr(limner, name, getattr(limner, name))
rooms = [room.name for room in pkgutil.iter_modules(limner.__path__, "limner.") if not room.name.endswith("__main__")]
warnings.simplefilter("error", UserWarning)
pdoc.render.configure(docformat="google")
pdoc.pdoc("limner", *rooms, output_directory=Path(sys.argv[1]))
