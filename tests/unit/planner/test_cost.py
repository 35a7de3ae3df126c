"""The cost model against the paper's tables, closed forms, and a measured process."""

import os
import subprocess
import sys

import pytest

from limner import recipes
from limner.attention.attention import attention_mask
from limner.attention.patterns import PATTERNS
from limner.models.transformer import SIZES, TransformerConfig
from limner.optim.optimizers import AdamWConfig
from limner.planner import cost
from limner.planner.cost import compression_rate, default_rank, effective_parameters, kv_cache, table1, table2
from limner.planner.launch import Launch
from limner.quantization.inference_linear import supports_packed_linear
from limner.training.config import TrainConfig

PAPER = SIZES["dalle-12b"]


def test_the_parameter_counts_of_the_papers_model():
    d, layers, text, image = 3968, 64, 16_384, 8_192
    counts = cost.count_parameters(PAPER)
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
    matrices = ("queries, keys, values", "attention outputs", "first MLP matrices", "second MLP matrices")
    assert sum(counts[kind] for kind in matrices) == effective_parameters(PAPER) == 12 * layers * d * d
    assert f"{effective_parameters(PAPER) / 1e9:.2f}" == "12.09"
    assert 24 < 2 * effective_parameters(PAPER) / 1e9 < 24.5  # "about 24 GB ... when stored in 16-bit precision"


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


@pytest.mark.parametrize("kind", sorted(PATTERNS))
def test_attended_pairs_match_the_attention_mask(kind):
    config = TransformerConfig(text_len=5, grid=(4, 6), kernel=3, width=16, heads=2, depth=1)
    pattern = PATTERNS[kind](config.grid, config.kernel)
    assert cost.attended_pairs(config, pattern) == attention_mask(pattern, 6).sum()


def test_kv_cache_of_the_papers_model():
    mean = sum(pattern.cache_slots() for pattern in PAPER.patterns) / PAPER.depth
    assert round(mean) == 283
    shared, each = kv_cache(PAPER)
    assert each == mean * PAPER.depth * 2 * PAPER.width * 2
    assert kv_cache(PAPER, dense=True)[1] / each == pytest.approx(1281 / mean)
    assert shared == PAPER.depth * 257 * 2 * PAPER.width * 2


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
        ({"width": 192, "depth": 8, "heads": 4, "image_vocab": 512, "text_len": 15}, 2, False),
        ({"width": 256, "depth": 8, "heads": 4, "image_vocab": 512, "text_len": 63}, 2, True),
        ({"width": 128, "depth": 2, "heads": 2, "image_vocab": 8192, "text_len": 15}, 2, False),
    ],
)
def test_planned_memory_matches_a_training_process(config, batch, checkpointing):
    """The process also has about 20 MB of kernels and scratch, of which these sizes keep a small share."""
    config = {**config, "text_vocab": 512, "grid": (32, 32)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, repr(config), str(batch), str(checkpointing)],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    training = TrainConfig(
        steps=2, batch_size=batch, optimizer=AdamWConfig(), ema_decay=0.9, checkpoint_activations=checkpointing
    )
    launch = Launch(config=TransformerConfig(**config), training=training, gpus=1, device="cpu")
    assert launch.peak == pytest.approx(int(ran.stdout), rel=0.15)


def test_every_size_is_a_recipe_with_the_nominal_parameter_count():
    for name, config in SIZES.items():
        assert recipes.get(name).prior.model == config
    effective = [effective_parameters(config) for config in SIZES.values()]
    assert [round(n / 1e6) for n in effective] == [5, 25, 113, 302, 1208, 2831, 5549, 12092]
