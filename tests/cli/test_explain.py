import torch


SMALL_DENSE = "dense fp8 S=3 N=40 H=4 D=32"
SMALL_PAGED = "paged mxfp4 B=2 next_n=2 H=4 D=32 P=16 blocks=8 columns=3 L=48 clean=1"


def test_explain_gives_every_reason_and_who_can(run, more_backends):
    result = run("explain", SMALL_PAGED)
    assert result.exit_code == 0
    assert "choosy     H=4 is not 99" in result.stdout
    assert "reference  can run it" in result.stdout


def test_explain_finds_a_gpu_of_a_family(run, error_line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 3))
    assert "on cuda:0" in run("explain", SMALL_DENSE, "--device", "sm_100f").stdout
    result = run("explain", SMALL_DENSE, "--device", "sm_100a")
    assert "this machine has no GPU of capability 10.0" in error_line(result)


def test_explain_finds_the_gpu_of_an_architecture(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8 + index, 0))
    result = run("explain", SMALL_DENSE, "--device", "sm90a")
    assert "on cuda:1" in result.stdout
