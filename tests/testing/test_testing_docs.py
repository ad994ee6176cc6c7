"""The examples of the docs and of the package docstring run as they stand."""

import re
import textwrap
from pathlib import Path

import pytest

import mqa.testing

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_of_the_page_runs(block: str) -> None:
    exec(compile(block, str(PAGE), "exec"), {"__name__": "example"})


def docstring_example() -> str:
    _, _, rest = (mqa.testing.__doc__ or "").partition("\n\n")
    lines = [line for line in rest.splitlines() if line.startswith("    ") or not line]
    return textwrap.dedent("\n".join(lines))


def test_docstring_example_runs() -> None:
    exec(compile(docstring_example(), "mqa.testing", "exec"), {"__name__": "example"})


def test_docstring_example_is_the_page_s() -> None:
    def code(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.strip()]

    assert code(docstring_example()) in [code(block) for block in BLOCKS]


def test_everything_exported_exists_once() -> None:
    assert len(mqa.testing.__all__) == len(set(mqa.testing.__all__))
    for name in mqa.testing.__all__:
        assert hasattr(mqa.testing, name)
