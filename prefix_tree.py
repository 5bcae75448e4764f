"""Rows that begin alike as a tree: what they share (a group's prompt, instructions, equal first answers) is read once.

One forward pass over the tree's nodes, without padding; only attention sees whole rows again. Keys and values of a shared
node serve all its rows, and their gradients add up there, so that log-probs and gradients are those of separate rows.
"""
import numpy as np
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


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
    node_BT, places, before = np.zeros((len(rows), width), np.int64), [], None
    for row in sorted(range(len(rows)), key=rows.__getitem__):
        length, shared = len(rows[row]), 0
        if before is not None:
            differs = [a != b for a, b in zip(rows[row], rows[before])]
            shared = differs.index(True) if True in differs else len(differs)
            node_BT[row, :shared] = node_BT[before, :shared]
        node_BT[row, shared:length] = len(places) + np.arange(length - shared)
        places += range(row * width + shared, row * width + length)
        before = row
    return torch.from_numpy(node_BT), torch.tensor(places)


def states_before(decoder, tokens_BT, mask_BT) -> torch.Tensor:
    """(N, H): the last hidden state before each token of the mask (at least one), row by row."""
    ends_B = [mask_T.nonzero()[0][-1] if mask_T.any() else 0 for mask_T in mask_BT.cpu().numpy()]
    rows = [tokens_T[:int(end)] for tokens_T, end in zip(tokens_BT.tolist(), ends_B)]  # nobody asks what comes after the last
    node_BT, place_U = (tensor.to(tokens_BT.device) for tensor in tree_of(rows))
    width = node_BT.shape[1]
    hidden_1UH = decoder(input_ids=tokens_BT[:, :width].flatten()[place_U][None], position_ids=(place_U % width)[None],
                         attention_mask=torch.empty(1, 1, 1, 0, device=tokens_BT.device),  # 4-D: none is built from positions
                         use_cache=False, tree=(node_BT, place_U)).last_hidden_state
    return hidden_1UH[0].index_select(0, node_BT[mask_BT[:, 1:width + 1]])
