"""The list of backends: choice, reasons, names, the policy for falling back."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mqa
from mqa.problem import Problem, parse
from mqa.testing import assert_bitwise, make_case

module = importlib.import_module("mqa.backends")
LINE = "dense fp8 S=3 N=40 H=4 D=32"
CPU, GPU = torch.device("cpu"), torch.device("cuda")
BackendList = Callable[..., None]
SetEnv = Callable[[str, str], None]


class Picky:
    """Takes 64 heads on a GPU only; fills results with 7."""

    def __init__(self, name: str = "picky", *, by_default: bool = True, heads: int = 64) -> None:
        self.name, self.by_default, self.heads = name, by_default, heads

    def reasons_against(self, problem: Problem, device: torch.device) -> Iterator[str]:
        if device.type != "cuda" and self.heads == 64:
            yield f"needs a GPU, this is {device}"
        if self.heads != problem.H:
            yield f"H={problem.H}, takes {self.heads}"

    def unusable_here(self) -> str | None:
        return "needs a GPU of the future"

    def dense(self, _call: object, out: Tensor) -> None:
        out.fill_(7)

    def paged(self, _call: object, out: Tensor) -> None:
        out.fill_(8)

    def dense_metadata(self, *_: object) -> None:
        _[-1].fill_(9)

    def paged_metadata(self, *_: object) -> None:
        raise AssertionError("no schedule is asked of this backend")

    def schedules_on(self, device: torch.device) -> bool:
        return device.type == "cpu" and self.heads == 4

    def warmup(self, problem: Problem, _device: torch.device) -> tuple[str, ...]:
        return (f"picky_{problem.H}",)

    def warmup_schedules(self, _problem: Problem, _device: torch.device) -> tuple[str, ...]:
        return ("picky_schedules",)


def test_the_first_backend_without_reasons_is_chosen(backend_list: BackendList) -> None:
    backend_list(Picky(heads=4))
    assert (make_case(parse(LINE)).run() == 7).all()
    assert make_case(parse(LINE.replace("H=4", "H=5"))).run()[0, 0] != 7
    paged = "paged fp8 B=1 next_n=1 H=4 D=32 P=8 blocks=9 columns=2 L=9"
    assert (make_case(parse(paged)).run() == 8).all()
    assert mqa.warmup(4, 32, "fp8", device="cpu") == ("picky_4", "picky_schedules")


def test_a_backend_that_is_not_for_default_is_got_by_name(backend_list: BackendList) -> None:
    backend_list(Picky(heads=4, by_default=False))
    case = make_case(parse(LINE))
    assert (case.run() != 7).any()
    assert (case.run(backend="picky") == 7).all()
    text = module.explain(case.problem, CPU)
    assert "picky      can run it, only by name" in text
    assert "reference  can run it" in text


def test_a_named_backend_that_cannot_says_every_reason(backend_list: BackendList) -> None:
    backend_list(Picky())
    with pytest.raises(mqa.BackendUnavailableError) as caught:
        make_case(parse(LINE)).run(backend="picky")
    text = str(caught.value)
    assert text.startswith(f"backend 'picky' cannot run {LINE} on cpu")
    for line in ("needs a GPU, this is cpu", "H=4, takes 64", "reference  can run it"):
        assert line in text


def test_no_output_is_written_where_no_backend_can(backend_list: BackendList) -> None:
    backend_list(Picky())
    out = torch.full((3, 40), 5.0)
    with pytest.raises(mqa.BackendUnavailableError):
        make_case(parse(LINE)).run(backend="picky", out=out)
    assert (out == 5).all()


def test_none_able_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKENDS", (Picky(),))
    with pytest.raises(mqa.BackendUnavailableError, match="H=4, takes 64"):
        make_case(parse(LINE)).run()
    support = mqa.supports(4, 32, "fp8", device="cpu")
    assert not support
    assert support.backend is None


def test_supports_heeds_that_the_reference_is_forbidden_on_a_gpu(
    backend_list: BackendList, setenv: SetEnv
) -> None:
    backend_list(Picky())
    assert mqa.supports(4, 32, "fp8", device="cuda").backend == "reference"
    setenv("MQA_FALLBACK", "error")
    support = mqa.supports(4, 32, "fp8", device="cuda")
    assert not support
    assert support.reasons["reference"] == ("MQA_FALLBACK=error forbids it on cuda",)
    assert mqa.supports(4, 32, "fp8", device="cpu").backend == "reference"
    setenv("MQA_BACKEND", "reference")
    assert mqa.supports(4, 32, "fp8", device="cuda").backend == "reference"


def test_the_backend_that_is_asked_for_says_first_why_it_cannot(backend_list: BackendList) -> None:
    backend_list(Picky(), Picky("other"))
    order = ["other", "other", "picky", "picky", "reference"]
    with pytest.raises(mqa.BackendUnavailableError) as raised:
        make_case(parse(LINE)).run(backend="other")
    assert [line.split()[0] for line in str(raised.value).splitlines()[1:]] == order


def test_an_unknown_name_lists_the_known_ones(backend_list: BackendList, setenv: SetEnv) -> None:
    backend_list(Picky())
    case = make_case(parse(LINE))
    with pytest.raises(ValueError, match="backend='cuda', expected one of picky, reference"):
        case.run(backend="cuda")
    setenv("MQA_BACKEND", "typo")
    with pytest.raises(ValueError, match="MQA_BACKEND='typo', expected one of picky, reference"):
        case.run()


def test_the_environment_names_a_backend(backend_list: BackendList, setenv: SetEnv) -> None:
    backend_list(Picky(heads=4))
    setenv("MQA_BACKEND", "reference")
    case = make_case(parse(LINE))
    assert (case.run() != 7).any()
    assert (case.run(backend="picky") == 7).all()
    assert mqa.supports(4, 32, "fp8", device="cpu").backend == "reference"


def test_supports_says_who_and_why_not(backend_list: BackendList) -> None:
    backend_list(Picky(), Picky("small", heads=8))
    support = mqa.supports(32, 128, "mxfp4", page_size=64, device="cpu")
    assert support
    assert support.backend == "reference"
    assert support.reasons == {
        "picky": ("needs a GPU, this is cpu", "H=32, takes 64"),
        "small": ("H=32, takes 8",),
    }
    assert mqa.supports(8, 128, "fp8", device="cpu").backend == "small"
    assert mqa.supports(64, 128, "fp8", device="cuda").backend == "picky"


def test_the_first_backend_that_can_computes_schedules(backend_list: BackendList) -> None:
    rows = torch.zeros(3, dtype=torch.int32)
    backend_list(Picky(heads=4), Picky(heads=8))
    assert (mqa.get_mqa_logits_metadata(rows, rows, 40, 8) == 9).all()
    backend_list(Picky(heads=8))
    assert mqa.get_mqa_logits_metadata(rows, rows, 40, 8).tolist() == [[0, 0], [1, 0]]


def test_backends_lists_all_with_reasons(backend_list: BackendList) -> None:
    assert [status.name for status in mqa.backends()] == [
        "sm100",
        "sm90",
        "sm90-accurate",
        "portable",
        "reference",
        "sm100-emulated",
        "sm90-emulated",
        "sm90-accurate-emulated",
        "portable-emulated",
    ]
    backend_list(Picky())
    assert mqa.backends() == (
        mqa.BackendStatus("picky", False, "needs a GPU of the future"),
        mqa.BackendStatus("reference", True, ""),
    )


def test_the_choice_depends_on_facts_alone(backend_list: BackendList) -> None:
    backend_list(Picky(heads=4))
    for line in (LINE, "dense fp8 S=1 N=0 H=4 D=32", "dense fp8 S=99 N=9 H=4 D=32 seed=8"):
        assert module.choose(parse(line), CPU).name == "picky"


@pytest.fixture
def _forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_warned", set())


@pytest.mark.usefixtures("_forget_warnings")
def test_falling_back_on_a_gpu_warns_once_for_each_reason(backend_list: BackendList) -> None:
    backend_list(Picky())
    with pytest.warns(mqa.FallbackWarning, match="cuda: picky: H=4, takes 64"):
        assert module.choose(parse(LINE), GPU).name == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.choose(parse(LINE), GPU)
        module.choose(parse(LINE), CPU)
        module.choose(parse(LINE), GPU, "reference")
    with pytest.warns(mqa.FallbackWarning, match="H=5, takes 64") as caught:
        module.choose(parse(LINE.replace("H=4", "H=5")), GPU)
    assert caught[0].filename == __file__


@pytest.mark.usefixtures("_forget_warnings")
def test_falling_back_can_be_silent_or_an_error(setenv: SetEnv) -> None:
    setenv("MQA_FALLBACK", "silent")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.choose(parse(LINE), GPU)
    setenv("MQA_FALLBACK", "error")
    with pytest.raises(mqa.BackendUnavailableError, match="sm90: H=4 is not one of 8, 16"):
        module.choose(parse(LINE), GPU)
    assert module.choose(parse(LINE), CPU).name == "reference"
    assert module.choose(parse(LINE), GPU, "reference").name == "reference"


@pytest.mark.parametrize(
    ("name", "value", "use"),
    [
        ("MQA_FALLBACK", "maybe", lambda: mqa.config.fallback()),
        ("MQA_DEBUG", "yes", lambda: mqa.config.debug()),
        ("MQA_REFERENCE_BYTES", "64M", lambda: mqa.config.reference_bytes()),
        ("MQA_NVRTC_OPTIONS", 'a "b', lambda: mqa.config.nvrtc_options()),
        ("MQA_ARCH", "sm_100", lambda: mqa.config.arch()),
        ("MQA_REFERENCE_BYTES", "1000", lambda: mqa.config.reference_bytes()),
    ],
)
def test_a_wrong_setting_names_the_variable(
    name: str, value: str, use: Callable[[], Any], setenv: SetEnv
) -> None:
    setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name}='{value}', expected"):
        use()


def test_the_default_memory_bound() -> None:
    assert mqa.config.reference_bytes() == 64 << 20


def test_pdl_and_sms_are_settings_of_a_device() -> None:
    assert mqa.get_pdl("cpu") is False
    mqa.set_pdl(True, "cpu")
    assert mqa.get_pdl("cpu") is True
    mqa.set_pdl(False, "cpu")
    for wrong in (0, True, 2.0, None):
        with pytest.raises((TypeError, ValueError), match="num_sms"):
            mqa.set_num_sms(wrong, "cpu")
    with pytest.raises(TypeError, match="flag"):
        mqa.set_pdl(1, "cpu")


def test_importing_needs_no_gpu_and_no_optional_package() -> None:
    script = (
        "import sys\n"
        "for name in ('hypothesis', 'typer', 'rich', 'matplotlib', 'cuda'):\n"
        "    sys.modules[name] = None\n"
        "import mqa, mqa.testing\n"
        "assert callable(mqa.cuda.make_tma_descriptor)\n"
        "import torch; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_bits_are_those_of_the_named_reference() -> None:
    case = make_case(parse(LINE))
    assert_bitwise(case.run(), case.run(backend="reference"))
