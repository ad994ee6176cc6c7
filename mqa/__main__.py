"""`python -m mqa` is the command `mqa`."""

from mqa.cli import main

main()
