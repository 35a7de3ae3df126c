"""Checkpoints: folders of safetensors and JSON that appear complete or not at all.

    RUN/checkpoints/step-00001200/
        model.safetensors       one file for each group of tensors; `state.py` lists the groups
        state.json              everything else
        SHA256SUMS              checksums of these files, in the format of `sha256sum -c`

If several processes train one model, each writes a file of shards instead. `dcp_reader.py` reads these files, and all
functions of this module accept both kinds.

A folder is written under a temporary name, flushed to the disk, and renamed: a crash at any moment leaves either the
old state or the new one. Older checkpoints are removed only after the new one has its name. If a file does not match
its checksum, or a file of tensors lacks a checksum, the newest undamaged checkpoint is used, with a warning. Nothing is
pickled, so an untrusted checkpoint can be wrong but cannot run code. Names and shapes are checked against the model.
"""

import json
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from limner.atomic_io import atomic_folder, file_hash
from limner.errors import UserError
from limner.json_files import read_mapping
from limner.optim.dtensor import shard_like
from limner.training import dcp_reader

FOLDER = "checkpoints"
STATE = "state.json"
SUMS = "SHA256SUMS"
STEP_FOLDER = re.compile(r"step-(\d{8,18})")
START_FILE = re.compile(r"start-(\d{8,18})")


Tensors = Mapping[str, Mapping[str, Tensor]]


class Checkpointer:
    """The store of the states of the run `run`, which keeps the last `keep`. Here one process writes; the subclass
    `ShardedCheckpointer` writes with all. All ranks call the methods in the same order.

    Each start of a run takes the next number, a file `start-00000003`. A checkpoint gets its name only while the number
    of its start is the newest. If a network failure separates two groups of machines, the older start ends.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self.run, self.keep, self.folder = run, keep, run / FOLDER
        self._number: int | None = None  # number of this start

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`."""
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> Path:
        """Save tensors, by group and name, and JSON values atomically; return the path. Writing may continue in the
        background. Raises `UserError` if this state or the one before cannot be written; earlier ones are untouched.
        """
        with self.create(step, state, {}) as folder:
            for name, group in tensors.items():
                on_cpu = {k: t.detach().cpu().contiguous() for k, t in group.items()}
                save_file(on_cpu, folder / f"{name}.safetensors")
        return self.path(step)

    def flush(self) -> None:
        """Wait for the last save. Raises `UserError` if writing fails."""

    @contextmanager
    def create(self, step: int, state: Mapping[str, Any], sums: Mapping[str, str]) -> Iterator[Path]:
        """Provide a folder for tensor files. At the end of the block it gets the state and becomes the checkpoint of
        `step`, and all but the last `keep` checkpoints are removed.

        Args:
            state: everything but tensors, as JSON values.
            sums: checksums by file name, which the block may fill; missing ones are computed.
        """
        final = self.path(step)
        try:
            with atomic_folder(final, self._check_newest) as folder:
                yield folder
                text = json.dumps(state, indent=1)  # Python reads it back exactly, including NaN and infinities
                (folder / STATE).write_text(text, encoding="utf-8")
                names = sorted({*sums, *(path.name for path in folder.iterdir())})
                lines = [f"{sums.get(name) or file_hash(folder / name)}  {name}\n" for name in names]
                (folder / SUMS).write_text("".join(lines), encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise write_error(final, error) from None
        for old in completed(self.run)[: -self.keep]:
            removed = old.rename(old.with_suffix(".tmp"))  # first: a partly removed folder must not keep its name
            shutil.rmtree(removed, ignore_errors=True)

    def latest(self) -> Path | None:
        """Return the newest undamaged state; None before the first."""
        return latest(self.run)

    def load(self, checkpoint: Path, model: nn.Module) -> tuple[Tensors, dict[str, Any]]:
        """Return the tensors of a state, on the CPU and without the error buffers of replicas, and its JSON values.
        Tensors of a parameter that is sharded here and in the file are this process's shards. Raises `UserError` if the
        state is damaged."""
        return read_groups(checkpoint, parameters=dict(model.named_parameters())), read_state(checkpoint)

    def error_buffers(
        self, checkpoint: Path, model: nn.Module, replicas: int = 1, replica: int = 0
    ) -> Iterator[Mapping[str, Tensor]]:
        """Yield the group "errors" of this replica if the number of replicas is unchanged, else of all replicas."""
        names = dcp_reader.replica_groups(checkpoint)
        for name in [f"errors.{replica}"] if len(names) == replicas else names:
            yield read_groups(checkpoint, (name,), dict(model.named_parameters()))[name]

    def acquire(self) -> None:
        """Take over the run: remove leftovers of killed processes, and end saving by processes on machines that the
        run's lock does not reach. The caller must hold the lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            self._number = self._newest() + 1
            try:
                start = self.folder / f"start-{self._number:08d}"
                start.touch(exist_ok=False)  # only one of several processes succeeds
                break
            except FileExistsError:
                continue
        valid = {start, *completed(self.run)}
        for entry in self.folder.iterdir():
            if entry not in valid:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)

    def _newest(self) -> int:
        """Return the number of the newest start; 0 before the first."""
        starts = (START_FILE.fullmatch(path.name) for path in self.folder.glob("start-*"))
        return max((int(match[1]) for match in starts if match), default=0)

    def _check_newest(self) -> None:
        if self._number is not None and (newest := self._newest()) > self._number:
            raise UserError(
                f"another process has restarted the run {self.run} (start {newest}; this is start {self._number}): "
                "this process stops without saving"
            )


def write_error(checkpoint: Path, reason: object) -> UserError:
    """Return the error for a checkpoint that cannot be written."""
    return UserError(f"cannot write checkpoint {checkpoint}: {reason}; earlier checkpoints are intact")


def completed(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, including damaged ones."""
    folders = [p for p in (run / FOLDER).glob("step-*") if STEP_FOLDER.fullmatch(p.name) and p.is_dir()]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the number of updates done at a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


def latest(run: Path) -> Path | None:
    """Return the newest undamaged checkpoint; None if there is no checkpoint. Warns if a newer one is damaged.

    Raises `UserError` if all are damaged.
    """
    damaged = []
    for checkpoint in reversed(completed(run)):
        if (damage := find_damage(checkpoint)) is None:
            if damaged:
                warnings.warn(f"{'; '.join(damaged)}: using {checkpoint.name} instead", stacklevel=2)
            return checkpoint
        damaged.append(f"{checkpoint} is damaged ({damage})")
    if damaged:
        raise UserError(f"{damaged[0]}, and no older checkpoint is intact: repair it, or delete {run}")
    return None


def find_damage(checkpoint: Path) -> str | None:
    """Return the damage to a checkpoint; None if it is intact."""
    try:
        files = sorted(checkpoint.iterdir())
        if others := [path.name for path in files if not path.is_file()]:  # a pipe would never end
            return f"{others[0]} is not a file"
        lines = (checkpoint / SUMS).read_text(encoding="utf-8").splitlines()
        sums = {name: expected for expected, name in (line.split("  ", 1) for line in lines)}
        if STATE not in sums or any(Path(name).name != name for name in sums):
            return f"{SUMS} is incomplete"
        if unlisted := [path.name for path in files if path.suffix == ".safetensors" and path.name not in sums]:
            return f"{unlisted[0]} is not in {SUMS}"
        changed = [name for name, expected in sums.items() if file_hash(checkpoint / name) != expected]
        return f"{changed[0]} has changed" if changed else None
    except OSError as error:
        return f"{Path(error.filename or SUMS).name}: {error.strerror}"
    except ValueError:
        return f"{SUMS} cannot be read"


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the contents of `state.json`."""
    return read_mapping(checkpoint / STATE, max_bytes=64 << 20)


def skipped_updates(run: Path) -> tuple[int, int]:
    """Return the numbers of skipped updates and of all updates at the newest checkpoint; zeros without one."""
    if not (checkpoints := completed(run)):
        return 0, 0
    state = read_state(checkpoints[-1])
    return state["skipped"], state["step"]


def read_groups(
    checkpoint: Path, wanted: Collection[str] | None = None, parameters: Mapping[str, Tensor] | None = None
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a checkpoint by group and name, on the CPU: the `wanted` groups that exist, or all but the
    groups of single replicas.

    If the checkpoint is sharded, tensors of a sharded parameter in `parameters` are read as this process's shards.
    Raises `UserError` if a file is damaged.
    """
    if dcp_reader.is_sharded(checkpoint):
        return dcp_reader.read(checkpoint, wanted, parameters or {})
    groups = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        if wanted is None or path.stem in wanted:
            try:
                groups[path.stem] = load_file(path)
            except (OSError, SafetensorError) as error:
                raise UserError(f"cannot read {path}: {error}") from None
    return groups


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; a tied tensor has its first name."""
    unique: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        unique.setdefault(id(tensor), name)
    return {name: state[name].detach() for name in unique.values()}


@torch.no_grad()
def fill_model(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy tensors into the model. Raises `UserError` unless names and shapes match exactly."""
    targets = model_tensors(model)
    check_shapes(targets, {name: tensor.shape for name, tensor in tensors.items()}, where)
    for name, tensor in targets.items():
        tensor.copy_(shard_like(tensors[name], tensor))


def check_shapes(targets: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], where: str) -> None:
    """Raise `UserError` if `shapes`, found in `where`, do not match names and shapes of a model's tensors exactly."""
    for name in dict.fromkeys([*targets, *shapes]):
        if name not in shapes:
            raise UserError(f"{where} lacks {name!r}: it belongs to a model with another config")
        if name not in targets:
            raise UserError(f"unexpected tensor {name!r} in {where}: it belongs to a model with another config")
        if targets[name].shape != shapes[name]:
            shape, expected = list(shapes[name]), list(targets[name].shape)
            raise UserError(f"{name!r} has shape {shape} in {where}, but {expected} in the model")


def load_weights(model: nn.Module, folder: str | Path, averaged: bool = True) -> Path:
    """Load the newest weights of a run, or those of one checkpoint folder, into `model`; return the checkpoint.

    `averaged` takes the exponentially averaged parameters if the run kept them. Raises `UserError` if there is no
    checkpoint or it belongs to another model.
    """
    folder = Path(folder)
    checkpoint = folder if (folder / STATE).is_file() else latest(folder)
    if checkpoint is None:
        raise UserError(f"{folder} contains no checkpoint: name the folder of a training run")
    wanted = ("model", "ema") if averaged else ("model",)
    if dcp_reader.is_sharded(checkpoint):  # read into the model: memory may not suffice for a second copy
        targets, stored = model_tensors(model), dcp_reader.stored(checkpoint)
        keys: dict[str, str] = {}
        for group in wanted:
            keys |= {key.partition("/")[2]: key for key in stored if key.startswith(f"{group}/")}
        check_shapes(targets, {name: stored[key][0] for name, key in keys.items()}, str(checkpoint))
        dcp_reader.fill(checkpoint, {keys[name]: tensor for name, tensor in targets.items()})
        return checkpoint
    groups = read_groups(checkpoint, wanted)
    fill_model(model, groups.get("model", {}) | groups.get("ema", {}), str(checkpoint))
    return checkpoint
