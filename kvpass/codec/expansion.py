"""What an error in a latent (MLA) costs. Keys and values are linear in the latent; their weights are recovered from a
prompt's tokens, because no cache sees them."""

import torch
from torch import Tensor

_TOKENS_PER_UNKNOWN = 2
_NOT_LINEAR = 1e-2  # relative squared error of keys or values from which the latent is not what they are expanded from
_RIDGE = 1e-6  # of the mean diagonal
_CHECKED = 4  # one in as many tokens is predicted, to see whether weights were found


def queries_of_latent(
    latent: Tensor, rotary: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
) -> Tensor | None:
    """Queries ``[B, 1, R, R]`` float32 under which an error in a latent costs what it costs the output of attention.

    An error e in the latent changes scores by q W_k e and values by W_v e. A change of scores changes the output in
    proportion to how far values are from their mean, so over all heads an error costs
    e^T (sum of var(v) scale^2 W_k^T E[q q^T] W_k + W_v^T W_v) e. The result is a root of that matrix.

    latent, rotary: the prompt's cached tokens, ``[B, 1, T, R]`` and ``[B, 1, T, D_r]``.
    query, key, value: what attention reads, ``[B, H_q, T, D]``, ``[B, H_k, T, D]`` and ``[B, H_k, T, D_v]``.
    scale: of the scores; None is ``D ** -0.5``.

    Returns None if keys and values are not linear in what is cached, or if there are too few tokens to know: fewer than
    2 (R + D_r).
    """
    with torch.autocast(latent.device.type, enabled=False):
        return _queries(latent, rotary, query, key, value, scale)


def _queries(
    latent: Tensor, rotary: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> Tensor | None:
    rank, heads, dim = latent.shape[-1], key.shape[1], key.shape[-1]
    cached = torch.cat([latent, rotary], -1).flatten(0, 2)
    needed = _TOKENS_PER_UNKNOWN * cached.shape[-1]
    if len(cached) < needed or query.shape[1] % heads:
        return None
    some = torch.linspace(0, len(cached) - 1, needed, device=cached.device).long()
    expanded = torch.cat([x.transpose(1, 2).flatten(0, 1)[some] for x in (key, value)], -1).flatten(1).float()
    weights = _regressed(cached[some].float(), expanded)
    if weights is None:
        return None
    to_keys, to_values = weights[:rank].unflatten(-1, (heads, -1)).transpose(0, 1).split([dim, value.shape[-1]], -1)
    scale = dim**-0.5 if scale is None else scale
    seen = query.float().unflatten(1, (heads, -1)).flatten(2, 3)  # [B, H_k, N, D]
    moment = seen.mT @ seen * (scale**2 / seen.shape[2])
    far = (value - value.mean(2, keepdim=True)).float().square().sum(-1).mean(-1)[..., None, None]
    cost = (to_keys @ (moment * far) @ to_keys.mT + to_values @ to_values.mT).sum(1, keepdim=True).double()
    least = _RIDGE * cost.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    root: Tensor = torch.linalg.cholesky_ex(cost + least * torch.eye(rank, device=cost.device))[0]
    return root.mT.float().contiguous()


def _regressed(x: Tensor, y: Tensor) -> Tensor | None:
    """Weights ``[C, O]`` with ``x @ weights`` equal to ``y``, ``[N, C]`` and ``[N, O]``; None if there are none."""
    moment = x.double().mT @ x.double()
    ridge = _RIDGE * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype, device=x.device)
    inverse: Tensor = torch.linalg.inv_ex(moment + ridge)[0]
    weights = (inverse @ x.double().mT).float() @ y
    some = slice(None, None, _CHECKED)
    error = (x[some] @ weights - y[some]).square().sum() / y[some].square().sum()
    return weights if error < _NOT_LINEAR else None
