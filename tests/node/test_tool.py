from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aggregation.chunks import ChunkGrid
from aggregation.digest import state_digest
from node.tool import ToolError, evaluate, export, init, main_tool
from node.training.exporting import Meta, model_card
from node.training.model import build_task, initial_vector
from node.training.shards import PIECES_FILE, read_pieces
from node.training.shared import chunk_hashes, create
from protos.runspec import RunSpec
from tests.fakes.llama import WISH, llama_run, write_texts
from tests.fakes.tiny import TinyRun


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return llama_run(tmp_path_factory.mktemp("run"))


def wish(folder: Path, **fields: Any) -> Path:
    write_texts(folder / "texts")
    path = folder / "wish.json"
    path.write_text(json.dumps({**WISH, "corpus": str(folder / "texts"), **fields}))
    return path


def test_init_makes_a_run_whose_spec_fits_its_files(tmp_path: Path) -> None:
    result = json.loads(main_tool("init", {"config": str(wish(tmp_path, name="x", seed=4)), "to": str(tmp_path)}))
    spec = RunSpec.from_bytes(json.dumps(result["spec"]).encode())
    assert (spec.name, spec.seed, spec.data.seed, spec.codec.chunk_values) == ("x", 4, 4, 1024)
    assert result["packed"] == {
        "n_texts": 6,
        "n_skipped": 0,
        "n_train_tokens": spec.data.n_train_sequences * 16,
        "n_val_tokens": spec.data.n_val_sequences * 16,
    }
    read_pieces((tmp_path / "data" / PIECES_FILE).read_bytes(), spec.data)
    theta_D = np.fromfile(tmp_path / "state" / "theta.bin", "<f4")
    momentum_D = np.fromfile(tmp_path / "state" / "momentum.bin", "<f4")
    assert theta_D.shape == momentum_D.shape == (spec.model.n_values,)
    assert not momentum_D.any()
    np.testing.assert_array_equal(theta_D, initial_vector(spec))
    grid = ChunkGrid(spec.model.n_values, spec.codec.chunk_values)
    assert state_digest(chunk_hashes(theta_D, grid), chunk_hashes(momentum_D, grid)).hex() == spec.model.initial_digest
    assert sum(value.numel() for _, value in build_task(spec).parameters()) == spec.model.n_parameters


def test_init_again_gives_the_same_and_another_seed_another_model(tmp_path: Path) -> None:
    first = init(wish(tmp_path), tmp_path / "a")
    assert init(wish(tmp_path), tmp_path / "a") == first
    other = init(wish(tmp_path, seed=1), tmp_path / "b")
    assert other["spec"]["model"]["initial_digest"] != first["spec"]["model"]["initial_digest"]
    assert other["spec"]["model"]["layout_digest"] == first["spec"]["model"]["layout_digest"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"preset": "huge"}, "preset.*tiny"),
        ({"corpus": "/nowhere"}, "/nowhere"),
        ({"work": {"batch_tokens": 100}}, "batch_tokens"),
        ({"work": {"h": 0}}, "h: "),
        ({"codec": {"chunk_values": 1025}}, "codec|multiple"),
        ({"inner": {"lr": "fast"}}, "inner.lr"),
        ({"surprise": 1}, "surprise"),
        ({"model": {"name": "x"}}, "model.name"),
        ({"data": {"sequence_length": 1}}, "sequence_length"),
        ({"data": {"sequence_length": 8192}, "work": {"batch_tokens": 8192}}, "too little text"),
        ({"model": {"config": {"model_type": "no_such_model"}}}, "no model"),
        ({"model": {"config": {"hidden_size": 17}}}, "model"),
        ({"model": {"config": {"vocab_size": 100}}}, "vocab_size"),
        ({"model": {"config": {"auto_map": {"AutoModelForCausalLM": "x--y.Z"}}}}, "auto_map"),
        ({"model": {"config": {"_attn_implementation": "somebody/kernel"}}}, "_attn_implementation"),
        ({"model": {"config": {"num_hidden_layers": 10**6}}}, "num_hidden_layers"),
        ({"model": {"config": {"hidden_size": 2**40}}}, "hidden_size"),
    ],
)
def test_init_names_what_is_wrong(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ToolError, match=why):
        init(wish(tmp_path, **fields), tmp_path)


def test_a_config_that_is_no_json_is_said(tmp_path: Path) -> None:
    (tmp_path / "wish.json").write_text("{")
    with pytest.raises(ToolError, match="JSON"):
        init(tmp_path / "wish.json", tmp_path)
    with pytest.raises(ToolError, match="No such file"):
        init(tmp_path / "nothing", tmp_path)


def test_a_new_model_is_as_good_as_guessing(run: TinyRun) -> None:
    result = evaluate(run.spec_path, run.data_dir, run.theta_path)
    assert result["n_tokens"] == 16 * 15
    assert result["val_loss"] == pytest.approx(math.log(257), abs=0.2)


def test_evaluate_names_what_is_wrong(run: TinyRun, tmp_path: Path) -> None:
    create(tmp_path / "theta.bin", 12)
    with pytest.raises(ToolError, match="12 bytes"):
        evaluate(run.spec_path, run.data_dir, tmp_path / "theta.bin")
    with pytest.raises(ToolError, match=r"val\.bin"):
        evaluate(run.spec_path, tmp_path, run.theta_path)
    (tmp_path / "spec.json").write_text("{}")
    with pytest.raises(ToolError, match="model"):
        evaluate(tmp_path / "spec.json", run.data_dir, run.theta_path)
    nan_D = np.full(run.spec.model.n_values, np.nan, np.float32)
    nan_D.tofile(tmp_path / "nan.bin")
    with pytest.raises(ToolError, match="not finite"):
        evaluate(run.spec_path, run.data_dir, tmp_path / "nan.bin")


def test_an_export_loads_offline_as_the_same_model(
    run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    meta = json.dumps({"run_id": "12D3KooX", "rounds": 8, "tokens": 983040, "val_loss": 2.0191, "else": 1})
    arguments = {"spec": str(run.spec_path), "theta": str(run.theta_path), "to": str(tmp_path / "out"), "meta": meta}
    assert json.loads(main_tool("export", arguments))["export"] == str(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def é():\n\treturn 漢"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ids.tolist() == [list(text.encode())]
    assert tokenizer.decode(ids[0]) == text
    wanted = dict(build_task(run.spec).parameters())
    assert {name for name, _ in model.named_parameters()} == set(wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in model.named_parameters())
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in (
        "12D3KooX",
        "983,040",
        "| Rounds | 8 |",
        "2.0191",
        "texts",
        run.spec.data.root,
        'license: "apache-2.0"',
    ):
        assert fact in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_an_export_replaces_an_earlier_one_and_nothing_else(run: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        export(run.spec_path, run.theta_path, tmp_path / "empty", "{}")
        assert (tmp_path / "empty" / "model.safetensors").is_file()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("my work")
    (tmp_path / "file").write_text("my work")
    for name in ("mine", "file"):
        with pytest.raises(ToolError, match="no export of ours"):
            export(run.spec_path, run.theta_path, tmp_path / name, "{}")
    assert (tmp_path / "mine" / "README.md").read_text() == (tmp_path / "file").read_text() == "my work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "mine"]


def test_a_model_card_is_not_broken_by_what_a_run_is_called(run: TinyRun) -> None:
    spec = run.spec.model_copy(update={"name": "a | b\n# c", "licence": 'x"\n---'})
    card = model_card(spec, Meta())
    assert "# a \\| b # c\n" in card
    assert card.count("\n---\n") == 1
    assert "Rounds" not in card  # nothing is claimed that is not known


@pytest.mark.parametrize(
    ("name", "arguments"), [("train", {}), ("init", {}), ("init", {"config": "a", "to": "b", "x": "c"})]
)
def test_an_unknown_tool_or_argument_is_said(name: str, arguments: dict[str, str]) -> None:
    with pytest.raises(ToolError, match="no tool"):
        main_tool(name, arguments)
