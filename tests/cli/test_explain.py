import torch


SMALL_DENSE = "dense fp8 S=3 N=40 H=4 D=32"
SMALL_PAGED = "paged mxfp4 B=2 next_n=2 H=4 D=32 P=16 blocks=8 columns=3 L=48 clean=1"


def test_explain_gives_every_reason_and_who_can(run, more_backends):
    result = run("explain", SMALL_PAGED)
    assert result.exit_code == 0
    assert "choosy     H=4 is not 99" in result.stdout
    assert "reference  can run it" in result.stdout


def test_explain_finds_a_gpu_of_a_family(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 3))
    assert "on cuda:0" in run("explain", SMALL_DENSE, "--device", "sm_100f").stdout
    result = run("explain", SMALL_DENSE, "--device", "sm_100a")
    assert result.stdout.startswith(f"{SMALL_DENSE} on a GPU of compute capability 10.0\n")


def test_explain_knows_gpus_that_are_not_here(run):
    def told(device, problem):
        lines = run("explain", problem, "--device", device).stdout.splitlines()
        return {tuple(line.split(maxsplit=1)) for line in lines[1:]}

    a100 = told("sm80", "dense fp8 S=3 N=40 H=48 D=128")
    assert {("portable", "can run it"), ("reference", "can run it")} <= a100
    assert ("sm90", "needs compute capability 9.0") in a100
    assert ("sm90", "H=48 is not one of 8, 16, 32, 64, 128") in a100
    assert ("portable-emulated", "emulates on the CPU, this is cuda") in a100
    assert ("sm90", "can run it") in told("sm_90", "dense fp8 S=3 N=40 H=64 D=128")
    assert ("portable", "needs compute capability 8.0 or newer") in told("sm_75", SMALL_DENSE)
    gb10 = told("sm121", "dense bf16 S=3 N=40 H=64 D=96")
    assert ("portable", "D=96 is not one of 32, 64, 128") in gb10


def test_explain_finds_the_gpu_of_an_architecture(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8 + index, 0))
    result = run("explain", SMALL_DENSE, "--device", "sm90a")
    assert "on cuda:1" in result.stdout
