"""Policies: loading one, padding a batch, log-probs of its tokens, the critic."""
import copy
import functools
import logging
import os
from pathlib import Path

import numpy as np
import torch
from peft import PeftConfig, PeftModel
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from envs import MissingData
from runtime.tensors import at_least_float32
from runtime.watch import bad_weights

transformers_logging.disable_progress_bar()  # ours is the only one on the screen
logging.getLogger("transformers.configuration_utils").addFilter(  # Idefics3's own default contradicts itself; ours does not
    lambda record: "got 128002" not in record.getMessage())


def collate(rows: list[dict], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad rows of equal keys on the right: {"tokens": (T,), ...} each -> {"tokens": (B, T), ...}.

    >>> collate([{"tokens": [5, 6], "mask": [False, True]}, {"tokens": [7], "mask": [True]}], pad_id=0)["tokens"]
    tensor([[5, 6],
            [7, 0]])
    """
    return {key: torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row[key]) for row in rows], batch_first=True,
                                                 padding_value=pad_id if key == "tokens" else 0)
            for key in rows[0] if key != "images"}


def pixel_inputs(image_processor, images: list[list | None], device="cpu") -> dict[str, torch.Tensor]:
    """Model inputs of the images of a batch's rows, in the order of their placeholders; {} without images. Made anew from the
    stored (H, W, 3) uint8 pixels each time: what is trained on is what was seen."""
    flat = [image for row in images for image in row or ()]
    if not flat:
        return {}
    inputs = image_processor(images=flat, return_tensors="pt")
    return {name: tensor.to(device) for name, tensor in inputs.items() if name not in ("rows", "cols")}


def banned_tokens(config) -> list[int]:
    """Tokens that only stand for an image: a sampled one would have no pixels. Neither engine nor trainer gives them
    probability. [] for a model of text."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return [getattr(config, name) for name in names if getattr(config, name, None) is not None]


def output_bias(model) -> torch.Tensor | None:
    """(V,) bias of the logits: the head's own, and -1e9 for banned tokens; None where there is neither."""
    head, banned = model.get_output_embeddings(), banned_tokens(model.config)
    if not banned:
        return head.bias
    bias_V = torch.zeros(head.weight.shape[0], device=head.weight.device) if head.bias is None else head.bias.clone()
    bias_V[banned] = -1e9
    return bias_V


def backbone(model):
    """The policy without its head; a vision-language model's with its eyes."""
    if not banned_tokens(model.config):
        return model.get_decoder()
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model


def hidden_states(body, tokens_BT, pixels: dict | None = None) -> torch.Tensor:
    """(B, T, H) final hidden states of a `backbone`."""
    if pixels and "image_grid_thw" in pixels:  # the Qwen family's positions need to know which tokens are an image
        pixels = pixels | {"mm_token_type_ids": (tokens_BT == body.config.image_token_id).int()}
    return body(input_ids=tokens_BT, use_cache=False, **(pixels or {})).last_hidden_state


def states_before(body, tokens_BT, mask_BT, pixels: dict | None = None, share: bool = True) -> torch.Tensor:
    """(N, H): the final hidden state before each token of the mask, which predicts it."""
    if share and not pixels and knows_trees(body) and mask_BT.any():
        return tree_states_before(body, tokens_BT, mask_BT)
    return hidden_states(body, tokens_BT, pixels)[:, :-1][mask_BT[:, 1:]]


def token_logprobs(model, tokens_BT, mask_BT, temperature: float = 1.0, entropy_grad: bool = False,
                   pixels: dict | None = None, share: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each masked token given those before it, and the entropy there (with a gradient only if asked for); (B, T)
    float32, 0 where the mask is False. Rows are padded on the right: nothing real looks at the padding. `pixels`: see
    `pixel_inputs`. `share`: what several rows begin with is read once, where the model allows it."""
    states_NH = states_before(backbone(model), tokens_BT, mask_BT, pixels, share)
    logprobs_N, entropy_N = token_logprobs_from_hidden(states_NH, model.get_output_embeddings().weight,
                                                       tokens_BT[:, 1:][mask_BT[:, 1:]], temperature, output_bias(model),
                                                       entropy_grad=entropy_grad)
    zeros_BT = torch.zeros(tokens_BT.shape, device=tokens_BT.device)
    return zeros_BT.masked_scatter(mask_BT, logprobs_N), zeros_BT.masked_scatter(mask_BT, entropy_N)


def token_logprobs_from_hidden(hidden_ND, head_weight_VD, tokens_N, temperature=1.0, head_bias_V=None, chunk_size=None,
                               entropy_grad=False):
    """(log-probs (N,), entropies (N,)), float32, of `tokens_N` under softmax((hidden @ weight.T + bias) / temperature). Holds the
    float32 logits of `chunk_size` tokens at a time and recomputes them in the backward; gradients are exact."""
    N, V = hidden_ND.shape[0], head_weight_VD.shape[0]
    if hidden_ND.shape != (N, head_weight_VD.shape[-1]) or tokens_N.shape != (N,):
        raise ValueError(f"hidden_ND {tuple(hidden_ND.shape)}, head_weight_VD {tuple(head_weight_VD.shape)} and "
                         f"tokens_N {tuple(tokens_N.shape)} must be (N, D), (V, D) and (N,)")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    chunk_size = chunk_size or max(1024 if hidden_ND.is_cuda else 256, 2**23 // V)  # small vocabularies: one chunk
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return ChunkedLogProbs.apply(hidden_ND, head_weight_VD, head_bias_V, tokens_N.long(), float(temperature),
                                      chunk_size, entropy_grad)


class ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, tokens_N, temperature, chunk_size, entropy_grad):
        logprobs_N, entropy_N, max_N, log_sum_N = at_least_float32(hidden_ND.new_empty(4, len(tokens_N))).unbind()
        for rows in chunks(tokens_N, chunk_size):
            logits_CV = logits_of(hidden_ND[rows], weight_VD, bias_V, temperature)
            chosen_C = logits_CV.gather(1, tokens_N[rows, None]).squeeze(1)
            max_N[rows] = max_C = logits_CV.amax(1)
            # e^-100 vanishes in the sums; the clamp keeps 0 * -inf out of the entropy
            logits_CV.sub_(max_C[:, None]).clamp_(min=-100.0)
            exp_CV = logits_CV.exp()
            sum_C = exp_CV.sum(1)
            log_sum_N[rows] = log_sum_C = sum_C.log()
            entropy_N[rows] = log_sum_C - exp_CV.mul_(logits_CV).sum(1) / sum_C
            logprobs_N[rows] = chosen_C - max_C - log_sum_C  # one by one: their sum loses digits where logits are large
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, tokens_N, max_N, log_sum_N, entropy_N)
        ctx.settings = temperature, chunk_size, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs_N, grad_entropy_N):
        hidden_ND, weight_VD, bias_V, tokens_N, max_N, log_sum_N, entropy_N = ctx.saved_tensors
        temperature, chunk_size, entropy_grad = ctx.settings
        grad_hidden_ND, grad_weight_VD, grad_bias_V = (
            at_least_float32(torch.zeros_like(tensor)) if needed else None
            for tensor, needed in zip((hidden_ND, weight_VD, bias_V), ctx.needs_input_grad))
        for rows in chunks(tokens_N, chunk_size):
            logprobs_CV = logits_of(hidden_ND[rows], weight_VD, bias_V, temperature)
            logprobs_CV.sub_(max_N[rows, None]).sub_(log_sum_N[rows, None])
            grad_C1 = grad_logprobs_N[rows, None]
            if entropy_grad:  # dH / dlogit = -p (log p + H)
                slope_CV = logprobs_CV.clamp(min=-100.0).add_(entropy_N[rows, None]).mul_(grad_entropy_N[rows, None])
                grad_CV = logprobs_CV.exp_().mul_(slope_CV.add_(grad_C1).neg_())
            else:
                grad_CV = logprobs_CV.exp_().mul_(-grad_C1)
            grad_CV.scatter_add_(1, tokens_N[rows, None], grad_C1).div_(temperature)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(weight_VD.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] = (grad_CV @ weight_VD).to(grad_hidden_ND.dtype)
            if grad_weight_VD is not None:
                hidden_CD = hidden_ND[rows].to(weight_VD.dtype)
                if grad_weight_VD.dtype == weight_VD.dtype:
                    grad_weight_VD.addmm_(grad_CV.T, hidden_CD)
                else:
                    grad_weight_VD += grad_CV.T @ hidden_CD
        grads = zip((grad_hidden_ND, grad_weight_VD, grad_bias_V), (hidden_ND, weight_VD, bias_V))
        return *(grad if grad is None else grad.to(like.dtype) for grad, like in grads), None, None, None, None


def chunks(tokens_N, size):
    return [slice(start, start + size) for start in range(0, len(tokens_N), size)]


def logits_of(hidden_CD, weight_VD, bias_V, temperature):
    logits_CV = at_least_float32(hidden_CD.to(weight_VD.dtype) @ weight_VD.T)
    if bias_V is not None:
        logits_CV += bias_V
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def recompute_layers(module):
    """Gradient checkpointing: layers keep no activations but compute them again in the backward pass. transformers' own does so in
    training mode only, which would turn dropout on as well."""
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"--gradient-checkpointing: {type(module).__name__} has no layers that transformers could compute again")
    for layer in layers:
        layer.forward = functools.partial(recomputed, layer.forward)


def recomputed(forward, *arguments, **named):
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(forward, *arguments, use_reentrant=False, **named)


class Critic(torch.nn.Module):
    """A value head on its own copy of the policy's backbone: V of the state before each masked token, (B, T) float32."""

    def __init__(self, policy):
        super().__init__()
        self.backbone = copy.deepcopy(backbone(policy))  # under LoRA: the frozen weights with adapters of its own
        self.head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)  # values start at 0, not at noise
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, tokens_BT, mask_BT, pixels=None):
        values_N = self.head(states_before(self.backbone, tokens_BT, mask_BT, pixels).float()).squeeze(-1)
        return torch.zeros(tokens_BT.shape, device=tokens_BT.device).masked_scatter(mask_BT, values_N)


def micro_batches(lengths: list[int], max_tokens: int, prompts=None) -> list[list[int]]:
    """Indices of rows, sorted by length and cut into padded batches of at most `max_tokens` (or a single row), so that
    padded tokens are fewest; a batch counts as max_tokens / 16 more, for what it costs beside its tokens.

    With `prompts`, the tokens that each row begins with, rows of one prompt stay side by side: it counts once a batch, and
    padding, which only attention sees then, a quarter.

    >>> micro_batches([5, 2, 9, 2], max_tokens=10)
    [[2], [0], [1, 3]]
    """
    padding, prompts, longest = 1 / 4 if prompts else 1, prompts or [()] * len(lengths), {}
    for prompt, length in zip(prompts, lengths):
        longest[prompt] = max(length, longest.get(prompt, 0))
    order = sorted(range(len(lengths)), key=lambda row: (-longest[prompts[row]], prompts[row], -lengths[row]))
    again = [len(prompts[row]) * (prompts[row] == prompts[before]) for before, row in zip(order, order[1:])] + [0]
    best = [(0.0, 0)]  # of the first n rows: the least cost, and where its last batch starts
    for end in range(1, len(order) + 1):
        options, width, tokens = [], 0, again[end - 1]
        for start in range(end - 1, -1, -1):
            rows, width = end - start, max(width, lengths[order[start]])
            if rows > 1 and rows * width > max_tokens:
                break
            tokens += lengths[order[start]] - again[start]
            options.append((best[start][0] + padding * rows * width + (1 - padding) * tokens + max_tokens / 16, start))
        best.append(min(options))
    batches, end = [], len(order)
    while end:
        start = best[end][1]
        batches.append(order[start:end])
        end = start
    return batches[::-1]


def base_of(path: str | Path) -> str | Path:
    """Where the weights under a LoRA adapter are, and the model's configuration; the path itself where there is no adapter."""
    if not (Path(path) / "adapter_config.json").is_file():
        return path
    base = Path(path) / "base"
    return base if base.is_dir() else PeftConfig.from_pretrained(path).base_model_name_or_path


def load_policy(path: str | Path, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False):
    """(model, tokenizer) of a Hugging Face folder or hub id (a LoRA adapter comes merged into its base), in eval mode for good:
    dropout would make the first ratio of an update differ from 1. A model that takes images comes with its processor instead.
    MissingData, with a sentence, when there is nothing to load; ValueError where weights are pickled, or where the model brings
    code of its own and `trust_remote_code` is off."""
    folder, trust = Path(path), {"trust_remote_code": trust_remote_code}
    adapter, whole = (folder / "adapter_config.json").is_file(), (folder / "config.json").is_file()
    if (adapter or whole) and not any(folder.glob("adapter_model.safetensors" if adapter else "model*.safetensors")):
        raise ValueError(f"{path} has no weights in .safetensors, and pickled ones are not loaded: they could run code")
    base = base_of(path)
    try:
        if hasattr(AutoConfig.from_pretrained(base, **trust), "vision_config"):
            processor, kind = AutoProcessor.from_pretrained(path, **trust), AutoModelForImageTextToText
        else:
            processor, kind = AutoTokenizer.from_pretrained(path, **trust), AutoModelForCausalLM
        model = kind.from_pretrained(base, dtype=dtype, use_safetensors=True, **trust)
        tokenizer = getattr(processor, "tokenizer", processor)
        if adapter:
            if len(tokenizer) > model.get_input_embeddings().num_embeddings:  # it was trained with more tokens than its base has
                model.resize_token_embeddings(len(tokenizer))
            model = PeftModel.from_pretrained(model, path).merge_and_unload()
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"{path} brings its own Python code, which runs only with --trust-remote-code True: read it first, "
                             "it can do whatever you may do") from error
        if adapter:
            raise MissingData(f"the LoRA adapter {str(path)!r} needs its base model, {str(base)!r}, which cannot be loaded "
                              f"({str(error).splitlines()[0]}): put it back, or change base_model_name_or_path in its "
                              "adapter_config.json") from error
        if whole:
            raise
        raise MissingData(f"no model {str(path)!r}: it is neither a folder with a config.json nor a hub id that can be reached "
                          f"({str(error).splitlines()[0]})") from error
    if tokenizer.pad_token_id is None:  # Llama 3; rows are masked by their lengths, so any token will do
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {path} has neither a pad token nor an end token; set one and save it again")
        print(f"{path}: its tokenizer has no pad token; rows are filled with its end token, {tokenizer.eos_token}")
        tokenizer.pad_token = tokenizer.eos_token
    if not processor.chat_template:
        raise ValueError(f"the tokenizer of {path} has no chat template; take an instruct model, or set tokenizer.chat_template")
    if bad := bad_weights(model):
        raise ValueError(f"{path}: not finite: {bad}; nothing can be learnt from there, take another checkpoint")
    check_head(model, path)
    return model.eval(), processor


@torch.no_grad()
def check_head(model, path):
    """Log-probs are taken from the last hidden state and the output matrix alone. ValueError for a model that does more to its
    logits (scales or caps them): its ratios would look right while another policy was trained."""
    tokens_1T = torch.arange(8)[None].to(model.device) % model.config.get_text_config().vocab_size
    ours_V = model.get_output_embeddings()(model.get_decoder()(input_ids=tokens_1T).last_hidden_state[0, -1]).float()
    theirs_V = model(input_ids=tokens_1T).logits[0, -1].float()
    if not torch.allclose(ours_V, theirs_V, rtol=1e-2, atol=1e-2):
        raise ValueError(f"{path}: this kind of model ({type(model).__name__}) scales or caps its logits, which the log-probs "
                         "here do not know; take another model, or teach models.token_logprobs and HFEngine.draw what it does")


def attention_kinds(config) -> set[str]:
    """Of a text model's layers: {"full_attention"}, or also sliding windows and others."""
    return set(getattr(config, "layer_types", None) or
               ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"])


def knows_trees(decoder) -> bool:
    """Whether the decoder's attention can be told which nodes a row has: of text alone, and torch's full attention in each
    layer, called by transformers' own interface."""
    config = decoder.config
    return (config.get_text_config() is config and getattr(decoder, "_supports_attention_backend", False)
            and config._attn_implementation == "sdpa" and attention_kinds(config) == {"full_attention"})


def tree_attention(module, query, key, value, attention_mask, tree=None, **options):
    """torch's attention; with `tree` over its rows: (1, heads, U, head dim) of the nodes to (1, U, heads, head dim)."""
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    node_BT, place_U = tree
    rows = [states[0].transpose(0, 1).float().index_select(0, node_BT.flatten())  # float: gradients of all rows add up here
            .to(states.dtype).unflatten(0, node_BT.shape).transpose(1, 2) for states in (query, key, value)]
    mixed_BTHD, _ = sdpa_attention_forward(module, *rows, None, **options)  # causal; rows are padded on the right
    return mixed_BTHD.flatten(0, 1).index_select(0, place_U)[None], None


ALL_ATTENTION_FUNCTIONS.register("sdpa", tree_attention)


def tree_of(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(node of each token (B, T), place of each node's first token in the flattened rows (U,)). Sorted, a row shares most
    with the one before it.

    >>> tree_of([[5, 6, 7], [5, 6, 8], [9]])
    (tensor([[0, 1, 2],
            [0, 1, 3],
            [4, 0, 0]]), tensor([0, 1, 2, 5, 6]))
    """
    width = max(map(len, rows))
    node_BT, places, before = np.zeros((len(rows), width), np.int64), [], 0
    for row in sorted(range(len(rows)), key=rows.__getitem__):
        length = len(rows[row])
        shared = len(os.path.commonprefix([rows[row], rows[before]])) if places else 0  # of any lists, not of paths only
        node_BT[row, :shared] = node_BT[before, :shared]
        node_BT[row, shared:length] = len(places) + np.arange(length - shared)
        places += range(row * width + shared, row * width + length)
        before = row
    return torch.from_numpy(node_BT), torch.tensor(places)


def tree_states_before(decoder, tokens_BT, mask_BT) -> torch.Tensor:
    """(N, H): the last hidden state before each token of the mask (at least one), row by row."""
    ends_B = [mask_T.nonzero()[0][-1] if mask_T.any() else 0 for mask_T in mask_BT.cpu().numpy()]
    rows = [tokens_T[:int(end)] for tokens_T, end in zip(tokens_BT.tolist(), ends_B)]  # nobody asks what comes after the last
    node_BT, place_U = (tensor.to(tokens_BT.device) for tensor in tree_of(rows))
    width = node_BT.shape[1]
    hidden_1UH = decoder(input_ids=tokens_BT[:, :width].flatten()[place_U][None], position_ids=(place_U % width)[None],
                         attention_mask=torch.empty(1, 1, 1, 0, device=tokens_BT.device),  # 4-D: none is built from positions
                         use_cache=False, tree=(node_BT, place_U)).last_hidden_state
    return hidden_1UH[0].index_select(0, node_BT[mask_BT[:, 1:width + 1]])
