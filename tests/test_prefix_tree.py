"""What rows begin with alike is read once: log-probs, values and gradients are those of rows that are read one by one."""
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_update import OBJECTIVES, learner_of
from transformers import AutoModelForCausalLM, GPT2Config, LlamaForCausalLM, MistralConfig, OPTConfig, Qwen2Config

import models
from conftest import tiny_lake
from engines.hf import HFEngine
from judge import batches_of, per_token, reference_score, score
from models import load_policy, token_logprobs
from policies.chat import Chat
from policies.tiny import tiny_config, tiny_tokenizer
from rollout import collect
from settings import Args
from update import gradients, make_learner


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=8).filter(any))
@settings(max_examples=200, deadline=None)
def test_a_tree_has_one_node_for_each_different_beginning(rows):
    node_BT, place_U = (tensor.numpy() for tensor in models.tree_of(rows))
    node_of = {}
    for row, nodes_T in zip(rows, node_BT):
        for end in range(1, len(row) + 1):
            assert node_of.setdefault(tuple(row[:end]), nodes_T[end - 1]) == nodes_T[end - 1]
    assert sorted(node_of.values()) == list(range(len(place_U)))
    width = node_BT.shape[1]
    for beginning, node in node_of.items():
        row, at = divmod(place_U[node], width)
        assert tuple(rows[row][:at + 1]) == beginning


def ragged():
    """(tokens, mask) (B, T): a group of four, a group of two, two rows alone, equal rows, a row inside another, one without
    a mask; padding on the right."""
    generator = torch.Generator().manual_seed(0)
    new = lambda length: torch.randint(6, 40, (length,), generator=generator)  # noqa: E731
    first, second, whole = new(9), new(5), new(20)
    rows = [torch.cat([first, new(length)]) for length in (3, 12, 7, 1)] + [torch.cat([second, new(4)]) for _ in range(2)]
    rows += [new(6), new(15), whole, whole.clone(), whole[:11], new(4)]
    tokens_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask_BT = torch.rand(tokens_BT.shape, generator=generator) < 0.5
    for mask_T, row in zip(mask_BT, rows):
        mask_T[0] = False
        mask_T[len(row):] = False
        mask_T[len(row) - 1] = True
    mask_BT[-1] = False
    return tokens_BT, mask_BT


def tiny(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(tiny_tokenizer())).eval()


def logprobs_and_gradient(model, tokens_BT, mask_BT, share):
    model.zero_grad()
    logprobs_BT, entropy_BT = token_logprobs(model, tokens_BT, mask_BT, 0.7, entropy_grad=True, share=share)
    weights_BT = torch.linspace(-1, 2, tokens_BT.numel()).view(tokens_BT.shape)
    (weights_BT * (logprobs_BT + 0.3 * entropy_BT)).sum().backward()
    return logprobs_BT.detach(), entropy_BT.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def assert_equal(found, expected):
    for mine, plain in zip(found[:2], expected[:2]):
        assert torch.allclose(mine, plain, atol=1e-5) and plain.abs().max() > 0.1
    for mine, plain in zip(found[2], expected[2]):
        assert (mine - plain).norm() <= 1e-5 * plain.norm() > 0


def test_log_probs_entropies_and_gradients_are_those_of_the_plain_pass():
    model, (tokens_BT, mask_BT) = tiny(), ragged()
    expected = logprobs_and_gradient(model, tokens_BT, mask_BT, share=False)
    assert_equal(logprobs_and_gradient(model, tokens_BT, mask_BT, share=True), expected)
    changed_BT = torch.where(torch.arange(tokens_BT.shape[1]) < 5, tokens_BT.roll(1, 0), tokens_BT)
    other = logprobs_and_gradient(model, changed_BT, mask_BT, share=True)
    assert (other[0] - expected[0]).abs().max() > 0.1  # a prompt that is not a row's own would show


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_reads_the_same_tree_again(reentrant):
    model, (tokens_BT, mask_BT) = tiny(), ragged()
    expected = logprobs_and_gradient(model, tokens_BT, mask_BT, share=False)
    model.train()  # or transformers checkpoints nothing; there is no dropout
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_equal(logprobs_and_gradient(model, tokens_BT, mask_BT, share=True), expected)


def test_shared_tokens_go_through_the_model_once_and_padding_never():
    model, (tokens_BT, mask_BT), seen = tiny(), ragged(), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, states: seen.append(states[0].shape[:2].numel()))
    token_logprobs(model, tokens_BT, mask_BT)
    token_logprobs(model, tokens_BT, mask_BT, share=False)
    before_last = [tokens_T[:max(mask_T.nonzero().flatten().tolist(), default=0)].tolist()
                   for tokens_T, mask_T in zip(tokens_BT, mask_BT)]
    assert seen == [len({tuple(row[:end]) for row in before_last for end in range(1, len(row) + 1)}), tokens_BT.numel()]


SMALL = dict(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             initializer_range=0.3)


@pytest.mark.parametrize("config", [Qwen2Config(**SMALL, num_key_value_heads=2), GPT2Config(**SMALL),
                                    OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32)], ids=lambda config: config.model_type)
def test_other_models_know_trees(config):
    """Biases in attention, learned positions, positions with an offset."""
    torch.manual_seed(0)
    model, (tokens_BT, mask_BT) = AutoModelForCausalLM.from_config(config).eval(), ragged()
    assert models.knows_trees(model.get_decoder())
    found, expected = (token_logprobs(model, tokens_BT, mask_BT, share=share)[0].detach() for share in (True, False))
    assert torch.allclose(found, expected, atol=1e-5) and expected[mask_BT].std() > 0.5


def test_sliding_windows_take_the_plain_pass():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4)).eval()
    tokens_BT, mask_BT = ragged()
    assert not models.knows_trees(model.get_decoder())
    found, expected = (token_logprobs(model, tokens_BT, mask_BT, share=share)[0] for share in (True, False))
    assert torch.equal(found, expected)
    assert models.knows_trees(tiny().get_decoder())


@pytest.fixture(scope="module")
def episodes(tiny_folder):
    """Three groups of four and two lone members of others, as a replay draw brings them."""
    policy, tokenizer = load_policy(tiny_folder)
    problems = [problem for problem in tiny_lake().problems("train", 5) for _ in range(4)]
    played, _ = collect(HFEngine(policy, [tokenizer.eos_token_id], tokenizer.pad_token_id), Chat(tokenizer), tiny_lake,
                        problems, [row // 4 for row in range(20)], list(range(20)), max_turns=5, max_new_tokens=6,
                        temperature=1.0, format_penalty=0.15, policy_step=0, iteration=1, context_length=1024)
    return played[:12] + [played[13], played[18]]


def everything(learner, episodes):
    """Gradients of a fresh and of a weighted replay step, their metrics, and the scores of all models."""
    modules = list(filter(None, (learner.policy, learner.critic)))
    found = [score(learner.policy, episodes, learner)]
    if learner.critic is not None:
        found.append(per_token(learner.critic, episodes, learner))
    if learner.reference is not None:
        found.append(reference_score(learner, episodes))
    for replayed in (False, True):
        for module in modules:
            module.zero_grad()
        metrics = gradients(learner, episodes, np.linspace(0.2, 1, len(episodes)).astype(np.float32), replayed=replayed)
        found += [torch.tensor([metrics[name] for name in ("loss", "tokens_trained", "ratio_max")])]
        found += [parameter.grad.clone() for module in modules for parameter in module.parameters() if parameter.grad is not None]
    return found


@pytest.mark.parametrize("flags", [OBJECTIVES[name] for name in ("ppo", "kl in the loss", "entropy", "decoupled")] + [
    dict(algo="grpo", lora_rank=4, kl_coef=0.1)], ids=("ppo", "kl in the loss", "entropy", "decoupled", "lora"))
def test_updates_are_those_of_rows_read_one_by_one(tiny_folder, episodes, flags, monkeypatch):
    learner = learner_of(tiny_folder, episodes, micro_batch_tokens=1024, **flags)
    found = everything(learner, episodes)
    monkeypatch.setattr(models, "knows_trees", lambda _: False)
    expected = everything(learner, episodes)
    assert len(found) == len(expected) > 10
    for mine, plain in zip(found, expected):
        assert (mine - plain).norm() <= 1e-5 * plain.norm()


def test_a_group_stays_in_one_batch_where_it_fits(tiny_folder, episodes):
    learner = make_learner(Args(), load_policy(tiny_folder)[0])
    batches = batches_of(replace(learner, args=replace(learner.args, micro_batch_tokens=2048)), episodes)
    for group in range(3):
        assert sum(any(episodes[row].group_id == group for row in batch) for batch in batches) == 1
    assert sorted(sum(batches, [])) == list(range(len(episodes)))
    assert all(len(batch) * max(len(episodes[row].tokens) for row in batch) <= 2048 for batch in batches)
