"""The tokens of a batch: which are real, which document each belongs to, and where it stands.

    rows with pads               real        [B, past + S]
    documents packed in one row  cu_seqlens  [n + 1]
    documents told by positions  starts      [B or 1, S], where each token's document starts

A sample is a row less its pads, or a document between two of `cu_seqlens`. Kernels' intervals,
masks, norms over samples and draws of them are made from this, each in its own place above.

Shapes: B rows, S tokens of a row, n documents; with a cache, S new tokens after `past` old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_map

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a batch [B, S], on one device.

    What is made with `describe_tokens`, `padded_tokens` or `packed_tokens` is checked. On the CPU,
    in pinned memory, it can be read without waiting for a GPU, and be copied there without it.

    Attributes:
        rows: B.
        length: S.
        real: [B, past + S] boolean, False on pads; None where all tokens are real.
        cu_seqlens: [n + 1] integers, 0 = c_0 <= ... <= c_n = S, the bounds of documents packed in
            a batch of one row; None where a sample is a row. With `real` those of pads stand last,
            are no samples, and nor are the empty ones among them.
        position_ids: [B or 1, S] int64 where they were given; see `positions`.
        restarts: [B or 1, S] int64, where the document of each token starts, of documents that
            nothing but `position_ids` tells; see `starts`.
        past: tokens of each row that a cache holds, before those of the batch.
        holes: whether pads may stand between the real tokens of a row.
        longest: tokens that no packed document exceeds, where the host is not to ask for their
            lengths; None where it may.
        device: where the tensors are.
        given_bounds: `cu_seqlens` where they were before they were moved.
    """

    rows: int
    length: int
    real: Tensor | None = None
    cu_seqlens: Tensor | None = None
    position_ids: Tensor | None = None
    restarts: Tensor | None = None
    past: int = 0
    holes: bool = True
    longest: int | None = None
    device: torch.device = CPU
    given_bounds: Tensor | None = field(default=None, repr=False)

    @property
    def packed(self) -> bool:
        """Whether samples are documents of one row."""
        return self.cu_seqlens is not None

    @property
    def count(self) -> int:
        """Number of samples; with `real` and packed documents the host has to look."""
        if self.cu_seqlens is None:
            return self.rows
        return len(self.cu_seqlens) - 1 if self.real is None else len(self.sample_bounds)

    # -- on the host: who asks a device has to wait for it

    @cached_property
    def bounds(self) -> list[int] | None:
        """`cu_seqlens` as numbers; None where a sample is a row."""
        given = self.cu_seqlens if self.given_bounds is None else self.given_bounds
        return None if given is None else given.tolist()

    @cached_property
    def sample_bounds(self) -> list[tuple[int, int]]:
        """Start and stop of each sample in its row, whose real tokens stand together."""
        if self.bounds is not None:
            spans = list(pairwise(self.bounds))
            if self.real is None:
                return spans
            samples = int(self.real.sum())
            return [(a, b) for a, b in spans if a < b <= samples]
        if self.real is None:
            return [(0, self.length)] * self.rows
        first = self.real.to(torch.uint8).argmax(1)
        return list(zip(first.tolist(), (first + self.real.sum(1)).tolist(), strict=True))

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each sample."""
        return [stop - start for start, stop in self.sample_bounds]

    def per_sample(self, x: Tensor) -> list[Tensor]:
        """Views [tokens, ...] of the real tokens of each sample in x [B, S, ...]."""
        row_of = [0] * self.count if self.packed else range(self.count)
        return [x[row, a:b] for row, (a, b) in zip(row_of, self.sample_bounds, strict=True)]

    def subset(self, chosen: Sequence[int]) -> Subset:
        """Some of the samples, in rising order, as a batch of their own."""
        chosen = list(chosen)
        if not self.packed:
            real = None if self.real is None else _pinned_as(self.real, self.real[chosen])
            tokens = Tokens(len(chosen), self.length, real, holes=self.holes)
            return Subset(tokens, chosen, 0, torch.tensor(chosen))
        assert self.cu_seqlens is not None
        spans = [self.sample_bounds[i] for i in chosen]
        bounds = torch.tensor([0] + [b - a for a, b in spans]).cumsum(0)
        index = torch.cat([torch.arange(a, b) for a, b in spans])
        tokens = Tokens(1, len(index), cu_seqlens=_pinned_as(self.cu_seqlens, bounds))
        return Subset(tokens, chosen, 1, index)

    # -- on any device, without a question to it

    @cached_property
    def owner(self) -> Tensor | None:
        """[S] int64, the document of each token of a packed row; None where a sample is a row."""
        if self.cu_seqlens is None:
            return None
        documents = torch.arange(len(self.cu_seqlens) - 1, device=self.device)
        lengths = self.cu_seqlens.long().diff()
        return torch.repeat_interleave(documents, lengths, output_size=self.length)

    @cached_property
    def starts(self) -> Tensor | None:
        """[B or 1, S] int64, where the document of each token starts; None where a row is one."""
        if self.cu_seqlens is None:
            return self.restarts
        return self.cu_seqlens.long()[self.owner].unsqueeze(0)

    @cached_property
    def positions(self) -> Tensor:
        """[B or 1, S] int64: those given, or each token's index less the pads before it, in a
        packed row from the start of its document; of pads, any."""
        if self.position_ids is not None:
            return self.position_ids
        place = self._places.unsqueeze(0)
        if self.starts is not None:
            return place - self.starts
        if self.real is not None:
            return (self.real.cumsum(1) - 1).clamp_min(0)[:, self.past :]
        return place

    @property
    def new_real(self) -> Tensor | None:
        """[B, S] boolean, False on pads, without the tokens of the cache; None where all are."""
        return None if self.real is None else self.real[:, self.past :]

    @cached_property
    def _places(self) -> Tensor:
        """[S] int64: each token's index in its row, those of the cache counted."""
        return torch.arange(self.past, self.past + self.length, device=self.device)

    def is_causal(self, window: int | None = None) -> bool:
        """Whether every token sees all that came before it."""
        reaches = window is None or window >= self.past + self.length
        one_document = self.cu_seqlens is None and self.restarts is None
        return reaches and self.real is None and one_document

    def first_seen(self, window: int | None = None) -> Tensor:
        """The first token that each sees, int64 [B or 1, S], as an index into past + S.

        A token sees itself and the earlier ones of its document, within a window of `window`
        places (its own and those of pads count, as in transformers). A pad sees itself alone, so
        that no row of a softmax is empty, and is seen by no other token.
        """
        place = self._places.unsqueeze(0)
        first = torch.zeros_like(place) if self.starts is None else self.starts
        if self.real is not None and self.starts is None:
            first = self.real.to(torch.uint8).argmax(1, keepdim=True)
        if window is not None:
            first = torch.maximum(first, place - (window - 1))
        new_real = self.new_real
        return first if new_real is None else torch.where(new_real, first, place)

    def visible(self, window: int | None = None) -> Tensor:
        """Boolean [B or 1, 1, S, past + S], True where a token (row) sees another: see
        `first_seen`."""
        place, key = self._places, torch.arange(self.past + self.length, device=self.device)
        seen = (key >= self.first_seen(window).unsqueeze(-1)) & (key <= place.unsqueeze(-1))
        if self.real is not None and self.holes:
            seen = (seen & self.real.unsqueeze(1)) | (key == place.unsqueeze(-1))
        return seen.unsqueeze(1)

    def check_pads_last(self, what: str) -> None:
        """Raise unless all pads stand right of the real tokens, where causality hides them.

        Raises:
            ValueError: `what` can't be given a mask, and there are pads elsewhere or documents.
        """
        takes = f"{what} takes no attention mask, so"
        if self.starts is not None:
            _require(
                (self.starts == 0).all(),
                f"position_ids: {takes} expected positions that rise along a row",
                "packed documents",
            )
        if self.real is not None:
            _require(
                (self.real[:, 1:] <= self.real[:, :-1]).all(),
                f"attention_mask: {takes} expected pads right of the real tokens, where causality "
                "hides them",
                "pads before or between them",
            )

    # -- elsewhere

    def to(self, device: torch.device) -> Tokens:
        """The same on another device; a GPU is not waited for where the tensors are pinned."""
        if device == self.device:
            return self
        given = self.cu_seqlens if self.given_bounds is None else self.given_bounds
        return replace(self._each(lambda x: _moved(x, device)), device=device, given_bounds=given)

    def pinned(self) -> Tokens:
        """The same in pinned memory."""
        return self._each(lambda x: x.pin_memory())

    def take_rows(self, chosen: Tensor) -> Tokens:
        """Some rows of the batch alone: [k] int64."""
        if self.rows == 1:
            return self
        return replace(self._each(lambda x: x if len(x) == 1 else x[chosen]), rows=len(chosen))

    def _each(self, change: Any) -> Tokens:
        names = ("real", "cu_seqlens", "position_ids", "restarts")
        tensors = [(name, getattr(self, name)) for name in names]
        changed: dict[str, Any] = {n: change(x) for n, x in tensors if x is not None}
        return replace(self, **changed)


@dataclass(frozen=True)
class Subset:
    """Some samples of a batch as a batch of their own.

    Attributes:
        tokens: of the new batch.
        chosen: the samples, by their number in the whole batch.
        dim: the dimension that is cut: 0, rows, or 1, tokens.
        index: [k] int64, what is kept of it.
    """

    tokens: Tokens
    chosen: list[int]
    dim: int
    index: Tensor

    def cut(self, x: Tensor) -> Tensor:
        """The samples in x [B, S, ...] of the whole batch."""
        return x.index_select(self.dim, _index_on(self.index, x))


def put_together(subsets: Sequence[tuple[Subset, Tensor]], shape: torch.Size) -> Tensor:
    """[B, S, ...] = `shape` from the values of subsets that make up the whole batch."""
    whole = subsets[0][1].new_empty(shape)
    for subset, values in subsets:
        whole = whole.index_copy(subset.dim, _index_on(subset.index, values), values)
    return whole


def padded_tokens(real: Tensor) -> Tokens:
    """Rows whose real tokens stand together, by `real` [B, S] boolean on the CPU."""
    rows, length = real.shape
    return Tokens(rows, length, None if real.all() else real, holes=False)


def packed_tokens(lengths: Sequence[int]) -> Tokens:
    """Documents of these lengths, packed in one row."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return Tokens(1, int(bounds[-1]), cu_seqlens=bounds)


def take_rows(tree: Any, chosen: Tensor, size: int, length: int) -> Any:
    """Cut every tensor in a tree whose first dimension is the batch's along with it.

    Args:
        chosen: [k] int64, rows of the batch.
        size: B.
        length: S.

    Raises:
        ValueError: B = S, and a tensor of one or two dimensions: whose is the first?
    """

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != size or size == 1:
            return leaf
        if leaf.dim() <= 2 and size == length:
            raise ValueError(
                f"fraction: can't tell whether an argument of shape {list(leaf.shape)} is per "
                "sample or per token, as B = S; give it a leading dimension of 1 or B"
            )
        return leaf[chosen.to(leaf.device)]

    return tree_map(cut, tree)


# -- from the arguments of a call


def describe_tokens(
    h: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    past: int = 0,
    look: bool = False,
) -> Tokens:
    """The tokens of `h`, on its device; arguments and errors as `check_tokens`.

    Without a mask, a token whose position is not above that of the one before it starts a document.

    Args:
        look: look at a mask and at positions even if the host has to wait for their device: they
            may turn out to hide nothing. Without it, only what lies on the CPU is looked at.
    """
    check_tokens(h, attention_mask, position_ids, cu_seqlens, past)
    rows, length = h.shape[:2]
    if cu_seqlens is not None:
        return Tokens(1, length, cu_seqlens=cu_seqlens, device=cu_seqlens.device).to(h.device)
    real, holes = _pads(attention_mask, look)
    restarts = None
    if position_ids is not None:
        position_ids = position_ids.view(-1, length).long()
        if attention_mask is None:
            restarts = _restarts(position_ids, look)
    return Tokens(
        rows,
        length,
        real=None if real is None else _moved(real, h.device),
        position_ids=None if position_ids is None else _moved(position_ids, h.device),
        restarts=None if restarts is None else _moved(restarts, h.device),
        past=past,
        holes=holes,
        device=h.device,
    )


def _pads(mask: Tensor | None, look: bool) -> tuple[Tensor | None, bool]:
    """The mask as booleans, None where all tokens are real, and whether it may have holes."""
    if mask is None:
        return None, False
    real = mask != 0
    if not (look or _host_knows(real)):
        return real, True
    changes = (real[:, 1:] != real[:, :-1]).sum(1) + real[:, 0].long() + real[:, -1].long()
    whole, holes = torch.stack((real.all(), (changes > 2).any())).tolist()
    return (None, False) if whole else (real, holes)


def _restarts(positions: Tensor, look: bool) -> Tensor | None:
    """[B or 1, S]: where the document of each token starts; None where no row holds several."""
    new = positions[:, 1:] <= positions[:, :-1]
    if (look or _host_knows(new)) and not new.any():
        return None
    place = torch.arange(positions.shape[1], device=positions.device)
    return torch.where(F.pad(new, (1, 0), value=True), place, 0).cummax(1).values


def check_tokens(
    h: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    past: int = 0,
) -> None:
    """Raise unless the arguments fit each other.

    Args:
        h: [B, S, D]; only its shape and device matter.
        attention_mask: [B, past + S], boolean or 0/1, 1 for real tokens.
        position_ids: [S], [1, S] or [B, S] integers. With a mask they rise from each real token to
            the next to it.
        cu_seqlens: [n + 1] integers, 0 = c_0 <= ... <= c_n = S: documents packed in one row
            (B = 1). It goes with neither of the others.
        past: tokens that a cache holds of each row.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or values, named. Values that
            are on another device than the CPU are looked at there, and fail there.
    """
    if h.dim() != 3:
        raise ValueError(f"h: expected shape [B, S, D], got {list(h.shape)}")
    batch, length = h.shape[:2]
    given = {"attention_mask": attention_mask, "position_ids": position_ids}
    for name, value in {**given, "cu_seqlens": cu_seqlens}.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if cu_seqlens is not None:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}: expected None when cu_seqlens is given, got a tensor")
        check_bounds(cu_seqlens, h.shape)
    if attention_mask is not None:
        _check_mask(attention_mask, batch, past + length)
    if position_ids is not None:
        _check_positions(position_ids, batch, length)
        if attention_mask is not None:
            _check_rise(position_ids.view(-1, length), attention_mask[:, past:])


def check_bounds(cu_seqlens: Any, shape: torch.Size) -> None:
    """Raise unless `cu_seqlens` bounds documents packed in a state of this shape.

    Raises:
        TypeError: it is no tensor of integers.
        ValueError: `shape` is not [1, total, D], or the bounds don't rise from 0 to total; those
            on another device than the CPU are looked at there, and fail there.
    """
    if not isinstance(cu_seqlens, Tensor):
        kind = type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: expected a tensor of integers, got {kind}")
    if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"cu_seqlens: expected integers, got {cu_seqlens.dtype}")
    if len(shape) != 3 or shape[0] != 1:
        raise ValueError(f"h: expected shape [1, total, D] with cu_seqlens, got {list(shape)}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: expected shape [n + 1], got {list(cu_seqlens.shape)}")
    bounds = cu_seqlens.long()  # unsigned ones never fall
    _require(
        (bounds[0] == 0) & (bounds[-1] == shape[1]) & (bounds.diff() >= 0).all(),
        f"cu_seqlens: expected bounds that rise from 0 to total = {shape[1]}",
        cu_seqlens,
    )


def check_same_bounds(queries: Any, keys: Any) -> None:
    """Raise ValueError unless the bounds `cu_seq_lens_q` and `cu_seq_lens_k` are the same ones;
    values on another device than the CPU are looked at there, and fail there."""
    both = isinstance(queries, Tensor) and isinstance(keys, Tensor)
    if not both or queries.shape != keys.shape:
        raise ValueError(
            "cu_seq_lens_k: expected the bounds of cu_seq_lens_q, got others: a query sees its own "
            "document"
        )
    if keys is not queries:
        fits = (keys.to(queries.device) == queries).all()
        _require(fits, "cu_seq_lens_k: expected the bounds of cu_seq_lens_q", keys)


def check_counted(positions: Tensor, cu_seqlens: Tensor) -> None:
    """Raise unless positions [.., S] count each document between the bounds [n + 1] from 0.

    Raises:
        TypeError, ValueError: as `check_bounds`; or they count otherwise (those on another device
            than the CPU are looked at there, and fail there).
    """
    positions = positions.reshape(-1, positions.shape[-1])
    check_bounds(cu_seqlens, torch.Size((*positions.shape, 1)))
    expected = Tokens(1, positions.shape[1], cu_seqlens=cu_seqlens, device=cu_seqlens.device)
    counted = (positions.to(cu_seqlens.device) == expected.positions).all()
    wanted = "position_ids: expected positions that count each document of cu_seq_lens_q from 0"
    _require(counted, wanted, positions)


_HINT = "(where only a part of the rows is run, hand it over with the call)"


def _check_mask(mask: Tensor, batch: int, length: int) -> None:
    if mask.shape != (batch, length):
        raise ValueError(
            f"attention_mask: expected shape [B, S] = {[batch, length]}, got {list(mask.shape)} "
            f"{_HINT}"
        )
    if mask.is_floating_point() and mask.device.type != "cpu":
        # Likely one to add to logits, 0 where a key is seen; the host doesn't wait to find out.
        raise TypeError(
            f"attention_mask: expected booleans or integers on {mask.device.type}, got {mask.dtype}"
        )
    if mask.dtype != torch.bool:
        _require(
            ((mask == 0) | (mask == 1)).all(),
            "attention_mask: expected 1 on real tokens and 0 on pads",
            "other values",
        )


def _check_positions(positions: Tensor, batch: int, length: int) -> None:
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise TypeError(f"position_ids: expected integers, got {positions.dtype}")
    if positions.shape not in ((length,), (1, length), (batch, length)):
        raise ValueError(
            f"position_ids: expected shape [S], [1, S] or [B, S] with [B, S] = "
            f"{[batch, length]}, got {list(positions.shape)} {_HINT}"
        )


def _check_rise(positions: Tensor, mask: Tensor) -> None:
    device = mask.device if positions.is_cpu else positions.device
    positions, real = positions.to(device), mask.to(device) != 0
    pads = ~(real[:, 1:] & real[:, :-1])
    _require(
        (pads | (positions[:, 1:] > positions[:, :-1])).all(),
        "position_ids: expected positions that rise along a row when attention_mask is given",
        "packed documents",
    )


def _require(fits: Tensor, message: str, got: Tensor | str) -> None:
    """Raise ValueError unless `fits`; on a device, the device raises."""
    if not _host_knows(fits):
        torch._assert_async(fits, message)
    elif not fits:
        raise ValueError(f"{message}, got {got if isinstance(got, str) else got.tolist()}")


def _host_knows(tensor: Tensor) -> bool:
    """Whether the host can look at the values, with no device to wait for and no trace to break."""
    traced = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    return tensor.is_cpu and type(tensor) is Tensor and not traced


def _moved(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device, non_blocking=x.is_cpu)


def _pinned_as(whole: Tensor, part: Tensor) -> Tensor:
    """`part` in pinned memory if `whole` is: from other memory a copy to the GPU would wait."""
    return part.pin_memory() if whole.is_pinned() else part


def _index_on(index: Tensor, x: Tensor) -> Tensor:
    if x.is_cuda:  # from pageable memory the copy would wait for all work before it
        index = index.pin_memory()
    return index.to(x.device, non_blocking=True)
