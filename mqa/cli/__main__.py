"""`python -m mqa.cli` is `mqa`."""

from mqa.cli import main

main()
