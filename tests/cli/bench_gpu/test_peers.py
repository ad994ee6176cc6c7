"""What a peer is asked for, and what is said where it can't be."""

import inspect
import types

import pytest
import torch

from mqa.cli.gpu import peers
from mqa.cli.gpu.inputs import draw
from mqa.cli.gpu.rows import Call
from mqa.cli.gpu.windows import batch


def _deep_gemm(*parameters):
    """A module whose function takes these beyond the first five, and records what it got."""
    module = types.SimpleNamespace(set_num_sms=lambda n: None, get_num_sms=lambda: 7)
    names = ("q", "kv", "weights", "ks", "ke", *parameters)
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def function(q, kv, weights, ks, ke, **options):
        module.got = (q, options)
        return kv[0].float()

    function.__signature__ = inspect.Signature([inspect.Parameter(n, plain) for n in names])
    return module, function


def test_peer_gets_the_options_that_it_knows(stand):
    module, function = _deep_gemm("clean_logits", "max_seqlen_k", "logits_dtype")
    module.fp8_fp4_mqa_logits = function
    peer = peers.DeepGemm(module)
    inputs = draw(stand.party(stand.SMALL), torch.Generator())
    peer.work(inputs, Call(logits="bfloat16"))()
    (values, scale), options = module.got
    assert values is inputs.q
    assert scale is None
    assert options == {
        "clean_logits": False,
        "max_seqlen_k": 0,
        "logits_dtype": torch.bfloat16,
    }
    assert peer.settings() == {"num_sms": 7}
    assert (peer.name, peer.version) == ("deep_gemm", None)


def test_older_peers_are_asked_for_what_they_have(stand):
    module, function = _deep_gemm("clean_logits")
    module.fp8_mqa_logits = function
    peer, inputs = peers.DeepGemm(module), draw(stand.party(stand.SMALL), torch.Generator())
    peer.work(inputs, Call())()
    assert module.got[0] is inputs.q
    assert module.got[1] == {"clean_logits": False}
    with pytest.raises(peers.PeerMissing, match="function has no logits_dtype"):
        peer.work(inputs, Call(logits="bfloat16"))
    with pytest.raises(peers.PeerMissing, match="has no fp8_fp4_mqa_logits or fp8_mqa_logits"):
        peers.DeepGemm(types.SimpleNamespace()).work(inputs, Call())


def _paged_deep_gemm(name):
    """A module with a paged function and its metadata, which record what they got."""
    module = types.SimpleNamespace(get_num_sms=lambda: 7, got={})

    def logits(
        q, kv_cache, weights, lens, table, cuts, max_context_len, *, clean_logits, indices=None
    ):
        module.got["logits"] = (q, kv_cache, weights, lens, table, cuts, max_context_len)
        module.got["options"] = clean_logits, indices
        return weights.sum(1)

    def metadata(lens, block_kv, num_sms, indices=None):
        module.got["metadata"] = (lens, block_kv, num_sms, indices)
        return torch.arange(num_sms + 1)

    setattr(module, name, logits)
    module.get_paged_mqa_logits_metadata = metadata
    return module


@pytest.mark.parametrize("name", ["fp8_fp4_paged_mqa_logits", "fp8_paged_mqa_logits"])
def test_paged_peer_makes_its_own_schedule_ahead(stand, name):
    module = _paged_deep_gemm(name)
    inputs = draw(stand.party(batch(2, 3, 130, 200)), torch.Generator())
    run = peers.DeepGemm(module).work(inputs, Call(schedule="fresh"))
    lens, *rest = module.got.pop("metadata")
    assert (lens.tolist(), rest) == ([[128, 129, 130]] * 2, [64, 7, None])
    run()
    q, cache, weights, lens, table, cuts, width = module.got["logits"]
    assert (q if name == "fp8_paged_mqa_logits" else q[0]) is inputs.q
    assert (cache, weights, table, width) == (inputs.k, inputs.w, inputs.table, 200)
    assert lens.shape == (2, 3)
    assert cuts.tolist() == list(range(8))
    assert module.got["options"] == (False, None)
    assert "metadata" not in module.got


def test_peers_that_cannot_page_say_so(stand):
    inputs = draw(stand.party(batch(2, 1, 9)), torch.Generator())
    module = _paged_deep_gemm("fp8_paged_mqa_logits")
    with pytest.raises(peers.PeerMissing, match="logits has no logits_dtype"):
        peers.DeepGemm(module).work(inputs, Call(logits="bfloat16"))
    del module.get_paged_mqa_logits_metadata
    with pytest.raises(peers.PeerMissing, match="has no get_paged_mqa_logits_metadata"):
        peers.DeepGemm(module).work(inputs, Call())


def test_a_missing_peer_says_why(monkeypatch):
    def fail(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(peers.importlib, "import_module", fail)
    peer = peers.find_peer()
    assert peer.settings() == {}
    with pytest.raises(peers.PeerMissing, match="cannot be imported: ImportError: No module"):
        peer.work(None, Call())
