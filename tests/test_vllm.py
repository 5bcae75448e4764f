"""The vLLM engine against the trainer's own log-probs. One start for each model and way of sending LoRA."""
import gc
import http.server
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import requests
import torch
from peft import LoraConfig, get_peft_model
from test_ranks import torchrun

from conftest import ROOT, train
from engines import vllm as vllm_engine
from engines.vllm import VLLMEngine, VLLMServer, plain_weights, request_seed
from models import load_policy, token_logprobs
from policies.chat import Chat
from rollout import Completion

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(importlib.util.find_spec("vllm") is None,
                                                   reason="vLLM is not installed here: make test-vllm")]
LEAKS = {"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.5, "repetition_penalty": 3.0,
         "max_new_tokens": 2, "eos_token_id": list(range(20))}


def lora_policy(policy, rank=8):
    return get_peft_model(policy, LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear",
                                             task_type="CAUSAL_LM")).eval()


@torch.no_grad()
def perturb(policy):
    """Moves every trained weight, by a twentieth of its spread: embeddings, norms, adapters, all."""
    for parameter in policy.parameters():
        if parameter.requires_grad:
            spread = parameter.std() if parameter.any() else 0.2  # B of a new adapter is all zero
            parameter += 0.05 * spread * torch.randn_like(parameter)


@pytest.fixture(scope="module", params=["tiny-merge", "tiny-adapter", "smollm2-merge", "smollm2-adapter"])
def engine(request, tiny_folder, tmp_path_factory):
    """An engine on a folder whose generation_config.json must not leak in; `engine.prompts` are five prompts, the first
    long enough for the prefix cache."""
    model, lora = request.param.split("-")
    if model == "tiny":
        source = tiny_folder
    else:
        from envs import MissingData
        from policies.smollm2 import smollm2_folder
        try:
            source = smollm2_folder(os.environ.get("FRESHREPLAY_TEST_CACHE") or tmp_path_factory.mktemp("smollm2"))
        except MissingData as missing:
            pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp(request.param) / "model"
    shutil.copytree(source, folder)
    (folder / "generation_config.json").write_text(json.dumps(LEAKS))
    policy, tokenizer = load_policy(folder)
    if lora == "adapter":
        policy = lora_policy(policy)
    engine = VLLMEngine(policy, folder, [tokenizer.eos_token_id], lora=lora, max_model_len=512)
    rng = np.random.default_rng(0)
    if model == "tiny":
        engine.prompts = [rng.integers(6, len(tokenizer), size).tolist() for size in (200, 40, 40, 17, 3)]
    else:
        texts = ["List the planets. " * 28, "Name a fruit.", "What is 2 + 2?", "Write a poem about rain.", "Hi"]
        engine.prompts = [Chat(tokenizer).start(text) for text in texts]
    engine.tokenizer, engine.start = tokenizer, {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    yield engine
    engine.close()
    engine.policy = None
    gc.collect()


@pytest.fixture(autouse=True)
def weights_of_the_start(request):
    """Each test begins with the folder's weights: perturbations on top of each other would blow the policy up."""
    torch.manual_seed(0)
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.policy.load_state_dict(engine.start)
        engine.sync()


def skip_adapter_of_smollm2(engine):
    if engine.lora == "adapter" and len(engine.tokenizer) > 1000:
        pytest.skip("sampling is tested on the other three")


def sample(engine, *, seed=0, new=12, temperature=1.0, prompts=None, stop=()) -> list[Completion]:
    prompts = engine.prompts if prompts is None else prompts
    rows = list(range(len(prompts)))
    return engine.generate(prompts, rows, [seed + row for row in rows], new, temperature, stop)


@torch.no_grad()
def difference(policy, prompts, completions, temperature=1.0) -> float:
    """Largest |engine's log-prob - trainer's| over all sampled tokens."""
    worst = 0.0
    for prompt, completion in zip(prompts, completions):
        tokens_1T = torch.tensor([prompt + completion.tokens])
        mask_1T = torch.zeros_like(tokens_1T, dtype=torch.bool)
        mask_1T[:, len(prompt):] = True
        ours_T = token_logprobs(policy, tokens_1T, mask_1T, temperature)[0][0, len(prompt):]
        worst = max(worst, (ours_T - torch.tensor(completion.logprobs)).abs().max().item())
    return worst


def test_logprobs_are_the_trainers_at_the_start_and_after_updates(engine):
    """Two updates in a row of every trained weight. Before a sync the engine has the old ones: the check can fail."""
    assert difference(engine.policy, engine.prompts, sample(engine)) < 1e-4
    for _ in range(2):
        perturb(engine.policy)
        assert difference(engine.policy, engine.prompts, sample(engine)) > 1e-2
        engine.sync()
        assert difference(engine.policy, engine.prompts, sample(engine)) < 1e-4


def test_the_prefix_cache_is_used_and_forgotten_by_a_sync(engine):
    def cached_tokens():
        [request] = engine.run(engine.prompts[:1], [{"temperature": 1.0, "max_tokens": 1}])
        return request.num_cached_tokens
    before = sample(engine, prompts=engine.prompts[:1])
    assert cached_tokens() > 0
    perturb(engine.policy)
    engine.sync()
    assert cached_tokens() == 0
    after = sample(engine, prompts=engine.prompts[:1])  # this one hits the cache, filled by the new weights
    assert cached_tokens() > 0 and before[0].logprobs != after[0].logprobs
    assert difference(engine.policy, engine.prompts[:1], after) < 1e-4


def test_a_draw_depends_on_seed_and_sequence_only(engine):
    skip_adapter_of_smollm2(engine)
    first = sample(engine, seed=100)
    assert [row.tokens for row in sample(engine, seed=100)] == [row.tokens for row in first]
    assert [row.tokens for row in sample(engine, seed=999)] != [row.tokens for row in first]
    for row in (4, 2):  # alone, and in another order: the same tokens
        assert sample(engine, prompts=engine.prompts[row:row + 1], seed=100 + row)[0].tokens == first[row].tokens
    rows = [3, 1, 4, 0, 2]
    shuffled = engine.generate([engine.prompts[row] for row in rows], rows, [100 + row for row in rows], 12, 1.0)
    assert [completion.tokens for completion in shuffled] == [first[row].tokens for row in rows]
    assert request_seed(1, 2) != request_seed(2, 1) and 0 <= request_seed(2**31, 10**6) < 2**63
    twice = engine.generate(engine.prompts[:1] * 2, [0, 1], [7, 8], 12, 1.0)
    assert twice[0].tokens != twice[1].tokens


def test_logprobs_are_at_the_sampling_temperature(engine):
    for temperature in (0.7, 1.5):
        completions = sample(engine, temperature=temperature)
        assert difference(engine.policy, engine.prompts, completions, temperature) < 1e-4
        assert difference(engine.policy, engine.prompts, completions, 1.0) > 1e-2
    greedy = sample(engine, temperature=0.0)
    assert difference(engine.policy, engine.prompts, greedy) < 1e-4  # at 1, as the transformers engine says
    assert [row.tokens for row in sample(engine, temperature=0.0, seed=9)] == [row.tokens for row in greedy]
    with pytest.raises(ValueError, match="0.001 is below 0.01"):
        sample(engine, temperature=0.001)


def test_a_sampled_stop_token_is_included_and_none_is_invented(engine):
    skip_adapter_of_smollm2(engine)
    normal_stop_ids, engine.stop_ids = engine.stop_ids, []
    try:
        free = sample(engine, new=16)
        assert all(len(row.tokens) == 16 and row.finish_reason == "length" for row in free)
        engine.stop_ids = sorted({free[0].tokens[3], free[1].tokens[7], free[2].tokens[15]})
        reasons = set()
        for row, completion in zip(free, sample(engine, new=16)):
            ends = [place for place, token in enumerate(row.tokens) if token in engine.stop_ids]
            assert completion.tokens == row.tokens[:ends[0] + 1 if ends else 16]
            assert completion.finish_reason == ("stop" if ends else "length")
            assert len(completion.logprobs) == len(completion.tokens)
            reasons.add(completion.finish_reason)
        assert "stop" in reasons
    finally:
        engine.stop_ids = normal_stop_ids


def test_a_stop_string_ends_a_turn_with_the_token_that_completes_it(engine):
    skip_adapter_of_smollm2(engine)
    normal_stop_ids, engine.stop_ids = engine.stop_ids, []
    try:
        free = sample(engine, new=16)
        def text(tokens):
            return engine.tokenizer.decode(tokens, skip_special_tokens=False)
        stop = (text(free[0].tokens[4:6]).strip(), "this never comes")  # a string over two tokens
        stopped = sample(engine, new=16, stop=stop)
        for row, completion in zip(free, stopped):
            ends = [end for end in range(1, 17) if stop[0] in text(row.tokens[:end])]
            assert completion.tokens == row.tokens[:ends[0] if ends else 16]
            assert completion.finish_reason == ("stop" if ends else "length")
        assert stopped[0].finish_reason == "stop"
        assert difference(engine.policy, engine.prompts, stopped) < 1e-4
    finally:
        engine.stop_ids = normal_stop_ids


def test_tokens_come_as_often_as_their_logprobs_say(engine):
    """Chi-square of first tokens against the trainer's distribution at temperature 0.7: the folder's top_k would show.
    And more prompts than vLLM reads at once."""
    if len(engine.tokenizer) > 1000:
        pytest.skip("a small vocabulary is enough")
    draws, prompt = 2000, engine.prompts[3]
    rows = list(range(draws))
    tokens = [row.tokens[0] for row in engine.generate([prompt] * draws, rows, rows, 1, 0.7)]
    with torch.no_grad():
        logits_V = engine.policy(torch.tensor([prompt])).logits[0, -1].double()
    expected_V = draws * torch.softmax(logits_V / 0.7, -1).numpy()
    counts_V = np.bincount(tokens, minlength=len(expected_V))
    large = expected_V >= 5
    observed = np.append(counts_V[large], counts_V[~large].sum())
    expected = np.append(expected_V[large], expected_V[~large].sum())
    assert large.sum() > 5
    chi2, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)  # mean and 4 standard deviations


def renamed(name, tensor):
    return name.replace("norm.weight", "normal.weight"), tensor


def cut(name, tensor):
    return name, tensor[:-1] if name.endswith("down_proj.weight") else tensor


@pytest.mark.parametrize("spoil, error", [(renamed, "normal"), (cut, None)])
def test_a_tensor_of_a_wrong_name_or_shape_is_an_error(engine, monkeypatch, spoil, error):
    if engine.lora == "adapter":
        pytest.skip("sends no full weights")
    monkeypatch.setattr(vllm_engine, "plain_weights", lambda policy: (spoil(*pair) for pair in plain_weights(policy)))
    with pytest.raises((ValueError, RuntimeError, AssertionError), match=error):
        engine.sync()
    monkeypatch.undo()
    engine.sync()
    assert difference(engine.policy, engine.prompts, sample(engine)) < 1e-4


@pytest.mark.parametrize("missing, error", [
    ("model.norm.weight", "no weights for vLLM's model.norm.weight"),  # named
    ("model.layers.1.self_attn.k_proj.weight", "does not have the policy's weights"),  # fused with q, v: by the probe
    ("model.embed_tokens.weight", "model.embed_tokens.weight|does not have the policy's weights")])
def test_a_weight_that_was_not_sent_is_an_error(engine, monkeypatch, missing, error):
    if engine.lora == "adapter":
        pytest.skip("sends no full weights")
    perturb(engine.policy)
    monkeypatch.setattr(vllm_engine, "plain_weights",
                        lambda policy: (pair for pair in plain_weights(policy) if pair[0] != missing))
    with pytest.raises(RuntimeError, match=error):
        engine.sync()
    monkeypatch.undo()
    engine.sync()


def test_the_probe_sees_stale_weights(engine, monkeypatch):
    """The sync does everything but take the new weights."""
    if engine.lora == "adapter":
        sent = vllm_engine.save_adapter
        policy_before = {name: parameter.clone() for name, parameter in engine.policy.named_parameters()}

        def stale(policy, folder):
            now = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    parameter.copy_(policy_before[name])
                sent(policy, folder)
                for name, parameter in policy.named_parameters():
                    parameter.copy_(now[name])
        monkeypatch.setattr(vllm_engine, "save_adapter", stale)
    else:
        old = [(name, tensor.clone()) for name, tensor in plain_weights(engine.policy)]
        monkeypatch.setattr(vllm_engine, "plain_weights", lambda policy: iter(old))
    engine.sync()
    perturb(engine.policy)
    with pytest.raises(RuntimeError, match="differ by .* nats a token from the trainer's, more than 0.001"):
        engine.sync()
    monkeypatch.undo()
    engine.sync()


def test_a_diverged_policy_is_named_as_such(engine):
    with torch.no_grad():
        [parameter for parameter in engine.policy.parameters() if parameter.requires_grad][-1].fill_(float("nan"))
    with pytest.raises(ValueError, match="weights have diverged"):
        engine.sync()
    with pytest.raises(ValueError, match="weights have diverged"):
        sample(engine)


def test_merged_adapters(engine):
    """LoRA over an engine that takes full weights: merged on the way, the trainer's weights stay."""
    if engine.lora == "adapter":
        others = [parameter for name, parameter in engine.policy.named_parameters() if name.endswith("norm.weight")]
        others[0].requires_grad = True
        with pytest.raises(ValueError, match="use lora='merge'"):
            engine.sync()
        others[0].requires_grad = False
        engine.sync()
        return
    base = engine.policy
    engine.policy = lora_policy(base)
    try:
        engine.sync()
        for _ in range(2):
            perturb(engine.policy)
            before = {name: parameter.clone() for name, parameter in engine.policy.named_parameters()}
            engine.sync()
            assert all(torch.equal(before[name], parameter) for name, parameter in engine.policy.named_parameters())
            assert difference(engine.policy, engine.prompts, sample(engine)) < 1e-4
    finally:
        engine.policy = engine.policy.unload()


def test_it_leaves_torch_as_it_was_and_close_can_be_called_twice(engine):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    engine.close()
    engine.close()
    assert not torch.distributed.is_initialized()


# ---------------------------------------------------------------------------------------- over HTTP


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def served(tiny_folder, tmp_path_factory):
    """(url, folder) of a server on the tiny policy, started as the docstring of VLLMServer says."""
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps(LEAKS))
    port, log = free_port(), tmp_path_factory.mktemp("log") / "server.log"
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1"}  # else the first request compiles, for which it needs a C++ compiler
    # the module, not the command `vllm`: vllm-cpu 0.32.0 installs one that does not start
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
               "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
               "--max-model-len", "512", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs",
               "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192",
               "--enable-lora", "--max-lora-rank", "8"]
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    url, deadline = f"http://127.0.0.1:{port}", time.time() + 240
    try:
        while True:
            try:
                if requests.get(url + "/health", timeout=5).status_code == 200:
                    break
            except requests.ConnectionError:
                assert process.poll() is None and time.time() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        yield url, folder
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("lora", ["full", "merge", "adapter"])
def test_a_server_takes_every_update(served, lora, tmp_path, monkeypatch):
    url, folder = served
    torch.manual_seed(1)
    policy, tokenizer = load_policy(folder)
    VLLMServer(url, policy, [], shared_folder=tmp_path).close()  # the folder's weights again, under the adapters
    policy = policy if lora == "full" else lora_policy(policy)
    engine = VLLMServer(url, policy, [tokenizer.eos_token_id], lora=lora.replace("full", "merge"),
                        shared_folder=tmp_path)
    prompts = [np.random.default_rng(0).integers(6, len(tokenizer), size).tolist() for size in (200, 40, 17)]
    seeds = [3, 4, 5]
    for temperature in (1.0, 0.7):
        perturb(policy)
        completions = engine.generate(prompts, [0, 1, 2], seeds, 12, temperature)
        assert difference(policy, prompts, completions, temperature) > 1e-2
        engine.sync()
        completions = engine.generate(prompts, [0, 1, 2], seeds, 12, temperature)
        assert difference(policy, prompts, completions, temperature) < 1e-4
    assert [row.tokens for row in engine.generate(prompts[::-1], [2, 1, 0], seeds[::-1], 12, 0.7)][::-1] == \
        [row.tokens for row in completions]
    engine.stop_ids = []
    free = engine.generate(prompts, [0, 1, 2], seeds, 12, 0.7)
    assert all(len(row.tokens) == 12 and row.finish_reason == "length" for row in free)
    engine.stop_ids, ends = [free[0].tokens[5]], free[0].tokens.index(free[0].tokens[5]) + 1
    stopped = engine.generate(prompts, [0, 1, 2], seeds, 12, 0.7)[0]
    assert stopped.tokens == free[0].tokens[:ends] and stopped.finish_reason == "stop"
    engine.stop_ids, text = [], tokenizer.decode(free[0].tokens[4:6])
    stopped = engine.generate(prompts, [0, 1, 2], seeds, 12, 0.7, (text,))[0]
    assert stopped.finish_reason == "stop" and tokenizer.decode(stopped.tokens).endswith(text)
    assert len(stopped.tokens) <= 6 and stopped.tokens == free[0].tokens[:len(stopped.tokens)]
    # a sync that sends what was there before: the probe says so
    old = [(name, tensor.clone()) for name, tensor in plain_weights(policy)]
    if lora == "adapter":
        vllm_engine.save_adapter(policy, str(tmp_path / "old"))
    perturb(policy)
    monkeypatch.setattr(vllm_engine, "plain_weights", lambda policy: iter(old))
    monkeypatch.setattr(vllm_engine, "save_adapter",
                        lambda policy, folder: shutil.copytree(tmp_path / "old", folder, dirs_exist_ok=True))
    with pytest.raises(RuntimeError, match="the vLLM server does not have the policy's weights"):
        engine.sync()
    monkeypatch.undo()
    engine.close()
    engine.close()
    assert not list(tmp_path.glob("freshreplay_*"))


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers from a list: (status, body, headers), or None to hang up; repeats the last one."""
    answers, asked = [], []

    def do_POST(self):
        self.asked.append(self.path)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.rfile.read(int(self.headers["Content-Length"]))
        if answer is None:
            self.connection.close()
            return
        status, body, headers = answer
        self.send_response(status)
        for name, value in (headers | {"Content-Length": len(body)}).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("answers, error", [
    ([(404, b"{}", {})], "answered /x with 404 .*VLLMServer's docstring"),
    ([(500, b"out of memory", {})], "with 500: out of memory"),
    ([(302, b"", {"Location": "http://127.0.0.1:1/elsewhere"})], "with 302"),
    ([(200, b"{ not JSON", {})], "is not JSON"),
    ([None, (200, b'{"fine": 1}', {})], None)])
def test_what_a_bad_server_says_is_an_error(answers, error, monkeypatch):
    monkeypatch.setattr(vllm_engine.time, "sleep", lambda seconds: None)
    Answer.answers, Answer.asked = answers, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = object.__new__(VLLMServer)
        engine.url, engine.session, engine.timeout = f"http://127.0.0.1:{server.server_port}", requests.Session(), 5
        if error:
            with pytest.raises(RuntimeError, match=error):
                engine.ask("/x", {"a": 1})
            assert len(Answer.asked) == 1
        else:  # it hung up once
            assert engine.ask("/x", {"a": 1}) == {"fine": 1} and len(Answer.asked) == 2
        server.shutdown()
    with pytest.raises(RuntimeError, match="did not answer /x"):
        engine.ask("/x", {"a": 1})


# ---------------------------------------------------------------------------------------- the real command line


def metrics_of(run) -> list[dict]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


def check_first_ratios(lines):
    """The sampler's log-probs are the trainer's: the ratio of an iteration's first update is 1."""
    values = [line["fresh/first_max_abs_ratio_minus_1"] for line in lines]
    assert any(value is not None for value in values), "no iteration had an update"
    assert all(value < 1e-3 for value in values if value is not None), values


def test_a_lora_training_run(tmp_path, quick_flags):
    train("--engine", "vllm", "--iterations", "3", "--lora-rank", "4", "--engine-options", "lora_sync", "adapter", "--lr", "1e-3",
          "--runs-dir", tmp_path, "--name", "lora", *quick_flags)
    lines = metrics_of(tmp_path / "lora")
    assert len(lines) == 3
    check_first_ratios(lines)


@pytest.mark.slow
def test_each_of_two_processes_samples_with_its_own_engine(tmp_path, quick_flags):
    """Ratios and differences are of the rows of both; each plays half of the problems."""
    done = torchrun("--engine", "vllm", "--iterations", 2, "--runs-dir", tmp_path, "--name", "two", *quick_flags)
    assert "processes: 2" in done.stdout and "Exception ignored" not in done.stderr
    lines = metrics_of(tmp_path / "two")
    assert len(lines) == 2 and all(line["fresh/episodes"] == 24 for line in lines)
    check_first_ratios(lines)


@pytest.mark.slow
def test_two_processes_share_one_server(served, tmp_path, quick_flags):
    """One of them sends the adapter and takes it back; the run ends well, and the server is as it was."""
    url, folder = served
    torchrun(*quick_flags, "--engine", url, "--model", folder, "--env-options", "prompt", "tiny", "--max-new-tokens", 6,
             "--context-length", 512, "--lora-rank", 4, "--engine-options", "lora_sync", "adapter", "shared_folder", tmp_path, "--iterations", 2,
             "--eval-problems", 4, "--runs-dir", tmp_path, "--name", "two")
    lines = metrics_of(tmp_path / "two")
    assert len(lines) == 2 and all(line["fresh/episodes"] == 24 for line in lines)
    check_first_ratios(lines)
    assert [model["id"] for model in requests.get(url + "/v1/models", timeout=5).json()["data"]] == [str(folder)]


def test_a_training_run_that_is_interrupted_ends_at_once(tmp_path, quick_flags):
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--engine", "vllm", "--iterations", "1000", "--name", "full",
         "--runs-dir", str(tmp_path), *quick_flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background jobs ignore it
    try:
        deadline = time.time() + 240
        while len(metrics_of(tmp_path / "full")) < 3 and process.poll() is None and time.time() < deadline:
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode not in (0, -9), output
    lines = metrics_of(tmp_path / "full")
    assert len(lines) >= 3, output
    check_first_ratios(lines)
    assert "Exception ignored" not in output and "process group" not in output, output
