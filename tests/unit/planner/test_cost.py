"""The cost model against the paper's tables, closed forms, and a measured process."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from limner import recipes
from limner.attention.attention import attention_mask
from limner.attention.patterns import PATTERNS
from limner.models.transformer import SIZES, TransformerConfig
from limner.optim.optimizers import AdamW16Config, AdamWConfig
from limner.planner import cost
from limner.planner.compression import compression_rate, default_rank, table1, table2
from limner.planner.cost import Cost
from limner.planner.gpus import GPUS
from limner.quantization.inference_linear import supports_packed_linear

PAPER = Cost(config=SIZES["dalle-12b"], gpus=1024, batch=1024)


def test_the_parameter_counts_of_the_papers_model():
    d, layers, text, image = 3968, 64, 16_384, 8_192
    counts = cost.count_parameters(SIZES["dalle-12b"])
    assert counts == {
        "queries, keys, values": 3 * layers * d * d,
        "attention outputs": layers * d * d,
        "first MLP matrices": 4 * layers * d * d,
        "second MLP matrices": 4 * layers * d * d,
        "gains and biases": layers * (4 * d + 3 * d + d + 4 * d + d) + 2 * d + text + image,
        "text embedding": text * d,
        "text positions": 256 * d,
        "padding, one per position": 256 * d,
        "start of image": d,
        "image embedding": image * d,
        "rows": 32 * d,
        "columns": 32 * d,
        "text unembedding": text * d,
        "image unembedding": image * d,
    }
    assert sum(counts[kind] for kind in cost.MATRICES) == PAPER.effective_parameters == 12 * layers * d * d
    assert f"{PAPER.effective_parameters / 1e9:.2f}" == "12.09"


def test_tables_1_and_2():
    assert [(round(n / 1e9, 1), rank, round(100 * rate)) for n, _, rank, rate in table1()] == [
        (2.8, 512, 83), (5.5, 640, 85), (12.1, 896, 86),
    ]  # fmt: skip
    assert [default_rank(d) for d in (1920, 2688, 3968)] == [512, 640, 896]
    for d, r, m in ((1920, 512, 8), (3968, 896, 8), (64, 16, 4), (96, 8, 1)):
        rows = table2(d, r, m)
        total, p, q = rows["total size"]
        assert (total, p, q) == pytest.approx(
            (12 * d * d / m, (5 * d * r * m + 4 * d * r) / m**2, (d * r * m + 8 * d * r) / m**2)
        )
        assert 1 - (p + q) / total == pytest.approx(compression_rate(d, r, m))
    assert compression_rate(3968, 896, 8) == 1 - 5 * 896 / (8 * 3968)


def test_the_papers_model_fits_the_papers_gpu_only_in_the_papers_format():
    memory = GPUS["v100-16gb"].memory
    fits = {(half, saved): PAPER.memory(half, saved) <= memory for half in (False, True) for saved in (False, True)}
    assert fits == {(False, False): False, (False, True): False, (True, False): False, (True, True): True}
    assert 24 < 2 * PAPER.effective_parameters / 1e9 < 24.5  # "about 24 GB of memory when stored in 16-bit precision"


@pytest.mark.parametrize("kind", sorted(PATTERNS))
def test_attended_pairs_match_the_attention_mask(kind):
    config = TransformerConfig(text_len=5, grid=(4, 6), kernel=3, width=16, heads=2, depth=1)
    pattern = PATTERNS[kind](config.grid, config.kernel)
    assert cost.attended_pairs(config, pattern) == attention_mask(pattern, 6).sum()


def test_kv_cache_of_the_papers_model():
    config = SIZES["dalle-12b"]
    mean = sum(pattern.cache_slots() for pattern in config.patterns) / config.depth
    assert round(mean) == 283
    shared, each = PAPER.kv_cache()
    assert each == mean * config.depth * 2 * config.width * 2
    assert PAPER.kv_cache(dense=True)[1] / each == pytest.approx(1281 / mean)
    assert shared == config.depth * 257 * 2 * config.width * 2


def test_traffic_between_machines_falls_by_the_compression_rate():
    plan = replace(PAPER, gpus=16, batch=16)
    rest = 2 * (1 / 2) * plan.sizes[1] / 8 * 4
    saved = 1 - (plan.sent_between(True) - rest) / (plan.sent_between(False) - rest)
    assert saved == pytest.approx(compression_rate(3968, 896))
    assert replace(plan, gpus=8).sent_between(False) == replace(plan, gpus=8).sent_between(True) == 0
    assert replace(plan, gpus=1).sent_within == 0


@pytest.mark.parametrize("optimizer", [AdamWConfig(), AdamW16Config()])
def test_moments_match_the_plan(optimizer):
    config = TransformerConfig(text_vocab=9, image_vocab=8, text_len=3, grid=(4, 4), width=16, depth=2, heads=2)
    model = config.build()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    (built,) = optimizer.build(model)
    built.step()
    moments = [value for state in built.state.values() for key, value in state.items() if key != "step"]
    planned = Cost(config=config, gpus=1, half_moments=isinstance(optimizer, AdamW16Config)).state(half=False)
    assert sum(value.nbytes for value in moments) == planned["moments"]
    if isinstance(optimizer, AdamW16Config):
        assert planned["moments"] == Cost(config=config, gpus=1).state(half=True)["moments"]


PEAK = """
import resource, sys, torch
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.optim.ema import Ema
from limner.optim.optimizers import AdamWConfig

def peak():
    return int(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1]) * 1024

config, batch = TransformerConfig(**eval(sys.argv[1])), int(sys.argv[2])
def step(model, optimizers):
    h, w = config.grid
    data = {'text': torch.randint(0, config.text_vocab, (rows, config.text_len)),
            'image': torch.randint(0, config.image_vocab, (rows, h * w))}
    with torch.autocast('cpu', torch.bfloat16):
        loss, _ = Autoregressive()(model, data, 0, None)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

full, rows = config, 1  # excludes what torch loads in its first step
config = TransformerConfig(text_vocab=8, image_vocab=8, text_len=3, grid=(32, 32), width=16, heads=2, depth=4)
model = config.build()
step(model, AdamWConfig().build(model))
del model
before, config, rows = peak(), full, batch
model = config.build()
model.set_checkpointing(sys.argv[3] == 'True')
optimizers, average = AdamWConfig().build(model), Ema(model, 0.9)
for _ in range(2):
    step(model, optimizers)
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak from /proc")
@pytest.mark.skipif(
    not supports_packed_linear(), reason="the plan assumes oneDNN's bf16 products; the fallback takes less memory"
)
@pytest.mark.parametrize(
    ("config", "batch", "checkpointing"),
    [
        ({"width": 192, "depth": 8, "heads": 4, "image_vocab": 512, "text_len": 15}, 1, False),
        ({"width": 128, "depth": 8, "heads": 4, "image_vocab": 512, "text_len": 63}, 2, False),
        ({"width": 128, "depth": 8, "heads": 4, "image_vocab": 512, "text_len": 63}, 2, True),
        ({"width": 64, "depth": 2, "heads": 2, "image_vocab": 8192, "text_len": 15}, 2, False),
    ],
)
def test_planned_memory_matches_a_training_process(config, batch, checkpointing):
    config = {**config, "text_vocab": 512, "grid": (32, 32)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, repr(config), str(batch), str(checkpointing)],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    planned = Cost(config=TransformerConfig(**config), gpus=1, batch=batch).memory(False, checkpointing)
    assert planned == pytest.approx(int(ran.stdout), rel=0.15)


def test_every_size_is_a_recipe_with_the_nominal_parameter_count():
    for name, config in SIZES.items():
        assert recipes.get(name).prior.model == config
    effective = {name: Cost(config=config).effective_parameters for name, config in SIZES.items()}
    assert [round(n / 1e6) for n in effective.values()] == [5, 25, 113, 302, 1208, 2831, 5549, 12092]
