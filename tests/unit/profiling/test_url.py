"""Traces at URLs: equal to those of local files, with the same limits and an error of one sentence for any failure."""

import gzip
import io
import os
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, strategies as st

from limner import recipes
from limner.cli import main
from limner.cli.train import Train, _stage_hooks
from limner.errors import UserError
from limner.profiling import trace as trace_module, url as module
from limner.profiling.recording import ProfileRecorder
from limner.profiling.trace import read_traces
from limner.profiling.url import path_or_url
from profiles import straggler


class Failing(MemoryFileSystem):
    """Lists and opens nothing."""

    protocol = "failing"

    def ls(self, path, detail=True, **options):
        raise RuntimeError("out of\nreach")

    def open(self, path, mode="rb", **options):
        raise RuntimeError("out of\nreach")


class Trickle(io.RawIOBase):
    """Returns three bytes of a read, as a connection may."""

    def __init__(self, data):
        self.rest = io.BytesIO(data)

    def readable(self):
        return True

    def readinto(self, buffer):
        return self.rest.readinto(memoryview(buffer)[:3])


class Trickling(MemoryFileSystem):
    protocol = "trickling"
    store: dict = {}

    def open(self, path, mode="rb", **options):
        file = super().open(path, mode, **options)
        return Trickle(file.read()) if mode == "rb" else file


@pytest.fixture(autouse=True)
def file_systems():
    for cls in (Failing, Trickling):
        fsspec.register_implementation(cls.protocol, cls, clobber=True)
    fsspec.register_implementation("absent", "limner_absent.FileSystem", clobber=True, errtxt="Install limner-absent")
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def folder(tmp_path):
    """A folder with the traces of two ranks, one of them gzipped."""
    straggler(0).save(tmp_path)
    path = straggler(1).save(tmp_path)
    (tmp_path / "rank1.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    (tmp_path / "notes.txt").write_text("no trace")
    return tmp_path


def copied(folder, url):
    """The URL after a copy of the files to it."""
    for file in folder.iterdir():
        (path_or_url(url) / file.name).write_bytes(file.read_bytes())
    return url


@pytest.mark.parametrize(
    "text",
    ["", ".", "run/", "/run", "a:b", "memory:run", "C:\\run", "C:/run", "c://run", "s3:/run", "://run", "a b://"],
)
def test_names_without_a_protocol_are_paths(text):
    assert path_or_url(text) == Path(text) and path_or_url(Path("memory://run")) == Path("memory:/run")


@given(st.text().filter(lambda text: "://" not in text))
def test_text_without_slashes_after_a_colon_is_a_path(text):
    assert path_or_url(text) == Path(text)


@pytest.mark.parametrize("protocol", ["memory", "trickling"])
def test_traces_at_urls_equal_local_ones(folder, protocol):
    expected = read_traces([folder])
    for urls in ([f"{protocol}://run/profile"], [f"{protocol}://run/profile/"]):
        found = read_traces([copied(folder, url) for url in urls])
        assert [(t.rank, t.events) for t in found] == [(t.rank, t.events) for t in expected]
        assert [str(t.path) for t in found] == [
            f"{protocol}://run/profile/{n}" for n in ("rank0.json", "rank1.json.gz")
        ]
    (one,) = read_traces([f"{protocol}://run/profile/rank1.json.gz"])
    assert one.events == expected[1].events and one.path.read_bytes() == (folder / "rank1.json.gz").read_bytes()


def test_a_file_url_is_the_local_path(folder):
    assert path_or_url(f"file://{folder}") == folder
    assert [t.path for t in read_traces([f"file://{folder}"])] == [t.path for t in read_traces([folder])]
    os.mkfifo(folder / "pipe")
    with pytest.raises(UserError, match="a pipe or a device"):
        read_traces([f"file://{folder}/pipe"])


def test_limits_hold_for_urls(folder, monkeypatch):
    zeros = path_or_url("memory://run") / "bomb.json.gz"
    zeros.write_bytes(gzip.compress(b" " * (64 << 20)))
    monkeypatch.setattr(trace_module, "MAX_BYTES", 1 << 20)
    with pytest.raises(UserError, match="more than 1 MiB of JSON"):
        read_traces(["memory://run/bomb.json.gz"])
    url = f"{copied(folder, 'memory://run')}/rank0.json"
    size = (folder / "rank0.json").stat().st_size
    monkeypatch.setattr(module, "MAX_DOWNLOAD", size)
    assert read_traces([url])
    monkeypatch.setattr(module, "MAX_DOWNLOAD", size - 1)
    with pytest.raises(UserError, match=r"rank0\.json has more than 0 MiB"):
        read_traces([url])


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("unknown://run", "Protocol not known: unknown"),
        ("absent://run", "Install limner-absent"),
        ("failing://run", "RuntimeError: out of reach"),
        ("failing://run/rank0.json", "RuntimeError: out of reach"),
        ("memory://run/none", "FileNotFoundError"),
        ("memory://run/none.json", "FileNotFoundError"),
        ("memory://run/notes", "lacks traces"),
        ("memory://run/cut.json.gz", "is damaged"),
        ("memory://run/text.json", "is damaged"),
    ],
)
def test_each_failure_is_one_sentence(url, reason):
    root = path_or_url("memory://run")
    (root / "notes" / "notes.txt").write_bytes(b"no trace")
    (root / "cut.json.gz").write_bytes(gzip.compress(b"[]" * 99)[:-9])
    (root / "text.json").write_bytes(b"no trace")
    with pytest.raises(UserError) as error:
        read_traces([url])
    assert str(error.value).startswith(url) and reason in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_trace_at_a_url_is_one_sentence_of_the_command(capsys):
    (path_or_url("memory://run") / "rank0.json.gz").write_bytes(b"\x1f\x8b")
    assert main(["profile", "memory://run"]) == 2
    assert "memory://run/rank0.json.gz is damaged" in capsys.readouterr().err


def test_the_command_reads_urls_and_hands_them_to_perfetto(folder, tmp_path, capsys):
    url = copied(folder, "memory://run")
    assert main(["profile", url, "--before", f"file://{folder}", "-o", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out.startswith("rank  ")
    assert "Open rank 1 in Perfetto" in (tmp_path / "report.html").read_text()


def train_settings(**options):
    return Train(data="scenes", out=Path("run"), recipe="scenes", settings=recipes.get("scenes"), **options)


def test_train_writes_a_folder_for_each_stage():
    settings = train_settings(profile="1:3", profile_out="memory://all")
    hooks = _stage_hooks(settings)
    assert hooks is not None
    (recorder,) = hooks(Path("run/prior"))
    assert isinstance(recorder, ProfileRecorder) and str(recorder.out) == "memory://all/prior"
    with pytest.raises(UserError, match="--profile-out need --profile"):
        _stage_hooks(replace(settings, profile=None))


def test_an_unknown_protocol_ends_training_before_it_starts():
    with pytest.raises(UserError, match="Protocol not known"):
        _stage_hooks(train_settings(profile="1:3", profile_out="unknown://all"))
