"""Pipeline parallelism: each process holds some blocks of the model, and micro-batches pass through all of them.

Use it if a model does not fit into one process and links are slow: a stage sends activations of one boundary, where
sharding (`sharded.py`) sends all weights. The price is the time in which stages wait for the first and for the last
micro-batch. R pipelines of K processes each train on a share of the batch and average their gradients by a reducer
(`gradient_reducers.py`).

A parameter of another stage is a meta tensor: it has name and shape, so that checkpoints, averages and optimizers use
the same names as in one process, but no values. Checkpoints are complete and independent of the layout, because each
process writes the parts that it holds. For an evaluation all processes of a pipeline hold the whole model.

PipeTransformer (He et al. 2021) freezes leading blocks, shortens the pipeline, and spends the processes on more
replicas. `freeze` does so between two updates, without a restart. The new layout depends on nothing but the initial
layout, the model and the number of frozen blocks, so a run that is killed in a transition repeats it when it resumes.

A model whose objective is not a `StagedObjective` is trained by all processes as replicas (`Replicated`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from limner.blocks import leading_part
from limner.distributed.gradient_reducers import Fp32Reducer, Replicas, buckets
from limner.distributed.microbatch_search import MicrobatchCount
from limner.distributed.overlapped_reducer import OverlappedReducer
from limner.distributed.pipeline_layout import PipelineLayout, parameter_stages, unit_weights
from limner.distributed.pipeline_schedule import Order, ScheduleRunner
from limner.distributed.pipeline_transition import move, named_states
from limner.distributed.replicated import ReducerFactory, Replicated
from limner.distributed.sharded_checkpoint import ShardedCheckpointer
from limner.errors import UserError
from limner.training.checkpoint import Checkpointer
from limner.training.parallel import GradientInputs, Reduction, to_device
from limner.training.state import load_optimizers
from limner.training.train_module import Batch, StagedObjective, Trainable
from limner.training.train_state import TrainState

__all__ = ["PipelineCheckpointer", "Pipelined"]


class Pipelined(Replicated):
    """The strategy of a process of the default process group.

    Args:
        layout: initial layout of each model; `layout` is the current one.
        order: order of the micro-batches on a stage with one piece of the model. With several `chunks` it is that of
            the interleaved schedule.
        make_reducer: as for `Replicated`, but averages replicas in fp32 without a rank.
        make_count: constructor of `count`, which chooses the number of micro-batches, such as `MicrobatchSearch`.

    Attributes:
        stages: stage of each parameter of the current model by name; {} if the model is not cut.

    Raises `UserError` if the layout needs another number of processes.
    """

    can_freeze = True

    def __init__(
        self, layout: PipelineLayout, order: Order = "1f1b", make_reducer: ReducerFactory | None = None,
        make_count: Callable[[torch.device], MicrobatchCount] = MicrobatchCount,
    ) -> None:  # fmt: skip
        super().__init__(make_reducer)
        self.layout = self._initial_layout = self._checked(layout)
        self.order: Order = order
        self._make_count, self.count = make_count, make_count(self.device)
        self._staged = False  # the current model is divided into stages
        self._trained: frozenset[str] = frozenset()  # parameters that may train, by name
        self.stages: dict[str, int] = {}
        self._pipeline_group: Any = None
        self._pipeline: ScheduleRunner | None = None
        self._trainable: Any = None
        self._stream: Any = None

    def _checked(self, layout: PipelineLayout) -> PipelineLayout:
        if layout.world_size != self.world_size:
            raise UserError(
                f"{layout.stages} stages and {layout.replicas} replicas need {layout.world_size} processes, not "
                f"{self.world_size}: choose --pipeline-stages that divides the number of processes"
            )
        return layout

    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """All processes must have built the complete model. The device holds the parameters of the stage only."""
        self._destroy_groups()
        self._trainable, self.layout, self.count = trainable, self._initial_layout, self._make_count(self.device)
        has_blocks = isinstance(getattr(trainable.model, "blocks", None), nn.ModuleList)
        self._staged = isinstance(trainable.objective, StagedObjective) and has_blocks
        if not self._staged:
            return super().prepare(trainable, device, dtype)
        self._wrapped = None
        for p in trainable.parameters():
            self._broadcast(p.detach(), distributed.group.WORLD)
        for module in trainable.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        parameters = dict(trainable.model.named_parameters())
        self._trained = frozenset(name for name, p in parameters.items() if p.requires_grad)
        self._apply_layout({name: p.detach() for name, p in parameters.items()})
        return trainable

    def _apply_layout(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the parameters by those of this process's stage, create the groups of the layout, and attach the
        reducer. New parameters lack the hooks of an earlier reducer."""
        model, layout = self._trainable.model, self.layout
        self.stages = parameter_stages(model, layout)
        for name, p in dict(model.named_parameters()).items():
            own = self.stages[name] == layout.stage(self.rank)
            value = tensors[name].to(self.device) if own else p.detach().to("meta")
            _set_parameter(model, name, nn.Parameter(value, own and name in self._trained))
        self._create_groups()
        if layout.replicas > 1:
            reducer = (self._choose_reducer() or Fp32Reducer)()
            owned = {name: b for name, b in buckets(model).items() if not any(p.is_meta for p in b.parameters.values())}
            self.reduction = OverlappedReducer(reducer, owned, Replicas(self.replica_group))

    def _create_groups(self) -> None:
        """Create the groups of all pipelines and of all stages; all processes must create all."""
        pipelines = self.layout.pipelines
        for ranks in pipelines:
            group = distributed.new_group(ranks)
            self._pipeline_group = group if self.rank in ranks else self._pipeline_group
        for ranks in zip(*pipelines, strict=True):
            group = distributed.new_group(list(ranks))
            self.replica_group = group if self.rank in ranks else self.replica_group

    def _destroy_groups(self) -> None:
        self.reduction.close()
        self.reduction, self._pipeline = Reduction(), None
        if self._pipeline_group is not None:
            distributed.destroy_process_group(self._pipeline_group)
            distributed.destroy_process_group(self.replica_group)
        self._pipeline_group, self.replica_group, self.stages = None, distributed.group.WORLD, {}

    def freeze(self, run: TrainState, depth: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self._staged:
            return super().freeze(run, depth, tensors)
        layout = replace(self._initial_layout, frozen=depth)
        if depth:
            limit = self._initial_layout.largest_stage(unit_weights(run.model, 0))
            layout = layout.shortened(unit_weights(run.model, depth), limit)
        return self.relayout(run, layout, tensors)

    def relayout(
        self, run: TrainState, layout: PipelineLayout, tensors: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Change the layout between two updates; all processes call it. Weights, optimizer states, averages, error
        buffers and `tensors` of parameters move by name between the processes; the stream continues with the new
        shares. A hook that calls it comes after hooks that use the parameters of the update. Return the moved tensors.

        Raises `UserError` if the layout does not fit the model or the number of processes.
        """
        tensors = dict(tensors or {})
        if self._checked(layout) == self.layout or not self._staged:
            self.layout = layout
            return tensors
        stages = parameter_stages(run.model, layout)
        needed = [{n for n, stage in stages.items() if stage == layout.stage(r)} for r in range(self.world_size)]
        groups: dict[str, dict[str, Tensor]] = {}
        states = named_states(run) | {f"tensors/{name}": x for name, x in tensors.items()}
        for key, tensor in move(states, needed, self.device).items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
        scales = {name: self.reduction.scales.get(p) for name, p in run.model.named_parameters()}
        self._destroy_groups()
        self.layout = layout
        self._apply_layout(groups.pop("model"))
        named = run.model.named_parameters()
        self.reduction.scales |= {p: scale for name, p in named if (scale := scales[name]) is not None}
        run.rebuild_updaters()
        self.reduction.load_state_dict(groups.pop("errors", {}))
        if run.ema:
            averages = groups.pop("ema")
            run.ema.load_state_dict({name: averages.get(name, x) for name, x in run.ema.state_dict().items()})
        tensors = groups.pop("tensors", {})
        states = {f"{key}.{name}": tensor for key, values in groups.items() for name, tensor in values.items()}
        load_optimizers(run.model, run.optimizers, states, "the layout before")
        if self._stream is not None:
            self.shard_stream(self._stream)
        return tensors

    def layout_values(self, run: TrainState) -> dict[str, int]:
        stages, replicas = self.layout.stages, self.layout.replicas
        microbatches = self.count.choose(run.config.batch_size // replicas, self.layout, run.config.accumulate)
        return {"stages": stages, "replicas": replicas, "microbatches": microbatches}

    def gradients(self, run: GradientInputs, batch: Batch) -> dict[str, Tensor]:
        """Run the schedule; the metrics are those of this process's pipeline.

        The first call of a schedule checks that each trained parameter gets a gradient, else raises `RuntimeError`.
        """
        if not self._staged:
            return super().gradients(run, batch)
        if run.config.scaling in ("loss", "tensors"):
            raise UserError(
                f"scaling {run.config.scaling} does not work in a pipeline: choose resblocks, none, or --parallel fsdp"
            )
        rows, batch = len(next(iter(batch.values()))), self._with_batch_stats(run, batch)
        batch = {name: to_device(x, run.device) for name, x in batch.items()}
        m = self.count.choose(rows, self.layout, run.config.accumulate)
        self.count.begin(self.layout.stages, m)
        if self._pipeline is not None and (self._pipeline.rows, self._pipeline.microbatches) == (rows, m):
            return self._pipeline.gradients(batch)
        for part in leading_part(run.trainable.model, self.layout.frozen):  # their optimizer states stay
            part.requires_grad_(False)
        self._pipeline = ScheduleRunner(run, rows, m, self.layout, self.order, self._pipeline_group, self.reduction)
        with self._check_gradients():
            return self._pipeline.gradients(batch)

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        super().reduce(parameters)
        self.count.end()

    @contextmanager
    def _check_gradients(self) -> Iterator[None]:
        missing: dict[Tensor, str] = {p: n for n, p in self._trainable.model.named_parameters() if p.requires_grad}

        def arrived(p: Tensor) -> None:
            missing.pop(p, None)

        handles = [p.register_post_accumulate_grad_hook(arrived) for p in missing]
        yield
        for handle in handles:
            handle.remove()
        if missing:
            raise RuntimeError(f"the pipeline computed no gradient of {', '.join(missing.values())}")

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        return self.sum_over_stages(super().grad_norm(parameters).square()).sqrt()

    def sum_over_stages(self, values: Tensor) -> Tensor:
        if self._staged:
            values = values.clone()
            distributed.all_reduce(values, group=self._pipeline_group)
        return values

    def merge(self, values: dict[str, float]) -> dict[str, float]:
        if not self._staged:
            return values
        parts: list[dict[str, float]] = [{}] * self.layout.stages
        distributed.all_gather_object(parts, values, group=self._pipeline_group)
        return {name: value for part in parts for name, value in part.items()}

    @property
    def data_shares(self) -> int:
        return self.layout.replicas if self._staged else self.world_size

    def shard_stream(self, stream: Any) -> None:
        self._stream = stream
        stream.shard(self.layout.replica(self.rank) if self._staged else self.rank, self.data_shares)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """All processes of a pipeline hold the whole model within the context."""
        placed = dict(self._trainable.model.named_parameters()) if self._staged else {}
        for name, p in placed.items():
            value = torch.empty_like(p, device=self.device) if p.is_meta else p.detach().contiguous()
            distributed.broadcast(value, group=self._pipeline_group, group_src=self.stages[name])
            if p.is_meta:
                _set_parameter(self._trainable.model, name, nn.Parameter(value, False))
        try:
            yield
        finally:
            for name, p in placed.items():
                _set_parameter(self._trainable.model, name, p)

    def checkpointer(self, files: Checkpointer) -> ShardedCheckpointer:
        return PipelineCheckpointer(files, self)


class PipelineCheckpointer(ShardedCheckpointer):
    """A `ShardedCheckpointer` whose processes hold the parameters of the stages of a strategy."""

    def __init__(self, files: Checkpointer, strategy: Pipelined) -> None:
        super().__init__(files)
        self._strategy = strategy

    def replica(self) -> tuple[int, int]:
        group = self._strategy.replica_group
        return group.size(), group.rank()

    def is_part(self, parameter: str, value: Tensor) -> bool:
        return parameter in self._strategy.stages


def _set_parameter(model: nn.Module, name: str, p: nn.Parameter) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, p)
