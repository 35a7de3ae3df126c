"""Checkpoints: folders of safetensors and JSON that appear complete or not at all.

    RUN/checkpoints/step-00001200/
        model.safetensors       and other groups of tensors: `state.py` says what they hold
        state.json              everything else
        SHA256SUMS              of all these, as `sha256sum -c` reads them

A folder is written under a temporary name, flushed to the disk, and renamed: a crash at any moment
leaves either the old state or the new one. Older checkpoints are removed only after the new one has its
name. A file that was changed later no longer has its checksum: then the newest undamaged checkpoint is used, with a
warning. Nothing is pickled, so a checkpoint from a stranger can be wrong but cannot run code;
names and shapes are checked against the model that it is loaded into.
"""

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from limner.config import read_json
from limner.errors import UserError
from limner.files import atomic_folder, file_hash
from limner.training.tensors import load_model

FOLDER = "checkpoints"
STATE = "state.json"
SUMS = "SHA256SUMS"
_NAME = re.compile(r"step-(\d{8,18})")


class Files:
    """Keeps the states of the run `run` as checkpoints, the last `keep` of them.

    If several processes train one model, only one of them `writes`; all read.
    """

    def __init__(self, run: Path, keep: int, writes: bool = True) -> None:
        self.run, self.keep, self.writes = run, keep, writes

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step` and remove all but the last `keep`; its folder.

        Args:
            tensors: file name (without suffix) -> tensor name -> tensor.
            state: everything else, as JSON values.

        Raises:
            UserError: it cannot be written (a full disk, say); earlier checkpoints are untouched.
        """
        final = self.run / FOLDER / f"step-{step:08d}"
        if not self.writes:
            return final
        try:
            with atomic_folder(final) as fresh:
                for name, group in tensors.items():
                    on_cpu = {k: t.detach().cpu().contiguous() for k, t in group.items()}
                    save_file(on_cpu, fresh / f"{name}.safetensors")
                (fresh / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
                sums = "".join(f"{file_hash(path)}  {path.name}\n" for path in sorted(fresh.iterdir()))
                (fresh / SUMS).write_text(sums, encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise UserError(f"the checkpoint {final} cannot be written: {error}; earlier ones are intact") from None
        for old in completed(self.run)[: -self.keep]:
            doomed = old.rename(old.with_suffix(".tmp"))  # first, so that a half-removed folder has no good name
            shutil.rmtree(doomed, ignore_errors=True)
        return final

    def latest(self) -> Path | None:
        """See `latest` below."""
        return latest(self.run)

    def load(self, where: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """The tensors and the state of a checkpoint. Raises `UserError` if one cannot be read."""
        names = sorted(path.name.removesuffix(".safetensors") for path in where.glob("*.safetensors"))
        return {name: read_tensors(where, name) for name in names}, read_state(where)

    def clear(self) -> None:
        """Remove what a killed process left among the checkpoints. The caller must hold the run's lock."""
        kept = completed(self.run)
        folder = self.run / FOLDER
        for entry in folder.iterdir() if self.writes and folder.is_dir() else ():
            if entry not in kept:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def completed(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, whole or damaged."""
    folders = [p for p in (run / FOLDER).glob("step-*") if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    """How many updates had been done."""
    return int(checkpoint.name.removeprefix("step-"))


def latest(run: Path) -> Path | None:
    """The newest checkpoint that is whole, with a warning if a newer one is damaged; None if there is none at all.

    Raises `UserError` if all are damaged.
    """
    damaged = []
    for checkpoint in reversed(completed(run)):
        if (damage := find_damage(checkpoint)) is None:
            if damaged:
                warnings.warn(f"{'; '.join(damaged)}: {checkpoint.name} serves instead", stacklevel=2)
            return checkpoint
        damaged.append(f"{checkpoint} is damaged ({damage})")
    if damaged:
        raise UserError(f"{damaged[0]}, and no older one is whole: delete {run} to begin again")
    return None


def find_damage(checkpoint: Path) -> str | None:
    """What is damaged in a checkpoint; None if it is whole."""
    try:
        if odd := [path.name for path in checkpoint.iterdir() if not path.is_file()]:  # a pipe would never end
            return f"{odd[0]} is not a file"
        lines = (checkpoint / SUMS).read_text(encoding="utf-8").splitlines()
        sums = {name: known for known, name in (line.split("  ", 1) for line in lines)}
        if STATE not in sums or any(Path(name).name != name for name in sums):
            return f"{SUMS} is incomplete"
        wrong = [name for name, known in sums.items() if file_hash(checkpoint / name) != known]
        return f"{wrong[0]} has changed" if wrong else None
    except OSError as error:
        return f"{Path(error.filename or SUMS).name}: {error.strerror}"
    except ValueError:
        return f"{SUMS} cannot be read"


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `state.json` holds."""
    return read_json(checkpoint / STATE, max_bytes=64 << 20)


def read_tensors(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU. Raises `UserError` if it is absent or damaged."""
    path = checkpoint / f"{name}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def load_weights(model: nn.Module, folder: str | Path, averaged: bool = True) -> Path:
    """Load the newest weights of a run (or those of one checkpoint folder) into `model`; returns
    the checkpoint.

    `averaged` takes the exponentially averaged parameters where the run kept them. Raises
    `UserError` if there is no checkpoint or it belongs to another model.
    """
    folder = Path(folder)
    checkpoint = folder if (folder / STATE).is_file() else latest(folder)
    if checkpoint is None:
        raise UserError(f"{folder} holds no checkpoint; name the folder of a training run")
    weights = read_tensors(checkpoint, "model")
    if averaged and (checkpoint / "ema.safetensors").is_file():
        weights |= read_tensors(checkpoint, "ema")
    load_model(model, weights, str(checkpoint))
    return checkpoint
