import itertools
import math

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from conftest import tiny_lake
from models import collate, load_policy, micro_batches, token_logprobs, token_logprobs_from_hidden
from policies.chat import Chat
from policies.tiny import blind_loss, demonstrations, tiny_tokenizer


def test_the_tokenizer_survives_saving(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    env = tiny_lake()
    text = Chat(tokenizer).tokenizer.apply_chat_template([{"role": "user", "content": env.reset(7, seed=0)}], tokenize=False,
                                                         add_generation_prompt=True)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert again(text, add_special_tokens=False)["input_ids"] == tokens
    assert tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens).replace(" ", "") == text.replace(" ", "").replace("\n", "")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_every_message_of_the_task_is_in_the_vocabulary():
    tokenizer = tiny_tokenizer()
    env = tiny_lake(slippery=True)
    messages = [env.reset(7, seed=0), env.step("no")[0]] + [f"<answer>{move}</answer>" for move in env.moves]
    for seed in range(30):
        env.reset(seed, seed=0)
        done = False
        while not done:
            message, _, done, _ = env.step(env.scripted_answer(np.random.default_rng(seed), 0.3))
            messages.append(message)
    assert all(tokenizer.unk_token_id not in tokenizer(message)["input_ids"] for message in messages)


def test_following_messages_are_what_the_template_renders():
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer)
    answer = chat.tokenize("<answer>Left</answer>")
    turns = [{"role": "user", "content": "Walk"}, {"role": "assistant", "content": "<answer>Left</answer>"},
             {"role": "user", "content": "player 1 2"}]
    whole = chat.tokenize(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    stop = [tokenizer.eos_token_id]
    # sampled its stop token: not written twice; hit the length limit: the template's own closes the turn
    assert chat.start("Walk") + answer + stop + chat.follow("player 1 2", stop[0]) == whole
    assert chat.start("Walk") + answer + chat.follow("player 1 2", answer[-1]) == whole


def test_log_probs_keep_their_digits_where_logits_are_large():
    """chosen - (max + log sum) is off by 4e-4 at logits of 1e4; here of 10,000, 10,001 and 10,002."""
    hidden_ND = torch.ones(1, 1, requires_grad=True)
    weight_VD = torch.tensor([[10000.0], [10001.0], [10002.0]])
    right_V = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).log_softmax(0)
    for token in range(3):
        logprobs_N, entropy_N = token_logprobs_from_hidden(hidden_ND, weight_VD, torch.tensor([token]))
        assert logprobs_N.item() == pytest.approx(right_V[token].item(), abs=2e-7)
        assert entropy_N.item() == pytest.approx(-(right_V.exp() * right_V).sum().item(), abs=1e-6)
        (slope,) = torch.autograd.grad(logprobs_N.sum(), hidden_ND)
        p_V = right_V.exp()
        assert slope.item() == pytest.approx((weight_VD[token, 0].double() - (p_V * weight_VD[:, 0].double()).sum()).item(), abs=0.01)


def test_token_logprobs_equal_those_of_the_plain_way(tiny_folder):
    model, _ = load_policy(tiny_folder)
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 4, 7]
    rows = [{"tokens": torch.randint(6, 40, (length,), generator=generator),
             "mask": torch.rand(length, generator=generator) < 0.5} for length in lengths]
    for row in rows:
        row["mask"][0] = False
    batch = collate(rows, pad_id=0)
    with torch.no_grad():
        logprobs_BT, entropy_BT = token_logprobs(model, batch["tokens"], batch["mask"], temperature=0.5)
        for index, row in enumerate(rows):
            logits_TV = model(row["tokens"][None]).logits[0] / 0.5
            all_TV = logits_TV.log_softmax(-1)
            for t in range(lengths[index]):
                expected = all_TV[t - 1, row["tokens"][t]].item() if row["mask"][t] else 0.0
                assert logprobs_BT[index, t].item() == pytest.approx(expected, abs=1e-5)
                entropy = -(all_TV[t - 1].exp() * all_TV[t - 1]).sum().item() if row["mask"][t] else 0.0
                assert entropy_BT[index, t].item() == pytest.approx(entropy, abs=1e-5)
    assert not logprobs_BT[1, 4:].any()


def test_temperature_divides_the_logits():
    hidden, head = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]])  # logits (2, 0)
    logprob, _ = token_logprobs_from_hidden(hidden, head, torch.tensor([0]), 0.5)
    assert logprob.item() == pytest.approx(-0.01815, abs=1e-5)  # log sigmoid(4), not log sigmoid(2) = -0.1269


def test_micro_batches_pad_least_of_all_ways_to_cut_the_sorted_rows():
    rng = np.random.default_rng(0)
    for trial in range(60):
        lengths = rng.integers(1, 12, size=rng.integers(1, 9)).tolist()
        budget = int(rng.integers(5, 40))
        ordered, best = sorted(lengths, reverse=True), np.inf
        for cuts in itertools.product((False, True), repeat=len(lengths) - 1):
            edges = [0, *[place + 1 for place, cut in enumerate(cuts) if cut], len(lengths)]
            parts = [ordered[a:b] for a, b in zip(edges, edges[1:])]
            if all(len(part) == 1 or len(part) * part[0] <= budget for part in parts):
                best = min(best, sum(len(part) * part[0] + budget / 16 for part in parts))
        found = micro_batches(lengths, budget)
        assert sorted(sum(found, [])) == list(range(len(lengths)))
        assert sum(len(batch) * lengths[batch[0]] + budget / 16 for batch in found) == pytest.approx(best)


def test_micro_batches_with_prompts_compute_least_of_all_ways_to_cut_rows_in_the_order_of_their_prompts():
    """The cost of a batch, by hand: a prompt once, other tokens, a quarter of the padding, budget / 16."""
    rng, together = np.random.default_rng(0), 0
    for trial in range(60):
        prompts = [((1,) * 3, (2,) * 4, (3,))[which] for which in rng.integers(0, 3, size=rng.integers(1, 9))]
        lengths = [len(prompt) + int(rng.integers(1, 9)) for prompt in prompts]
        budget = int(rng.integers(5, 40))

        def cost(batch):
            width = max(lengths[row] for row in batch)
            if len(batch) > 1 and len(batch) * width > budget:
                return np.inf
            once = sum(map(len, {prompts[row] for row in batch})) + sum(lengths[row] - len(prompts[row]) for row in batch)
            return 0.75 * once + 0.25 * len(batch) * width + budget / 16
        found = micro_batches(lengths, budget, prompts)
        order = sum(found, [])
        assert sorted(order) == list(range(len(lengths)))
        families = [prompts[row] for row in order]
        assert len(list(itertools.groupby(families))) == len(set(families))  # side by side
        best = min(sum(cost(order[a:b]) for a, b in zip(edges, edges[1:])) for cuts in itertools.product(
            (False, True), repeat=len(order) - 1) for edges in [[0, *[at + 1 for at, cut in enumerate(cuts) if cut], len(order)]])
        assert sum(map(cost, found)) == pytest.approx(best) and best < np.inf
        together += len(found) < len(lengths)
    assert together > 30


def test_micro_batches_hold_every_row_once_within_the_budget():
    lengths = np.random.default_rng(0).integers(1, 60, size=50).tolist()
    batches = micro_batches(lengths, 128)
    assert sorted(row for batch in batches for row in batch) == list(range(50))
    assert all(len(batch) * max(lengths[row] for row in batch) <= 128 for batch in batches)
    assert all(len(batch) == 1 for batch in micro_batches(lengths, 1))
    assert micro_batches([500], 128) == [[0]]  # a row that is too long goes alone; it is not cut


def test_demonstrations_train_on_the_players_tokens_only():
    tokenizer, env = tiny_tokenizer(), tiny_lake()
    rows, moves = demonstrations(env, Chat(tokenizer), env.problems("train", 20), skill=0.5, max_turns=10, seed=0)
    for row in rows:
        spoken = tokenizer.decode([token for token, mask in zip(row["tokens"], row["mask"]) if mask])
        assert set(spoken.split()) <= {"<answer>", "</answer>", "<|end|>", *env.moves}
    assert sum(sum(row["mask"]) for row in rows) == 4 * len(moves)


def test_blind_loss_is_the_entropy_of_moves_given_the_position():
    moves = [(0, "a"), (0, "a"), (0, "b"), (0, "b"), (1, "a"), (1, "a")]
    assert blind_loss(moves) == pytest.approx(4 * np.log(2) / 6)


def test_the_warm_start_is_made_once_and_found_again(tiny_folder, cache_dir):
    from policies.tiny import warm_started_tiny
    before = (tiny_folder / "model.safetensors").stat().st_mtime_ns
    again = warm_started_tiny(tiny_lake(), cache_dir, seed=0, updates=12, skill=0.6, max_turns=10)
    assert again == tiny_folder and (again / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(path.name for path in cache_dir.iterdir()) == [tiny_folder.name, f"{tiny_folder.name}.lock"]


def test_a_broken_cache_folder_is_made_again(tiny_folder, tmp_path):
    import shutil

    from policies.tiny import warm_started_tiny
    (tmp_path / tiny_folder.name).mkdir(parents=True)
    shutil.copy(tiny_folder / "config.json", tmp_path / tiny_folder.name)
    again = warm_started_tiny(tiny_lake(), tmp_path, seed=0, updates=12, skill=0.6, max_turns=10)
    first, second = (load_policy(folder)[0].state_dict() for folder in (tiny_folder, again))
    assert again.name == tiny_folder.name and all(torch.equal(first[name], second[name]) for name in first)


# -------------------------------------------------------------------------------------------------- log-probs of tokens
def plain_logprobs(hidden_ND, weight_VD, tokens_N, temperature=1.0, bias_V=None):
    logits_NV = hidden_ND.double() @ weight_VD.double().T + (0 if bias_V is None else bias_V.double())
    logprobs_NV = torch.log_softmax(logits_NV / temperature, 1)
    return logprobs_NV.gather(1, tokens_N[:, None])[:, 0], -(logprobs_NV.exp() * logprobs_NV).sum(1)


def head(n=13, d=5, v=31, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return draw(n, d), draw(v, d), torch.randint(0, v, (n,), generator=generator), draw(v)


def test_temperature_of_stored_and_trained_logprobs():
    # trl 4159: logits [2, 0] at temperature .5: log p(0) = -.0181, not -.1269
    logprob, entropy = token_logprobs_from_hidden(
        torch.eye(1), torch.tensor([[2.0], [0.0]]), torch.tensor([0]), 0.5
    )
    assert logprob.item() == pytest.approx(-0.0181, abs=1e-4)
    p = 1 / (1 + math.exp(-4))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 4, 13, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_chunked_logprobs_are_exact(chunk_size, temperature, with_bias, entropy_grad):
    hidden_ND, weight_VD, tokens_N, bias_V = head()
    bias_V = bias_V if with_bias else None
    leaves = [leaf for leaf in (hidden_ND, weight_VD, bias_V) if leaf is not None]
    expected, expected_entropy = plain_logprobs(hidden_ND, weight_VD, tokens_N, temperature, bias_V)
    got, entropy = token_logprobs_from_hidden(
        hidden_ND, weight_VD, tokens_N, temperature, bias_V, chunk_size, entropy_grad
    )
    assert torch.allclose(got, expected) and torch.allclose(entropy, expected_entropy)
    assert entropy.requires_grad == entropy_grad
    upstream = torch.linspace(-1, 2, len(tokens_N), dtype=torch.float64)
    total, expected_total = (got * upstream).sum(), (expected * upstream).sum()
    if entropy_grad:
        total, expected_total = (
            total + (entropy * upstream**2).sum(), expected_total + (expected_entropy * upstream**2).sum())
    for grad, expected_grad in zip(torch.autograd.grad(total, leaves), torch.autograd.grad(expected_total, leaves)):
        assert torch.allclose(grad, expected_grad, atol=1e-12)


def test_chunked_logprobs_by_finite_differences():
    hidden_ND, weight_VD, tokens_N, bias_V = head(n=4, v=6)
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs_from_hidden(h, w, tokens_N, 0.7, b, 3, True),
        (hidden_ND, weight_VD, bias_V))


def test_chunked_logprobs_with_a_frozen_head_and_frozen_hidden():
    hidden_ND, weight_VD, tokens_N, _ = head()
    expected = torch.autograd.grad(plain_logprobs(hidden_ND, weight_VD, tokens_N)[0].sum(), (hidden_ND, weight_VD))
    got, _ = token_logprobs_from_hidden(hidden_ND, weight_VD.detach(), tokens_N, chunk_size=4)
    assert torch.allclose(torch.autograd.grad(got.sum(), hidden_ND)[0], expected[0])  # LoRA
    got, _ = token_logprobs_from_hidden(hidden_ND.detach(), weight_VD, tokens_N, chunk_size=4)
    assert torch.allclose(torch.autograd.grad(got.sum(), weight_VD)[0], expected[1])
    with torch.no_grad():
        assert not token_logprobs_from_hidden(hidden_ND, weight_VD, tokens_N)[0].requires_grad


@pytest.mark.parametrize(
    "hidden_dtype, weight_dtype",
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)])
def test_logprobs_are_float32_whatever_the_model(hidden_dtype, weight_dtype):
    hidden_ND, weight_VD, tokens_N, _ = head(n=40, d=16, v=200)
    hidden_ND = hidden_ND.detach().to(hidden_dtype).requires_grad_()
    weight_VD = weight_VD.detach().to(weight_dtype).requires_grad_()
    got, entropy = token_logprobs_from_hidden(hidden_ND, weight_VD, tokens_N, chunk_size=16)
    assert got.dtype == entropy.dtype == torch.float32
    expected, _ = plain_logprobs(hidden_ND, weight_VD, tokens_N)
    # bf16 heads round the logits (|logit| < 32: 2^-8 * 16), never the log-softmax
    tolerance = 0.07 if weight_dtype == torch.bfloat16 else 1e-5
    assert (got - expected).abs().max() < tolerance
    grads = torch.autograd.grad(got.sum(), (hidden_ND, weight_VD))
    assert grads[0].dtype == hidden_dtype and grads[1].dtype == weight_dtype
    exact = torch.autograd.grad(expected.sum(), (hidden_ND, weight_VD))
    for grad, exact_grad in zip(grads, exact):
        error = (grad.double() - exact_grad.double()).norm() / exact_grad.double().norm()
        assert error < (0.05 if torch.bfloat16 in (hidden_dtype, weight_dtype) else 1e-5)


def test_nothing_of_batch_times_vocabulary_is_kept_for_the_backward():
    hidden_ND, weight_VD, tokens_N, _ = head(n=64, d=4, v=97)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        token_logprobs_from_hidden(hidden_ND, weight_VD, tokens_N, chunk_size=8)
    assert kept and max(kept) <= 97 * 4


def test_a_masked_vocabulary_gives_finite_entropy_and_gradient():
    hidden_ND, weight_VD, tokens_N, bias_V = head()
    bias_V = bias_V.detach().clone()
    bias_V[7:] = -math.inf
    got, entropy = token_logprobs_from_hidden(
        hidden_ND, weight_VD, tokens_N % 7, head_bias_V=bias_V, entropy_grad=True
    )
    expected, expected_entropy = plain_logprobs(hidden_ND, weight_VD[:7], tokens_N % 7, bias_V=bias_V[:7])
    assert torch.allclose(got, expected) and torch.allclose(entropy, expected_entropy)
    grads = torch.autograd.grad(got.sum() + entropy.sum(), (hidden_ND, weight_VD))
    assert all(grad.isfinite().all() for grad in grads)


def test_a_wrong_head_or_temperature_is_refused_with_its_value():
    ones, tokens_N = torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="temperature must be > 0, got 0.0"):
        token_logprobs_from_hidden(ones, ones, tokens_N, 0.0)
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 2\)"):
        token_logprobs_from_hidden(ones, ones[:, :2], tokens_N)
