"""Checkpoints: folders of safetensors and JSON that appear complete or not at all.

    RUN/checkpoints/step-00001200/
        model.safetensors       and other groups of tensors: `state.py` says what they hold
        state.json              everything else
        SHA256SUMS              of all these, as `sha256sum -c` reads them

Where several processes train one model, each has written a file of shards instead of these groups: `dcp_reader.py`
reads them, and everything here takes either kind.

A folder is written under a temporary name, flushed to the disk, and renamed: a crash at any moment
leaves either the old state or the new one. Older checkpoints are removed only after the new one has its
name. A file that was changed later no longer has its checksum, and a file of tensors that was added has none: then the
newest undamaged checkpoint is used, with a warning. Nothing is pickled, so a checkpoint from a stranger can be wrong
but cannot run code; names and shapes are checked against the model that it is loaded into.
"""

import json
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from limner.atomic_io import atomic_folder, file_hash
from limner.errors import UserError
from limner.json_files import read_mapping
from limner.training import dcp_reader
from limner.training.state_tensors import check_shapes, fill_model, model_tensors

FOLDER = "checkpoints"
STATE = "state.json"
SUMS = "SHA256SUMS"
_NAME = re.compile(r"step-(\d{8,18})")
_START = re.compile(r"start-(\d{8,18})")


Tensors = Mapping[str, Mapping[str, Tensor]]


class Checkpointer(Protocol):
    """Where states are kept: by `Files` in the run's folder. All ranks call the same methods in the same order."""

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> Path:
        """Keep tensors, by group and name, and JSON values, all or nothing; returns where. It may be written while
        training goes on. Raises `UserError` if this or the state before cannot be written; earlier ones are untouched.
        """
        ...

    def wait(self) -> None:
        """Until what was saved is written. Raises `UserError` if it cannot be."""
        ...

    def latest(self) -> Path | None:
        """Where the newest undamaged state is; None before the first."""
        ...

    def load(self, where: Path, model: nn.Module) -> tuple[Tensors, dict[str, Any]]:
        """What was saved, for this model, but for what each replica has of its own; tensors on the CPU. Raises
        `UserError` if it is damaged."""
        ...

    def errors(self, where: Path, model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
        """The group "errors" of this replica, if as many have saved theirs, else of one replica after another."""
        ...

    def begin(self) -> None:
        """Take the run over: what killed processes left is removed, and those that still live, on another machine that
        sees neither the lock nor us, save no more. The run's lock must be held."""
        ...


class Files:
    """Keeps the states of the run `run` as checkpoints, the last `keep` of them. One process writes.

    Each start of a run takes the next number, a file `start-00000003`; a checkpoint gets its name only while its
    start's number is the newest. So of two groups of machines that lost each other, the older one ends.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self.run, self.keep, self.folder = run, keep, run / FOLDER
        self._number: int | None = None  # of this start

    def path(self, step: int) -> Path:
        """The checkpoint of `step`."""
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> Path:
        """See `Checkpointer`: a file for each group."""
        with self.writing(step, state, {}) as fresh:
            for name, group in tensors.items():
                on_cpu = {k: t.detach().cpu().contiguous() for k, t in group.items()}
                save_file(on_cpu, fresh / f"{name}.safetensors")
        return self.path(step)

    @contextmanager
    def writing(self, step: int, state: Mapping[str, Any], sums: Mapping[str, str]) -> Iterator[Path]:
        """A folder to fill with tensors, which gets the state and becomes the checkpoint of `step` when the block ends.
        All but the last `keep` checkpoints are removed then.

        Args:
            state: everything but tensors, as JSON values.
            sums: checksums by file name, as the block finds them out; of other files they are computed.

        Raises:
            UserError: it cannot be written (a full disk, say); earlier checkpoints are untouched.
        """
        final = self.path(step)
        try:
            with atomic_folder(final, self._check) as fresh:
                yield fresh
                text = json.dumps(state, indent=1)  # as exact as Python reads it, NaN and infinities included
                (fresh / STATE).write_text(text, encoding="utf-8")
                names = sorted({*sums, *(path.name for path in fresh.iterdir())})
                lines = [f"{sums.get(name) or file_hash(fresh / name)}  {name}\n" for name in names]
                (fresh / SUMS).write_text("".join(lines), encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise UserError(f"the checkpoint {final} cannot be written: {error}; earlier ones are intact") from None
        for old in completed(self.run)[: -self.keep]:
            doomed = old.rename(old.with_suffix(".tmp"))  # first, so that a half-removed folder has no good name
            shutil.rmtree(doomed, ignore_errors=True)

    def wait(self) -> None:
        """`save` has written it."""

    def latest(self) -> Path | None:
        """See `latest` below."""
        return latest(self.run)

    def load(self, where: Path, model: nn.Module) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """See `Checkpointer`. Of tensors that this process shares with others it reads its shards, where it can."""
        return read_groups(where, parameters=dict(model.named_parameters())), read_state(where)

    def errors(self, where: Path, model: nn.Module, replicas: int = 1, replica: int = 0) -> Iterator[dict[str, Tensor]]:
        """See `Checkpointer`."""
        names = dcp_reader.replica_groups(where)
        for name in [f"errors.{replica}"] if len(names) == replicas else names:
            yield read_groups(where, (name,), dict(model.named_parameters()))[name]

    def begin(self) -> None:
        """See `Checkpointer`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            self._number = self._newest() + 1
            try:
                own = self.folder / f"start-{self._number:08d}"
                own.touch(exist_ok=False)  # of several that try only one succeeds
                break
            except FileExistsError:
                continue
        kept = {own, *completed(self.run)}
        for entry in self.folder.iterdir():
            if entry not in kept:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)

    def _newest(self) -> int:
        """The number of the newest start; 0 before the first."""
        starts = (_START.fullmatch(path.name) for path in self.folder.glob("start-*"))
        return max((int(found[1]) for found in starts if found), default=0)

    def _check(self) -> None:
        if self._number is not None and (newest := self._newest()) > self._number:
            raise UserError(
                f"the run {self.run} has been started again elsewhere (start {newest}; this is start {self._number}): "
                "this one saves nothing more and ends"
            )


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
        raise UserError(f"{damaged[0]}, and no older one is whole: repair it, or delete {run}")
    return None


def find_damage(checkpoint: Path) -> str | None:
    """What is damaged in a checkpoint; None if it is whole."""
    try:
        files = sorted(checkpoint.iterdir())
        if odd := [path.name for path in files if not path.is_file()]:  # a pipe would never end
            return f"{odd[0]} is not a file"
        lines = (checkpoint / SUMS).read_text(encoding="utf-8").splitlines()
        sums = {name: known for known, name in (line.split("  ", 1) for line in lines)}
        if STATE not in sums or any(Path(name).name != name for name in sums):
            return f"{SUMS} is incomplete"
        if unlisted := [path.name for path in files if path.suffix == ".safetensors" and path.name not in sums]:
            return f"{unlisted[0]} is not in {SUMS}"
        wrong = [name for name, known in sums.items() if file_hash(checkpoint / name) != known]
        return f"{wrong[0]} has changed" if wrong else None
    except OSError as error:
        return f"{Path(error.filename or SUMS).name}: {error.strerror}"
    except ValueError:
        return f"{SUMS} cannot be read"


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `state.json` holds."""
    return read_mapping(checkpoint / STATE, max_bytes=64 << 20)


def skipped_updates(run: Path) -> tuple[int, int]:
    """How many updates a run has skipped, of how many, by its newest checkpoint; zeros before the first."""
    if not (checkpoints := completed(run)):
        return 0, 0
    state = read_state(checkpoints[-1])
    return state["skipped"], state["step"]


def read_groups(
    checkpoint: Path, wanted: Collection[str] | None = None, parameters: Mapping[str, Tensor] | None = None
) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint by group and name, on the CPU; the `wanted` groups that it has, or all but those of
    single replicas.

    `parameters` are those that it is read for: where one is a shard, so is what is read for it, if that is stored in
    shards. Raises `UserError` if a file is damaged.
    """
    if dcp_reader.found(checkpoint):
        return dcp_reader.read(checkpoint, wanted, parameters or {})
    groups = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        if wanted is None or path.stem in wanted:
            try:
                groups[path.stem] = load_file(path)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} cannot be read: {error}") from None
    return groups


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
    wanted = ("model", "ema") if averaged else ("model",)
    if dcp_reader.found(checkpoint):  # read into the model: there may be no room for a whole copy beside it
        own, stored = model_tensors(model), dcp_reader.stored(checkpoint)
        keys: dict[str, str] = {}
        for group in wanted:
            keys |= {key.partition("/")[2]: key for key in stored if key.startswith(f"{group}/")}
        check_shapes(own, {name: stored[key][0] for name, key in keys.items()}, str(checkpoint))
        dcp_reader.fill(checkpoint, {keys[name]: tensor for name, tensor in own.items()})
        return checkpoint
    groups = read_groups(checkpoint, wanted)
    fill_model(model, groups.get("model", {}) | groups.get("ema", {}), str(checkpoint))
    return checkpoint
