"""The graph as data: nodes, edges and saved bytes are those of autograd."""

import json
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from limner import compat
from limner.autograd.fold import fold
from limner.autograd.graph import UNREACHED, read_graph
from limner.errors import UserError
from limner.numerics.precision import Bf16, Fp16, Fp32
from limner.planner.saved_tensors import REST, random_batch
from limner.quantization.low_precision import SwitchBackLinear
from limner.quantization.precisions import Fp8TensorWise, Fp16Weights, SwitchBack, SwitchBackM
from training_steps import CLIP, DVAE, PRIOR, step


def counted_by_hooks(step):
    """Bytes of the storages that are packed and alive after the forward pass: of activations, and of parameters."""

    class Packed:
        def __init__(self, tensor):
            self.tensor = tensor

    alive = weakref.WeakSet()

    def pack(tensor):
        alive.add(packed := Packed(tensor))
        return packed

    run = step.state()
    batch = random_batch(step.model, step.samples, step.device)
    with saved_tensors_hooks(pack, lambda packed: packed.tensor), run.config.precision.autocast("cpu"):
        loss, _ = run.trainable(batch, 0, run.generator)  # alive until the count
    weights = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    storages = {x.tensor.untyped_storage().data_ptr(): x.tensor.untyped_storage().nbytes() for x in alive}
    of_weights = sum(n for address, n in storages.items() if address in weights)
    assert loss.requires_grad
    return sum(storages.values()) - of_weights, of_weights


@pytest.mark.parametrize("model", [PRIOR, CLIP, DVAE], ids=["prior", "contrastive", "dvae"])
def test_saved_bytes_equal_those_of_the_hooks_in_every_stage(model):
    graph = step(model).graph()
    assert (graph.nbytes("activation"), graph.nbytes("parameter")) == counted_by_hooks(step(model))
    assert graph.nbytes("recomputed") == 0 and not any(node.name == UNREACHED for node in graph.nodes)


@pytest.mark.parametrize("precision", [Bf16(), SwitchBack(), SwitchBackM(), Fp8TensorWise(), Fp16Weights()])
def test_saved_bytes_equal_those_of_the_hooks_in_every_precision(precision):
    graph = step(precision=precision).graph()
    assert (graph.nbytes("activation"), graph.nbytes("parameter")) == counted_by_hooks(step(precision=precision))


def test_checkpointing_keeps_what_the_hooks_count_and_recomputes_the_rest():
    plain, checkpointed = step(), step(checkpoint_activations=True)
    graph = checkpointed.graph()
    kept, _ = counted_by_hooks(checkpointed)
    assert graph.nbytes("activation") == kept < plain.graph().nbytes("activation") / 4
    inputs = sum(node.nbytes("activation") for node in graph.nodes if node.name == UNREACHED)
    assert graph.nbytes("recomputed") == plain.graph().nbytes("activation") - kept + inputs
    assert {node.module for node in graph.nodes if node.name == UNREACHED} == {
        f"blocks.{i}.{name}" for i in range(2) for name in ("attention", "mlp")
    }


@pytest.mark.parametrize("precision", [Fp32(), SwitchBackM()])
def test_saved_bytes_agree_with_the_allocator(precision, tmp_path):
    subject = step(replace(PRIOR, width=128), precision, samples=8)
    run, batch = subject.state(), random_batch(subject.model, 8, subject.device)
    cpu = torch.profiler.ProfilerActivity.CPU
    with run.config.precision.autocast("cpu"):
        run.trainable(batch, 0, run.generator)  # allocates what later calls keep
        with torch.profiler.profile(activities=[cpu], profile_memory=True) as profiler:
            loss, _ = run.trainable(batch, 0, run.generator)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    allocated = sum(event["args"]["Bytes"] for event in trace if event["name"] == "[memory]")
    saved = subject.graph().nbytes("activation")
    batch_bytes = 8 * 36 * 8  # image tokens: saved, but allocated before
    assert loss.requires_grad and saved - batch_bytes == pytest.approx(allocated, rel=0.01)


def test_the_table_says_what_checkpointing_and_8_bit_inputs_free():
    subject = step(replace(PRIOR, layer_scale=True), Fp16(), samples=16)
    saved = subject.saved_bytes(subject.graph())
    assert list(saved)[:2] == ["blocks.0.attention", "blocks.0.mlp"] and list(saved)[-1] == REST
    whole, by_checkpointing, by_int8 = map(sum, zip(*saved.values(), strict=True))
    assert whole == counted_by_hooks(subject)[0]
    checkpointed = replace(subject, training=replace(subject.training, checkpoint_activations=True))
    assert whole - by_checkpointing == counted_by_hooks(checkpointed)[0]
    assert saved[REST][1:] == (0, 0)
    rows, d = 16 * 45, 64
    copies = sum(2 * n * m for n, m in ((d, 4 * d), (4 * d, d)))  # fp16 weights, of which int8 keeps a half
    inputs = 2 * rows * 5 * d  # fp16 inputs of both layers
    scales = 4 * (2 * rows + 2) - 2 * 8  # and the counters of kernels
    assert saved["blocks.0.mlp"][2] in (copies // 2 + inputs // 2 - scales - extra for extra in (0, 32))
    assert by_int8 > 0
    assert subject.saved_bytes(subject.graph()) == saved
    assert step(DVAE).saved_bytes(step(DVAE).graph())[REST][1:] == (None, None)


class Net(nn.Module):
    """A folded module, one that is called twice, our function, and a parameter outside of modules."""

    def __init__(self):
        super().__init__()
        self.first, self.second = SwitchBackLinear(4, 3), nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.second(self.second(self.first(x)) * self.gain)


def test_nodes_and_edges_are_those_of_autograd():
    model, x = Net(), torch.randn(2, 4)
    graph = read_graph(model, lambda: model(x).sum())
    loss = model(x).sum()
    pending, reached, edges = [loss.grad_fn], {loss.grad_fn}, Counter()
    while pending:
        node = pending.pop()
        for target, number in node.next_functions:
            if target:
                edges[node.name(), target.name(), number] += 1
                pending += [target] * (target not in reached)
                reached.add(target)
    assert len(graph.nodes) == len(reached)
    assert edges.total() == sum(edge is not None for node in graph.nodes for edge in node.edges)
    (ours,) = [node for node in graph.nodes if node.source]
    file, _, line = ours.source.rpartition(":")
    assert file == "quantization/low_precision.py" and ours.module == "first"
    source = (Path(compat.__file__).parent / file).read_text().splitlines()
    assert source[int(line) - 1] == f"class {ours.name}(torch.autograd.Function):"
    targets = [edge and graph.nodes[edge.target].parameter for edge in ours.edges]
    assert targets[1:] == ["first.weight", "first.bias", None]  # after the input; the counter lacks a gradient
    assert {node.parameter for node in graph.nodes if node.parameter} == dict(model.named_parameters()).keys()


TEXT = """\
first, 4 nodes, saves 40 bytes, 48 of parameters
second
  TBackward0, [3, 3] float32
      -> second/weight, input 0
  AddmmBackward0, [2, 3] float32
      -> second/bias, input 0
      -> first, input 0
      -> second/TBackward0, input 0
      saves mat1 [2, 3] float32, 24 bytes, activation
      saves mat2 [3, 3] float32, 36 bytes, parameter
MulBackward0, [2, 3] float32
    -> second/AddmmBackward0, input 0
    -> /gain, input 0
    saves other [3] float32, 12 bytes, parameter
    saves self [2, 3] float32, 24 bytes, activation
second
  TBackward0#2, [3, 3] float32
      -> second/weight, input 0
  AddmmBackward0#2, [2, 3] float32
      -> second/bias, input 0
      -> /MulBackward0, input 0
      -> second/TBackward0#2, input 0
      saves mat1 [2, 3] float32, 24 bytes, activation
      saves mat2 [3, 3] float32, saved before, parameter
SumBackward0, [] float32
    -> second/AddmmBackward0#2, input 0
AccumulateGrad gain, [3] float32
second
  AccumulateGrad second.bias, [3] float32
  AccumulateGrad second.weight, [3, 3] float32"""


def test_the_text_is_indented_by_module():
    model, x = Net(), torch.randn(2, 4)
    text = fold(read_graph(model, lambda: model(x).sum()), ["second"]).text()
    assert text == TEXT


def test_texts_of_two_depths_differ_in_the_added_block_alone():
    two, three = (
        fold(step(replace(PRIOR, depth=depth)).graph(), ["blocks.0.mlp.branch"]).text().splitlines() for depth in (2, 3)
    )
    block = [line for line in three if line.strip().startswith("blocks.2,")]
    assert len(block) == 1 and set(two) - set(three) == {"    -> blocks.1, input 0"}
    assert set(three) - set(two) == {*block, "      -> blocks.1, input 0, 2 times", "    -> blocks.2, input 0"}


def test_folding_keeps_nodes_and_edges():
    graph = step().graph()
    names = sorted(graph.modules())
    for opened in ([], ["blocks.1.attention"], names):
        folded = fold(graph, opened)
        assert sum(len(box.nodes) for box in folded.boxes) == len(graph.nodes)
        assert len({box.label for box in folded.boxes}) == len(folded.boxes)
        inside = [(i, target) for i, box in enumerate(folded.boxes) for target, _ in box.edges]
        assert all(i != target for i, target in inside)
    assert len(fold(graph, names).boxes) == len(graph.nodes)
    assert len(inside) == sum(edge is not None for node in graph.nodes for edge in node.edges)
    with pytest.raises(UserError, match=r"in a module 'blocks.0.atention': did you mean 'blocks.0.attention'"):
        fold(graph, ["blocks.0.atention"])


def test_a_shared_module_is_a_child_of_its_caller():
    modules = step().graph().modules()
    assert f"blocks.1.attention.branch.{PRIOR.patterns[1].name}" in modules
    assert not any(name.startswith("attention_fns") for name in modules)


def test_a_loss_without_gradient_is_an_error():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UserError, match="no parameter of the model requires a gradient"):
        read_graph(model, lambda: model(torch.ones(2)).sum())
