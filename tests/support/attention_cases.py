"""Shared by the tests of attention: sequences, every form in which a call may have them, and error bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import rl_kernel_native as rk
from cases import mode

DTYPES = ("float32", "bfloat16", "float16")
FORMS = ("left", "right", "packed", "cache", "paged", "shared")


class Sequences:
    """Queries, keys, values and gradients of each sequence, ``[tokens, heads, head_dim]``; lengths may differ."""

    def __init__(
        self, rng: np.random.Generator, lengths: list[tuple[int, int]], heads: tuple[int, int] = (4, 2),
        head_dim: int = 32, dtype: str = "bfloat16", device: str = "cpu",
    ) -> None:  # fmt: skip
        def normal(tokens: int, count: int) -> Any:
            values = rng.standard_normal((tokens, count, head_dim), dtype=np.float32)
            return torch.from_numpy(values).to(getattr(torch, dtype)).to(device)

        self.lengths, self.device, self.rng = lengths, device, rng
        self.q = [normal(n, heads[0]) for n, _ in lengths]
        self.k, self.v = ([normal(n, heads[1]) for _, n in lengths] for _ in range(2))
        self.dout = [normal(n, heads[0]) for n, _ in lengths]

    def _counts(self, which: int) -> Any:
        return torch.tensor([n[which] for n in self.lengths], dtype=torch.int32, device=self.device)

    def _offsets(self, which: int) -> Any:
        return torch.nn.functional.pad(self._counts(which).cumsum(0), (1, 0)).int()

    def _padded(self, parts: list[Any], left: bool, extra: int = 3) -> Any:
        """Padding is NaN."""
        most = max(len(p) for p in parts) + extra
        out = parts[0].new_full((len(parts), most, *parts[0].shape[1:]), float("nan"))
        for row, part in zip(out, parts, strict=True):
            row[most - len(part) if left else 0 :][: len(part)] = part
        return out

    def call(self, form: str) -> tuple[tuple[Any, Any, Any, Any], dict[str, Any]]:
        """``(q, k, v, dout)`` and the lists of a form. ``left`` needs as many queries as keys in every sequence."""
        if form == "packed":
            lists = {"cu_seqlens_q": self._offsets(0), "cu_seqlens_k": self._offsets(1)}
            return tuple(torch.cat(p) for p in (self.q, self.k, self.v, self.dout)), lists  # type: ignore[return-value]
        if form == "paged":
            return self._paged(())
        if form == "shared":  # every sequence is a group; the group shares all, none or some of its keys
            n = [n for _, n in self.lengths]
            return self._paged([(1, (keys, 0, keys // 2, keys // 3 + 1)[b % 4]) for b, keys in enumerate(n)])
        left = form == "left"
        q, k, v, dout = (self._padded(p, left) for p in (self.q, self.k, self.v, self.dout))
        if left:
            return (q, k, v, dout), {"leftpad_k": k.shape[1] - self._counts(1)}
        if form == "cache":  # packed queries, with keys in a cache
            q, dout = torch.cat(self.q), torch.cat(self.dout)
            return (q, k, v, dout), {"cu_seqlens_q": self._offsets(0), "seqused_k": self._counts(1)}
        return (q, k, v, dout), {"seqused_q": self._counts(0), "seqused_k": self._counts(1)}

    def _paged(self, groups: Any, page_size: int = 7) -> Any:
        """``groups``: (number of sequences, number of keys that they share) of each group. The shared keys are the keys
        of the group's first sequence."""
        first = np.cumsum([0, *(n for n, _ in groups)])
        shared = [keys for n, keys in groups for _ in range(n)]
        shared += [0] * (len(self.lengths) - len(shared))
        most = max(n for _, n in self.lengths) // page_size + 2
        order = iter(self.rng.permutation(most * (len(self.lengths) + len(groups))).tolist())
        k, v = (
            p[0].new_full((most * (len(self.lengths) + len(groups)), page_size, *p[0].shape[1:]), float("nan"))
            for p in (self.k, self.v)
        )

        def table(parts: list[Any]) -> Any:
            """One row per sequence: the pages of its keys from one key to another."""
            found = torch.full((len(parts), most), -1, dtype=torch.int32)
            for row, (b, (begin, end)) in enumerate(parts):
                for i in range(begin, end, page_size):
                    page = next(order)
                    found[row, (i - begin) // page_size] = page
                    for pages, of in ((k, self.k), (v, self.v)):
                        part = of[b][i : min(i + page_size, end)]
                        pages[page, : len(part)] = part
            return found.to(self.device)

        own = table([(b, (p, n)) for b, (p, (_, n)) in enumerate(zip(shared, self.lengths, strict=True))])
        lists = {"cu_seqlens_q": self._offsets(0), "seqused_k": self._counts(1), "block_table": own}
        if groups:
            prefixes = table([(int(b), (0, keys)) for b, (_, keys) in zip(first, groups, strict=False)])
            lens, offsets = (torch.tensor(x, dtype=torch.int32, device=self.device) for x in
                             ([keys for _, keys in groups], first.tolist()))  # fmt: skip
            lists["shared_prefix"] = (prefixes, lens, offsets)
        return (torch.cat(self.q), k, v, torch.cat(self.dout)), lists

    def split(self, form: str, out: Any, which: int = 0, heads_first: bool = False) -> list[Any]:
        """Each sequence's part of a result. Places not in use must be +0, or -Inf in lse."""
        tokens = out.movedim(-1, -2) if heads_first else out
        parts, packed = [], out.dim() == (2 if heads_first else 3)
        begin, used = 0, torch.zeros_like(tokens, dtype=torch.bool)
        for b, n in enumerate(self.lengths):
            if packed:
                where: Any = slice(begin, begin + n[which])
                begin += n[which]
            else:
                first = tokens.shape[1] - n[which] if form == "left" else 0
                where = (b, slice(first, first + n[which]))
            parts.append(tokens[where])
            used[where] = True
        rest = tokens[~used]
        assert (rest == (-torch.inf if heads_first else 0)).all(), "what is not in use"
        assert heads_first or not torch.signbit(rest).any(), "a zero that is not +0"
        return parts


def moved(put: Any, given: Any) -> Any:
    """Applies ``put`` to each tensor of a call's arrays, lists or options."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, put, given)


def results(
    call: tuple[tuple[Any, Any, Any, Any], dict[str, Any]], *, device: str = "cpu", exp: str = "portable",
    backward: bool = True, dlse: Any = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """out and lse; without pages also dq, dk, dv; with sinks also dsinks."""
    (q, k, v, dout), lists = call
    with mode(device, exp):
        out, lse = rk.attention(q, k, v, **lists, **options, exp=exp, return_lse=True)
        found = {"out": out, "lse": lse}
        if backward and "block_table" not in lists:
            grads = rk.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **lists, **options, exp=exp)
            names = ("dq", "dk", "dv", *["dsinks"] * ((lists | options).get("sinks") is not None))
            found |= dict(zip(names, grads, strict=True))
    return found


def each(sequences: Sequences, form: str, **options: Any) -> list[dict[str, Any]]:
    """Results of each sequence, from one call in the given form. dsinks is left out: it sums over all sequences."""
    found = results(sequences.call(form), **options)
    found.pop("dsinks", None)
    split = {n: sequences.split(form, r, int(n in ("dk", "dv")), n == "lse") for n, r in found.items()}
    return [{n: parts[b] for n, parts in split.items()} for b in range(len(sequences.lengths))]


def alone(sequences: Sequences, **options: Any) -> list[dict[str, Any]]:
    """Results of every sequence, each from a separate call."""
    found = []
    for q, k, v, dout in zip(sequences.q, sequences.k, sequences.v, sequences.dout, strict=True):
        r = results(((q[None], k[None], v[None], dout[None]), {}), **options)
        r.pop("dsinks", None)
        found.append({n: t[0].movedim(-1, -2) if n == "lse" else t[0] for n, t in r.items()})
    return found


def plain(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> dict[str, Any]:
    """Attention by torch's operators in the dtype of q, for a batch of one. Its error bounds ours."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    x, y, z = (t.transpose(1, 2) for t in leaves)
    y, z = (t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (y, z))
    scores = x @ y.transpose(-1, -2) * q.shape[-1] ** -0.5
    behind = torch.arange(y.shape[2] - x.shape[2], y.shape[2])[:, None] - torch.arange(y.shape[2])
    behind = behind.to(q.device)
    sees = torch.ones_like(behind, dtype=torch.bool)
    if options.get("causal", True):
        sees = (behind >= 0) & (behind < (options.get("window_size") or 1 << 30))
    p = torch.softmax(scores.float().masked_fill(~sees, -torch.inf), -1).to(q.dtype)
    out = (p @ z).transpose(1, 2)
    grads = torch.autograd.grad(out, leaves, dout)
    return {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
