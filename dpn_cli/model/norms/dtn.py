"""Dynamic Token Normalization (arXiv 2112.02624).

Axes: b batch, t tokens, c features, h heads, d features per head, y x rows and columns of the grid.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpn_cli.errors import DpnError
from dpn_cli.model.norms.base import NormOptions, TokenNorm, Tokens, check_heads, head_rms, moments

POOLED = 14  # the grid at which the released code takes its statistics over tokens


class DynamicTokenNorm(TokenNorm):
    """Normalise with a mixture, per head, of LN's statistics and of statistics over a learned neighbourhood.

    Head h has ``mean = lambda * mean_LN + (1 - lambda) * P x`` and ``variance = lambda * var_LN + (1 - lambda) *
    (P x^2 - (P x)^2)``. Here lambda is the sigmoid of a logit that starts at zero, and P (t, t) the softmax over tokens
    j of ``a . (dx, dy, dx^2 + dy^2)``, where (dx, dy) leads from token j to token i. This softmax is a product of one
    over rows and one over columns. P is therefore applied as two small matrices, exactly, at (y + x) / t of the cost.
    The variance over the neighbourhood is clamped at zero against rounding errors.

    Parameters, with the names and order of the released code: `weight`, `bias` (c); ``pos_proj.weight`` (h, 3), the
    a; ``var_norm_weight`` (h), the logits. They start with local attention (ConViT's): each of the first k^2 heads,
    k = floor(sqrt(h)), attends to one position of a k x k neighbourhood. The other heads attend to all tokens, as IN
    does. (The released ``pos_proj.bias`` has no effect: the softmax cancels it.)

    ``NormOptions.dtn="released"`` follows the released code in four points: an RMS of every head first; LN's variance
    over c - 1; separate logits for the mean, ``mean_norm_weight``; and on grids of more than 14 rows or columns the
    statistics of the neighbourhood are taken of tokens averaged to 14. (The released code loses the local start; this
    one does not.)

    Raises `DpnError` when the tokens are no grid, the heads do not divide the features, or a grid cannot be averaged
    to 14.
    """

    mean_norm_weight: nn.Parameter | None

    def __init__(self, features: int, eps: float, tokens: Tokens, options: NormOptions) -> None:
        super().__init__(features, eps)
        check_heads("dtn", features, tokens.heads)
        if tokens.grid is None:
            raise DpnError(
                "--norm dtn: its tokens must form a grid, but a class token is among them; "
                "let it join after these blocks, use --pool gap, or choose another --norm"
            )
        self.heads, self.options = tokens.heads, options
        self.released = options.dtn == "released"
        self.set_grid(tokens.grid)
        self.pos_proj = nn.Linear(3, self.heads, bias=False)
        self.var_norm_weight = nn.Parameter(torch.empty(self.heads))
        has_both = self.released and options.dtn_statistics == "both"
        self.mean_norm_weight = nn.Parameter(torch.empty(self.heads)) if has_both else None

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Set the rows and columns of the grid of tokens. Raises `DpnError` as the constructor does."""
        if self.released and any(side > POOLED and side % POOLED for side in grid):
            raise DpnError(
                f"--norm dtn: the released code averages a grid to {POOLED} rows and columns, which {grid[0]}x"
                f"{grid[1]} patches do not allow; use a multiple of {POOLED} or the paper's equations"
            )
        self.grid = grid
        self.pool = tuple(max(1, side // POOLED) if self.released else 1 for side in grid)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the scale to one, the logits and the shift to zero, and the attention to local."""
        super().reset_parameters()
        for logits in (self.var_norm_weight, self.mean_norm_weight):
            if logits is not None:
                nn.init.zeros_(logits)
        side = math.isqrt(self.heads)
        nn.init.zeros_(self.pos_proj.weight)
        for head in range(side * side):
            x, y = head // side - (side - 1) / 2, head % side - (side - 1) / 2
            self.pos_proj.weight[head] = torch.tensor([2 * x, 2 * y, -1])

    def attention(self, axis: int) -> Tensor:
        """Return P along the rows (axis 0) or columns (1) of the grid, (h, side, side) of the averaged grid."""
        weight = self.pos_proj.weight
        position = torch.arange(self.grid[axis] // self.pool[axis], dtype=weight.dtype, device=weight.device)
        offset = position[:, None] - position
        linear, squared = weight[:, 1 - axis, None, None], weight[:, 2, None, None]
        attention = (linear * offset + squared * offset.square()).softmax(-1)
        # Products with small gradients would be denormal numbers, which take a CPU ten times as long.
        return F.threshold(attention, torch.finfo(attention.dtype).eps ** 2, 0.0)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c) of full precision."""
        if self.released:
            x = head_rms(x, self.heads, self.eps)
        ((mean_ln, var_ln),) = moments(x, 2)
        if self.released:
            var_ln = var_ln * (self.features / (self.features - 1))
        rows, columns = self.grid
        tokens = rearrange(x, "b (y x) (h d) -> b h y x d", y=rows, h=self.heads).contiguous()
        mean_ln, var_ln = (rearrange(s, "b (y x) 1 -> b 1 y x 1", x=columns) for s in (mean_ln, var_ln))
        lambda_var = _head_weights(self.var_norm_weight)
        lambda_mean = _head_weights(self.var_norm_weight if self.mean_norm_weight is None else self.mean_norm_weight)
        if self.options.dtn_statistics == "variance":
            lambda_mean = torch.ones_like(lambda_var)
        y = _Mixture.apply(tokens, self._neighbourhood(tokens), mean_ln, var_ln, lambda_mean, lambda_var, self.eps)
        return self.scale_and_shift(rearrange(y, "b h y x d -> b (y x) (h d)"))

    def _neighbourhood(self, tokens: Tensor) -> Tensor:
        """Return the means of tokens (b, h, y, x, d) and of their squares under P, (2, b, h, y, x, d)."""
        pool_rows, pool_columns = self.pool
        if pool_rows * pool_columns > 1:
            tokens = reduce(tokens, "b h (y p) (x q) d -> b h y x d", "mean", p=pool_rows, q=pool_columns)
        means: Tensor = _Neighbourhood.apply(tokens, self.attention(0), self.attention(1))
        return (
            repeat(means, "s b h y x d -> s b h (y p) (x q) d", p=pool_rows, q=pool_columns)
            if pool_rows * pool_columns > 1
            else means
        )


# The gradients of the next two functions are explicit: autograd would read and write twice as much memory, which
# dominates the time of this norm.


class _Neighbourhood(torch.autograd.Function):
    """Means of tokens (b, h, y, x, d) and of their squares, (2, b, h, y, x, d).

    The weights of the means are attention along rows (h, y, y) and along columns (h, x, x).
    """

    @staticmethod
    def forward(context: Any, tokens: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        pooled = tokens.new_empty((2, *tokens.shape))
        pooled[0] = tokens
        torch.mul(tokens, tokens, out=pooled[1])
        half = (rows @ pooled.flatten(-2)).view_as(pooled)
        context.save_for_backward(pooled, half, rows, columns)
        return columns[:, None] @ half

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        pooled, half, rows, columns = context.saved_tensors
        grad_columns = (gradient @ half.mT).sum((0, 1, 3))
        grad_half = (columns.mT[:, None] @ gradient).flatten(-2)
        grad_rows = (grad_half @ pooled.flatten(-2).mT).sum((0, 1))
        grad_both = (rows.mT @ grad_half).view_as(pooled)
        return grad_both[0].addcmul_(pooled[0], grad_both[1], value=2), grad_rows, grad_columns


class _Mixture(torch.autograd.Function):
    """Standardise tokens (b, h, y, x, d) with DTN's mixture of statistics.

    `neighbourhood` (2, b, h, y, x, d) has the means of tokens and of their squares over the neighbourhood. LN's mean
    and variance are (b, 1, y, x, 1), and their weights in the mixture, `lambda_mean` and `lambda_var`, (h, 1, 1, 1).
    """

    @staticmethod
    def forward(
        context: Any,
        tokens: Tensor,
        neighbourhood: Tensor,
        mean_ln: Tensor,
        var_ln: Tensor,
        lambda_mean: Tensor,
        lambda_var: Tensor,
        eps: float,
    ) -> Tensor:
        mean, square_mean = neighbourhood
        variance = torch.addcmul(square_mean, mean, mean, value=-1).clamp_min_(0)
        root = (variance * (1 - lambda_var)).add_(lambda_var * var_ln + eps).rsqrt_()
        # `y` is saved and returned, so it is not computed in place: torch 2.11's compiler would save its old content.
        y: Tensor = (mean * (lambda_mean - 1)).sub_(lambda_mean * mean_ln).add_(tokens).mul(root)
        context.save_for_backward(y, root, mean, variance, mean_ln, var_ln, lambda_mean, lambda_var)
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        y, root, mean, variance, mean_ln, var_ln, lambda_mean, lambda_var = context.saved_tensors
        grad_neighbourhood = mean.new_empty((2, *mean.shape))
        scratch, grad_var = grad_neighbourhood
        grad_x = gradient * root  # minus the gradient of the mixture's mean
        torch.mul(grad_x, y, out=grad_var).mul_(root).mul_(-0.5)  # the gradient of the mixture's variance
        sum_x, sum_var = grad_x.sum(-1, keepdim=True), grad_var.sum(-1, keepdim=True)
        grad_ln = -(lambda_mean * sum_x).sum(1, keepdim=True), (lambda_var * sum_var).sum(1, keepdim=True)
        grad_lambda_mean = _sum_by_head(torch.mul(grad_x, mean, out=scratch)) - _sum_by_head(sum_x * mean_ln)
        grad_lambda_var = _sum_by_head(sum_var * var_ln) - _sum_by_head(torch.mul(grad_var, variance, out=scratch))
        grad_var.mul_(1 - lambda_var)
        torch.mul(grad_x, lambda_mean - 1, out=scratch).addcmul_(mean, grad_var, value=-2)
        return grad_x, grad_neighbourhood, *grad_ln, grad_lambda_mean, grad_lambda_var, None


def _sum_by_head(x: Tensor) -> Tensor:
    """Sum over all but the heads of (b, h, y, x, d); returns (h, 1, 1, 1)."""
    return x.sum((0, 2, 3, 4))[:, None, None, None]


def _head_weights(logits: Tensor) -> Tensor:
    return logits.sigmoid()[:, None, None, None]
