"""The example of the package docstring runs as it stands, and is the one of the docs."""

import re
import textwrap
from pathlib import Path

import mqa.testing

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


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
