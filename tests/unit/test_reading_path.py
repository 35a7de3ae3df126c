"""The paper reads top to bottom in ten files, which the README names. They are short and free of plumbing."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH = [
    "models/dvae.py", "objectives/elbo.py", "attention/patterns.py", "attention/attention.py", "models/transformer.py",
    "objectives/autoregressive.py", "sampling/generate.py", "models/contrastive.py", "objectives/contrastive.py",
    "sampling/rerank.py",
]  # fmt: skip


def test_the_readme_names_the_ten_files_in_order():
    named = re.findall(r"\]\(src/limner/(\w+/\w+\.py)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert any(named[i : i + 10] == PATH for i in range(len(named)))


def test_the_ten_files_have_fewer_than_1500_lines():
    sizes = {name: len((ROOT / "src/limner" / name).read_text(encoding="utf-8").splitlines()) for name in PATH}
    assert sum(sizes.values()) < 1_500, sizes


def test_the_ten_files_know_no_processes_logs_or_training_loop():
    for name in PATH:
        text = (ROOT / "src/limner" / name).read_text(encoding="utf-8")
        found = re.findall(r"^\s*(?:from|import) (\S+)", text, re.MULTILINE)
        packages = {"limner.training", "limner.distributed", "limner.progress", "limner.runs", "limner.atomic_io"}
        plumbing = packages | {"torch.distributed", "logging", "os", "sys"}
        assert not [x for x in found if any(x == y or x.startswith(y + ".") for y in plumbing)], name
