"""Text-to-image generation: draw pictures from captions.

    import limner

    pipe = limner.load()  # the bundled model, or a folder written by `limner train`
    drawings = pipe("a small red circle above a large blue square on a gray background", n=4)
    drawings[0].save("drawing.png")

Heavy packages are imported on first use: `import limner` takes a millisecond. It limits how long torch's idle threads
spin (`openmp.py`); this takes effect if torch is imported later.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from limner import openmp
from limner.version import __version__

if TYPE_CHECKING:
    from limner.pipeline import TextToImage, load

openmp.bound_spinning()

__all__ = ["TextToImage", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in ("TextToImage", "load"):
        openmp.bound_threads()
        try:
            return getattr(import_module("limner.pipeline"), name)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"limner.{name} needs {error.name}: pip install 'limner[torch]'; limner.runtime.pipeline draws without"
            ) from None
    raise AttributeError(f"module 'limner' lacks the attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
