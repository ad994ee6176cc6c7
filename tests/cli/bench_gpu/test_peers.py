"""What a peer is asked for, and what is said where it can't be."""

import inspect
import types

import pytest
import torch

from mqa.cli.gpu import peers
from mqa.cli.gpu.inputs import draw
from mqa.cli.gpu.rows import Call


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


def test_a_missing_peer_says_why(monkeypatch):
    def fail(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(peers.importlib, "import_module", fail)
    peer = peers.find_peer()
    assert peer.settings() == {}
    with pytest.raises(peers.PeerMissing, match="cannot be imported: ImportError: No module"):
        peer.work(None, Call())
