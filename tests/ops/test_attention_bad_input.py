"""Bad input of attention gives an error of the right type, whose message names the argument, the expected value and the
given one. An operator never gives a wrong number or a crash. A traced call gives the same error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch", reason="most bad inputs are torch's")

from attention_cases import moved  # noqa: E402

_generator = torch.Generator().manual_seed(0)
Q = torch.randn(2, 5, 4, 16, generator=_generator).bfloat16()
K = torch.randn(2, 7, 2, 16, generator=_generator).bfloat16()
PACKED_Q, PACKED_K = Q.flatten(0, 1), K.flatten(0, 1)
OFFSETS_Q = torch.tensor([0, 5, 10], dtype=torch.int32)
OFFSETS_K = torch.tensor([0, 7, 14], dtype=torch.int32)
COUNTS = torch.tensor([3, 4], dtype=torch.int32)
TABLE = torch.tensor([[0], [1]], dtype=torch.int32)
GIVEN = {"q": Q, "k": K, "v": K}


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


PAGED = {"block_table": TABLE, "seqused_k": COUNTS}
PREFIX = (ints(1)[:, None], ints(3), ints(0, 2))  # shared by both sequences

# Maps a name to (changes, error, pattern of its message).
CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype of q": ({"q": Q.double()}, TypeError, r"q: expected dtype float32, bfloat16 or float16, got float64"),
    "dtype of k": ({"k": K.float()}, TypeError, r"k: expected dtype bfloat16 \(that of q\), got float32"),
    "dtype of v": ({"v": K.half()}, TypeError, r"v: expected dtype bfloat16 \(that of q\), got float16"),
    "rank of q": (
        {"q": Q[0]},
        ValueError,
        r"q: expected shape \[batch, .*\], or packed .* beside cu_seqlens_q, got \[5",
    ),
    "packed rank": (
        {"cu_seqlens_q": OFFSETS_Q},
        ValueError,
        r"q: expected shape \[tokens, heads, head_dim\] beside cu",
    ),
    "rank of k": (
        {"k": K[0], "v": K[0]},
        ValueError,
        r"k: expected shape \[batch, .*\], or packed .* beside cu_seqlens_k",
    ),
    "odd head_dim": (
        {"q": Q[..., :12], "k": K[..., :12], "v": K[..., :12]},
        ValueError,
        r"q: expected a last dimension "
        r"\(head_dim\) that is a multiple of 8 in \[8, 256\], got shape \[2, 5, 4, 12\]",
    ),
    "head_dim of k": (
        {"k": K[..., :8], "v": K[..., :8]},
        ValueError,
        r"k: expected a last dimension of 16 \(that of q\)",
    ),
    "heads": ({"q": Q[:, :, :3]}, ValueError, r"k: expected a number of heads that divides q's 3, got shape"),
    "no heads": ({"k": K[:, :, :0], "v": K[:, :, :0]}, ValueError, r"k: expected a number of heads that divides q's 4"),
    "batch of k": ({"k": K[:1], "v": K[:1]}, ValueError, r"k: expected a first dimension of 2 \(the sequences of q\)"),
    "shape of v": (
        {"v": K[:, :3]},
        ValueError,
        r"v: expected shape \[2, 7, 2, 16\] \(that of k; the last dimension may be smaller\), got \[2, 3, 2, 16\]",
    ),
    "rank of v": (
        {"v": K[0]},
        ValueError,
        r"v: expected shape \[2, 7, 2, 16\] \(that of k; the last dimension may be smaller\), got \[7, 2, 16\]",
    ),
    "wide v": (
        {"v": torch.cat([K, K], -1)},
        ValueError,
        r"v: expected a last dimension that is a multiple of 8 in \[8, 16\] \(at most that of k\), got shape "
        r"\[2, 7, 2, 32\]",
    ),
    "odd v": (
        {"v": K[..., :12]},
        ValueError,
        r"v: expected a last dimension that is a multiple of 8 in \[8, 16\] \(at most that of k\), got shape "
        r"\[2, 7, 2, 12\]",
    ),
    "no columns of v": ({"v": K[..., :0]}, ValueError, r"v: expected a last dimension .* got shape \[2, 7, 2, 0\]"),
    "columns": (
        {"q": Q.transpose(2, 3).contiguous().transpose(2, 3)},
        ValueError,
        r"q: expected a contiguous last dim",
    ),
    "expanded seqused_k": (
        {"seqused_k": ints(3).expand(2)},
        ValueError,
        r"seqused_k: expected a contiguous last dimension \(stride 1\), got stride 0 \(one element, expanded\); make",
    ),
    "offsets' dtype": (
        {"q": PACKED_Q, "cu_seqlens_q": OFFSETS_Q.float()},
        TypeError,
        r"cu_seqlens_q: expected dtype int32 or int64, got float32",
    ),
    "offsets' length": (
        {"k": PACKED_K, "v": PACKED_K, "cu_seqlens_k": OFFSETS_K[:2]},
        ValueError,
        r"cu_seqlens_k: expected shape \[3\] \(num_sequences \+ 1\), got \[2\]",
    ),
    "counts' length": (
        {"seqused_k": COUNTS[:1]},
        ValueError,
        r"seqused_k: expected shape \[2\] \(the sequences\), got \[1\]",
    ),
    "counts' rank": ({"leftpad_k": COUNTS[:, None]}, ValueError, r"leftpad_k: expected shape \[2\] \(the sequences\)"),
    "counts' dtype": ({"seqused_q": COUNTS.float()}, TypeError, r"seqused_q: expected dtype int32, got float32"),
    "window": ({"window_size": 0}, ValueError, r"window_size: expected None or a number of keys >= 1, got 0"),
    "kind of window": ({"window_size": 2.5}, TypeError, r"window_size: expected (None or )?an integer, got float"),
    "window without causal": (
        {"window_size": 3, "causal": False},
        ValueError,
        r"window_size: expected None beside causal",
    ),
    "scale": ({"softmax_scale": 0.0}, ValueError, r"softmax_scale: expected None or a finite number > 0 .*, got 0.0"),
    "negative scale": ({"softmax_scale": -1.0}, ValueError, r"softmax_scale: expected None or a finite number > 0"),
    "NaN scale": ({"softmax_scale": float("nan")}, ValueError, r"softmax_scale: expected None or a finite number > 0"),
    "kind of scale": ({"softmax_scale": "1"}, TypeError, r"softmax_scale: expected (None or )?a number, got str"),
    "dtype of sinks": ({"sinks": torch.zeros(4).half()}, TypeError, r"sinks: expected dtype float32, got float16"),
    "shape of sinks": (
        {"sinks": torch.zeros(2)},
        ValueError,
        r"sinks: expected shape \[4\] \(the heads of q\), got \[2\]",
    ),
    "expanded sinks": ({"sinks": torch.zeros(1).expand(4)}, ValueError, r"sinks: expected a contiguous last dimension"),
    "softcap": ({"softcap": 0.0}, ValueError, r"softcap: expected None or a finite number > 0, got 0.0"),
    "negative softcap": ({"softcap": -1.0}, ValueError, r"softcap: expected None or a finite number > 0, got -1.0"),
    "NaN softcap": ({"softcap": float("nan")}, ValueError, r"softcap: expected None or a finite number > 0, got nan"),
    "softcap far from scale": (
        {"softcap": 1e38, "softmax_scale": 1e-3},
        ValueError,
        r"softcap: expected None or a number for which .* got 1e\+38",
    ),
    "kind of softcap": ({"softcap": "1"}, TypeError, r"softcap: expected (None or )?a number, got str"),
    "exp": ({"exp": "fast"}, ValueError, r"exp: expected None, \"hardware\" or \"portable\", got 'fast'"),
    "exp of the CPU": ({"exp": "hardware"}, ValueError, r"exp: \"hardware\" is not available on the CPU outside"),
    "pages without counts": (
        {"block_table": TABLE},
        ValueError,
        r"seqused_k: expected the keys in use .* beside block_t",
    ),
    "pages and offsets": (
        {"block_table": TABLE, "seqused_k": COUNTS, "cu_seqlens_k": OFFSETS_K},
        ValueError,
        r"cu_seqlens_k: expected None beside block_table",
    ),
    "pages and padding": (
        {"block_table": TABLE, "seqused_k": COUNTS, "leftpad_k": COUNTS},
        ValueError,
        r"leftpad_k: expected None beside block_table",
    ),
    "packed and padding": (
        {"k": PACKED_K, "v": PACKED_K, "cu_seqlens_k": OFFSETS_K, "leftpad_k": COUNTS},
        ValueError,
        r"leftpad_k: expected None beside cu_seqlens_k",
    ),
    "dtype of pages": (
        {"block_table": TABLE.long(), "seqused_k": COUNTS},
        TypeError,
        r"block_table: expected dtype int32",
    ),
    "shape of pages": (
        {"block_table": TABLE[:1], "seqused_k": COUNTS},
        ValueError,
        r"block_table: expected shape \[2, max_p",
    ),
    "prefix without pages": (
        {"shared_prefix": PREFIX},
        ValueError,
        r"shared_prefix: expected None without block_table",
    ),
    "kind of prefix": (
        {**PAGED, "shared_prefix": TABLE},
        TypeError,
        r"shared_prefix: expected None or \(prefix_table, prefix_lens, group_offsets\), got \w*Tensor",
    ),
    "half a prefix": ({**PAGED, "shared_prefix": PREFIX[:2]}, ValueError, r"shared_prefix: expected .*, got 2 arrays"),
    "no lengths": (
        {**PAGED, "shared_prefix": (PREFIX[0], None, PREFIX[2])},
        TypeError,
        r"prefix_lens: expected an array in shared_prefix, got None",
    ),
    "prefix table": (
        {**PAGED, "shared_prefix": (TABLE, *PREFIX[1:])},
        ValueError,
        r"prefix_table: expected shape \[1, max_prefix_pages\] \(the groups of group_offsets\), got \[2, 1\]",
    ),
    "dtype of a prefix table": (
        {**PAGED, "shared_prefix": (PREFIX[0].float(), *PREFIX[1:])},
        TypeError,
        r"prefix_table: expected dtype int32, got float32",
    ),
    "prefix lengths": (
        {**PAGED, "shared_prefix": (PREFIX[0], COUNTS, PREFIX[2])},
        ValueError,
        r"prefix_lens: expected shape \[1\] \(the groups\), got \[2\]",
    ),
    "dtype of prefix lengths": (
        {**PAGED, "shared_prefix": (PREFIX[0], COUNTS[:1].long(), PREFIX[2])},
        TypeError,
        r"prefix_lens: expected dtype int32, got int64",
    ),
    "dtype of groups": (
        {**PAGED, "shared_prefix": (*PREFIX[:2], PREFIX[2].float())},
        TypeError,
        r"group_offsets: expected dtype int32 or int64, got float32",
    ),
    "no tensor": ({"k": None}, TypeError, r"k: expected "),
    "list of numbers": ({"seqused_k": [3, 4]}, TypeError, r"seqused_k: expected "),
}
# Bad numbers in lists. These values raise on the CPU, which reads them.
VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "offsets that begin late": ({"q": PACKED_Q, "cu_seqlens_q": ints(1, 5, 10)}, r"cu_seqlens_q: .* got 1 at index 0"),
    "offsets that descend": (
        {"q": PACKED_Q, "cu_seqlens_q": ints(0, 11, 10)},
        r"cu_seqlens_q: .* at most 10 .* got 11 at index 1",
    ),
    "too many keys": ({"seqused_k": ints(3, 8)}, r"seqused_k: expected numbers in \[0, 7\], got 8 for sequence 1"),
    "fewer than none": ({"seqused_q": ints(-1, 3)}, r"seqused_q: expected numbers in \[0, 5\], got -1 for sequence 0"),
    "padding and keys": ({"leftpad_k": ints(5, 0), "seqused_k": ints(3, 7)}, r"seqused_k: .* \[0, 2\], got 3 for seq"),
    "padding": ({"leftpad_k": ints(8, 0)}, r"leftpad_k: expected numbers in \[0, 7\], got 8 for sequence 0"),
    "a page that is none": (
        {"block_table": ints(2, 0)[:, None], "seqused_k": COUNTS},
        r"block_table: expected pages in "
        r"\[0, 2\), got 2 at \[0, 0\]",
    ),
    "a page of a prefix that is none": (
        {**PAGED, "shared_prefix": (ints(2)[:, None], *PREFIX[1:])},
        r"prefix_table: expected pages in \[0, 2\), got 2 at \[0, 0\]",
    ),
    "a prefix longer than its pages": (
        {**PAGED, "shared_prefix": (PREFIX[0], ints(8), PREFIX[2])},
        r"prefix_lens: expected numbers in \[0, 7\], got 8 for group 0",
    ),
    "more keys than both tables": (
        {**PAGED, "seqused_k": ints(3, 11), "shared_prefix": PREFIX},
        r"seqused_k: expected numbers in \[0, 10\], got 11 for sequence 1",
    ),
    "groups of more sequences": (
        {**PAGED, "shared_prefix": (*PREFIX[:2], ints(0, 3))},
        r"group_offsets: expected at most 2 \(the number of sequences\), got 3 at index 1",
    ),
}


def call(changed: dict[str, Any]) -> Any:
    given = {**GIVEN, **changed}
    arrays = [given.pop(name) for name in GIVEN]
    return rk.attention(*arrays, **given)


@pytest.mark.parametrize("case", CASES)
def test_an_error_names_the_argument(case: str) -> None:
    changed, error, words = CASES[case]
    with pytest.raises(error, match=words):
        call(changed)


@pytest.mark.parametrize("case", VALUES)
def test_lists_are_read_on_the_cpu(case: str) -> None:
    changed, words = VALUES[case]
    with pytest.raises(ValueError, match=words):
        call(changed)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c not in ("exp", "exp of the CPU", "no tensor", "NaN scale", "softcap far from scale")]
)
def test_a_fake_tensor_gets_the_words_of_a_real_one(case: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    changed, error, words = CASES[case]
    mode = FakeTensorMode()
    fake = moved(mode.from_tensor, {**GIVEN, **changed})
    with mode, pytest.raises(error, match=words):
        call(fake)


def test_gradients_of_pages_are_refused() -> None:
    pages = K.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"block_table: pages have no gradient; call under torch.no_grad\(\)"):
        call({"k": pages, "block_table": TABLE, "seqused_k": COUNTS})
    with torch.no_grad():
        assert call({"k": pages, "block_table": TABLE, "seqused_k": COUNTS}).shape == Q.shape


def test_what_backward_refuses() -> None:
    out, lse = rk.attention(Q, K, K, return_lse=True)
    right = {"dout": Q, "q": Q, "k": K, "v": K, "out": out, "lse": lse}

    def backward(**changed: Any) -> Any:
        given = {**right, **changed}
        arrays = [given.pop(n) for n in right]
        return rk.attention_backward(*arrays, **given)

    assert backward()[0].shape == Q.shape
    for changed, error, words in (
        ({"dout": Q[:1]}, ValueError, r"dout: expected shape \[2, 5, 4, 16\] \(that of q with the last dim"),
        ({"v": K[..., :8]}, ValueError, r"dout: expected shape \[2, 5, 4, 8\] .*, got \[2, 5, 4, 16\]"),
        ({"v": K[..., :8], "dout": Q[..., :8]}, ValueError, r"out: expected shape \[2, 5, 4, 8\] .*, got"),
        ({"dout": Q.float()}, TypeError, r"dout: expected dtype bfloat16 \(that of q\), got float32"),
        ({"out": out[:, :3]}, ValueError, r"out: expected shape"),
        ({"lse": lse.double()}, TypeError, r"lse: expected dtype float32, got float64"),
        ({"lse": lse[:1]}, ValueError, r"lse: expected shape \[2, 4, 5\] \(that of lse\), got \[1, 4, 5\]"),
        ({"lse": lse.transpose(1, 2).contiguous().transpose(1, 2)}, ValueError, r"lse: expected a contiguous array"),
        ({"lse": None}, TypeError, r"lse: expected "),
        ({"dlse": lse[0]}, ValueError, r"dlse: expected shape"),
        ({"dlse": lse.half()}, TypeError, r"dlse: expected dtype float32, got float16"),
    ):
        with pytest.raises(error, match=words):
            backward(**changed)


def test_jax_and_numpy_errors_name_the_argument() -> None:
    q = np.zeros((1, 2, 2, 8), np.float32)
    with pytest.raises(TypeError, match=r"q: expected a dtype of numbers|q: expected dtype"):
        rk.attention(q.astype(complex), q, q)
    with pytest.raises(TypeError, match=r"k: expected an array that speaks DLPack, got list"):
        rk.attention(q, q.tolist(), q)
    with pytest.raises(ValueError, match=r"v: expected shape"):
        rk.attention(q, q, q[:, :1])
