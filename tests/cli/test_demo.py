import torch

from mqa.cli import workload

SMALL_DEMO = ("--rows", "8", "--tokens", "256", "--heads", "4", "--dims", "64", "--top-k", "16")


def test_demo_prints_its_tables_and_draws_a_png(run, tmp_path):
    result = run("demo", "--out", str(tmp_path / "new"), *SMALL_DEMO)
    assert result.exit_code == 0, result.output
    picture = tmp_path / "new" / "scores.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in picture.parent.iterdir()] == ["scores.png"]
    assert f"picture: {picture.resolve()}" in result.stdout
    assert "same bits as dense" in result.stdout
    for word in ("fp8", "mxfp8", "mxfp4", "recall@16", "reference"):
        assert word in result.stdout
    assert "\x1b" not in result.output


def test_demo_ends_with_1_where_paged_and_dense_differ(run, monkeypatch, tmp_path):
    monkeypatch.setattr("mqa.cli.demo._paged", lambda *_: torch.zeros(8, 256))
    monkeypatch.setattr("mqa.cli.demo.draw_scores", lambda *_: None)
    result = run("demo", "--out", str(tmp_path), *SMALL_DEMO)
    assert result.exit_code == 1
    assert "mxfp4: the paged call gave other bits" in result.stdout
    assert "same bits" not in result.stdout


def test_demo_pages_that_are_not_full_still_agree(run, monkeypatch, tmp_path):
    monkeypatch.setattr("mqa.cli.demo.draw_scores", lambda *_: None)
    sizes = ("--rows", "5", "--tokens", "201", "--heads", "3", "--dims", "32", "--top-k", "9")
    result = run("demo", "--out", str(tmp_path), *sizes)
    assert "same bits as dense" in result.stdout


def test_planted_tokens_are_what_float32_ranks_first():
    made = workload.make_workload(rows=16, tokens=512, heads=32, dims=64, seed=1)
    scores = workload.float32_scores(made)
    best = scores.argmax(dim=1)
    assert made.planted[torch.arange(16), best].all()
    assert torch.equal(scores == -torch.inf, made.outside)


def test_workload_depends_on_its_numbers_alone():
    one, same, other = (workload.make_workload(4, 128, 2, 32, seed) for seed in (3, 3, 4))
    assert torch.equal(one.q, same.q)
    assert torch.equal(one.k, same.k)
    assert not torch.equal(one.q, other.q)
