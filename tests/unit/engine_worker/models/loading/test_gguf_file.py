"""The GGUF reader against the gguf library's, and on files that are not whole."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine_worker.errors import LoadError
from engine_worker.models.loading.gguf_file import GgufFile
from tests.support.gguf_model import make_tiny_gguf, write_gguf
from tests.support.llama_oracle import default_gguf


def library_values(path: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(str(path))
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def test_metadata_of_every_type_equals_the_librarys(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -1)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "naïve 日本 \n")
    writer.add_string("none", "")
    writer.add_array("strings", ["a", "", "日"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GgufFile(path).metadata == library_values(path)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0], ids=["F32", "Q8_0"])
def test_tensors_equal_the_librarys(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf(path, kind=kind)
    file = GgufFile(path)
    expected = gguf.GGUFReader(str(path)).tensors
    assert list(file.tensors) == [tensor.name for tensor in expected]
    for tensor in expected:
        own = file.tensors[tensor.name]
        assert own.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert own.kind == tensor.tensor_type
        assert file.raw(own).numpy().tobytes() == tensor.data.tobytes()


@pytest.mark.real_model
def test_the_default_model_reads_like_the_library(tmp_path: Path) -> None:
    path = default_gguf()
    file = GgufFile(path)
    reader = gguf.GGUFReader(str(path))
    for name in ("general.architecture", "llama.rope.freq_base", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert file.metadata[name] == reader.fields[name].contents()
    places = {tensor.name: (int(tensor.data_offset), int(tensor.n_bytes)) for tensor in reader.tensors}
    assert {tensor.name: (tensor.start, tensor.num_bytes) for tensor in file.tensors.values()} == places


def test_alignment_of_the_file_is_honoured(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", np.arange(3, dtype=np.float32))
    writer.add_tensor("b", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    values = {name: file.raw(tensor).numpy().view(np.float32).ravel().tolist() for name, tensor in file.tensors.items()}
    assert values == {"a": [0, 1, 2], "b": [0, 1, 2, 3, 4]}


def test_a_file_cut_off_anywhere_is_refused_with_its_name(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, {"general.architecture": "llama", "x": ["one", "two"]}, {"t": np.ones((2, 4), np.float32)})
    data = whole.read_bytes()
    for size in range(len(data)):
        path = tmp_path / "cut.gguf"
        path.write_bytes(data[:size])
        try:
            GgufFile(path)
        except LoadError as error:
            assert "cut.gguf" in str(error)  # noqa: PT017 (a loop of many sizes, only the padding at the end may pass)
        else:
            pytest.fail(f"the first {size} of {len(data)} bytes were accepted")


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(LoadError, match=r"x\.gguf: this is not a GGUF file"):
        GgufFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(LoadError, match="version 1 is not supported"):
        GgufFile(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(LoadError, match="little endian"):
        GgufFile(path)
