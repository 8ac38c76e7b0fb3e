"""linear_logprob over a vocabulary that is spread over several ranks has the bits of one rank, forward and backward."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest

import linear_logprob_cases
import rl_kernel_native as rk
from cases import ALL, differing
from linear_logprob_cases import Head, gradients
from ports import free_port

torch = pytest.importorskip("torch")

VOCAB, VALID = 320, 290  # parts of 40 columns cut the leaves of 128 short; the last rank has padding
OPTIONS: dict[str, Any] = {"temperature": 0.7, "softcap": 11.0, "valid_vocab": VALID}


def head(device: str = "cpu", dtype: str = "bfloat16") -> Head:
    found = linear_logprob_cases.head(np.random.default_rng(0), 9, 48, VOCAB, dtype, device)
    found.target[found.target >= VALID] = VALID - 1
    return found


def columns(h: Head, first: int, last: int) -> Head:
    return h._replace(weight=h.weight[first:last], bias=h.bias[first:last])


def logit_gradients(h: Head) -> Any:
    """Gradients of the logits, rounded to the operands' dtype."""
    lse_entropy = rk.linear_logprob(*h[:2], h.target, bias=h.bias, return_lse=True, return_entropy=True, **OPTIONS)
    ones = torch.ones(len(h.target), device=h.hidden.device)
    slopes = (linear_logprob_cases.DLOGPROB, linear_logprob_cases.DLSE, linear_logprob_cases.DENTROPY)
    d = dict(zip(("dlogprob", "dlse", "dentropy"), (s * ones for s in slopes), strict=True))
    logits = rk.linear(h.hidden, h.weight, h.bias, out_dtype="float32")
    found = rk.logprob_backward(logits, h.target, lse_entropy.lse, entropy=lse_entropy.entropy, **d, **OPTIONS)
    return found.to(h.hidden.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_statistics_of_shards_merge_to_the_bits_of_the_whole(shards: int, dtype: str) -> None:
    h = head(dtype=dtype)
    mask = torch.arange(9) % 4 > 0
    want = rk.linear_logprob(*h[:2], h.target, bias=h.bias, loss_mask=mask, **ALL, **OPTIONS)
    width, stats = VOCAB // shards, []
    for first in range(0, VOCAB, width):
        own = columns(h, first, first + width)
        how = {"vocab_start": first, "vocab_size": VOCAB, "loss_mask": mask, **OPTIONS}
        stats.append(rk.linear_logprob_partial(*own[:2], h.target, bias=own.bias, **how))
        if dtype == "float32":
            how["loss_mask"] = mask.numpy()
            arrays = [t.numpy() for t in own]
            found = rk.linear_logprob_partial(*arrays[:2], arrays[3], bias=arrays[2], **how)
            assert found.tobytes() == stats[-1].numpy().tobytes()
    assert not differing(tuple(rk.logprob_merge(torch.stack(stats), temperature=0.7, **ALL)), tuple(want))


def test_dh_segments_is_the_tree_over_the_parts_of_the_vocabulary(device: str) -> None:
    h = head(device, "float32" if device == "cpu" else "bfloat16")
    one, eight = (gradients(h, dh_segments=n, **OPTIONS) for n in (1, 8))
    assert not differing(tuple(one[0]), tuple(eight[0]))
    assert not differing(one[2:], eight[2:])
    d = logit_gradients(h)
    parts = [
        rk.linear(d[:, i:i + 40].contiguous(), h.weight[i:i + 40].T.contiguous(), out_dtype="float32")
        for i in range(0, VOCAB, 40)
    ]  # fmt: skip
    assert not differing(eight[1], rk.tree_sum(parts, out_dtype=h.hidden.dtype))
    assert device != "cpu" or differing(eight[1], one[1]), "16 bits may hide the tree, float32 may not"


def test_dh_segments_of_columns_that_are_not_in_memory(device: str) -> None:
    """The canonical vocabulary exceeds the columns, so its last parts are empty."""
    h = head(device)
    short = columns(h, 0, 100)._replace(target=h.target.clamp(max=99))
    padded = h._replace(target=short.target, weight=h.weight.clone())
    padded.weight[100:] = 0
    want = gradients(padded, dh_segments=8, valid_vocab=100)
    got = gradients(short, dh_segments=8, canonical_vocab=VOCAB)
    assert not differing(tuple(got[0]), tuple(want[0]))
    assert not differing(got[1], want[1])
    assert not differing(got[2], want[2][:100].contiguous())


def test_compiled_dh_segments_have_the_bytes_of_eager() -> None:
    h = head()

    def loss(x: Any, w: Any) -> Any:
        return rk.linear_logprob(x, w, h.target, dh_segments=8, **OPTIONS).sum()

    torch.compiler.reset()
    outcomes = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in h[:2]]
        function(*leaves).backward()
        outcomes.append(tuple(t.grad for t in leaves))
    assert not differing(*outcomes)
    assert not differing(torch.func.grad(loss)(*h[:2]), outcomes[0][0])


def on_a_rank(rank: int, ranks: int, port: int) -> None:
    """The first 1, 2, 4, ... ranks form a group; each group is compared with the whole on one rank."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    h = head(dtype="float32")
    whole = gradients(h, dh_segments=8, **OPTIONS)
    d = logit_gradients(h)
    size = 1
    while size <= ranks:
        group = dist.new_group(range(size))
        width = VOCAB // size
        own = slice(rank * width, (rank + 1) * width)
        shard = columns(h, own.start, own.stop)
        if rank < size:
            how = {"process_group": group, "vocab_start": own.start, "vocab_size": VOCAB, **OPTIONS}
            for dh_segments in (1, 8):
                got = gradients(shard, dh_segments=dh_segments, **how)
                assert not differing(tuple(got[0]), tuple(whole[0]))
                assert not differing(got[2:], (whole[2][own].contiguous(), whole[3][own].contiguous()))
                share = rk.linear_input_grad(d[:, own].contiguous(), shard.weight)
                assert not differing(got[1], whole[1] if dh_segments == 8 else share)
            for terms in ({"z_loss": 0.1}, {"z_loss": 0.1, "label_smoothing": 0.2}):
                outcomes = []
                for of, told in ((shard, how), (h, OPTIONS)):
                    leaves = [t.clone().requires_grad_() for t in of[:2]]
                    loss = rk.linear_cross_entropy(*leaves, h.target, bias=of.bias, dh_segments=8, **terms, **told)
                    loss.backward()
                    dweight = leaves[1].grad if of is shard else leaves[1].grad[own].contiguous()
                    outcomes.append((loss.detach(), leaves[0].grad, dweight))
                assert not differing(*outcomes)
            total = torch.ones(width, 48)
            leaf = shard.weight.clone().requires_grad_()
            rk.linear_logprob(h.hidden, leaf, h.target, bias=shard.bias, main_grad=total, **how).sum().backward()
            every = torch.ones(VOCAB, 48)
            leaf = h.weight.clone().requires_grad_()
            rk.linear_logprob(h.hidden, leaf, h.target, bias=h.bias, main_grad=every, **OPTIONS).sum().backward()
            assert not differing(total, every[own].contiguous())
            # With temperatures per row, kept sets and a bad target, all ranks give the answer of the whole, and no rank
            # waits.
            rows = torch.linspace(0.5, 2.0, len(h.target))
            kept = torch.arange(0, 90, dtype=torch.int32), torch.arange(0, 91, 10)[: len(rows) + 1]
            bad = h.target.clone()
            bad[3] = VOCAB
            more = {"temperature": rows, "kept": kept, "softcap": None}
            got, want = (
                rk.linear_logprob(a.hidden, a.weight, bad, bias=a.bias, **ALL, **{**o, **more})
                for a, o in ((shard, how), (h, OPTIONS))
            )
            assert not differing(tuple(got), tuple(want))
            with pytest.raises(ValueError, match=r"row 3 \(the first of 1 bad rows\)"):
                rk.linear_logprob(*shard[:2], bad, check=True, **how)
            if size > 1:
                for changed, text in (
                    ({"vocab_start": (own.start + width) % VOCAB}, "vocab_start: expected rank"),
                    ({"vocab_size": None}, "vocab_size: expected the columns of all ranks"),
                ):
                    with pytest.raises(ValueError, match=text):
                        rk.linear_logprob(*shard[:2], h.target, **{**how, **changed})
                # All ranks refuse a vocabulary in which one rank has no columns, and no rank waits.
                start, stop = (min(8 * (i * 8 // size // 8), 8) for i in (rank, rank + 1))
                tiny = {"process_group": group, "vocab_start": start, "vocab_size": 8}
                with pytest.raises(ValueError, match=f"process_group: expected columns for each of {size} ranks"):
                    rk.linear_logprob(h.hidden, h.weight[start:stop], torch.zeros_like(h.target), **tiny)
        size *= 2
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_of_a_process_group_have_the_bits_of_one_rank() -> None:
    port = free_port()
    # One process imports torch, and the ranks are forks of that process.
    multiprocessing.set_forkserver_preload(["torch.distributed", "rl_kernel_native", "linear_logprob_cases", __name__])
    torch.multiprocessing.start_processes(on_a_rank, (8, port), nprocs=8, start_method="forkserver")


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dh_segments": ({"dh_segments": 4}, ValueError, "dh_segments: expected 1 or 8, got 4"),
    "dh_segments type": ({"dh_segments": 1.0}, TypeError, "dh_segments: expected an integer"),
    "no group": ({"vocab_size": 640}, ValueError, "process_group: expected the group whose ranks"),
    "vocab_size of less": ({"vocab_size": 8}, ValueError, r"vocab_size: expected at least \d+, vocab_start and the"),
    "start without group": ({"vocab_start": 40}, ValueError, "process_group: expected the group whose ranks"),
    "group type": ({"process_group": "world"}, TypeError, "process_group: expected a torch.distributed.ProcessGroup"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_shards_are_named(case: str) -> None:
    h = head()
    changed, error, text = BAD[case]
    with pytest.raises(error, match=text):
        rk.linear_logprob(*h[:2], h.target, **changed)


def test_a_shard_alone_has_no_gradient_and_whole_parts() -> None:
    h = head()
    own = columns(h, 0, 160)
    with pytest.raises(ValueError, match="linear_logprob_partial has no autograd"):
        rk.linear_logprob_partial(h.hidden.requires_grad_(), own.weight, h.target, vocab_start=0, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="expected a shard of whole parts"):
        rk.linear_logprob_partial(h.hidden.detach(), own.weight, h.target, vocab_start=20, vocab_size=VOCAB)
