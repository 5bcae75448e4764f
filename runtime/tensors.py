"""Checks and masked arithmetic on padded tensors, (B, T): rows, tokens."""
import torch

LOG_RATIO_LIMIT = 20.0
ROUNDING = 1e-7  # of float32 numbers of about 1: a reward or an advantage that is smaller is none


def no_branch(what, kind, function):
    """The error of a name that stands in its table while `function` does not know it."""
    return ValueError(f"{what} {kind!r} is allowed, but {function} has no branch for it: add one")


def check(what, shape, *, finite_under=None, **tensors):
    """Every tensor (named by its keyword) is there, has `shape`, and is finite where `finite_under` is True."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise ValueError(f"{what} needs {name}, of shape {tuple(shape)}; it is missing")
        if tensor.shape != shape:
            raise ValueError(f"{what}: {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
        if finite_under is not None and not tensor[finite_under].isfinite().all():
            rows = (~tensor.isfinite() & finite_under).any(1).nonzero().flatten().tolist()
            raise ValueError(f"{what}: {name} has NaN or infinite entries under mask_BT in rows {rows}")


def check_mask(mask_BT):
    if mask_BT.dtype != torch.bool or mask_BT.ndim != 2:
        raise ValueError(f"mask_BT must be a bool tensor (B, T), got {mask_BT.dtype} of shape {tuple(mask_BT.shape)}")


def at_least_float32(tensor):
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def masked(tensor_BT, mask_BT):
    return torch.where(mask_BT, tensor_BT, 0.0)


def floats(tensors):
    """A dict of 0-d tensors as plain floats, in one transfer."""
    return dict(zip(tensors, torch.stack([tensor.detach().double() for tensor in tensors.values()]).tolist()))


def nearly_equal(low, high):
    """Whether rewards between `low` and `high` differ only by what rounding leaves in sums of float32 numbers."""
    return high - low <= ROUNDING * torch.maximum(low.abs(), high.abs()).clamp(min=1)


def clamp_log_ratio(difference):
    # a non-finite log-prob makes the loss NaN, so that the update stops, instead of a healthy-looking clamped number
    return torch.where(difference.isfinite(), difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), torch.nan)


def log_ratio(logprobs_BT, reference_BT, mask_BT):
    """log(pi / reference) clamped to +-20, 0 where masked, NaN where not finite."""
    return clamp_log_ratio(masked(at_least_float32(logprobs_BT), mask_BT) - masked(at_least_float32(reference_BT), mask_BT))


def sequence_log_ratio(log_ratio_BT):
    return log_ratio_BT.sum(1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expand(log_ratio_BT.shape)


def row_mean(values_BT, mask_BT):
    return masked(values_BT, mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
