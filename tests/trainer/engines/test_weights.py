"""Weights under the names of a checkpoint."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from starpod.trainer.engines import weights
from starpod.trainer.engines.weights import shapes_of, weights_of, write_weights
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import build_policy
from tests.trainer.engines.architectures import make
from tests.trainer.engines.conformance import TINY, make_policy


@pytest.mark.parametrize("tied", [False, True])
def test_a_written_folder_is_a_model(tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", 10_000)
    config = ModelConfig.model_validate({"name": "tiny", "tiny": {**TINY, "tied": tied}})
    model = build_policy(config, texts=["Up"], critic="none", seed=3).model
    write_weights(model, tmp_path / "folder")
    files = sorted((tmp_path / "folder").glob("*.safetensors"))
    assert len(files) > 1
    held = [name for file in files for name in load_file(file)]
    assert sorted(held) == sorted(model.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_cannot_be_written_is_gathered_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks take part in it, and would wait for ever."""
    gathered = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        gathered.append(tensor)
        return tensor.detach()

    monkeypatch.setattr(weights, "whole", gather)
    (tmp_path / "file").touch()
    model = make_policy().model
    with pytest.raises(OSError):
        write_weights(model, tmp_path / "file" / "folder")
    assert len(gathered) == len(list(model.parameters()))


def test_experts_have_the_names_of_a_checkpoint(tmp_path: Path) -> None:
    model: Any = make("qwen3_moe").model
    model.save_pretrained(tmp_path)
    saved, handed = load_file(tmp_path / "model.safetensors"), dict(weights_of(model))
    assert handed.keys() == saved.keys() and all(torch.equal(handed[name], saved[name]) for name in saved)
    assert dict(shapes_of(model)) == {name: list(weight.shape) for name, weight in saved.items()}


def test_adapters_are_added_to_their_layers() -> None:
    model = get_peft_model(make_policy().model, LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    mine = dict(weights_of(model))
    assert not any(weight.requires_grad for weight in mine.values())
    merged = copy.deepcopy(model).merge_and_unload()
    wanted = dict(merged.named_parameters())
    assert set(mine) == set(wanted)
    for name, parameter in wanted.items():
        assert torch.allclose(mine[name], parameter, atol=1e-6), name
