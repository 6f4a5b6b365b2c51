"""The operators that a part of the lab's transformer runs, as FLOPs and bytes, from sizes alone.

One list per layer and direction, in float32, for one of t tensor-parallel ranks. Matrix products
count 2 m n k FLOPs; every operator reads its inputs and writes its outputs once. Symbols: n tokens
of the microbatch (B T), D width, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from labkit.devices.profiles import Profile
from labkit.models.config import ModelConfig

VALUE_BYTES = 4
INDEX_BYTES = 8


class Operator(NamedTuple):
    """One kernel."""

    flops: int
    num_bytes: int


def operators_s(operators: Iterable[Operator], profile: Profile) -> float:
    """Seconds that they take one after the other on the profile's device."""
    return sum(profile.operator_s(operator.flops, operator.num_bytes) for operator in operators)


def _values(count: int) -> Operator:
    """An operator that only moves so many float32 values."""
    return Operator(0, count * VALUE_BYTES)


@dataclass(frozen=True)
class LayerOperators:
    """Operators of one microbatch on one tensor-parallel rank.

    Args:
        config: of the whole model.
        rows: sequences B of the microbatch.
        tensor: ranks t that share each matrix.
        sequence: whether they share the tokens between the layers, too.
    """

    config: ModelConfig
    rows: int
    tensor: int = 1
    sequence: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.config.context

    @property
    def activation_bytes(self) -> int:
        """Of (B, T, D): what is reduced, gathered, and sent from stage to stage."""
        return self.tokens * self.config.width * VALUE_BYTES

    @property
    def _between(self) -> int:
        """Values that this rank holds between the layers."""
        return self.tokens * self.config.width // (self.tensor if self.sequence else 1)

    @property
    def _widths(self) -> tuple[int, int, int]:
        """D, and this rank's shares of D and H."""
        D = self.config.width
        return D, D // self.tensor, self.config.expansion * D // self.tensor

    def block_forward(self) -> list[Operator]:
        D, d, h = self._widths
        linears = [self._product(D, d)] * 3 + [self._product(d, D)]
        linears += [self._product(D, h), self._product(h, D)]
        norms = [_values(2 * self._between)] * 2
        between = [_values(3 * self._between)] * 2  # added to the residual
        if self.tensor > 1:
            between += self._reduced() * 2
        gelu = _values(2 * self.tokens * h)
        return [*linears, self._attention(2, 4), gelu, *norms, *between]

    def block_backward(self) -> list[Operator]:
        D, d, h = self._widths
        operators = []
        for inner, outer in ((D, d), (D, d), (D, d), (d, D), (D, h), (h, D)):
            rows_of_bias = self._between if outer == D and self.tensor > 1 else self.tokens * outer
            operators += [self._product(inner, outer)] * 2 + [_values(rows_of_bias)]
        # query, key and value meet; two residuals
        sums = [_values(3 * self.tokens * D)] * 2 + [_values(3 * self._between)] * 2
        norms = [_values(3 * self._between)] * 2
        gathered = self._gathered() * 2 if self.sequence else []
        gelu = _values(3 * self.tokens * h)
        return [*operators, self._attention(5, 8), gelu, *sums, *norms, *gathered]

    def _product(self, inner: int, outer: int) -> Operator:
        n = self.tokens
        values = n * inner + inner * outer + n * outer
        return Operator(2 * n * inner * outer, values * VALUE_BYTES)

    def _attention(self, products: int, tensors: int) -> Operator:
        """So many products of (T, T) scores, so many tensors (B, T, d) read and written."""
        d = self._widths[1]
        flops = products * 2 * self.tokens * self.config.context * d
        return Operator(flops, tensors * self.tokens * d * VALUE_BYTES)

    def _reduced(self) -> list[Operator]:
        """What a row-parallel layer runs beside its product: the bias, or joining the tokens."""
        if self.sequence:
            return self._gathered() * 2
        return [_values(2 * self.tokens * self.config.width)] * 2  # reshaped; the bias added

    def _gathered(self) -> list[Operator]:
        """Tokens come, or go, ordered by rank, and are laid out anew."""
        return [_values(2 * self.tokens * self.config.width)]

    def embed_forward(self) -> list[Operator]:
        D, T = self.config.width, self.config.context
        n = self.tokens
        return [_values(2 * n * D), _values(2 * T * D), _values((2 * n + T) * D)]

    def embed_backward(self) -> list[Operator]:
        D, T, V = self.config.width, self.config.context, self.config.vocabulary
        n = self.tokens
        return [_values((n + T) * D), _values(2 * T * D), _values((n + V) * D)]

    def head_forward(self) -> list[Operator]:
        """Norm, logits and loss."""
        D, V, n = self.config.width, self.config.vocabulary, self.tokens
        loss = [_values(2 * n * V)] * 2 + [_values(n * V)]
        return [_values(2 * self._between), self._product(D, V), *loss]

    def head_backward(self) -> list[Operator]:
        D, V, n = self.config.width, self.config.vocabulary, self.tokens
        loss = [_values(2 * n * V), _values(3 * n * V)]
        return [*loss, *[self._product(D, V)] * 2, _values(3 * self._between)]


# mul_ twice, lerp_, addcmul_, sqrt, div, add_, addcdiv_: float32 values moved per parameter
_ADAMW_VALUES = (2, 2, 3, 4, 2, 2, 2, 4)


def adamw_operators(sizes: Iterable[int]) -> list[Operator]:
    """AdamW's loop over parameters of so many elements; each has a step counter of its own."""
    operators = []
    for size in sizes:
        operators += [_values(2), _values(1)]
        operators += [_values(values * size) for values in _ADAMW_VALUES]
    return operators
